// Sum of two tensors. Each thread adds the values of 16 bytes; unaligned tensors are added value by value.
#include "../../cuda/rows.cuh"

constexpr int THREADS = 256; // same as in crates/ft-kernels/src/arithmetic/add/mod.rs

template <typename T, int V> DEVICE void add(const T *a, const T *b, T *y, size_t at) {
  float x[V], z[V];
  get(a + at, x), get(b + at, z);
#pragma unroll
  for (int i = 0; i < V; i++) x[i] += z[i];
  put(y + at, x);
}

#define ADD(NAME, T)                                                                                                   \
  KERNEL(add_##NAME, THREADS, const T *a, const T *b, T *y, uint64_t count) {                                          \
    constexpr int EACH = VECTOR<T>;                                                                                    \
    each<EACH>(                                                                                                        \
        is_aligned(a) && is_aligned(b) && is_aligned(y), count, [&](size_t at) { add<T, EACH>(a, b, y, at); },         \
        [&](size_t at) { add<T, 1>(a, b, y, at); }, blockIdx.x);                                                       \
  }

ADD(f32, float)
ADD(bf16, bf16)
ADD(f16, f16)
