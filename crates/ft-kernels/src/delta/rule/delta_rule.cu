// The gated delta rule in chunks of L tokens (formulas in crates/ft-kernels/src/delta/rule/chunk.rs). All arithmetic is
// in f32. A row of `documents` is begin, end and first chunk of a document; null is a single document.
//
// delta_rule_forward: a block per document, value head and slice of value channels walks over the chunks with its slice
// of the state in shared memory; channels of a value don't meet. delta_rule_states walks back in the same way with the
// gradient of the state. delta_rule_gradients has a block per chunk and key head; states and their gradients come from
// the other two kernels. Every sum has a fixed order.
//
// Products take their operands from shared memory four values at a time, along the channels of a key or the tokens, where
// these are the same for all lanes; channels of a key are filled up to a multiple of four with zeros. Lanes differ in the
// value channel (walks) or the key channel (gradients).
#include "../../cuda/rows.cuh"

constexpr int THREADS = 256;            // same as in crates/ft-kernels/src/delta/rule/cuda.rs
constexpr int WARPS = THREADS / WARP;
constexpr uint32_t L = 32;              // same as attention::CHUNK
constexpr uint32_t WIDE = WARP;         // value channels of a slice of the walks, and of the gradients
constexpr uint32_t NARROW = 16;
constexpr uint32_t MOST = 128;          // most channels of a key
constexpr int OWN = L * MOST / THREADS; // values of a key gradient per thread: rows i = 2 n + thread / MOST
constexpr int ROWS = L / WARPS;         // tokens of a warp in the walks: 4 in sequence
constexpr int FOURS = MOST / 4 / WARPS; // rows of the state of a warp, in fours
constexpr uint32_t LP = L + 4;          // strides in shared memory: of [L, L], of slices [L, NARROW] and [k, NARROW]
constexpr uint32_t NP = NARROW + 4, KP = NARROW + 1;
constexpr float EPS = 1e-6f;
static_assert(ROWS == 4 && FOURS * 4 * WARPS == MOST, "vectors of four");

// The next multiple of four.
DEVICE uint32_t fours(uint32_t n) { return (n + 3) / 4 * 4; }
DEVICE void load_four(float (&x)[4], const float *p) { load_vector(p, x); }
// The values of a column of a slice in four rows.
DEVICE void load_down(float (&x)[4], const float *p) {
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = p[i * WIDE];
}
// sum + x y, in order.
DEVICE float dot_four(const float (&x)[4], const float (&y)[4], float sum) {
#pragma unroll
  for (int i = 0; i < 4; i++) sum = fmaf(x[i], y[i], sum);
  return sum;
}

struct Heads {
  uint32_t keys, values, k, v;
  DEVICE uint32_t channels() const { return 2 * keys * k + values * v; }
};

struct Document {
  uint32_t begin, end, chunk;
};

DEVICE Document document_of(const uint32_t *documents, uint32_t tokens, uint32_t i) {
  if (documents == nullptr) return {0, tokens, 0};
  const uint32_t *own = documents + 4 * i;
  return {own[0], own[1], own[2]};
}

DEVICE float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// Inputs of a pass; a_log and bias are f32.
template <typename T> struct Inputs {
  const T *qkv, *a, *b;
  const float *a_log, *bias;
  Heads heads;
};

// A chunk in shared memory: unit queries (times k^-1/2) and keys [L, k + 4], D q.k and D k.k [L, L + 4], which are zero above
// the diagonal, and the transpose of the latter, rates, log-decays, their running sums, the decay up to a token and from
// it to the end, and inverse lengths. Tokens beyond the document have zeros.
struct Chunk {
  float *q, *k, *a, *t, *back, *rate, *log, *cum, *decay, *rest, *inverse;
  uint32_t stride;
  DEVICE float *take(float *at, uint32_t channels) {
    stride = fours(channels) + 4;
    q = at, k = q + L * stride, a = k + L * stride, t = a + L * LP, back = t + L * LP, rate = back + L * LP, log = rate + L, cum = log + L,
    decay = cum + L, rest = decay + L, inverse = rest + L;
    return inverse + 2 * L;
  }
};

// Loads the chunk of `l` tokens from `first` on; a warp has AHEAD rows in flight. Ends with a barrier.
template <uint32_t AHEAD, typename T>
DEVICE void load_chunk(const Chunk &c, const Inputs<T> &x, uint32_t first, uint32_t l, uint32_t head) {
  const Heads h = x.heads;
  const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, key = head / (h.values / h.keys), all = fours(h.k);
  const float scale = 1.0f / sqrtf(static_cast<float>(h.k));
  for (uint32_t from = warp; from < 2 * L; from += AHEAD * WARPS) {
    float own[AHEAD][MOST / WARP];
#pragma unroll
    for (uint32_t m = 0; m < AHEAD; m++) {
      const uint32_t i = (from + m * WARPS) % L, part = (from + m * WARPS) / L;
      const T *row = x.qkv + static_cast<size_t>(first + i) * h.channels() + (part * h.keys + key) * h.k;
#pragma unroll
      for (uint32_t n = 0; n < MOST / WARP; n++) {
        const uint32_t d = n * WARP + lane;
        own[m][n] = i < l && d < h.k ? load(row + d) : 0.0f;
      }
    }
#pragma unroll
    for (uint32_t m = 0; m < AHEAD; m++) {
      const uint32_t i = (from + m * WARPS) % L, part = (from + m * WARPS) / L;
      float squares = 0.0f;
#pragma unroll
      for (uint32_t n = 0; n < MOST / WARP; n++) squares = fmaf(own[m][n], own[m][n], squares);
      const float r = 1.0f / sqrtf(warp_sum(squares) + EPS), factor = r * (part == 0 ? scale : 1.0f);
      float *const to = (part == 0 ? c.q : c.k) + i * c.stride;
#pragma unroll
      for (uint32_t n = 0; n < MOST / WARP; n++)
        if (n * WARP + lane < all) to[n * WARP + lane] = own[m][n] * factor;
      if (lane == 0) c.inverse[part * L + i] = r;
    }
  }
  if (threadIdx.x < L) {
    const uint32_t i = threadIdx.x;
    const size_t at = static_cast<size_t>(first + i) * h.values + head;
    c.rate[i] = i < l ? logistic(load(x.b + at)) : 0.0f;
    c.log[i] = i < l ? -expf(x.a_log[head]) * softplus(load(x.a + at) + x.bias[head]) : 0.0f;
    __syncwarp();
    float sum = 0.0f, last;
    for (uint32_t j = 0; j < L; j++) {
      if (j <= i) sum += c.log[j];
    }
    last = __shfl_sync(ALL, sum, L - 1);
    c.cum[i] = sum, c.decay[i] = expf(sum), c.rest[i] = expf(last - sum);
  }
  __syncthreads();
  // pairs of tokens i, j; i, i + 16; j, j + 16, of which the one above the diagonal is left out
  const uint32_t i = threadIdx.x / 16, j = threadIdx.x % 16;
  float qk[3] = {}, kk[3] = {};
  for (uint32_t d = 0; d < all; d += 4) {
    float low_q[4], high_q[4], low_k[4], high_k[4], low[4], high[4];
    load_four(low_q, c.q + i * c.stride + d), load_four(high_q, c.q + (i + 16) * c.stride + d);
    load_four(low_k, c.k + i * c.stride + d), load_four(high_k, c.k + (i + 16) * c.stride + d);
    load_four(low, c.k + j * c.stride + d), load_four(high, c.k + (j + 16) * c.stride + d);
    qk[0] = dot_four(low_q, low, qk[0]), qk[1] = dot_four(high_q, low, qk[1]), qk[2] = dot_four(high_q, high, qk[2]);
    kk[0] = dot_four(low_k, low, kk[0]), kk[1] = dot_four(high_k, low, kk[1]), kk[2] = dot_four(high_k, high, kk[2]);
  }
#pragma unroll
  for (uint32_t n = 0; n < 3; n++) {
    const uint32_t row = i + (n > 0 ? 16 : 0), col = j + (n > 1 ? 16 : 0);
    const float decay = col <= row ? expf(c.cum[row] - c.cum[col]) : 0.0f;
    c.a[row * LP + col] = col <= row ? qk[n] * decay : 0.0f;
    c.t[row * LP + col] = c.back[col * LP + row] = col < row ? kk[n] * decay : 0.0f;
  }
  c.a[i * LP + j + 16] = c.t[i * LP + j + 16] = c.back[(j + 16) * LP + i] = 0.0f;
  __syncthreads();
}

// Solves (1 + T) y = x for the column `own` [L] with a stride; T_ij = rate_i t_ij. What is known of y goes into all sums at
// once, which do not wait for each other.
DEVICE void solve(const Chunk &c, float *own, uint32_t stride) {
  float sum[L] = {};
#pragma unroll
  for (uint32_t i = 0; i < L; i++) {
    const float y = own[i * stride] - c.rate[i] * sum[i];
    own[i * stride] = y;
#pragma unroll
    for (uint32_t j = (i + 1) / 4 * 4; j < L; j += 4) {
      float of[4]; // zero up to i
      load_four(of, c.back + i * LP + j);
#pragma unroll
      for (uint32_t n = 0; n < 4; n++) sum[j + n] = fmaf(of[n], y, sum[j + n]);
    }
  }
}

// The same with T transposed.
DEVICE void solve_transposed(const Chunk &c, float *own, uint32_t stride) {
  float sum[L] = {};
#pragma unroll
  for (uint32_t i = L; i-- > 0;) {
    const float y = own[i * stride] - sum[i], times = c.rate[i] * y;
    own[i * stride] = y;
#pragma unroll
    for (uint32_t j = 0; j < i; j += 4) {
      float of[4]; // zero from i on
      load_four(of, c.t + i * LP + j);
#pragma unroll
      for (uint32_t n = 0; n < 4; n++) sum[j + n] = fmaf(of[n], times, sum[j + n]);
    }
  }
}

// The slice of value channels of this block.
struct SliceOf {
  uint32_t first, width;
  DEVICE SliceOf(uint32_t slice, uint32_t most, uint32_t v) : first(slice * most), width(v - first < most ? v - first : most) {}
};

// Rows of the state of a warp, of `all` in fours: sum of factor_i x_i y_i over tokens, added to acc.
struct Rows {
  uint32_t all, warp, lane;
  // First row of four.
  DEVICE uint32_t row(int n) const { return 4 * (n * WARPS + warp); }
  DEVICE void start(float (&acc)[FOURS][4], const float *s, float factor) const {
#pragma unroll
    for (int n = 0; n < FOURS; n++)
#pragma unroll
      for (int x = 0; x < 4; x++) acc[n][x] = row(n) < all ? s[(row(n) + x) * WIDE + lane] * factor : 0.0f;
  }
  // `x`: a row of keys or queries; y: the value of the lane's column.
  DEVICE void add(float (&acc)[FOURS][4], const float *x, float y) const {
#pragma unroll
    for (int n = 0; n < FOURS; n++) {
      float of[4] = {};
      if (row(n) < all) load_four(of, x + row(n));
#pragma unroll
      for (int i = 0; i < 4; i++) acc[n][i] = fmaf(of[i], y, acc[n][i]);
    }
  }
  DEVICE void finish(const float (&acc)[FOURS][4], float *s) const {
#pragma unroll
    for (int n = 0; n < FOURS; n++)
#pragma unroll
      for (int x = 0; x < 4; x++)
        if (row(n) < all) s[(row(n) + x) * WIDE + lane] = acc[n][x];
  }
};

// The slice of a state [k, v] in global memory and in shared memory, [fours(k), WIDE] with zeros beyond it.
DEVICE void load_state(float *s, const float *from, Heads h, const SliceOf &own) {
  for (uint32_t at = threadIdx.x; at < fours(h.k) * WIDE; at += THREADS) {
    const uint32_t d = at / WIDE, col = at % WIDE;
    s[at] = from != nullptr && d < h.k && col < own.width ? from[d * h.v + col] : 0.0f;
  }
}
DEVICE void store_state(const float *s, float *to, Heads h, const SliceOf &own) {
  for (uint32_t at = threadIdx.x; at < h.k * WIDE; at += THREADS) {
    const uint32_t d = at / WIDE, col = at % WIDE;
    if (col < own.width) to[d * h.v + col] = s[at];
  }
}

template <typename T>
DEVICE void forward(const Inputs<T> &x, const uint32_t *documents, uint32_t tokens, const float *before, float *after,
                    float *states, T *o) {
  SHARED_BYTES(shared);
  const Heads h = x.heads;
  const uint32_t head = blockIdx.y, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, all = fours(h.k);
  const SliceOf own(blockIdx.z, WIDE, h.v);
  const Document doc = document_of(documents, tokens, blockIdx.x);
  const Rows rows = {all, warp, lane};
  Chunk c;
  float *const s = c.take(reinterpret_cast<float *>(shared), h.k), *const u = s + all * WIDE;
  const size_t of_head = static_cast<size_t>(head) * h.k * h.v + own.first, of_chunk = static_cast<size_t>(h.values) * h.k * h.v;
  load_state(s, before == nullptr ? nullptr : before + of_head, h, own);
  uint32_t number = doc.chunk;
  for (uint32_t first = doc.begin; first < doc.end; first += L, number++) {
    const uint32_t l = doc.end - first < L ? doc.end - first : L, i = warp * ROWS;
    // before the products with keys that need them
    float value[ROWS];
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
      const T *const at = x.qkv + static_cast<size_t>(first + i + n) * h.channels() + 2 * h.keys * h.k + head * h.v + own.first;
      value[n] = i + n < l && lane < own.width ? load(at + lane) : 0.0f;
    }
    __syncthreads();
    load_chunk<4>(c, x, first, l, head);
    if (states != nullptr) store_state(s, states + number * of_chunk + of_head, h, own);
    float ks[ROWS] = {}, qs[ROWS] = {};
    for (uint32_t d = 0; d < all; d += 4) {
      float of_s[4];
      load_down(of_s, s + d * WIDE + lane);
#pragma unroll
      for (int n = 0; n < ROWS; n++) {
        float of[4];
        load_four(of, c.k + (i + n) * c.stride + d), ks[n] = dot_four(of, of_s, ks[n]);
        load_four(of, c.q + (i + n) * c.stride + d), qs[n] = dot_four(of, of_s, qs[n]);
      }
    }
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
      u[(i + n) * WIDE + lane] = c.rate[i + n] * (value[n] - c.decay[i + n] * ks[n]);
      qs[n] *= c.decay[i + n];
    }
    __syncthreads();
    if (warp == 0) solve(c, u + lane, WIDE);
    __syncthreads();
    if (o != nullptr) {
      for (uint32_t j = 0; j < L; j += 4) {
        float of_u[4];
        load_down(of_u, u + j * WIDE + lane);
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
          float of[4];
          load_four(of, c.a + (i + n) * LP + j), qs[n] = dot_four(of, of_u, qs[n]);
        }
      }
#pragma unroll
      for (int n = 0; n < ROWS; n++)
        if (i + n < l && lane < own.width)
          store(o + (static_cast<size_t>(first + i + n) * h.values + head) * h.v + own.first + lane, qs[n]);
    }
    float acc[FOURS][4];
    rows.start(acc, s, c.decay[L - 1]);
    for (uint32_t token = 0; token < L; token++)
      rows.add(acc, c.k + token * c.stride, c.rest[token] * u[token * WIDE + lane]);
    rows.finish(acc, s);
  }
  if (after == nullptr) return;
  __syncthreads();
  store_state(s, after + of_head, h, own);
}

// Gradient of the state after every chunk.
template <typename T>
DEVICE void states_back(const Inputs<T> &x, const uint32_t *documents, uint32_t tokens, const T *d_o, float *d_states) {
  SHARED_BYTES(shared);
  const Heads h = x.heads;
  const uint32_t head = blockIdx.y, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, all = fours(h.k), i = warp * ROWS;
  const SliceOf own(blockIdx.z, WIDE, h.v);
  const Document doc = document_of(documents, tokens, blockIdx.x);
  const Rows rows = {all, warp, lane};
  Chunk c;
  float *const ds = c.take(reinterpret_cast<float *>(shared), h.k), *const dr = ds + all * WIDE, *const g = dr + L * WIDE;
  const size_t of_head = static_cast<size_t>(head) * h.k * h.v + own.first, of_chunk = static_cast<size_t>(h.values) * h.k * h.v;
  load_state(ds, nullptr, h, own);
  for (uint32_t left = (doc.end - doc.begin + L - 1) / L; left > 0; left--) {
    const uint32_t first = doc.begin + (left - 1) * L, l = doc.end - first < L ? doc.end - first : L;
    __syncthreads();
    load_chunk<4>(c, x, first, l, head);
#pragma unroll
    for (int n = 0; n < ROWS; n++) {
      const T *const at = d_o + (static_cast<size_t>(first + i + n) * h.values + head) * h.v + own.first;
      g[(i + n) * WIDE + lane] = i + n < l && lane < own.width ? load(at + lane) : 0.0f;
    }
    store_state(ds, d_states + (doc.chunk + left - 1) * of_chunk + of_head, h, own);
    __syncthreads();
    float kd[ROWS] = {}, sum[ROWS] = {};
    for (uint32_t d = 0; d < all; d += 4) {
      float of_s[4];
      load_down(of_s, ds + d * WIDE + lane);
#pragma unroll
      for (int n = 0; n < ROWS; n++) {
        float of[4];
        load_four(of, c.k + (i + n) * c.stride + d), kd[n] = dot_four(of, of_s, kd[n]);
      }
    }
    for (uint32_t j = i; j < L; j++) {
      float of[4];
      load_four(of, c.a + j * LP + i);
#pragma unroll
      for (int n = 0; n < ROWS; n++) sum[n] = fmaf(of[n], g[j * WIDE + lane], sum[n]);
    }
#pragma unroll
    for (int n = 0; n < ROWS; n++) dr[(i + n) * WIDE + lane] = sum[n] + c.rest[i + n] * kd[n];
    __syncthreads();
    if (warp == 0) solve_transposed(c, dr + lane, WIDE);
    __syncthreads();
    float acc[FOURS][4];
    rows.start(acc, ds, c.decay[L - 1]);
    for (uint32_t token = 0; token < L; token++) {
      const float decay = c.decay[token];
      rows.add(acc, c.q + token * c.stride, decay * g[token * WIDE + lane]);
      rows.add(acc, c.k + token * c.stride, -decay * c.rate[token] * dr[token * WIDE + lane]);
    }
    rows.finish(acc, ds);
  }
}

// Where the gradients of a chunk go: those of queries, keys and values like `qkv`, of a and b; and a row of partial sums a
// chunk for a_log and bias.
template <typename T> struct Outputs {
  T *qkv, *a, *b;
  float *a_log, *bias;
};

// The document of a chunk.
DEVICE Document document_of_chunk(const uint32_t *documents, uint32_t count, uint32_t chunk) {
  uint32_t low = 0, high = count;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (documents[4 * middle + 2] <= chunk) low = middle;
    else high = middle;
  }
  return {documents[4 * low], documents[4 * low + 1], documents[4 * low + 2]};
}

template <typename T>
DEVICE void gradients(const Inputs<T> &x, const uint32_t *documents, uint32_t count, const T *d_o, const float *states,
                      const float *d_states, const Outputs<T> &out) {
  SHARED_BYTES(shared);
  const Heads h = x.heads;
  const uint32_t number = blockIdx.x, key = blockIdx.y, each = h.values / h.keys, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const Document doc = document_of_chunk(documents, count, number);
  const uint32_t first = doc.begin + (number - doc.chunk) * L, l = doc.end - first < L ? doc.end - first : L;
  const uint32_t i16 = threadIdx.x / 16, j16 = threadIdx.x % 16, d_own = threadIdx.x % MOST, i_own = threadIdx.x / MOST;
  Chunk c;
  float *const da = c.take(reinterpret_cast<float *>(shared), h.k), *const dt = da + L * LP, *const d_log = dt + L * LP,
               *const d_rate = d_log + L, *const u = d_rate + L, *const dr = u + L * NP, *const g = dr + L * NP,
               *const xs = g + L * NP, *const ks = xs + L * NP, *const qs = ks + L * NP, *const kd = qs + L * NP,
               *const scratch = kd + L * NP, *const s = scratch + WARP, *const ds = s + fours(h.k) * KP;
  // in the place of the slices of the states, then [L, L] three times and [L, k]
  float *const of_a = s, *const of_a_back = of_a + L * LP, *const of_t = of_a_back + L * LP;
  float dq[OWN], dk[OWN];
#pragma unroll
  for (int n = 0; n < OWN; n++) dq[n] = dk[n] = 0.0f;
  const size_t all = static_cast<size_t>(h.values) * h.k * h.v;
  for (uint32_t head = key * each; head < (key + 1) * each; head++) {
    __syncthreads();
    load_chunk<2>(c, x, first, l, head);
    if (threadIdx.x < L) d_log[threadIdx.x] = d_rate[threadIdx.x] = 0.0f;
    const float last = c.decay[L - 1];
    float dots = 0.0f, a_own[3] = {}, t_own[3] = {}; // of pairs of tokens, as in load_chunk
    for (uint32_t slice = 0; slice * NARROW < h.v; slice++) {
      const SliceOf own(slice, NARROW, h.v);
      const size_t of_head = number * all + static_cast<size_t>(head) * h.k * h.v + own.first;
      __syncthreads();
      for (uint32_t at = threadIdx.x; at < fours(h.k) * NARROW; at += THREADS) {
        const uint32_t d = at / NARROW, col = at % NARROW;
        const bool some = d < h.k && col < own.width;
        const float of_s = some ? states[of_head + d * h.v + col] : 0.0f, of_ds = some ? d_states[of_head + d * h.v + col] : 0.0f;
        s[d * KP + col] = of_s, ds[d * KP + col] = of_ds;
        dots = fmaf(of_s, of_ds, dots);
      }
      for (uint32_t at = threadIdx.x; at < L * NARROW; at += THREADS) {
        const uint32_t i = at / NARROW, col = at % NARROW;
        const bool some = i < l && col < own.width;
        const size_t token = first + i;
        g[i * NP + col] = some ? load(d_o + (token * h.values + head) * h.v + own.first + col) : 0.0f;
        xs[i * NP + col] = some ? load(x.qkv + token * h.channels() + 2 * h.keys * h.k + head * h.v + own.first + col) : 0.0f;
      }
      __syncthreads();
      // tokens 2 i16 and 2 i16 + 1, value channel j16
      float k_s[2] = {}, q_s[2] = {}, k_ds[2] = {}, a_g[2] = {};
      for (uint32_t d = 0; d < fours(h.k); d += 4) {
        float of_s[4], of_ds[4];
#pragma unroll
        for (int n = 0; n < 4; n++) of_s[n] = s[(d + n) * KP + j16], of_ds[n] = ds[(d + n) * KP + j16];
#pragma unroll
        for (int n = 0; n < 2; n++) {
          float of[4];
          load_four(of, c.k + (2 * i16 + n) * c.stride + d);
          k_s[n] = dot_four(of, of_s, k_s[n]), k_ds[n] = dot_four(of, of_ds, k_ds[n]);
          load_four(of, c.q + (2 * i16 + n) * c.stride + d), q_s[n] = dot_four(of, of_s, q_s[n]);
        }
      }
      for (uint32_t j = 2 * i16; j < L; j++)
#pragma unroll
        for (int n = 0; n < 2; n++) a_g[n] = fmaf(c.a[j * LP + 2 * i16 + n], g[j * NP + j16], a_g[n]);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const uint32_t i = 2 * i16 + n, at = i * NP + j16;
        const float value = i < l ? xs[at] - c.decay[i] * k_s[n] : 0.0f;
        ks[at] = k_s[n], qs[at] = q_s[n], kd[at] = k_ds[n], xs[at] = value, u[at] = c.rate[i] * value;
        dr[at] = a_g[n] + c.rest[i] * k_ds[n];
      }
      __syncthreads();
      if (threadIdx.x < NARROW) solve(c, u + threadIdx.x, NP);
      else if (threadIdx.x >= WARP && threadIdx.x < WARP + NARROW) solve_transposed(c, dr + threadIdx.x - WARP, NP);
      __syncthreads();
      for (uint32_t at = threadIdx.x; at < L * NARROW; at += THREADS) {
        const uint32_t i = at / NARROW, col = at % NARROW;
        const size_t to = static_cast<size_t>(first + i) * h.channels() + 2 * h.keys * h.k + head * h.v + own.first + col;
        if (i < l && col < own.width) store(out.qkv + to, c.rate[i] * dr[i * NP + col]);
      }
      if (threadIdx.x < L) {
        const uint32_t i = threadIdx.x;
        float through_o = 0.0f, through_x = 0.0f, of_rate = 0.0f, moved = 0.0f;
#pragma unroll
        for (uint32_t col = 0; col < NARROW; col += 4) {
          float left[4], right[4];
          load_four(left, g + i * NP + col), load_four(right, qs + i * NP + col), through_o = dot_four(left, right, through_o);
          load_four(left, dr + i * NP + col), load_four(right, ks + i * NP + col), through_x = dot_four(left, right, through_x);
          load_four(right, xs + i * NP + col), of_rate = dot_four(left, right, of_rate);
          load_four(left, u + i * NP + col), load_four(right, kd + i * NP + col), moved = dot_four(left, right, moved);
        }
        moved *= c.rest[i];
        d_rate[i] += of_rate;
        d_log[i] += c.decay[i] * (through_o - c.rate[i] * through_x) - moved;
        const float sum = warp_sum(moved);
        if (i == L - 1) d_log[i] += sum;
      }
      // in two halves, whose sums fit the registers
#pragma unroll
      for (int half = 0; half < OWN; half += OWN / 2) {
        float of_o[OWN / 2] = {}, of_x[OWN / 2] = {}, of_u[OWN / 2] = {};
        if (d_own < h.k)
#pragma unroll
          for (uint32_t col = 0; col < NARROW; col += 4) {
            float of_s[4], of_ds[4];
#pragma unroll
            for (int n = 0; n < 4; n++) of_s[n] = s[d_own * KP + col + n], of_ds[n] = ds[d_own * KP + col + n];
#pragma unroll
            for (int n = 0; n < OWN / 2; n++) {
              const uint32_t at = (2 * (half + n) + i_own) * NP + col;
              float of[4];
              load_four(of, g + at), of_o[n] = dot_four(of, of_s, of_o[n]);
              load_four(of, dr + at), of_x[n] = dot_four(of, of_s, of_x[n]);
              load_four(of, u + at), of_u[n] = dot_four(of, of_ds, of_u[n]);
            }
          }
#pragma unroll
        for (int n = 0; n < OWN / 2; n++) {
          const uint32_t i = 2 * (half + n) + i_own;
          dq[half + n] += c.decay[i] * of_o[n];
          dk[half + n] += c.rest[i] * of_u[n] - c.decay[i] * c.rate[i] * of_x[n];
        }
      }
#pragma unroll
      for (uint32_t col = 0; col < NARROW; col += 4) {
        float low_g[4], high_g[4], low_r[4], high_r[4], low[4], high[4];
        load_four(low_g, g + i16 * NP + col), load_four(high_g, g + (i16 + 16) * NP + col);
        load_four(low_r, dr + i16 * NP + col), load_four(high_r, dr + (i16 + 16) * NP + col);
        load_four(low, u + j16 * NP + col), load_four(high, u + (j16 + 16) * NP + col);
        a_own[0] = dot_four(low_g, low, a_own[0]), a_own[1] = dot_four(high_g, low, a_own[1]), a_own[2] = dot_four(high_g, high, a_own[2]);
        t_own[0] = dot_four(low_r, low, t_own[0]), t_own[1] = dot_four(high_r, low, t_own[1]), t_own[2] = dot_four(high_r, high, t_own[2]);
      }
    }
    dots = block_sum<THREADS>(dots, scratch);
    // zero above the diagonal, and dt on it
#pragma unroll
    for (uint32_t n = 0; n < 3; n++) {
      const uint32_t row = i16 + (n > 0 ? 16 : 0), col = j16 + (n > 1 ? 16 : 0);
      da[row * LP + col] = col <= row ? a_own[n] : 0.0f, dt[row * LP + col] = col < row ? -t_own[n] : 0.0f;
    }
    da[i16 * LP + j16 + 16] = dt[i16 * LP + j16 + 16] = 0.0f;
    __syncthreads();
    // gradients of rates and log-decays through the pairs, then of a and b
    if (threadIdx.x < L) {
      const uint32_t i = threadIdx.x;
      float of_log = d_log[i], of_rate = d_rate[i];
      for (uint32_t j = 0; j < i; j++) {
        const uint32_t at = i * LP + j;
        of_log += da[at] * c.a[at] + dt[at] * c.rate[i] * c.t[at];
        of_rate += dt[at] * c.t[at];
      }
      for (uint32_t j = i + 1; j < L; j++) {
        const uint32_t at = j * LP + i;
        of_log -= da[at] * c.a[at] + dt[at] * c.rate[j] * c.t[at];
      }
      if (i == L - 1) of_log += last * dots;
      // a token's log-decay is in the sums of all later tokens of the chunk
      float later = 0.0f;
      for (uint32_t j = L; j-- > 0;) {
        const float other = __shfl_sync(ALL, of_log, static_cast<int>(j));
        if (j >= i) later += other;
      }
      const size_t at = static_cast<size_t>(first + i) * h.values + head;
      float of_a = 0.0f, of_factor = 0.0f;
      if (i < l) {
        of_a = later * -expf(x.a_log[head]) * logistic(load(x.a + at) + x.bias[head]), of_factor = later * c.log[i];
        store(out.a + at, of_a), store(out.b + at, of_rate * c.rate[i] * (1.0f - c.rate[i]));
      }
      of_a = warp_sum(of_a), of_factor = warp_sum(of_factor);
      if (i == 0) out.a_log[number * h.values + head] = of_factor, out.bias[number * h.values + head] = of_a;
    }
    // coefficients of queries and keys: of_a of those before, its transpose of those after, of_t of both
    for (uint32_t at = threadIdx.x; at < L * L; at += THREADS) {
      const uint32_t i = at / L, j = at % L, low = i < j ? i : j, high = i < j ? j : i;
      const float decay = expf(c.cum[high] - c.cum[low]);
      of_a[i * LP + j] = da[i * LP + j] * decay, of_a_back[i * LP + j] = da[j * LP + i] * decay;
      of_t[i * LP + j] = dt[high * LP + low] * c.rate[high] * decay;
    }
    __syncthreads();
    if (d_own < h.k)
      for (uint32_t j = 0; j < L; j += 4) {
        float of_k[4], of_q[4];
#pragma unroll
        for (int n = 0; n < 4; n++) of_k[n] = c.k[(j + n) * c.stride + d_own], of_q[n] = c.q[(j + n) * c.stride + d_own];
#pragma unroll
        for (int n = 0; n < OWN; n++) {
          const uint32_t at = (2 * n + i_own) * LP + j;
          float of[4];
          load_four(of, of_a + at), dq[n] = dot_four(of, of_k, dq[n]);
          load_four(of, of_a_back + at), dk[n] = dot_four(of, of_q, dk[n]);
          load_four(of, of_t + at), dk[n] = dot_four(of, of_k, dk[n]);
        }
      }
  }
  // through the lengths
  const float scale = 1.0f / sqrtf(static_cast<float>(h.k));
  for (uint32_t part = 0; part < 2; part++) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < OWN; n++)
      if (d_own < h.k) s[(2 * n + i_own) * h.k + d_own] = part == 0 ? dq[n] : dk[n];
    __syncthreads();
    const float *const y = part == 0 ? c.q : c.k, factor = part == 0 ? scale : 1.0f;
    for (uint32_t i = warp; i < l; i += WARPS) {
      float along = 0.0f;
      for (uint32_t d = lane; d < h.k; d += WARP) along = fmaf(y[i * c.stride + d], s[i * h.k + d], along);
      along = warp_sum(along) / (factor * factor);
      T *const to = out.qkv + static_cast<size_t>(first + i) * h.channels() + (part * h.keys + key) * h.k;
      for (uint32_t d = lane; d < h.k; d += WARP)
        store(to + d, c.inverse[part * L + i] * factor * (s[i * h.k + d] - y[i * c.stride + d] * along));
    }
  }
}

#define RULE(NAME, T)                                                                                                  \
  KERNEL(delta_rule_forward_##NAME, THREADS, const T *qkv, const T *a, const T *b, const float *a_log,                 \
         const float *bias, const uint32_t *documents, const float *before, float *after, float *states, T *o,         \
         uint32_t tokens, uint32_t keys, uint32_t values, uint32_t k, uint32_t v) {                                    \
    forward<T>({qkv, a, b, a_log, bias, {keys, values, k, v}}, documents, tokens, before, after, states, o);           \
  }                                                                                                                    \
  KERNEL(delta_rule_states_##NAME, THREADS, const T *qkv, const T *a, const T *b, const float *a_log,                  \
         const float *bias, const uint32_t *documents, const T *d_o, float *d_states, uint32_t tokens, uint32_t keys,  \
         uint32_t values, uint32_t k, uint32_t v) {                                                                    \
    states_back<T>({qkv, a, b, a_log, bias, {keys, values, k, v}}, documents, tokens, d_o, d_states);                  \
  }                                                                                                                    \
  KERNEL(delta_rule_gradients_##NAME, THREADS, const T *qkv, const T *a, const T *b, const float *a_log,               \
         const float *bias, const uint32_t *documents, const T *d_o, const float *states, const float *d_states,       \
         T *d_qkv, T *da, T *db, float *d_a_log, float *d_bias, uint32_t count, uint32_t keys, uint32_t values,        \
         uint32_t k, uint32_t v) {                                                                                     \
    gradients<T>({qkv, a, b, a_log, bias, {keys, values, k, v}}, documents, count, d_o, states, d_states,              \
                 {d_qkv, da, db, d_a_log, d_bias});                                                                    \
  }

RULE(f32, float)
RULE(bf16, bf16)
RULE(f16, f16)
