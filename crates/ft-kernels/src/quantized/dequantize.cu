// Dequantizes a tile of a 4-bit matrix: `runs` runs of `width` values, with stride `stride` in the matrix
// (from value `first` on) and stride `apart` in the output. Whole rows form a single run; a tile of
// columns has one run per row.
//
// With `low`, a second matrix [low_rows, low_cols] with row stride `low_stride` is copied into the same
// buffer at `low_to`, with row stride `apart`: to the right of the tile or below it, so one GEMM
// multiplies both (crates/ft-kernels/src/matmul/padded.rs). Extra warps do the copy.
//
// The kernel is memory-bound: it reads half a byte per value and writes two or four. Each warp handles a
// chunk of a run (see codes.cuh); `chunks` warps per run are enough for a run starting up to 31 values
// after its first chunk.
//
// Traffic of a block with 8192 bf16 values: 4096 bytes of codes and 16,384 bytes of output. Double
// quantization in blocks of 64 adds 128 bytes of scale codes, in 8 half-used sectors, and 8 sectors of
// absmax; the map takes 1024 bytes, as do the codebooks. So 20,610 of 23,040 bytes are useful: 89%.
// Reaching copy bandwidth requires enough loads in flight; crates/ft-kernels/src/cuda/compiled_tests checks
// registers.
#include "codes.cuh"

template <typename Out> struct Low {
  const Out *from;
  uint32_t rows, cols;
  uint64_t stride, to;

  // Copies the values of warp `warp`: one chunk.
  DEVICE void copy(Out *out, uint64_t apart, uint32_t warp, unsigned lane) const {
    constexpr int N = VECTOR<Out>;
    if (from == nullptr) return;
    const bool whole = cols % N == 0 && (stride | apart | to) % N == 0 && is_aligned(from) && is_aligned(out);
    if (whole) copy_by<N>(out, apart, warp, lane);
    else copy_by<1>(out, apart, warp, lane);
  }

private:
  // Copies V values at a time. BATCH loads are in flight.
  template <int V> DEVICE void copy_by(Out *out, uint64_t apart, uint32_t warp, unsigned lane) const {
    using Unit = std::conditional_t<V == 1, Out, uint4>;
    constexpr uint32_t BATCH = 4;
    const uint32_t across = cols / V, begin = warp * (CHUNK / V), end = min(begin + CHUNK / V, rows * across);
#pragma unroll 1
    for (uint32_t first = begin + lane; first < end; first += BATCH * WARP) {
      Unit unit[BATCH];
#pragma unroll
      for (uint32_t b = 0; b < BATCH; b++) {
        const uint32_t i = min(first + b * WARP, end - 1);
        unit[b] = *reinterpret_cast<const Unit *>(from + i / across * stride + i % across * V);
      }
#pragma unroll
      for (uint32_t b = 0; b < BATCH; b++) {
        const uint32_t i = first + b * WARP;
        if (i < end) *reinterpret_cast<Unit *>(out + to + i / across * apart + i % across * V) = unit[b];
      }
    }
  }
};

constexpr int BLOCK = 256;

template <typename Source, typename Out>
DEVICE void dequantize(const Matrix &from, uint64_t first, uint64_t stride, uint64_t width, uint32_t runs,
                       uint32_t chunks, uint64_t apart, const Low<Out> &low, Out *out) {
  constexpr int N = VECTOR<Out>;
  constexpr int STEPS = CHUNK / (WARP * N);
  static_assert(BLOCK == 256, "a thread an entry of the map");
  SHARED_ARRAY(float, map, BLOCK *COPIES);
  const Matrix m = bring_map(from, map);
  const unsigned lane = threadIdx.x % WARP;
  const uint32_t warp = blockIdx.x * (BLOCK / WARP) + threadIdx.x / WARP;
  const uint32_t run = warp / chunks;
  const uint64_t begin = first + run * stride, end = begin + width;
  const uint64_t base = begin / 32 * 32 + warp % chunks * static_cast<uint64_t>(CHUNK);
  const bool some = run < runs && base < end;

  // issue all loads of a lane before using any
  uint32_t word[STEPS];
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const uint64_t at = base + (s * WARP + lane) * N;
    word[s] = some && at < end && at + N > begin ? m.codes<N>(at) : 0;
  }
  __syncthreads();
  if (!some) {
    if (run >= runs) low.copy(out, apart, warp - runs * chunks, lane);
    return;
  }
  const float scales = lane_scale(m, base, end, lane), entry = m.entry(lane);
  const uint64_t place = run * apart; // in the tile
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    if (base + s * WARP * N >= end) break; // uniform across the warp
    const uint64_t at = base + (s * WARP + lane) * N;
    float v[N];
    values<Source, N>(m, word[s], at, base, scales, entry, v);
    if (at >= begin && at + N <= end && (place + at - begin) % N == 0) {
      store_16_global(out + (place + at - begin), packed<Out>(v));
    } else {
#pragma unroll
      for (int i = 0; i < N; i++)
        if (at + i >= begin && at + i < end) out[place + at + i - begin] = Number<Out>::from(v[i]);
    }
  }
}

#define DEQUANTIZE(NAME, SOURCE, OUT)                                                                                  \
  KERNEL(NAME, SIDE_BY_SIDE(3, BLOCK), MATRIX, uint64_t first, uint64_t stride, uint64_t width, uint32_t runs,         \
         uint32_t chunks, uint64_t apart, const OUT *low, uint32_t low_rows, uint32_t low_cols, uint64_t low_stride,   \
         uint64_t low_to, OUT *out) {                                                                                  \
    const Matrix m = MATRIX_OF;                                                                                        \
    const Low<OUT> beside = {low, low_rows, low_cols, low_stride, low_to};                                             \
    dequantize<SOURCE, OUT>(m, first, stride, width, runs, chunks, apart, beside, out);                                \
  }

// dequantize_SOURCE_OUT: the first rounding (f32: none, or the output dtype) and the output dtype.
DEQUANTIZE(dequantize_f32_f32, float, float)
DEQUANTIZE(dequantize_bf16_f32, __nv_bfloat16, float)
DEQUANTIZE(dequantize_f16_f32, __half, float)
DEQUANTIZE(dequantize_f32_bf16, float, __nv_bfloat16)
DEQUANTIZE(dequantize_f16_bf16, __half, __nv_bfloat16)
DEQUANTIZE(dequantize_f32_f16, float, __half)
DEQUANTIZE(dequantize_bf16_f16, __nv_bfloat16, __half)
