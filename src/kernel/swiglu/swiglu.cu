// silu(gate) * up, and its gradients; backward writes the product again where the down projection's input is needed, which
// may be over dy.
// A thread takes a vector of 16 bytes of each; those that a vector does not divide, or that do not begin at one, go by
// one value. Each value is read and written once.
#include "../cuda/rows.cuh"

constexpr int THREADS = 256; // in src/kernel/swiglu/cuda.rs too

DEVICE float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename T, int V> DEVICE void forward(const T *gate, const T *up, T *y, size_t at) {
  float g[V], u[V];
  get(gate + at, g), get(up + at, u);
#pragma unroll
  for (int i = 0; i < V; i++) g[i] = g[i] * logistic(g[i]) * u[i];
  put(y + at, g);
}

template <typename T, int V>
DEVICE void backward(const T *gate, const T *up, const T *dy, T *dgate, T *dup, T *h, size_t at) {
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
  KERNEL(swiglu_forward_##NAME, THREADS, const T *gate, const T *up, T *y, uint64_t count) {                           \
    each<VECTOR<T>>(is_aligned(gate) && is_aligned(up) && is_aligned(y), count,                                        \
                    [&](size_t at) { forward<T, VECTOR<T>>(gate, up, y, at); },                                        \
                    [&](size_t at) { forward<T, 1>(gate, up, y, at); });                                               \
  }                                                                                                                    \
  KERNEL(swiglu_backward_##NAME, THREADS, const T *gate, const T *up, const T *dy, T *dgate, T *dup, T *h,             \
         uint64_t count) {                                                                                             \
    const bool vectors = is_aligned(gate) && is_aligned(up) && is_aligned(dy) && is_aligned(dgate) &&                  \
                         is_aligned(dup) && is_aligned(h);                                                             \
    each<VECTOR<T>>(vectors, count, [&](size_t at) { backward<T, VECTOR<T>>(gate, up, dy, dgate, dup, h, at); },       \
                    [&](size_t at) { backward<T, 1>(gate, up, dy, dgate, dup, h, at); });                              \
  }

SWIGLU(f32, float)
SWIGLU(bf16, bf16)
SWIGLU(f16, f16)
