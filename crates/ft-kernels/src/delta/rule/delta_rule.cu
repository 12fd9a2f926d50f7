// The gated delta rule in chunks of L tokens (formulas in crates/ft-kernels/src/delta/rule/chunk.rs), on tensor cores:
// sums are f32, operands in parts (parts.cuh), and states, U and R between kernels in the type of the model. A row of
// `documents` is begin, end and first chunk of a document, and 0; null is a single document.
//
// delta_rule_chunks has a block per chunk and key head: products of tokens, and the triangular systems' inverses.
// delta_rule_forward: a block per document, value head and slice of value channels walks over the chunks, with its
// slice of the state in registers; channels of a value don't meet. delta_rule_states walks back in the same way with
// the gradient of the state. delta_rule_gradients has a block per chunk and key head; the results of the walks are read
// from memory. Every sum has a fixed order.
//
// Queries and keys stand in shared memory as they come; the inverses of their lengths are factors of rows of products.
// In f16, operands of the first two kernels are clamped to its finite range, since a zero key has the largest inverse
// length, and so are states and U in memory. Operands and results of the other two are not: they grow with the scale of
// the loss, which an overflow lowers.
// States between kernels are transposed [v, k], k filled up with zeros: a multiple of eight in memory, MOST in
// products; those before and after all tokens are [k, v] in f32.
#include "../../cuda/rows.cuh"
#include "../../cuda/parts.cuh"

// Same as in crates/ft-kernels/src/delta/rule/cuda.rs: threads per block, value channels of a slice, most channels of a
// key.
constexpr int CHUNK_THREADS = 128, WALK_THREADS = 128, GRADIENT_THREADS = 512;
constexpr uint32_t SLICE = 32;
constexpr uint32_t MOST = 128;
constexpr uint32_t L = 32;      // same as attention::CHUNK
constexpr uint32_t LP = L + 4;  // stride of [L, L] in f32 in shared memory
constexpr int TILES = MOST / 8; // of keys' channels
constexpr int TOKENS = L / 8;   // tiles of tokens
constexpr uint32_t PAIRS = L * L;
constexpr float EPS = 1e-6f;
static_assert(SLICE == WALK_THREADS / 2 / WARP * 16, "sixteen value channels a warp of the first half");
static_assert(SLICE == L, "one stride of narrow rows, the same columns of slices and pairs");
static_assert(2 * MOST == GRADIENT_THREADS / WARP * 16, "sixteen tokens and key channels a warp");

// Strides in shared memory of rows of MOST channels, and of SLICE or L.
template <typename T> constexpr uint32_t WIDE = MOST + VECTOR<T>;
template <typename T> constexpr uint32_t NARROW = SLICE + VECTOR<T>;

DEVICE uint32_t eights(uint32_t n) { return (n + 7) / 8 * 8; }
DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

struct Heads {
  uint32_t keys, values, k, v;
  DEVICE uint32_t channels() const { return 2 * keys * k + values * v; }
  // Values of a state in memory, transposed.
  DEVICE size_t state() const { return static_cast<size_t>(v) * eights(k); }
  // First channel of a value.
  DEVICE uint32_t value(uint32_t head) const { return 2 * keys * k + head * v; }
};

struct Document {
  uint32_t begin, end, chunk;
};

DEVICE Document document_of(const uint32_t *documents, uint32_t tokens, uint32_t i) {
  if (documents == nullptr) return {0, tokens, 0};
  const uint32_t *own = documents + 4 * i;
  return {own[0], own[1], own[2]};
}

// A chunk of a document, by the number of the chunk among those of all documents: first token, and tokens.
struct Span {
  uint32_t first, l;
  DEVICE Span(const Document &doc, uint32_t chunk) {
    first = doc.begin + (chunk - doc.chunk) * L, l = min(doc.end - first, L);
  }
};

DEVICE Document document_of_chunk(const uint32_t *documents, uint32_t count, uint32_t tokens, uint32_t chunk) {
  uint32_t low = 0, high = count;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (documents[4 * middle + 2] <= chunk) low = middle;
    else high = middle;
  }
  return document_of(documents, tokens, low);
}

// Results of delta_rule_chunks for a chunk and value head. Matrices [L, L]: D q.k, which is zero above the diagonal,
// and (1 + T)^-1, both in planes of the type T; D k.k below the diagonal in f32. Of the tokens, in f32: rates,
// log-decays, their running sums, the decay up to the token and from it to the end, and factors of queries (k^-1/2 over
// the length) and keys. Tokens beyond the document have no rate and no decay.
template <typename T> struct Chunk {
  static constexpr uint32_t VECTORS = 7 * L, FLOATS = 3 * PAIRS + VECTORS;
  T *a, *inverse;
  float *t, *rate;
  DEVICE Chunk(float *chunks, size_t number)
      : a(reinterpret_cast<T *>(chunks + number * FLOATS)), inverse(a + PLANES<T> * PAIRS),
        t(reinterpret_cast<float *>(inverse + PLANES<T> * PAIRS)), rate(t + PAIRS) {}
};
constexpr uint32_t VECTORS = Chunk<float>::VECTORS;
struct Vectors {
  float *rate, *log, *cum, *decay, *rest, *of_q, *of_k;
  DEVICE explicit Vectors(float *at)
      : rate(at), log(at + L), cum(at + 2 * L), decay(at + 3 * L), rest(at + 4 * L), of_q(at + 5 * L),
        of_k(at + 6 * L) {}
};

// Copies `rows` of `columns` values to shared memory [COUNT, `stride`] by THREADS threads, of which the caller is
// number `own`, with zeros up to COUNT and WIDTH; complete after cp_async_wait and a barrier. `vectors`: addresses and
// columns are those of whole vectors.
template <uint32_t THREADS, uint32_t COUNT, uint32_t WIDTH, typename T>
DEVICE void copy(uint32_t own, T *to, uint32_t stride, const T *from, size_t pitch, uint32_t rows, uint32_t columns,
                 bool vectors) {
  constexpr uint32_t V = VECTOR<T>, PIECES = WIDTH / V, STEP = THREADS / PIECES;
  static_assert(COUNT == 1 || THREADS % PIECES == 0, "the same pieces of rows for a thread");
  if (vectors) {
    const uint32_t col = own % PIECES * V;
    uint32_t row = own / PIECES;
    to += row * stride + col, from += row * pitch + col;
#pragma unroll 2
    for (; row < COUNT; row += STEP, to += STEP * stride, from += STEP * pitch)
      cp_async_16(to, from, row < rows && col < columns);
  } else {
#pragma unroll 1
    for (uint32_t at = own; at < COUNT * WIDTH; at += THREADS) {
      const uint32_t row = at / WIDTH, col = at % WIDTH;
      to[row * stride + col] = row < rows && col < columns ? from[row * pitch + col] : Number<T>::from(0.0f);
    }
  }
}

// Whether rows of heads are those of whole vectors.
template <typename T> DEVICE bool in_vectors(const T *p, uint32_t row, uint32_t head) {
  return is_aligned(p) && row % VECTOR<T> == 0 && head % VECTOR<T> == 0;
}

// Queries and keys of a chunk [L, WIDE].
template <uint32_t THREADS, typename T>
DEVICE void copy_keys(uint32_t own, T *q, T *k, const T *qkv, Heads h, const Span &span, uint32_t key) {
  const T *const from = qkv + static_cast<size_t>(span.first) * h.channels() + key * h.k;
  const bool vectors = in_vectors(qkv, h.channels(), h.k);
  copy<THREADS, L, MOST>(own, q, WIDE<T>, from, h.channels(), span.l, h.k, vectors);
  copy<THREADS, L, MOST>(own, k, WIDE<T>, from + h.keys * h.k, h.channels(), span.l, h.k, vectors);
}

// ---- products of tokens ----

// A warp inverts 1 + T, T_ij = rate_i t_ij, from t transposed in shared memory; a lane has a column. A row goes into
// the sums of all later ones at once, which do not wait for each other.
template <typename T> DEVICE void invert(T *to, const float *back, float own_rate) {
  const uint32_t lane = threadIdx.x % WARP;
  float sum[L] = {};
#pragma unroll
  for (uint32_t i = 0; i < L; i++) {
    const float y = (i == lane ? 1.0f : 0.0f) - __shfl_sync(ALL, own_rate, static_cast<int>(i)) * sum[i];
    store_planes(to + i * L + lane, PAIRS, finite<T>(y));
#pragma unroll
    for (uint32_t j = (i + 1) / 4 * 4; j < L; j += 4) {
      float of[4]; // zero up to i
      load_vector(back + i * LP + j, of);
#pragma unroll
      for (uint32_t n = 0; n < 4; n++) sum[j + n] = fmaf(of[n], y, sum[j + n]);
    }
  }
}

template <typename T>
DEVICE void chunks_of(const T *qkv, const T *a, const T *b, const float *a_log, const float *bias,
                      const uint32_t *documents, uint32_t count, uint32_t tokens, Heads h, float *chunks) {
  SHARED_BYTES(shared);
  constexpr uint32_t WARPS = CHUNK_THREADS / WARP;
  static_assert(WARPS == 4, "a warp has 16 rows of one of two products");
  const uint32_t number = blockIdx.x, key = blockIdx.y, each = h.values / h.keys, lane = threadIdx.x % WARP,
                 warp = threadIdx.x / WARP;
  const Span span(document_of_chunk(documents, count, tokens, number), number);
  float *const qk = reinterpret_cast<float *>(shared), *const kk = qk + L * LP, *const lengths = kk + L * LP;
  T *const q = reinterpret_cast<T *>(lengths + 2 * L), *const k = q + L * WIDE<T>;
  float *const back = lengths + 2 * L + warp * L * LP; // in their place, later
  copy_keys<CHUNK_THREADS>(threadIdx.x, q, k, qkv, h, span, key);
  cp_async_commit(), cp_async_wait<0>();
  __syncthreads();
  for (uint32_t row = warp; row < 2 * L; row += WARPS) {
    float squares = 0.0f;
#pragma unroll
    for (uint32_t d = 0; d < MOST; d += 2 * WARP) {
      float x[2];
      load_pair(x, q + row * WIDE<T> + d + 2 * lane);
      squares = fmaf(x[0], x[0], fmaf(x[1], x[1], squares));
    }
    squares = warp_sum(squares);
    if (lane == 0) lengths[row] = (row < L ? 1.0f / sqrtf(static_cast<float>(h.k)) : 1.0f) / sqrtf(squares + EPS);
  }
  {
    const uint32_t from = warp % 2 * 16;
    float sum[TOKENS][4] = {};
#pragma unroll
    for (uint32_t d = 0; d < MOST; d += 16) {
      Left<T, 1> left;
      load_left(left, (warp < 2 ? q : k) + from * WIDE<T> + d, WIDE<T>);
#pragma unroll
      for (int n = 0; n < TOKENS; n += 2) {
        Right<T, 1> right[2];
        load_right<true>(right, k + 8 * n * WIDE<T> + d, WIDE<T>);
        product<T>(sum[n], left, right[0]), product<T>(sum[n + 1], left, right[1]);
      }
    }
    float *const to = (warp < 2 ? qk : kk) + from * LP;
#pragma unroll
    for (int n = 0; n < TOKENS; n++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        store_pair(to + (lane / 4 + 8 * i) * LP + 8 * n + lane % 4 * 2, sum[n][2 * i], sum[n][2 * i + 1]);
  }
  __syncthreads();
  for (uint32_t head = key * each + warp; head < (key + 1) * each; head += WARPS) {
    const Chunk<T> to(chunks, static_cast<size_t>(number) * h.values + head);
    const Vectors vectors(to.rate);
    const size_t at = static_cast<size_t>(span.first + lane) * h.values + head;
    const bool some = lane < span.l;
    const float rate = some ? logistic(load(b + at)) : 0.0f;
    const float log = some ? -expf(a_log[head]) * softplus(load(a + at) + bias[head]) : 0.0f;
    float cum = log;
#pragma unroll
    for (uint32_t by = 1; by < L; by *= 2) {
      const float before = __shfl_up_sync(ALL, cum, by);
      if (lane >= by) cum += before;
    }
    const float last = __shfl_sync(ALL, cum, L - 1), of_k = lengths[L + lane];
    vectors.rate[lane] = rate, vectors.log[lane] = log, vectors.cum[lane] = cum, vectors.decay[lane] = expf(cum);
    vectors.rest[lane] = expf(last - cum), vectors.of_q[lane] = lengths[lane], vectors.of_k[lane] = of_k;
    __syncwarp();
    for (uint32_t i = 0; i < L; i++) {
      const float from = __shfl_sync(ALL, cum, static_cast<int>(i));
      const float decay = lane <= i ? expf(from - cum) * of_k : 0.0f;
      store_planes(to.a + i * L + lane, PAIRS, finite<T>(qk[i * LP + lane] * lengths[i] * decay));
      const float t = lane < i ? kk[i * LP + lane] * lengths[L + i] * decay : 0.0f;
      to.t[i * L + lane] = back[lane * LP + i] = t;
    }
    __syncwarp();
    invert(to.inverse, back, rate);
  }
}

// ---- walks over the chunks ----

// The slice of value channels of this block.
struct SliceOf {
  uint32_t first, width;
  DEVICE SliceOf(uint32_t slice, uint32_t v) : first(slice * SLICE), width(min(v - first, SLICE)) {}
};

// A chunk in shared memory for the walks: queries and keys, the first two matrices and the vectors.
template <typename T> struct Staged {
  static constexpr uint32_t PLANE = L * NARROW<T>, MATRIX = PLANES<T> * PLANE;
  static constexpr uint32_t BYTES = 2 * (L * WIDE<T> + MATRIX) * sizeof(T) + 4 * VECTORS;
  T *q, *k, *a, *inverse;
  DEVICE explicit Staged(unsigned char *at)
      : q(reinterpret_cast<T *>(at)), k(q + L * WIDE<T>), a(k + L * WIDE<T>), inverse(a + MATRIX) {}
  DEVICE float *rate() const { return reinterpret_cast<float *>(inverse + MATRIX); }
  // By the second half of a block's threads.
  DEVICE void start(const T *qkv, float *chunks, Heads h, const Span &span, uint32_t number, uint32_t head) const {
    const Chunk<T> from(chunks, static_cast<size_t>(number) * h.values + head);
    constexpr uint32_t THREADS = WALK_THREADS / 2;
    const uint32_t own = threadIdx.x - THREADS;
    copy_keys<THREADS>(own, q, k, qkv, h, span, head / (h.values / h.keys));
    copy<THREADS, 2 * PLANES<T> * L, L>(own, a, NARROW<T>, from.a, L, 2 * PLANES<T> * L, L, true);
    copy<THREADS, 1, VECTORS>(own, rate(), 0, from.rate, 0, 1, VECTORS, true);
    cp_async_commit();
  }
};

// Chunks in shared memory at a time: with 16-bit values, the next one arrives during the work on one.
template <typename T> constexpr uint32_t STAGES = sizeof(T) == 2 ? 2 : 1;

// Sums [v, tokens] of a warp: sixteen value channels, the tokens of a chunk.
using OfTokens = float[TOKENS / 2][2][4];

// Calls f with the place of each value of a lane, and its token.
template <typename F> DEVICE void each_token(const F &f) {
#pragma unroll
  for (int j = 0; j < TOKENS / 2; j++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) f(j, n, i, 16 * j + 8 * n + threadIdx.x % 4 * 2 + i % 2);
}

// A value for memory in T; CLAMPED: by `finite`.
template <bool CLAMPED, typename T> DEVICE float stored(float x) {
  if constexpr (CLAMPED) return finite<T>(x);
  else return x;
}

// A warp's part of the state or its gradient, transposed: 16 value channels (of a lane: row and row + 8), all key
// channels (columns 8 n + 2 t and the next). CLAMPED: its operands, see `left_of`, and its values in memory.
template <typename T, bool CLAMPED> struct State {
  float s[TILES / 2][2][4];
  uint32_t row, column;

  DEVICE explicit State(uint32_t warp) : row(16 * warp + threadIdx.x % WARP / 4), column(threadIdx.x % 4 * 2) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[n / 2][n % 2][i] = 0.0f;
  }
  // Calls f with key channel, value channel of the slice, and value, one after the other.
  template <typename F> DEVICE void each(const F &f) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) f(opaque(8 * n) + column + i % 2, row + i / 2 * 8, s[n / 2][n % 2][i]);
  }
  // To memory from the slice's first row on.
  DEVICE void store(T *to, Heads h, const SliceOf &own) const {
    const uint32_t stride = eights(h.k);
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (row + 8 * i < own.width)
#pragma unroll
        for (int n = 0; n < TILES; n++)
          if (8 * n < stride)
            store_pair(to + (row + 8 * i) * stride + 8 * n + column, stored<CLAMPED, T>(s[n / 2][n % 2][2 * i]),
                       stored<CLAMPED, T>(s[n / 2][n % 2][2 * i + 1]));
  }
  // sum [v, tokens] of each of N += S^T x^T for rows x [L, WIDE].
  template <int N> DEVICE void times(OfTokens (&sum)[N], const T *const (&x)[N]) const {
#pragma unroll
    for (int n = 0; n < TILES / 2; n++) {
      Left<T, 2> left;
      left_of<CLAMPED, T>(left, s[n], {{1.0f, 1.0f}, {1.0f, 1.0f}});
#pragma unroll
      for (int of = 0; of < N; of++)
#pragma unroll
        for (int j = 0; j < TOKENS / 2; j++) {
          Right<T, 1> right[2];
          load_right<true>(right, x[of] + 16 * j * WIDE<T> + 16 * n, WIDE<T>);
          product<T>(sum[of][j][0], left, right[0]), product<T>(sum[of][j][1], left, right[1]);
        }
    }
  }
  // S^T += u x for u [v, tokens] times factors of tokens and rows x [L, WIDE].
  template <typename F> DEVICE void add(const OfTokens &u, const T *x, const F &factor) {
#pragma unroll
    for (int j = 0; j < TOKENS / 2; j++) {
      Left<T, 2> left;
      const uint32_t at = 16 * j + column;
      left_of<CLAMPED, T>(left, u[j], {{factor(at), factor(at + 1)}, {factor(at + 8), factor(at + 9)}});
#pragma unroll
      for (int n = 0; n < TILES / 2; n++) {
        Right<T, 1> right[2];
        load_right<false>(right, x + 16 * j * WIDE<T> + 16 * n, WIDE<T>);
        product<T>(s[n][0], left, right[0]), product<T>(s[n][1], left, right[1]);
      }
    }
  }
  DEVICE void scale(float factor) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[n / 2][n % 2][i] *= factor;
  }
};

// A warp's part of values [tokens, v] in memory.
template <typename T> struct Values {
  uint32_t row, width, pitch;
  DEVICE void load_all(OfTokens &x, const T *from, const Span &span) const {
    from += static_cast<size_t>(span.first) * pitch;
    each_token([&](int j, int n, int i, uint32_t token) {
      const uint32_t channel = row + i / 2 * 8;
      const bool some = token < span.l && channel < width;
      const float y = load(from + (some ? token * pitch + channel : 0)); // the first value is always there
      x[j][n][i] = some ? y : 0.0f;
    });
  }
  // Times factors of the tokens; CLAMPED: see `stored`.
  template <bool CLAMPED = false, typename F>
  DEVICE void store_all(const OfTokens &x, T *to, const Span &span, const F &factor) const {
    to += static_cast<size_t>(span.first) * pitch;
    each_token([&](int j, int n, int i, uint32_t token) {
      const uint32_t channel = row + i / 2 * 8;
      // before the condition, which then has the store alone
      const T y = Number<T>::from(stored<CLAMPED, T>(x[j][n][i] * factor(token)));
      if (token < span.l && channel < width) to[token * pitch + channel] = y;
    });
  }
};

// sum += x m^T for a lower triangular m [L, L] in shared memory, or x m.
template <bool TRANSPOSED, bool CLAMPED, typename T>
DEVICE void add_triangular(OfTokens &sum, const OfTokens &x, const T *m) {
#pragma unroll
  for (int j = 0; j < TOKENS / 2; j++) {
    Left<T, 2> left;
    left_of<CLAMPED, T>(left, x[j], {{1.0f, 1.0f}, {1.0f, 1.0f}});
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) {
      if (TRANSPOSED ? i < j : i > j) continue;
      Right<T, 2> right[2];
      load_right<TRANSPOSED>(right, m + 16 * (TRANSPOSED ? i * NARROW<T> + j : j * NARROW<T> + i), NARROW<T>,
                             Staged<T>::PLANE);
      product<T>(sum[i][0], left, right[0]), product<T>(sum[i][1], left, right[1]);
    }
  }
}

DEVICE float one(uint32_t) { return 1.0f; }

// Calls f with each chunk of a document, forward or backward: its number, span and stage. Warps of the first half of
// the threads call f; the others only copy the next chunk. Rows of their `State` lie past the slice, where loads give
// zeros and nothing is stored.
template <bool BACK, typename T, typename F>
DEVICE void walk(const Document &doc, const T *qkv, float *chunks, Heads h, uint32_t head, const F &f) {
  SHARED_BYTES(shared);
  const uint32_t count = (doc.end - doc.begin + L - 1) / L;
  const bool copies = threadIdx.x >= WALK_THREADS / 2;
  const auto number = [&](uint32_t i) { return doc.chunk + (BACK ? count - 1 - i : i); };
  const auto stage = [&](uint32_t i) { return Staged<T>(shared + i % STAGES<T> * Staged<T>::BYTES); };
  const auto start = [&](uint32_t i) {
    if (copies && i < count) stage(i).start(qkv, chunks, h, Span(doc, number(i)), number(i), head);
  };
  start(0);
  for (uint32_t i = 0; i < count; i++) {
    cp_async_wait<0>();
    __syncthreads();
    if (STAGES<T> == 2) start(i + 1);
    if (!copies) f(number(i), Span(doc, number(i)), stage(i));
    if (STAGES<T> == 2) continue;
    __syncthreads();
    start(i + 1);
  }
}

// Writes the outputs, or the states before the chunks and the rows of U.
template <typename T>
DEVICE void forward(const T *qkv, const uint32_t *documents, uint32_t tokens, Heads h, float *chunks,
                    const float *before, float *after, T *states, T *rows, T *o) {
  const uint32_t head = blockIdx.y;
  const SliceOf own(blockIdx.z, h.v);
  const size_t of_head = static_cast<size_t>(head) * h.k * h.v + own.first;
  State<T, true> state(threadIdx.x / WARP);
  if (before != nullptr)
    state.each([&](uint32_t d, uint32_t col, float &x) {
      x = d < h.k && col < own.width ? before[of_head + d * h.v + col] : 0.0f;
    });
  const Values<T> values = {state.row, own.width, h.channels()}, outputs = {state.row, own.width, h.values * h.v};
  walk<false>(document_of(documents, tokens, blockIdx.x), qkv, chunks, h, head,
              [&](uint32_t number, const Span &span, const Staged<T> &c) {
                const Vectors v(c.rate());
                OfTokens x, u = {}, sum[2] = {};
                values.load_all(x, qkv + h.value(head) + own.first, span);
                if (states != nullptr)
                  state.store(states + (number * h.values + head) * h.state() + own.first * eights(h.k), h, own);
                if (o != nullptr) state.times(sum, {c.k, c.q});
                else state.times(reinterpret_cast<OfTokens(&)[1]>(sum), {c.k});
                each_token([&](int j, int n, int i, uint32_t token) {
                  x[j][n][i] = v.rate[token] * (x[j][n][i] - v.decay[token] * v.of_k[token] * sum[0][j][n][i]);
                  sum[1][j][n][i] *= v.decay[token] * v.of_q[token];
                });
                add_triangular<true, true, T>(u, x, c.inverse);
                if (rows != nullptr) outputs.template store_all<true>(u, rows + head * h.v + own.first, span, one);
                if (o != nullptr) {
                  add_triangular<true, true, T>(sum[1], u, c.a);
                  outputs.store_all(sum[1], o + head * h.v + own.first, span, one);
                }
                state.scale(v.decay[L - 1]);
                state.add(u, c.k, [&](uint32_t token) { return v.rest[token] * v.of_k[token]; });
              });
  if (after != nullptr)
    state.each([&](uint32_t d, uint32_t col, float &x) {
      if (d < h.k && col < own.width) after[of_head + d * h.v + col] = x;
    });
}

// Writes the gradients of the states after the chunks, of the right sides R of the systems [tokens, h v], and of the
// values.
template <typename T>
DEVICE void states_back(const T *qkv, const uint32_t *documents, uint32_t tokens, Heads h, float *chunks, const T *d_o,
                        T *d_states, T *d_rows, T *d_qkv) {
  const uint32_t head = blockIdx.y;
  const SliceOf own(blockIdx.z, h.v);
  State<T, false> state(threadIdx.x / WARP);
  const Values<T> values = {state.row, own.width, h.channels()}, outputs = {state.row, own.width, h.values * h.v};
  walk<true>(
      document_of(documents, tokens, blockIdx.x), qkv, chunks, h, head,
      [&](uint32_t number, const Span &span, const Staged<T> &c) {
        const Vectors v(c.rate());
        OfTokens g, r = {}, sum[1] = {};
        outputs.load_all(g, d_o + head * h.v + own.first, span);
        state.store(d_states + (number * h.values + head) * h.state() + own.first * eights(h.k), h, own);
        state.times(sum, {c.k});
        each_token([&](int j, int n, int i, uint32_t token) { sum[0][j][n][i] *= v.rest[token] * v.of_k[token]; });
        add_triangular<false, false, T>(sum[0], g, c.a);
        add_triangular<false, false, T>(r, sum[0], c.inverse);
        outputs.store_all(r, d_rows + head * h.v + own.first, span, one);
        values.store_all(r, d_qkv + h.value(head) + own.first, span, [&](uint32_t token) { return v.rate[token]; });
        state.scale(v.decay[L - 1]);
        state.add(g, c.q, [&](uint32_t token) { return v.decay[token] * v.of_q[token]; });
        state.add(r, c.k, [&](uint32_t token) { return -v.decay[token] * v.rate[token] * v.of_k[token]; });
      });
}

// ---- gradients of a chunk ----

// Gradients of queries, keys and values like `qkv`, of a and b; and a row of partial sums a chunk for a_log and bias.
template <typename T> struct Outputs {
  T *qkv, *a, *b;
  float *a_log, *bias;
};

// Sums of a warp [16 tokens, 16 key channels] in two tiles of channels.
struct Sums {
  float of[2][4] = {};
  // Calls f with token and channel, of the warp's, and value.
  template <typename F> DEVICE void each(const F &f) {
    const uint32_t lane = threadIdx.x % WARP;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) f(lane / 4 + i / 2 * 8, 8 * n + lane % 4 * 2 + i % 2, of[n][i]);
  }
  // += x y of L columns of x and L rows of y [L, WIDE], both in shared memory.
  template <int PARTS, typename T> DEVICE void add(const T *x, const T *y) {
#pragma unroll(sizeof(T) == 4 ? 1 : 2)
    for (uint32_t i = 0; i < L; i += 16) {
      Left<T, PARTS> left;
      Right<T, 1> right[2];
      load_left(left, x + i, NARROW<T>, Staged<T>::PLANE);
      load_right<false>(right, y + i * WIDE<T>, WIDE<T>);
      product<T>(of[0], left, right[0]), product<T>(of[1], left, right[1]);
    }
  }
  // Sums of rows of products with x [16, WIDE], to `to` [16].
  template <typename T> DEVICE void dots(const T *x, float *to) const {
    const uint32_t lane = threadIdx.x % WARP;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32_t row = lane / 4 + 8 * half;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float y[2];
        load_pair(y, x + row * WIDE<T> + 8 * n + lane % 4 * 2);
        sum = fmaf(of[n][2 * half], y[0], fmaf(of[n][2 * half + 1], y[1], sum));
      }
      sum += __shfl_xor_sync(ALL, sum, 1), sum += __shfl_xor_sync(ALL, sum, 2);
      if (lane % 4 == 0) to[row] = sum;
    }
  }
};

// In shared memory: queries and keys, vectors, sums of rows by sixteen channels, and in turn slices of states, their
// gradients, d_o, U and R, and matrices of pairs of tokens.
template <typename T> struct Room {
  static constexpr uint32_t PARTS = MOST / 16;
  static constexpr uint32_t SLICES = (2 * SLICE * WIDE<T> + 3 * L * NARROW<T>)*sizeof(T);
  static constexpr uint32_t OF_PAIRS = 2 * L * LP * 4 + 3 * Staged<T>::MATRIX * sizeof(T);
  T *q, *k, *s, *ds, *g, *u, *r;
  float *moved[2];
  T *of_a, *of_a_back, *of_t; // in planes
  float *sums, *diagonal;
  DEVICE explicit Room(unsigned char *at)
      : q(reinterpret_cast<T *>(at)), k(q + L * WIDE<T>), s(k + L * WIDE<T>), ds(s + SLICE * WIDE<T>),
        g(ds + SLICE * WIDE<T>), u(g + L * NARROW<T>), r(u + L * NARROW<T>),
        moved{reinterpret_cast<float *>(s), reinterpret_cast<float *>(s) + L * LP},
        of_a(reinterpret_cast<T *>(moved[1] + L * LP)), of_a_back(of_a + Staged<T>::MATRIX),
        of_t(of_a_back + Staged<T>::MATRIX), sums(reinterpret_cast<float *>(s) + max(SLICES, OF_PAIRS) / 4),
        diagonal(sums + VECTORS + 3 * PARTS * L) {}
  DEVICE Vectors vectors() const { return Vectors(sums + 3 * PARTS * L); }
};

template <typename T>
DEVICE void gradients(const T *qkv, const T *a, const float *a_log, const float *bias, const uint32_t *documents,
                      uint32_t count, Heads h, float *chunks, const T *d_o, const T *states, const T *d_states,
                      const T *rows, const T *d_rows, const Outputs<T> &out) {
  SHARED_BYTES(shared);
  SHARED_ARRAY(float, scratch, WARP);
  constexpr int THREADS = GRADIENT_THREADS;
  const uint32_t number = blockIdx.x, key = blockIdx.y, each = h.values / h.keys, lane = threadIdx.x % WARP,
                 warp = threadIdx.x / WARP;
  const Span span(document_of_chunk(documents, count, 0, number), number);
  const size_t width = h.values * h.v;
  const bool whole = in_vectors(d_o, width, h.v);
  const Room<T> c(shared);
  const Vectors v = c.vectors();
  // a warp's tokens and channels of sums; of the first eight warps also, of dA or dT, a quarter
  const uint32_t row = warp % 2 * 16, own = warp / 2, channel = 16 * own, col = warp / 2 % 2 * 16;
  const bool of_pairs = warp < 8, of_queries = warp < 4;
  const T *const own_q = c.q + row * WIDE<T> + channel, *const own_k = c.k + row * WIDE<T> + channel;
  Sums dq, dk;
  copy_keys<THREADS>(threadIdx.x, c.q, c.k, qkv, h, span, key);
  for (uint32_t head = key * each; head < (key + 1) * each; head++) {
    const size_t of_head = number * h.values + head;
    const Chunk<T> chunk(chunks, of_head);
    Sums of_o, of_x, of_u;
    float pairs[2][4] = {}, dots = 0.0f; // dA, or -dT
    __syncthreads();
    copy<THREADS, 1, VECTORS>(threadIdx.x, v.rate, 0, chunk.rate, 0, 1, VECTORS, true);
    for (uint32_t slice = 0; slice * SLICE < h.v; slice++) {
      const SliceOf part(slice, h.v);
      const size_t from = span.first * width + head * h.v + part.first,
                   state = of_head * h.state() + part.first * eights(h.k);
      copy<THREADS, SLICE, MOST>(threadIdx.x, c.s, WIDE<T>, states + state, eights(h.k), part.width, eights(h.k), true);
      copy<THREADS, SLICE, MOST>(threadIdx.x, c.ds, WIDE<T>, d_states + state, eights(h.k), part.width, eights(h.k),
                                 true);
      copy<THREADS, L, SLICE>(threadIdx.x, c.g, NARROW<T>, d_o + from, width, span.l, part.width, whole);
      copy<THREADS, L, SLICE>(threadIdx.x, c.u, NARROW<T>, rows + from, width, span.l, part.width, whole);
      copy<THREADS, L, SLICE>(threadIdx.x, c.r, NARROW<T>, d_rows + from, width, span.l, part.width, whole);
      cp_async_commit(), cp_async_wait<0>();
      __syncthreads();
      for (uint32_t at = threadIdx.x; at < SLICE * MOST / 2; at += THREADS) {
        const uint32_t pair = at / (MOST / 2) * WIDE<T> + at % (MOST / 2) * 2;
        float x[2], y[2];
        load_pair(x, c.s + pair), load_pair(y, c.ds + pair);
        dots = fmaf(x[0], y[0], fmaf(x[1], y[1], dots));
      }
      of_o.add<1>(c.g + row * NARROW<T>, c.s + channel), of_x.add<1>(c.r + row * NARROW<T>, c.s + channel);
      of_u.add<1>(c.u + row * NARROW<T>, c.ds + channel);
      if (of_pairs)
#pragma unroll
        for (uint32_t i = 0; i < SLICE; i += 16) {
          Left<T, 1> left;
          Right<T, 1> right[2];
          load_left(left, (of_queries ? c.g : c.r) + row * NARROW<T> + i, NARROW<T>);
          load_right<true>(right, c.u + col * NARROW<T> + i, NARROW<T>);
          product<T>(pairs[0], left, right[0]), product<T>(pairs[1], left, right[1]);
        }
      __syncthreads();
    }
    dots = block_sum<THREADS>(dots, scratch);
    float *const sums = c.sums + own * 3 * L + row;
    of_o.dots(own_q, sums), of_x.dots(own_k, sums + L), of_u.dots(own_k, sums + 2 * L);
    // Of a pair i, j: through the logarithm of D_ij, and coefficients of queries and keys.
    if (of_pairs)
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const uint32_t i = row + lane / 4 + n % 4 / 2 * 8, j = col + n / 4 * 8 + lane % 4 * 2 + n % 2, at = i * L + j;
        const float decay = j <= i ? expf(v.cum[i] - v.cum[j]) : 0.0f, x = pairs[n / 4][n % 4];
        const auto put = [&](T *to, uint32_t i, uint32_t j, float x) {
          store_planes(to + i * NARROW<T> + j, Staged<T>::PLANE, x);
        };
        if (of_queries) {
          c.moved[0][i * LP + j] = j < i ? x * load_planes(chunk.a + at, PAIRS) : 0.0f;
          put(c.of_a, i, j, x * decay * v.of_k[j]), put(c.of_a_back, j, i, x * decay * v.of_q[i]);
        } else {
          const float scaled = x * v.rate[i];
          c.moved[1][i * LP + j] = j < i ? -scaled * chunk.t[at] : 0.0f;
          if (j < i) put(c.of_t, i, j, -scaled * decay * v.of_k[j]), put(c.of_t, j, i, -scaled * decay * v.of_k[i]);
          if (i == j) put(c.of_t, i, i, 0.0f), c.diagonal[i] = x;
        }
      }
    __syncthreads();
    if (warp == 0) {
      const uint32_t i = lane;
      float sum[3] = {};
      for (uint32_t part = 0; part < Room<T>::PARTS; part++)
#pragma unroll
        for (uint32_t n = 0; n < 3; n++) sum[n] += c.sums[(3 * part + n) * L + i];
      const float rest = v.rest[i] * v.of_k[i] * sum[2], rate = v.rate[i];
      float of_log = v.decay[i] * (v.of_q[i] * sum[0] - rate * v.of_k[i] * sum[1]) - rest;
      for (uint32_t j = 0; j < L; j++)
#pragma unroll
        for (int n = 0; n < 2; n++) of_log += c.moved[n][i * LP + j] - c.moved[n][j * LP + i];
      const float all = warp_sum(rest);
      if (i == L - 1) of_log += all + v.decay[i] * dots;
      // a token's log-decay is in the sums of all later tokens of the chunk
      float later = of_log;
#pragma unroll
      for (uint32_t by = 1; by < L; by *= 2) {
        const float after = __shfl_down_sync(ALL, later, by);
        if (i + by < L) later += after;
      }
      const size_t at = static_cast<size_t>(span.first + i) * h.values + head;
      float of_a = 0.0f, of_factor = 0.0f;
      if (i < span.l) {
        of_a = later * -expf(a_log[head]) * logistic(load(a + at) + bias[head]), of_factor = later * v.log[i];
        store(out.a + at, of_a), store(out.b + at, c.diagonal[i] * (1.0f - rate));
      }
      of_a = warp_sum(of_a), of_factor = warp_sum(of_factor);
      if (i == 0) out.a_log[of_head] = of_factor, out.bias[of_head] = of_a;
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t token = row + lane / 4 + i / 2 * 8;
        dq.of[n][i] += v.decay[token] * of_o.of[n][i];
        dk.of[n][i] += v.rest[token] * of_u.of[n][i] - v.decay[token] * v.rate[token] * of_x.of[n][i];
      }
    dq.add<2>(c.of_a + row * NARROW<T>, c.k + channel), dk.add<2>(c.of_t + row * NARROW<T>, c.k + channel);
    dk.add<2>(c.of_a_back + row * NARROW<T>, c.q + channel);
  }
  // through the lengths, the same for all value heads
  __syncthreads();
  dq.dots(own_q, c.sums + 2 * own * L + row), dk.dots(own_k, c.sums + (2 * own + 1) * L + row);
  __syncthreads();
  const auto finish = [&](Sums &sums, uint32_t which) {
    const float *const factor = which == 0 ? v.of_q : v.of_k, square = which == 0 ? static_cast<float>(h.k) : 1.0f;
    T *const to = out.qkv + static_cast<size_t>(span.first) * h.channels() + (which * h.keys + key) * h.k;
    sums.each([&](uint32_t i, uint32_t d, float &y) {
      const uint32_t token = row + i;
      float along = 0.0f;
      for (uint32_t part = 0; part < Room<T>::PARTS; part++) along += c.sums[(2 * part + which) * L + token];
      along *= factor[token] * factor[token] * square;
      const float x = load((which == 0 ? own_q : own_k) + i * WIDE<T> + d);
      if (token < span.l && channel + d < h.k)
        store(to + token * h.channels() + channel + d, factor[token] * (y - x * along));
    });
  };
  finish(dq, 0), finish(dk, 1);
}

#define RULE(NAME, T)                                                                                                  \
  KERNEL(delta_rule_chunks_##NAME, SIDE_BY_SIDE(4, CHUNK_THREADS), const T *qkv, const T *a, const T *b,               \
         const float *a_log, const float *bias, const uint32_t *documents, uint32_t count, float *chunks,              \
         uint32_t tokens, uint32_t keys, uint32_t values, uint32_t k, uint32_t v) {                                    \
    chunks_of<T>(qkv, a, b, a_log, bias, documents, count, tokens, {keys, values, k, v}, chunks);                      \
  }                                                                                                                    \
  KERNEL(delta_rule_forward_##NAME, WALK_THREADS, const T *qkv, const uint32_t *documents, float *chunks,              \
         const float *before, float *after, T *states, T *rows, T *o, uint32_t tokens, uint32_t keys, uint32_t values, \
         uint32_t k, uint32_t v) {                                                                                     \
    forward<T>(qkv, documents, tokens, {keys, values, k, v}, chunks, before, after, states, rows, o);                  \
  }                                                                                                                    \
  KERNEL(delta_rule_states_##NAME, WALK_THREADS, const T *qkv, const uint32_t *documents, float *chunks, const T *d_o, \
         T *d_states, T *d_rows, T *d_qkv, uint32_t tokens, uint32_t keys, uint32_t values, uint32_t k, uint32_t v) {  \
    states_back<T>(qkv, documents, tokens, {keys, values, k, v}, chunks, d_o, d_states, d_rows, d_qkv);                \
  }                                                                                                                    \
  KERNEL(delta_rule_gradients_##NAME, GRADIENT_THREADS, const T *qkv, const T *a, const float *a_log,                  \
         const float *bias, const uint32_t *documents, uint32_t count, float *chunks, const T *d_o, const T *states,   \
         const T *d_states, const T *rows, const T *d_rows, T *d_qkv, T *da, T *db, float *d_a_log, float *d_bias,     \
         uint32_t keys, uint32_t values, uint32_t k, uint32_t v) {                                                     \
    gradients<T>(qkv, a, a_log, bias, documents, count, {keys, values, k, v}, chunks, d_o, states, d_states, rows,     \
                 d_rows, {d_qkv, da, db, d_a_log, d_bias});                                                            \
  }

RULE(f32, float)
RULE(bf16, bf16)
RULE(f16, f16)
