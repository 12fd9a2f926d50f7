// Scatters rows: to[index[i]] = from[i], one block per row.
#include "../../cuda/device.cuh"

template <typename T> DEVICE void spread(const uint32_t *index, const T *from, uint64_t rows, uint64_t width, T *to) {
  const uint64_t row = index[blockIdx.x];
  if (row >= rows) return;
  const T *a = from + blockIdx.x * width;
  T *b = to + row * width;
  uint64_t done = 0;
  if (is_aligned(a) && is_aligned(b)) {
    const uint64_t vectors = width / VECTOR<T>;
    for (uint64_t i = threadIdx.x; i < vectors; i += blockDim.x)
      store_16(b + i * VECTOR<T>, load_16(a + i * VECTOR<T>));
    done = vectors * VECTOR<T>;
  }
  for (uint64_t i = done + threadIdx.x; i < width; i += blockDim.x) b[i] = a[i];
}

#define SPREAD(T)                                                                                                      \
  KERNEL(spread_##T, 256, const uint32_t *index, const T *from, uint64_t rows, uint64_t width, T *to) {                \
    spread(index, from, rows, width, to);                                                                              \
  }

using f32 = float;
SPREAD(f32)
SPREAD(bf16)
SPREAD(f16)
