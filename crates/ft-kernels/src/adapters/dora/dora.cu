// Elementwise parts and row norms of DoRA: see mod.rs.
#include "../../cuda/rows.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;

// One warp per row of W: n = sqrt(|w|^2 + 2 s w.(BA) + s^2 |BA|^2), with w.(BA) = times . b and |BA|^2 = b^T
// gram b. Writes m / n and 1 / n for a magnitude m, or n without one.
template <typename T>
DEVICE void norms(const T *times, const T *b, const float *gram, const float *squares, const float *magnitude,
                  float scale, uint64_t rows, uint32_t rank, float *factor, float *inverse) {
  const unsigned lane = threadIdx.x % WARP;
  const uint64_t row = static_cast<uint64_t>(blockIdx.x) * WARPS + threadIdx.x / WARP;
  if (row >= rows) return; // whole warp
  const T *own = b + row * rank, *cross = times + row * rank;
  float sum = 0.0f;
  for (uint32_t first = 0; first < rank; first += WARP) {
    const uint32_t i = first + lane;
    float of_gram = 0.0f;
    // 32 values of b at a time, one per lane
    for (uint32_t begin = 0; begin < rank; begin += WARP) {
      const float held = begin + lane < rank ? load(own + begin + lane) : 0.0f;
      for (uint32_t k = 0; k < WARP && begin + k < rank; k++) {
        const float x = __shfl_sync(ALL, held, k);
        if (i < rank) of_gram = fmaf(gram[static_cast<uint64_t>(begin + k) * rank + i], x, of_gram);
      }
    }
    if (i < rank) sum = fmaf(load(own + i), fmaf(scale * scale, of_gram, 2.0f * scale * load(cross + i)), sum);
  }
  sum = warp_sum(sum);
  if (lane != 0) return;
  const float square = squares[row] + sum;
  // NaN on overflow: an infinite norm would silently zero the outputs of the row
  const float norm = sqrtf(square + square * 0.0f);
  if (magnitude == nullptr) {
    factor[row] = norm;
    inverse[row] = 0.0f;
    return;
  }
  factor[row] = magnitude[row] * (1.0f / norm);
  inverse[row] = 1.0f / norm;
}

// y = k (g + add) x [+ other - k base], one block per row.
template <typename T>
DEVICE void scale(const T *x, const float *g, float add, float k, const T *other, const T *base, uint64_t width, T *y) {
  const uint64_t at = blockIdx.x * width;
  uint64_t done = 0;
  const bool all = other != nullptr;
  if (is_aligned(x + at) && is_aligned(y + at) && is_aligned(g) &&
      (!all || (is_aligned(other + at) && is_aligned(base + at)))) {
    constexpr int N = 4; // one vector of g
    for (uint64_t i = threadIdx.x; i < width / N; i += THREADS) {
      const uint64_t c = i * N;
      float v[N], u[N], w[N], f[N];
      get(x + at + c, v), get(g + c, f);
      if (all) get(other + at + c, u), get(base + at + c, w);
#pragma unroll
      for (int j = 0; j < N; j++) {
        v[j] *= k * (f[j] + add);
        if (all) v[j] = v[j] + u[j] - k * w[j];
      }
      put(y + at + c, v);
    }
    done = width / N * N;
  }
  for (uint64_t c = done + threadIdx.x; c < width; c += THREADS) {
    float v = load(x + at + c) * (k * (g[c] + add));
    if (all) v = v + load(other + at + c) - k * load(base + at + c);
    store(y + at + c, v);
  }
}

// grad[c] = inverse[c] * sum of dy[.., c] z[.., c], or += with `also`.
template <typename T>
DEVICE void sum(const T *dy, const T *z, const float *inverse, uint64_t rows, uint64_t width, float *grad, bool also) {
  column_sums<WARPS>(
      rows, width, grad, also, [&](float own, uint64_t at) { return fmaf(load(dy + at), load(z + at), own); },
      [&](uint64_t column) { return inverse[column]; });
}

#define DORA(T)                                                                                                        \
  KERNEL(dora_norms_##T, THREADS, const T *times, const T *b, const float *gram, const float *squares,                 \
         const float *magnitude, float factor, uint64_t rows, uint32_t rank, float *first, float *second) {            \
    norms(times, b, gram, squares, magnitude, factor, rows, rank, first, second);                                      \
  }                                                                                                                    \
  KERNEL(dora_scale_##T, THREADS, const T *x, const float *g, float add, float k, const T *other, const T *base,       \
         uint64_t rows, uint64_t width, T *y) {                                                                        \
    scale(x, g, add, k, other, base, width, y);                                                                        \
  }                                                                                                                    \
  KERNEL(dora_sum_##T, THREADS, const T *dy, const T *z, const float *inverse, uint64_t rows, uint64_t width,          \
         float *grad, uint32_t also) {                                                                                 \
    sum(dy, z, inverse, rows, width, grad, also != 0);                                                                 \
  }

using f32 = float;
DORA(f32)
DORA(bf16)
DORA(f16)
