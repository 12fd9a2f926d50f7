// Dropout with the counter-based generator of crates/ft-base/src/rng.rs, drawn on the fly without a stored mask. The
// decision for element (r, c) depends only on the number row * all + from + c; rows count from `first`, or are
// listed. One block per row, with parts of a row in grid dimension y. `apart` is the row stride of x.
#include "stream.cuh"

constexpr int THREADS = 256; // same as in crates/ft-kernels/src/adapters/dropout/cuda.rs

#define DROPOUT(NAME, T)                                                                                               \
  KERNEL(dropout_##NAME, THREADS, const T *x, const T *add, const uint32_t *list, T *y, uint32_t columns,              \
         uint32_t apart, uint64_t first, float factor, uint32_t key0, uint32_t key1, uint32_t high0, uint32_t high1,   \
         uint32_t threshold, uint32_t from, uint32_t all) {                                                            \
    const Stream s = {key0, key1, high0, high1, threshold};                                                            \
    const uint64_t at = static_cast<uint64_t>(blockIdx.x) * columns;                                                   \
    const uint64_t number = (first + (list == nullptr ? blockIdx.x : list[blockIdx.x])) * all + from;                  \
    x += static_cast<uint64_t>(blockIdx.x) * apart, y += at, add = add == nullptr ? nullptr : add + at;                \
    const Part part = {blockIdx.y * THREADS + threadIdx.x, gridDim.y * THREADS};                                       \
    if ((columns | apart | from | all) % VECTOR<T> == 0 && is_aligned(x) && is_aligned(add) && is_aligned(y))          \
      drop<T, VECTOR<T>>(x, add, y, columns, part, number, factor, s);                                                 \
    else drop<T, 1>(x, add, y, columns, part, number, factor, s);                                                      \
  }

DROPOUT(f32, float)
DROPOUT(bf16, bf16)
DROPOUT(f16, f16)
