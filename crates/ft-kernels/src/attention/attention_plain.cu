// Attention without tensor cores, for f32 and for any head size. A warp handles one query (or one key,
// for dk and dv) and iterates over 32 partner tokens at a time. Lanes split the channels; each lane also
// holds the score of one partner. Arguments and results match attention_forward.cu and
// attention_backward.cu.
#include "attention.cuh"

constexpr int WARPS = THREADS / WARP;

// Dot product of two rows of n channels, by one warp.
template <typename T> DEVICE float dot(const T *x, const T *y, uint32_t n, int lane) {
  float sum = 0;
  for (uint32_t c = lane; c < n; c += WARP) sum = fmaf(load(x + c), load(y + c), sum);
  return warp_sum(sum);
}

// acc [n] = old acc + sum over `partners` of weight[i] rows[i]. The channels of a lane are fixed.
template <typename T>
DEVICE void add_rows(float *acc, float old, const float *weight, const T *rows, uint64_t stride, uint32_t partners,
                     uint32_t n, int lane) {
  for (uint32_t c = lane; c < n; c += WARP) {
    float sum = acc[c] * old;
#pragma unroll 8
    for (uint32_t i = 0; i < partners; i++) sum = fmaf(weight[i], load(rows + i * stride + c), sum);
    acc[c] = sum;
  }
}

template <typename Rows>
DEVICE void add_rows(float *acc, float old, const float *weight, const Rows &rows, uint32_t partners, uint32_t n,
                     int lane) {
  for (uint32_t c = lane; c < n; c += WARP) {
    float sum = acc[c] * old;
#pragma unroll 8
    for (uint32_t i = 0; i < partners; i++) sum = fmaf(weight[i], load(rows[i] + c), sum);
    acc[c] = sum;
  }
}

DEVICE void fill(float *acc, float x, uint32_t n, int lane) {
  for (uint32_t c = lane; c < n; c += WARP) acc[c] = x;
}

template <typename T> DEVICE void store_row(T *to, const float *acc, float factor, uint32_t n, int lane) {
  for (uint32_t c = lane; c < n; c += WARP) store(to + c, acc[c] * factor);
}

// Calls `work` for each token of the tile assigned to this warp, with the warp's `each` floats of shared
// memory.
template <typename Work> DEVICE void each_token(const Tile &tile, uint32_t each, const Work &work) {
  SHARED_BYTES(shared);
  const uint32_t warp = threadIdx.x / WARP;
  float *const own = reinterpret_cast<float *>(shared) + warp * each;
  for (uint32_t token = tile.first + warp; token < tile.first + tile.rows; token += WARPS) work(token, own);
}

template <typename T, typename Keys>
DEVICE void forward(const T *q, const Keys &k, const Keys &v, const Tile *tiles, const Shape &shape, T *o, float *lse) {
  const int lane = threadIdx.x % WARP;
  const uint32_t n = shape.channels;
  const Tile tile = tile_of(tiles, shape.heads);
  const uint32_t head = head_of(shape.heads);
  each_token(tile, n + WARP, [&](uint32_t query, float *acc) {
    float *const weight = acc + n;
    const uint64_t row = query - shape.first_query, at = (row * shape.heads + head) * n;
    float top = -INFINITY, sum = 0;
    fill(acc, 0.0f, n, lane);
    for (uint32_t j = shape.first_key(query, tile.begin); j <= query; j += WARP) {
      const uint32_t keys = least(WARP, query + 1 - j);
      const auto some_k = k.some(j, keys), some_v = v.some(j, keys);
      float s = -INFINITY;
      for (uint32_t i = 0; i < keys; i++) {
        const float x = dot(q + at, some_k[i], n, lane) * shape.scale;
        if (lane == static_cast<int>(i)) s = x;
      }
      const float x = fmaxf(top, warp_max(s)), old = expf(top - x), p = expf(s - x);
      sum = fmaf(sum, old, warp_sum(p)), top = x;
      weight[lane] = p;
      __syncwarp();
      add_rows(acc, old, weight, some_v, keys, n, lane);
      __syncwarp();
    }
    store_row(o + row * shape.apart + head * n, acc, 1.0f / sum, n, lane);
    if (lane == 0) lse[static_cast<uint64_t>(head) * shape.tokens + row] = top + logf(sum);
  });
}

template <typename T>
DEVICE void backward_q(const T *q, const T *k, const T *v, const T *o, const T *d_o, const float *lse,
                       const Tile *tiles, const Shape &shape, float *delta, T *dq) {
  const int lane = threadIdx.x % WARP;
  const uint32_t n = shape.channels;
  const Tile tile = tile_of(tiles, shape.heads);
  const uint32_t head = head_of(shape.heads), of = head / (shape.heads / shape.groups);
  const uint64_t ks = static_cast<uint64_t>(shape.groups) * n;
  each_token(tile, n + WARP, [&](uint32_t query, float *acc) {
    float *const weight = acc + n;
    const uint64_t row = query - shape.first_query, at = (row * shape.heads + head) * n;
    const uint64_t stat = static_cast<uint64_t>(head) * shape.tokens + row;
    const float base = lse[stat], dl = dot(o + row * shape.apart + head * n, d_o + at, n, lane);
    if (lane == 0) delta[stat] = dl;
    fill(acc, 0.0f, n, lane);
    for (uint32_t j = shape.first_key(query, tile.begin); j <= query; j += WARP) {
      const uint32_t keys = least(WARP, query + 1 - j);
      for (uint32_t i = 0; i < keys; i++) {
        const uint64_t key = (j + i) * ks + of * n;
        const float s = dot(q + at, k + key, n, lane), dp = dot(d_o + at, v + key, n, lane);
        if (lane == 0) weight[i] = expf(fmaf(s, shape.scale, -base)) * (dp - dl);
      }
      __syncwarp();
      add_rows(acc, 1.0f, weight, k + j * ks + of * n, ks, keys, n, lane);
      __syncwarp();
    }
    store_row(dq + at, acc, shape.scale, n, lane);
  });
}

template <typename T>
DEVICE void backward_kv(const T *q, const T *k, const T *v, const T *d_o, const float *lse, const float *delta,
                        const Tile *tiles, const Shape &shape, T *dk, T *dv) {
  const int lane = threadIdx.x % WARP;
  const uint32_t n = shape.channels;
  const Tile tile = tile_of(tiles, shape.groups);
  const uint32_t of = head_of(shape.groups), per = shape.heads / shape.groups;
  const uint64_t qs = static_cast<uint64_t>(shape.heads) * n;
  each_token(tile, 2 * (n + WARP), [&](uint32_t key, float *ak) {
    float *const av = ak + n, *const wk = av + n, *const wv = wk + WARP;
    const uint64_t at = (static_cast<uint64_t>(key) * shape.groups + of) * n;
    const uint32_t begin = most(key, shape.first_query), end = shape.last_query(key, tile.end);
    fill(ak, 0.0f, n, lane);
    fill(av, 0.0f, n, lane);
    for (uint32_t head = of * per; head < (of + 1) * per; head++)
      for (uint32_t j = begin; j < end; j += WARP) {
        const uint32_t queries = least(WARP, end - j);
        const uint64_t row = j - shape.first_query, from = row * qs + head * n;
        for (uint32_t i = 0; i < queries; i++) {
          const float s = dot(q + from + i * qs, k + at, n, lane), dp = dot(d_o + from + i * qs, v + at, n, lane);
          const uint64_t stat = static_cast<uint64_t>(head) * shape.tokens + row + i;
          if (lane == 0) {
            const float p = expf(fmaf(s, shape.scale, -lse[stat]));
            wv[i] = p, wk[i] = p * (dp - delta[stat]);
          }
        }
        __syncwarp();
        add_rows(av, 1.0f, wv, d_o + from, qs, queries, n, lane);
        add_rows(ak, 1.0f, wk, q + from, qs, queries, n, lane);
        __syncwarp();
      }
    store_row(dk + at, ak, shape.scale, n, lane);
    store_row(dv + static_cast<uint64_t>(key) * shape.apart + of * n, av, 1.0f, n, lane);
  });
}

// Eight blocks on a multiprocessor: by itself ptxas spills registers of the forward pass for a tenth one on 8.0.
#define PLAIN(T)                                                                                                       \
  KERNEL(attention_forward_##T, SIDE_BY_SIDE(8, THREADS), const T *q, const T *k, const T *v, const Tile *tiles,       \
         SHAPE, T *o, float *lse) {                                                                                    \
    const uint32_t of = head_of(heads) / (heads / groups) * channels, stride = groups * channels;                      \
    forward<T>(q, Whole<T>{k + of, stride}, Whole<T>{v + of, stride}, tiles, SHAPE_OF, o, lse);                        \
  }                                                                                                                    \
  KERNEL(attention_cached_##T, SIDE_BY_SIDE(8, THREADS), const T *q, const uint64_t *table, const Tile *tiles, SHAPE,  \
         T *o, float *lse) {                                                                                           \
    const uint32_t of = head_of(heads) / (heads / groups) * channels, stride = groups * channels;                      \
    forward<T>(q, Cached<T>{table, stride, of}, Cached<T>{table + 1, stride, of}, tiles, SHAPE_OF, o, lse);            \
  }                                                                                                                    \
  KERNEL(attention_backward_q_##T, THREADS, const T *q, const T *k, const T *v, const T *o, const T *d_o,              \
         const float *lse, const Tile *tiles, SHAPE, float *delta, T *dq) {                                            \
    backward_q<T>(q, k, v, o, d_o, lse, tiles, SHAPE_OF, delta, dq);                                                   \
  }                                                                                                                    \
  KERNEL(attention_backward_kv_##T, THREADS, const T *q, const T *k, const T *v, const T *d_o, const float *lse,       \
         const float *delta, const Tile *tiles, SHAPE, T *dk, T *dv) {                                                 \
    backward_kv<T>(q, k, v, d_o, lse, delta, tiles, SHAPE_OF, dk, dv);                                                 \
  }
using f32 = float;
PLAIN(f32)
PLAIN(bf16)
PLAIN(f16)
