// Dropout: values times 0 or one other factor, by the same counter-based numbers as src/rng.rs draws, made where they are
// used. Element (r, c) of a matrix depends on its number, row * width + c, alone: rows count from `first` on, or are
// those of a list.
#include "../cuda/rows.cuh"

constexpr int THREADS = 256; // in src/kernel/dropout/cuda.rs too

// The stream: src/rng.rs says of what. A number is kept where 24 bits of its word are not below `threshold`.
struct Stream {
  uint32_t key0, key1, high0, high1, threshold;

  // Four words of a block: Philox4x32-10.
  DEVICE void words(uint64_t block, uint32_t (&out)[4]) const {
    uint32_t a = static_cast<uint32_t>(block), b = static_cast<uint32_t>(block >> 32), c = high0, d = high1;
    uint32_t k0 = key0, k1 = key1;
#pragma unroll
    for (int round = 0; round < 10; round++) {
      const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * a, p1 = static_cast<uint64_t>(0xCD9E8D57u) * c;
      a = static_cast<uint32_t>(p1 >> 32) ^ b ^ k0, b = static_cast<uint32_t>(p1);
      c = static_cast<uint32_t>(p0 >> 32) ^ d ^ k1, d = static_cast<uint32_t>(p0);
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
  }

  // Whether element number `at` is kept.
  DEVICE bool keeps(uint64_t at) const {
    uint32_t w[4];
    words(at / 4, w);
    const uint32_t of = static_cast<uint32_t>(at % 4);
    const uint32_t word = of == 0 ? w[0] : of == 1 ? w[1] : of == 2 ? w[2] : w[3];
    return (word >> 8) >= threshold;
  }

  // Of V from `at` on; V is 1, or `at` is a multiple of 4.
  template <int V> DEVICE void keeps(uint64_t at, bool (&out)[V]) const {
    if constexpr (V == 1) out[0] = keeps(at);
    else {
#pragma unroll
      for (int i = 0; i < V; i += 4) {
        uint32_t w[4];
        words(at / 4 + i / 4, w);
#pragma unroll
        for (int j = 0; j < 4; j++) out[i + j] = (w[j] >> 8) >= threshold;
      }
    }
  }
};

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
