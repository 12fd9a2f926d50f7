// Sorts tokens by expert on the device. A token with k experts is k pairs; pairs sorted by expert, then
// by index, are the experts' input rows. Positions come from counting, without atomics, so the order is
// deterministic.
#include "../../cuda/rows.cuh"

constexpr int SORT_THREADS = 512;
constexpr uint32_t NONE = 0xffffffffu;

DEVICE uint32_t warp_count(uint32_t x) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, step);
  return x;
}

// One block per expert. Each warp counts, in its part of the pairs, those of lower experts and of its own, then places
// its own in order. starts [experts + 1]: first row of each expert. token and pair of each row, place (row) of each
// pair: [pairs].
KERNEL(dispatch_sort, SORT_THREADS, const uint32_t *chosen, uint32_t pairs, uint32_t top_k, uint32_t *starts,
       uint32_t *token, uint32_t *pair, uint32_t *place) {
  constexpr uint32_t WARPS = SORT_THREADS / WARP;
  SHARED_ARRAY(uint32_t, lower, WARPS);
  SHARED_ARRAY(uint32_t, own, WARPS);
  const uint32_t e = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const uint32_t part = (pairs + SORT_THREADS - 1) / SORT_THREADS * WARP, begin = warp * part,
                 end = min(begin + part, pairs);
  uint32_t below = 0, mine = 0;
#pragma unroll 8
  for (uint32_t p = begin + lane; p < end; p += WARP) below += chosen[p] < e, mine += chosen[p] == e;
  below = warp_count(below), mine = warp_count(mine);
  if (lane == 0) lower[warp] = below, own[warp] = mine;
  __syncthreads();
  uint32_t first = 0, before = 0;
#pragma unroll
  for (uint32_t w = 0; w < WARPS; w++) first += lower[w], before += w < warp ? own[w] : 0;
  if (threadIdx.x == 0) {
    starts[e] = first;
    if (e + 1 == gridDim.x) starts[e + 1] = pairs;
  }
  uint32_t next = first + before;
  constexpr uint32_t BATCH = 8; // loads before the first store
#pragma unroll 1
  for (uint32_t batch = begin; batch < end; batch += BATCH * WARP) {
    bool is_own[BATCH];
#pragma unroll
    for (uint32_t i = 0; i < BATCH; i++) {
      const uint32_t p = batch + i * WARP + lane;
      is_own[i] = p < end && chosen[p] == e;
    }
#pragma unroll
    for (uint32_t i = 0; i < BATCH; i++) {
      const uint32_t p = batch + i * WARP + lane, votes = __ballot_sync(ALL, is_own[i]);
      if (is_own[i]) {
        const uint32_t row = next + __popc(votes & ((1u << lane) - 1));
        token[row] = p / top_k, pair[row] = p, place[p] = row;
      }
      next += __popc(votes);
    }
  }
}

// Tile schedule of the grouped products: (expert, first row) per tile of up to `rows` rows, padded with
// (NONE, 0) up to `tiles` entries.
constexpr int TILE_THREADS = 256;
KERNEL(dispatch_tiles, TILE_THREADS, const uint32_t *starts, uint32_t experts, uint32_t rows, uint32_t tiles,
       uint2 *out) {
  SHARED_BYTES(shared);
  uint32_t *const ends = reinterpret_cast<uint32_t *>(shared); // inclusive prefix sum of tiles per expert
  if (threadIdx.x < WARP) {
    uint32_t all = 0;
    for (uint32_t first = 0; first < experts; first += WARP) {
      const uint32_t e = first + threadIdx.x;
      uint32_t n = e < experts ? (starts[e + 1] - starts[e] + rows - 1) / rows : 0;
#pragma unroll
      for (int step = 1; step < WARP; step *= 2) {
        const uint32_t other = __shfl_up_sync(ALL, n, step);
        if (threadIdx.x >= static_cast<unsigned>(step)) n += other;
      }
      if (e < experts) ends[e] = all + n;
      all += __shfl_sync(ALL, n, WARP - 1);
    }
  }
  __syncthreads();
  const uint32_t i = blockIdx.x * TILE_THREADS + threadIdx.x;
  if (i >= tiles) return;
  // the expert of tile i: the number of experts ending at or before it; all threads read the same address
  uint32_t low = 0;
  for (uint32_t e = 0; e < experts; e++) low += ends[e] <= i;
  uint2 tile = make_uint2(NONE, 0);
  if (low < experts) tile = make_uint2(low, starts[low] + (i - (low > 0 ? ends[low - 1] : 0)) * rows);
  store_8(out + i, tile);
}

// ---- gather rows into expert order, and back: one block per row ----

constexpr int THREADS = 128; // must match crates/ft-kernels/src/experts/dispatch/cuda.rs

template <typename T, int V> DEVICE void gather(const T *x, uint32_t token, uint32_t width, T *y) {
  for (uint32_t c = threadIdx.x * V; c < width; c += THREADS * V) {
    float v[V];
    get(x + static_cast<uint64_t>(token) * width + c, v);
    put(y + c, v);
  }
}

// Overwrites an expert's output row with the gradient gate * dy, and returns the gradient of the gate.
template <typename T, int V> DEVICE float scale(const T *dy, float gate, uint32_t width, T *rows) {
  float dot = 0;
  for (uint32_t c = threadIdx.x * V; c < width; c += THREADS * V) {
    float d[V], r[V];
    get(dy + c, d), get(rows + c, r);
#pragma unroll
    for (int i = 0; i < V; i++) dot += d[i] * r[i], r[i] = gate * d[i];
    put(rows + c, r);
  }
  return dot;
}

// V values of y = x times the gates of their rows.
template <typename T, int V>
DEVICE void weigh(const T *x, const uint32_t *pair, const float *gates, uint32_t width, T *y, size_t at) {
  const float gate = gates[pair[at / width]];
  float v[V];
  get(x + at, v);
#pragma unroll
  for (int i = 0; i < V; i++) v[i] *= gate;
  put(y + at, v);
}

// y = add + sum of a token's rows in the order of its experts, weighted by the gates.
template <typename T, int V>
DEVICE void combine(const T *rows, const uint32_t *place, const float *gates, const T *add, uint32_t top_k,
                    uint32_t width, T *y) {
  for (uint32_t c = threadIdx.x * V; c < width; c += THREADS * V) {
    float sum[V] = {};
    for (uint32_t j = 0; j < top_k; j++) {
      float r[V];
      get(rows + static_cast<uint64_t>(place[j]) * width + c, r);
      const float gate = gates == nullptr ? 1.0f : gates[j];
#pragma unroll
      for (int i = 0; i < V; i++) sum[i] += gate * r[i];
    }
    if (add != nullptr) {
      float a[V];
      get(add + c, a);
#pragma unroll
      for (int i = 0; i < V; i++) sum[i] += a[i];
    }
    put(y + c, sum);
  }
}

#define DISPATCH(NAME, T)                                                                                              \
  KERNEL(dispatch_gather_##NAME, THREADS, const T *x, const uint32_t *token, uint32_t width, T *y) {                   \
    y += static_cast<uint64_t>(blockIdx.x) * width;                                                                    \
    if (width % VECTOR<T> == 0 && is_aligned(x) && is_aligned(y))                                                      \
      gather<T, VECTOR<T>>(x, token[blockIdx.x], width, y);                                                            \
    else gather<T, 1>(x, token[blockIdx.x], width, y);                                                                 \
  }                                                                                                                    \
  KERNEL(dispatch_scale_##NAME, THREADS, const T *dy, const uint32_t *token, const uint32_t *pair, const float *gates, \
         uint32_t width, T *rows, float *dgates) {                                                                     \
    SHARED_ARRAY(float, scratch, THREADS / WARP);                                                                      \
    dy += static_cast<uint64_t>(token[blockIdx.x]) * width, rows += static_cast<uint64_t>(blockIdx.x) * width;         \
    const uint32_t p = pair[blockIdx.x];                                                                               \
    const bool whole = width % VECTOR<T> == 0 && is_aligned(dy) && is_aligned(rows);                                   \
    const float part =                                                                                                 \
        whole ? scale<T, VECTOR<T>>(dy, gates[p], width, rows) : scale<T, 1>(dy, gates[p], width, rows);               \
    const float dot = block_sum<THREADS>(part, scratch);                                                               \
    if (threadIdx.x == 0) dgates[p] = dot;                                                                             \
  }                                                                                                                    \
  KERNEL(dispatch_weigh_##NAME, THREADS, const T *x, const uint32_t *pair, const float *gates, uint64_t count,         \
         uint32_t width, T *y) {                                                                                       \
    each<VECTOR<T>>(                                                                                                   \
        width % VECTOR<T> == 0 && is_aligned(x) && is_aligned(y), count,                                               \
        [&](size_t i) { weigh<T, VECTOR<T>>(x, pair, gates, width, y, i); },                                           \
        [&](size_t i) { weigh<T, 1>(x, pair, gates, width, y, i); }, blockIdx.x);                                      \
  }                                                                                                                    \
  KERNEL(dispatch_combine_##NAME, THREADS, const T *rows, const uint32_t *place, const float *gates, const T *add,     \
         uint32_t top_k, uint32_t width, T *y) {                                                                       \
    const uint64_t first = static_cast<uint64_t>(blockIdx.x) * top_k, at = static_cast<uint64_t>(blockIdx.x) * width;  \
    place += first, gates = gates == nullptr ? nullptr : gates + first, add = add == nullptr ? nullptr : add + at;     \
    if (width % VECTOR<T> == 0 && is_aligned(rows) && is_aligned(y) && is_aligned(add))                                \
      combine<T, VECTOR<T>>(rows, place, gates, add, top_k, width, y + at);                                            \
    else combine<T, 1>(rows, place, gates, add, top_k, width, y + at);                                                 \
  }

DISPATCH(f32, float)
DISPATCH(bf16, bf16)
DISPATCH(f16, f16)
