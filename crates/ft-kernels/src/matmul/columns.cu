// Copies a matrix between buffers of different row strides: `rows` rows of `cols` values. A thread copies 16 bytes; of
// rows that are not aligned, single values.
#include "../cuda/rows.cuh"

constexpr int THREADS = 256; // same as in crates/ft-kernels/src/matmul/columns.rs

#define COLUMNS(NAME, T)                                                                                               \
  KERNEL(columns_##NAME, THREADS, const T *from, uint32_t from_apart, T *to, uint32_t to_apart, uint32_t rows,         \
         uint32_t cols) {                                                                                              \
    constexpr int V = VECTOR<T>;                                                                                       \
    const bool vectors = (cols | from_apart | to_apart) % V == 0 && is_aligned(from) && is_aligned(to);                \
    const uint32_t each = vectors ? V : 1, units = cols / each;                                                        \
    for (uint64_t i = uint64_t(blockIdx.x) * THREADS + threadIdx.x; i < uint64_t(rows) * units;                        \
         i += uint64_t(gridDim.x) * THREADS) {                                                                         \
      const uint64_t row = i / units, c = i % units * each;                                                            \
      if (vectors) {                                                                                                   \
        float v[V];                                                                                                    \
        get(from + row * from_apart + c, v), put(to + row * to_apart + c, v);                                          \
      } else store(to + row * to_apart + c, load(from + row * from_apart + c));                                        \
    }                                                                                                                  \
  }

COLUMNS(f32, float)
COLUMNS(bf16, bf16)
COLUMNS(f16, f16)
