// Dropout: values times 0 or one other factor, by the same counter-based numbers as src/rng.rs draws, made where they are
// used. Element (r, c) of a matrix depends on its number, row * width + c, alone: rows count from `first` on, or are
// those of a list. A block a row, and parts of it in the grid's second dimension; rows of x may stand farther `apart` than
// they are long.
#include "stream.cuh"

constexpr int THREADS = 256; // in crates/ft-kernels/src/dropout/cuda.rs too

#define DROPOUT(NAME, T)                                                                                               \
  KERNEL(dropout_##NAME, THREADS, const T *x, const T *add, const uint32_t *list, T *y, uint32_t columns,              \
         uint32_t apart, uint64_t first, float factor, uint32_t key0, uint32_t key1, uint32_t high0, uint32_t high1,   \
         uint32_t threshold) {                                                                                         \
    const Stream s = {key0, key1, high0, high1, threshold};                                                            \
    const uint64_t at = static_cast<uint64_t>(blockIdx.x) * columns;                                                   \
    const uint64_t number = (first + (list == nullptr ? blockIdx.x : list[blockIdx.x])) * columns;                     \
    x += static_cast<uint64_t>(blockIdx.x) * apart, y += at, add = add == nullptr ? nullptr : add + at;                \
    const Part part = {blockIdx.y * THREADS + threadIdx.x, gridDim.y * THREADS};                                       \
    if ((columns | apart) % VECTOR<T> == 0 && is_aligned(x) && is_aligned(add) && is_aligned(y))                       \
      drop<T, VECTOR<T>>(x, add, y, columns, part, number, factor, s);                                                 \
    else drop<T, 1>(x, add, y, columns, part, number, factor, s);                                                      \
  }

DROPOUT(f32, float)
DROPOUT(bf16, bf16)
DROPOUT(f16, f16)
