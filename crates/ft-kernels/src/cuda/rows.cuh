// Shared parts of row-wise kernels: access to V values at a time (a 16-byte vector, or a single value for
// unaligned rows), and sums over a block of whole warps.
#pragma once
#include "device.cuh"

DEVICE float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename T, int V> DEVICE void get(const T *p, float (&out)[V]) {
  if constexpr (V == 1) out[0] = load(p);
  else if constexpr (V == VECTOR<T>) load_vector(p, out);
  else {
    static_assert(2 * V == VECTOR<T>, "half a vector");
    union {
      uint2 bits;
      T value[V];
    } of = {load_8(p)};
#pragma unroll
    for (int i = 0; i < V; i++) out[i] = Number<T>::widen(of.value[i]);
  }
}

template <typename T, int V> DEVICE void put(T *p, const float (&in)[V]) {
  if constexpr (V == 1) store(p, in[0]);
  else if constexpr (V == VECTOR<T>) store_vector(p, in);
  else store_8(p, make_uint2(pack<T>(in[0], in[1]), pack<T>(in[2], in[3])));
}

// Stores V floats, in two vectors if V is 8.
template <int V> DEVICE void put_floats(float *p, const float (&in)[V]) {
  if constexpr (V == 8) {
    const float low[4] = {in[0], in[1], in[2], in[3]}, high[4] = {in[4], in[5], in[6], in[7]};
    store_vector(p, low), store_vector(p + 4, high);
  } else put(p, in);
}

// Sums of x and y over the block, for all threads. `scratch` holds two floats per warp, and can be reused
// by the next call.
DEVICE void block_sums(float &x, float &y, float *scratch) {
  const unsigned warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
  x = warp_sum(x), y = warp_sum(y);
  if (warps == 1) return;
  if (lane == 0) scratch[threadIdx.x / WARP] = x, scratch[warps + threadIdx.x / WARP] = y;
  __syncthreads();
  x = warp_sum(lane < warps ? scratch[lane] : 0.0f);
  y = warp_sum(lane < warps ? scratch[warps + lane] : 0.0f);
  __syncthreads();
}

// Calls `vector` with the start of each full group of V values, and `one` for remaining values. Without
// `vectors`, all values go to `one`, adjacent threads taking adjacent values. A block covers V values per
// thread; `block` is its index, `count` the total number of values.
template <int V, typename Vector, typename One>
DEVICE void each(bool vectors, size_t count, const Vector &vector, const One &one, uint32_t block) {
  const size_t begin = static_cast<size_t>(block) * blockDim.x * V;
  const size_t first = begin + threadIdx.x * V;
  if (vectors && first + V <= count) {
    vector(first);
  } else if (vectors) {
    for (size_t at = first; at < count; at++) one(at);
  } else {
    for (int i = 0; i < V; i++) {
      const size_t at = begin + i * blockDim.x + threadIdx.x;
      if (at < count) one(at);
    }
  }
}

// grad[c] = factor(c) times a sum over rows, added to grad[c] if `add` is set; `value` adds the term at (row, c) to a
// running sum. A block covers 32 columns. Its WARPS warps take turns over the rows, and partial sums are added in a
// fixed order.
template <int WARPS, typename Value, typename Factor>
DEVICE void column_sums(uint64_t rows, uint64_t width, float *grad, bool add, const Value &value,
                        const Factor &factor) {
  SHARED_ARRAY(float, part, WARPS *WARP);
  const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const uint64_t column = static_cast<uint64_t>(blockIdx.x) * WARP + lane;
  float own = 0.0f;
  if (column < width)
    for (uint64_t r = warp; r < rows; r += WARPS) own = value(own, r * width + column);
  part[warp * WARP + lane] = own;
  __syncthreads();
  if (warp != 0 || column >= width) return;
  float all = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) all += part[w * WARP + lane];
  grad[column] = (add ? grad[column] : 0.0f) + all * factor(column);
}
