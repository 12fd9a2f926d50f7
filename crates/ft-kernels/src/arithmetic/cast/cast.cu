// Dtype conversion. Each thread converts four values: 16 bytes in f32, 8 bytes in half precision, so that the
// loads and the stores of a warp are contiguous. Unaligned tensors are converted value by value.
#include "../../cuda/rows.cuh"

constexpr int THREADS = 256; // same as in crates/ft-kernels/src/arithmetic/cast/mod.rs
constexpr int EACH = 4;

template <typename From, typename To, int V> DEVICE void cast(const From *x, To *y, size_t at) {
  float v[V];
  get(x + at, v);
  put(y + at, v);
}

#define CAST(NAME, FROM, TO)                                                                                           \
  KERNEL(cast_##NAME, THREADS, const FROM *x, TO *y, uint64_t count) {                                                 \
    each<EACH>(                                                                                                        \
        is_aligned(x) && is_aligned(y), count, [&](size_t at) { cast<FROM, TO, EACH>(x, y, at); },                     \
        [&](size_t at) { cast<FROM, TO, 1>(x, y, at); }, blockIdx.x);                                                  \
  }

CAST(f32_bf16, float, bf16)
CAST(bf16_f32, bf16, float)
CAST(f32_f16, float, f16)
CAST(f16_f32, f16, float)
