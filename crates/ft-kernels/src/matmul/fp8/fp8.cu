// Casts matrices to 8-bit floats for products of cuBLASLt (crates/ft-kernels/src/matmul/fp8/mod.rs): rows of
// activations and gradients, and frozen weights, dense or in 4-bit quantization blocks, as they are or transposed.
//
// A value v becomes v * MOST / amax, rounded to nearest even. amax is the largest magnitude of its row, or of the
// matrix: of each of up to PARTS blocks of a first kernel, which each block of the cast reduces again (2 KiB from L2).
// A product multiplies its sums by amax / MOST.
//
// The PTX is for compute capability 8.0, whose instructions have no such cast, so it is integer arithmetic here.
#include "../../cuda/rows.cuh"
#include "../../quantized/codes.cuh"

// Same as in crates/ft-kernels/src/matmul/fp8/cuda.rs
constexpr int THREADS = 256, PARTS = 512, TILE = 64;

// A format with EXPONENT and MANTISSA bits; MOST is its largest number, 0x7f a NaN.
template <int MANTISSA, int BIAS, int MOST_BITS> struct Small {
  static DEVICE float most() { return __uint_as_float(MOST_BITS); }

  // Nearest code; numbers beyond the largest become the largest, NaN stays NaN.
  static DEVICE uint32_t from(float x) {
    constexpr int DROPPED = 23 - MANTISSA;
    const uint32_t bits = __float_as_uint(x), sign = bits >> 24 & 0x80;
    if (x != x) return sign | 0x7f;
    const float a = fminf(fabsf(x), most());
    // the sum's last bit has the weight of the smallest subnormal
    const float magic = __uint_as_float((127 + 24 - BIAS - MANTISSA) << 23);
    if (a < __uint_as_float((128 - BIAS) << 23))
      return sign | (__float_as_uint(__fadd_rn(a, magic)) - __float_as_uint(magic));
    uint32_t u = __float_as_uint(a);
    u += (1u << (DROPPED - 1)) - 1 + (u >> DROPPED & 1);
    return sign | ((u >> DROPPED) - ((127 - BIAS) << MANTISSA));
  }
};
using e4m3 = Small<3, 7, 0x43e00000>;  // 448
using e5m2 = Small<2, 15, 0x47600000>; // 57,344

// The factor on values of a matrix (or row) with this maximum, and its inverse. Zeros stay zeros.
template <typename To> DEVICE float factor(float amax) { return To::most() / fmaxf(amax, 0x1p-100f); }
template <typename To> DEVICE float inverse(float amax) { return fmaxf(amax, 0x1p-100f) / To::most(); }

template <typename To, int N> DEVICE void codes(const float (&v)[N], float by, uint32_t (&word)[N / 4]) {
#pragma unroll
  for (int w = 0; w < N / 4; w++) {
    word[w] = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word[w] |= To::from(__fmul_rn(v[4 * w + i], by)) << (8 * i);
  }
}

// Writes a block's maximum, and zeros for blocks that were not launched.
DEVICE void write_part(float own, float *parts) {
  for (uint32_t i = blockIdx.x; i < PARTS; i += gridDim.x)
    if (threadIdx.x == 0) parts[i] = i == blockIdx.x ? own : 0.0f;
}

// The maximum of all parts, for all threads.
DEVICE float all_parts(const float *parts, float *scratch) {
  static_assert(PARTS == 2 * THREADS, "two parts a thread");
  return block_max<THREADS>(fmaxf(parts[threadIdx.x], parts[threadIdx.x + THREADS]), scratch);
}

template <typename T> DEVICE float row_amax(const T *row, uint32_t cols, bool vectors) {
  constexpr int V = VECTOR<T>;
  float own = 0.0f;
  if (vectors) {
    for (uint32_t c = threadIdx.x * V; c < cols; c += THREADS * V) {
      float v[V];
      get(row + c, v);
#pragma unroll
      for (int i = 0; i < V; i++) own = fmaxf(own, fabsf(v[i]));
    }
  } else {
    for (uint32_t c = threadIdx.x; c < cols; c += THREADS) own = fmaxf(own, fabsf(load(row + c)));
  }
  return own;
}

template <typename T> DEVICE bool has_vectors(const T *from, uint32_t apart, uint32_t cols) {
  return (apart | cols) % VECTOR<T> == 0 && is_aligned(from);
}

// Largest magnitude in the rows of each block.
KERNEL(fp8_amax_bf16, THREADS, const bf16 *from, uint32_t apart, uint32_t rows, uint32_t cols, float *parts) {
  SHARED_ARRAY(float, scratch, THREADS / WARP);
  const bool vectors = has_vectors(from, apart, cols);
  float own = 0.0f;
  for (uint32_t r = blockIdx.x; r < rows; r += gridDim.x)
    own = fmaxf(own, row_amax(from + static_cast<uint64_t>(r) * apart, cols, vectors));
  write_part(block_max<THREADS>(own, scratch), parts);
}

// The same of 4-bit blocks, by their scales; `most` is the largest magnitude of a code.
KERNEL(fp8_amax_blocks, THREADS, MATRIX, float most, float *parts) {
  SHARED_ARRAY(float, scratch, THREADS / WARP);
  const Matrix m = MATRIX_OF;
  const uint64_t count = (m.total + (1ull << m.shift) - 1) >> m.shift;
  float own = 0.0f;
  for (uint64_t b = static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x; b < count;
       b += static_cast<uint64_t>(gridDim.x) * THREADS)
    own = fmaxf(own, fabsf(m.scale(b)));
  write_part(block_max<THREADS>(own, scratch) * most, parts);
}

// Casts a row a block, [rows, cols] to [rows, cols] without gaps. Without `parts`, each row has a scale of its own.
template <typename To>
DEVICE void cast_row(const bf16 *from, uint32_t apart, uint32_t cols, const float *parts, uint8_t *to, float *scales) {
  constexpr int V = VECTOR<bf16>;
  SHARED_ARRAY(float, scratch, THREADS / WARP);
  const bool vectors = has_vectors(from, apart, cols);
  const bf16 *row = from + static_cast<uint64_t>(blockIdx.x) * apart;
  uint8_t *out = to + static_cast<uint64_t>(blockIdx.x) * cols;
  const float amax =
      parts != nullptr ? all_parts(parts, scratch) : block_max<THREADS>(row_amax(row, cols, vectors), scratch);
  const float by = factor<To>(amax);
  if (threadIdx.x == 0) scales[blockIdx.x] = inverse<To>(amax);
  if (vectors) {
    for (uint32_t c = threadIdx.x * V; c < cols; c += THREADS * V) {
      float v[V];
      uint32_t word[V / 4];
      get(row + c, v);
      codes<To>(v, by, word);
      store_8(out + c, make_uint2(word[0], word[1]));
    }
  } else {
    for (uint32_t c = threadIdx.x; c < cols; c += THREADS)
      out[c] = static_cast<uint8_t>(To::from(__fmul_rn(load(row + c), by)));
  }
}

#define ROWS(NAME, TO)                                                                                                 \
  KERNEL(NAME, THREADS, const bf16 *from, uint32_t apart, uint32_t cols, const float *parts, uint8_t *to,              \
         float *scales) {                                                                                              \
    cast_row<TO>(from, apart, cols, parts, to, scales);                                                                \
  }

ROWS(fp8_rows_e4m3_bf16, e4m3)
ROWS(fp8_rows_e5m2_bf16, e5m2)

// Casts a tile of TILE x TILE values of a matrix [rows, cols] to e4m3, or writes it transposed, [cols, rows]. `values`
// loads 4 values of a row; all lanes call it. A thread has 4 x 4 values, 16 threads a row. Rows and columns are
// multiples of 4. The first blocks also write the scale `many` times.
//
// The transposed tile passes through shared memory, a word of 4 rows for each column: columns 4 g + j stand 18 words
// apart in the plane j, so that the writes of a warp (16 g, 2 words) and its reads (16 words of g and of g + 8) touch
// each bank once.
template <typename Values>
DEVICE void cast_tile(uint32_t rows, uint32_t cols, const float *parts, bool transposed, uint8_t *to, float *scales,
                      uint32_t many, const Values &values) {
  constexpr int GROUPS = TILE / 4, APART = 18;
  SHARED_ARRAY(uint32_t, tile, 4 * GROUPS * APART);
  SHARED_ARRAY(float, scratch, THREADS / WARP);
  static_assert(THREADS == GROUPS * GROUPS, "a thread for 4 x 4 values");
  const float amax = all_parts(parts, scratch), by = factor<e4m3>(amax);
  const uint32_t block = blockIdx.y * gridDim.x + blockIdx.x;
  for (uint32_t i = block * THREADS + threadIdx.x; i < many; i += gridDim.x * gridDim.y * THREADS)
    scales[i] = inverse<e4m3>(amax);
  const uint32_t group = threadIdx.x % GROUPS, four = threadIdx.x / GROUPS;
  const uint32_t row = blockIdx.y * TILE + 4 * four, col = blockIdx.x * TILE + 4 * group;
  const bool here = row < rows && col < cols;
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float v[4];
    uint32_t code[1];
    values(row + i, col, here, v);
    codes<e4m3>(v, by, code);
    word[i] = code[0];
  }
  if (!transposed) {
    if (here)
#pragma unroll
      for (int i = 0; i < 4; i++) store_4(to + static_cast<uint64_t>(row + i) * cols + col, word[i]);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; j++) {
    uint32_t down = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) down |= (word[i] >> (8 * j) & 0xff) << (8 * i);
    tile[(j * GROUPS + group) * APART + four] = down;
  }
  __syncthreads();
  const uint32_t half = threadIdx.x % WARP / GROUPS, at = threadIdx.x / WARP + 8 * half, piece = threadIdx.x % GROUPS;
  const uint32_t first = blockIdx.y * TILE + 4 * piece;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const uint32_t c = blockIdx.x * TILE + 4 * at + j;
    if (c < cols && first < rows)
      store_4(to + static_cast<uint64_t>(c) * rows + first, tile[(j * GROUPS + at) * APART + piece]);
  }
}

KERNEL(fp8_matrix_bf16, THREADS, const bf16 *from, uint32_t apart, uint32_t rows, uint32_t cols, const float *parts,
       uint32_t transposed, uint8_t *to, float *scales, uint32_t many) {
  const bool vectors = apart % 4 == 0 && reinterpret_cast<uintptr_t>(from) % 8 == 0;
  const auto values = [&](uint32_t row, uint32_t col, bool here, float (&v)[4]) {
    const bf16 *at = from + static_cast<uint64_t>(row) * apart + col;
    if (here && vectors) get(at, v);
    else
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = here ? load(at + i) : 0.0f;
  };
  cast_tile(rows, cols, parts, transposed != 0, to, scales, many, values);
}

// 4-bit blocks: a value is rounded to Source and to bf16 first, as dequantize.cu does.
template <typename Source>
DEVICE void cast_blocks(const Matrix &m, uint32_t rows, uint32_t cols, const float *parts, bool transposed, uint8_t *to,
                        float *scales, uint32_t many) {
  const float entry = m.entry(threadIdx.x % WARP);
  const auto values = [&](uint32_t row, uint32_t col, bool here, float (&v)[4]) {
    const uint64_t at = static_cast<uint64_t>(row) * cols + col;
    const uint32_t word = here ? m.codes<4>(at) : 0;
    const float scale = here ? m.scale(at >> m.shift) : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      // the shuffle takes the source lane modulo 16
      const float code = __shfl_sync(ALL, entry, static_cast<int>(word >> (8 * (i / 2) + (i % 2 ? 0 : 4))), 16);
      v[i] = rounded<bf16>(rounded<Source>(__fmul_rn(code, scale)));
    }
  };
  cast_tile(rows, cols, parts, transposed, to, scales, many, values);
}

#define BLOCKS(NAME, SOURCE)                                                                                           \
  KERNEL(NAME, THREADS, MATRIX, uint32_t rows, uint32_t cols, const float *parts, uint32_t transposed, uint8_t *to,    \
         float *factors, uint32_t many) {                                                                              \
    const Matrix m = MATRIX_OF;                                                                                        \
    cast_blocks<SOURCE>(m, rows, cols, parts, transposed != 0, to, factors, many);                                     \
  }

BLOCKS(fp8_blocks_f32_bf16, float)
BLOCKS(fp8_blocks_f16_bf16, f16)
