// Grouped GEMMs: rows sorted by expert times the experts' own matrices, all experts of a layer in one
// launch. A tile schedule on the device (dispatch.cu) drives the launch; the host supplies a table of
// experts, built once.
//
// Axes: n rows sorted by expert; o and i, the dimensions of an expert's matrix W [o, i]; r, the LoRA rank
// of its adapter A [r, i], B [o, r]. Ranks differ by expert, so rows of u and du have a fixed stride
// `ranks`.
//
//   forward   y = x W^T + u B^T        u  = s x A^T        right operands in stored order, transposed
//   backward  dx = dy W + du A         du = s dy B         right operands in stored order
//   gradient  dW += dy^T x, dA += du^T x, dB += dy^T u     one block per tile, over all rows: no atomics
//
// A launch can sum the products of two tables of one shape: dx has a part from gate and a part from up. Or it has two
// results, one for each table: gate and up of the same x, which is then read once.
#pragma once
#include "../../cuda/matrix.cuh"
#include "../../quantized/codes.cuh"

constexpr int THREADS = 256;
constexpr uint32_t NONE = 0xffffffffu;
constexpr uint64_t NOWHERE = ~0ull;

// Written by crates/ft-kernels/src/experts/grouped/table.rs: 16 words of 64 bits.
struct alignas(16) Expert {
  const void *weight, *a, *b; // W (null: use codes), A and B (null: no adapter)
  const uint8_t *packed;      // 4-bit codes; see codes.cuh
  const float *pairs, *scales;
  const uint8_t *scale_codes;
  const float *map;
  uint32_t group_shift, shift; // scales of a group: 2^group_shift
  float offset;
  uint32_t source; // first rounding of dequantized values: 0 f32, 1 bf16, 2 f16
  uint32_t rank;
  float scale;
  uint64_t grad_weight, grad_a, grad_b; // offsets in the gradient buffer, or NOWHERE
  uint32_t stream, threshold;           // dropout; see stream.cuh
  float keep;                           // dropout's scale
  uint32_t unused;
};

// Number of a 16-bit type as `source`, and the other one.
template <typename T> DEVICE constexpr uint32_t own_source() { return std::is_same<T, bf16>::value ? 1 : 2; }
template <typename T> using Other = typename std::conditional<std::is_same<T, bf16>::value, f16, bf16>::type;

DEVICE float rounded_to(uint32_t source, float x) {
  return source == 0 ? x : source == 1 ? rounded<bf16>(x) : rounded<f16>(x);
}

// Per-expert constants in shared memory: the entry, and the codebook and scale map of W.
struct Constants {
  Expert expert;
  float book[16], map[THREADS];
};
static_assert(THREADS == 256, "a thread an entry of the map");

// The same of matrices of values.
struct Uncoded {
  Expert expert;
};

// Loads the entries of one or two experts; the second may be null.
template <typename Held> DEVICE void load_experts(Held *to, const Expert *first, const Expert *second) {
  constexpr int WORDS = sizeof(Expert) / 8;
  const Expert *const from[2] = {first, second};
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (from[i] != nullptr && threadIdx.x < WORDS)
      store_8(reinterpret_cast<uint2 *>(&to[i].expert) + threadIdx.x,
              load_8(reinterpret_cast<const uint2 *>(from[i]) + threadIdx.x));
  __syncthreads();
}

// Loads the codebooks and maps of these entries.
DEVICE void load_maps(Constants *to, bool second) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const Expert &e = to[i].expert;
    if ((i == 1 && !second) || e.weight != nullptr) continue;
    if (threadIdx.x < 16) to[i].book[threadIdx.x] = e.pairs[2 * threadIdx.x + 1];
    if (e.map != nullptr) to[i].map[threadIdx.x] = e.map[threadIdx.x];
  }
  __syncthreads();
}

// Loads the constants of one or two experts (the second may be null); codebooks and maps only with `codes`.
DEVICE void load_constants(Constants *to, const Expert *first, const Expert *second, bool codes) {
  load_experts(to, first, second);
  if (codes) load_maps(to, second != nullptr);
}

// Operands of a launch.
template <typename T> struct Products {
  const Expert *experts, *more; // `more` may be null
  const T *x, *more_x;          // [n, inner]; null: adapter products only
  const T *u, *more_u;          // [n, ranks]
  uint32_t inner, outer, ranks;
  // compute u or du [n, ranks] instead of y or dx; columns up to the expert's rank are valid
  bool low;
  int begin = 0, end = 4; // summands of the block's result

  DEVICE const Expert *table() const { return begin == 0 ? experts : more; }
  // Left operand of summand `at`.
  DEVICE const T *left(int at) const { return at % 2 == 1 ? (at < 2 ? u : more_u) : (at < 2 ? x : more_x); }
};

// One summand: left [rows, depth] with row stride `stride`, times right: [outer, depth] if TRANSPOSED,
// else [depth, outer].
template <typename T> struct Factors {
  const T *left, *right; // right null: use the codes of `expert`
  uint32_t stride, depth;
  const Expert *expert;
};

DEVICE Matrix codes_of(const Expert &e) {
  // a division by this power is a shift
  return {e.packed, e.pairs, e.scales, e.scale_codes, e.map, 1u << e.group_shift, e.offset, e.shift, 0, 0};
}

// Inner dimension of summand `at` (0 to 3) for expert `e` of the respective table; 0 if absent.
template <typename T> DEVICE uint32_t depth_of(const Products<T> &p, const Expert &e, int at) {
  if (p.low) return at == p.begin ? p.inner : 0;
  if ((at < 2 ? p.experts : p.more) == nullptr || p.left(at) == nullptr) return 0;
  return at % 2 == 1 ? e.rank : p.inner;
}

// Operands of summand `at`, for a tile starting at row `first`.
template <typename T, bool TRANSPOSED>
DEVICE Factors<T> factors(const Products<T> &p, const Expert &e, uint32_t first, int at) {
  Factors<T> f = {};
  f.depth = depth_of(p, e, at);
  if (f.depth == 0) return f;
  f.right = static_cast<const T *>(at % 2 == 0 && !p.low ? e.weight : TRANSPOSED == p.low ? e.a : e.b);
  f.expert = &e;
  f.stride = at % 2 == 1 ? p.ranks : p.inner;
  f.left = p.left(at) + static_cast<uint64_t>(first) * f.stride;
  return f;
}

// One value of a right operand, stored or dequantized.
template <typename T> DEVICE float right_value(const Factors<T> &f, uint64_t at) {
  if (f.right != nullptr) return load(f.right + at);
  const Matrix m = codes_of(*f.expert);
  const uint32_t byte = m.packed[at / 2], code = at % 2 ? byte & 15 : byte >> 4;
  return rounded_to(f.expert->source, __fmul_rn(m.pairs[2 * code + 1], m.scale(at >> m.shift)));
}

// A tile of the schedule: expert, first row, number of rows.
struct Rows {
  uint32_t expert, first, count;
};

DEVICE Rows rows_at(const uint2 *tiles, const uint32_t *starts, uint32_t i, uint32_t most) {
  const uint2 t = load_8(tiles + i);
  if (t.x == NONE) return {NONE, 0, 0};
  const uint32_t left = starts[t.x + 1] - t.y;
  return {t.x, t.y, left < most ? left : most};
}

// Gradient computed by a launch.
enum Gradient : uint32_t { OF_WEIGHT, OF_A, OF_B };

// Gradient buffer offset (or NOWHERE) and shape of one expert's gradient.
struct Destination {
  uint64_t at;
  uint32_t rows, cols;
};

DEVICE Destination destination(const Expert &e, uint32_t which, uint32_t rows, uint32_t cols) {
  if (which == OF_WEIGHT) return {e.grad_weight, rows, cols};
  if (which == OF_A) return {e.grad_a, e.rank, cols};
  return {e.grad_b, rows, e.rank};
}

// First column of the block, each with so many. With a second result, blocks past the columns of the first one compute
// it, each from the summands of its table.
template <typename T> DEVICE uint32_t first_column(Products<T> &p, uint32_t columns, T *&out, T *second) {
  if (second == nullptr) return blockIdx.x * columns;
  const uint32_t of_first = ((p.low ? p.ranks : p.outer) + columns - 1) / columns;
  const bool is_second = blockIdx.x >= of_first;
  if (is_second) out = second;
  p.begin = is_second ? 2 : 0, p.end = p.begin + 2;
  return (blockIdx.x - (is_second ? of_first : 0)) * columns;
}

#define PRODUCTS(T)                                                                                                    \
  const Expert *experts, const T *x, const T *u, const Expert *more, const T *more_x, const T *more_u, uint32_t inner, \
      uint32_t outer, uint32_t ranks, uint32_t low, const uint32_t *starts, const uint2 *tiles, T *out, T *second
#define PRODUCTS_OF {experts, more, x, more_x, u, more_u, inner, outer, ranks, low != 0}
// `a` [n, a_stride] is dy or du, `b` [n, b_stride] is x or u.
#define GRADIENT(T)                                                                                                    \
  const Expert *experts, uint32_t which, const T *a, uint32_t a_stride, const T *b, uint32_t b_stride, uint32_t rows,  \
      uint32_t cols, const uint32_t *starts, float *grads
