// dk and dv, of attention_backward.cu.
#pragma once
#include "attention.cuh"

// Groups of four warps of dk and dv, as many as the register file holds; one if keys, values and the steps of two
// exceed the shared memory of some cards.
template <int D> constexpr int PARTS = D <= 96 ? 3 : D <= 128 ? 2 : 1;
// Steps of queries in shared memory: two, unless fewer blocks would fit a multiprocessor.
template <int D> constexpr int STAGES = D <= 128 ? 2 : 1;

// Adds the sums of all parts to those of part 0, in order, through shared memory.
template <int W, int M, int PARTS>
DEVICE void add_parts(float (&ak)[M][W / 8][4], float (&av)[M][W / 8][4], unsigned char *shared, int part, int thread,
                      bool owns) {
  for (int other = 1; other < PARTS; other++) {
    float *const own = reinterpret_cast<float *>(shared) + thread * 4;
    constexpr int APART = THREADS * 4, HALF = M * (W / 8);
    if (part == other && owns)
#pragma unroll
      for (int n = 0; n < HALF; n++)
        store_vector(own + n * APART, ak[n / (W / 8)][n % (W / 8)]),
            store_vector(own + (HALF + n) * APART, av[n / (W / 8)][n % (W / 8)]);
    __syncthreads();
    if (part == 0 && owns)
#pragma unroll
      for (int n = 0; n < 2 * HALF; n++) {
        const int at = n % HALF;
        float more[4], (&sum)[4] = n < HALF ? ak[at / (W / 8)][at % (W / 8)] : av[at / (W / 8)][at % (W / 8)];
        load_vector(own + n * APART, more);
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += more[i];
      }
    __syncthreads();
  }
}

// dk and dv: a block owns 64 keys of one key head and iterates over all queries that see them, for every
// query head of the group: STEP queries of one head at a time. Each of PARTS groups of four warps takes every PARTS-th
// step, with barriers of its own, and their sums are added in order at the end. A block then lasts 1 / PARTS as long
// with as many warps on a multiprocessor: few key heads make few blocks, and the heaviest of them bounds the launch.
// STAGES: with 2, the next step is copied during a whole step, which has one barrier; with 1, each matrix as soon as
// the products with the one before are done. A block sums W channels (D, or a multiple of 64) starting at blockIdx.z W:
// from D = 192 on the full sums exceed the register file. Of four warps that share keys, two compute the scores of half
// of a step each, and two the products of v and d_o, of which the first make p and ds for all.
template <typename T, int D, int W, int PARTS, int STAGES>
DEVICE void backward_kv(const T *q, const T *k, const T *v, const T *d_o, const float *lse, const float *delta,
                        const Tile *tiles, const Shape &shape, T *dk, T *dv) {
  constexpr int STEP = 32, MATRIX = STEP * D * 2, OF_STAGE = 2 * MATRIX + 2 * STEP * 4, R = ROWS / SHARE_KV<D>;
  const int lane = threadIdx.x % WARP, thread = threadIdx.x % THREADS, warp = thread / WARP,
            part = threadIdx.x / THREADS;
  SHARED_BYTES(shared);
  unsigned char *const sk = shared, *const sv = sk + R * D * 2, *const own = sv + R * D * 2 + part * STAGES * OF_STAGE;
  Tile tile = tile_of(tiles, shape.groups);
  if (!narrow<R>(tile)) return;
  const uint32_t of = head_of(shape.groups), per = shape.heads / shape.groups, c = shape.channels;
  const int row = R < ROWS ? 0 : warp * 16, col = R < ROWS ? warp * W : W == D ? 0 : blockIdx.z * W;
  const uint32_t qs = shape.heads * c, ks = shape.groups * c;
  const uint64_t at = static_cast<uint64_t>(tile.first) * ks + of * c;
  const uint32_t begin = most(tile.first, shape.first_query),
                 end = shape.last_query(tile.first + tile.rows - 1, tile.end);
  const uint32_t steps = begin < end ? (end - begin + STEP - 1) / STEP : 0; // of one head
  const bool owns = row < static_cast<int>(tile.rows);
  const float scale_log2 = shape.scale * LOG2E;

  // The next step, and whether one is left after those of finished heads.
  uint32_t head = of * per, step = part;
  const auto settle = [&] {
    while (step >= steps && head < (of + 1) * per) step -= steps, head++;
    return head < (of + 1) * per;
  };
  bool some = steps > 0 && settle();
  // copies STEP queries of the next step
  const auto copy = [&](unsigned char *to, const T *from) {
    const uint32_t i = begin + step * STEP;
    if (some)
      copy_rows<D, STEP, THREADS>(to, from + static_cast<uint64_t>(i - shape.first_query) * qs + head * c, end - i, qs,
                                  c);
    cp_async_commit();
  };
  // Their statistics, one a thread of two warps: missing queries get probability 0.
  const auto statistic = [&] {
    const uint32_t i = begin + step * STEP + lane;
    if (!some || warp >= 2 || i >= end) return warp == 0 ? INFINITY : 0.0f;
    const uint64_t stat = static_cast<uint64_t>(head) * shape.tokens + (i - shape.first_query);
    return warp == 0 ? lse[stat] * LOG2E : delta[stat];
  };
  const auto put = [&](unsigned char *stage, float x) {
    if (warp < 2) reinterpret_cast<float *>(stage + 2 * MATRIX)[thread] = x;
  };
  if (part == 0) copy_rows<D, R, THREADS>(sk, k + at, tile.rows, ks, c);
  if (part == PARTS - 1) copy_rows<D, R, THREADS>(sv, v + at, tile.rows, ks, c);
  copy(own, q), copy(own + MATRIX, d_o), put(own, statistic());
  float ak[1][W / 8][4] = {}, av[1][W / 8][4] = {};
  if constexpr (PARTS > 1) {
    cp_async_wait<1>();
    __syncthreads();
  }
  // Makes probabilities of p, and ds of dp, for the queries from `first` on.
  const auto to_ds = [&](auto &p, auto &dp, uint32_t first, const float *base, const float *dl) {
    constexpr int N = sizeof(p[0]) / sizeof(p[0][0]);
    // mask, unless all of these queries see every key
    if (first < tile.first + R || first + N * 8 - tile.first > shape.window) {
      const uint32_t query = first + lane % 4 * 2, key = tile.first + row + lane / 4;
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int x = 0; x < 4; x++)
          if (!shape.sees(query + n * 8 + x % 2, key + x / 2 * 8)) p[0][n][x] = -INFINITY;
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int x = 0; x < 4; x++) {
        const int column = n * 8 + lane % 4 * 2 + x % 2;
        p[0][n][x] = exp2_fast(fmaf(p[0][n][x], scale_log2, -base[column]));
        dp[0][n][x] = p[0][n][x] * (dp[0][n][x] - dl[column]);
      }
  };
  int stage = 0;
  for (uint32_t n = 0; n < steps * per; n += PARTS) {
    unsigned char *const sq = own + stage * OF_STAGE, *const sg = sq + MATRIX;
    const float *const base = reinterpret_cast<const float *>(sq + 2 * MATRIX), *const dl = base + STEP;
    const uint32_t first = begin + step * STEP;
    const bool works = owns && some;
    step += PARTS;
    some = some && settle();
    if constexpr (STAGES > 1) stage ^= 1;
    unsigned char *const next = own + stage * OF_STAGE;
    if constexpr (R < ROWS) {
      const int half = warp % 2 * (STEP / 2);
      unsigned char *const slots = own + OF_STAGE + lane * 16, *const slot = slots + warp % 2 * OF_SLOT;
      float x[1][2][4] = {};
      cp_async_wait<0>();
      __syncthreads();
      if (works) product<T, D, STEP / 2, 1>(x, warp < 2 ? sk : sv, 0, (warp < 2 ? sq : sg) + half * D * 2, lane);
      if (works && warp >= 2) give(slot, x[0]);
      const float kept = statistic();
      __syncthreads();
      if (works && warp < 2) {
        float dp[1][2][4];
        uint32_t f[4];
        take(dp[0], slot);
        to_ds(x, dp, first + half, base + half, dl + half);
        pack_left<T>(f, x[0], 0), give(slot, f);
        pack_left<T>(f, dp[0], 0), give(slot + OF_SLOT / 2, f);
      }
      __syncthreads();
      if (works) {
        const Corner<D> of_b = right<D>(0, col, lane);
#pragma unroll
        for (int s = 0; s < 2; s++) {
          uint32_t f[1][4];
          take(f[0], slots + s * OF_SLOT), add_operand<T, D, W, 1>(av, f, sg, of_b, s * 16);
          take(f[0], slots + s * OF_SLOT + OF_SLOT / 2), add_operand<T, D, W, 1>(ak, f, sq, of_b, s * 16);
        }
      }
      __syncthreads();
      copy(next, q), copy(next + MATRIX, d_o), put(next, kept);
      continue;
    }
    float p[1][STEP / 8][4] = {}, dp[1][STEP / 8][4] = {}, kept = 0;
    cp_async_wait<STAGES == 1 ? 1 : 0>();
    part_barrier<THREADS, PARTS>(part);
    if constexpr (STAGES > 1) copy(next, q), copy(next + MATRIX, d_o), kept = statistic();
    if (works) product<T, D, STEP, 1>(p, sk, row, sq, lane);
    if constexpr (STAGES > 1) {
      put(next, kept);
    } else {
      cp_async_wait<0>();
      part_barrier<THREADS, PARTS>(part);
      kept = statistic();
    }
    if (works) {
      product<T, D, STEP, 1>(dp, sv, row, sg, lane);
      to_ds(p, dp, first, base, dl);
      add_product<T, D, W, STEP, 1>(ak, dp, sq, col, lane);
    }
    if constexpr (STAGES == 1) {
      part_barrier<THREADS, PARTS>(part);
      copy(next, q);
    }
    if (works) add_product<T, D, W, STEP, 1>(av, p, sg, col, lane);
    if constexpr (STAGES == 1) {
      part_barrier<THREADS, PARTS>(part);
      copy(next + MATRIX, d_o), put(next, kept);
    }
  }
  if (PARTS > 1 || W != D || steps == 0) {
    // The staging rows of the stores, and the sums of other parts, may overlap rows of other warps. If no query sees
    // these keys, the initial copies are still in flight.
    cp_async_wait<0>();
    __syncthreads();
  }
  add_parts<W, 1, PARTS>(ak, av, shared, part, thread, owns);
  if (part > 0 || !owns) return;
  const float one[2] = {1.0f, 1.0f}, factor[2] = {shape.scale, shape.scale};
  const int before = R < ROWS ? R * col * 2 : 0;
  store_rows<T, W>(dk + at + col, ak[0], factor, sk + before, tile.rows, c - col, ks, row / 16, lane);
  T *const to = dv + static_cast<uint64_t>(tile.first) * shape.apart + of * c + col;
  store_rows<T, W>(to, av[0], one, sv + before, tile.rows, c - col, shape.apart, row / 16, lane);
}

// acc [16 M, W] += rows row .. row + 16 M of a [64, N] times columns col .. col + W of b [N, D], both in shared memory.
template <typename T, int D, int W, int N, int M>
DEVICE void add_exchanged(float (&acc)[M][W / 8][4], const unsigned char *a, int row, const unsigned char *b, int col,
                          int lane) {
  const Corner<N> of_a = left<N>(row, 0, lane);
  const Corner<D> of_b = right<D>(0, col, lane);
#pragma unroll
  for (int s = 0; s < N; s += 16) {
    uint32_t fa[M][4];
#pragma unroll
    for (int m = 0; m < M; m++) load(fa[m], a, of_a, 16 * m, s);
    add_operand<T, D, W, M>(acc, fa, b, of_b, s);
  }
}

// The same bits where a multiprocessor has the shared memory: two warps own 32 keys. Each has one of the two steps that
// a part takes at a time for the probabilities, exchanges these, rounded, with the other, and sums half the channels
// over both steps. A fragment of queries then feeds four products in place of two.
template <typename T, int D, int PARTS>
DEVICE void backward_kv_pair(const T *q, const T *k, const T *v, const T *d_o, const float *lse, const float *delta,
                             const Tile *tiles, const Shape &shape, T *dk, T *dv) {
  constexpr int STEP = 32, BOTH = 2 * STEP, W = D / 2, HALF = STEP * D * 2, MATRIX = 2 * HALF,
                OF_STAGE = 2 * MATRIX + 2 * BOTH * 4;
  constexpr int EXCHANGE = ROWS * BOTH * 2, OF_PART = 2 * OF_STAGE + 2 * EXCHANGE;
  const int lane = threadIdx.x % WARP, thread = threadIdx.x % THREADS, warp = thread / WARP,
            part = threadIdx.x / THREADS;
  const int half = warp % 2, row = warp / 2 * 32;
  SHARED_BYTES(shared);
  unsigned char *const sk = shared, *const sv = sk + ROWS * D * 2, *const own = sv + ROWS * D * 2 + part * OF_PART;
  unsigned char *const sp = own + 2 * OF_STAGE, *const ss = sp + EXCHANGE;
  const Tile tile = tile_of(tiles, shape.groups);
  const uint32_t of = head_of(shape.groups), per = shape.heads / shape.groups, c = shape.channels;
  const uint32_t qs = shape.heads * c, ks = shape.groups * c;
  const uint64_t at = static_cast<uint64_t>(tile.first) * ks + of * c;
  const uint32_t begin = most(tile.first, shape.first_query),
                 end = shape.last_query(tile.first + tile.rows - 1, tile.end);
  const uint32_t steps = begin < end ? (end - begin + STEP - 1) / STEP : 0; // of one head
  const bool owns = row < static_cast<int>(tile.rows);
  const float scale_log2 = shape.scale * LOG2E;

  // Copies the next two steps, zeros for one that is not there. The warp's own one starts at `first`; returns one of
  // its statistics.
  uint32_t head = of * per, step = part, first = end;
  const auto copy = [&](unsigned char *to) {
    float statistic = row == 0 ? INFINITY : 0.0f; // missing queries get probability 0
#pragma unroll
    for (int h = 0; h < 2; h++, step += PARTS) {
      while (step >= steps && head < (of + 1) * per) step -= steps, head++;
      const uint32_t i = head < (of + 1) * per ? begin + step * STEP : end;
      const uint64_t from = static_cast<uint64_t>(i - shape.first_query) * qs + head * c;
      copy_rows<D, STEP, THREADS>(to + h * HALF, q + from, end - i, qs, c);
      copy_rows<D, STEP, THREADS>(to + MATRIX + h * HALF, d_o + from, end - i, qs, c);
      if (half != h) continue;
      first = i;
      const uint64_t stat = static_cast<uint64_t>(head) * shape.tokens + (i + lane - shape.first_query);
      if (i + lane < end) statistic = row == 0 ? lse[stat] * LOG2E : delta[stat];
    }
    cp_async_commit();
    return statistic;
  };
  const auto put = [&](unsigned char *stage, float x) {
    reinterpret_cast<float *>(stage + 2 * MATRIX)[(row == 0 ? 0 : BOTH) + half * STEP + lane] = x;
  };
  if (part == 0) copy_rows<D, ROWS, THREADS>(sk, k + at, tile.rows, ks, c);
  if (part == PARTS - 1) copy_rows<D, ROWS, THREADS>(sv, v + at, tile.rows, ks, c);
  cp_async_commit();
  if (steps > 0) put(own, copy(own));
  float ak[2][W / 8][4] = {}, av[2][W / 8][4] = {};
  cp_async_wait<0>();
  __syncthreads();
  int stage = 0;
  for (uint32_t n = 0; n < steps * per; n += 2 * PARTS) {
    unsigned char *const sq = own + stage * OF_STAGE, *const sg = sq + MATRIX;
    const float *const base = reinterpret_cast<const float *>(sq + 2 * MATRIX) + half * STEP, *const dl = base + BOTH;
    const uint32_t from = first; // of the warp's own step
    stage ^= 1;
    unsigned char *const next = own + stage * OF_STAGE;
    float p[2][STEP / 8][4] = {}, dp[2][STEP / 8][4] = {};
    cp_async_wait<0>();
    part_barrier<THREADS, PARTS>(part);
    const float kept = copy(next);
    if (owns) product<T, D, STEP, 2>(p, sk, row, sq + half * HALF, lane);
    put(next, kept);
    if (owns) {
      product<T, D, STEP, 2>(dp, sv, row, sg + half * HALF, lane);
      if (from < tile.first + ROWS || from + STEP - tile.first > shape.window) {
        const uint32_t query = from + lane % 4 * 2, key = tile.first + row + lane / 4;
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
          for (int n = 0; n < STEP / 8; n++)
#pragma unroll
            for (int x = 0; x < 4; x++)
              if (!shape.sees(query + n * 8 + x % 2, key + m * 16 + x / 2 * 8)) p[m][n][x] = -INFINITY;
      }
#pragma unroll
      for (int n = 0; n < STEP / 8; n++)
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
          for (int x = 0; x < 4; x++) {
            const int column = n * 8 + lane % 4 * 2 + x % 2;
            p[m][n][x] = exp2_fast(fmaf(p[m][n][x], scale_log2, -base[column]));
            dp[m][n][x] = p[m][n][x] * (dp[m][n][x] - dl[column]);
          }
#pragma unroll
          for (int r = 0; r < 2; r++) {
            const int to = place<BOTH>(row + m * 16 + lane / 4 + r * 8, half * (STEP / 8) + n) + lane % 4 * 4;
            store_4(sp + to, pack<T>(p[m][n][2 * r], p[m][n][2 * r + 1]));
            store_4(ss + to, pack<T>(dp[m][n][2 * r], dp[m][n][2 * r + 1]));
          }
        }
    }
    part_barrier<THREADS, PARTS>(part);
    if (owns) {
      add_exchanged<T, D, W, BOTH, 2>(ak, ss, row, sq, half * W, lane);
      add_exchanged<T, D, W, BOTH, 2>(av, sp, row, sg, half * W, lane);
    }
  }
  cp_async_wait<0>();
  __syncthreads();
  add_parts<W, 2, PARTS>(ak, av, shared, part, thread, owns);
  if (part > 0 || !owns) return;
  const float one[2] = {1.0f, 1.0f}, factor[2] = {shape.scale, shape.scale};
  constexpr int STAGING = ROWS * W * 2;
  unsigned char *const staging = shared + half * 2 * STAGING;
  const int col = half * W;
  T *const to = dv + static_cast<uint64_t>(tile.first) * shape.apart + of * c + col;
#pragma unroll
  for (int m = 0; m < 2; m++) {
    store_rows<T, W>(dk + at + col, ak[m], factor, staging, tile.rows, c - col, ks, warp / 2 * 2 + m, lane);
    store_rows<T, W>(to, av[m], one, staging + STAGING, tile.rows, c - col, shape.apart, warp / 2 * 2 + m, lane);
  }
}
