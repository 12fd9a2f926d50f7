// The gated delta rule in chunks of L tokens (formulas in crates/ft-kernels/src/delta/rule/chunk.rs). All arithmetic is
// in f32. A row of `documents` is begin, end and first chunk of a document; null is a single document.
//
// delta_rule_forward: a block per document, value head and slice of value channels walks over the chunks with its slice
// of the state in shared memory; channels of a value don't meet. delta_rule_states walks back in the same way with the
// gradient of the state. delta_rule_gradients has a block per chunk and key head; states and their gradients come from
// the other two kernels. Every sum has a fixed order.
#include "../../cuda/rows.cuh"

constexpr int THREADS = 256;           // same as in crates/ft-kernels/src/delta/rule/cuda.rs
constexpr uint32_t L = 32;             // same as attention::CHUNK
constexpr uint32_t WIDE = 32;          // most value channels of a slice of the walks, and of the gradients
constexpr uint32_t NARROW = 16;
constexpr uint32_t MOST = 128;         // most channels of a key
constexpr int OWN = L * MOST / THREADS; // values of a key gradient per thread
constexpr uint32_t LP = L + 1;         // stride of [L, L] in shared memory
constexpr float EPS = 1e-6f;

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

// A chunk in shared memory: unit queries (times k^-1/2) and keys [L, k + 1], their inverse lengths, D q.k and D k.k
// [L, L + 1], rates, log-decays and their running sums. Tokens beyond the document have zeros.
struct Chunk {
  float *q, *k, *a, *t, *rate, *log, *cum, *inverse;
  uint32_t stride;
  DEVICE static size_t floats(uint32_t k) { return 2 * L * (k + 1) + 2 * L * LP + 5 * L; }
  DEVICE float *take(float *at, uint32_t channels) {
    stride = channels + 1;
    q = at, k = q + L * stride, a = k + L * stride, t = a + L * LP, rate = t + L * LP, log = rate + L, cum = log + L,
    inverse = cum + L;
    return inverse + 2 * L;
  }
};

// Loads the chunk of `l` tokens from `first` on. Ends with a barrier.
template <typename T>
DEVICE void load_chunk(const Chunk &c, const Inputs<T> &x, uint32_t first, uint32_t l, uint32_t head) {
  const Heads h = x.heads;
  const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, key = head / (h.values / h.keys);
  const float scale = 1.0f / sqrtf(static_cast<float>(h.k));
  for (uint32_t row = warp; row < 2 * L; row += THREADS / WARP) {
    const uint32_t i = row % L, part = row / L;
    const T *from = x.qkv + static_cast<size_t>(first + i) * h.channels() + (part * h.keys + key) * h.k;
    float squares = 0.0f;
    if (i < l)
      for (uint32_t d = lane; d < h.k; d += WARP) {
        const float v = load(from + d);
        squares = fmaf(v, v, squares);
      }
    const float r = 1.0f / sqrtf(warp_sum(squares) + EPS);
    float *const to = (part == 0 ? c.q : c.k) + i * c.stride;
    for (uint32_t d = lane; d < h.k; d += WARP) to[d] = i < l ? load(from + d) * r * (part == 0 ? scale : 1.0f) : 0.0f;
    if (lane == 0) c.inverse[part * L + i] = r;
  }
  if (threadIdx.x < L) {
    const uint32_t i = threadIdx.x;
    const size_t at = static_cast<size_t>(first + i) * h.values + head;
    c.rate[i] = i < l ? logistic(load(x.b + at)) : 0.0f;
    c.log[i] = i < l ? -expf(x.a_log[head]) * softplus(load(x.a + at) + x.bias[head]) : 0.0f;
  }
  __syncthreads();
  if (threadIdx.x < L) {
    float sum = 0.0f;
    for (uint32_t j = 0; j <= threadIdx.x; j++) sum += c.log[j];
    c.cum[threadIdx.x] = sum;
  }
  __syncthreads();
  for (uint32_t at = threadIdx.x; at < L * L; at += THREADS) {
    const uint32_t i = at / L, j = at % L;
    float qk = 0.0f, kk = 0.0f;
    if (j <= i) {
      for (uint32_t d = 0; d < h.k; d++) {
        const float key_j = c.k[j * c.stride + d];
        qk = fmaf(c.q[i * c.stride + d], key_j, qk), kk = fmaf(c.k[i * c.stride + d], key_j, kk);
      }
      const float decay = expf(c.cum[i] - c.cum[j]);
      qk *= decay, kk = j < i ? kk * decay : 0.0f;
    }
    c.a[i * LP + j] = qk, c.t[i * LP + j] = kk;
  }
  __syncthreads();
}

// Solves (1 + T) y = x for the column `own` [L] with a stride, or with T transposed; T_ij = rate_i t_ij.
DEVICE void solve(const Chunk &c, float *own, uint32_t stride, bool transposed) {
  for (uint32_t n = 1; n < L; n++) {
    const uint32_t i = transposed ? L - 1 - n : n;
    float sum = own[i * stride];
    if (transposed)
      for (uint32_t j = i + 1; j < L; j++) sum -= c.rate[j] * c.t[j * LP + i] * own[j * stride];
    else
      for (uint32_t j = 0; j < i; j++) sum -= c.rate[i] * c.t[i * LP + j] * own[j * stride];
    own[i * stride] = sum;
  }
}

// The slice of value channels of this block.
struct SliceOf {
  uint32_t first, width;
  DEVICE SliceOf(uint32_t slice, uint32_t most, uint32_t v) : first(slice * most), width(v - first < most ? v - first : most) {}
};

template <typename T>
DEVICE void forward(const Inputs<T> &x, const uint32_t *documents, uint32_t tokens, const float *before, float *after,
                    float *states, T *o) {
  SHARED_BYTES(shared);
  const Heads h = x.heads;
  const uint32_t head = blockIdx.y;
  const SliceOf own(blockIdx.z, WIDE, h.v);
  const Document doc = document_of(documents, tokens, blockIdx.x);
  Chunk c;
  float *const s = c.take(reinterpret_cast<float *>(shared), h.k), *const u = s + h.k * own.width;
  const size_t of_head = static_cast<size_t>(head) * h.k * h.v + own.first, all = static_cast<size_t>(h.values) * h.k * h.v;
  for (uint32_t at = threadIdx.x; at < h.k * own.width; at += THREADS)
    s[at] = before == nullptr ? 0.0f : before[of_head + at / own.width * h.v + at % own.width];
  uint32_t number = doc.chunk;
  for (uint32_t first = doc.begin; first < doc.end; first += L, number++) {
    const uint32_t l = doc.end - first < L ? doc.end - first : L;
    __syncthreads();
    load_chunk(c, x, first, l, head);
    if (states != nullptr)
      for (uint32_t at = threadIdx.x; at < h.k * own.width; at += THREADS)
        states[number * all + of_head + at / own.width * h.v + at % own.width] = s[at];
    float qs[L * WIDE / THREADS];
#pragma unroll
    for (uint32_t n = 0; n < L * WIDE / THREADS; n++) {
      const uint32_t at = n * THREADS + threadIdx.x, i = at / own.width, col = at % own.width;
      qs[n] = 0.0f;
      if (i >= L) continue;
      float ks = 0.0f;
      for (uint32_t d = 0; d < h.k; d++) {
        const float v = s[d * own.width + col];
        ks = fmaf(c.k[i * c.stride + d], v, ks), qs[n] = fmaf(c.q[i * c.stride + d], v, qs[n]);
      }
      const float decay = expf(c.cum[i]);
      const size_t value = static_cast<size_t>(first + i) * h.channels() + 2 * h.keys * h.k + head * h.v + own.first + col;
      u[at] = i < l ? c.rate[i] * (load(x.qkv + value) - decay * ks) : 0.0f;
      qs[n] *= decay;
    }
    __syncthreads();
    if (threadIdx.x < own.width) solve(c, u + threadIdx.x, own.width, false);
    __syncthreads();
    if (o != nullptr) {
#pragma unroll
      for (uint32_t n = 0; n < L * WIDE / THREADS; n++) {
        const uint32_t at = n * THREADS + threadIdx.x, i = at / own.width, col = at % own.width;
        if (i >= l) continue;
        float sum = qs[n];
        for (uint32_t j = 0; j <= i; j++) sum = fmaf(c.a[i * LP + j], u[j * own.width + col], sum);
        store(o + (static_cast<size_t>(first + i) * h.values + head) * h.v + own.first + col, sum);
      }
    }
    const float last = c.cum[L - 1];
    for (uint32_t at = threadIdx.x; at < h.k * own.width; at += THREADS) {
      const uint32_t d = at / own.width, col = at % own.width;
      float sum = s[at] * expf(last);
      for (uint32_t i = 0; i < L; i++) sum = fmaf(expf(last - c.cum[i]) * c.k[i * c.stride + d], u[i * own.width + col], sum);
      s[at] = sum;
    }
  }
  if (after == nullptr) return;
  __syncthreads();
  for (uint32_t at = threadIdx.x; at < h.k * own.width; at += THREADS)
    after[of_head + at / own.width * h.v + at % own.width] = s[at];
}

// Gradient of the state after every chunk.
template <typename T>
DEVICE void states_back(const Inputs<T> &x, const uint32_t *documents, uint32_t tokens, const T *d_o, float *d_states) {
  SHARED_BYTES(shared);
  const Heads h = x.heads;
  const uint32_t head = blockIdx.y;
  const SliceOf own(blockIdx.z, WIDE, h.v);
  const Document doc = document_of(documents, tokens, blockIdx.x);
  Chunk c;
  float *const ds = c.take(reinterpret_cast<float *>(shared), h.k), *const dr = ds + h.k * own.width, *const g = dr + L * own.width;
  const size_t of_head = static_cast<size_t>(head) * h.k * h.v + own.first, all = static_cast<size_t>(h.values) * h.k * h.v;
  for (uint32_t at = threadIdx.x; at < h.k * own.width; at += THREADS) ds[at] = 0.0f;
  for (uint32_t left = (doc.end - doc.begin + L - 1) / L; left > 0; left--) {
    const uint32_t first = doc.begin + (left - 1) * L, l = doc.end - first < L ? doc.end - first : L;
    __syncthreads();
    load_chunk(c, x, first, l, head);
    for (uint32_t at = threadIdx.x; at < L * own.width; at += THREADS) {
      const uint32_t i = at / own.width, col = at % own.width;
      g[at] = i < l ? load(d_o + (static_cast<size_t>(first + i) * h.values + head) * h.v + own.first + col) : 0.0f;
    }
    for (uint32_t at = threadIdx.x; at < h.k * own.width; at += THREADS)
      d_states[(doc.chunk + left - 1) * all + of_head + at / own.width * h.v + at % own.width] = ds[at];
    __syncthreads();
    const float last = c.cum[L - 1];
    for (uint32_t at = threadIdx.x; at < L * own.width; at += THREADS) {
      const uint32_t i = at / own.width, col = at % own.width;
      float kd = 0.0f, sum = 0.0f;
      for (uint32_t d = 0; d < h.k; d++) kd = fmaf(c.k[i * c.stride + d], ds[d * own.width + col], kd);
      for (uint32_t j = i; j < L; j++) sum = fmaf(c.a[j * LP + i], g[j * own.width + col], sum);
      dr[at] = sum + expf(last - c.cum[i]) * kd;
    }
    __syncthreads();
    if (threadIdx.x < own.width) solve(c, dr + threadIdx.x, own.width, true);
    __syncthreads();
    for (uint32_t at = threadIdx.x; at < h.k * own.width; at += THREADS) {
      const uint32_t d = at / own.width, col = at % own.width;
      float sum = ds[at] * expf(last);
      for (uint32_t i = 0; i < L; i++) {
        const float decay = expf(c.cum[i]);
        sum = fmaf(c.q[i * c.stride + d], decay * g[i * own.width + col], sum);
        sum = fmaf(c.k[i * c.stride + d], -decay * c.rate[i] * dr[i * own.width + col], sum);
      }
      ds[at] = sum;
    }
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
  Chunk c;
  float *const da = c.take(reinterpret_cast<float *>(shared), h.k), *const dt = da + L * LP, *const d_log = dt + L * LP,
               *const d_rate = d_log + L, *const u = d_rate + L, *const dr = u + L * NARROW, *const g = dr + L * NARROW,
               *const xs = g + L * NARROW, *const ks = xs + L * NARROW, *const qs = ks + L * NARROW, *const kd = qs + L * NARROW,
               *const scratch = kd + L * NARROW, *const s = scratch + WARP;
  // the slices of the states, then [L, L] and [L, k]
  float *const ds = s + (h.k * NARROW > L * L ? h.k * NARROW : L * L);
  float dq[OWN], dk[OWN];
#pragma unroll
  for (int n = 0; n < OWN; n++) dq[n] = dk[n] = 0.0f;
  const size_t all = static_cast<size_t>(h.values) * h.k * h.v;
  for (uint32_t head = key * each; head < (key + 1) * each; head++) {
    __syncthreads();
    load_chunk(c, x, first, l, head);
    for (uint32_t at = threadIdx.x; at < L * LP; at += THREADS) da[at] = dt[at] = 0.0f;
    if (threadIdx.x < L) d_log[threadIdx.x] = d_rate[threadIdx.x] = 0.0f;
    const float last = c.cum[L - 1];
    float dots = 0.0f;
    for (uint32_t slice = 0; slice * NARROW < h.v; slice++) {
      const SliceOf own(slice, NARROW, h.v);
      const size_t of_head = number * all + static_cast<size_t>(head) * h.k * h.v + own.first;
      __syncthreads();
      for (uint32_t at = threadIdx.x; at < h.k * NARROW; at += THREADS) {
        const uint32_t d = at / NARROW, col = at % NARROW;
        const bool some = col < own.width;
        s[at] = some ? states[of_head + d * h.v + col] : 0.0f, ds[at] = some ? d_states[of_head + d * h.v + col] : 0.0f;
        dots = fmaf(s[at], ds[at], dots);
      }
      for (uint32_t at = threadIdx.x; at < L * NARROW; at += THREADS) {
        const uint32_t i = at / NARROW, col = at % NARROW;
        const bool some = i < l && col < own.width;
        const size_t token = first + i;
        g[at] = some ? load(d_o + (token * h.values + head) * h.v + own.first + col) : 0.0f;
        xs[at] = some ? load(x.qkv + token * h.channels() + 2 * h.keys * h.k + head * h.v + own.first + col) : 0.0f;
      }
      __syncthreads();
      for (uint32_t at = threadIdx.x; at < L * NARROW; at += THREADS) {
        const uint32_t i = at / NARROW, col = at % NARROW;
        float of_k = 0.0f, of_q = 0.0f, of_d = 0.0f, sum = 0.0f;
        for (uint32_t d = 0; d < h.k; d++) {
          const float ki = c.k[i * c.stride + d];
          of_k = fmaf(ki, s[d * NARROW + col], of_k), of_q = fmaf(c.q[i * c.stride + d], s[d * NARROW + col], of_q);
          of_d = fmaf(ki, ds[d * NARROW + col], of_d);
        }
        for (uint32_t j = i; j < L; j++) sum = fmaf(c.a[j * LP + i], g[j * NARROW + col], sum);
        const float value = i < l ? xs[at] - expf(c.cum[i]) * of_k : 0.0f;
        ks[at] = of_k, qs[at] = of_q, kd[at] = of_d, xs[at] = value, u[at] = c.rate[i] * value;
        dr[at] = sum + expf(last - c.cum[i]) * of_d;
      }
      __syncthreads();
      if (threadIdx.x < NARROW) solve(c, u + threadIdx.x, NARROW, false);
      else if (threadIdx.x >= WARP && threadIdx.x < WARP + NARROW) solve(c, dr + threadIdx.x - WARP, NARROW, true);
      __syncthreads();
      for (uint32_t at = threadIdx.x; at < L * NARROW; at += THREADS) {
        const uint32_t i = at / NARROW, col = at % NARROW;
        const size_t to = static_cast<size_t>(first + i) * h.channels() + 2 * h.keys * h.k + head * h.v + own.first + col;
        if (i < l && col < own.width) store(out.qkv + to, c.rate[i] * dr[at]);
      }
      if (threadIdx.x < L) {
        const uint32_t i = threadIdx.x;
        float through_o = 0.0f, through_x = 0.0f, of_rate = 0.0f, moved = 0.0f;
#pragma unroll 4
        for (uint32_t col = 0; col < NARROW; col++) {
          const uint32_t at = i * NARROW + col;
          through_o = fmaf(g[at], qs[at], through_o), through_x = fmaf(dr[at], ks[at], through_x);
          of_rate = fmaf(dr[at], xs[at], of_rate), moved = fmaf(u[at], kd[at], moved);
        }
        moved *= expf(last - c.cum[i]);
        d_rate[i] += of_rate;
        d_log[i] += expf(c.cum[i]) * (through_o - c.rate[i] * through_x) - moved;
        const float sum = warp_sum(moved);
        if (i == L - 1) d_log[i] += sum;
      }
#pragma unroll
      for (int n = 0; n < OWN; n++) {
        const uint32_t at = n * THREADS + threadIdx.x, i = at / h.k, d = at % h.k;
        if (i >= L) continue;
        float of_o = 0.0f, of_x = 0.0f, of_u = 0.0f;
#pragma unroll 4
        for (uint32_t col = 0; col < NARROW; col++) {
          of_o = fmaf(g[i * NARROW + col], s[d * NARROW + col], of_o), of_x = fmaf(dr[i * NARROW + col], s[d * NARROW + col], of_x);
          of_u = fmaf(u[i * NARROW + col], ds[d * NARROW + col], of_u);
        }
        dq[n] += expf(c.cum[i]) * of_o;
        dk[n] += expf(last - c.cum[i]) * of_u - expf(c.cum[i]) * c.rate[i] * of_x;
      }
      for (uint32_t at = threadIdx.x; at < L * L; at += THREADS) {
        const uint32_t i = at / L, j = at % L;
        if (j > i) continue;
        float of_a = 0.0f, of_t = 0.0f;
        for (uint32_t col = 0; col < NARROW; col++) {
          of_a = fmaf(g[i * NARROW + col], u[j * NARROW + col], of_a), of_t = fmaf(dr[i * NARROW + col], u[j * NARROW + col], of_t);
        }
        da[i * LP + j] += of_a;
        if (j < i) dt[i * LP + j] -= of_t;
      }
    }
    dots = block_sum<THREADS>(dots, scratch);
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
      if (i == L - 1) of_log += expf(last) * dots;
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
    for (uint32_t at = threadIdx.x; at < L * L; at += THREADS) {
      const uint32_t i = at / L, j = at % L;
      if (j > i) continue;
      const float decay = expf(c.cum[i] - c.cum[j]);
      // read above by the first threads
      s[at] = da[i * LP + j] * decay, ds[at] = j < i ? dt[i * LP + j] * c.rate[i] * decay : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < OWN; n++) {
      const uint32_t at = n * THREADS + threadIdx.x, i = at / h.k, d = at % h.k;
      if (i >= L) continue;
      for (uint32_t j = 0; j <= i; j++) {
        const float kj = c.k[j * c.stride + d];
        dq[n] = fmaf(s[i * L + j], kj, dq[n]), dk[n] = fmaf(ds[i * L + j], kj, dk[n]);
      }
      for (uint32_t j = i; j < L; j++) {
        dk[n] = fmaf(s[j * L + i], c.q[j * c.stride + d], dk[n]);
        if (j > i) dk[n] = fmaf(ds[j * L + i], c.k[j * c.stride + d], dk[n]);
      }
    }
  }
  // through the lengths
  const float scale = 1.0f / sqrtf(static_cast<float>(h.k));
  for (uint32_t part = 0; part < 2; part++) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < OWN; n++) {
      const uint32_t at = n * THREADS + threadIdx.x;
      if (at < L * h.k) s[at] = part == 0 ? dq[n] : dk[n];
    }
    __syncthreads();
    const float *const y = part == 0 ? c.q : c.k, factor = part == 0 ? scale : 1.0f;
    for (uint32_t i = warp; i < l; i += THREADS / WARP) {
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
