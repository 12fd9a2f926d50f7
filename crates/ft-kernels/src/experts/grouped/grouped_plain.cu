// Grouped GEMMs in f32: one block per 64 x 64 tile, inner steps of 16.
#include "grouped.cuh"

constexpr int SIDE = 64, DEPTH = 16, EACH = SIDE / 16;

// Swizzled offset of value `at` in line `k` of shared memory: copies and products are free of bank
// conflicts.
DEVICE int spot(int k, int at) { return k * SIDE + (at ^ (2 * k)); }

// acc [EACH, EACH] += this thread's part of the product of two 16-deep pieces.
DEVICE void add(float (&acc)[EACH][EACH], const float *a, const float *b, int y, int x) {
#pragma unroll 4
  for (int k = 0; k < DEPTH; k++) {
    float l[EACH], r[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) l[i] = a[spot(k, y + 16 * i)], r[i] = b[spot(k, x + 16 * i)];
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
      for (int j = 0; j < EACH; j++) acc[i][j] = fmaf(l[i], r[j], acc[i][j]);
  }
}

// Fills SIDE x DEPTH values with `value(k, at)`. DEEP: memory is contiguous along k.
template <bool DEEP, typename F> DEVICE void fill(float *to, const F &value) {
#pragma unroll 1
  for (int i = threadIdx.x; i < SIDE * DEPTH; i += THREADS) {
    // consecutive threads follow the contiguous direction
    const int k = DEEP ? i % DEPTH : i / SIDE, at = DEEP ? i / DEPTH : i % SIDE;
    to[spot(k, at)] = value(k, at);
  }
}

// 4-bit codes loaded in whole sectors, if the layout allows it. TRANSPOSED: each thread loads 16 codes of
// a span of 64 inner values, and every fourth thread stores its codes in a given 16-deep step. Otherwise:
// 4 codes of one row.
template <bool TRANSPOSED> struct Codes {
  uint2 words;
  float scale;

  static DEVICE bool takes(const Factors<float> &f, uint32_t outer) {
    return f.right == nullptr && (TRANSPOSED ? f.depth : outer) % 64 == 0 && is_aligned(f.expert->packed);
  }

  DEVICE void fill(float *to, const Constants &constants, uint64_t depth, uint32_t outer, uint32_t col0, uint32_t k0) {
    const Matrix m = codes_of(constants.expert);
    if constexpr (TRANSPOSED) {
      const uint32_t col = threadIdx.x / 4, part = threadIdx.x % 4;
      if (k0 % 64 == 0) {
        words = make_uint2(0, 0), scale = 0.0f;
        if (col0 + col < outer) {
          const uint64_t at = (col0 + col) * depth + k0 + part * 16;
          words = load_8(m.packed + at / 2), scale = scale_of(constants, m, at);
        }
      }
      if (k0 % 64 / DEPTH != part) return;
#pragma unroll
      for (int k = 0; k < DEPTH; k++) to[spot(k, col)] = value(constants, k < 8 ? words.x : words.y, k % 8);
    } else {
      const uint32_t k = threadIdx.x / 16, col = threadIdx.x % 16 * 4;
      words.x = 0, scale = 0.0f;
      if (k0 + k < depth && col0 + col < outer) {
        const uint64_t at = static_cast<uint64_t>(k0 + k) * outer + col0 + col;
        words.x = *reinterpret_cast<const unsigned short *>(m.packed + at / 2), scale = scale_of(constants, m, at);
      }
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = value(constants, words.x, i);
      // four values stay together, with pairs swapped in odd lines; see `spot`
      const bool turned = k % 2 == 1;
      const float stored[4] = {turned ? v[2] : v[0], turned ? v[3] : v[1], turned ? v[0] : v[2], turned ? v[1] : v[3]};
      store_vector(to + (spot(k, col) & ~3), stored);
    }
  }

  static DEVICE float scale_of(const Constants &constants, Matrix m, uint64_t at) {
    m.map = constants.map;
    return m.scale(at >> m.shift);
  }

  DEVICE float value(const Constants &constants, uint32_t word, int i) const {
    const uint32_t code = word >> (8 * (i / 2) + (i % 2 ? 0 : 4)) & 15;
    return rounded_to(constants.expert.source, __fmul_rn(constants.book[code], scale));
  }
};

template <bool TRANSPOSED>
DEVICE void products(Products<float> p, const uint32_t *starts, const uint2 *tiles, float *out, float *second) {
  SHARED_ARRAY(float, a, SIDE *DEPTH);
  SHARED_ARRAY(float, b, SIDE *DEPTH);
  SHARED_ARRAY(Constants, held, 2); // of both tables
  const Rows tile = rows_at(tiles, starts, blockIdx.y, SIDE);
  if (tile.expert == NONE) return;
  const uint32_t col0 = first_column(p, SIDE, out, second);
  const uint32_t outer = p.low ? p.table()[tile.expert].rank : p.outer, stride = p.low ? p.ranks : p.outer;
  if (col0 >= outer) return;
  load_constants(held, p.experts + tile.expert, p.more != nullptr ? p.more + tile.expert : nullptr, !p.low);
  const Expert &e = held[p.begin / 2].expert;
  const int y = threadIdx.x / 16, x = threadIdx.x % 16;
  float acc[EACH][EACH] = {};
#pragma unroll 1
  for (int at = p.begin; at < p.end; at++) {
    const Expert *const table = at < 2 ? p.experts : p.more;
    if (table == nullptr) continue;
    const Factors<float> f = factors<float, TRANSPOSED>(p, held[at / 2].expert, tile.first, at);
    const bool whole = f.depth > 0 && Codes<TRANSPOSED>::takes(f, outer);
    Codes<TRANSPOSED> codes;
    for (uint32_t k0 = 0; k0 < f.depth; k0 += DEPTH) {
      fill<true>(a, [&](uint32_t k, uint32_t row) {
        return row < tile.count && k0 + k < f.depth ? f.left[static_cast<uint64_t>(row) * f.stride + k0 + k] : 0.0f;
      });
      if (whole) codes.fill(b, held[at / 2], f.depth, outer, col0, k0);
      else
        fill<TRANSPOSED>(b, [&](uint32_t k, uint32_t col) {
          const uint64_t c = col0 + col, d = k0 + k;
          if (c >= outer || d >= f.depth) return 0.0f;
          return right_value(f, TRANSPOSED ? c * f.depth + d : d * outer + c);
        });
      __syncthreads();
      add(acc, a, b, y, x);
      __syncthreads();
    }
  }
  const float scale = p.low ? e.scale : 1.0f;
#pragma unroll
  for (int i = 0; i < EACH; i++)
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const uint32_t row = y + 16 * i, col = col0 + x + 16 * j;
      if (row < tile.count && col < outer)
        out[static_cast<uint64_t>(tile.first + row) * stride + col] = scale * acc[i][j];
    }
}

KERNEL(grouped_forward_f32, SIDE_BY_SIDE(3, THREADS), PRODUCTS(float)) {
  products<true>(PRODUCTS_OF, starts, tiles, out, second);
}
KERNEL(grouped_backward_f32, SIDE_BY_SIDE(3, THREADS), PRODUCTS(float)) {
  products<false>(PRODUCTS_OF, starts, tiles, out, second);
}

KERNEL(grouped_gradient_f32, THREADS, GRADIENT(float)) {
  SHARED_ARRAY(float, left, SIDE *DEPTH);
  SHARED_ARRAY(float, right, SIDE *DEPTH);
  const Destination to = destination(experts[blockIdx.z], which, rows, cols);
  const uint32_t first = starts[blockIdx.z], end = starts[blockIdx.z + 1], row0 = blockIdx.y * SIDE,
                 col0 = blockIdx.x * SIDE;
  if (to.at == NOWHERE || first == end || row0 >= to.rows || col0 >= to.cols) return;
  const int y = threadIdx.x / 16, x = threadIdx.x % 16;
  float acc[EACH][EACH] = {};
  for (uint32_t n = first; n < end; n += DEPTH) {
    fill<false>(left, [&](uint32_t k, uint32_t at) {
      return n + k < end && row0 + at < to.rows ? a[static_cast<uint64_t>(n + k) * a_stride + row0 + at] : 0.0f;
    });
    fill<false>(right, [&](uint32_t k, uint32_t at) {
      return n + k < end && col0 + at < to.cols ? b[static_cast<uint64_t>(n + k) * b_stride + col0 + at] : 0.0f;
    });
    __syncthreads();
    add(acc, left, right, y, x);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < EACH; i++)
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const uint32_t row = row0 + y + 16 * i, col = col0 + x + 16 * j;
      if (row < to.rows && col < to.cols) grads[to.at + static_cast<uint64_t>(row) * to.cols + col] += acc[i][j];
    }
}
