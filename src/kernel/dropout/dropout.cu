// Dropout: values times 0 or one other factor, by the same counter-based numbers as src/rng.rs draws, made where they are
// used. Element (r, c) of a matrix depends on its number, row * width + c, alone: rows count from `first` on, or are
// those of a list.
#include "../cuda/rows.cuh"
#include "stream.cuh"

constexpr int THREADS = 256; // in src/kernel/dropout/cuda.rs too

// y = factor * x where a number is kept, 0 elsewhere, and `add` to it if that is there. A block a row; in the grid's second
// dimension are parts of it.
template <typename T, int V>
DEVICE void drop(const T *x, const T *add, const uint32_t *list, T *y, uint32_t columns, uint64_t first, float factor,
                 const Stream &s) {
  const uint64_t row = first + (list == nullptr ? blockIdx.x : list[blockIdx.x]);
  for (uint32_t c = (blockIdx.y * THREADS + threadIdx.x) * V; c < columns; c += gridDim.y * THREADS * V) {
    const size_t at = static_cast<size_t>(blockIdx.x) * columns + c;
    bool kept[V];
    s.keeps(row * columns + c, kept);
    float v[V];
    get(x + at, v);
#pragma unroll
    for (int j = 0; j < V; j++) v[j] = kept[j] ? v[j] * factor : 0.0f;
    if (add != nullptr) {
      float a[V];
      get(add + at, a);
#pragma unroll
      for (int j = 0; j < V; j++) v[j] += a[j];
    }
    put(y + at, v);
  }
}

#define DROPOUT(NAME, T)                                                                                               \
  KERNEL(dropout_##NAME, THREADS, const T *x, const T *add, const uint32_t *list, T *y, uint32_t columns,              \
         uint64_t first, float factor, uint32_t key0, uint32_t key1, uint32_t high0, uint32_t high1,                   \
         uint32_t threshold) {                                                                                         \
    const Stream s = {key0, key1, high0, high1, threshold};                                                            \
    if (columns % VECTOR<T> == 0 && is_aligned(x) && is_aligned(add) && is_aligned(y))                                 \
      drop<T, VECTOR<T>>(x, add, list, y, columns, first, factor, s);                                                  \
    else drop<T, 1>(x, add, list, y, columns, first, factor, s);                                                       \
  }

DROPOUT(f32, float)
DROPOUT(bf16, bf16)
DROPOUT(f16, f16)
