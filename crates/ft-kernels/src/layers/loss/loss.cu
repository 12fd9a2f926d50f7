// Cross-entropy of rows of logits in f32, one block per row: online softmax, then the gradient of scale *
// weight * loss, in place or in another dtype. Reads logits at most twice and writes once: 12 bytes per logit in
// place, 10 with a half-precision gradient, 4 without a gradient.
#include "../../cuda/rows.cuh"

constexpr int THREADS = 512; // same as in crates/ft-kernels/src/layers/loss/cuda.rs

// State of the online softmax: maximum and sum of exp(x - maximum).
struct Seen {
  float most, sum;
  template <int V> DEVICE void add(const float (&x)[V]) {
    float m = most;
#pragma unroll
    for (int i = 0; i < V; i++) m = x[i] > m ? x[i] : m;
    float s = 0.0f;
#pragma unroll
    for (int i = 0; i < V; i++) s += expf(x[i] - m);
    sum = sum * expf(most - m) + s;
    most = m;
  }
  DEVICE void add(float other_most, float other_sum) {
    const float m = other_most > most ? other_most : most;
    sum = sum * expf(most - m) + other_sum * expf(other_most - m);
    most = m;
  }
};

// Initial maximum: finite, so that logits of minus infinity add 0.
constexpr float LOWEST = -3.402823466e38f;

template <int V> DEVICE Seen look(const float *row, uint32_t columns) {
  Seen seen = {LOWEST, 0.0f};
#pragma unroll 2
  for (uint32_t i = threadIdx.x * V; i < columns; i += THREADS * V) {
    float x[V];
    get(row + i, x);
    seen.add(x);
  }
  return seen;
}

template <typename T, int V>
DEVICE void gradient(const float *row, T *out, uint32_t columns, uint32_t target, float most, float factor, float scale) {
#pragma unroll 2
  for (uint32_t i = threadIdx.x * V; i < columns; i += THREADS * V) {
    float x[V];
    get(row + i, x);
#pragma unroll
    for (int j = 0; j < V; j++) x[j] = expf(x[j] - most) * factor - (i + j == target ? scale : 0.0f);
    put(out + i, x);
  }
}

// `out` may alias the logits; null without a gradient. `weights` is null for weights of 1.
template <typename T>
DEVICE void cross_entropy(const float *logits, const uint32_t *targets, const float *weights, float *losses, T *out,
                          uint32_t columns, float scale) {
  SHARED_ARRAY(float, scratch, 2 * (THREADS / WARP));
  const size_t at = static_cast<size_t>(blockIdx.x) * columns;
  const float *const row = logits + at;
  const bool vectors = columns % 4 == 0 && is_aligned(logits);
  const uint32_t target = targets[blockIdx.x];
  // a target outside the vocabulary gives a NaN loss
  const float picked = target < columns ? row[target] : NAN;
  Seen seen = vectors ? look<4>(row, columns) : look<1>(row, columns);
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) {
    const float most = __shfl_xor_sync(ALL, seen.most, step), sum = __shfl_xor_sync(ALL, seen.sum, step);
    seen.add(most, sum);
  }
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = seen.most, scratch[(THREADS + threadIdx.x) / WARP] = seen.sum;
  // also orders the read of the target's logit before any write
  __syncthreads();
  seen = {LOWEST, 0.0f};
#pragma unroll
  for (int w = 0; w < THREADS / WARP; w++) seen.add(scratch[w], scratch[THREADS / WARP + w]);
  if (threadIdx.x == 0) losses[blockIdx.x] = seen.most + logf(seen.sum) - picked;
  if (out == nullptr) return;
  if (weights != nullptr) scale *= weights[blockIdx.x];
  const float factor = scale / seen.sum;
  // one vector of logits, half a vector of a half-precision gradient
  if (vectors && is_aligned(out)) gradient<T, 4>(row, out + at, columns, target, seen.most, factor, scale);
  else gradient<T, 1>(row, out + at, columns, target, seen.most, factor, scale);
}

// One kernel per dtype of the gradient.
#define LOSS(NAME, T)                                                                                                  \
  KERNEL(loss_##NAME, THREADS, const float *logits, const uint32_t *targets, const float *weights, float *losses,      \
         T *out, uint32_t columns, float scale) {                                                                      \
    cross_entropy(logits, targets, weights, losses, out, columns, scale);                                              \
  }

LOSS(f32, float)
LOSS(bf16, bf16)
LOSS(f16, f16)
