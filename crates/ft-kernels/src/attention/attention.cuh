// Shared parts of the attention kernels: tiles of packed documents, and 16-bit matrices [rows, D] in
// shared memory.
//
// Token i of a document attends from the document's first token up to itself, limited by the window. A
// thread block handles one tile: up to ROWS tokens of one document, for one head. The host builds the
// tiles once per micro-batch (attention/tiles.rs). Queries are the last tokens of the keys: query 0 is
// key `first_query`, and token numbers here are key indices. Sums are f32 in a fixed order within one
// block, without atomics, so results are bit-reproducible.
//
// Axes: t queries, h query heads, g key heads (g divides h), c channels. Shapes: q, o and their gradients
// [t, h, c]; k, v and their gradients [keys, g, c]; log-sum-exp and delta [h, t].
#pragma once
#include "../cuda/matrix.cuh"

constexpr int ROWS = 64;
constexpr int THREADS = 128;
constexpr float LOG2E = 1.4426950408889634f;

struct alignas(16) Tile {
  uint32_t first, rows; // first token, number of tokens
  uint32_t begin, end;  // start and end of the document
};

DEVICE Tile tile_at(const Tile *tiles, uint32_t i) {
  const uint4 t = load_16(tiles + i);
  return {t.x, t.y, t.z, t.w};
}

// The tile of a block, and its head of `heads`. Heads vary fastest: blocks start in order, and the heaviest tiles,
// which are the first of the list, start before the others in all heads.
DEVICE Tile tile_of(const Tile *tiles, uint32_t heads) { return tile_at(tiles, blockIdx.x / heads); }
DEVICE uint32_t head_of(uint32_t heads) { return blockIdx.x % heads; }

DEVICE uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }
DEVICE uint32_t most(uint32_t a, uint32_t b) { return a < b ? b : a; }

// Warps that share rows, each summing a part of the channels: above 256 channels, where neither the sums of a warp's
// rows fit its registers, nor 64 rows the shared memory of every card. The block then has 64 / SHARE rows of a tile.
template <int D> constexpr int SHARE = D > 256 ? 2 : 1;
template <int D> constexpr int SHARE_KV = D > 256 ? 4 : 1;

// Limits a tile to the R rows of block blockIdx.z; false if it has none.
template <int R> DEVICE bool narrow(Tile &tile) {
  if constexpr (R < ROWS) {
    const uint32_t before = blockIdx.z * R;
    if (tile.rows <= before) return false;
    tile.first += before, tile.rows = least(R, tile.rows - before);
  }
  return true;
}

// Shape arguments common to all kernels.
struct Shape {
  uint32_t tokens, heads, groups, channels; // tokens: number of queries
  uint32_t first_query, window;
  float scale;
  uint32_t apart; // row stride of o, or of dv, in values; rows may be padded

  // First key visible to a query, and one past the last query that sees a key.
  DEVICE uint32_t first_key(uint32_t query, uint32_t begin) const {
    return query + 1 > window ? most(begin, query + 1 - window) : begin;
  }
  DEVICE uint32_t last_query(uint32_t key, uint32_t end) const { return window < end - key ? key + window : end; }
  // One unsigned comparison covers both bounds: for a later key the difference wraps around.
  DEVICE bool sees(uint32_t query, uint32_t key) const { return query - key < window; }
};

#define SHAPE                                                                                                          \
  uint32_t tokens, uint32_t heads, uint32_t groups, uint32_t channels, uint32_t first_query, uint32_t window,          \
      float scale, uint32_t apart
#define SHAPE_OF {tokens, heads, groups, channels, first_query, window, scale, apart}

// ---- keys and values of a key head: contiguous, or in the blocks of a cache ----

template <typename T> struct Whole {
  const T *first;
  uint32_t stride;
  DEVICE Stretch<T> some(uint32_t token, uint32_t) const {
    return {first + static_cast<uint64_t>(token) * stride, stride};
  }
};

// Tokens per cache block; must match cache.rs. The address table alternates between key and value blocks.
constexpr uint32_t BLOCK = 512;

// A range of at most BLOCK tokens, so it touches at most two cache blocks.
template <typename T> struct Parts {
  const T *first, *second;
  uint32_t stride, edge; // edge: first row in the second block
  DEVICE const T *operator[](uint32_t row) const {
    return row < edge ? first + static_cast<uint64_t>(row) * stride
                      : second + static_cast<uint64_t>(row - edge) * stride;
  }
};
template <typename T> struct Cached {
  const uint64_t *table; // offset by one for values
  uint32_t stride, at;   // stride per token; offset of the key head within a token
  DEVICE const T *block(uint32_t i) const { return reinterpret_cast<const T *>(table[2 * i]) + at; }
  DEVICE Parts<T> some(uint32_t token, uint32_t count) const {
    const uint32_t i = token / BLOCK, edge = BLOCK - token % BLOCK;
    const T *const first = block(i) + static_cast<uint64_t>(token % BLOCK) * stride;
    return {first, edge < count ? block(i + 1) : first, stride, edge};
  }
};

// ---- matrices [rows, D] of 16-bit values in shared memory: heads of at most D channels, a multiple of 8 ----

// c [16 M, N] += a[row .. row + 16 M] b^T, where b has N rows; both are [.., D].
template <typename T, int D, int N, int M>
DEVICE void product(float (&c)[M][N / 8][4], const unsigned char *a, int row, const unsigned char *b, int lane) {
  const Corner<D> of_a = left<D>(row, 0, lane), of_b = right_transposed<D>(0, 0, lane);
#pragma unroll
  for (int s = 0; s < D; s += 16) {
    uint32_t fa[M][4];
#pragma unroll
    for (int m = 0; m < M; m++) load(fa[m], a, of_a, 16 * m, s);
#pragma unroll
    for (int n = 0; n < N; n += 16) {
      uint32_t fb[4];
      load(fb, b, of_b, n, s);
#pragma unroll
      for (int m = 0; m < M; m++)
        mma<T>(c[m][n / 8], fa[m], fb[0], fb[1]), mma<T>(c[m][n / 8 + 1], fa[m], fb[2], fb[3]);
    }
  }
}

// Rounds 16 x 16 values of c, from column 8 n on, to a left operand.
template <typename T, int N> DEVICE void pack_left(uint32_t (&f)[4], const float (&c)[N][4], int n) {
#pragma unroll
  for (int i = 0; i < 4; i++) f[i] = pack<T>(c[n + i / 2][i % 2 * 2], c[n + i / 2][i % 2 * 2 + 1]);
}

// acc [16 M, W] += a left operand times 16 rows, from row s on, and W columns, from the corner on, of b.
template <typename T, int D, int W, int M>
DEVICE void add_operand(float (&acc)[M][W / 8][4], const uint32_t (&fa)[M][4], const unsigned char *b,
                        const Corner<D> &of_b, int s) {
#pragma unroll
  for (int n = 0; n < W; n += 16) {
    uint32_t fb[4];
    load_transposed(fb, b, of_b, s, n);
#pragma unroll
    for (int m = 0; m < M; m++)
      mma<T>(acc[m][n / 8], fa[m], fb[0], fb[1]), mma<T>(acc[m][n / 8 + 1], fa[m], fb[2], fb[3]);
  }
}

// acc [16 M, W] += c [16 M, N] (rounded to T in registers) times columns col .. col + W of b [N, D].
template <typename T, int D, int W, int N, int M>
DEVICE void add_product(float (&acc)[M][W / 8][4], const float (&c)[M][N / 8][4], const unsigned char *b, int col,
                        int lane) {
  const Corner<D> of_b = right<D>(0, col, lane);
#pragma unroll
  for (int s = 0; s < N; s += 16) {
    uint32_t fa[M][4];
#pragma unroll
    for (int m = 0; m < M; m++) pack_left<T>(fa[m], c[m], s / 8);
    add_operand<T, D, W, M>(acc, fa, b, of_b, s);
  }
}

// Through shared memory, from a lane of a warp to the same lane of others: 16 x 16 accumulators, or a left operand of
// as many values in half the space. `slot`: the lane's first 16 bytes of OF_SLOT for a warp.
constexpr int OF_SLOT = WARP * 32;
DEVICE void give(unsigned char *slot, const float (&c)[2][4]) {
#pragma unroll
  for (int i = 0; i < 2; i++) store_vector(reinterpret_cast<float *>(slot + i * (OF_SLOT / 2)), c[i]);
}
DEVICE void take(float (&c)[2][4], const unsigned char *slot) {
#pragma unroll
  for (int i = 0; i < 2; i++) load_vector(reinterpret_cast<const float *>(slot + i * (OF_SLOT / 2)), c[i]);
}
DEVICE void give(unsigned char *slot, const uint32_t (&f)[4]) { store_16(slot, make_uint4(f[0], f[1], f[2], f[3])); }
DEVICE void take(uint32_t (&f)[4], const unsigned char *slot) {
  const uint4 all = load_16(slot);
  f[0] = all.x, f[1] = all.y, f[2] = all.z, f[3] = all.w;
}

// Stores 16 x W accumulators of a warp to `to` from row 16 `part` on, scaled per row, skipping rows from `rows` on and
// columns from `columns` on. Goes through the warp's own rows of shared memory `m` [64, W] to write whole lines.
template <typename T, int W>
DEVICE void store_rows(T *to, const float (&acc)[W / 8][4], const float (&factor)[2], unsigned char *m, uint32_t rows,
                       uint32_t columns, uint32_t stride, int part, int lane) {
  constexpr int PIECES = W / 8;
  __syncwarp();
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int n = 0; n < PIECES; n++)
      *reinterpret_cast<uint32_t *>(m + place<W>(part * 16 + lane / 4 + r * 8, n) + lane % 4 * 4) =
          pack<T>(acc[n][2 * r] * factor[r], acc[n][2 * r + 1] * factor[r]);
  __syncwarp();
#pragma unroll
  for (int i = lane; i < 16 * PIECES; i += WARP) {
    const int row = part * 16 + i / PIECES, piece = i % PIECES;
    if (row < static_cast<int>(rows) && piece * 8 < static_cast<int>(columns))
      store_16(to + static_cast<uint64_t>(row) * stride + piece * 8, load_16(m + place<W>(row, piece)));
  }
}
