// Adds a bias to every row in place; adds the sum of rows to a gradient buffer.
#include "../../cuda/rows.cuh"

constexpr int THREADS = 256;

// y[row] += b, one block per row.
template <typename T> DEVICE void add(const T *b, uint64_t rows, uint64_t width, T *y) {
  T *own = y + blockIdx.x * width;
  uint64_t done = 0;
  if (is_aligned(b) && is_aligned(own)) {
    constexpr int N = VECTOR<T>;
    for (uint64_t i = threadIdx.x; i < width / N; i += THREADS) {
      float u[N], v[N];
      load_vector(b + i * N, u);
      load_vector(own + i * N, v);
#pragma unroll
      for (int k = 0; k < N; k++) v[k] += u[k];
      store_vector(own + i * N, v);
    }
    done = width / N * N;
  }
  for (uint64_t i = done + threadIdx.x; i < width; i += THREADS) store(own + i, load(own + i) + load(b + i));
}

// grad[c] = sum of dy[.., c], or += with `add`.
template <typename T> DEVICE void sum(const T *dy, uint64_t rows, uint64_t width, float *grad, bool add) {
  column_sums<THREADS / WARP>(
      rows, width, grad, add, [&](float own, uint64_t at) { return own + load(dy + at); },
      [](uint64_t) { return 1.0f; });
}

#define BIAS(T)                                                                                                        \
  KERNEL(bias_add_##T, THREADS, const T *b, uint64_t rows, uint64_t width, T *y) { add(b, rows, width, y); }           \
  KERNEL(bias_sum_##T, THREADS, const T *dy, uint64_t rows, uint64_t width, float *grad, uint32_t add) {               \
    sum(dy, rows, width, grad, add != 0);                                                                              \
  }

using f32 = float;
BIAS(f32)
BIAS(bf16)
BIAS(f16)
