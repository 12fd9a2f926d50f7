// Table lookup, and the gradient of the table from tokens grouped by id: one block per id, sums in token
// order. Grid dimension y splits a row.
#include "../../cuda/rows.cuh"

constexpr int THREADS = 128; // same as in crates/ft-kernels/src/layers/embed/cuda.rs

// Calls f with the first column of each group of V columns of this thread.
template <int V, typename F> DEVICE void by_columns(uint32_t columns, const F &f) {
  for (uint32_t c = (blockIdx.y * THREADS + threadIdx.x) * V; c < columns; c += gridDim.y * THREADS * V) f(c);
}

// y[t] = table[ids[t]], one block per token. Writes NaN for an id outside the table.
template <typename T, int V>
DEVICE void rows(const T *table, const uint32_t *ids, T *y, uint32_t count, uint32_t columns) {
  const uint32_t id = ids[blockIdx.x];
  by_columns<V>(columns, [&](uint32_t c) {
    float v[V];
#pragma unroll
    for (int j = 0; j < V; j++) v[j] = NAN;
    if (id < count) get(table + static_cast<size_t>(id) * columns + c, v);
    put(y + static_cast<size_t>(blockIdx.x) * columns + c, v);
  });
}

// grad[ids[b]] += scale * sum of dy[order[i]] for starts[b] <= i < starts[b + 1], for block b.
template <typename T, int V>
DEVICE void gradient(float *grad, const uint32_t *ids, const uint32_t *starts, const uint32_t *order, const T *dy,
                     uint32_t columns, float scale) {
  float *const row = grad + static_cast<size_t>(ids[blockIdx.x]) * columns;
  const uint32_t begin = starts[blockIdx.x], end = starts[blockIdx.x + 1];
  by_columns<V>(columns, [&](uint32_t c) {
    float sum[V];
    get(row + c, sum);
#pragma unroll 4
    for (uint32_t i = begin; i < end; i++) {
      float v[V];
      get(dy + static_cast<size_t>(order[i]) * columns + c, v);
#pragma unroll
      for (int j = 0; j < V; j++) sum[j] += v[j] * scale;
    }
    put(row + c, sum);
  });
}

#define EMBED(NAME, T)                                                                                                 \
  KERNEL(embed_rows_##NAME, THREADS, const T *table, const uint32_t *ids, T *y, uint32_t count, uint32_t columns) {    \
    if (columns % VECTOR<T> == 0 && is_aligned(table) && is_aligned(y))                                                \
      rows<T, VECTOR<T>>(table, ids, y, count, columns);                                                               \
    else rows<T, 1>(table, ids, y, count, columns);                                                                    \
  }                                                                                                                    \
  KERNEL(embed_gradient_##NAME, THREADS, float *grad, const uint32_t *ids, const uint32_t *starts,                     \
         const uint32_t *order, const T *dy, uint32_t columns, float scale) {                                          \
    /* a vector of the gradient, and of values of 16 bits half of one */                                               \
    if (columns % 4 == 0 && is_aligned(grad) && is_aligned(dy))                                                        \
      gradient<T, 4>(grad, ids, starts, order, dy, columns, scale);                                                    \
    else gradient<T, 1>(grad, ids, starts, order, dy, columns, scale);                                                 \
  }

EMBED(f32, float)
EMBED(bf16, bf16)
EMBED(f16, f16)
