// Products of rows sorted by expert with the experts' own matrices: all experts of a layer in one launch, by a schedule of
// tiles that lies on the device (group.cu). What the host gives is a table of experts, made once.
//
// Axes: n rows sorted by expert, o and i the sides of an expert's matrix W [o, i], r the rank of its adapter A [r, i] and
// B [o, r]; ranks differ by expert, rows of rank's length are `ranks` values apart.
//
//   forward   y = x W^T + u B^T        u  = s x A^T        right operands as they lie, transposed
//   backward  dx = dy W + du A         du = s dy B         right operands as they lie
//   gradient  dW += dy^T x, dA += du^T x, dB += dy^T u     a block a tile of the gradient, over all rows: no atomics
//
// Two matrices of one shape may be summed: gate's and up's part of dx.
#pragma once
#include "../cuda/matrix.cuh"
#include "../quantized/codes.cuh"

constexpr int THREADS = 256;
constexpr uint32_t NONE = 0xffffffffu;
constexpr uint64_t NOWHERE = ~0ull;

// As crates/ft-kernels/src/grouped/table.rs writes it: 16 words of 64 bits.
struct alignas(16) Expert {
  const void *weight, *a, *b;       // W (null: codes), A and B (null: no adapter)
  const uint8_t *packed;            // codes: see codes.cuh
  const float *pairs, *scales;
  const uint8_t *scale_codes;
  const float *map;
  uint32_t group, shift;
  float offset;
  uint32_t source;                  // what dequantized values are rounded to first: 0 f32, 1 bf16, 2 f16
  uint32_t rank;
  float scale;
  uint64_t grad_weight, grad_a, grad_b; // first values in the buffer of gradients, or NOWHERE
  uint32_t stream, threshold;       // of dropout: see stream.cuh
  float keep;                       // its factor
  uint32_t unused;
};

DEVICE float rounded_to(uint32_t source, float x) {
  return source == 0 ? x : source == 1 ? rounded<bf16>(x) : rounded<f16>(x);
}

// What is read again and again, in shared memory: an expert with the code book and the map of scales of its matrix.
struct Constants {
  Expert expert;
  float book[16], map[THREADS];
};
static_assert(THREADS == 256, "a thread an entry of the map");

// Loads an expert, and the second where there is one, with their constants; `codes` says whether books and maps are wanted.
DEVICE void load_constants(Constants *to, const Expert *first, const Expert *second, bool codes) {
  constexpr int WORDS = sizeof(Expert) / 8;
  const Expert *const from[2] = {first, second};
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (from[i] != nullptr && threadIdx.x < WORDS)
      store_8(reinterpret_cast<uint2 *>(&to[i].expert) + threadIdx.x, load_8(reinterpret_cast<const uint2 *>(from[i]) + threadIdx.x));
  __syncthreads();
  if (!codes) return;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const Expert &e = to[i].expert;
    if (from[i] == nullptr || e.weight != nullptr) continue;
    if (threadIdx.x < 16) to[i].book[threadIdx.x] = e.pairs[2 * threadIdx.x + 1];
    if (e.map != nullptr) to[i].map[threadIdx.x] = e.map[threadIdx.x];
  }
  __syncthreads();
}

// What a launch of products multiplies.
template <typename T> struct Products {
  const Expert *experts, *more; // the second may be null
  const T *x, *more_x;          // [n, inner]; null: only what adapters give
  const T *u, *more_u;          // [n, ranks]
  uint32_t inner, outer, ranks;
  bool low;                     // u or du instead of y or dx: [n, ranks], of which an expert's rank counts
};

// One product of those that are summed: left [rows, depth] with its own stride, right [outer, depth] or, not transposed,
// [depth, outer].
template <typename T> struct Factors {
  const T *left, *right; // no right: the codes of `expert`
  uint32_t stride, depth;
  const Expert *expert;
};

DEVICE Matrix codes_of(const Expert &e) {
  return {e.packed, e.pairs, e.scales, e.scale_codes, e.map, e.group, e.offset, e.shift, 0, 0};
}

// How deep product `at` of four is, with the expert of its table: 0 where there is none.
template <typename T> DEVICE uint32_t depth_of(const Products<T> &p, const Expert &e, int at) {
  if (p.low) return at == 0 ? p.inner : 0;
  const T *const left = at % 2 == 1 ? (at < 2 ? p.u : p.more_u) : (at < 2 ? p.x : p.more_x);
  if ((at < 2 ? p.experts : p.more) == nullptr || left == nullptr) return 0;
  return at % 2 == 1 ? e.rank : p.inner;
}

// That product, of a tile that begins at row `first`.
template <typename T, bool TRANSPOSED>
DEVICE Factors<T> factors(const Products<T> &p, const Expert &e, uint32_t first, int at) {
  Factors<T> f = {};
  f.depth = depth_of(p, e, at);
  if (f.depth == 0) return f;
  const T *const left = at % 2 == 1 ? (at < 2 ? p.u : p.more_u) : (at < 2 ? p.x : p.more_x);
  f.right = static_cast<const T *>(at % 2 == 0 && !p.low ? e.weight : TRANSPOSED == p.low ? e.a : e.b);
  f.expert = &e;
  f.stride = at % 2 == 1 ? p.ranks : p.inner;
  f.left = left + static_cast<uint64_t>(first) * f.stride;
  return f;
}

// One value of a right operand, whatever it is.
template <typename T> DEVICE float right_value(const Factors<T> &f, uint64_t at) {
  if (f.right != nullptr) return load(f.right + at);
  const Matrix m = codes_of(*f.expert);
  const uint32_t byte = m.packed[at / 2], code = at % 2 ? byte & 15 : byte >> 4;
  return rounded_to(f.expert->source, __fmul_rn(m.pairs[2 * code + 1], m.scale(at >> m.shift)));
}

// A tile of the schedule: its expert, first row and rows.
struct Rows {
  uint32_t expert, first, count;
};

DEVICE Rows rows_at(const uint2 *tiles, const uint32_t *starts, uint32_t i, uint32_t most) {
  const uint2 t = load_8(tiles + i);
  if (t.x == NONE) return {NONE, 0, 0};
  const uint32_t left = starts[t.x + 1] - t.y;
  return {t.x, t.y, left < most ? left : most};
}

// Which gradient a launch sums.
enum Gradient : uint32_t { OF_WEIGHT, OF_A, OF_B };

// The gradient of one expert: where it is, [rows, cols]; nowhere without one.
struct Destination {
  uint64_t at;
  uint32_t rows, cols;
};

DEVICE Destination destination(const Expert &e, uint32_t which, uint32_t rows, uint32_t cols) {
  if (which == OF_WEIGHT) return {e.grad_weight, rows, cols};
  if (which == OF_A) return {e.grad_a, e.rank, cols};
  return {e.grad_b, rows, e.rank};
}

#define PRODUCTS(T)                                                                                                    \
  const Expert *experts, const T *x, const T *u, const Expert *more, const T *more_x, const T *more_u, uint32_t inner,\
      uint32_t outer, uint32_t ranks, uint32_t low, const uint32_t *starts, const uint2 *tiles, T *out
#define PRODUCTS_OF                                                                                                    \
  { experts, more, x, more_x, u, more_u, inner, outer, ranks, low != 0 }
// `a` [n, a_stride] and `b` [n, b_stride]: dy or du, and x or u.
#define GRADIENT(T)                                                                                                    \
  const Expert *experts, uint32_t which, const T *a, uint32_t a_stride, const T *b, uint32_t b_stride, uint32_t rows,  \
      uint32_t cols, const uint32_t *starts, float *grads
