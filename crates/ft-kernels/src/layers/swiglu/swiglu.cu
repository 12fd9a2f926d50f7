// silu(gate) * up, and the gradients. The backward kernel can also recompute the product, the input of the
// down projection, in place of dy. A thread processes 16 bytes of each operand; unaligned rows are processed
// value by value. Every value is read and written once. A row of `width` values is one block, or several in
// grid dimension y. `apart` is the row stride of the output.
#include "../../cuda/rows.cuh"

constexpr int THREADS = 256; // same as in crates/ft-kernels/src/layers/swiglu/cuda.rs

DEVICE float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename T, int V> DEVICE void forward(const T *gate, const T *up, T *y, uint32_t at) {
  float g[V], u[V];
  get(gate + at, g), get(up + at, u);
#pragma unroll
  for (int i = 0; i < V; i++) g[i] = g[i] * logistic(g[i]) * u[i];
  put(y + at, g);
}

template <typename T, int V>
DEVICE void backward(const T *gate, const T *up, const T *dy, T *dgate, T *dup, T *h, uint32_t at) {
  float g[V], u[V], d[V], out[V];
  get(gate + at, g), get(up + at, u), get(dy + at, d);
#pragma unroll
  for (int i = 0; i < V; i++) {
    const float s = logistic(g[i]);
    out[i] = g[i] * s * u[i];
    u[i] = d[i] * u[i] * s * (1.0f + g[i] * (1.0f - s));
    g[i] = d[i] * g[i] * s;
  }
  put(dgate + at, u), put(dup + at, g);
  if (h != nullptr) put(h + at, out);
}

#define SWIGLU(NAME, T)                                                                                                \
  KERNEL(swiglu_forward_##NAME, THREADS, const T *gate, const T *up, T *y, uint32_t width, uint32_t apart) {           \
    const size_t row = blockIdx.x, at = row * width;                                                                   \
    gate += at, up += at, y += row * apart;                                                                            \
    const bool vectors = (width | apart) % VECTOR<T> == 0 && is_aligned(gate) && is_aligned(up) && is_aligned(y);      \
    each<VECTOR<T>>(vectors, width, [&](uint32_t i) { forward<T, VECTOR<T>>(gate, up, y, i); },                        \
                    [&](uint32_t i) { forward<T, 1>(gate, up, y, i); }, blockIdx.y);                                   \
  }                                                                                                                    \
  KERNEL(swiglu_backward_##NAME, THREADS, const T *gate, const T *up, const T *dy, T *dgate, T *dup, T *h,             \
         uint32_t width, uint32_t gate_apart, uint32_t up_apart) {                                                     \
    const size_t row = blockIdx.x, at = row * width;                                                                   \
    gate += at, up += at, dy += at, dgate += row * gate_apart, dup += row * up_apart;                                  \
    h = h == nullptr ? nullptr : h + at;                                                                               \
    const bool vectors = (width | gate_apart | up_apart) % VECTOR<T> == 0 && is_aligned(gate) && is_aligned(up) &&     \
                         is_aligned(dy) && is_aligned(dgate) && is_aligned(dup) && is_aligned(h);                      \
    each<VECTOR<T>>(vectors, width, [&](uint32_t i) { backward<T, VECTOR<T>>(gate, up, dy, dgate, dup, h, i); },       \
                    [&](uint32_t i) { backward<T, 1>(gate, up, dy, dgate, dup, h, i); }, blockIdx.y);                  \
  }

SWIGLU(f32, float)
SWIGLU(bf16, bf16)
SWIGLU(f16, f16)
