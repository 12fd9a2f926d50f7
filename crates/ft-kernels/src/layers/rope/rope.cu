// Head norms and rotary embedding of queries (grid dimension y = 0) and keys (y = 1) in one launch. A warp
// processes one token at a time and iterates over heads, with cosines and sines in registers; `lanes` lanes
// (a power of two) share a head. A lane holds N values of the first half of a head and the matching N values
// of the second half, so a head has at most 256 channels.
//
// Every value is read and written once, N per access if alignment permits. A larger N would use more
// registers and reduce occupancy, with the same number of bytes in flight.
#include "../../cuda/rows.cuh"

constexpr int N = 4;     // same as in crates/ft-kernels/src/layers/rope/cuda.rs
constexpr int WARPS = 4; // per block
constexpr int MOST = 2 * N * WARP;

// Queries or keys.
template <typename T> struct Heads {
  const T *x;
  const T *w; // weight of the head norm, or null
  const T *dy;
  T *out;
  uint32_t heads;
  float eps;
  uint32_t apart; // stride of `out` between tokens, in values
};

DEVICE float sum_of_lanes(float x, uint32_t lanes) {
  for (uint32_t step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, static_cast<int>(step));
  return x;
}

// The N values of a lane in half a head, in groups of V adjacent values. Values beyond the half are 0.
template <int V> struct Part {
  uint32_t lane, lanes, half;
  bool live;
  DEVICE uint32_t at(int k) const { return (k * lanes + lane) * V; }
  template <typename T> DEVICE void take(const T *p, float (&out)[N]) const {
#pragma unroll
    for (int k = 0; k < N / V; k++) {
      float v[V];
      const bool some = live && at(k) < half;
      if (some) get(p + at(k), v);
#pragma unroll
      for (int j = 0; j < V; j++) out[k * V + j] = some ? v[j] : 0.0f;
    }
  }
  template <typename T> DEVICE void give(T *p, const float (&in)[N]) const {
#pragma unroll
    for (int k = 0; k < N / V; k++) {
      float v[V];
#pragma unroll
      for (int j = 0; j < V; j++) v[j] = in[k * V + j];
      if (live && at(k) < half) put(p + at(k), v);
    }
  }
};

// Norm factor of a head from the sum of squares, as in norm.cu.
DEVICE float head_scale(float squares, uint32_t half, float eps) {
  const float mean = squares / static_cast<float>(2 * half) + eps;
  return (mean * 0.0f + 1.0f) / sqrtf(mean);
}

template <typename T, int V>
DEVICE void forward(const Heads<T> &of, const float *cos, const float *sin, uint32_t tokens, uint32_t half,
                    uint32_t lanes, float sign) {
  const uint32_t lane = threadIdx.x % WARP, groups = WARP / lanes, group = lane / lanes;
  Part<V> part = {lane % lanes, lanes, half, true};
  const uint32_t t = blockIdx.x * WARPS + threadIdx.x / WARP;
  if (t >= tokens) return;
  float c[N], s[N], w1[N], w2[N];
  part.take(cos + static_cast<size_t>(t) * half, c);
  part.take(sin + static_cast<size_t>(t) * half, s);
  if (of.w != nullptr) part.take(of.w, w1), part.take(of.w + half, w2);
  for (uint32_t h = group; h - group < of.heads; h += groups) {
    const size_t at = (static_cast<size_t>(t) * of.heads + h) * (2 * half);
    float a[N], b[N];
    part.live = h < of.heads;
    part.take(of.x + at, a), part.take(of.x + at + half, b);
    if (of.w != nullptr) {
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < N; i++) squares += a[i] * a[i] + b[i] * b[i];
      const float r = head_scale(sum_of_lanes(squares, lanes), half, of.eps);
#pragma unroll
      for (int i = 0; i < N; i++) a[i] = a[i] * r * w1[i], b[i] = b[i] * r * w2[i];
    }
    float y1[N], y2[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
      y1[i] = a[i] * c[i] - b[i] * (s[i] * sign);
      y2[i] = b[i] * c[i] + a[i] * (s[i] * sign);
    }
    T *const to = of.out + static_cast<size_t>(t) * of.apart + h * (2 * half);
    part.give(to, y1), part.give(to + half, y2);
  }
}

// Backward pass of rotation and norm: dx, and the partial weight gradient [2 half] of the
// block if `partial` is not null.
template <typename T, int V>
DEVICE void backward(const Heads<T> &of, const float *cos, const float *sin, float *partial, uint32_t tokens,
                     uint32_t half, uint32_t lanes, uint32_t per) {
  const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, groups = WARP / lanes, group = lane / lanes;
  Part<V> part = {lane % lanes, lanes, half, true};
  float w1[N], w2[N], dw1[N], dw2[N];
  part.take(of.w, w1), part.take(of.w + half, w2);
#pragma unroll
  for (int i = 0; i < N; i++) dw1[i] = dw2[i] = 0.0f;
  const uint32_t begin = blockIdx.x * per, end = tokens - begin < per ? tokens : begin + per;
  for (uint32_t t = begin + warp; t < end; t += WARPS) {
    float c[N], s[N];
    part.live = true;
    part.take(cos + static_cast<size_t>(t) * half, c);
    part.take(sin + static_cast<size_t>(t) * half, s);
    for (uint32_t h = group; h - group < of.heads; h += groups) {
      const size_t at = (static_cast<size_t>(t) * of.heads + h) * (2 * half);
      float a[N], b[N], y1[N], y2[N], squares = 0.0f, dots = 0.0f;
      part.live = h < of.heads;
      part.take(of.x + at, a), part.take(of.x + at + half, b);
      part.take(of.dy + at, y1), part.take(of.dy + at + half, y2);
#pragma unroll
      for (int i = 0; i < N; i++) {
        // inverse rotation
        const float g1 = y1[i] * c[i] + y2[i] * s[i], g2 = y2[i] * c[i] - y1[i] * s[i];
        y1[i] = g1, y2[i] = g2;
        squares += a[i] * a[i] + b[i] * b[i];
        dots += g1 * w1[i] * a[i] + g2 * w2[i] * b[i];
      }
      const float r = head_scale(sum_of_lanes(squares, lanes), half, of.eps);
      const float k = sum_of_lanes(dots, lanes) * r * r * r / static_cast<float>(2 * half);
#pragma unroll
      for (int i = 0; i < N; i++) {
        // all values of an inactive head are 0, and so may be eps
        if (part.live) dw1[i] += y1[i] * (a[i] * r), dw2[i] += y2[i] * (b[i] * r);
        y1[i] = y1[i] * w1[i] * r - a[i] * k;
        y2[i] = y2[i] * w2[i] * r - b[i] * k;
      }
      T *const to = of.out + static_cast<size_t>(t) * of.apart + h * (2 * half);
      part.give(to, y1), part.give(to + half, y2);
    }
  }
  if (partial == nullptr) return;
  SHARED_ARRAY(float, sums, WARPS * MOST);
  // sum over the groups of a warp, then over warps, in fixed order
#pragma unroll
  for (int i = 0; i < N; i++)
    for (uint32_t step = lanes; step < WARP; step *= 2) {
      dw1[i] += __shfl_xor_sync(ALL, dw1[i], static_cast<int>(step));
      dw2[i] += __shfl_xor_sync(ALL, dw2[i], static_cast<int>(step));
    }
  part.live = group == 0;
  part.give(sums + warp * MOST, dw1), part.give(sums + warp * MOST + half, dw2);
  __syncthreads();
  float *const own = partial + (static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x) * (2 * half);
  for (uint32_t i = threadIdx.x; i < 2 * half; i += WARPS * WARP) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sums[w * MOST + i];
    own[i] = sum;
  }
}

// One kernel per dtype. The forward kernel with sign -1 and no norms is the backward pass of the rotation.
#define ROPE(NAME, T)                                                                                                  \
  KERNEL(rope_forward_##NAME, WARPS *WARP, const T *q, const T *k, const T *wq, const T *wk, const float *cos,         \
         const float *sin, T *yq, T *yk, uint32_t tokens, uint32_t heads, uint32_t kv_heads, uint32_t half,            \
         uint32_t lanes, float sign, float eps_q, float eps_k, uint32_t apart_q, uint32_t apart_k) {                   \
    const Heads<T> of = blockIdx.y == 0 ? Heads<T>{q, wq, nullptr, yq, heads, eps_q, apart_q}                          \
                                        : Heads<T>{k, wk, nullptr, yk, kv_heads, eps_k, apart_k};                      \
    const bool vectors =                                                                                               \
        half % N == 0 && of.apart % N == 0 && is_aligned(of.x) && is_aligned(of.w) && is_aligned(of.out) && is_aligned(cos) &&      \
        is_aligned(sin);                                                                                               \
    if (vectors) forward<T, N>(of, cos, sin, tokens, half, lanes, sign);                                       \
    else forward<T, 1>(of, cos, sin, tokens, half, lanes, sign);                                                       \
  }                                                                                                                    \
  KERNEL(rope_backward_##NAME, WARPS *WARP, const T *q, const T *k, const T *wq, const T *wk, const float *cos,        \
         const float *sin, const T *dyq, const T *dyk, T *dq, T *dk, float *partial, uint32_t tokens, uint32_t heads,  \
         uint32_t kv_heads, uint32_t half, uint32_t lanes, uint32_t per, float eps_q, float eps_k, uint32_t apart_q,   \
         uint32_t apart_k) {                                                                                           \
    const Heads<T> of = blockIdx.y == 0 ? Heads<T>{q, wq, dyq, dq, heads, eps_q, apart_q}                              \
                                        : Heads<T>{k, wk, dyk, dk, kv_heads, eps_k, apart_k};                          \
    const bool vectors =                                                                                               \
        half % N == 0 && of.apart % N == 0 && is_aligned(of.x) && is_aligned(of.w) && is_aligned(of.dy) && is_aligned(of.out) &&    \
        is_aligned(cos) && is_aligned(sin);                                                                            \
    if (vectors) backward<T, N>(of, cos, sin, partial, tokens, half, lanes, per);                                      \
    else backward<T, 1>(of, cos, sin, partial, tokens, half, lanes, per);                                              \
  }

ROPE(f32, float)
ROPE(bf16, bf16)
ROPE(f16, f16)
