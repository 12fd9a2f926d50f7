// RMSNorm of rows with optional preceding addition. Each block processes several rows in sequence and keeps
// the weight in registers. A thread holds HELD vectors of a row in registers; only the remainder of long rows
// (beyond 8,192 half-precision values) is read twice.
//
// Sums are in f32, in an order that depends only on the sizes. Traffic: forward reads x (and the addend) and
// writes y (and the sum); backward reads x, dy (and the addend) and writes dx.
#include "../../cuda/rows.cuh"

constexpr int HELD = 2;
constexpr int THREADS = 512; // maximum; same as in crates/ft-kernels/src/layers/norm/cuda.rs

// Same as on the CPU: NaN, not 0, if the squares overflow.
DEVICE float row_scale(float squares, uint32_t d, float eps) {
  const float mean = squares / static_cast<float>(d) + eps;
  return (mean * 0.0f + 1.0f) / sqrtf(mean);
}

// V weights, each with `plus` added.
template <typename T, int V> DEVICE void get_plus(const T *p, float (&out)[V], float plus) {
  get(p, out);
#pragma unroll
  for (int i = 0; i < V; i++) out[i] += plus;
}

template <typename T, int V>
DEVICE void forward(const T *x, const T *add, const T *w, T *sum, T *y, uint32_t rows, uint32_t d, uint32_t apart,
                    uint32_t per, float eps, float plus) {
  SHARED_ARRAY(float, scratch, 2 * WARP);
  const uint32_t first = threadIdx.x * V, step = blockDim.x * V;
  // loads V values of x, or of x + add rounded to T
  const auto take = [&](size_t at, float (&v)[V]) {
    get(x + at, v);
    if (add == nullptr) return;
    float a[V];
    get(add + at, a);
#pragma unroll
    for (int i = 0; i < V; i++) v[i] = rounded<T>(v[i] + a[i]);
  };
  float weight[HELD][V];
#pragma unroll
  for (int k = 0; k < HELD; k++)
    if (first + k * step < d) get_plus(w + first + k * step, weight[k], plus);
  const uint32_t begin = blockIdx.x * per, end = rows - begin < per ? rows : begin + per;
  y += static_cast<size_t>(begin) * apart;
  for (uint32_t row = begin; row < end; row++, y += apart) {
    const size_t at = static_cast<size_t>(row) * d;
    float held[HELD][V], squares = 0.0f, none = 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      const uint32_t i = first + k * step;
      if (i >= d) continue;
      take(at + i, held[k]);
#pragma unroll
      for (int j = 0; j < V; j++) squares = fmaf(held[k][j], held[k][j], squares);
    }
    for (uint32_t i = first + HELD * step; i < d; i += step) {
      float v[V];
      take(at + i, v);
#pragma unroll
      for (int j = 0; j < V; j++) squares = fmaf(v[j], v[j], squares);
    }
    block_sums(squares, none, scratch);
    const float r = row_scale(squares, d, eps);
    const auto write = [&](uint32_t i, const float (&v)[V], const float (&of)[V]) {
      float out[V];
#pragma unroll
      for (int j = 0; j < V; j++) out[j] = v[j] * r * of[j];
      put(y + i, out);
      if (sum != nullptr) put(sum + at + i, v);
    };
#pragma unroll
    for (int k = 0; k < HELD; k++)
      if (first + k * step < d) write(first + k * step, held[k], weight[k]);
    for (uint32_t i = first + HELD * step; i < d; i += step) {
      float v[V], of[V];
      take(at + i, v), get_plus(w + i, of, plus);
      write(i, v, of);
    }
  }
}

// V values as stored: half the registers of f32 for 16-bit values.
template <typename T, int V> struct Stored {
  std::conditional_t<V == 1, T, uint4> bits;
  DEVICE void take(const T *p) {
    if constexpr (V == 1) bits = *p;
    else bits = load_16(p);
  }
  DEVICE void widen(float (&out)[V]) const {
    if constexpr (V == 1) out[0] = Number<T>::widen(bits);
    else unpack<T>(bits, out);
  }
  DEVICE void widen(float (&out)[V], float plus) const {
    widen(out);
#pragma unroll
    for (int i = 0; i < V; i++) out[i] += plus;
  }
  // Has later calls of `widen` convert anew, so that the results of earlier ones leave their registers.
  DEVICE void again() {
    if constexpr (V != 1 && sizeof(T) == 2)
      bits = make_uint4(opaque(bits.x), opaque(bits.y), opaque(bits.z), opaque(bits.w));
  }
};

// All loads of a row are under way before its sums. WEIGHT: also sums of the weight's gradient.
template <typename T, int V, bool WEIGHT>
DEVICE void backward(const T *x, const T *w, const T *dy, const T *add, T *dx, float *partial, uint32_t rows,
                     uint32_t d, uint32_t add_apart, uint32_t dx_apart, uint32_t per, float eps, float plus) {
  SHARED_ARRAY(float, scratch, 2 * WARP);
  const uint32_t first = threadIdx.x * V, step = blockDim.x * V;
  Stored<T, V> weight[HELD];
  float dw[WEIGHT ? HELD : 1][V] = {};
#pragma unroll
  for (int k = 0; k < HELD; k++)
    if (first + k * step < d) weight[k].take(w + first + k * step);
  float *const own = WEIGHT ? partial + static_cast<size_t>(blockIdx.x) * d : nullptr;
  const uint32_t begin = blockIdx.x * per, end = rows - begin < per ? rows : begin + per;
  for (uint32_t row = begin; row < end; row++) {
    const size_t at = static_cast<size_t>(row) * d;
    const auto addend = [&](uint32_t i) { return add + static_cast<size_t>(row) * add_apart + i; };
    Stored<T, V> xs[HELD], gs[HELD], as[HELD];
    float squares = 0.0f, dots = 0.0f, v[V], g[V], of[V];
    const auto count = [&] {
#pragma unroll
      for (int j = 0; j < V; j++) {
        squares = fmaf(v[j], v[j], squares);
        dots = fmaf(g[j] * of[j], v[j], dots);
      }
    };
    // x, dy and the weight of a vector that is held
    const auto widen = [&](int k) {
      xs[k].widen(v), gs[k].widen(g), weight[k].widen(of, plus);
      xs[k].again(), gs[k].again(), weight[k].again();
    };
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      const uint32_t i = first + k * step;
      if (i >= d) continue;
      xs[k].take(x + at + i), gs[k].take(dy + at + i);
      if (add != nullptr) as[k].take(addend(i));
    }
#pragma unroll
    for (int k = 0; k < HELD; k++)
      if (first + k * step < d) widen(k), count();
    for (uint32_t i = first + HELD * step; i < d; i += step) {
      get(x + at + i, v), get(dy + at + i, g), get_plus(w + i, of, plus);
      count();
    }
    block_sums(squares, dots, scratch);
    const float r = row_scale(squares, d, eps);
    const float c = dots * r * r * r / static_cast<float>(d);
    const auto write = [&](uint32_t i, const Stored<T, V> &also) {
      float out[V];
#pragma unroll
      for (int j = 0; j < V; j++) out[j] = g[j] * of[j] * r - v[j] * c;
      if (add != nullptr) {
        float a[V];
        also.widen(a);
#pragma unroll
        for (int j = 0; j < V; j++) out[j] += a[j];
      }
      put(dx + static_cast<size_t>(row) * dx_apart + i, out);
    };
#pragma unroll
    for (int k = 0; k < HELD; k++) {
      const uint32_t i = first + k * step;
      if (i >= d) continue;
      widen(k), write(i, as[k]);
      if constexpr (WEIGHT)
#pragma unroll
        for (int j = 0; j < V; j++) dw[k][j] = fmaf(g[j], v[j] * r, dw[k][j]);
    }
    for (uint32_t i = first + HELD * step; i < d; i += step) {
      Stored<T, V> also;
      if (add != nullptr) also.take(addend(i));
      get(x + at + i, v), get(dy + at + i, g), get_plus(w + i, of, plus);
      write(i, also);
      if constexpr (WEIGHT)
#pragma unroll
        for (int j = 0; j < V; j++) own[i + j] = (row == begin ? 0.0f : own[i + j]) + g[j] * (v[j] * r);
    }
  }
  if constexpr (WEIGHT)
#pragma unroll
    for (int k = 0; k < HELD; k++)
      if (first + k * step < d) put_floats(own + first + k * step, dw[k]);
}

// One kernel per dtype and, backward, for frozen weights and others. `add` and `sum` are both null or both set;
// `partial` is [blocks, d]. `apart`, `add_apart` and `dx_apart` are row strides of y, the addend and dx. Where the
// weight is frozen, few registers let two blocks of most threads, or four of half as many, load their rows at a time.
#define NORM(NAME, T)                                                                                                  \
  KERNEL(norm_forward_##NAME, THREADS, const T *x, const T *add, const T *w, T *sum, T *y, uint32_t rows, uint32_t d,  \
         uint32_t apart, uint32_t per, float eps, float plus) {                                                        \
    const bool vectors = d % VECTOR<T> == 0 && apart % VECTOR<T> == 0 && is_aligned(x) && is_aligned(add) &&           \
                         is_aligned(w) && is_aligned(sum) && is_aligned(y);                                            \
    if (vectors) forward<T, VECTOR<T>>(x, add, w, sum, y, rows, d, apart, per, eps, plus);                             \
    else forward<T, 1>(x, add, w, sum, y, rows, d, apart, per, eps, plus);                                             \
  }                                                                                                                    \
  BACKWARD(norm_backward_##NAME, 2, T, false)                                                                          \
  BACKWARD(norm_backward_weight_##NAME, 1, T, true)
#define BACKWARD(NAME, BLOCKS, T, WEIGHT)                                                                              \
  KERNEL(NAME, SIDE_BY_SIDE(BLOCKS, THREADS), const T *x, const T *w, const T *dy, const T *add, T *dx,                \
         float *partial, uint32_t rows, uint32_t d, uint32_t add_apart, uint32_t dx_apart, uint32_t per, float eps,    \
         float plus) {                                                                                                 \
    const bool vectors = (d | add_apart | dx_apart) % VECTOR<T> == 0 && is_aligned(x) && is_aligned(w) &&              \
                         is_aligned(dy) && is_aligned(add) && is_aligned(dx);                                          \
    if (vectors)                                                                                                       \
      backward<T, VECTOR<T>, WEIGHT>(x, w, dy, add, dx, partial, rows, d, add_apart, dx_apart, per, eps, plus);        \
    else backward<T, 1, WEIGHT>(x, w, dy, add, dx, partial, rows, d, add_apart, dx_apart, per, eps, plus);             \
  }

NORM(f32, float)
NORM(bf16, bf16)
NORM(f16, f16)
