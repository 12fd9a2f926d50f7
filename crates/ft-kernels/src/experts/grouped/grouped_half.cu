// Grouped GEMMs of 16-bit values for experts with few rows, on tensor cores: eight warps per ROWS x 128 tile, inner
// steps of 32, four stages of shared memory. Values arrive by cp.async two stages ahead. 4-bit codes are loaded into
// registers several stages ahead and dequantized into shared memory by the loading threads, overlapping
// with tensor core work. Codes are loaded in whole sectors. With W transposed, a sector spans 64 inner
// values, so every second stage loads no codes. Also gradients, for any number of rows.
#include "grouped_tiles.cuh"

constexpr int STAGES = 4;

// Shared memory after the stages holds the constants of both tables and a window of scales (see RowCodes).
//
// Backward: a tile needs two scales per row of W, out of a sector of 32. With few rows, a block therefore
// processes WIDE adjacent column tiles at each inner step (as many as the registers hold accumulators
// for), and loads the scales with the first tile. The window caches the next GROUPS absmax values.
constexpr int WIDE = 6, GROUPS = WINDOW * COLS / 4;

// Loads the stages of a tile in order: for each summand and inner step, the right tiles of all adjacent
// columns. Codes are loaded AHEAD loads before dequantization: with few rows the kernel is bound by
// memory latency, so enough bytes must be in flight.
template <typename T, bool TRANSPOSED, int ROWS, int AHEAD, int BESIDE> struct Loader {
  const Products<T> &p;
  const Rows tile;
  const uint32_t outer, col0;
  const uint32_t beside;                   // adjacent column tiles, at most BESIDE
  unsigned char *const left, *const right; // [STAGES] each
  const Constants *const constants;        // of both tables
  unsigned char *const window;             // scales
  RowCodes row_codes;                      // in forward
  Factors<T> f;
  int at, stage, left_stage;
  uint32_t k0, column; // inner index and column tile of the current stage
  bool whole_left, whole_right, shared_scales;
  Codes codes[AHEAD];
  uint32_t next_k, next_column; // position of the next code load
  bool pending;                 // whether codes[0] awaits dequantization
  // Backward: the first group in the window, the scales shared within a row at k0, and the raw scales loaded for the
  // next step.
  uint32_t held_group;
  float held[2];
  uint32_t raw[2];

  DEVICE Loader(const Products<T> &p, Rows tile, uint32_t outer, uint32_t col0, uint32_t beside, unsigned char *shared)
      : p(p), tile(tile), outer(outer), col0(col0), beside(BESIDE == 1 ? 1 : beside), left(shared),
        right(shared + STAGES * ROWS * DEPTH * 2),
        constants(reinterpret_cast<const Constants *>(right + STAGES * STAGE_RIGHT)),
        window(right + STAGES * STAGE_RIGHT + 2 * sizeof(Constants)), row_codes(window, col0, outer), at(p.begin - 1),
        stage(0), left_stage(0), k0(0), column(0), codes(), next_k(0), next_column(0), pending(false), held_group(NONE),
        held(), raw() {
    next();
  }

  DEVICE const Expert &expert(int at) const { return constants[at / 2].expert; }

  // Number of stages of all summands.
  DEVICE uint32_t stages() const {
    uint32_t all = 0;
#pragma unroll 1
    for (int i = p.begin; i < p.end; i++) all += (depth_of(p, expert(i), i) + DEPTH - 1) / DEPTH;
    return all * beside;
  }

  // Advances to the next summand present.
  DEVICE void next() {
    do {
      if (++at == p.end) return;
      f = factors<T, TRANSPOSED>(p, expert(at), tile.first, at);
    } while (f.depth == 0);
    k0 = 0, held_group = row_codes.held_group = NONE;
    whole_left = f.stride % 8 == 0 && f.depth % 8 == 0 && is_aligned(f.left);
    const uint32_t run = TRANSPOSED ? f.depth : outer;
    if (f.right != nullptr) whole_right = run % 8 == 0 && is_aligned(f.right);
    else {
      whole_right = run % 32 == 0 && is_aligned(f.expert->packed);
      if constexpr (!TRANSPOSED) {
        const Expert &e = *f.expert;
        shared_scales = e.shift >= 6 && outer % 64 == 0 &&
                        (e.scale_codes == nullptr || (DEPTH * outer >> e.shift >> e.group_shift) + 9 < GROUPS);
      }
    }
  }

  DEVICE bool done() const { return at == p.end; }

  // Starts loading the next stage.
  DEVICE void begin() {
    if (done()) return;
    if (BESIDE == 1 || column == 0) bring_left();
    if (f.right != nullptr) bring_values();
    else if (whole_right) fetch_codes();
    else bring_slowly();
  }

  // Completes the stage. A barrier (and a wait for async copies) makes it visible to other threads.
  DEVICE void end() {
    if (done()) return;
    if (pending) dequantize();
    stage = (stage + 1) % STAGES;
    if constexpr (BESIDE > 1) {
      if (++column < beside) return;
      column = 0, left_stage = (left_stage + 1) % STAGES;
    }
    k0 += DEPTH;
    if (k0 >= f.depth) next();
  }

  DEVICE void bring_left() {
    unsigned char *to = left + (BESIDE == 1 ? stage : left_stage) * ROWS * DEPTH * 2;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * 4; i += THREADS) {
      const uint32_t row = i / 4, piece = i % 4, k = k0 + piece * 8;
      const T *from = f.left + static_cast<uint64_t>(row) * f.stride + k;
      const bool some = row < tile.count && k < f.depth;
      if (whole_left) cp_async_16(to + place<DEPTH>(row, piece), some ? from : f.left, some);
      else
        store_eight<T>(to + place<DEPTH>(row, piece),
                       [&](uint32_t j) { return row < tile.count && k + j < f.depth ? load(from + j) : 0.0f; });
    }
  }

  // Row, piece, inner index and column of the 8 values loaded by thread `i`; returns their offset in the
  // operand.
  DEVICE uint64_t piece_of(int i, uint32_t &row, uint32_t &piece, uint32_t &deep, uint32_t &col) const {
    constexpr int PIECES = TRANSPOSED ? DEPTH / 8 : COLS / 8;
    row = i / PIECES, piece = i % PIECES;
    deep = k0 + (TRANSPOSED ? piece * 8 : row), col = col0 + column * COLS + (TRANSPOSED ? row : piece * 8);
    return TRANSPOSED ? static_cast<uint64_t>(col) * f.depth + deep : static_cast<uint64_t>(deep) * outer + col;
  }

  DEVICE void bring_values() {
    if (!whole_right) return bring_slowly();
    unsigned char *to = right + stage * STAGE_RIGHT;
#pragma unroll
    for (int n = 0; n < COLS * 4 / THREADS; n++) {
      uint32_t row, piece, deep, col;
      const uint64_t from = piece_of(n * THREADS + threadIdx.x, row, piece, deep, col);
      const bool some = deep < f.depth && col < outer;
      cp_async_16(to + right_place<TRANSPOSED>(row, piece), f.right + (some ? from : 0), some);
    }
  }

  // Scalar fallback for unaligned rows.
  DEVICE void bring_slowly() {
    unsigned char *to = right + stage * STAGE_RIGHT;
#pragma unroll 1
    for (int i = threadIdx.x; i < COLS * 4; i += THREADS) {
      uint32_t row, piece, deep, col;
      const uint64_t from = piece_of(i, row, piece, deep, col);
      store_eight<T>(to + right_place<TRANSPOSED>(row, piece), [&](uint32_t j) {
        const bool some = TRANSPOSED ? deep + j < f.depth && col < outer : deep < f.depth && col + j < outer;
        return some ? right_value(f, from + j) : 0.0f;
      });
    }
  }

  // Starts loading codes. If TRANSPOSED, one load covers two stages.
  DEVICE void fetch_codes() {
    constexpr uint32_t STEP = TRANSPOSED ? 2 * DEPTH : DEPTH;
    if (k0 % STEP != 0) return;
    pending = true;
    if (k0 == 0 && column == 0) {
      next_k = 0, next_column = 0;
      if constexpr (!TRANSPOSED) held_group = NONE, load_scales(0);
#pragma unroll
      for (int a = 0; a + 1 < AHEAD; a++) codes[a + 1] = fetch_next(a, STEP);
    }
#pragma unroll
    for (int a = 0; a + 1 < AHEAD; a++) codes[a] = codes[a + 1];
    codes[AHEAD - 1] = fetch_next(AHEAD - 1, STEP);
  }

  // The codes `ahead` loads after the ones to dequantize now.
  DEVICE Codes fetch_next(uint32_t ahead, uint32_t step) {
    if constexpr (BESIDE == 1) return fetch(k0 + ahead * step, col0);
    const Codes c = fetch(next_k, col0 + next_column * COLS);
    if (++next_column == beside) next_column = 0, next_k += step;
    return c;
  }

  // This thread's codes from inner index `k` on. TRANSPOSED: 32 codes spanning two stages. Otherwise: 16 codes of row j
  // for threads 8j to 8j + 7, in the tile starting at column `col`.
  DEVICE Codes fetch(uint32_t k, uint32_t col) {
    const Matrix m = codes_of(*f.expert);
    if constexpr (TRANSPOSED) return row_codes.fetch(m, constants[at / 2].map, f.depth, k);
    const uint32_t deep = k + threadIdx.x / 8;
    col += threadIdx.x % 8 * 16;
    Codes c = {make_uint4(0, 0, 0, 0), 0.0f, 0.0f};
    if (deep >= f.depth || col >= outer) return c;
    const uint2 w = load_8(m.packed + (static_cast<uint64_t>(deep) * outer + col) / 2);
    c.words.x = w.x, c.words.y = w.y;
    return c;
  }

  // The scale of this thread's codes to dequantize now.
  DEVICE float scale() {
    const Matrix m = codes_of(*f.expert);
    if constexpr (TRANSPOSED) {
      return codes[0].scale(m);
    } else {
      const uint32_t deep = k0 + threadIdx.x / 8, part = threadIdx.x % 8, col = col0 + column * COLS + part * 16;
      if (!shared_scales)
        return deep < f.depth && col < outer ? m.scale((static_cast<uint64_t>(deep) * outer + col) >> m.shift) : 0.0f;
      if (column == 0) {
        if (m.scale_codes != nullptr) bring_absmax(m);
        share(m);
        load_scales(k0 + DEPTH);
      }
      const int from = static_cast<int>(threadIdx.x % WARP / 8 * 8 + column);
      const float low = __shfl_sync(ALL, held[0], from), high = __shfl_sync(ALL, held[1], from);
      return part < 4 ? low : high;
    }
  }

  // Index of the i-th block (of 64 columns) whose scale this thread supplies to its row at inner index
  // `k`: thread j of a row covers column tile j. Returns whether the block exists.
  DEVICE bool shared_block(const Matrix &m, uint32_t k, uint32_t i, uint32_t &block) const {
    static_assert(BESIDE <= 8 && COLS == 128, "two scales a thread");
    const uint32_t deep = k + threadIdx.x / 8, part = threadIdx.x % 8, col = col0 + part * COLS + i * 64;
    block = static_cast<uint32_t>((static_cast<uint64_t>(deep) * outer + col) >> m.shift);
    return deep < f.depth && col < outer && part < beside;
  }

  // Starts loading these scales, both in one load if contiguous and aligned.
  DEVICE void load_scales(uint32_t k) {
    const Matrix m = codes_of(*f.expert);
    raw[0] = 0, raw[1] = 0;
    if (!shared_scales) return;
    uint32_t block, second;
    const bool some = shared_block(m, k, 0, block), more = shared_block(m, k, 1, second);
    const unsigned char *const from =
        m.scale_codes != nullptr ? m.scale_codes + block : reinterpret_cast<const unsigned char *>(m.scales + block);
    if (m.shift == 6 && outer % COLS == 0 &&
        reinterpret_cast<uintptr_t>(from) % (m.scale_codes != nullptr ? 2 : 8) == 0) {
      if (!some) return;
      if (m.scale_codes != nullptr) {
        const uint32_t two = *reinterpret_cast<const unsigned short *>(from);
        raw[0] = two & 255, raw[1] = two >> 8;
      } else {
        const uint2 two = load_8(from);
        raw[0] = two.x, raw[1] = two.y;
      }
    } else {
      if (some) raw[0] = m.scale_codes != nullptr ? m.scale_codes[block] : __float_as_uint(m.scales[block]);
      if (more) raw[1] = m.scale_codes != nullptr ? m.scale_codes[second] : __float_as_uint(m.scales[second]);
    }
  }

  // Converts the raw scales loaded for k0.
  DEVICE void share(const Matrix &m) {
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      uint32_t block;
      held[i] = __uint_as_float(raw[i]);
      if (m.scale_codes == nullptr || !shared_block(m, k0, i, block)) continue;
      const float absmax = reinterpret_cast<const float *>(window)[block / m.group - held_group];
      held[i] = __fadd_rn(__fmul_rn(constants[at / 2].map[raw[i]], absmax), m.offset);
    }
  }

  // Ensures that the window holds the absmax values of the rows at k0, refilling it from there on.
  DEVICE void bring_absmax(const Matrix &m) {
    const uint32_t end = k0 + DEPTH < f.depth ? k0 + DEPTH : f.depth;
    const auto group = [&](uint64_t value) { return static_cast<uint32_t>(value >> m.shift) / m.group; };
    const uint32_t last = group(static_cast<uint64_t>(end) * outer - 1);
    if (held_group != NONE && last - held_group < GROUPS) return;
    held_group = group(static_cast<uint64_t>(k0) * outer) / 8 * 8;
    const uint32_t all = group(static_cast<uint64_t>(f.depth) * outer - 1) + 1;
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < GROUPS && held_group + i < all; i += THREADS)
      store_4(window + 4 * i, __float_as_uint(m.scales[held_group + i]));
    __syncthreads();
  }

  DEVICE void dequantize() {
    pending = false;
    const float entry = constants[at / 2].book[threadIdx.x % 16];
    const uint32_t source = f.expert->source;
    const uint4 words = codes[0].words;
    const float scale = this->scale();
    const int row = threadIdx.x / (TRANSPOSED ? 2 : 8), part = threadIdx.x % (TRANSPOSED ? 2 : 8);
    // neighboring threads store pieces in swapped order to avoid bank conflicts
    if constexpr (TRANSPOSED) {
      unsigned char *to = right + (stage + part) % STAGES * STAGE_RIGHT;
      // the stage after the last one of this summand may belong to the next
      const bool turned = part == 1, some = k0 + part * DEPTH < f.depth;
      const uint32_t w[4] = {turned ? words.z : words.x, turned ? words.w : words.y, turned ? words.x : words.z,
                             turned ? words.y : words.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint4 v = dequantized<T>(w[j], entry, scale, source);
        if (some) store_16(to + place<DEPTH>(row, j ^ (2 * part)), v);
      }
    } else {
      unsigned char *to = right + stage * STAGE_RIGHT;
      const bool turned = part >= 4;
      const uint32_t w[2] = {turned ? words.y : words.x, turned ? words.x : words.y};
#pragma unroll
      for (int j = 0; j < 2; j++)
        store_16(to + place<COLS>(row, 2 * part + (turned ? 1 - j : j)), dequantized<T>(w[j], entry, scale, source));
    }
  }
};

// Computes ROWS rows by up to BESIDE adjacent tiles of 128 columns, with DOWN warps along the rows.
template <typename T, bool TRANSPOSED, int ROWS, int DOWN, int AHEAD, int BESIDE>
DEVICE void products(Products<T> p, const uint32_t *starts, const uint2 *tiles, T *out, T *second) {
  constexpr int H = ROWS / DOWN, W = COLS / (THREADS / WARP / DOWN); // per warp
  SHARED_BYTES(shared);
  const Rows tile = rows_at(tiles, starts, blockIdx.y, ROWS);
  if (tile.expert == NONE) return;
  const uint32_t col0 = first_column(p, BESIDE * COLS, out, second),
                 outer = p.low ? p.table()[tile.expert].rank : p.outer;
  if (col0 >= outer) return;
  const uint32_t tiles_left = (outer - col0 + COLS - 1) / COLS, beside = tiles_left < BESIDE ? tiles_left : BESIDE;
  Constants *const held = reinterpret_cast<Constants *>(shared + STAGES * (ROWS * DEPTH * 2 + STAGE_RIGHT));
  load_constants(held, p.experts + tile.expert, p.more != nullptr ? p.more + tile.expert : nullptr, !p.low);

  Loader<T, TRANSPOSED, ROWS, AHEAD, BESIDE> loader(p, tile, outer, col0, beside, shared);
  float acc[BESIDE][H / 16][W / 8][4] = {};
  const int stages = static_cast<int>(loader.stages());
  uint32_t left_stage = 0, column = 0;
#pragma unroll 1
  for (int step = -2; step < stages; step++) {
    if (step >= 0) {
      cp_async_wait<1>();
      __syncthreads();
    }
    loader.begin();
    cp_async_commit();
    if (step >= 0) {
      const int s = step % STAGES;
      const unsigned char *const a = shared + (BESIDE == 1 ? s : static_cast<int>(left_stage)) * ROWS * DEPTH * 2;
      const unsigned char *const b = shared + STAGES * ROWS * DEPTH * 2 + s * STAGE_RIGHT;
      // offsets are computed in each stage: held through the loop they would spill
      const int thread = opaque(threadIdx.x), own_lane = thread % WARP, own_warp = thread / WARP;
      const int row = own_warp % DOWN * H, col = own_warp / DOWN * W;
      const auto of_a = left<DEPTH>(row, 0, own_lane);
      const auto of_b = right_corner<TRANSPOSED>(col, own_lane);
      // accumulators need compile-time indices to stay in registers
#pragma unroll
      for (uint32_t c = 0; c < BESIDE; c++)
        if (BESIDE == 1 || column == c)
          multiply<T, TRANSPOSED, H, W, DEPTH, TRANSPOSED ? 2 : 1>(acc[c], a, 0, b, of_a, of_b, [](int) {});
      if (BESIDE > 1 && ++column == beside) column = 0, left_stage = (left_stage + 1) % STAGES;
    }
    loader.end();
  }

  const int warp = threadIdx.x / WARP;
  const int row = warp % DOWN * H, col = warp / DOWN * W; // of the warp within the tile
  cp_async_wait<0>();
  __syncthreads();
  const uint32_t stride = p.low ? p.ranks : p.outer;
  T *const to = out + static_cast<uint64_t>(tile.first + row) * stride + col0 + col;
#pragma unroll
  for (uint32_t c = 0; c < BESIDE; c++) {
    if (c >= beside) break;
    if (c > 0) __syncwarp();
    store_tile<T, H, W>(acc[c], p.low ? held[p.begin / 2].expert.scale : 1.0f, shared + warp * H * W * 2, to + c * COLS,
                        stride, static_cast<int>(tile.count) - row,
                        static_cast<int>(outer - col0) - col - static_cast<int>(c) * COLS);
  }
}

// A thread's pieces of an operand of the gradient of one expert's matrix, stage after stage: 128 columns of 32 of the
// expert's rows. Pieces of warps without columns, of OF_WARP columns each, are left out: factors have few.
template <typename T, uint32_t OF_WARP> struct Pieces {
  const T *from;
  const uint32_t stride, cols, piece;
  const bool some;
  uint32_t row;

  DEVICE Pieces(const T *from, uint32_t stride, uint32_t cols)
      : from(from), stride(stride), cols(cols), piece(threadIdx.x % (COLS / 8)),
        some(piece * 8 / OF_WARP * OF_WARP < cols), row(threadIdx.x / (COLS / 8)) {
    this->from += static_cast<uint64_t>(row) * stride + (piece * 8 < cols ? piece * 8 : 0);
  }

  // Whole pieces, by cp.async; those past the edge repeat the first one, rows past the last are zeros.
  DEVICE void bring(unsigned char *to, uint32_t rows) {
    constexpr uint32_t APART = THREADS / (COLS / 8);
    static_assert(2 * APART == DEPTH, "two pieces of a thread");
    to += place<COLS>(static_cast<int>(row % DEPTH), static_cast<int>(piece));
    if (some)
      cp_async_16(to, from, row < rows), cp_async_16(to + STAGE_RIGHT / 2, from + APART * stride, row + APART < rows);
    row += DEPTH, from += DEPTH * static_cast<uint64_t>(stride);
  }

  // Any values, one by one.
  DEVICE void bring_slowly(unsigned char *to, const T *first, uint32_t n, uint32_t rows) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < DEPTH * COLS / 8; i += THREADS) {
      const uint32_t line = i / (COLS / 8), at = i % (COLS / 8);
      store_eight<T>(to + place<COLS>(line, at), [&](uint32_t j) {
        const bool some = n + line < rows && at * 8 + j < cols;
        return some ? load(first + static_cast<uint64_t>(n + line) * stride + at * 8 + j) : 0.0f;
      });
    }
  }
};

template <typename T>
DEVICE void gradient(const Expert *experts, uint32_t which, const T *a, uint32_t a_stride, const T *b,
                     uint32_t b_stride, uint32_t rows, uint32_t cols, const uint32_t *starts, float *grads) {
  constexpr int H = 32, W = 64;
  SHARED_BYTES(shared);
  const Destination to = destination(experts[blockIdx.z], which, rows, cols);
  const uint32_t first = starts[blockIdx.z], end = starts[blockIdx.z + 1], row0 = blockIdx.y * COLS,
                 col0 = blockIdx.x * COLS;
  if (to.at == NOWHERE || first == end || row0 >= to.rows || col0 >= to.cols) return;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = warp % 4 * H, col = warp / 4 * W;
  const uint32_t some_rows = to.rows - row0, some_cols = to.cols - col0;
  const bool works = static_cast<uint32_t>(row) < some_rows && static_cast<uint32_t>(col) < some_cols;
  const auto of_a = left_transposed<COLS>(0, row, lane), of_b = right<COLS>(0, col, lane);
  a += row0, b += col0;
  const bool whole_a = a_stride % 8 == 0 && some_rows % 8 == 0 && is_aligned(a);
  const bool whole_b = b_stride % 8 == 0 && some_cols % 8 == 0 && is_aligned(b);
  float acc[H / 16][W / 8][4] = {};
  const auto multiply = [&](int s, int k) {
    const unsigned char *const ta = shared + s * 2 * STAGE_RIGHT, *const tb = ta + STAGE_RIGHT;
    uint32_t fa[H / 16][4];
#pragma unroll
    for (int m = 0; m < H; m += 16) load_transposed(fa[m / 16], ta, of_a, k, m);
#pragma unroll
    for (int c = 0; c < W; c += 16) {
      uint32_t fb[4];
      load_transposed(fb, tb, of_b, k, c);
#pragma unroll
      for (int m = 0; m < H; m += 16) {
        mma<T>(acc[m / 16][c / 8], fa[m / 16], fb[0], fb[1]);
        mma<T>(acc[m / 16][c / 8 + 1], fa[m / 16], fb[2], fb[3]);
      }
    }
  };
  const uint32_t count = end - first;
  a += static_cast<uint64_t>(first) * a_stride, b += static_cast<uint64_t>(first) * b_stride;
  Pieces<T, H> of_left(a, a_stride, some_rows);
  Pieces<T, W> of_right(b, b_stride, some_cols);
  if (whole_a && whole_b) {
    const auto stage = [&](int s) {
      of_left.bring(shared + s * 2 * STAGE_RIGHT, count), of_right.bring(shared + (s * 2 + 1) * STAGE_RIGHT, count);
      cp_async_commit();
    };
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; s++) stage(s);
    int s = 0;
#pragma unroll 1
    for (uint32_t n = 0; n < count; n += DEPTH, s = (s + 1) % STAGES) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
      stage((s + STAGES - 1) % STAGES);
      if (works)
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) multiply(s, k);
    }
    cp_async_wait<0>();
  } else {
#pragma unroll 1
    for (uint32_t n = 0; n < count; n += DEPTH) {
      __syncthreads();
      of_left.bring_slowly(shared, a, n, count), of_right.bring_slowly(shared + STAGE_RIGHT, b, n, count);
      __syncthreads();
      if (works)
#pragma unroll 1
        for (int k = 0; k < DEPTH; k += 16) multiply(0, k);
    }
  }
  grads += to.at;
  const bool pairs = to.cols % 2 == 0 && is_aligned(grads);
#pragma unroll
  for (int m = 0; m < H / 16; m++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int c = 0; c < W / 8; c++) {
        const uint32_t y = row + m * 16 + r * 8 + lane / 4, x = col + c * 8 + lane % 4 * 2;
        if (y >= some_rows || x >= some_cols) continue;
        float *const g = grads + static_cast<uint64_t>(row0 + y) * to.cols + col0 + x;
        const float low = acc[m][c][2 * r], high = acc[m][c][2 * r + 1];
        if (pairs) {
          const uint2 old = load_8(g);
          store_8(g, make_uint2(__float_as_uint(__uint_as_float(old.x) + low),
                                __float_as_uint(__uint_as_float(old.y) + high)));
        } else {
          g[0] += low;
          if (x + 1 < some_cols) g[1] += high;
        }
      }
}

// Gradients of adapters: low^T x wide for one expert, low [n, ranks] (du or u) and wide [n, width] (x or dy), added to
// A's gradient [rank, width] or transposed to B's [width, rank]. A block takes 128 columns and up to LOW of the rank,
// so that `wide` is read once; all its warps have columns. Columns of `low` past the rank are any values, and so are
// their sums. With a second table, so many blocks more compute its gradients: of x, if both read it, from the cache.
constexpr int LOW = 32, OF_WARP = COLS / (THREADS / WARP), STAGE_LOW = DEPTH * LOW * 2; // of the rank; columns; bytes
constexpr int LOW_STAGES = 4;

template <typename T>
DEVICE void low_gradient(const Expert *experts, bool of_b, const T *low, uint32_t ranks, const T *wide, uint32_t width,
                         const uint32_t *starts, float *grads, const Expert *more, const T *more_low,
                         const T *more_wide) {
  SHARED_BYTES(shared);
  const uint32_t of_first = (ranks + LOW - 1) / LOW, is_second = blockIdx.y >= of_first;
  if (is_second) experts = more, low = more_low, wide = more_wide;
  const uint32_t first = starts[blockIdx.z], count = starts[blockIdx.z + 1] - first, col0 = blockIdx.x * COLS;
  const uint32_t rank0 = (blockIdx.y - is_second * of_first) * LOW;
  const uint64_t at = of_b ? experts[blockIdx.z].grad_b : experts[blockIdx.z].grad_a;
  const uint32_t rank = experts[blockIdx.z].rank;
  if (at == NOWHERE || count == 0 || rank0 >= rank) return;
  const int lane = threadIdx.x % WARP, col = threadIdx.x / WARP * OF_WARP;

  // pieces of a thread: of `wide` two, half a stage apart, of `low` one for half of the threads; rows past the last and
  // columns past the edge are zeros
  constexpr uint32_t APART = THREADS / (COLS / 8);
  static_assert(2 * APART == DEPTH && THREADS == 2 * DEPTH * LOW / 8, "pieces of a thread");
  const uint32_t piece = threadIdx.x % (COLS / 8), low_piece = threadIdx.x % (LOW / 8);
  uint32_t row = threadIdx.x / (COLS / 8), low_row = threadIdx.x / (LOW / 8);
  const bool some_low = rank0 + low_piece * 8 < ranks;
  const uint32_t rows = col0 + piece * 8 < width ? count : 0, low_rows = some_low ? count : 0;
  unsigned char *const to = shared + place<COLS>(static_cast<int>(row), static_cast<int>(piece));
  unsigned char *const low_to =
      shared + STAGE_RIGHT + place<LOW>(static_cast<int>(low_row) % DEPTH, static_cast<int>(low_piece));
  const bool brings_low = threadIdx.x < DEPTH * LOW / 8;
  wide += static_cast<uint64_t>(first + row) * width + col0 + piece * 8;
  low += static_cast<uint64_t>(first + low_row) * ranks + rank0 + low_piece * 8;
  const auto bring = [&](int stage) {
    unsigned char *const own = to + stage * (STAGE_RIGHT + STAGE_LOW);
    cp_async_16(own, wide, row < rows),
        cp_async_16(own + STAGE_RIGHT / 2, wide + APART * static_cast<uint64_t>(width), row + APART < rows);
    if (brings_low) cp_async_16(low_to + stage * (STAGE_RIGHT + STAGE_LOW), low, low_row < low_rows);
    row += DEPTH, low_row += DEPTH, wide += DEPTH * static_cast<uint64_t>(width),
        low += DEPTH * static_cast<uint64_t>(ranks);
    cp_async_commit();
  };
#pragma unroll
  for (int s = 0; s < LOW_STAGES - 1; s++) bring(s);
  const auto of_low = left_transposed<LOW>(0, 0, lane);
  const auto of_wide = right<COLS>(0, col, lane);
  float acc[LOW / 16][OF_WARP / 8][4] = {};
  int s = 0;
#pragma unroll 1
  for (uint32_t n = 0; n < count; n += DEPTH, s = (s + 1) % LOW_STAGES) {
    cp_async_wait<LOW_STAGES - 2>();
    __syncthreads();
    bring((s + LOW_STAGES - 1) % LOW_STAGES);
    const unsigned char *const w = shared + s * (STAGE_RIGHT + STAGE_LOW);
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
      uint32_t fa[LOW / 16][4], fb[4];
#pragma unroll
      for (int m = 0; m < LOW; m += 16) load_transposed(fa[m / 16], w + STAGE_RIGHT, of_low, k, m);
      load_transposed(fb, w, of_wide, k, 0);
#pragma unroll
      for (int m = 0; m < LOW / 16; m++) mma<T>(acc[m][0], fa[m], fb[0], fb[1]), mma<T>(acc[m][1], fa[m], fb[2], fb[3]);
    }
  }
  cp_async_wait<0>();

  // several loads before the first store, of A in pairs
  grads += at;
  const bool pairs = !of_b && is_aligned(grads);
#pragma unroll
  for (int m = 0; m < LOW / 16; m++) {
    constexpr int N = OF_WARP / 8;
    uint32_t place[N][4];
    float old[N][4];
#pragma unroll
    for (int c = 0; c < N; c++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t r = rank0 + m * 16 + i / 2 * 8 + lane / 4, x = col0 + col + c * 8 + lane % 4 * 2 + i % 2;
        place[c][i] = r < rank && x < width ? (of_b ? x * rank + r : r * width + x) : NONE;
      }
    if (pairs) {
#pragma unroll
      for (int c = 0; c < N; c++)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const uint2 two = place[c][i] != NONE ? load_8(grads + place[c][i]) : make_uint2(0, 0);
          old[c][i] = __uint_as_float(two.x), old[c][i + 1] = __uint_as_float(two.y);
        }
#pragma unroll
      for (int c = 0; c < N; c++)
#pragma unroll
        for (int i = 0; i < 4; i += 2)
          if (place[c][i] != NONE)
            store_8(grads + place[c][i], make_uint2(__float_as_uint(old[c][i] + acc[m][c][i]),
                                                    __float_as_uint(old[c][i + 1] + acc[m][c][i + 1])));
    } else {
#pragma unroll
      for (int c = 0; c < N; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) old[c][i] = place[c][i] != NONE ? grads[place[c][i]] : 0.0f;
#pragma unroll
      for (int c = 0; c < N; c++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (place[c][i] != NONE) grads[place[c][i]] = old[c][i] + acc[m][c][i];
    }
  }
}

#define PRODUCT(NAME, T, TRANSPOSED, ROWS, DOWN, AHEAD, BESIDE)                                                        \
  KERNEL(grouped_##NAME##_##T, SIDE_BY_SIDE(BESIDE == 1 ? 2 : 1, THREADS), PRODUCTS(T)) {                              \
    products<T, TRANSPOSED, ROWS, DOWN, AHEAD, BESIDE>(PRODUCTS_OF, starts, tiles, out, second);                       \
  }
#define GROUPED(T)                                                                                                     \
  PRODUCT(few_forward, T, true, 32, 2, 3, 1)                                                                           \
  PRODUCT(few_backward, T, false, 32, 2, 12, WIDE)                                                                     \
  KERNEL(grouped_gradient_##T, THREADS, GRADIENT(T)) {                                                                 \
    gradient<T>(experts, which, a, a_stride, b, b_stride, rows, cols, starts, grads);                                  \
  }                                                                                                                    \
  KERNEL(grouped_low_gradient_##T, SIDE_BY_SIDE(4, THREADS), const Expert *experts, uint32_t of_b, const T *low,       \
         uint32_t ranks, const T *wide, uint32_t width, const uint32_t *starts, float *grads, const Expert *more,      \
         const T *more_low, const T *more_wide) {                                                                      \
    low_gradient<T>(experts, of_b != 0, low, ranks, wide, width, starts, grads, more, more_low, more_wide);            \
  }

GROUPED(bf16)
GROUPED(f16)
