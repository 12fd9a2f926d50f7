// Attention sinks: one more logit a head without a value. Corrects the output and log-sum-exp of attention in
// place, and sums the gradient of the sinks. Log-sum-exp [h, t]; output rows [t, h c] with stride `apart`.
#include "../../cuda/rows.cuh"

constexpr int THREADS = 256; // same as in crates/ft-kernels/src/attention/sinks/mod.rs

// Blocks: 32 queries in x, heads in y; a lane computes the factor of a query, all lanes scale its row.
// o *= e^(lse - lse'), with lse' = ln(e^lse + e^sink).
template <typename T>
DEVICE void forward(const T *sinks, uint32_t tokens, uint32_t channels, uint32_t apart, T *o, float *lse) {
  const uint32_t first = blockIdx.x * WARP, h = blockIdx.y, own = first + threadIdx.x;
  const uint32_t last = tokens - first < WARP ? tokens - first : WARP;
  float factor = 1.0f;
  if (own < tokens) {
    float *sum = lse + static_cast<size_t>(h) * tokens + own;
    const float before = *sum, d = load(sinks + h) - before;
    factor = 1.0f / (1.0f + expf(d));
    *sum = before + (d > 0.0f ? d + log1pf(expf(-d)) : log1pf(expf(d)));
  }
  for (uint32_t q = 0; q < last; q++) {
    const float by = __shfl_sync(ALL, factor, q);
    T *row = o + static_cast<size_t>(first + q) * apart + h * channels;
    for (uint32_t i = threadIdx.x; i < channels; i += WARP) store(row + i, load(row + i) * by);
  }
}

// A block a head: grad = - sum over queries of e^(sink - lse') d_o . o.
template <typename T>
DEVICE void gradient(const T *sinks, const T *o, const T *d_o, const float *lse, uint32_t tokens, uint32_t heads,
                     uint32_t channels, uint32_t apart, float *grad) {
  SHARED_ARRAY(float, part, THREADS / WARP);
  const uint32_t h = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const float sink = load(sinks + h);
  float sum = 0.0f;
  for (uint32_t t = warp; t < tokens; t += THREADS / WARP) {
    const T *row = o + static_cast<size_t>(t) * apart + h * channels;
    const T *of_row = d_o + (static_cast<size_t>(t) * heads + h) * channels;
    float dot = 0.0f;
    for (uint32_t i = lane; i < channels; i += WARP) dot = fmaf(load(row + i), load(of_row + i), dot);
    sum -= expf(sink - lse[static_cast<size_t>(h) * tokens + t]) * warp_sum(dot);
  }
  if (lane == 0) part[warp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float all = 0.0f;
#pragma unroll
  for (int w = 0; w < THREADS / WARP; w++) all += part[w];
  grad[h] = all;
}

#define SINKS(NAME, T)                                                                                                 \
  KERNEL(sinks_forward_##NAME, WARP, const T *sinks, uint32_t tokens, uint32_t channels, uint32_t apart, T *o,         \
         float *lse) {                                                                                                 \
    forward(sinks, tokens, channels, apart, o, lse);                                                                   \
  }                                                                                                                    \
  KERNEL(sinks_gradient_##NAME, THREADS, const T *sinks, const T *o, const T *d_o, const float *lse, uint32_t tokens,  \
         uint32_t heads, uint32_t channels, uint32_t apart, float *grad) {                                             \
    gradient(sinks, o, d_o, lse, tokens, heads, channels, apart, grad);                                                \
  }

SINKS(f32, float)
SINKS(bf16, bf16)
SINKS(f16, f16)
