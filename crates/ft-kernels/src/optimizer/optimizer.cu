// AdamW over flat buffers in one pass: clipping, update, compute copy and zeroing of the gradient. Memory
// traffic is 32 bytes per value plus the copy, or 28 bytes for 16-bit weights without an f32 master copy.
// Also the sum of squares for the gradient norm, in two steps of fixed order.
//
// Vector accesses require all buffers to be 16-byte aligned; otherwise values are processed one by one.
#include "../adapters/dropout/stream.cuh"

constexpr int THREADS = 256; // must match crates/ft-kernels/src/optimizer/cuda.rs

// Hyperparameters of an update; see crates/ft-kernels/src/optimizer/mod.rs.
struct Update {
  float grad_scale, one_minus_b1, b2, one_minus_b2, decay, rate, root, eps;
};

// Rounds x stochastically to one of the two adjacent values of T, with expected value x, using the random
// `word`; as in crates/ft-kernels/src/optimizer/rounding.rs.
template <typename T> DEVICE float rounded_by(float x, uint32_t word);

template <> DEVICE float rounded_by<bf16>(float x, uint32_t word) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return x;
  return __uint_as_float((bits + (word >> 16)) & 0xffff0000u);
}

template <> DEVICE float rounded_by<f16>(float x, uint32_t word) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return x;
  if (fabsf(x) >= 6.103515625e-05f) return __uint_as_float((bits + (word >> 19)) & 0xffffe000u);
  // subnormals of f16 have a spacing of 2^-24
  const float steps = fabsf(x) * 16777216.0f, low = floorf(steps);
  const float up = static_cast<float>(word >> 8) / 16777216.0f < steps - low ? 1.0f : 0.0f;
  return copysignf((low + up) / 16777216.0f, x);
}

// Random words for rounding: word `first` + i of the stream rounds value i.
struct Draws {
  Stream stream;
  uint64_t first;

  // Rounds V values starting at `at`. Either V is 1, or V is 4 and `first` and `at` are multiples of 4.
  template <typename T, int V> DEVICE void round(size_t at, float (&x)[V]) const {
    static_assert(V == 1 || V == 4, "of a block of the stream");
    const uint64_t number = first + at;
    uint32_t w[4];
    stream.words(number / 4, w);
    if constexpr (V == 1) {
      const uint32_t of = static_cast<uint32_t>(number % 4);
      x[0] = rounded_by<T>(x[0], of == 0 ? w[0] : of == 1 ? w[1] : of == 2 ? w[2] : w[3]);
    } else {
#pragma unroll
      for (int i = 0; i < V; i++) x[i] = rounded_by<T>(x[i], w[i]);
    }
  }
};

// Kernel parameters of a `Draws`.
#define DRAWS uint64_t first, uint32_t key0, uint32_t key1, uint32_t high0, uint32_t high1
#define DRAWN {{key0, key1, high0, high1, 0}, first}

// Updates V values, moments and gradients. Moments and gradients are written back; the new weights are
// returned in `ps`.
template <int V>
DEVICE void update(float (&ps)[V], float *m, float *v, float *g, const Update &k, size_t at) {
  float ms[V], vs[V], gs[V];
  get(g + at, gs), get(m + at, ms), get(v + at, vs);
#pragma unroll
  for (int i = 0; i < V; i++) {
    const float grad = gs[i] * k.grad_scale;
    ms[i] += (grad - ms[i]) * k.one_minus_b1;
    vs[i] = vs[i] * k.b2 + k.one_minus_b2 * grad * grad;
    ps[i] = ps[i] * k.decay - k.rate * (ms[i] / (sqrtf(vs[i]) / k.root + k.eps));
    gs[i] = 0.0f;
  }
  put(m + at, ms), put(v + at, vs), put(g + at, gs);
}

template <typename T, int V>
DEVICE void adamw(float *p, float *m, float *v, float *g, T *copy, const Update &k, size_t at) {
  float ps[V];
  get(p + at, ps);
  update(ps, m, v, g, k, at);
  put(p + at, ps);
  if (copy != nullptr) put(copy + at, ps);
}

template <typename T, int V>
DEVICE void adamw_rounded(T *p, float *m, float *v, float *g, const Draws &draws, const Update &k, size_t at) {
  float ps[V];
  get(p + at, ps);
  update(ps, m, v, g, k, at);
  draws.round<T>(at, ps);
  put(p + at, ps);
}

// Named by the dtype of the copy; without a copy, the layers compute with `p`. Each thread handles one
// vector per f32 buffer, and half a vector of a 16-bit copy, so accesses of a warp are contiguous.
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

// The same for 16-bit weights without an f32 master copy, with stochastic rounding.
#define ADAMW_ROUNDED(NAME, T)                                                                                         \
  KERNEL(optimizer_adamw_rounded_##NAME, THREADS, T *p, float *m, float *v, float *g, uint64_t count, DRAWS,           \
         float grad_scale, float one_minus_b1, float b2, float one_minus_b2, float decay, float rate, float root,      \
         float eps) {                                                                                                  \
    const Update k = {grad_scale, one_minus_b1, b2, one_minus_b2, decay, rate, root, eps};                             \
    const Draws draws = DRAWN;                                                                                         \
    const bool vectors = first % 4 == 0 && is_aligned(p) && is_aligned(m) && is_aligned(v) && is_aligned(g);           \
    each<4>(vectors, count, [&](size_t at) { adamw_rounded<T, 4>(p, m, v, g, draws, k, at); },                         \
            [&](size_t at) { adamw_rounded<T, 1>(p, m, v, g, draws, k, at); }, blockIdx.x);                            \
  }

ADAMW_ROUNDED(bf16, bf16)
ADAMW_ROUNDED(f16, f16)

// y = x, stochastically rounded.
#define ROUND(NAME, T)                                                                                                 \
  KERNEL(optimizer_round_##NAME, THREADS, const float *x, T *y, uint64_t count, DRAWS) {                               \
    const Draws draws = DRAWN;                                                                                         \
    const auto some = [&](size_t at, auto &values) {                                                                   \
      get(x + at, values), draws.round<T>(at, values), put(y + at, values);                                            \
    };                                                                                                                 \
    each<4>(first % 4 == 0 && is_aligned(x) && is_aligned(y), count,                                                   \
            [&](size_t at) {                                                                                           \
              float values[4];                                                                                         \
              some(at, values);                                                                                        \
            },                                                                                                         \
            [&](size_t at) {                                                                                           \
              float values[1];                                                                                         \
              some(at, values);                                                                                        \
            },                                                                                                         \
            blockIdx.x);                                                                                               \
  }

ROUND(bf16, bf16)
ROUND(f16, f16)

// Quantizes x to a code of the ascending `map`, with the absmax of the block's `count` values as scale.
// All threads of the block must call this.
DEVICE void encode(float x, const float *map, float *magnitudes, uint8_t *code, float *scale, bool in) {
  const unsigned i = threadIdx.x;
  magnitudes[i] = fabsf(x);
  __syncthreads();
  for (unsigned half = THREADS / 2; half > 0; half /= 2) {
    const float a = magnitudes[i], b = i < half ? magnitudes[i + half] : 0.0f;
    // a NaN of either half stays: it equals nothing, and no comparison with it holds
    if (i < half && a == a && !(b <= a)) magnitudes[i] = b;
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

// Hyperparameters of an update with 8-bit moments.
struct Update8 {
  float grad_scale, b1, one_minus_b1, b2, one_minus_b2, decay, rate, root, eps;
};

// Update with 8-bit moments: one thread block per quantization block of 256 values with two scales.
// `maps` holds 256 code values each for the first and second moment. `weight` and `keep` read and write a
// weight.
template <typename Weight, typename Keep>
DEVICE void adamw8bit(const Weight &weight, const Keep &keep, uint8_t *m, float *m_scale, uint8_t *v, float *v_scale,
                      float *g, const float *maps, uint64_t count, const Update8 &k) {
  SHARED_ARRAY(float, map, 2 * THREADS);
  SHARED_ARRAY(float, magnitudes, THREADS);
  const unsigned i = threadIdx.x;
  const size_t at = static_cast<size_t>(blockIdx.x) * THREADS + i;
  const bool in = at < count;
  map[i] = maps[i], map[THREADS + i] = maps[THREADS + i];
  __syncthreads();
  float mean = 0.0f, square = 0.0f;
  if (in) {
    const float grad = g[at] * k.grad_scale;
    mean = map[m[at]] * m_scale[blockIdx.x] * k.b1 + grad * k.one_minus_b1;
    square = map[THREADS + v[at]] * v_scale[blockIdx.x] * k.b2 + grad * grad * k.one_minus_b2;
    keep(at, weight(at) * k.decay - k.rate * (mean / (sqrtf(square) / k.root + k.eps)));
    g[at] = 0.0f;
  }
  encode(mean, map, magnitudes, m + at, m_scale + blockIdx.x, in);
  encode(square, map + THREADS, magnitudes, v + at, v_scale + blockIdx.x, in);
}

#define MOMENTS uint8_t *m, float *m_scale, uint8_t *v, float *v_scale
#define NUMBERS                                                                                                        \
  float grad_scale, float b1, float one_minus_b1, float b2, float one_minus_b2, float decay, float rate, float root,   \
      float eps
#define ADAMW_8BIT(NAME, T)                                                                                            \
  KERNEL(optimizer_adamw8bit_##NAME, THREADS, float *p, MOMENTS, float *g, T *copy, const float *maps, uint64_t count, \
         NUMBERS) {                                                                                                    \
    const auto keep = [&](size_t at, float next) {                                                                     \
      p[at] = next;                                                                                                    \
      if (copy != nullptr) store(copy + at, next);                                                                     \
    };                                                                                                                 \
    adamw8bit([&](size_t at) { return p[at]; }, keep, m, m_scale, v, v_scale, g, maps, count,                          \
              {grad_scale, b1, one_minus_b1, b2, one_minus_b2, decay, rate, root, eps});                               \
  }

ADAMW_8BIT(f32, float)
ADAMW_8BIT(bf16, bf16)
ADAMW_8BIT(f16, f16)

// The same for 16-bit weights without an f32 master copy.
#define ADAMW_8BIT_ROUNDED(NAME, T)                                                                                    \
  KERNEL(optimizer_adamw8bit_rounded_##NAME, THREADS, T *p, MOMENTS, float *g, const float *maps, uint64_t count,      \
         DRAWS, NUMBERS) {                                                                                             \
    const Draws draws = DRAWN;                                                                                         \
    const auto keep = [&](size_t at, float next) {                                                                     \
      float values[1] = {next};                                                                                        \
      draws.round<T>(at, values);                                                                                      \
      store(p + at, values[0]);                                                                                        \
    };                                                                                                                 \
    adamw8bit([&](size_t at) { return load(p + at); }, keep, m, m_scale, v, v_scale, g, maps, count,                   \
              {grad_scale, b1, one_minus_b1, b2, one_minus_b2, decay, rate, root, eps});                               \
  }

ADAMW_8BIT_ROUNDED(bf16, bf16)
ADAMW_8BIT_ROUNDED(f16, f16)

// Sum of x over the block in a fixed order; valid in thread 0.
DEVICE double total(double x) {
  SHARED_ARRAY(double, sums, THREADS);
  sums[threadIdx.x] = x;
  for (unsigned half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return threadIdx.x == 0 ? sums[0] : 0.0;
}

// One partial sum of squares per block, in f64 as on the CPU, so squares cannot overflow.
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

// Sums the partial sums in one block.
KERNEL(optimizer_total, THREADS, const double *partial, uint32_t count, double *out) {
  double sum = 0.0;
  for (uint32_t i = threadIdx.x; i < count; i += THREADS) sum += partial[i];
  sum = total(sum);
  if (threadIdx.x == 0) *out = sum;
}
