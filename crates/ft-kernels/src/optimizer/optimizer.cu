// AdamW over flat buffers in one pass: clipping, update, compute copy. Memory traffic is 28 bytes per value plus
// the copy, or 24 bytes for 16-bit weights without an f32 master copy; with 8-bit moments 16 and 12 bytes.
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

// Updates V values and moments from gradients. Moments are written back; the new weights are returned in `ps`.
template <int V> DEVICE void update(float (&ps)[V], float *m, float *v, const float *g, const Update &k, size_t at) {
  float ms[V], vs[V], gs[V];
  get(g + at, gs), get(m + at, ms), get(v + at, vs);
#pragma unroll
  for (int i = 0; i < V; i++) {
    const float grad = gs[i] * k.grad_scale;
    ms[i] += (grad - ms[i]) * k.one_minus_b1;
    vs[i] = vs[i] * k.b2 + k.one_minus_b2 * grad * grad;
    ps[i] = ps[i] * k.decay - k.rate * (ms[i] / (sqrtf(vs[i]) / k.root + k.eps));
  }
  put(m + at, ms), put(v + at, vs);
}

template <typename T, int V>
DEVICE void adamw(float *p, float *m, float *v, const float *g, T *copy, const Update &k, size_t at) {
  float ps[V];
  get(p + at, ps);
  update(ps, m, v, g, k, at);
  put(p + at, ps);
  if (copy != nullptr) put(copy + at, ps);
}

template <typename T, int V>
DEVICE void adamw_rounded(T *p, float *m, float *v, const float *g, const Draws &draws, const Update &k, size_t at) {
  float ps[V];
  get(p + at, ps);
  update(ps, m, v, g, k, at);
  draws.round<T>(at, ps);
  put(p + at, ps);
}

// Named by the dtype of the copy; without a copy, the layers compute with `p`. Each thread handles one
// vector per f32 buffer, and half a vector of a 16-bit copy, so accesses of a warp are contiguous.
#define ADAMW(NAME, T)                                                                                                 \
  KERNEL(optimizer_adamw_##NAME, THREADS, float *p, float *m, float *v, const float *g, T *copy, uint64_t count,       \
         float grad_scale, float one_minus_b1, float b2, float one_minus_b2, float decay, float rate, float root,      \
         float eps) {                                                                                                  \
    const Update k = {grad_scale, one_minus_b1, b2, one_minus_b2, decay, rate, root, eps};                             \
    const bool vectors = is_aligned(p) && is_aligned(m) && is_aligned(v) && is_aligned(g) && is_aligned(copy);         \
    each<4>(                                                                                                           \
        vectors, count, [&](size_t at) { adamw<T, 4>(p, m, v, g, copy, k, at); },                                      \
        [&](size_t at) { adamw<T, 1>(p, m, v, g, copy, k, at); }, blockIdx.x);                                         \
  }

ADAMW(f32, float)
ADAMW(bf16, bf16)
ADAMW(f16, f16)

// The same for 16-bit weights without an f32 master copy, with stochastic rounding.
#define ADAMW_ROUNDED(NAME, T)                                                                                         \
  KERNEL(optimizer_adamw_rounded_##NAME, THREADS, T *p, float *m, float *v, const float *g, uint64_t count, DRAWS,     \
         float grad_scale, float one_minus_b1, float b2, float one_minus_b2, float decay, float rate, float root,      \
         float eps) {                                                                                                  \
    const Update k = {grad_scale, one_minus_b1, b2, one_minus_b2, decay, rate, root, eps};                             \
    const Draws draws = DRAWN;                                                                                         \
    const bool vectors = first % 4 == 0 && is_aligned(p) && is_aligned(m) && is_aligned(v) && is_aligned(g);           \
    each<4>(                                                                                                           \
        vectors, count, [&](size_t at) { adamw_rounded<T, 4>(p, m, v, g, draws, k, at); },                             \
        [&](size_t at) { adamw_rounded<T, 1>(p, m, v, g, draws, k, at); }, blockIdx.x);                                \
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
    each<4>(                                                                                                           \
        first % 4 == 0 && is_aligned(x) && is_aligned(y), count,                                                       \
        [&](size_t at) {                                                                                               \
          float values[4];                                                                                             \
          some(at, values);                                                                                            \
        },                                                                                                             \
        [&](size_t at) {                                                                                               \
          float values[1];                                                                                             \
          some(at, values);                                                                                            \
        },                                                                                                             \
        blockIdx.x);                                                                                                   \
  }

ROUND(bf16, bf16)
ROUND(f16, f16)

// Values of a quantization block, and quantization blocks of a warp; the latter must match cuda.rs.
constexpr int BLOCK = 256, BLOCKS_EACH = 8;
constexpr int OWN = BLOCK / WARP;

// Code values of both moments (see eight_bit.rs) in shared memory, and the bounds between adjacent codes.
struct Maps {
  float *value, *bound;

  // All threads of the block must call this.
  DEVICE void load(const float *maps) const {
    for (unsigned i = threadIdx.x; i < 2 * BLOCK; i += THREADS) {
      value[i] = maps[i];
      bound[i] = i % BLOCK == 0 ? 0.0f : (maps[i - 1] + maps[i]) / 2;
    }
    __syncthreads();
  }

  // The nearest code to x in [-1, 1], of two the lower one. The decade and the fraction of |x| give a code at
  // most one away, since fractions of a decade are equal; two bounds decide.
  template <bool SIGNED> DEVICE uint32_t code(float x) const {
    const float size = SIGNED ? fabsf(x) : fmaxf(x, 0.0f);
    // n fractions of the decade up to 10^(d - 6): the number from the smallest is n + (size 10^(6 - d) - 0.1) n / 0.9
    constexpr float edges[] = {1e-7f, 1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f};
    constexpr float powers[] = {1e6f, 1e5f, 1e4f, 1e3f, 1e2f, 1e1f, 1e0f};
    float slope = 0.0f, start = 0.0f;
#pragma unroll
    for (int d = 0; d < 7; d++) {
      const float n = static_cast<float>(SIGNED ? 1 << d : 2 << d);
      const bool in = d == 0 || size >= edges[d];
      slope = in ? powers[d] * n / 0.9f : slope, start = in ? n * 8 / 9 : start;
    }
    const int number = static_cast<int>(fmaf(size, slope, start));
    const int near = min(max(SIGNED ? 127 + (x < 0.0f ? -number : number) : number - 1, 1), BLOCK - 2);
    const float *of = bound + (SIGNED ? 0 : BLOCK) + near;
    return near - 1 + (of[0] < x) + (of[1] < x);
  }
};

// V adjacent codes.
template <int V> DEVICE void get_codes(const uint8_t *p, uint32_t (&out)[V]) {
  if constexpr (V == 1) out[0] = *p;
  else {
    const uint32_t word = load_4(p);
#pragma unroll
    for (int i = 0; i < V; i++) out[i] = word >> 8 * i & 255;
  }
}

// Quantizes the warp's values, `own` of each lane, with their absmax as scale. NaN of any makes the scale NaN.
template <bool SIGNED, int V>
DEVICE void encode(const float (&own)[OWN], const Maps &maps, uint8_t *codes, float *scale, size_t count) {
  const unsigned lane = threadIdx.x % WARP;
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < OWN; i++) bits = max(bits, __float_as_uint(fabsf(own[i])));
  const float most = __uint_as_float(warp_max(bits)), inverse = 1.0f / fmaxf(most, 1e-38f);
#pragma unroll
  for (int j = 0; j < OWN / V; j++) {
    const size_t at = (j * WARP + lane) * V;
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < V; i++) word |= maps.code<SIGNED>(fminf(fmaxf(own[V * j + i] * inverse, -1.0f), 1.0f)) << 8 * i;
    if constexpr (V > 1) store_4(codes + at, word);
    else if (at < count) codes[at] = static_cast<uint8_t>(word);
  }
  if (lane == 0) *scale = most;
}

// Hyperparameters of an update with 8-bit moments.
struct Update8 {
  float grad_scale, b1, one_minus_b1, b2, one_minus_b2, decay, rate, root, eps;
};

// 8-bit moments: codes and scales of both.
struct Moments {
  uint8_t *m;
  float *m_scale;
  uint8_t *v;
  float *v_scale;
};

// Updates quantization block `number` by one warp. A lane has OWN values, V of them adjacent; V is 1, or the
// block is whole and all buffers are aligned. `weights` reads and writes weights.
template <int V, typename Weights>
DEVICE void update_block(const Weights &weights, const Moments &moments, const float *g, size_t number, uint64_t count,
                         const Maps &maps, const Update8 &k) {
  const unsigned lane = threadIdx.x % WARP;
  const size_t first = number * BLOCK;
  const float m_scale = moments.m_scale[number], v_scale = moments.v_scale[number];
  float mean[OWN], square[OWN];
#pragma unroll
  for (int j = 0; j < OWN / V; j++) {
    const size_t at = first + (j * WARP + lane) * V;
    if (V == 1 && at >= count) {
      mean[j] = square[j] = 0.0f;
      continue;
    }
    float ps[V], gs[V];
    uint32_t m[V], v[V];
    weights.read(at, ps), get(g + at, gs), get_codes(moments.m + at, m), get_codes(moments.v + at, v);
#pragma unroll
    for (int i = 0; i < V; i++) {
      const float grad = gs[i] * k.grad_scale;
      const float a = maps.value[m[i]] * m_scale * k.b1 + grad * k.one_minus_b1;
      const float b = maps.value[BLOCK + v[i]] * v_scale * k.b2 + grad * grad * k.one_minus_b2;
      ps[i] = ps[i] * k.decay - k.rate * (a / (sqrtf(b) / k.root + k.eps));
      mean[V * j + i] = a, square[V * j + i] = b;
    }
    weights.write(at, ps);
  }
  encode<true, V>(mean, maps, moments.m + first, moments.m_scale + number, count - first);
  encode<false, V>(square, maps, moments.v + first, moments.v_scale + number, count - first);
}

// Update with 8-bit moments. `maps` holds 256 code values each for the first and second moment.
template <typename Weights>
DEVICE void adamw8bit(const Weights &weights, const Moments &moments, const float *g, const float *maps, uint64_t count,
                      const Update8 &k) {
  SHARED_ARRAY(float, value, 2 * BLOCK);
  SHARED_ARRAY(float, bound, 2 * BLOCK);
  const Maps both = {value, bound};
  both.load(maps);
  const bool vectors = weights.vectors() && is_aligned(g) && is_aligned(moments.m) && is_aligned(moments.v);
  constexpr int WARPS = THREADS / WARP;
  const size_t first = static_cast<size_t>(blockIdx.x) * WARPS * BLOCKS_EACH + threadIdx.x / WARP;
  for (size_t b = first; b < first + WARPS * BLOCKS_EACH && b * BLOCK < count; b += WARPS) {
    if (vectors && (b + 1) * BLOCK <= count) update_block<4>(weights, moments, g, b, count, both, k);
    else update_block<1>(weights, moments, g, b, count, both, k);
  }
}

// f32 weights with a copy, which may be null.
template <typename T> struct Master {
  float *p;
  T *copy;

  DEVICE bool vectors() const { return is_aligned(p) && is_aligned(copy); }
  template <int V> DEVICE void read(size_t at, float (&values)[V]) const { get(p + at, values); }
  template <int V> DEVICE void write(size_t at, float (&values)[V]) const {
    put(p + at, values);
    if (copy != nullptr) put(copy + at, values);
  }
};

// 16-bit weights without an f32 master copy.
template <typename T> struct Rounded {
  T *p;
  Draws draws;

  DEVICE bool vectors() const { return is_aligned(p) && draws.first % 4 == 0; }
  template <int V> DEVICE void read(size_t at, float (&values)[V]) const { get(p + at, values); }
  template <int V> DEVICE void write(size_t at, float (&values)[V]) const {
    draws.template round<T>(at, values), put(p + at, values);
  }
};

#define MOMENTS uint8_t *m, float *m_scale, uint8_t *v, float *v_scale
#define NUMBERS                                                                                                        \
  float grad_scale, float b1, float one_minus_b1, float b2, float one_minus_b2, float decay, float rate, float root,   \
      float eps
#define NUMBERED {grad_scale, b1, one_minus_b1, b2, one_minus_b2, decay, rate, root, eps}
#define ADAMW_8BIT(NAME, T)                                                                                            \
  KERNEL(optimizer_adamw8bit_##NAME, SIDE_BY_SIDE(3, THREADS), float *p, MOMENTS, const float *g, T *copy,             \
         const float *maps, uint64_t count, NUMBERS) {                                                                 \
    adamw8bit(Master<T>{p, copy}, {m, m_scale, v, v_scale}, g, maps, count, NUMBERED);                                 \
  }

ADAMW_8BIT(f32, float)
ADAMW_8BIT(bf16, bf16)
ADAMW_8BIT(f16, f16)

#define ADAMW_8BIT_ROUNDED(NAME, T)                                                                                    \
  KERNEL(optimizer_adamw8bit_rounded_##NAME, SIDE_BY_SIDE(3, THREADS), T *p, MOMENTS, const float *g,                  \
         const float *maps, uint64_t count, DRAWS, NUMBERS) {                                                          \
    adamw8bit(Rounded<T>{p, DRAWN}, {m, m_scale, v, v_scale}, g, maps, count, NUMBERED);                               \
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

// Vectors of a thread whose squares are summed in f32.
constexpr int GROUP = 4;

// Sum of squares of finite values, the largest between 2^-40 and 2^60 or 0: a pair of floats, with the errors of
// squares and of sums in the second. The relative error is at most 2^-37. (f64 has 1/64 of the rate of f32 on
// 8.6, 8.9 and 12.0.)
DEVICE double paired_squares(const float (&x)[GROUP][4]) {
  float high = 0.0f, low = 0.0f;
#pragma unroll
  for (int i = 0; i < 4 * GROUP; i++) {
    const float v = x[i / 4][i % 4], square = __fmul_rn(v, v), sum = __fadd_rn(high, square);
    const float back = __fsub_rn(sum, high);
    const float lost = __fadd_rn(__fsub_rn(high, __fsub_rn(sum, back)), __fsub_rn(square, back));
    low = __fadd_rn(low, __fadd_rn(lost, fmaf(v, v, -square)));
    high = sum;
  }
  return static_cast<double>(high) + low;
}

// The same of any values, in f64, which no square exceeds.
DEVICE double wide_squares(const float (&x)[GROUP][4]) {
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < 4 * GROUP; i++) sum += static_cast<double>(x[i / 4][i % 4]) * x[i / 4][i % 4];
  return sum;
}

// One partial sum of squares per block.
KERNEL(optimizer_squares_f32, THREADS, const float *x, uint64_t count, double *partial) {
  double sum = 0.0;
  const bool vectors = is_aligned(x);
  const uint64_t whole = vectors ? count / 4 : 0, step = static_cast<uint64_t>(gridDim.x) * THREADS;
  const uint64_t first = static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x;
  for (uint64_t i = first; i < whole; i += GROUP * step) {
    float v[GROUP][4] = {};
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < GROUP; j++)
      if (i + j * step < whole) load_vector(x + 4 * (i + j * step), v[j]);
#pragma unroll
    for (int j = 0; j < 4 * GROUP; j++) bits = max(bits, __float_as_uint(fabsf(v[j / 4][j % 4])));
    const float most = __uint_as_float(bits);
    sum += bits == 0 || (most >= 0x1p-40f && most <= 0x1p60f) ? paired_squares(v) : wide_squares(v);
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
