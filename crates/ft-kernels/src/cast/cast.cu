// Values in another type. A thread takes four: a vector of 16 bytes in f32, half of one in 16 bits, so that a warp's loads and
// its stores are each one range; values that begin at no vector go one by one.
#include "../cuda/rows.cuh"

constexpr int THREADS = 256; // in crates/ft-kernels/src/cast/mod.rs too
constexpr int EACH = 4;

template <typename From, typename To, int V> DEVICE void cast(const From *x, To *y, size_t at) {
  float v[V];
  get(x + at, v);
  put(y + at, v);
}

#define CAST(NAME, FROM, TO)                                                                                           \
  KERNEL(cast_##NAME, THREADS, const FROM *x, TO *y, uint64_t count) {                                                 \
    each<EACH>(is_aligned(x) && is_aligned(y), count, [&](size_t at) { cast<FROM, TO, EACH>(x, y, at); },              \
               [&](size_t at) { cast<FROM, TO, 1>(x, y, at); }, blockIdx.x);                                           \
  }

CAST(f32_bf16, float, bf16)
CAST(bf16_f32, bf16, float)
CAST(f32_f16, float, f16)
CAST(f16_f32, f16, float)
