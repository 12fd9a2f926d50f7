// Parts of the grouped GEMMs of 16-bit values on tensor cores: tiles in shared memory, decoding of 4-bit codes, and the
// store of a result.
#pragma once
#include "grouped.cuh"

constexpr int COLS = 128, DEPTH = 32;         // columns of a tile, inner step
constexpr int STAGE_RIGHT = COLS * DEPTH * 2; // bytes

// Bytes of scales in shared memory for each of the ROW_BLOCK rows of W that a warp loads in forward, in stored order.
constexpr int WINDOW = 32, ROW_BLOCK = COLS / (THREADS / WARP);

// Stores 8 values read one by one.
template <typename T, typename F> DEVICE void store_eight(unsigned char *to, const F &value) {
  uint64_t low = 0, high = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < 8; i++) {
    low = low >> 16 | high << 48;
    high = high >> 16 | static_cast<uint64_t>(pack<T>(value(i), 0.0f)) << 48;
  }
  store_16(to, make_uint4(static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
                          static_cast<uint32_t>(high >> 32)));
}

// Layout of a right tile: [128, 32] if TRANSPOSED, else [32, 128].
template <bool TRANSPOSED> DEVICE int right_place(int row, int piece) {
  if constexpr (TRANSPOSED) return place<DEPTH>(row, piece);
  else return place<COLS>(row, piece);
}

// acc += left right for an inner step: columns from `col` on of left [.., D], and right [.., R], in shared memory, from
// the warp's first row and column on. TOGETHER of its two halves are in a turn of a loop. `between` is called with its
// number after the products of 16 inner values and 16 columns. Operands past the edges are zeros.
template <typename T, bool TRANSPOSED, int H, int W, int D, int TOGETHER, int R, typename F>
DEVICE void multiply(float (&acc)[H / 16][W / 8][4], const unsigned char *a, int col, const unsigned char *b,
                     Corner<D> of_a, Corner<R> of_b, const F &between) {
#pragma unroll(TOGETHER)
  for (int k = 0; k < DEPTH; k += 16) {
    uint32_t fa[H / 16][4];
#pragma unroll
    for (int m = 0; m < H; m += 16) load(fa[m / 16], a, of_a, m, col + k);
#pragma unroll
    for (int n = 0; n < W; n += 16) {
      uint32_t fb[4];
      if constexpr (TRANSPOSED) load(fb, b, of_b, n, k);
      else load_transposed(fb, b, of_b, k, n);
#pragma unroll
      for (int m = 0; m < H; m += 16) {
        mma<T>(acc[m / 16][n / 8], fa[m / 16], fb[0], fb[1]);
        mma<T>(acc[m / 16][n / 8 + 1], fa[m / 16], fb[2], fb[3]);
      }
      between((k * W / 16 + n) / 16);
    }
  }
}

// The corner of a warp's right operand.
template <bool TRANSPOSED> DEVICE Corner<TRANSPOSED ? DEPTH : COLS> right_corner(int col, int lane) {
  if constexpr (TRANSPOSED) return right_transposed<DEPTH>(col, 0, lane);
  else return right<COLS>(0, col, lane);
}

// Codes in flight in registers; in forward with their scale: factor * absmax + offset, or just factor.
struct Codes {
  uint4 words;
  float factor, absmax;

  // Rounded after the product and after the sum; see codes.cuh.
  DEVICE float scale(const Matrix &m) const {
    return m.scale_codes == nullptr ? factor : __fadd_rn(__fmul_rn(factor, absmax), m.offset);
  }
};

// Dequantizes the 8 codes of a word. All lanes must participate.
template <typename T> DEVICE uint4 dequantized(uint32_t word, float entry, float scale, uint32_t source) {
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++)
    v[i] = __fmul_rn(__shfl_sync(ALL, entry, static_cast<int>(word >> (8 * (i / 2) + (i % 2 ? 0 : 4))), 16), scale);
  // one branch a word, not one a value; values of T are their own rounding
  if (source == 3 - own_source<T>())
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = rounded<Other<T>>(v[i]);
  return make_uint4(pack<T>(v[0], v[1]), pack<T>(v[2], v[3]), pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
}

// Codes of W [columns, depth] in forward: threads 2j and 2j + 1 have 32 codes each of row j of the tile, so that a
// sector is loaded at once. If rows consist of whole quantization blocks, a warp loads the scales of its rows for
// several blocks at once to its window.
struct RowCodes {
  unsigned char *const window;
  const uint32_t row, col0, outer; // row of the thread, first column of the tile, number of columns
  uint32_t held_group;             // of the absmax held, or NONE
  float held;

  DEVICE RowCodes(unsigned char *windows, uint32_t col0, uint32_t outer)
      : window(windows + threadIdx.x / WARP * ROW_BLOCK * WINDOW), row(threadIdx.x / 2), col0(col0), outer(outer),
        held_group(NONE), held() {}

  // Starts loading from inner index `k` on, a multiple of 64. Past the edges, codes and scale are zero.
  DEVICE Codes fetch(const Matrix &m, const float *map, uint32_t depth, uint32_t k) {
    const uint32_t deep = k + threadIdx.x % 2 * DEPTH, col = col0 + row;
    const uint64_t from = static_cast<uint64_t>(col) * depth + deep;
    const bool nested = m.scale_codes != nullptr;
    const uint32_t span = (nested ? WINDOW : WINDOW / 4) << m.shift, blocks = depth >> m.shift;
    const bool windows = blocks << m.shift == depth;
    if (windows && k < depth && k % span == 0) bring_scales(m, k, blocks);
    Codes c = {make_uint4(0, 0, 0, 0), 0.0f, 0.0f};
    if (deep >= depth || col >= outer) return c;
    c.words = load_16(m.packed + from / 2);
    const uint32_t block = static_cast<uint32_t>(from >> m.shift), line = row % ROW_BLOCK, in = deep % span >> m.shift;
    if (nested) {
      c.factor = map[windows ? window[spot(line, in / 4) + in % 4] : m.scale_codes[block]];
      const uint32_t group = block / m.group;
      if (group != held_group) held_group = group, held = m.scales[group];
      c.absmax = held;
    } else {
      c.factor = windows ? *reinterpret_cast<const float *>(window + spot(line, in)) : m.scales[block];
    }
    return c;
  }

  // Offset of a word in a line of the window; swizzled, so one word of 16 lines spans 16 banks.
  DEVICE static int spot(uint32_t line, uint32_t word) {
    return static_cast<int>(line * WINDOW + (word ^ (line / 4)) * 4);
  }

  // Loads the scales from inner index `k` on for the rows of this warp; `blocks` is the number of blocks per row.
  DEVICE void bring_scales(const Matrix &m, uint32_t k, uint32_t blocks) {
    const uint32_t size = m.scale_codes != nullptr ? 1 : 4, first = (k >> m.shift) * size, lane = threadIdx.x % WARP;
    const unsigned char *const from = size == 1 ? m.scale_codes : reinterpret_cast<const unsigned char *>(m.scales);
    const uint64_t pitch = static_cast<uint64_t>(blocks) * size;
    const uint32_t line0 = threadIdx.x / WARP * ROW_BLOCK;
    const bool by_words = pitch % 4 == 0 && reinterpret_cast<uintptr_t>(from) % 4 == 0;
    __syncwarp();
#pragma unroll 1
    for (uint32_t i = lane; i < ROW_BLOCK * WINDOW / 4; i += WARP) {
      const uint32_t line = i / (WINDOW / 4), word = i % (WINDOW / 4), col = col0 + line0 + line;
      const unsigned char *const at = from + col * pitch + first + 4 * word;
      const uint32_t some =
          col < outer && first + 4 * word < pitch ? static_cast<uint32_t>(pitch) - first - 4 * word : 0;
      if (by_words) {
        if (some > 0) store_4(window + spot(line, word), *reinterpret_cast<const uint32_t *>(at));
      } else {
#pragma unroll 1
        for (uint32_t j = 0; j < 4 && j < some; j++) window[spot(line, word) + j] = at[j];
      }
    }
    __syncwarp();
  }
};

// Stores a warp's H x W values times `scale` from `row` and `col` of a tile on, through shared memory, to write whole
// lines. `own` has H W values. Values past `some_rows` and `some_cols`, counted from there, are left out.
template <typename T, int H, int W>
DEVICE void store_tile(const float (&acc)[H / 16][W / 8][4], float scale, unsigned char *own, T *out, uint32_t stride,
                       int some_rows, int some_cols) {
  const int lane = threadIdx.x % WARP;
  const bool whole = stride % 8 == 0 && is_aligned(out);
#pragma unroll
  for (int m = 0; m < H; m += 16)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int n = 0; n < W / 8; n++)
        store_4(own + place<W>(m + r * 8 + lane / 4, n) + lane % 4 * 4,
                pack<T>(acc[m / 16][n][2 * r] * scale, acc[m / 16][n][2 * r + 1] * scale));
  __syncwarp();
#pragma unroll
  for (int i = lane; i < H * W / 8; i += WARP) {
    const int r = i / (W / 8), piece = i % (W / 8), left_over = some_cols - piece * 8;
    if (r >= some_rows || left_over <= 0) continue;
    T *const to = out + static_cast<uint64_t>(r) * stride + piece * 8;
    const unsigned char *const from = own + place<W>(r, piece);
    if (whole && left_over >= 8) store_16(to, load_16(from));
    else
#pragma unroll 1
      for (int j = 0; j < 8 && j < left_over; j++) to[j] = reinterpret_cast<const T *>(from)[j];
  }
}
