// Attention backward pass on tensor cores, without atomics. Probabilities are recomputed from the
// log-sum-exp twice: in blocks owning queries (dq and delta) and in blocks owning keys (dk, dv). This
// takes 7 products instead of 5, but each sum is made by one block in a fixed order.
//
// p = exp(scale q k - lse), delta = sum over channels of o d_o, ds = p (d_o v - delta); dq = scale ds k,
// dk = scale ds q, dv = p d_o. A block owns ROWS rows and iterates over STEP rows of the opposite kind.
// While one of the two matrices of an iteration is being multiplied, the next copy of the other one is in
// flight. No double buffering is needed, so two blocks fit on an SM.
#include "attention.cuh"

// Computes delta for the warp's 16 rows into `to` and global memory. d_o is in shared memory, o in global
// memory.
template <typename T, int D>
DEVICE void deltas(const T *o, const unsigned char *sg, uint32_t rows, uint32_t stride, float *to, float *global, int warp,
                   int lane) {
  constexpr int PIECES = D / 8, LANES = PIECES % 8 == 0 ? 8 : 4; // LANES: lanes per row
#pragma unroll
  for (int first = 0; first < 16; first += WARP / LANES) {
    const int row = warp * 16 + first + lane / LANES;
    float sum = 0;
    if (row < static_cast<int>(rows))
#pragma unroll
      for (int i = 0; i < PIECES; i += LANES) {
        const int piece = i + lane % LANES;
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

// dq: a block owns 64 queries of one head and iterates over their visible keys.
template <typename T, int D>
DEVICE void backward_q(const T *q, const T *k, const T *v, const T *o, const T *d_o, const float *lse, const Tile *tiles,
                       const Shape &shape, float *delta, T *dq) {
  constexpr int STEP = D <= 128 ? 32 : 16; // larger steps spill registers at D = 256
  SHARED_BYTES(shared);
  unsigned char *const sq = shared, *const sg = sq + ROWS * D * 2, *const sk = sg + ROWS * D * 2,
                *const sv = sk + STEP * D * 2;
  float *const sd = reinterpret_cast<float *>(sv + STEP * D * 2);
  const Tile tile = tile_at(tiles, blockIdx.x);
  const uint32_t head = blockIdx.y, of = head / (shape.heads / shape.groups);
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const uint32_t qs = shape.heads * D, ks = shape.groups * D;
  const uint32_t begin = shape.first_key(tile.first, tile.begin), end = tile.first + tile.rows;
  const uint32_t row0 = tile.first - shape.first_query;
  const uint64_t at = static_cast<uint64_t>(row0) * qs + head * D, stat = static_cast<uint64_t>(head) * shape.tokens + row0;
  const bool works = warp * 16 < static_cast<int>(tile.rows);
  const float scale_log2 = shape.scale * LOG2E;
  k += of * D, v += of * D;

  copy_rows<D, ROWS>(sq, q + at, tile.rows, qs);
  copy_rows<D, ROWS>(sg, d_o + at, tile.rows, qs);
  copy_rows<D, STEP>(sv, v + static_cast<uint64_t>(begin) * ks, end - begin, ks);
  cp_async_commit();
  copy_rows<D, STEP>(sk, k + static_cast<uint64_t>(begin) * ks, end - begin, ks);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();

  float base[2] = {}, dl[2] = {};
  if (works) {
    const T *const own = o + static_cast<uint64_t>(row0) * shape.apart + head * D;
    deltas<T, D>(own, sg, tile.rows, shape.apart, sd, delta + stat, warp, lane);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32_t row = warp * 16 + lane / 4 + r * 8;
      // missing rows get probability 0
      base[r] = row < tile.rows ? lse[stat + row] * LOG2E : INFINITY;
      dl[r] = sd[row];
    }
  }
  float acc[D / 8][4] = {};
  for (uint32_t j = begin; j < end; j += STEP) {
    const uint32_t next = j + STEP;
    float p[STEP / 8][4] = {}, dp[STEP / 8][4] = {};
    cp_async_wait<1>();
    __syncthreads();
    if (works) product<T, D, STEP>(dp, sg, warp * 16, sv, lane);
    cp_async_wait<0>();
    __syncthreads();
    if (next < end) copy_rows<D, STEP>(sv, v + static_cast<uint64_t>(next) * ks, end - next, ks);
    cp_async_commit();
    if (works) {
      product<T, D, STEP>(p, sq, warp * 16, sk, lane);
      const uint32_t query = tile.first + warp * 16 + lane / 4, key = j + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < STEP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float w = exp2_fast(fmaf(p[n][i], scale_log2, -base[i / 2]));
          dp[n][i] = shape.sees(query + i / 2 * 8, key + n * 8 + i % 2) ? w * (dp[n][i] - dl[i / 2]) : 0.0f;
        }
      add_product<T, D, D, STEP>(acc, dp, sk, 0, lane);
    }
    __syncthreads();
    if (next < end) copy_rows<D, STEP>(sk, k + static_cast<uint64_t>(next) * ks, end - next, ks);
    cp_async_commit();
  }
  if (!works) return;
  const float factor[2] = {shape.scale, shape.scale};
  store_rows<T, D>(dq + at, acc, factor, sq, tile.rows, qs, warp, lane);
}

// dk and dv: a block owns 64 keys of one key head and iterates over all queries that see them, for every
// query head of the group. It sums W channels starting at blockIdx.z W: for D = 256 the full sums exceed
// the register file.
template <typename T, int D, int W>
DEVICE void backward_kv(const T *q, const T *k, const T *v, const T *d_o, const float *lse, const float *delta,
                        const Tile *tiles, const Shape &shape, T *dk, T *dv) {
  constexpr int STEP = 32;
  SHARED_BYTES(shared);
  unsigned char *const sk = shared, *const sv = sk + ROWS * D * 2, *const sq = sv + ROWS * D * 2,
                *const sg = sq + STEP * D * 2;
  float *const base = reinterpret_cast<float *>(sg + STEP * D * 2), *const dl = base + STEP;
  const Tile tile = tile_at(tiles, blockIdx.x);
  const uint32_t of = blockIdx.y, per = shape.heads / shape.groups;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, col = W == D ? 0 : blockIdx.z * W;
  const uint32_t qs = shape.heads * D, ks = shape.groups * D;
  const uint64_t at = static_cast<uint64_t>(tile.first) * ks + of * D;
  const uint32_t begin = most(tile.first, shape.first_query), end = shape.last_query(tile.first + tile.rows - 1, tile.end);
  const bool works = warp * 16 < static_cast<int>(tile.rows);
  const float scale_log2 = shape.scale * LOG2E;

  // copies STEP queries of a head starting at i; missing queries get probability 0
  const auto copy = [&](unsigned char *to, const T *from, uint32_t head, uint32_t i) {
    copy_rows<D, STEP>(to, from + static_cast<uint64_t>(i - shape.first_query) * qs + head * D, end - i, qs);
  };
  const auto statistics = [&](uint32_t head, uint32_t i) {
    if (warp >= 2) return;
    const uint64_t stat = static_cast<uint64_t>(head) * shape.tokens + (i - shape.first_query) + lane;
    const bool some = lane < static_cast<int>(end - i);
    if (warp == 0) base[lane] = some ? lse[stat] * LOG2E : INFINITY;
    else dl[lane] = some ? delta[stat] : 0.0f;
  };
  uint32_t head = of * per, i = begin;
  copy_rows<D, ROWS>(sk, k + at, tile.rows, ks);
  copy_rows<D, ROWS>(sv, v + at, tile.rows, ks);
  if (begin < end) copy(sq, q, head, i);
  cp_async_commit();
  if (begin < end) copy(sg, d_o, head, i), statistics(head, i);
  cp_async_commit();
  float ak[W / 8][4] = {}, av[W / 8][4] = {};
  while (begin < end && head < (of + 1) * per) {
    const uint32_t query = i + lane % 4 * 2, key = tile.first + warp * 16 + lane / 4;
    const bool turn = i + STEP >= end; // advance to the next head
    i = turn ? begin : i + STEP, head += turn;
    const bool more = head < (of + 1) * per;
    float p[STEP / 8][4] = {}, dp[STEP / 8][4] = {};
    cp_async_wait<1>();
    __syncthreads();
    if (works) product<T, D, STEP>(p, sk, warp * 16, sq, lane);
    cp_async_wait<0>();
    __syncthreads();
    if (works) {
      product<T, D, STEP>(dp, sv, warp * 16, sg, lane);
#pragma unroll
      for (int c = 0; c < STEP / 8; c++)
#pragma unroll
        for (int x = 0; x < 4; x++) {
          const int column = c * 8 + lane % 4 * 2 + x % 2;
          const float w = exp2_fast(fmaf(p[c][x], scale_log2, -base[column]));
          p[c][x] = shape.sees(query + c * 8 + x % 2, key + x / 2 * 8) ? w : 0.0f;
          dp[c][x] = p[c][x] * (dp[c][x] - dl[column]);
        }
      add_product<T, D, W, STEP>(ak, dp, sq, col, lane);
    }
    __syncthreads();
    if (more) copy(sq, q, head, i), statistics(head, i);
    cp_async_commit();
    if (works) add_product<T, D, W, STEP>(av, p, sg, col, lane);
    __syncthreads();
    if (more) copy(sg, d_o, head, i);
    cp_async_commit();
  }
  if (W != D || begin >= end) {
    // The staging rows of the stores may overlap rows of other warps if W != D. If no query sees these
    // keys, the initial copies are still in flight.
    cp_async_wait<0>();
    __syncthreads();
  }
  if (!works) return;
  const float one[2] = {1.0f, 1.0f}, factor[2] = {shape.scale, shape.scale};
  store_rows<T, W>(dk + at + col, ak, factor, sk, tile.rows, ks, warp, lane);
  T *const to = dv + static_cast<uint64_t>(tile.first) * shape.apart + of * D + col;
  store_rows<T, W>(to, av, one, sv, tile.rows, shape.apart, warp, lane);
}

#define BACKWARD(NAME, T, D, W)                                                                                        \
  KERNEL(attention_backward_q_##NAME##_##D, THREADS, const T *q, const T *k, const T *v, const T *o, const T *d_o,        \
         const float *lse, const Tile *tiles, SHAPE, float *delta, T *dq) {                                            \
    backward_q<T, D>(q, k, v, o, d_o, lse, tiles, SHAPE_OF, delta, dq);                                                \
  }                                                                                                                    \
  KERNEL(attention_backward_kv_##NAME##_##D, THREADS, const T *q, const T *k, const T *v, const T *d_o, const float *lse, \
         const float *delta, const Tile *tiles, SHAPE, T *dk, T *dv) {                                                 \
    backward_kv<T, D, W>(q, k, v, d_o, lse, delta, tiles, SHAPE_OF, dk, dv);                                           \
  }
#define BACKWARDS(D, W) BACKWARD(bf16, bf16, D, W) BACKWARD(f16, f16, D, W)
BACKWARDS(64, 64)
BACKWARDS(96, 96)
BACKWARDS(128, 128)
BACKWARDS(256, 128)
