// Dropout on rows sorted by expert. Each expert's linear layer has its own random stream, indexed by
// token. One block per row.
#include "../../adapters/dropout/stream.cuh"
#include "grouped.cuh"

// Token numbers start at `first`; `pair` [n] and `chosen` [pairs] give the token and expert of a row.
#define DROPOUT(NAME, T)                                                                                               \
  KERNEL(grouped_dropout_##NAME, THREADS, const Expert *experts, const uint32_t *chosen, const uint32_t *pair,         \
         uint32_t top_k, const T *x, const T *add, uint32_t width, uint64_t first, uint32_t key0, uint32_t key1,       \
         uint32_t step, T *y) {                                                                                        \
    const uint32_t p = pair[blockIdx.x];                                                                               \
    const Expert &e = experts[chosen[p]];                                                                              \
    const Stream s = {key0, key1, step, e.stream, e.threshold};                                                        \
    const uint64_t at = static_cast<uint64_t>(blockIdx.x) * width, number = (first + p / top_k) * width;               \
    x += at, y += at, add = add == nullptr ? nullptr : add + at;                                                       \
    const Part part = {threadIdx.x, THREADS};                                                                          \
    if (width % VECTOR<T> == 0 && is_aligned(x) && is_aligned(add) && is_aligned(y))                                   \
      drop<T, VECTOR<T>>(x, add, y, width, part, number, e.keep, s);                                                   \
    else drop<T, 1>(x, add, y, width, part, number, e.keep, s);                                                        \
  }

DROPOUT(f32, float)
DROPOUT(bf16, bf16)
DROPOUT(f16, f16)
