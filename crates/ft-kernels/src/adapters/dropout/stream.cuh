// Counter-based generator of crates/ft-base/src/rng.rs for dropout.
#pragma once
#include "../../cuda/rows.cuh"

// A stream, defined in crates/ft-base/src/rng.rs. An element is kept if the upper 24 bits of its
// word are at least `threshold`.
struct Stream {
  uint32_t key0, key1, high0, high1, threshold;

  // Four words of one counter: Philox4x32-10.
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

  // Decisions for V elements from `at`; V is 1, or `at` is a multiple of 4.
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

// Vectors of a row for one thread: index `first`, then every `step`th.
struct Part {
  uint32_t first, step;
};

// y = factor * x for kept elements, else 0, plus `add` if not null. Processes a row of `columns` elements, V
// at a time; `number` is the number of the first element.
template <typename T, int V>
DEVICE void drop(const T *x, const T *add, T *y, uint32_t columns, Part part, uint64_t number, float factor,
                 const Stream &s) {
  for (uint32_t c = part.first * V; c < columns; c += part.step * V) {
    bool kept[V];
    s.keeps(number + c, kept);
    float v[V];
    get(x + c, v);
#pragma unroll
    for (int j = 0; j < V; j++) v[j] = kept[j] ? v[j] * factor : 0.0f;
    if (add != nullptr) {
      float a[V];
      get(add + c, a);
#pragma unroll
      for (int j = 0; j < V; j++) v[j] += a[j];
    }
    put(y + c, v);
  }
}
