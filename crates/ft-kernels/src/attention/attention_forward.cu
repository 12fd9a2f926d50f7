// Attention forward pass on tensor cores, for heads of at most D channels. A block of four warps handles 64 queries of
// one head, 16 per warp, and iterates over visible keys, 64 (or 32) at a time, with a running maximum and sum (Dao et
// al., "FlashAttention-2", 2023). Scores and probabilities are f32 in registers; probabilities are rounded only for the
// product with V. Copies of K overlap with the softmax, copies of V with the scores.
#include "attention.cuh"

//
// With M = 2, two warps have 32 queries each: a fragment of keys or values feeds twice as many products, where shared
// memory is the bound (8.0, 9.0). Results have the same bits.
template <typename T, int D, int M, typename Keys>
DEVICE void forward(const T *q, const Keys &k, const Keys &v, const Tile *tiles, const Shape &shape, T *o, float *lse) {
  constexpr int KEYS = M * D <= 128 ? 64 : 32, BY = THREADS / M, H = 16 * M; // H: queries of a warp
  constexpr int R = ROWS / SHARE<D>, W = D / SHARE<D>; // queries of a block, channels of a warp's sums
  SHARED_BYTES(shared);
  unsigned char *const sq = shared, *const sk = sq + R * D * 2, *const sv = sk + KEYS * D * 2;
  Tile tile = tile_of(tiles, shape.heads);
  if (!narrow<R>(tile)) return;
  const uint32_t head = head_of(shape.heads), c = shape.channels;
  const int lane = threadIdx.x % WARP, number = threadIdx.x / WARP;
  const int warp = SHARE<D> == 1 ? number : number % (R / H), col = SHARE<D> == 1 ? 0 : number / (R / H) * W;
  const uint32_t qs = shape.heads * c;
  const uint32_t begin = shape.first_key(tile.first, tile.begin), end = tile.first + tile.rows;
  const uint32_t row0 = tile.first - shape.first_query; // row within q
  // warps without rows only copy
  const bool works = warp * H < static_cast<int>(tile.rows);
  const float scale_log2 = shape.scale * LOG2E;

  copy_rows<D, R, BY>(sq, q + static_cast<uint64_t>(row0) * qs + head * c, tile.rows, qs, c);
  copy_rows<D, KEYS, BY>(sk, k.some(begin, least(KEYS, end - begin)), end - begin, c);
  cp_async_commit();

  float acc[M][W / 8][4] = {};
  float top[M][2], sum[M][2] = {}; // per lane: two rows of each 16, partial sums
#pragma unroll
  for (int m = 0; m < M; m++) top[m][0] = top[m][1] = -INFINITY;
  constexpr bool HELD = D <= 128 && M == 1; // whether the queries of a warp stay in registers
  uint32_t fq[HELD ? D / 16 : 1][4];
  const Corner<D> of_q = left<D>(warp * H, 0, lane), of_k = right_transposed<D>(0, 0, lane);
  for (uint32_t j = begin; j < end; j += KEYS) {
    copy_rows<D, KEYS, BY>(sv, v.some(j, least(KEYS, end - j)), end - j, c);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    float p[M][KEYS / 8][4] = {};
    if (works) {
      if constexpr (HELD) {
        if (j == begin)
#pragma unroll
          for (int s = 0; s < D; s += 16) load(fq[s / 16], sq, of_q, 0, s);
#pragma unroll
        for (int s = 0; s < D; s += 16)
#pragma unroll
          for (int n = 0; n < KEYS; n += 16) {
            uint32_t fk[4];
            load(fk, sk, of_k, n, s);
            mma<T>(p[0][n / 8], fq[s / 16], fk[0], fk[1]);
            mma<T>(p[0][n / 8 + 1], fq[s / 16], fk[2], fk[3]);
          }
      } else {
        product<T, D, KEYS, M>(p, sq, warp * H, sk, lane);
      }
    }
    __syncthreads();
    if (j + KEYS < end) copy_rows<D, KEYS, BY>(sk, k.some(j + KEYS, least(KEYS, end - j - KEYS)), end - j - KEYS, c);
    cp_async_commit();
    if (works) {
      // mask, unless every row sees all of these keys
      if (j + KEYS > tile.first || tile.first + R - j > shape.window) {
        const uint32_t query = tile.first + warp * H + lane / 4, key = j + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
          for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
              if (!shape.sees(query + m * 16 + i / 2 * 8, key + n * 8 + i % 2)) p[m][n][i] = -INFINITY;
      }
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          float x = top[m][r];
#pragma unroll
          for (int n = 0; n < KEYS / 8; n++) x = fmaxf(x, fmaxf(p[m][n][2 * r], p[m][n][2 * r + 1]));
          x = fmaxf(x, __shfl_xor_sync(ALL, x, 1));
          x = fmaxf(x, __shfl_xor_sync(ALL, x, 2));
          // no visible key yet: every term is exp2(-inf)
          const float base = x == -INFINITY ? 0.0f : x * scale_log2,
                      old = exp2_fast(fmaf(top[m][r], scale_log2, -base));
          float add = 0;
#pragma unroll
          for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++) add += p[m][n][i] = exp2_fast(fmaf(p[m][n][i], scale_log2, -base));
          sum[m][r] = fmaf(sum[m][r], old, add);
          top[m][r] = x;
#pragma unroll
          for (int n = 0; n < W / 8; n++) acc[m][n][2 * r] *= old, acc[m][n][2 * r + 1] *= old;
        }
    }
    cp_async_wait<1>();
    __syncthreads();
    if (works) add_product<T, D, W, KEYS, M>(acc, p, sv, col, lane);
    __syncthreads();
  }
  if (!works) return;
  T *const to = o + static_cast<uint64_t>(row0) * shape.apart + head * c + col;
#pragma unroll
  for (int m = 0; m < M; m++) {
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float s = sum[m][r];
      s += __shfl_xor_sync(ALL, s, 1);
      s += __shfl_xor_sync(ALL, s, 2);
      inverse[r] = 1.0f / s;
      const uint32_t row = warp * H + m * 16 + lane / 4 + r * 8;
      if (col == 0 && lane % 4 == 0 && row < tile.rows)
        lse[static_cast<uint64_t>(head) * shape.tokens + row0 + row] = fmaf(top[m][r], shape.scale, logf(s));
    }
    store_rows<T, W>(to, acc[m], inverse, sq + R * col * 2, tile.rows, c - col, shape.apart, warp * M + m, lane);
  }
}

// Two blocks on a multiprocessor: for a third one, a kernel of 96 channels would spill.
constexpr int BESIDE(int channels) { return channels == 96 ? 2 : 1; }

#define FORWARD(NAME, T, D, M)                                                                                         \
  KERNEL(attention_forward_##NAME##_##D, SIDE_BY_SIDE(BESIDE(D), THREADS / M), const T *q, const T *k, const T *v,     \
         const Tile *tiles, SHAPE, T *o, float *lse) {                                                                 \
    const uint32_t of = head_of(heads) / (heads / groups) * channels, stride = groups * channels;                      \
    forward<T, D, M>(q, Whole<T>{k + of, stride}, Whole<T>{v + of, stride}, tiles, SHAPE_OF, o, lse);                  \
  }                                                                                                                    \
  KERNEL(attention_cached_##NAME##_##D, SIDE_BY_SIDE(BESIDE(D), THREADS / M), const T *q, const uint64_t *table,       \
         const Tile *tiles, SHAPE, T *o, float *lse) {                                                                 \
    const uint32_t of = head_of(heads) / (heads / groups) * channels, stride = groups * channels;                      \
    forward<T, D, M>(q, Cached<T>{table, stride, of}, Cached<T>{table + 1, stride, of}, tiles, SHAPE_OF, o, lse);      \
  }
#define FORWARDS(D) FORWARD(bf16, bf16, D, 1) FORWARD(f16, f16, D, 1)
#define PAIRS(D) FORWARD(pair_bf16, bf16, D, 2) FORWARD(pair_f16, f16, D, 2)
FORWARDS(64)
FORWARDS(96)
FORWARDS(128)
FORWARDS(192)
FORWARDS(256)
FORWARDS(512)
PAIRS(64)
PAIRS(96)
PAIRS(128)
