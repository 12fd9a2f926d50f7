// AdamW over flat f32 buffers, with clipping, the copy that the layers compute with and zeros in the gradient, in one pass of
// 32 bytes a value and those of the copy; and the sum of squares for the gradient norm, in two steps of a fixed order.
//
// Buffers begin at a multiple of 16 bytes, or all values go one by one.
#include "../cuda/rows.cuh"

constexpr int THREADS = 256; // in src/kernel/optimizer/cuda.rs too

// The numbers of an update: src/kernel/optimizer/mod.rs says what they are.
struct Update {
  float grad_scale, one_minus_b1, b2, one_minus_b2, decay, rate, root, eps;
};

template <typename T, int V>
DEVICE void adamw(float *p, float *m, float *v, float *g, T *copy, const Update &k, size_t at) {
  float ps[V], ms[V], vs[V], gs[V];
  get(g + at, gs), get(m + at, ms), get(v + at, vs), get(p + at, ps);
#pragma unroll
  for (int i = 0; i < V; i++) {
    const float grad = gs[i] * k.grad_scale;
    ms[i] += (grad - ms[i]) * k.one_minus_b1;
    vs[i] = vs[i] * k.b2 + k.one_minus_b2 * grad * grad;
    ps[i] = ps[i] * k.decay - k.rate * (ms[i] / (sqrtf(vs[i]) / k.root + k.eps));
    gs[i] = 0.0f;
  }
  put(m + at, ms), put(v + at, vs), put(p + at, ps), put(g + at, gs);
  if (copy != nullptr) put(copy + at, ps);
}

// By the type of the copy, which there is none of where the layers compute with `p`. A thread takes a vector of each f32
// buffer, and half of one of a copy of 16 bits: so that a warp's accesses are each one range.
#define ADAMW(NAME, T)                                                                                                 \
  KERNEL(optimizer_adamw_##NAME, THREADS, float *p, float *m, float *v, float *g, T *copy, uint64_t count,             \
         float grad_scale, float one_minus_b1, float b2, float one_minus_b2, float decay, float rate, float root,      \
         float eps) {                                                                                                  \
    const Update k = {grad_scale, one_minus_b1, b2, one_minus_b2, decay, rate, root, eps};                             \
    const bool vectors = is_aligned(p) && is_aligned(m) && is_aligned(v) && is_aligned(g) && is_aligned(copy);         \
    each<4>(vectors, count, [&](size_t at) { adamw<T, 4>(p, m, v, g, copy, k, at); },                                  \
            [&](size_t at) { adamw<T, 1>(p, m, v, g, copy, k, at); }, blockIdx.x);                                     \
  }

ADAMW(f32, float)
ADAMW(bf16, bf16)
ADAMW(f16, f16)

// Rounds x to a code of the ascending `map`, by a scale that is the largest magnitude of the block's `count` values; all threads
// of the block come here.
DEVICE void encode(float x, const float *map, float *magnitudes, uint8_t *code, float *scale, bool in) {
  const unsigned i = threadIdx.x;
  magnitudes[i] = fabsf(x);
  __syncthreads();
  for (unsigned half = THREADS / 2; half > 0; half /= 2) {
    // a value that is not finite makes a scale that is not
    if (i < half && !(magnitudes[i + half] <= magnitudes[i])) magnitudes[i] = magnitudes[i + half];
    __syncthreads();
  }
  const float most = magnitudes[0];
  __syncthreads();
  if (!in) return;
  const float at = fminf(fmaxf(x * (1.0f / fmaxf(most, 1e-38f)), -1.0f), 1.0f);
  unsigned low = 0, high = THREADS - 1;
  while (low < high) {
    const unsigned middle = (low + high) / 2;
    if ((map[middle] + map[middle + 1]) / 2 < at) low = middle + 1;
    else high = middle;
  }
  *code = static_cast<uint8_t>(low);
  if (i == 0) *scale = most;
}

// The update with moments in 8 bits: a block of threads takes a block of 256 values, which share two scales. What codes stand
// for, 256 numbers of the mean and as many of the mean square, is in `maps`.
#define ADAMW_8BIT(NAME, T)                                                                                            \
  KERNEL(optimizer_adamw8bit_##NAME, THREADS, float *p, uint8_t *m, float *m_scale, uint8_t *v, float *v_scale,        \
         float *g, T *copy, const float *maps, uint64_t count, float grad_scale, float b1, float one_minus_b1,         \
         float b2, float one_minus_b2, float decay, float rate, float root, float eps) {                               \
    SHARED_ARRAY(float, map, 2 * THREADS);                                                                             \
    SHARED_ARRAY(float, magnitudes, THREADS);                                                                          \
    const unsigned i = threadIdx.x;                                                                                    \
    const size_t at = static_cast<size_t>(blockIdx.x) * THREADS + i;                                                   \
    const bool in = at < count;                                                                                        \
    map[i] = maps[i], map[THREADS + i] = maps[THREADS + i];                                                            \
    __syncthreads();                                                                                                   \
    float mean = 0.0f, square = 0.0f;                                                                                  \
    if (in) {                                                                                                          \
      const float grad = g[at] * grad_scale;                                                                           \
      mean = map[m[at]] * m_scale[blockIdx.x] * b1 + grad * one_minus_b1;                                              \
      square = map[THREADS + v[at]] * v_scale[blockIdx.x] * b2 + grad * grad * one_minus_b2;                           \
      const float next = p[at] * decay - rate * (mean / (sqrtf(square) / root + eps));                                 \
      p[at] = next, g[at] = 0.0f;                                                                                      \
      if (copy != nullptr) store(copy + at, next);                                                                     \
    }                                                                                                                  \
    encode(mean, map, magnitudes, m + at, m_scale + blockIdx.x, in);                                                   \
    encode(square, map + THREADS, magnitudes, v + at, v_scale + blockIdx.x, in);                                       \
  }

ADAMW_8BIT(f32, float)
ADAMW_8BIT(bf16, bf16)
ADAMW_8BIT(f16, f16)

// The sum of x over the block, in order, for thread 0 alone.
DEVICE double total(double x) {
  SHARED_ARRAY(double, sums, THREADS);
  sums[threadIdx.x] = x;
  for (unsigned half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return threadIdx.x == 0 ? sums[0] : 0.0;
}

// A partial sum of squares a block: in f64, as on the CPU, so that no square overflows.
KERNEL(optimizer_squares_f32, THREADS, const float *x, uint64_t count, double *partial) {
  double sum = 0.0;
  const bool vectors = is_aligned(x);
  const uint64_t whole = vectors ? count / 4 : 0, step = static_cast<uint64_t>(gridDim.x) * THREADS;
  const uint64_t first = static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x;
#pragma unroll 4
  for (uint64_t i = first; i < whole; i += step) {
    float v[4];
    load_vector(x + 4 * i, v);
#pragma unroll
    for (int j = 0; j < 4; j++) sum += static_cast<double>(v[j]) * v[j];
  }
  for (uint64_t i = 4 * whole + first; i < count; i += step) sum += static_cast<double>(x[i]) * x[i];
  sum = total(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// The sum of all partial sums: one block.
KERNEL(optimizer_total, THREADS, const double *partial, uint32_t count, double *out) {
  double sum = 0.0;
  for (uint32_t i = threadIdx.x; i < count; i += THREADS) sum += partial[i];
  sum = total(sum);
  if (threadIdx.x == 0) *out = sum;
}
