// Dropout of rows sorted by expert: each expert's linear draws from its own stream, by the token of a row. A block a row.
#include "../cuda/rows.cuh"
#include "../dropout/stream.cuh"
#include "grouped.cuh"

// y = factor * x where a number is kept, 0 elsewhere, and `add` to it if that is there.
template <typename T, int V>
DEVICE void drop(const T *x, const T *add, uint32_t width, uint64_t first, float factor, const Stream &s, T *y) {
  for (uint32_t c = threadIdx.x * V; c < width; c += THREADS * V) {
    bool kept[V];
    s.keeps(first + c, kept);
    float v[V];
    get(x + c, v);
#pragma unroll
    for (int i = 0; i < V; i++) v[i] = kept[i] ? v[i] * factor : 0.0f;
    if (add != nullptr) {
      float a[V];
      get(add + c, a);
#pragma unroll
      for (int i = 0; i < V; i++) v[i] += a[i];
    }
    put(y + c, v);
  }
}

// `tokens` are counted from `first` on; `pair` [n] and `chosen` [pairs] say whose a row is.
#define DROPOUT(NAME, T)                                                                                               \
  KERNEL(grouped_dropout_##NAME, THREADS, const Expert *experts, const uint32_t *chosen, const uint32_t *pair,         \
         uint32_t top_k, const T *x, const T *add, uint32_t width, uint64_t first, uint32_t key0, uint32_t key1,       \
         uint32_t step, T *y) {                                                                                        \
    const uint32_t p = pair[blockIdx.x];                                                                               \
    const Expert &e = experts[chosen[p]];                                                                              \
    const Stream s = {key0, key1, step, e.stream, e.threshold};                                                        \
    const uint64_t at = static_cast<uint64_t>(blockIdx.x) * width, number = (first + p / top_k) * width;               \
    x += at, y += at, add = add == nullptr ? nullptr : add + at;                                                       \
    if (width % VECTOR<T> == 0 && is_aligned(x) && is_aligned(add) && is_aligned(y))                                   \
      drop<T, VECTOR<T>>(x, add, width, number, e.keep, s, y);                                                         \
    else drop<T, 1>(x, add, width, number, e.keep, s, y);                                                              \
  }

DROPOUT(f32, float)
DROPOUT(bf16, bf16)
DROPOUT(f16, f16)
