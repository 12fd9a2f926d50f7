// Attention of a single query over a cache, for decoding. The keys are split into ranges of `each` keys,
// one per block. A block handles all query heads of a key head, so keys and values are read once
// ("Flash-Decoding", Dao et al., 2023). A second kernel combines the partial results in order. Sums are
// f32.
//
// In the score product 8 lanes share a key; in the value product a thread owns a channel. The head size
// is a multiple of the vector size.
#include "attention.cuh"

constexpr int WARPS = THREADS / WARP, LANES = 8, LINES = WARP / LANES;
// HEADS: query heads multiplied at a time with a key or value. PARTS: maximum number of key ranges.
constexpr uint32_t HEADS = 8, PARTS = 1024;

// Score rows have a pitch of `each` + 4.
#define SPLIT(T)                                                                                                       \
  const T *q, const uint64_t *table, uint32_t heads, uint32_t groups, uint32_t channels, uint32_t first, uint32_t end, \
      uint32_t each, float scale, float *sums, float2 *stats

template <typename T> DEVICE void split(SPLIT(T)) {
  constexpr int V = VECTOR<T>, LINE = LANES * V;
  SHARED_BYTES(shared);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, piece = lane % LANES;
  const uint32_t per = heads / groups, of = blockIdx.y, head0 = of * per, pieces = (channels + LINE - 1) / LINE,
                 pitch = each + 4;
  const uint32_t begin = first + blockIdx.x * each, count = least(each, end - begin), stride = groups * channels;
  const Parts<T> k = Cached<T>{table, stride, of * channels}.some(begin, count),
                 v = Cached<T>{table + 1, stride, of * channels}.some(begin, count);
  float *const queries = reinterpret_cast<float *>(shared), *const scores = queries + per * pieces * LINE;
  // groups of four values of a vector are stored LANES * 4 apart, so 8 lanes load without bank conflicts
  for (uint32_t i = threadIdx.x; i < per * pieces * LINE; i += THREADS) {
    const uint32_t h = i / (pieces * LINE), at = i % (pieces * LINE), four = at / (LANES * 4),
                   c = four / (V / 4) * LINE + at / 4 % LANES * V + four % (V / 4) * 4 + at % 4;
    const float x = c < channels ? load(q + static_cast<uint64_t>(head0 + h) * channels + c) * scale : 0.0f;
    store_4(queries + i, __float_as_uint(x));
  }
  __syncthreads();

  for (uint32_t j = warp * LINES; j < count; j += WARPS * LINES) {
    const uint32_t key = j + lane / LANES;
    const T *const row = k[least(key, count - 1)];
    for (uint32_t h0 = 0; h0 < per; h0 += HEADS) {
      float sum[HEADS] = {};
      for (uint32_t p = 0; p < pieces; p++) {
        const uint32_t c = p * LINE + piece * V;
        float x[V] = {};
        if (key < count && c < channels) load_vector(row + c, x);
#pragma unroll
        for (uint32_t h = 0; h < HEADS; h++) {
          if (h0 + h >= per) break;
#pragma unroll
          for (int f = 0; f < V / 4; f++) {
            float y[4];
            load_vector(queries + ((h0 + h) * pieces + p) * LINE + (f * LANES + piece) * 4, y);
#pragma unroll
            for (int i = 0; i < 4; i++) sum[h] = fmaf(x[4 * f + i], y[i], sum[h]);
          }
        }
      }
#pragma unroll
      for (uint32_t h = 0; h < HEADS; h++) {
        if (h0 + h >= per) break;
        float s = sum[h];
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) s += __shfl_xor_sync(ALL, s, step);
        if (piece == 0 && key < count) scores[(h0 + h) * pitch + key] = s;
      }
    }
  }
  __syncthreads();

  // softmax weights relative to this block's maximum, zero-padded to a multiple of four
  for (uint32_t h = warp; h < per; h += WARPS) {
    float *const own = scores + h * pitch;
    float top = -INFINITY, sum = 0;
    for (uint32_t i = lane; i < count; i += WARP) top = fmaxf(top, own[i]);
    top = warp_max(top);
    for (uint32_t i = lane; i < (count + 3) / 4 * 4; i += WARP) {
      const float x = i < count ? expf(own[i] - top) : 0.0f;
      store_4(own + i, __float_as_uint(x)), sum += x;
    }
    sum = warp_sum(sum);
    if (lane == 0)
      store_8(stats + static_cast<uint64_t>(head0 + h) * gridDim.x + blockIdx.x,
              make_uint2(__float_as_uint(top), __float_as_uint(sum)));
  }
  __syncthreads();

  for (uint32_t c = threadIdx.x; c < channels; c += THREADS) {
    for (uint32_t h0 = 0; h0 < per; h0 += HEADS) {
      float sum[HEADS] = {};
#pragma unroll 2
      for (uint32_t j = 0; j < count; j += 4) {
        float x[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) x[i] = j + i < count ? load(v[j + i] + c) : 0.0f;
#pragma unroll
        for (uint32_t h = 0; h < HEADS; h++) {
          if (h0 + h >= per) break;
          float weight[4];
          load_vector(scores + (h0 + h) * pitch + j, weight);
#pragma unroll
          for (int i = 0; i < 4; i++) sum[h] = fmaf(weight[i], x[i], sum[h]);
        }
      }
#pragma unroll
      for (uint32_t h = 0; h < HEADS; h++)
        if (h0 + h < per)
          sums[(static_cast<uint64_t>(head0 + h0 + h) * gridDim.x + blockIdx.x) * channels + c] = sum[h];
    }
  }
}

// Combines the `parts` partial results of one head per block.
template <typename T>
DEVICE void join(const float *sums, const float2 *stats, uint32_t parts, uint32_t channels, T *o, float *lse) {
  SHARED_ARRAY(float, factor, PARTS);
  SHARED_ARRAY(float, scratch, WARPS);
  const uint64_t at = static_cast<uint64_t>(blockIdx.x) * parts;
  float top = -INFINITY, sum = 0;
  for (uint32_t i = threadIdx.x; i < parts; i += THREADS) top = fmaxf(top, __uint_as_float(load_8(stats + at + i).x));
  top = block_max<THREADS>(top, scratch);
  for (uint32_t i = threadIdx.x; i < parts; i += THREADS) {
    const uint2 s = load_8(stats + at + i);
    const float f = expf(__uint_as_float(s.x) - top);
    factor[i] = f, sum = fmaf(f, __uint_as_float(s.y), sum);
  }
  sum = block_sum<THREADS>(sum, scratch);
  for (uint32_t c = threadIdx.x; c < channels; c += THREADS) {
    float x = 0;
#pragma unroll 4
    for (uint32_t i = 0; i < parts; i++) x = fmaf(factor[i], sums[(at + i) * channels + c], x);
    store(o + static_cast<uint64_t>(blockIdx.x) * channels + c, x / sum);
  }
  if (threadIdx.x == 0) lse[blockIdx.x] = top + logf(sum);
}

#define ONE_QUERY(T, NAME)                                                                                             \
  KERNEL(attention_split_##NAME, THREADS, SPLIT(T)) {                                                                  \
    split<T>(q, table, heads, groups, channels, first, end, each, scale, sums, stats);                                 \
  }                                                                                                                    \
  KERNEL(attention_join_##NAME, THREADS, const float *sums, const float2 *stats, uint32_t parts, uint32_t channels,    \
         T *o, float *lse) {                                                                                           \
    join<T>(sums, stats, parts, channels, o, lse);                                                                     \
  }

ONE_QUERY(float, f32)
ONE_QUERY(bf16, bf16)
ONE_QUERY(f16, f16)
