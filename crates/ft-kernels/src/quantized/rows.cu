// y [tokens, rows] = x [tokens, cols] W^T for a few tokens, directly from the 4-bit codes of W. The
// matrix is read once, and dequantized values stay in registers. For decoding, and for experts with few
// tokens.
//
// A block of four warps computes ROWS columns of y. The warps split the chunks of those rows of W (see
// codes.cuh), so each loaded piece of x is used ROWS times, and each dequantized value of W TOKENS times.
// Sums are f32, in an order fixed by the shapes. Values of W are rounded to Source, then to T, as in
// dequantize.cu.
//
// The caller guarantees that `cols` is a multiple of 32, and that x and the codes are vector-aligned.
#include "codes.cuh"

constexpr int WARPS = 4;

template <typename Source, typename T, int TOKENS, int ROWS>
DEVICE void rows(const Matrix &m, const T *x, uint32_t tokens, uint64_t count, uint64_t cols, T *y) {
  constexpr int N = VECTOR<T>; // a warp's loads of x are contiguous too
  constexpr int STEPS = CHUNK / (WARP * N);
  SHARED_ARRAY(float, partial, WARPS * ROWS * TOKENS);
  const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const uint64_t first = static_cast<uint64_t>(blockIdx.x) * ROWS;
  const float entry = m.entry(lane);
  float sum[ROWS][TOKENS] = {};
  for (uint64_t start = warp * CHUNK; start < cols; start += WARPS * CHUNK) {
    // issue the loads of all rows before using any
    uint32_t word[ROWS][STEPS];
    float scales[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const uint64_t begin = (first + r) * cols;
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        const uint64_t c = start + (s * WARP + lane) * N;
        word[r][s] = first + r < count && c < cols ? m.load<N>(begin + c) : 0;
      }
      scales[r] = first + r < count ? lane_scale(m, begin + start, begin + cols, lane) : 0.0f;
    }
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      if (start + s * WARP * N >= cols) break; // uniform across the warp
      const uint64_t c = start + (s * WARP + lane) * N;
      float w[ROWS][N];
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const uint64_t base = (first + r) * cols + start;
        values<Source, N>(m, word[r][s], base + (s * WARP + lane) * N, base, scales[r], entry, w[r]);
#pragma unroll
        for (int i = 0; i < N; i++) w[r][i] = rounded<T>(w[r][i]);
      }
      if (c >= cols) continue; // these lanes only, after the shuffles
#pragma unroll
      for (int t = 0; t < TOKENS; t++) {
        if (static_cast<uint32_t>(t) >= tokens) break;
        float xs[N];
        load_vector(x + t * cols + c, xs);
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
          for (int r = 0; r < ROWS; r++) sum[r][t] = fmaf(w[r][i], xs[i], sum[r][t]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      float s = sum[r][t];
#pragma unroll
      for (int step = WARP / 2; step > 0; step /= 2) s += __shfl_xor_sync(ALL, s, step);
      if (lane == 0) partial[(warp * ROWS + r) * TOKENS + t] = s;
    }
  __syncthreads();
  const unsigned r = threadIdx.x / TOKENS, t = threadIdx.x % TOKENS;
  if (r < ROWS && t < tokens && first + r < count) {
    float s = 0.0f;
    for (int w = 0; w < WARPS; w++) s += partial[(w * ROWS + r) * TOKENS + t];
    y[t * count + first + r] = Number<T>::from(s);
  }
}

#define ROWS_OF(NAME, SOURCE, T, TOKENS, ROWS)                                                                         \
  KERNEL(NAME, SIDE_BY_SIDE(5, WARPS *WARP), MATRIX, const T *x, uint32_t tokens, uint64_t count, uint64_t cols,       \
         T *y) {                                                                                                       \
    const Matrix m = MATRIX_OF;                                                                                        \
    rows<SOURCE, T, TOKENS, ROWS>(m, x, tokens, count, cols, y);                                                       \
  }

// Variants for one token and for up to eight; must match crates/ft-kernels/src/quantized/tiles.rs.
#define ROWS_OF_ANY(NAME, SOURCE, T)                                                                                   \
  ROWS_OF(NAME##_1, SOURCE, T, 1, 4)                                                                                   \
  ROWS_OF(NAME##_8, SOURCE, T, 8, 2)

// Named as in dequantize.cu.
ROWS_OF_ANY(rows_f32_f32, float, float)
ROWS_OF_ANY(rows_bf16_f32, __nv_bfloat16, float)
ROWS_OF_ANY(rows_f16_f32, __half, float)
ROWS_OF_ANY(rows_f32_bf16, float, __nv_bfloat16)
ROWS_OF_ANY(rows_f16_bf16, __half, __nv_bfloat16)
ROWS_OF_ANY(rows_f32_f16, float, __half)
ROWS_OF_ANY(rows_bf16_f16, __nv_bfloat16, __half)
