// Grouped GEMMs of 16-bit values for experts with many rows, on tensor cores: eight warps per 128 x 128 tile, inner
// steps of 32. Two blocks stand on a multiprocessor, also where it has 100 KiB of shared memory.
//
// There are two kernels of each direction. For matrices of values, left and right tiles arrive by cp.async in three
// stages. With 4-bit codes, the codes of a step are loaded into registers a step ahead and dequantized into one of two
// right tiles while the other one is multiplied; other matrices of the launch (adapters) take two stages there.
#include "grouped_tiles.cuh"

constexpr int SIDE = 128, H = 32, W = 64; // rows of a tile; rows and columns of a warp
constexpr int STAGE_LEFT = SIDE * DEPTH * 2; // bytes
constexpr int LEFT_STAGES = 3;

// One tile of the result, and this thread's part of it.
template <typename T, bool TRANSPOSED, bool CODES> struct Tile {
  static constexpr int RIGHT_STAGES = CODES ? 2 : 3, STAGES = RIGHT_STAGES;
  const Rows rows;
  const uint32_t outer, col0;
  unsigned char *const left, *const right; // [LEFT_STAGES], [RIGHT_STAGES]
  const Corner<DEPTH> of_a;
  const Corner<TRANSPOSED ? DEPTH : COLS> of_b;
  float acc[H / 16][W / 8][4];

  static DEVICE int row() { return threadIdx.x / WARP % 4 * H; }
  static DEVICE int col() { return threadIdx.x / WARP / 4 * W; }

  DEVICE Tile(Rows rows, uint32_t outer, uint32_t col0, unsigned char *shared)
      : rows(rows), outer(outer), col0(col0), left(shared), right(shared + LEFT_STAGES * STAGE_LEFT),
        of_a(::left<DEPTH>(row(), 0, threadIdx.x % WARP)), of_b(right_corner<TRANSPOSED>(col(), threadIdx.x % WARP)), acc() {}

  // Multiplies two tiles, TOGETHER halves of the inner step in a turn of a loop.
  template <int TOGETHER = 2> DEVICE void step(int a, int b) {
    multiply<T, TRANSPOSED, H, W, TOGETHER>(acc, left + a * STAGE_LEFT, right + b * STAGE_RIGHT, of_a, of_b);
  }

  // Sums a product of stored values whose rows are whole 16-byte pieces.
  DEVICE void values(const Factors<T> &f) {
    Left from(f, rows);
    // two pieces of a thread, half a tile apart; rows and columns past the edge are zeros
    constexpr int PIECES = TRANSPOSED ? DEPTH / 8 : COLS / 8;
    const uint32_t line = threadIdx.x / PIECES, piece = threadIdx.x % PIECES, half = THREADS / PIECES;
    const T *of[2];
    uint32_t deep = TRANSPOSED ? piece * 8 : line, depth[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t c = col0 + (TRANSPOSED ? line + i * half : piece * 8), last = TRANSPOSED ? outer - 1 : outer - 8;
      of[i] = f.right + (TRANSPOSED ? static_cast<uint64_t>(c < last ? c : last) * f.depth + piece * 8
                                    : static_cast<uint64_t>(line + i * half) * outer + (c < last ? c : last));
      depth[i] = c < outer ? f.depth : 0;
    }
    const uint64_t pitch = TRANSPOSED ? DEPTH : static_cast<uint64_t>(DEPTH) * outer;
    unsigned char *const to = right + right_place<TRANSPOSED>(line, piece);
    const auto bring = [&](int stage) {
      from.bring(left + stage * STAGE_LEFT);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        cp_async_16(to + stage * STAGE_RIGHT + i * STAGE_RIGHT / 2, of[i], deep + (TRANSPOSED ? 0 : i * half) < depth[i]);
        of[i] += pitch;
      }
      deep += DEPTH;
      cp_async_commit();
    };
    __syncthreads();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) bring(s);
    int stage = 0, next = STAGES - 1;
#pragma unroll 1
    for (uint32_t k = 0; k < f.depth; k += DEPTH) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      bring(next);
      step(stage, stage);
      stage = stage == STAGES - 1 ? 0 : stage + 1, next = next == STAGES - 1 ? 0 : next + 1;
    }
    cp_async_wait<0>();
  }

  // A thread's two pieces of left tiles, step after step, half a tile apart. Rows past the edge are zeros.
  struct Left {
    const T *from;
    uint32_t apart, deep, depth[2]; // values between the pieces, first inner index, and its end for both

    DEVICE Left(const Factors<T> &f, Rows rows) : deep(threadIdx.x % 4 * 8) {
      const uint32_t row = threadIdx.x / 4;
      from = f.left + static_cast<uint64_t>(row < rows.count ? row : 0) * f.stride + deep;
      apart = row + SIDE / 2 < rows.count ? SIDE / 2 * f.stride : 0;
      depth[0] = row < rows.count ? f.depth : 0, depth[1] = row + SIDE / 2 < rows.count ? f.depth : 0;
    }

    DEVICE void bring(unsigned char *to) {
      to += place<DEPTH>(threadIdx.x / 4, threadIdx.x % 4);
      cp_async_16(to, from, deep < depth[0]), cp_async_16(to + STAGE_LEFT / 2, from + apart, deep < depth[1]);
      from += DEPTH, deep += DEPTH;
    }
  };

  // Sums a product with W [outer, depth] in codes, two inner steps a turn: the codes of a turn are loaded in the turn
  // before it, a sector of a row by two threads. Threads 2j and 2j + 1 share the codes of each step in row j. Scales of a
  // row lie in one sector for 32 blocks, and come from the cache. Past the edges, codes repeat; left values are zeros.
  template <typename Held> DEVICE void codes_across(const Factors<T> &f, const Held &of) {
    Left from(f, rows);
    const uint32_t row = col0 + threadIdx.x / 2, col = row < outer ? row : outer - 1;
    uint32_t held_group = NONE;
    float held = 0.0f;
    const auto fetch = [&](uint32_t k) {
      const Matrix m = codes_of(of.expert);
      const uint32_t at = k + threadIdx.x % 2 * DEPTH;
      const uint64_t from = static_cast<uint64_t>(col) * f.depth + (at < f.depth ? at : 0);
      const uint32_t block = static_cast<uint32_t>(from >> m.shift);
      Codes c = {load_16(m.packed + from / 2), 0.0f, 0.0f};
      if (m.scale_codes == nullptr) {
        c.factor = m.scales[block];
        return c;
      }
      c.factor = of.map[m.scale_codes[block]];
      const uint32_t group = block / m.group;
      if (group != held_group) held_group = group, held = m.scales[group];
      c.absmax = held;
      return c;
    };
    const float entry = of.book[threadIdx.x % 16];
    const bool odd = threadIdx.x % 2;
    const int to = place<DEPTH>(threadIdx.x / 2, odd ? 2 : 0); // the next piece is the other one of 32 bytes
    uint32_t words[4];
    float scale[2];
    // this thread's half of both steps
    const auto take = [&](const Codes &c) {
      const float own = c.scale(codes_of(of.expert));
      const uint32_t x = __shfl_xor_sync(ALL, odd ? c.words.x : c.words.z, 1), y = __shfl_xor_sync(ALL, odd ? c.words.y : c.words.w, 1);
      words[0] = odd ? x : c.words.x, words[1] = odd ? y : c.words.y;
      words[2] = odd ? c.words.z : x, words[3] = odd ? c.words.w : y;
      const float other = __shfl_xor_sync(ALL, own, 1);
      scale[0] = odd ? other : own, scale[1] = odd ? own : other;
    };
    const auto decode = [&](int i) {
      store_16(right + i * STAGE_RIGHT + to, dequantized<T>(words[2 * i], entry, scale[i], of.expert.source));
      store_16(right + i * STAGE_RIGHT + (to ^ 16), dequantized<T>(words[2 * i + 1], entry, scale[i], of.expert.source));
    };
    const auto bring = [&](int stage) { from.bring(left + stage * STAGE_LEFT), cp_async_commit(); };
    __syncthreads();
    bring(0), bring(1);
    take(fetch(0));
    decode(0);
    int stage = 0;
#pragma unroll 1
    for (uint32_t k = 0; k < f.depth; k += 2 * DEPTH) {
      const int second_stage = stage == 2 ? 0 : stage + 1, third = stage == 0 ? 2 : stage - 1;
      cp_async_wait<1>();
      __syncthreads();
      bring(third);
      decode(1);
      const Codes next = fetch(k + 2 * DEPTH);
      step(stage, 0);
      cp_async_wait<1>();
      __syncthreads();
      bring(stage);
      take(next);
      decode(0);
      step(second_stage, 1);
      stage = third;
    }
    cp_async_wait<0>();
  }

  // Sums a product with W [depth, outer] in codes: a thread has 16 codes of a row in each step, loaded in the step
  // before it. Past the edges the last row and the last codes repeat.
  template <typename Held> DEVICE void codes_down(const Factors<T> &f, const Held &of) {
    Left from(f, rows);
    const Matrix m = codes_of(of.expert);
    const uint32_t line = threadIdx.x / 8, part = threadIdx.x % 8, at = col0 + part * 16, c = at < outer ? at : outer - 16;
    const uint32_t rounding = of.expert.source;
    const float entry = of.book[threadIdx.x % 16];
    // neighboring threads store pieces in swapped order to avoid bank conflicts
    const bool turned = part >= 4;
    const int to = place<COLS>(line, 2 * part + turned);
    uint32_t words[2], held_group = NONE;
    uint32_t code = 0; // of the scale, or its bits
    float absmax = 0.0f;
    const auto fetch = [&](uint32_t k) {
      const uint32_t deep = k + line < f.depth ? k + line : f.depth - 1;
      const uint64_t value = static_cast<uint64_t>(deep) * outer + c;
      const uint2 w = load_8(m.packed + value / 2);
      words[0] = turned ? w.y : w.x, words[1] = turned ? w.x : w.y;
      const uint32_t block = static_cast<uint32_t>(value >> m.shift);
      if (m.scale_codes == nullptr) {
        code = __float_as_uint(m.scales[block]);
      } else {
        code = m.scale_codes[block];
        const uint32_t group = block / m.group;
        if (group != held_group) held_group = group, absmax = m.scales[group];
      }
    };
    const auto decode = [&](int b) {
      const Codes c = {make_uint4(0, 0, 0, 0), m.scale_codes == nullptr ? __uint_as_float(code) : of.map[code], absmax};
      const float scale = c.scale(m);
      store_16(right + b * STAGE_RIGHT + to, dequantized<T>(words[0], entry, scale, rounding));
      store_16(right + b * STAGE_RIGHT + (to ^ 16), dequantized<T>(words[1], entry, scale, rounding));
    };
    const auto bring = [&](int stage) { from.bring(left + stage * STAGE_LEFT), cp_async_commit(); };
    __syncthreads();
    bring(0), bring(1);
    fetch(0), decode(0), fetch(DEPTH);
    int stage = 0, b = 0;
#pragma unroll 1
    for (uint32_t k = 0; k < f.depth; k += DEPTH) {
      const int third = stage == 0 ? 2 : stage - 1;
      cp_async_wait<1>();
      __syncthreads();
      bring(third);
      decode(1 - b);
      fetch(k + 2 * DEPTH);
      step(stage, b);
      stage = stage == 2 ? 0 : stage + 1, b = 1 - b;
    }
    cp_async_wait<0>();
  }

  // Sums any product, value by value: rows that are no whole pieces.
  DEVICE void slowly(const Factors<T> &f) {
    constexpr int PIECES = TRANSPOSED ? DEPTH / 8 : COLS / 8;
#pragma unroll 1
    for (uint32_t k0 = 0; k0 < f.depth; k0 += DEPTH) {
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < SIDE * DEPTH / 8; i += THREADS) {
        const uint32_t row = i / 4, k = k0 + i % 4 * 8;
        store_eight<T>(left + place<DEPTH>(row, i % 4), [&](uint32_t j) {
          return row < rows.count && k + j < f.depth ? load(f.left + static_cast<uint64_t>(row) * f.stride + k + j) : 0.0f;
        });
        const uint32_t line = i / PIECES, piece = i % PIECES;
        const uint32_t deep = k0 + (TRANSPOSED ? piece * 8 : line), c = col0 + (TRANSPOSED ? line : piece * 8);
        const uint64_t from = TRANSPOSED ? static_cast<uint64_t>(c) * f.depth + deep : static_cast<uint64_t>(deep) * outer + c;
        store_eight<T>(right + right_place<TRANSPOSED>(line, piece), [&](uint32_t j) {
          const bool some = TRANSPOSED ? deep + j < f.depth && c < outer : deep < f.depth && c + j < outer;
          return some ? right_value(f, from + j) : 0.0f;
        });
      }
      __syncthreads();
      step<1>(0, 0);
    }
  }

  template <typename Held> DEVICE void add(const Factors<T> &f, const Held &of) {
    const uint32_t run = TRANSPOSED ? f.depth : outer;
    const bool whole_left = f.stride % 8 == 0 && f.depth % 8 == 0 && is_aligned(f.left);
    if constexpr (CODES)
      if (f.right == nullptr) {
        if (!whole_left || run % 32 != 0 || !is_aligned(f.expert->packed)) return slowly(f);
        if constexpr (TRANSPOSED) return codes_across(f, of);
        else return codes_down(f, of);
      }
    if (!whole_left || run % 8 != 0 || !is_aligned(f.right)) return slowly(f);
    values(f);
  }
};

template <typename T, bool TRANSPOSED, bool CODES>
DEVICE void products(const Products<T> &p, const uint32_t *starts, const uint2 *tiles, T *out) {
  SHARED_BYTES(shared);
  const Rows rows = rows_at(tiles, starts, blockIdx.y, SIDE);
  if (rows.expert == NONE) return;
  const uint32_t outer = p.low ? p.experts[rows.expert].rank : p.outer, col0 = blockIdx.x * COLS;
  if (col0 >= outer) return;
  using Held = typename std::conditional<CODES, Constants, Uncoded>::type;
  Held *const held = reinterpret_cast<Held *>(shared + LEFT_STAGES * STAGE_LEFT + (CODES ? 2 : 3) * STAGE_RIGHT);
  load_experts(held, p.experts + rows.expert, p.more != nullptr ? p.more + rows.expert : nullptr);
  if constexpr (CODES) load_maps(held, p.more != nullptr);

  Tile<T, TRANSPOSED, CODES> tile(rows, outer, col0, shared);
#pragma unroll 1
  for (int at = 0; at < 4; at++) {
    const Factors<T> f = factors<T, TRANSPOSED>(p, held[at / 2].expert, rows.first, at);
    if (f.depth > 0) tile.add(f, held[at / 2]);
  }
  __syncthreads();
  const int row = tile.row(), col = tile.col();
  const uint32_t stride = p.low ? p.ranks : p.outer;
  T *const to = out + static_cast<uint64_t>(rows.first + row) * stride + col0 + col;
  store_tile<T, H, W>(tile.acc, p.low ? held[0].expert.scale : 1.0f, shared + threadIdx.x / WARP * H * W * 2, to, stride,
                      static_cast<int>(rows.count) - row, static_cast<int>(outer - col0) - col);
}

#define OF_MANY(NAME, T, TRANSPOSED, CODES)                                                                            \
  KERNEL(grouped_##NAME##_##T, SIDE_BY_SIDE(2, THREADS), PRODUCTS(T)) {                                                \
    products<T, TRANSPOSED, CODES>(PRODUCTS_OF, starts, tiles, out);                                                   \
  }
#define MANY(T)                                                                                                        \
  OF_MANY(forward, T, true, false)                                                                                     \
  OF_MANY(backward, T, false, false)                                                                                   \
  OF_MANY(coded_forward, T, true, true)                                                                                \
  OF_MANY(coded_backward, T, false, true)

MANY(bf16)
MANY(f16)
