// Cross-entropy of rows of logits in f32, one block per row: online softmax, then the gradient of scale *
// weight * loss, in place or in another dtype. Reads logits at most twice and writes once: 12 bytes per logit in
// place, 10 with a half-precision gradient, 4 without a gradient. Distillation has the same traffic, and the
// divergence from a teacher's kept probabilities as a second loss. Logits can have a limit, cap tanh(x / cap).
#include "../../cuda/rows.cuh"

constexpr int THREADS = 512; // same as in crates/ft-kernels/src/layers/loss/cuda.rs

// Limit of the logits; a cap of 0 is none.
struct Limit {
  float cap, inverse;
  DEVICE explicit Limit(float cap) : cap(cap), inverse(1.0f / cap) {}
  DEVICE float of(float x) const { return cap > 0.0f ? cap * tanhf(x * inverse) : x; }
  // Derivative at the limited logit y.
  DEVICE float slope(float y) const { return cap > 0.0f ? 1.0f - (y * inverse) * (y * inverse) : 1.0f; }
  template <int V> DEVICE void get(const float *p, float (&x)[V]) const {
    ::get(p, x);
#pragma unroll
    for (int i = 0; i < V; i++) x[i] = of(x[i]);
  }
};

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

template <int V> DEVICE Seen look(const float *row, uint32_t columns, const Limit &limit) {
  Seen seen = {LOWEST, 0.0f};
#pragma unroll 2
  for (uint32_t i = threadIdx.x * V; i < columns; i += THREADS * V) {
    float x[V];
    limit.get(row + i, x);
    seen.add(x);
  }
  return seen;
}

template <typename T, int V>
DEVICE void gradient(const float *row, T *out, uint32_t columns, uint32_t target, float most, float factor, float scale,
                     const Limit &limit) {
#pragma unroll 2
  for (uint32_t i = threadIdx.x * V; i < columns; i += THREADS * V) {
    float x[V];
    limit.get(row + i, x);
#pragma unroll
    for (int j = 0; j < V; j++)
      x[j] = (expf(x[j] - most) * factor - (i + j == target ? scale : 0.0f)) * limit.slope(x[j]);
    put(out + i, x);
  }
}

// `out` may alias the logits; null without a gradient. `weights` is null for weights of 1.
template <typename T>
DEVICE void cross_entropy(const float *logits, const uint32_t *targets, const float *weights, float *losses, T *out,
                          uint32_t columns, float scale, const Limit &limit) {
  SHARED_ARRAY(float, scratch, 2 * (THREADS / WARP));
  const size_t at = static_cast<size_t>(blockIdx.x) * columns;
  const float *const row = logits + at;
  const bool vectors = columns % 4 == 0 && is_aligned(logits);
  const uint32_t target = targets[blockIdx.x];
  // a target outside the vocabulary gives a NaN loss
  const float picked = target < columns ? limit.of(row[target]) : NAN;
  Seen seen = vectors ? look<4>(row, columns, limit) : look<1>(row, columns, limit);
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) {
    const float most = __shfl_xor_sync(ALL, seen.most, step), sum = __shfl_xor_sync(ALL, seen.sum, step);
    seen.add(most, sum);
  }
  if (threadIdx.x % WARP == 0)
    scratch[threadIdx.x / WARP] = seen.most, scratch[(THREADS + threadIdx.x) / WARP] = seen.sum;
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
  if (vectors && is_aligned(out)) gradient<T, 4>(row, out + at, columns, target, seen.most, factor, scale, limit);
  else gradient<T, 1>(row, out + at, columns, target, seen.most, factor, scale, limit);
}

// One kernel per dtype of the gradient.
#define LOSS(NAME, T)                                                                                                  \
  KERNEL(loss_##NAME, THREADS, const float *logits, const uint32_t *targets, const float *weights, float *losses,      \
         T *out, uint32_t columns, float scale, float cap) {                                                           \
    cross_entropy(logits, targets, weights, losses, out, columns, scale, Limit(cap));                                  \
  }

LOSS(f32, float)
LOSS(bf16, bf16)
LOSS(f16, f16)

// State of the online softmax of x and of x * inverse: their maxima are at the same place.
struct SeenBoth {
  float most, sum, soft;
  DEVICE void add(const SeenBoth &other, float inverse) {
    const float m = other.most > most ? other.most : most;
    sum = sum * expf(most - m) + other.sum * expf(other.most - m);
    soft = soft * expf((most - m) * inverse) + other.soft * expf((other.most - m) * inverse);
    most = m;
  }
};

template <int V> DEVICE SeenBoth look_both(const float *row, uint32_t columns, float inverse, const Limit &limit) {
  SeenBoth seen = {LOWEST, 0.0f, 0.0f};
#pragma unroll 2
  for (uint32_t i = threadIdx.x * V; i < columns; i += THREADS * V) {
    float x[V];
    limit.get(row + i, x);
    SeenBoth part = {x[0], 0.0f, 0.0f};
#pragma unroll
    for (int j = 1; j < V; j++) part.most = x[j] > part.most ? x[j] : part.most;
    part.most = part.most > LOWEST ? part.most : LOWEST;
#pragma unroll
    for (int j = 0; j < V; j++) part.sum += expf(x[j] - part.most), part.soft += expf((x[j] - part.most) * inverse);
    seen.add(part, inverse);
  }
  return seen;
}

// Factors of exp(x - most) and exp((x - most) * inverse) in the gradient.
struct Factors {
  float most, inverse, hard, soft;
  DEVICE float of(float x) const { return expf(x - most) * hard + expf((x - most) * inverse) * soft; }
};

template <typename T, int V>
DEVICE void gradient_both(const float *row, T *out, uint32_t columns, uint32_t target, const Factors &by, float hard,
                          const Limit &limit) {
#pragma unroll 2
  for (uint32_t i = threadIdx.x * V; i < columns; i += THREADS * V) {
    float x[V];
    limit.get(row + i, x);
#pragma unroll
    for (int j = 0; j < V; j++) x[j] = (by.of(x[j]) - (i + j == target ? hard : 0.0f)) * limit.slope(x[j]);
    put(out + i, x);
  }
}

// Gradient of hard * cross-entropy + tempered / temperature^2 * divergence, times the weight. Of the row's teacher,
// each thread has one token; tokens of probability 0 are not read.
template <typename T>
DEVICE void distill(const float *logits, const uint32_t *targets, const uint32_t *ids, const float *probs,
                    const float *weights, float *losses, float *divergences, T *out, uint32_t columns, uint32_t kept,
                    float temperature, float hard, float tempered, const Limit &limit) {
  constexpr int WARPS = THREADS / WARP;
  SHARED_ARRAY(float, scratch, 5 * WARPS);
  const size_t at = static_cast<size_t>(blockIdx.x) * columns,
               own = static_cast<size_t>(blockIdx.x) * kept + threadIdx.x;
  const float *const row = logits + at, inverse = 1.0f / temperature;
  const bool vectors = columns % 4 == 0 && is_aligned(logits);
  const uint32_t target = targets[blockIdx.x];
  const float picked = target < columns ? limit.of(row[target]) : NAN;
  const float p = threadIdx.x < kept ? probs[own] : 0.0f;
  const uint32_t id = p > 0.0f ? ids[own] : columns;
  // a token outside the vocabulary gives a NaN divergence
  const float x = id < columns ? limit.of(row[id]) : p > 0.0f ? NAN : 0.0f;
  SeenBoth seen = vectors ? look_both<4>(row, columns, inverse, limit) : look_both<1>(row, columns, inverse, limit);
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2)
    seen.add({__shfl_xor_sync(ALL, seen.most, step), __shfl_xor_sync(ALL, seen.sum, step),
              __shfl_xor_sync(ALL, seen.soft, step)},
             inverse);
  if (threadIdx.x % WARP == 0) {
    float *const to = scratch + threadIdx.x / WARP;
    to[0] = seen.most, to[WARPS] = seen.sum, to[2 * WARPS] = seen.soft;
  }
  // also orders the reads of the target's and the teacher's logits before any write
  __syncthreads();
  seen = {LOWEST, 0.0f, 0.0f};
#pragma unroll
  for (int w = 0; w < WARPS; w++) seen.add({scratch[w], scratch[WARPS + w], scratch[2 * WARPS + w]}, inverse);
  float divergence = p > 0.0f ? p * (logf(p) - (x - seen.most) * inverse + logf(seen.soft)) : 0.0f, unused = 0.0f;
  block_sums(divergence, unused, scratch + 3 * WARPS);
  if (threadIdx.x == 0) {
    losses[blockIdx.x] = seen.most + logf(seen.sum) - picked;
    divergences[blockIdx.x] = temperature * temperature * divergence;
  }
  if (out == nullptr) return;
  if (weights != nullptr) hard *= weights[blockIdx.x], tempered *= weights[blockIdx.x];
  const Factors by = {seen.most, inverse, hard / seen.sum, tempered / seen.soft};
  if (vectors && is_aligned(out)) gradient_both<T, 4>(row, out + at, columns, target, by, hard, limit);
  else gradient_both<T, 1>(row, out + at, columns, target, by, hard, limit);
  __syncthreads();
  // again, with the teacher's part before rounding
  if (id < columns) store(out + at + id, (by.of(x) - (id == target ? hard : 0.0f) - tempered * p) * limit.slope(x));
}

#define DISTILL(NAME, T)                                                                                               \
  KERNEL(loss_distill_##NAME, THREADS, const float *logits, const uint32_t *targets, const uint32_t *ids,              \
         const float *probs, const float *weights, float *losses, float *divergences, T *out, uint32_t columns,        \
         uint32_t kept, float temperature, float hard, float tempered, float cap) {                                    \
    distill(logits, targets, ids, probs, weights, losses, divergences, out, columns, kept, temperature, hard,          \
            tempered, Limit(cap));                                                                                     \
  }

DISTILL(f32, float)
DISTILL(bf16, bf16)
DISTILL(f16, f16)
