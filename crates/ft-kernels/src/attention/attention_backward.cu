// Attention backward pass on tensor cores, without atomics. Probabilities are recomputed from the
// log-sum-exp twice: in blocks owning queries (dq and delta) and in blocks owning keys (dk, dv). This
// takes 7 products instead of 5, but each sum is made by one block in a fixed order.
//
// p = exp(scale q k - lse), delta = sum over channels of o d_o, ds = p (d_o v - delta); dq = scale ds k,
// dk = scale ds q, dv = p d_o. A block owns ROWS rows and iterates over STEP rows of the opposite kind.
// For dq, while one of the two matrices of an iteration is being multiplied, the next copy of the other one is in
// flight, and two blocks fit on an SM. For dk and dv, whose registers allow one block, both matrices of the next
// iteration are.
#include "attention_backward_kv.cuh"

// Computes delta for 16 rows of a warp, from 16 `part` on, into `to` and global memory. d_o is in shared memory, o in
// global memory.
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

// dq: a block owns 64 queries of one head and iterates over their visible keys. M: as in forward. Of two warps that
// share queries, one computes the scores and the other the products of d_o and v, of which the first makes ds for both.
template <typename T, int D, int M>
DEVICE void backward_q(const T *q, const T *k, const T *v, const T *o, const T *d_o, const float *lse,
                       const Tile *tiles, const Shape &shape, float *delta, T *dq) {
  constexpr int STEP = D <= 128 ? 32 : 16, BY = THREADS / M, H = 16 * M; // larger steps spill registers at D = 256
  constexpr int R = ROWS / SHARE<D>, W = D / SHARE<D>;
  SHARED_BYTES(shared);
  unsigned char *const sq = shared, *const sg = sq + R * D * 2, *const sk = sg + R * D * 2,
                       *const sv = sk + STEP * D * 2;
  float *const base = reinterpret_cast<float *>(sv + STEP * D * 2), *const sd = base + R; // of each row
  Tile tile = tile_of(tiles, shape.heads);
  if (!narrow<R>(tile)) return;
  const uint32_t head = head_of(shape.heads), of = head / (shape.heads / shape.groups), c = shape.channels;
  const int lane = threadIdx.x % WARP, number = threadIdx.x / WARP;
  const int warp = SHARE<D> == 1 ? number : number % (R / H), col = SHARE<D> == 1 ? 0 : number / (R / H) * W;
  const uint32_t qs = shape.heads * c, ks = shape.groups * c;
  const uint32_t begin = shape.first_key(tile.first, tile.begin), end = tile.first + tile.rows;
  const uint32_t row0 = tile.first - shape.first_query;
  const uint64_t at = static_cast<uint64_t>(row0) * qs + head * c,
                 stat = static_cast<uint64_t>(head) * shape.tokens + row0;
  const bool works = warp * H < static_cast<int>(tile.rows);
  const float scale_log2 = shape.scale * LOG2E;
  k += of * c, v += of * c;

  copy_rows<D, R, BY>(sq, q + at, tile.rows, qs, c);
  copy_rows<D, R, BY>(sg, d_o + at, tile.rows, qs, c);
  copy_rows<D, STEP, BY>(sv, v + static_cast<uint64_t>(begin) * ks, end - begin, ks, c);
  cp_async_commit();
  copy_rows<D, STEP, BY>(sk, k + static_cast<uint64_t>(begin) * ks, end - begin, ks, c);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();

  if (works && col == 0) {
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
  float acc[M][W / 8][4] = {};
  unsigned char *const slot = reinterpret_cast<unsigned char *>(sd + R) + warp * OF_SLOT + lane * 16;
  const Corner<D> of_k = right<D>(0, col, lane);
  // Makes ds of dp.
  const auto to_ds = [&](const float (&p)[M][STEP / 8][4], float (&dp)[M][STEP / 8][4], uint32_t first) {
    const uint32_t query = tile.first + warp * H + lane / 4, key = first + lane % 4 * 2;
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
  };
  for (uint32_t j = begin; j < end; j += STEP) {
    const uint32_t next = j + STEP;
    float p[M][STEP / 8][4] = {}, dp[M][STEP / 8][4] = {};
    cp_async_wait<SHARE<D> == 1 ? 1 : 0>();
    __syncthreads();
    if constexpr (SHARE<D> == 1) {
      if (works) product<T, D, STEP, M>(dp, sg, warp * H, sv, lane);
      cp_async_wait<0>();
    } else {
      static_assert(M == 1 && STEP == 16, "one operand a lane");
      if (works) product<T, D, STEP, M>(p, col == 0 ? sq : sg, warp * H, col == 0 ? sk : sv, lane);
      if (works && col > 0) give(slot, p[0]);
    }
    __syncthreads();
    if (next < end) copy_rows<D, STEP, BY>(sv, v + static_cast<uint64_t>(next) * ks, end - next, ks, c);
    cp_async_commit();
    if constexpr (SHARE<D> == 1) {
      if (works) {
        product<T, D, STEP, M>(p, sq, warp * H, sk, lane);
        to_ds(p, dp, j);
        add_product<T, D, W, STEP, M>(acc, dp, sk, 0, lane);
      }
    } else {
      uint32_t ds[M][4];
      if (works && col == 0) {
        take(dp[0], slot);
        to_ds(p, dp, j);
        pack_left<T>(ds[0], dp[0], 0);
        give(slot, ds[0]);
      }
      __syncthreads();
      if (works) take(ds[0], slot), add_operand<T, D, W, M>(acc, ds, sk, of_k, 0);
    }
    __syncthreads();
    if (next < end) copy_rows<D, STEP, BY>(sk, k + static_cast<uint64_t>(next) * ks, end - next, ks, c);
    cp_async_commit();
  }
  if (!works) return;
  const float factor[2] = {shape.scale, shape.scale};
#pragma unroll
  for (int m = 0; m < M; m++)
    store_rows<T, W>(dq + at + col, acc[m], factor, sq + R * col * 2, tile.rows, c - col, qs, warp * M + m, lane);
}

#define BACKWARD_Q(NAME, T, D, M)                                                                                      \
  KERNEL(attention_backward_q_##NAME##_##D, THREADS / M, const T *q, const T *k, const T *v, const T *o, const T *d_o, \
         const float *lse, const Tile *tiles, SHAPE, float *delta, T *dq) {                                            \
    backward_q<T, D, M>(q, k, v, o, d_o, lse, tiles, SHAPE_OF, delta, dq);                                             \
  }
#define BACKWARD(NAME, T, D, W)                                                                                        \
  BACKWARD_Q(NAME, T, D, 1)                                                                                            \
  KERNEL(attention_backward_kv_##NAME##_##D, THREADS *PARTS<D>, const T *q, const T *k, const T *v, const T *d_o,      \
         const float *lse, const float *delta, const Tile *tiles, SHAPE, T *dk, T *dv) {                               \
    backward_kv<T, D, W, PARTS<D>, STAGES<D>>(q, k, v, d_o, lse, delta, tiles, SHAPE_OF, dk, dv);                      \
  }
#define BACKWARDS(D, W) BACKWARD(bf16, bf16, D, W) BACKWARD(f16, f16, D, W)
#define BACKWARD_KV_PAIR(NAME, T, D)                                                                                   \
  KERNEL(attention_backward_kv_pair_##NAME##_##D, THREADS *PARTS<D>, const T *q, const T *k, const T *v, const T *d_o, \
         const float *lse, const float *delta, const Tile *tiles, SHAPE, T *dk, T *dv) {                               \
    backward_kv_pair<T, D, PARTS<D>>(q, k, v, d_o, lse, delta, tiles, SHAPE_OF, dk, dv);                               \
  }
#define PAIRS_KV(D) BACKWARD_KV_PAIR(bf16, bf16, D) BACKWARD_KV_PAIR(f16, f16, D)
#define PAIRS_Q(D) BACKWARD_Q(pair_bf16, bf16, D, 2) BACKWARD_Q(pair_f16, f16, D, 2)
BACKWARDS(64, 64)
BACKWARDS(96, 96)
BACKWARDS(128, 128)
BACKWARDS(192, 64)
BACKWARDS(256, 128)
BACKWARDS(512, 128)
PAIRS_Q(64)
PAIRS_Q(96)
PAIRS_Q(128)
PAIRS_KV(64)
PAIRS_KV(128)
