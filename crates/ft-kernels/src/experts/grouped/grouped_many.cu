// Grouped GEMMs of 16-bit values for experts with many rows, on tensor cores: four warps per 128 x 128 tile, each with
// 64 x 64 values of it, so that a fragment from shared memory feeds eight tensor-core instructions; in a tile with up
// to 64 rows, an expert's last one, 64 x 32. Two blocks stand on a multiprocessor, also where it has 100 KiB of shared
// memory.
//
// There are two kernels of each direction. For matrices of values, left and right tiles arrive by cp.async in three
// stages of 32 inner values. With 4-bit codes, left tiles arrive in two stages of 64, whole lines of the cache; codes
// are loaded into registers a step ahead and dequantized into one of two right tiles of 32 while the other one is
// multiplied. Other matrices of the launch (adapters) take two stages there.
//
// On 8.0 and 9.0 shared memory is the bound, and shuffles take its cycles too. Codes are therefore looked up in
// registers: a thread has 32 codes of one scale, computes the 16 values that they can have, and selects their bytes.
//
// A product with the narrow side of an adapter (u and du) has a kernel of its own, bound by the rows of x or dy: 128 of
// them by 32 columns, in three stages of 64 inner values, with few registers.
#include "grouped_tiles.cuh"

constexpr int OF_MANY = 128;                 // threads; must match crates/ft-kernels/src/experts/grouped/mod.rs
constexpr int SIDE = 128, H = 64;            // rows of a tile and of a warp
constexpr int TURN = 2 * DEPTH;              // inner values of a left stage with codes
constexpr int STAGE_LEFT = SIDE * DEPTH * 2; // bytes

// The expert of a launch with codes, and the codebook of its W.
struct Coded {
  Expert expert;
  float book[16];
};

DEVICE void load_books(Coded *to, bool second) {
#pragma unroll
  for (int i = 0; i < 2; i++)
    if ((i == 0 || second) && to[i].expert.weight == nullptr && threadIdx.x < 16)
      to[i].book[threadIdx.x] = to[i].expert.pairs[2 * threadIdx.x + 1];
  __syncthreads();
}

// The 16 values of a quantization block's codes, split into low and high bytes, four values to a word.
struct Lookup {
  uint32_t low[4], high[4];

  // Values are rounded to T; with ROUNDED to the other 16-bit type before.
  template <typename T, bool ROUNDED> DEVICE void fill(const float *book, float scale) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        v[j] = __fmul_rn(book[4 * i + j], scale);
        if constexpr (ROUNDED) v[j] = rounded<Other<T>>(v[j]);
      }
      const uint32_t first = pack<T>(v[0], v[1]), second = pack<T>(v[2], v[3]);
      low[i] = permute(first, second, 0x6420), high[i] = permute(first, second, 0x7531);
    }
  }

  // Values of the 8 codes of a word; the first code of a byte is in its high half.
  DEVICE uint4 values(uint32_t word) const {
    // index in a half of the codebook, and which half
    const uint32_t index = word & 0x77777777u, half = (word >> 1 & 0x44444444u) | 0x32103210u;
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t at = index >> 16 * i, of = half >> 16 * i;
      const uint32_t l = permute(permute(low[0], low[1], at), permute(low[2], low[3], at), of);
      const uint32_t h = permute(permute(high[0], high[1], at), permute(high[2], high[3], at), of);
      out[2 * i] = permute(l, h, 0x4051), out[2 * i + 1] = permute(l, h, 0x6273);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
  }
};

// The parts of a scale, loaded ahead of their product.
struct Scale {
  uint32_t code = 0, group = NONE; // code 0: or the bits of a plain scale
  float absmax = 0.0f;

  // Starts loading that of the block of value `at`.
  DEVICE void fetch(const Matrix &m, uint64_t at) {
    const uint32_t block = static_cast<uint32_t>(at >> m.shift);
    if (m.scale_codes == nullptr) {
      code = __float_as_uint(m.scales[block]);
      return;
    }
    code = m.scale_codes[block];
    const uint32_t own = block / m.group;
    if (own != group) group = own, absmax = m.scales[own];
  }

  // Rounded after the product and after the sum; see codes.cuh.
  DEVICE float value(const Matrix &m) const {
    return m.scale_codes == nullptr ? __uint_as_float(code) : __fadd_rn(__fmul_rn(m.map[code], absmax), m.offset);
  }
};

// Codes of W [outer, depth] in forward. Threads 2j and 2j + 1 load the same sector of two rows, and then own one of
// these rows each: 64 codes a turn. Past the edges, codes repeat.
template <typename T, bool ROUNDED> struct Across {
  const Coded &of;
  const uint32_t depth;
  const bool apart; // whether 64 codes may have two scales
  uint32_t at[2];   // first values of both rows, and of the thread's half
  uint64_t first[2];
  int to;
  Scale scales[2];
  float scale[2];
  uint4 raw[2];
  uint32_t words[8];
  Lookup lookup;

  DEVICE Across(const Coded &of, uint32_t depth, uint32_t outer, uint32_t col0)
      : of(of), depth(depth), apart(depth % TURN != 0 || of.expert.shift < 6), scale(), raw(), words(), lookup() {
    // rows of 8 consecutive threads differ modulo 8, so that their stores meet no bank twice
    const uint32_t row = threadIdx.x / 8 * 8 + threadIdx.x / 2 % 4;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      const uint32_t col = col0 + row + 4 * i;
      first[i] = static_cast<uint64_t>(col < outer ? col : outer - 1) * depth;
    }
    to = place<DEPTH>(static_cast<int>(row + threadIdx.x % 2 * 4), 0);
  }

  DEVICE void fetch(uint32_t k) {
    const Matrix m = codes_of(of.expert);
    const bool odd = threadIdx.x % 2;
    const uint32_t half = k + (odd ? DEPTH : 0), own = half < depth ? half : 0;
    raw[0] = load_16(m.packed + (first[0] + own) / 2), raw[1] = load_16(m.packed + (first[1] + own) / 2);
    const uint64_t row = odd ? first[1] : first[0];
    scales[0].fetch(m, row + (k < depth ? k : 0));
    if (apart) scales[1].fetch(m, row + (k + DEPTH < depth ? k + DEPTH : 0));
  }

  // Prepares step `i` of two, and starts loading the turn at `next` after the last one.
  DEVICE void begin(int i, uint32_t next) {
    if (i == 0) {
      const bool odd = threadIdx.x % 2;
      const auto swap = [&](int n, uint32_t a, uint32_t b) {
        const uint32_t other = __shfl_xor_sync(ALL, odd ? a : b, 1);
        words[n] = odd ? other : a, words[4 + n] = odd ? b : other;
      };
      swap(0, raw[0].x, raw[1].x), swap(1, raw[0].y, raw[1].y), swap(2, raw[0].z, raw[1].z),
          swap(3, raw[0].w, raw[1].w);
      const Matrix m = codes_of(of.expert);
      scale[0] = scales[0].value(m), scale[1] = apart ? scales[1].value(m) : scale[0];
    }
    lookup.fill<T, ROUNDED>(of.book, scale[i]);
    if (i == 1) fetch(next);
  }

  // Dequantizes a quarter of step `i`.
  DEVICE void store(unsigned char *right, int i, int quarter) const {
    store_16(right + i * STAGE_RIGHT + (to ^ quarter * 16), lookup.values(words[4 * i + quarter]));
  }
};

// Codes of W [depth, outer] in backward: a thread has 32 codes of a row in each step. Past the edges the last row and
// the last codes repeat.
template <typename T, bool ROUNDED> struct Down {
  const Coded &of;
  const uint32_t depth, outer;
  uint32_t line, col;
  int to;
  Scale scale;
  uint4 raw;
  uint32_t words[4];
  Lookup lookup;

  DEVICE Down(const Coded &of, uint32_t depth, uint32_t outer, uint32_t col0)
      : of(of), depth(depth), outer(outer), raw(), words(), lookup() {
    // 8 consecutive threads have different rows, so that their stores meet no bank twice
    line = threadIdx.x / WARP * 8 + threadIdx.x % 8;
    const uint32_t part = threadIdx.x % WARP / 8, at = col0 + part * 32;
    col = at < outer ? at : outer - 32;
    to = place<COLS>(static_cast<int>(line), static_cast<int>(part * 4));
  }

  DEVICE void fetch(uint32_t k) {
    const Matrix m = codes_of(of.expert);
    const uint64_t at = static_cast<uint64_t>(k + line < depth ? k + line : depth - 1) * outer + col;
    raw = load_16(m.packed + at / 2);
    scale.fetch(m, at);
  }

  DEVICE void begin(int i, uint32_t next) {
    words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
    lookup.fill<T, ROUNDED>(of.book, scale.value(codes_of(of.expert)));
    fetch(i == 1 ? next : next + DEPTH);
  }

  DEVICE void store(unsigned char *right, int i, int quarter) const {
    store_16(right + i * STAGE_RIGHT + (to ^ quarter * 16), lookup.values(words[quarter]));
  }
};

// Pieces of left tiles [128, D], tile after tile; rows past the edge are zeros.
template <typename T, int D> struct Left {
  static constexpr int PIECES = D / 8, APART = OF_MANY / PIECES; // pieces of a row; rows between those of a thread
  const T *from;
  const uint64_t apart;
  const uint32_t depth;
  uint32_t deep;
  int some; // rows of the thread
  int to;

  DEVICE Left(const Factors<T> &f, Rows rows)
      : apart(static_cast<uint64_t>(APART) * f.stride), depth(f.depth), deep(threadIdx.x % PIECES * 8) {
    const int row = threadIdx.x / PIECES;
    from = f.left + static_cast<uint64_t>(row) * f.stride + deep;
    some = (static_cast<int>(rows.count) - row + APART - 1) / APART;
    to = place<D>(row, threadIdx.x % PIECES);
  }

  DEVICE void bring(unsigned char *tile) {
    static_assert(APART % 8 == 0, "a swizzle for all rows of a thread");
    const int own = deep < depth ? some : 0;
#pragma unroll
    for (int i = 0; i < SIDE / APART; i++) cp_async_16(tile + to + i * APART * D * 2, from + i * apart, i < own);
    from += D, deep += D;
  }
};

// One tile of the result, and this thread's part of it: W columns of a warp.
template <typename T, bool TRANSPOSED, bool CODES, int W> struct Tile {
  static_assert(W == 64 || W == 32, "two or four warps beside each other");
  static constexpr int STAGES = CODES ? 2 : 3;
  static constexpr int LEFT_BYTES = (CODES ? 4 : 3) * STAGE_LEFT;
  const Rows rows;
  const uint32_t outer, col0;
  unsigned char *const left, *const right; // LEFT_BYTES, [STAGES]
  const bool works;                        // whether the warp has values before the edges
  float acc[H / 16][W / 8][4];

  static DEVICE int row() { return W == 64 ? threadIdx.x / WARP % 2 * H : 0; }
  static DEVICE int col() { return threadIdx.x / WARP / (W == 64 ? 2 : 1) * W; }

  DEVICE Tile(Rows rows, uint32_t outer, uint32_t col0, unsigned char *shared)
      : rows(rows), outer(outer), col0(col0), left(shared), right(shared + LEFT_BYTES),
        works(static_cast<uint32_t>(row()) < rows.count && static_cast<uint32_t>(col()) < outer - col0), acc() {}

  // Multiplies columns from `col` on of a left tile [128, D] by a right tile. `between` is called after each eighth.
  template <int D, int TOGETHER, typename F>
  DEVICE void step(const unsigned char *a, int col, const unsigned char *b, const F &between) {
    const int lane = threadIdx.x % WARP;
    const auto part = [&](int i) {
      for (int n = 0; n < 64 / W; n++) between(i * 64 / W + n);
    };
    multiply<T, TRANSPOSED, H, W, D, TOGETHER>(acc, a, col, b, ::left<D>(row(), 0, lane),
                                               right_corner<TRANSPOSED>(this->col(), lane), part);
  }

  // Sums a product of stored values whose rows are whole 16-byte pieces.
  DEVICE void values(const Factors<T> &f) {
    Left<T, DEPTH> from(f, rows);
    // a thread's pieces of right tiles; rows and columns past the edge are zeros
    constexpr int PIECES = TRANSPOSED ? DEPTH / 8 : COLS / 8, APART = OF_MANY / PIECES,
                  EACH = COLS * DEPTH / 8 / OF_MANY;
    const uint32_t line = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    const uint32_t c = col0 + (TRANSPOSED ? line : piece * 8);
    uint32_t deep = TRANSPOSED ? piece * 8 : line;
    const uint64_t pitch = TRANSPOSED ? f.depth : outer;
    const T *of = f.right + (TRANSPOSED ? static_cast<uint64_t>(c) * pitch + deep : deep * pitch + c);
    unsigned char *const to = right + right_place<TRANSPOSED>(static_cast<int>(line), static_cast<int>(piece));
    const auto bring = [&](int stage) {
      from.bring(left + stage * STAGE_LEFT);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const bool some =
            TRANSPOSED ? deep < f.depth && c + i * APART < outer : deep + i * APART < f.depth && c < outer;
        cp_async_16(to + stage * STAGE_RIGHT + i * (STAGE_RIGHT / EACH), of + i * APART * pitch, some);
      }
      of += TRANSPOSED ? DEPTH : DEPTH * pitch, deep += DEPTH;
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
      if (works) step<DEPTH, 2>(left + stage * STAGE_LEFT, 0, right + stage * STAGE_RIGHT, [](int) {});
      stage = stage == STAGES - 1 ? 0 : stage + 1, next = next == STAGES - 1 ? 0 : next + 1;
    }
    cp_async_wait<0>();
  }

  // Sums a product with W in codes: right tile 1 is filled while tile 0 is multiplied, then tile 0 of the next turn.
  // Warps without values before the edges only fill, in a loop of their own that meets the same barriers.
  template <bool WORKS, typename Codes> DEVICE void codes(const Factors<T> &f, Codes of) {
    Left<T, TURN> from(f, rows);
    const auto bring = [&](int stage) { from.bring(left + stage * 2 * STAGE_LEFT), cp_async_commit(); };
    __syncthreads();
    bring(0);
    of.fetch(0), of.begin(0, 0);
#pragma unroll
    for (int i = 0; i < 4; i++) of.store(right, 0, i);
    int stage = 0;
#pragma unroll 1
    for (uint32_t k = 0; k < f.depth; k += TURN) {
      const unsigned char *const a = left + stage * 2 * STAGE_LEFT;
      const auto half = [&](int i) {
        const auto fill = [&](int part) {
          if (part == 0) of.begin(1 - i, k + TURN);
          if (part % 2 == 1) of.store(right, 1 - i, part / 2);
        };
        if constexpr (WORKS) step<TURN, 2>(a, i * DEPTH, right + i * STAGE_RIGHT, fill);
        else
#pragma unroll
          for (int part = 0; part < 8; part++) fill(part);
      };
      cp_async_wait<0>();
      __syncthreads();
      stage = 1 - stage;
      bring(stage);
      half(0);
      __syncthreads();
      half(1);
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
      for (int i = threadIdx.x; i < SIDE * DEPTH / 8; i += OF_MANY) {
        const uint32_t row = i / 4, k = k0 + i % 4 * 8;
        store_eight<T>(left + place<DEPTH>(row, i % 4), [&](uint32_t j) {
          return row < rows.count && k + j < f.depth ? load(f.left + static_cast<uint64_t>(row) * f.stride + k + j)
                                                     : 0.0f;
        });
        const uint32_t line = i / PIECES, piece = i % PIECES;
        const uint32_t deep = k0 + (TRANSPOSED ? piece * 8 : line), c = col0 + (TRANSPOSED ? line : piece * 8);
        const uint64_t from =
            TRANSPOSED ? static_cast<uint64_t>(c) * f.depth + deep : static_cast<uint64_t>(deep) * outer + c;
        store_eight<T>(right + right_place<TRANSPOSED>(line, piece), [&](uint32_t j) {
          const bool some = TRANSPOSED ? deep + j < f.depth && c < outer : deep < f.depth && c + j < outer;
          return some ? right_value(f, from + j) : 0.0f;
        });
      }
      __syncthreads();
      if (works) step<DEPTH, 1>(left, 0, right, [](int) {});
    }
  }

  template <typename Held> DEVICE void add(const Factors<T> &f, const Held &of) {
    const uint32_t run = TRANSPOSED ? f.depth : outer;
    const bool whole_left = f.stride % 8 == 0 && f.depth % 8 == 0 && is_aligned(f.left);
    if constexpr (CODES)
      if (f.right == nullptr) {
        if (!whole_left || run % 32 != 0 || !is_aligned(f.expert->packed)) return slowly(f);
        return f.expert->source == 3 - own_source<T>() ? of_source<true>(f, of) : of_source<false>(f, of);
      }
    if (!whole_left || run % 8 != 0 || !is_aligned(f.right)) return slowly(f);
    values(f);
  }

  template <bool ROUNDED> DEVICE void of_source(const Factors<T> &f, const Coded &of) {
    using Codes = typename std::conditional<TRANSPOSED, Across<T, ROUNDED>, Down<T, ROUNDED>>::type;
    if (works) codes<true>(f, Codes(of, f.depth, outer, col0));
    else codes<false>(f, Codes(of, f.depth, outer, col0));
  }
};

template <typename T, bool TRANSPOSED, bool CODES, int W, typename Held>
DEVICE void compute(const Products<T> &p, Rows rows, uint32_t outer, uint32_t col0, const Held *held,
                    unsigned char *shared, T *out) {
  Tile<T, TRANSPOSED, CODES, W> tile(rows, outer, col0, shared);
#pragma unroll 1
  for (int at = p.begin; at < p.end; at++) {
    const Factors<T> f = factors<T, TRANSPOSED>(p, held[at / 2].expert, rows.first, at);
    if (f.depth > 0) tile.add(f, held[at / 2]);
  }
  __syncthreads();
  if (!tile.works) return;
  const int row = tile.row(), col = tile.col();
  const uint32_t stride = p.low ? p.ranks : p.outer;
  T *const to = out + static_cast<uint64_t>(rows.first + row) * stride + col0 + col;
  store_tile<T, H, W>(tile.acc, p.low ? held[p.begin / 2].expert.scale : 1.0f, shared + threadIdx.x / WARP * H * W * 2,
                      to, stride, static_cast<int>(rows.count) - row, static_cast<int>(outer - col0) - col);
}

template <typename T, bool TRANSPOSED, bool CODES>
DEVICE void products(Products<T> p, const uint32_t *starts, const uint2 *tiles, T *out, T *second) {
  using Own = Tile<T, TRANSPOSED, CODES, 64>;
  SHARED_BYTES(shared);
  const uint32_t col0 = first_column(p, COLS, out, second);
  const Rows rows = rows_at(tiles, starts, blockIdx.y, SIDE);
  if (rows.expert == NONE) return;
  const uint32_t outer = p.low ? p.table()[rows.expert].rank : p.outer;
  if (col0 >= outer) return;
  using Held = typename std::conditional<CODES, Coded, Uncoded>::type;
  Held *const held = reinterpret_cast<Held *>(shared + Own::LEFT_BYTES + Own::STAGES * STAGE_RIGHT);
  load_experts(held, p.experts + rows.expert, p.more != nullptr ? p.more + rows.expert : nullptr);
  if constexpr (CODES) load_books(held, p.more != nullptr);
  if (rows.count <= H) return compute<T, TRANSPOSED, CODES, 32>(p, rows, outer, col0, held, shared, out);
  compute<T, TRANSPOSED, CODES, 64>(p, rows, outer, col0, held, shared, out);
}

constexpr int LOW = 32, LOW_STAGES = 3, LOW_RIGHT = LOW * DEPTH * 2; // columns; bytes of half a stage's right tile

// u or du of a tile of rows. Rows of the left operand are whole 16-byte pieces.
template <typename T, bool TRANSPOSED>
DEVICE void narrow(Products<T> p, const uint32_t *starts, const uint2 *tiles, T *out, T *second) {
  constexpr int OF_WARP = SIDE * WARP / OF_MANY, STAGE_BYTES = 2 * (STAGE_LEFT + LOW_RIGHT);
  SHARED_BYTES(shared);
  const Rows rows = rows_at(tiles, starts, blockIdx.y, SIDE);
  if (rows.expert == NONE) return;
  const uint32_t first = first_column(p, LOW, out, second);
  const Expert &e = p.table()[rows.expert];
  const uint32_t rank = e.rank;
  if (first >= rank) return;
  const Factors<T> f = factors<T, TRANSPOSED>(p, e, rows.first, p.begin);

  // a thread's pieces of right tiles, [LOW, DEPTH] if TRANSPOSED, else [DEPTH, LOW]; values past the edges are zeros
  static_assert(LOW == DEPTH && OF_MANY * 8 == LOW * DEPTH, "a piece a thread");
  const uint32_t line = threadIdx.x / (DEPTH / 8), piece = threadIdx.x % (DEPTH / 8),
                 r = first + (TRANSPOSED ? line : piece * 8);
  uint32_t k = TRANSPOSED ? piece * 8 : line;
  const uint64_t pitch = TRANSPOSED ? 1 : rank;
  const T *of = f.right + (TRANSPOSED ? static_cast<uint64_t>(r) * f.depth + k : k * pitch + r);
  const bool whole = (TRANSPOSED ? f.depth : rank) % 8 == 0 && is_aligned(f.right);
  unsigned char *const to = shared + 2 * STAGE_LEFT + place<DEPTH>(static_cast<int>(line), static_cast<int>(piece));
  Left<T, TURN> from(f, rows);
  const auto bring = [&](int stage) {
    from.bring(shared + stage * STAGE_BYTES);
#pragma unroll
    for (int i = 0; i < 2; i++, k += DEPTH, of += DEPTH * pitch) {
      unsigned char *const own = to + stage * STAGE_BYTES + i * LOW_RIGHT;
      if (whole) cp_async_16(own, of, r < rank && k < f.depth);
      else
        store_eight<T>(own, [&](uint32_t j) {
          const bool some = TRANSPOSED ? r < rank && k + j < f.depth : r + j < rank && k < f.depth;
          return some ? load(of + j) : 0.0f;
        });
    }
    cp_async_commit();
  };
#pragma unroll
  for (int s = 0; s < LOW_STAGES - 1; s++) bring(s);
  const int lane = threadIdx.x % WARP, row = threadIdx.x / WARP * OF_WARP,
            some_rows = static_cast<int>(rows.count) - row;
  const auto of_left = left<TURN>(row, 0, lane);
  const auto of_right = TRANSPOSED ? right_transposed<DEPTH>(0, 0, lane) : right<DEPTH>(0, 0, lane);
  float acc[OF_WARP / 16][LOW / 8][4] = {};
  int stage = 0, next = LOW_STAGES - 1;
#pragma unroll 1
  for (uint32_t n = 0; n < f.depth; n += TURN) {
    cp_async_wait<LOW_STAGES - 2>();
    __syncthreads();
    bring(next);
    const unsigned char *const a = shared + stage * STAGE_BYTES;
    if (some_rows > 0)
#pragma unroll
      for (int i = 0; i < 2; i++)
        multiply<T, TRANSPOSED, OF_WARP, LOW, TURN, 2>(acc, a, i * DEPTH, a + 2 * STAGE_LEFT + i * LOW_RIGHT, of_left,
                                                       of_right, [](int) {});
    stage = stage == LOW_STAGES - 1 ? 0 : stage + 1, next = next == LOW_STAGES - 1 ? 0 : next + 1;
  }
  cp_async_wait<0>();
  __syncthreads();
  T *const own = out + static_cast<uint64_t>(rows.first + row) * p.ranks + first;
  store_tile<T, OF_WARP, LOW>(acc, e.scale, shared + threadIdx.x / WARP * OF_WARP * LOW * 2, own, p.ranks, some_rows,
                              static_cast<int>(rank - first));
}

#define MANY_OF(NAME, T, TRANSPOSED, CODES)                                                                            \
  KERNEL(grouped_##NAME##_##T, SIDE_BY_SIDE(2, OF_MANY), PRODUCTS(T)) {                                                \
    products<T, TRANSPOSED, CODES>(PRODUCTS_OF, starts, tiles, out, second);                                           \
  }
#define LOW_OF(NAME, T, TRANSPOSED)                                                                                    \
  KERNEL(grouped_low_##NAME##_##T, SIDE_BY_SIDE(3, OF_MANY), PRODUCTS(T)) {                                            \
    narrow<T, TRANSPOSED>(PRODUCTS_OF, starts, tiles, out, second);                                                    \
  }
#define MANY(T)                                                                                                        \
  MANY_OF(forward, T, true, false)                                                                                     \
  MANY_OF(backward, T, false, false)                                                                                   \
  MANY_OF(coded_forward, T, true, true)                                                                                \
  MANY_OF(coded_backward, T, false, true)                                                                              \
  LOW_OF(forward, T, true)                                                                                             \
  LOW_OF(backward, T, false)

MANY(bf16)
MANY(f16)
