// act(gate) * up, and the gradients. The backward kernel can also recompute the product, the input of the
// down projection, in place of dy. Gate and up are two matrices, or one (`up` null) whose rows hold both:
// value i of the gate at `step i`, of up `beside` values further. A thread processes 16 bytes of each operand;
// unaligned rows and interleaved ones are processed value by value. Every value is read and written once. A row
// of `width` outputs is one block, or several in grid dimension y; of weighted rows it is one. `apart` is the row
// stride of the output, `of_input` of gate and up.
#include "../../cuda/rows.cuh"

constexpr int THREADS = 256; // same as in crates/ft-kernels/src/layers/swiglu/cuda.rs

// Same as in crates/ft-kernels/src/layers/swiglu/activation.rs.
struct Activation {
  uint32_t kind; // 0 silu, 1 gelu by tanh, 2 clamped, 3 sigmoid
  float alpha, limit;

  // Output, and derivatives by gate and up, for one pair of values.
  DEVICE float value(float g, float u, float &of_gate, float &of_up) const {
    if (kind == 1) {
      const float scale = 1.5957691216f, cube = 0.044715f;
      const float s = logistic(scale * (g + cube * g * g * g)), inner = scale * (1.0f + 3.0f * cube * g * g);
      of_gate = u * s * (1.0f + g * (1.0f - s) * inner), of_up = g * s;
      return g * s * u;
    }
    if (kind == 2) {
      const bool low = !(g > limit), inside = !(u > limit || u < -limit);
      const float gc = low ? g : limit, uc = inside ? u : u > limit ? limit : -limit;
      const float s = logistic(alpha * gc);
      of_gate = low ? (uc + 1.0f) * s * (1.0f + alpha * gc * (1.0f - s)) : 0.0f;
      of_up = inside ? gc * s : 0.0f;
      return (uc + 1.0f) * gc * s;
    }
    const float s = logistic(g);
    if (kind == 3) {
      of_gate = u * s * (1.0f - s), of_up = s;
      return s * u;
    }
    of_gate = u * s * (1.0f + g * (1.0f - s)), of_up = g * s;
    return g * s * u;
  }
};

template <typename T, int V>
DEVICE void forward(const Activation &act, const T *gate, const T *up, T *y, uint32_t at, uint32_t step) {
  float g[V], u[V];
  get(gate + static_cast<size_t>(at) * step, g), get(up + static_cast<size_t>(at) * step, u);
#pragma unroll
  for (int i = 0; i < V; i++) {
    float of_gate, of_up;
    g[i] = act.value(g[i], u[i], of_gate, of_up);
  }
  put(y + at, g);
}

template <typename T, int V>
DEVICE void backward(const Activation &act, const T *gate, const T *up, const T *dy, T *dgate, T *dup, T *h,
                     uint32_t at, uint32_t step) {
  const size_t pair = static_cast<size_t>(at) * step;
  float g[V], u[V], d[V], out[V];
  get(gate + pair, g), get(up + pair, u), get(dy + at, d);
#pragma unroll
  for (int i = 0; i < V; i++) {
    float of_gate, of_up;
    out[i] = act.value(g[i], u[i], of_gate, of_up);
    u[i] = d[i] * of_gate;
    g[i] = d[i] * of_up;
  }
  put(dgate + pair, u), put(dup + pair, g);
  if (h != nullptr) put(h + at, out);
}

// Of a row whose output is weighted: the gradients from `dy`, that of the weighted output over `factor`. Returns this
// thread's part of the factor's gradient, the product of `dy` and the output as stored.
template <typename T, int V>
DEVICE float weighted(const Activation &act, const T *gate, const T *up, const T *dy, float factor, T *dgate, T *dup,
                      uint32_t at, uint32_t step) {
  const size_t pair = static_cast<size_t>(at) * step;
  float g[V], u[V], d[V], dot = 0;
  get(gate + pair, g), get(up + pair, u), get(dy + at, d);
#pragma unroll
  for (int i = 0; i < V; i++) {
    float of_gate, of_up;
    dot += d[i] * rounded<T>(act.value(g[i], u[i], of_gate, of_up));
    u[i] = factor * d[i] * of_gate;
    g[i] = factor * d[i] * of_up;
  }
  put(dgate + pair, u), put(dup + pair, g);
  return dot;
}

#define SWIGLU(NAME, T)                                                                                                \
  KERNEL(swiglu_forward_##NAME, THREADS, const T *gate, const T *up, T *y, uint32_t width, uint32_t apart,             \
         uint32_t of_input, uint32_t step, uint32_t beside, uint32_t kind, float alpha, float limit) {                 \
    const Activation act = {kind, alpha, limit};                                                                       \
    const size_t row = blockIdx.x, at = row * of_input;                                                                \
    up = up == nullptr ? gate + at + beside : up + at;                                                                 \
    gate += at, y += row * apart;                                                                                      \
    const bool vectors = step == 1 && (width | apart | of_input) % VECTOR<T> == 0 && is_aligned(gate) &&               \
                         is_aligned(up) && is_aligned(y);                                                              \
    each<VECTOR<T>>(                                                                                                   \
        vectors, width, [&](uint32_t i) { forward<T, VECTOR<T>>(act, gate, up, y, i, 1); },                            \
        [&](uint32_t i) { forward<T, 1>(act, gate, up, y, i, step); }, blockIdx.y);                                    \
  }                                                                                                                    \
  KERNEL(swiglu_backward_##NAME, THREADS, const T *gate, const T *up, const T *dy, T *dgate, T *dup, T *h,             \
         uint32_t width, uint32_t gate_apart, uint32_t up_apart, uint32_t of_input, uint32_t step, uint32_t beside,    \
         uint32_t kind, float alpha, float limit) {                                                                    \
    const Activation act = {kind, alpha, limit};                                                                       \
    const size_t row = blockIdx.x, at = row * of_input;                                                                \
    dgate += row * gate_apart, dup = up == nullptr ? dgate + beside : dup + row * up_apart;                            \
    up = up == nullptr ? gate + at + beside : up + at;                                                                 \
    gate += at, dy += row * width;                                                                                     \
    h = h == nullptr ? nullptr : h + row * width;                                                                      \
    const bool vectors = step == 1 && (width | gate_apart | up_apart | of_input) % VECTOR<T> == 0 &&                   \
                         is_aligned(gate) && is_aligned(up) && is_aligned(dy) && is_aligned(dgate) &&                  \
                         is_aligned(dup) && is_aligned(h);                                                             \
    each<VECTOR<T>>(                                                                                                   \
        vectors, width, [&](uint32_t i) { backward<T, VECTOR<T>>(act, gate, up, dy, dgate, dup, h, i, 1); },           \
        [&](uint32_t i) { backward<T, 1>(act, gate, up, dy, dgate, dup, h, i, step); }, blockIdx.y);                   \
  }                                                                                                                    \
  KERNEL(swiglu_weighted_##NAME, THREADS, const T *gate, const T *up, const T *dy, const uint32_t *pair,               \
         const float *factors, T *dgate, T *dup, float *dfactors, uint32_t width, uint32_t of_input, uint32_t step,    \
         uint32_t beside, uint32_t kind, float alpha, float limit) {                                                   \
    SHARED_ARRAY(float, scratch, THREADS / WARP);                                                                      \
    const Activation act = {kind, alpha, limit};                                                                       \
    const size_t row = blockIdx.x, at = row * of_input;                                                                \
    const uint32_t own = pair[row];                                                                                    \
    const float factor = factors[own];                                                                                 \
    dgate += at, dup = up == nullptr ? dgate + beside : dup + at;                                                      \
    up = up == nullptr ? gate + at + beside : up + at;                                                                 \
    gate += at, dy += row * width;                                                                                     \
    const bool vectors = step == 1 && (width | of_input) % VECTOR<T> == 0 && is_aligned(gate) && is_aligned(up) &&     \
                         is_aligned(dy) && is_aligned(dgate) && is_aligned(dup);                                       \
    float dot = 0;                                                                                                     \
    for (uint32_t i = 0; i * blockDim.x * VECTOR<T> < width; i++)                                                      \
      each<VECTOR<T>>(                                                                                                 \
          vectors, width,                                                                                              \
          [&](uint32_t i) { dot += weighted<T, VECTOR<T>>(act, gate, up, dy, factor, dgate, dup, i, 1); },             \
          [&](uint32_t i) { dot += weighted<T, 1>(act, gate, up, dy, factor, dgate, dup, i, step); }, i);              \
    dot = warp_sum(dot);                                                                                               \
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = dot;                                                    \
    __syncthreads();                                                                                                   \
    if (threadIdx.x > 0) return;                                                                                       \
    float sum = 0;                                                                                                     \
    for (uint32_t w = 0; w < blockDim.x / WARP; w++) sum += scratch[w];                                                \
    dfactors[own] = sum;                                                                                               \
  }

SWIGLU(f32, float)
SWIGLU(bf16, bf16)
SWIGLU(f16, f16)
