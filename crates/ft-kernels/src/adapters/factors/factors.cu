// Gradients of LoRA's factors from one read of the output's gradient dy [t, o]: du = s dy B and dB = k dy^T u, with B
// [o, r] and u [t, r], the saved product of the input and A.
//
// A block owns SLAB columns of dy and some tiles of its rows. B of the columns stays in shared memory, and dB in
// registers; tiles of dy pass through shared memory once. Sums in f32 go to scratch memory, du by slab and dB by block
// of rows, and `factors_sum` adds them in order: the order for a row of du depends on o alone.
#include "../../cuda/matrix.cuh"

constexpr int THREADS = 256, STAGES = 3;
constexpr int TOKENS = 128, COLS = 64, CHUNKS = 8, SLAB = COLS * CHUNKS; // a tile is TOKENS x COLS
constexpr int LOW = 32;                                                  // row length of B and u in shared memory
constexpr int TILE_BYTES = TOKENS * COLS * 2, B_BYTES = SLAB * LOW * 2, U_BYTES = TOKENS * LOW * 2;

// Starts to copy ROWS rows of `r` values from `row` on, of rows before `end`. Zeros past the edges.
template <typename T, int R, int ROWS>
DEVICE void fetch_low(unsigned char *to, const T *from, uint32_t apart, uint32_t row, uint32_t end, uint32_t r) {
  const bool whole = r % 8 == 0 && apart % 8 == 0 && is_aligned(from);
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * R / 8; i += THREADS) {
    const uint32_t line = row + i / (R / 8), first = i % (R / 8) * 8;
    const T *const values = from + static_cast<uint64_t>(line) * apart + first;
    unsigned char *const own = to + place<LOW>(i / (R / 8), i % (R / 8));
    if (whole) {
      const bool some = line < end && first < r;
      cp_async_16(own, some ? values : from, some);
    } else {
      uint32_t word[4];
#pragma unroll
      for (uint32_t j = 0; j < 8; j += 2)
        word[j / 2] = pack<T>(line < end && first + j < r ? load(values + j) : 0.0f,
                              line < end && first + j + 1 < r ? load(values + j + 1) : 0.0f);
      store_16(own, make_uint4(word[0], word[1], word[2], word[3]));
    }
  }
}

DEVICE void store_two(float *to, float x, float y) { store_8(to, make_uint2(__float_as_uint(x), __float_as_uint(y))); }

// R is r, rounded up to 16 or 32. `tiles` is the number of tiles of a block. Scratch memory: du [slabs, t, R], dB
// [blocks of rows, o, R].
template <typename T, int R>
DEVICE void factors(const T *dy, uint32_t apart, uint32_t t, uint32_t o, const T *b, const T *u, uint32_t u_apart,
                    uint32_t r, uint32_t tiles, float *du, float *db) {
  SHARED_BYTES(shared);
  unsigned char *const factor = shared + STAGES * TILE_BYTES, *const saved = factor + B_BYTES;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const uint32_t col0 = blockIdx.x * SLAB, begin = blockIdx.y * tiles * TOKENS, end = min(begin + tiles * TOKENS, t);
  // at least 2: u of a tile is copied with the tile before, at least two steps ahead
  const int chunks = max(2, static_cast<int>(min((o - col0 + COLS - 1) / COLS, static_cast<uint32_t>(CHUNKS))));

  uint32_t next_row = begin;
  int next_chunk = 0, next_stage = 0;
  const auto fetch = [&] {
    const uint32_t col = col0 + next_chunk * COLS;
    if (next_row < end)
      copy_rows<COLS, TOKENS, THREADS>(shared + next_stage * TILE_BYTES,
                                       dy + static_cast<uint64_t>(next_row) * apart + col, end - next_row, apart,
                                       max(o, col) - col);
    cp_async_commit();
    if (++next_chunk == chunks) next_chunk = 0, next_row += TOKENS;
    if (++next_stage == STAGES) next_stage = 0;
  };
  fetch_low<T, R, SLAB>(factor, b, r, col0, o, r);
  fetch_low<T, R, TOKENS>(saved, u, u_apart, begin, end, r);
#pragma unroll 1
  for (int s = 1; s < STAGES; s++) fetch();

  // du: 16 rows a warp. dB: 16 columns of each chunk, of half the rows.
  constexpr int HALF = TOKENS / 2;
  const int quarter = warp % 4, half = warp / 4;
  const Corner<COLS> of_rows = left<COLS>(warp * 16, 0, lane),
                     of_cols = left_transposed<COLS>(half * HALF, quarter * 16, lane);
  const Corner<LOW> of_b = right<LOW>(0, 0, lane), of_u = right<LOW>(half * HALF, 0, lane);
  float sum_b[CHUNKS][R / 8][4] = {};
  int stage = 0, side = 0;
#pragma unroll 1
  for (uint32_t row = begin; row < end; row += TOKENS) {
    float sum_u[R / 8][4] = {};
    uint32_t low[HALF / 16][R / 16][4];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      if (c >= chunks) break;
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      if (c == 0 && row + TOKENS < end)
        fetch_low<T, R, TOKENS>(saved + (side ^ 1) * U_BYTES, u, u_apart, row + TOKENS, end, r);
      fetch();
      const unsigned char *const tile = shared + stage * TILE_BYTES;
      if (c == 0)
#pragma unroll
        for (int k = 0; k < HALF; k += 16)
#pragma unroll
          for (int n = 0; n < R; n += 16) load_transposed(low[k / 16][n / 16], saved + side * U_BYTES, of_u, k, n);
#pragma unroll
      for (int k = 0; k < COLS; k += 16) {
        uint32_t left[4];
        load(left, tile, of_rows, 0, k);
#pragma unroll
        for (int n = 0; n < R; n += 16) {
          uint32_t right[4];
          load_transposed(right, factor, of_b, c * COLS + k, n);
          mma<T>(sum_u[n / 8], left, right[0], right[1]);
          mma<T>(sum_u[n / 8 + 1], left, right[2], right[3]);
        }
      }
#pragma unroll
      for (int k = 0; k < HALF; k += 16) {
        uint32_t left[4];
        load_transposed(left, tile, of_cols, k, 0);
#pragma unroll
        for (int n = 0; n < R; n += 16) {
          const uint32_t (&right)[4] = low[k / 16][n / 16];
          mma<T>(sum_b[c][n / 8], left, right[0], right[1]);
          mma<T>(sum_b[c][n / 8 + 1], left, right[2], right[3]);
        }
      }
      if (++stage == STAGES) stage = 0;
    }
    side ^= 1;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t line = row + warp * 16 + i * 8 + lane / 4;
      float *const to = du + (static_cast<uint64_t>(blockIdx.x) * t + line) * R + lane % 4 * 2;
      if (line < end)
#pragma unroll
        for (int n = 0; n < R / 8; n++) store_two(to + n * 8, sum_u[n][2 * i], sum_u[n][2 * i + 1]);
    }
  }

  // dB of both halves of the rows
  cp_async_wait<0>();
  __syncthreads();
  float *const other = reinterpret_cast<float *>(shared) + (quarter * WARP + lane) * 4;
  constexpr int APART = 4 * WARP * 4;
  if (half == 1)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
      for (int n = 0; n < R / 8; n++) store_vector(other + (c * (R / 8) + n) * APART, sum_b[c][n]);
  __syncthreads();
  if (half == 1) return;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const uint32_t line = col0 + c * COLS + quarter * 16 + lane / 4;
    float *const to = db + (static_cast<uint64_t>(blockIdx.y) * o + line) * R + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < R / 8; n++) {
      float more[4];
      load_vector(other + (c * (R / 8) + n) * APART, more);
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (line + i * 8 < o)
          store_two(to + i * 8 * R + n * 8, sum_b[c][n][2 * i] + more[2 * i], sum_b[c][n][2 * i + 1] + more[2 * i + 1]);
    }
  }
}

// Adds the sums of all blocks, R values apart: du [t, r] times `scale` and, from there on, dB [o, r] times `rest`,
// added to what is there if `add`. A value a thread.
template <typename T>
DEVICE void sum(const float *parts_u, uint32_t slabs, const float *parts_b, uint32_t blocks, uint32_t t, uint32_t o,
                uint32_t r, uint32_t R, float scale, T *du, uint32_t apart, float rest, uint32_t add, float *db) {
  const uint32_t at = blockIdx.x * THREADS + threadIdx.x, row = at / r, col = at % r;
  const bool is_u = row < t;
  const uint32_t rows = is_u ? t : o, line = is_u ? row : row - t, count = is_u ? slabs : blocks;
  if (line >= rows) return;
  const float *from = (is_u ? parts_u : parts_b) + static_cast<uint64_t>(line) * R + col;
  const uint64_t step = static_cast<uint64_t>(rows) * R;
  float all = 0.0f;
#pragma unroll 4
  for (uint32_t i = 0; i < count; i++) all += from[i * step];
  if (is_u) {
    store(du + static_cast<uint64_t>(line) * apart + col, all * scale);
  } else {
    float *const to = db + static_cast<uint64_t>(line) * r + col;
    *to = add ? *to + all * rest : all * rest;
  }
}

#define FACTORS(T, TYPE, R)                                                                                            \
  KERNEL(factors_##R##_##TYPE, THREADS, const T *dy, uint32_t apart, uint32_t t, uint32_t o, const T *b, const T *u,   \
         uint32_t u_apart, uint32_t r, uint32_t tiles, float *du, float *db) {                                         \
    factors<T, R>(dy, apart, t, o, b, u, u_apart, r, tiles, du, db);                                                   \
  }
#define SUM(T, TYPE)                                                                                                   \
  KERNEL(factors_sum_##TYPE, THREADS, const float *parts_u, uint32_t slabs, const float *parts_b, uint32_t blocks,     \
         uint32_t t, uint32_t o, uint32_t r, uint32_t R, float scale, T *du, uint32_t apart, float rest, uint32_t add, \
         float *db) {                                                                                                  \
    sum(parts_u, slabs, parts_b, blocks, t, o, r, R, scale, du, apart, rest, add, db);                                 \
  }
FACTORS(bf16, bf16, 16)
FACTORS(bf16, bf16, 32)
FACTORS(f16, f16, 16)
FACTORS(f16, f16, 32)
SUM(bf16, bf16)
SUM(f16, f16)
