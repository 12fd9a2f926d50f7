// Attention backward pass on tensor cores, without atomics. Probabilities are recomputed from the
// log-sum-exp twice: in blocks owning queries (dq and delta) and in blocks owning keys (dk, dv). This
// takes 7 products instead of 5, but each sum is made by one block in a fixed order.
//
// p = exp(scale q k - lse), delta = sum over channels of o d_o, ds = p (d_o v - delta); dq = scale ds k,
// dk = scale ds q, dv = p d_o. A block owns ROWS rows and iterates over STEP rows of the opposite kind.
// For dq, while one of the two matrices of an iteration is being multiplied, the next copy of the other one is in
// flight, and two blocks fit on an SM. For dk and dv, whose registers allow one block, both matrices of the next iteration are.
#include "attention.cuh"

// Computes delta for 16 rows of a warp, from 16 `part` on, into `to` and global memory. d_o is in shared memory, o in global
// memory.
template <typename T, int D>
DEVICE void deltas(const T *o, const unsigned char *sg, uint32_t rows, uint32_t channels, uint32_t stride, float *to,
                   float *global, int part, int lane) {
  constexpr int PIECES = D / 8, LANES = PIECES % 8 == 0 ? 8 : 4; // LANES: lanes per row
#pragma unroll
  for (int first = 0; first < 16; first += WARP / LANES) {
    const int row = part * 16 + first + lane / LANES;
    float sum = 0;
    if (row < static_cast<int>(rows))
#pragma unroll
      for (int i = 0; i < PIECES; i += LANES) {
        const int piece = i + lane % LANES;
        if (piece * 8 >= static_cast<int>(channels)) break;
        float a[8], b[8];
        load_vector(o + static_cast<uint64_t>(row) * stride + piece * 8, a);
        load_vector(reinterpret_cast<const T *>(sg + place<D>(row, piece)), b);
#pragma unroll
        for (int x = 0; x < 8; x++) sum = fmaf(a[x], b[x], sum);
      }
#pragma unroll
    for (int s = LANES / 2; s > 0; s /= 2) sum += __shfl_xor_sync(ALL, sum, s);
    if (lane % LANES == 0) {
      to[row] = sum;
      if (row < static_cast<int>(rows)) global[row] = sum;
    }
  }
  __syncwarp();
}

// dq: a block owns 64 queries of one head and iterates over their visible keys. M: as in forward.
template <typename T, int D, int M>
DEVICE void backward_q(const T *q, const T *k, const T *v, const T *o, const T *d_o, const float *lse, const Tile *tiles,
                       const Shape &shape, float *delta, T *dq) {
  constexpr int STEP = D <= 128 ? 32 : 16, BY = THREADS / M, H = 16 * M; // larger steps spill registers at D = 256
  SHARED_BYTES(shared);
  unsigned char *const sq = shared, *const sg = sq + ROWS * D * 2, *const sk = sg + ROWS * D * 2,
                *const sv = sk + STEP * D * 2;
  float *const base = reinterpret_cast<float *>(sv + STEP * D * 2), *const sd = base + ROWS; // of each row
  const Tile tile = tile_of(tiles, shape.heads);
  const uint32_t head = head_of(shape.heads), of = head / (shape.heads / shape.groups), c = shape.channels;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const uint32_t qs = shape.heads * c, ks = shape.groups * c;
  const uint32_t begin = shape.first_key(tile.first, tile.begin), end = tile.first + tile.rows;
  const uint32_t row0 = tile.first - shape.first_query;
  const uint64_t at = static_cast<uint64_t>(row0) * qs + head * c, stat = static_cast<uint64_t>(head) * shape.tokens + row0;
  const bool works = warp * H < static_cast<int>(tile.rows);
  const float scale_log2 = shape.scale * LOG2E;
  k += of * c, v += of * c;

  copy_rows<D, ROWS, BY>(sq, q + at, tile.rows, qs, c);
  copy_rows<D, ROWS, BY>(sg, d_o + at, tile.rows, qs, c);
  copy_rows<D, STEP, BY>(sv, v + static_cast<uint64_t>(begin) * ks, end - begin, ks, c);
  cp_async_commit();
  copy_rows<D, STEP, BY>(sk, k + static_cast<uint64_t>(begin) * ks, end - begin, ks, c);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();

  if (works) {
    const T *const own = o + static_cast<uint64_t>(row0) * shape.apart + head * c;
#pragma unroll
    for (int m = 0; m < M; m++) {
      deltas<T, D>(own, sg, tile.rows, c, shape.apart, sd, delta + stat, warp * M + m, lane);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const uint32_t row = warp * H + m * 16 + lane / 4 + r * 8;
        // missing rows get probability 0
        if (lane % 4 == 0) base[row] = row < tile.rows ? lse[stat + row] * LOG2E : INFINITY;
      }
    }
    __syncwarp();
  }
  float acc[M][D / 8][4] = {};
  for (uint32_t j = begin; j < end; j += STEP) {
    const uint32_t next = j + STEP;
    float p[M][STEP / 8][4] = {}, dp[M][STEP / 8][4] = {};
    cp_async_wait<1>();
    __syncthreads();
    if (works) product<T, D, STEP, M>(dp, sg, warp * H, sv, lane);
    cp_async_wait<0>();
    __syncthreads();
    if (next < end) copy_rows<D, STEP, BY>(sv, v + static_cast<uint64_t>(next) * ks, end - next, ks, c);
    cp_async_commit();
    if (works) {
      product<T, D, STEP, M>(p, sq, warp * H, sk, lane);
      const uint32_t query = tile.first + warp * H + lane / 4, key = j + lane % 4 * 2;
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const int row = warp * H + m * 16 + lane / 4 + r * 8;
          const float low = base[row], dl = sd[row];
#pragma unroll
          for (int n = 0; n < STEP / 8; n++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++) {
              const float w = exp2_fast(fmaf(p[m][n][i], scale_log2, -low));
              dp[m][n][i] = shape.sees(query + m * 16 + r * 8, key + n * 8 + i % 2) ? w * (dp[m][n][i] - dl) : 0.0f;
            }
        }
      add_product<T, D, D, STEP, M>(acc, dp, sk, 0, lane);
    }
    __syncthreads();
    if (next < end) copy_rows<D, STEP, BY>(sk, k + static_cast<uint64_t>(next) * ks, end - next, ks, c);
    cp_async_commit();
  }
  if (!works) return;
  const float factor[2] = {shape.scale, shape.scale};
#pragma unroll
  for (int m = 0; m < M; m++) store_rows<T, D>(dq + at, acc[m], factor, sq, tile.rows, c, qs, warp * M + m, lane);
}

// dk and dv: a block owns 64 keys of one key head and iterates over all queries that see them, for every
// query head of the group: STEP queries of one head at a time. Each of PARTS groups of four warps takes every PARTS-th
// step, with barriers of its own, and their sums are added in order at the end. A block then lasts 1 / PARTS as long with
// as many warps on a multiprocessor: few key heads make few blocks, and the heaviest of them bounds the launch.
// STAGES: with 2, the next step is copied during a whole step, which has one barrier; with 1, each matrix as soon as the
// products with the one before are done.
// A block sums W channels (D, or a multiple of 64) starting at blockIdx.z W: from D = 192 on the full sums exceed the
// register file.
template <typename T, int D, int W, int PARTS, int STAGES>
DEVICE void backward_kv(const T *q, const T *k, const T *v, const T *d_o, const float *lse, const float *delta,
                        const Tile *tiles, const Shape &shape, T *dk, T *dv) {
  constexpr int STEP = 32, MATRIX = STEP * D * 2, OF_STAGE = 2 * MATRIX + 2 * STEP * 4;
  const int lane = threadIdx.x % WARP, thread = threadIdx.x % THREADS, warp = thread / WARP, part = threadIdx.x / THREADS;
  SHARED_BYTES(shared);
  unsigned char *const sk = shared, *const sv = sk + ROWS * D * 2, *const own = sv + ROWS * D * 2 + part * STAGES * OF_STAGE;
  const Tile tile = tile_of(tiles, shape.groups);
  const uint32_t of = head_of(shape.groups), per = shape.heads / shape.groups, c = shape.channels;
  const int col = W == D ? 0 : blockIdx.z * W;
  const uint32_t qs = shape.heads * c, ks = shape.groups * c;
  const uint64_t at = static_cast<uint64_t>(tile.first) * ks + of * c;
  const uint32_t begin = most(tile.first, shape.first_query), end = shape.last_query(tile.first + tile.rows - 1, tile.end);
  const uint32_t steps = begin < end ? (end - begin + STEP - 1) / STEP : 0; // of one head
  const bool owns = warp * 16 < static_cast<int>(tile.rows);
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
    if (some) copy_rows<D, STEP, THREADS>(to, from + static_cast<uint64_t>(i - shape.first_query) * qs + head * c, end - i, qs, c);
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
  if (part == 0) copy_rows<D, ROWS, THREADS>(sk, k + at, tile.rows, ks, c);
  if (part == PARTS - 1) copy_rows<D, ROWS, THREADS>(sv, v + at, tile.rows, ks, c);
  copy(own, q), copy(own + MATRIX, d_o), put(own, statistic());
  float ak[1][W / 8][4] = {}, av[1][W / 8][4] = {};
  if constexpr (PARTS > 1) {
    cp_async_wait<1>();
    __syncthreads();
  }
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
    float p[1][STEP / 8][4] = {}, dp[1][STEP / 8][4] = {}, kept = 0;
    cp_async_wait<STAGES == 1 ? 1 : 0>();
    part_barrier<THREADS, PARTS>(part);
    if constexpr (STAGES > 1) copy(next, q), copy(next + MATRIX, d_o), kept = statistic();
    if (works) product<T, D, STEP, 1>(p, sk, warp * 16, sq, lane);
    if constexpr (STAGES > 1) {
      put(next, kept);
    } else {
      cp_async_wait<0>();
      part_barrier<THREADS, PARTS>(part);
      kept = statistic();
    }
    if (works) {
      product<T, D, STEP, 1>(dp, sv, warp * 16, sg, lane);
      // mask, unless all of these queries see every key
      if (first < tile.first + ROWS || first + STEP - tile.first > shape.window) {
        const uint32_t query = first + lane % 4 * 2, key = tile.first + warp * 16 + lane / 4;
#pragma unroll
        for (int n = 0; n < STEP / 8; n++)
#pragma unroll
          for (int x = 0; x < 4; x++)
            if (!shape.sees(query + n * 8 + x % 2, key + x / 2 * 8)) p[0][n][x] = -INFINITY;
      }
#pragma unroll
      for (int n = 0; n < STEP / 8; n++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
          const int column = n * 8 + lane % 4 * 2 + x % 2;
          p[0][n][x] = exp2_fast(fmaf(p[0][n][x], scale_log2, -base[column]));
          dp[0][n][x] = p[0][n][x] * (dp[0][n][x] - dl[column]);
        }
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
  for (int other = 1; other < PARTS; other++) {
    const auto place = [&](int n) { return reinterpret_cast<float *>(shared) + (n * THREADS + thread) * 4; };
#pragma unroll
    for (int n = 0; n < W / 8; n++)
      if (part == other && owns) store_vector(place(n), ak[0][n]), store_vector(place(W / 8 + n), av[0][n]);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < W / 4; n++)
      if (part == 0 && owns) {
        float more[4];
        load_vector(place(n), more);
        float(&sum)[4] = n < W / 8 ? ak[0][n] : av[0][n - W / 8];
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += more[i];
      }
    __syncthreads();
  }
  if (part > 0 || !owns) return;
  const float one[2] = {1.0f, 1.0f}, factor[2] = {shape.scale, shape.scale};
  store_rows<T, W>(dk + at + col, ak[0], factor, sk, tile.rows, c - col, ks, warp, lane);
  T *const to = dv + static_cast<uint64_t>(tile.first) * shape.apart + of * c + col;
  store_rows<T, W>(to, av[0], one, sv, tile.rows, c - col, shape.apart, warp, lane);
}

// Groups of four warps of dk and dv, as many as the register file holds; one if keys, values and the steps of two exceed
// the shared memory of some cards.
template <int D> constexpr int PARTS = D <= 96 ? 3 : D <= 128 ? 2 : 1;
// Steps of queries in shared memory: two, unless fewer blocks would fit a multiprocessor.
template <int D> constexpr int STAGES = D <= 128 ? 2 : 1;

#define BACKWARD_Q(NAME, T, D, M)                                                                                      \
  KERNEL(attention_backward_q_##NAME##_##D, THREADS / M, const T *q, const T *k, const T *v, const T *o, const T *d_o,    \
         const float *lse, const Tile *tiles, SHAPE, float *delta, T *dq) {                                            \
    backward_q<T, D, M>(q, k, v, o, d_o, lse, tiles, SHAPE_OF, delta, dq);                                             \
  }
#define BACKWARD(NAME, T, D, W)                                                                                        \
  BACKWARD_Q(NAME, T, D, 1)                                                                                            \
  KERNEL(attention_backward_kv_##NAME##_##D, THREADS * PARTS<D>, const T *q, const T *k, const T *v, const T *d_o, const float *lse, \
         const float *delta, const Tile *tiles, SHAPE, T *dk, T *dv) {                                                 \
    backward_kv<T, D, W, PARTS<D>, STAGES<D>>(q, k, v, d_o, lse, delta, tiles, SHAPE_OF, dk, dv);                                           \
  }
#define BACKWARDS(D, W) BACKWARD(bf16, bf16, D, W) BACKWARD(f16, f16, D, W)
#define PAIRS_Q(D) BACKWARD_Q(pair_bf16, bf16, D, 2) BACKWARD_Q(pair_f16, f16, D, 2)
BACKWARDS(64, 64)
BACKWARDS(96, 96)
BACKWARDS(128, 128)
BACKWARDS(192, 64)
BACKWARDS(256, 128)
PAIRS_Q(64)
PAIRS_Q(96)
PAIRS_Q(128)
