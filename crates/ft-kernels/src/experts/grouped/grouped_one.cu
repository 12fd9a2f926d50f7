// Grouped forward GEMM for a single token: one row per expert, 16-bit values. Tiles of 128 columns would
// leave most SMs idle (48 blocks for 8 experts of 768) and tensor cores mostly empty. Instead each warp
// computes ROWS values of y directly from as many rows of W (as in quantized/rows.cu), and a block WARPS
// times as many. The arguments are those of `few_forward` in grouped_half.cu; any number of rows is
// valid.
#include "grouped.cuh"

constexpr int WARPS = THREADS / WARP, ROWS = 4, SIDE = 32; // SIDE: rows per schedule tile

// sum[r] += left . row r of a right operand [outer, depth], split across the lanes of a warp. `whole`:
// rows are vector-aligned.
template <typename T>
DEVICE void add_values(float (&sum)[ROWS], const Factors<T> &f, uint32_t first, uint32_t outer, bool whole,
                       uint32_t lane) {
  if (!whole) {
    for (uint32_t k = lane; k < f.depth; k += WARP)
      for (int r = 0; r < ROWS; r++)
        if (first + r < outer)
          sum[r] = fmaf(load(f.left + k), right_value(f, static_cast<uint64_t>(first + r) * f.depth + k), sum[r]);
    return;
  }
#pragma unroll 2
  for (uint32_t k = lane * 8; k < f.depth; k += WARP * 8) {
    float x[8], w[ROWS][8];
    load_vector(f.left + k, x);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const bool some = first + r < outer;
      load_vector(f.right + static_cast<uint64_t>(some ? first + r : 0) * f.depth + k, w[r]);
      if (!some) continue;
#pragma unroll
      for (int i = 0; i < 8; i++) sum[r] = fmaf(x[i], w[r][i], sum[r]);
    }
  }
}

// The same for 4-bit codes. Row lengths are multiples of 32. Values are rounded to their source dtype,
// then to T.
template <typename T>
DEVICE void add_codes(float (&sum)[ROWS], const Factors<T> &f, const Constants &constants, uint32_t first,
                      uint32_t outer, uint32_t lane) {
  constexpr int STEPS = CHUNK / (WARP * 8);
  Matrix m = codes_of(constants.expert);
  m.map = constants.map;
  const float entry = constants.book[lane % 16];
  const uint32_t source = constants.expert.source;
  // each lane holds the scale of one block per row, refreshed every `span` values; the group's absmax is
  // cached
  const uint32_t span = (f.depth >> m.shift) << m.shift == f.depth ? WARP << m.shift : CHUNK;
  float scales[ROWS] = {}, absmax = 0.0f;
  uint32_t held = NONE;
#pragma unroll 1
  for (uint32_t start = 0; start < f.depth; start += CHUNK) {
    // issue the loads of all rows before using any
    uint32_t word[ROWS][STEPS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const uint64_t begin = static_cast<uint64_t>(first + r) * f.depth;
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        const uint32_t k = start + (s * WARP + lane) * 8;
        word[r][s] = first + r < outer && k < f.depth ? m.load<8>(begin + k) : 0;
      }
      if (start % span != 0) continue;
      const uint32_t block = static_cast<uint32_t>((begin + start) >> m.shift) + lane;
      scales[r] = 0.0f;
      if (first + r >= outer || block > (begin + (start + span < f.depth ? start + span : f.depth) - 1) >> m.shift)
        continue;
      if (m.scale_codes == nullptr) scales[r] = m.scales[block];
      else {
        const uint32_t group = block / m.group;
        if (group != held) held = group, absmax = m.scales[group];
        scales[r] = __fadd_rn(__fmul_rn(m.map[m.scale_codes[block]], absmax), m.offset); // see codes.cuh
      }
    }
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      if (start + s * WARP * 8 >= f.depth) break; // uniform across the warp
      const uint32_t k = start + (s * WARP + lane) * 8;
      float x[8] = {};
      if (k < f.depth) load_vector(f.left + k, x);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const uint64_t begin = static_cast<uint64_t>(first + r) * f.depth;
        float w[8];
        values<float, 8>(m, word[r][s], begin + k, begin + start / span * span, scales[r], entry, w);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[r] = fmaf(x[i], rounded<T>(rounded_to(source, w[i])), sum[r]);
      }
    }
  }
}

template <typename T> DEVICE void one(Products<T> p, const uint32_t *starts, const uint2 *tiles, T *out, T *second) {
  SHARED_ARRAY(Constants, constants, 1);
  SHARED_BYTES(shared); // one row of `inner` values
  const Rows tile = rows_at(tiles, starts, blockIdx.y, SIDE);
  if (tile.expert == NONE) return;
  const uint32_t col0 = first_column(p, WARPS * ROWS, out, second), first = col0 + threadIdx.x / WARP * ROWS;
  const uint32_t outer = p.low ? p.table()[tile.expert].rank : p.outer, stride = p.low ? p.ranks : p.outer;
  if (col0 >= outer) return;
  load_constants(constants, p.table() + tile.expert, nullptr, !p.low);
  const uint32_t lane = threadIdx.x % WARP;
#pragma unroll 1
  for (uint32_t row = tile.first; row < tile.first + tile.count; row++) {
    const T *const all = p.left(p.begin), *const x = all + static_cast<uint64_t>(row) * p.inner;
    const bool staged = all != nullptr && p.inner % 8 == 0 && is_aligned(x);
    __syncthreads();
    if (staged)
      for (uint32_t i = threadIdx.x; i < p.inner / 8; i += THREADS) store_16(shared + 16 * i, load_16(x + 8 * i));
    __syncthreads();
    const Expert &e = constants[0].expert;
    if (first < outer) {
      float sum[ROWS] = {};
#pragma unroll 1
      for (int i = 0; i < 2; i++) {
        Factors<T> f = factors<T, true>(p, e, row, p.begin + i);
        if (f.depth == 0) continue;
        const bool left = i == 0 ? staged : f.stride % 8 == 0 && is_aligned(f.left);
        if (i == 0 && staged) f.left = reinterpret_cast<const T *>(shared);
        if (f.right == nullptr && left && f.depth % 32 == 0 && is_aligned(e.packed))
          add_codes(sum, f, constants[0], first, outer, lane);
        else
          add_values(sum, f, first, outer, left && f.right != nullptr && f.depth % 8 == 0 && is_aligned(f.right), lane);
      }
      // lanes 0 to ROWS - 1 store adjacent values
      float own = 0.0f;
#pragma unroll
      for (uint32_t r = 0; r < ROWS; r++) {
        const float s = warp_sum(sum[r]);
        if (lane == r) own = s;
      }
      if (lane < ROWS && first + lane < outer)
        store(out + static_cast<uint64_t>(row) * stride + first + lane, own * (p.low ? e.scale : 1.0f));
    }
  }
}

#define ONE(T)                                                                                                         \
  KERNEL(grouped_one_##T, THREADS, PRODUCTS(T)) { one<T>(PRODUCTS_OF, starts, tiles, out, second); }

ONE(bf16)
ONE(f16)
