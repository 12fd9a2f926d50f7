// Head norms and rotary embedding of queries (grid dimension y = 0) and keys (y = 1) in one launch. A warp
// processes one token at a time and iterates over heads, with cosines and sines in registers; `lanes` lanes
// (a power of two) share a head. A lane holds N values of the first half of a head and the matching N values
// of the second half, so a head has at most 256 channels with N = 4, 512 with N = 8. If only the first channels of a
// head rotate, a pair is of their two halves or of the two halves of the rest, whose angle is 0.
//
// Every value is read and written once, PACK per access if alignment permits. A larger N uses more registers and
// reduces occupancy, with the same number of bytes in flight: only heads that need it have it.
#include "../../cuda/rows.cuh"

constexpr int PACK = 4;  // N of heads of up to 256 channels, same as in crates/ft-kernels/src/layers/rope/cuda.rs
constexpr int WARPS = 4; // per block

// Queries or keys.
template <typename T> struct Heads {
  const T *x;
  const T *w; // weight of the head norm, or null
  const T *dy;
  T *out;
  uint32_t heads;
  float eps;
  uint32_t apart; // stride of `out` between tokens, in values
  float plus;     // added to the weight
};

DEVICE float sum_of_lanes(float x, uint32_t lanes) {
  for (uint32_t step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, static_cast<int>(step));
  return x;
}

// The N pairs of a lane, in groups of V adjacent pairs. Values beyond the pairs of a head are 0.
template <int N, int V> struct Part {
  uint32_t lane, lanes, half, rotated;
  bool live;
  DEVICE uint32_t at(int k) const { return (k * lanes + lane) * V; }
  // channels of a group: of the first values of its pairs, and of the second
  DEVICE uint32_t first(int k) const { return at(k) < rotated ? at(k) : at(k) + rotated; }
  DEVICE uint32_t second(int k) const { return at(k) < rotated ? at(k) + rotated : at(k) + half; }
  template <typename T> DEVICE void take(const T *p, float (&a)[N], float (&b)[N], float plus = 0.0f) const {
#pragma unroll
    for (int k = 0; k < N / V; k++) {
      float v[V], w[V];
      const bool some = live && at(k) < half;
      if (some) get(p + first(k), v), get(p + second(k), w);
#pragma unroll
      for (int j = 0; j < V; j++) a[k * V + j] = some ? v[j] + plus : 0.0f, b[k * V + j] = some ? w[j] + plus : 0.0f;
    }
  }
  // cosines and sines of a token
  DEVICE void angles(const float *cos, const float *sin, float (&c)[N], float (&s)[N]) const {
#pragma unroll
    for (int k = 0; k < N / V; k++) {
      float v[V], w[V];
      const bool some = at(k) < rotated;
      if (some) get(cos + at(k), v), get(sin + at(k), w);
#pragma unroll
      for (int j = 0; j < V; j++) c[k * V + j] = some ? v[j] : 1.0f, s[k * V + j] = some ? w[j] : 0.0f;
    }
  }
  template <typename T> DEVICE void give(T *p, const float (&a)[N], const float (&b)[N]) const {
#pragma unroll
    for (int k = 0; k < N / V; k++) {
      float v[V], w[V];
#pragma unroll
      for (int j = 0; j < V; j++) v[j] = a[k * V + j], w[j] = b[k * V + j];
      if (live && at(k) < half) put(p + first(k), v), put(p + second(k), w);
    }
  }
};

// Norm factor of a head from the sum of squares, as in norm.cu.
DEVICE float head_scale(float squares, uint32_t half, float eps) {
  const float mean = squares / static_cast<float>(2 * half) + eps;
  return (mean * 0.0f + 1.0f) / sqrtf(mean);
}

template <typename T, int N, int V>
DEVICE void forward(const Heads<T> &of, const float *cos, const float *sin, uint32_t tokens, uint32_t half,
                    uint32_t rotated, uint32_t lanes, float sign) {
  const uint32_t lane = threadIdx.x % WARP, groups = WARP / lanes, group = lane / lanes;
  Part<N, V> part = {lane % lanes, lanes, half, rotated, true};
  const uint32_t t = blockIdx.x * WARPS + threadIdx.x / WARP;
  if (t >= tokens) return;
  float c[N], s[N], w1[N], w2[N];
  part.angles(cos + static_cast<size_t>(t) * rotated, sin + static_cast<size_t>(t) * rotated, c, s);
  if (of.w != nullptr) part.take(of.w, w1, w2, of.plus);
  for (uint32_t h = group; h - group < of.heads; h += groups) {
    const size_t at = (static_cast<size_t>(t) * of.heads + h) * (2 * half);
    float a[N], b[N];
    part.live = h < of.heads;
    part.take(of.x + at, a, b);
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
    part.give(to, y1, y2);
  }
}

// Backward pass of rotation and norm: dx, and the partial weight gradient [2 half] of the
// block if `partial` is not null.
template <typename T, int N, int V>
DEVICE void backward(const Heads<T> &of, const float *cos, const float *sin, float *partial, uint32_t tokens,
                     uint32_t half, uint32_t rotated, uint32_t lanes, uint32_t per) {
  const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, groups = WARP / lanes, group = lane / lanes;
  Part<N, V> part = {lane % lanes, lanes, half, rotated, true};
  float w1[N], w2[N], dw1[N], dw2[N];
  part.take(of.w, w1, w2, of.plus);
#pragma unroll
  for (int i = 0; i < N; i++) dw1[i] = dw2[i] = 0.0f;
  const uint32_t begin = blockIdx.x * per, end = tokens - begin < per ? tokens : begin + per;
  for (uint32_t t = begin + warp; t < end; t += WARPS) {
    float c[N], s[N];
    part.live = true;
    part.angles(cos + static_cast<size_t>(t) * rotated, sin + static_cast<size_t>(t) * rotated, c, s);
    for (uint32_t h = group; h - group < of.heads; h += groups) {
      const size_t at = (static_cast<size_t>(t) * of.heads + h) * (2 * half);
      float a[N], b[N], y1[N], y2[N], squares = 0.0f, dots = 0.0f;
      part.live = h < of.heads;
      part.take(of.x + at, a, b), part.take(of.dy + at, y1, y2);
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
      part.give(to, y1, y2);
    }
  }
  if (partial == nullptr) return;
  constexpr int MOST = 2 * N * WARP;
  SHARED_ARRAY(float, sums, WARPS *MOST);
  // sum over the groups of a warp, then over warps, in fixed order
#pragma unroll
  for (int i = 0; i < N; i++)
    for (uint32_t step = lanes; step < WARP; step *= 2) {
      dw1[i] += __shfl_xor_sync(ALL, dw1[i], static_cast<int>(step));
      dw2[i] += __shfl_xor_sync(ALL, dw2[i], static_cast<int>(step));
    }
  part.live = group == 0;
  part.give(sums + warp * MOST, dw1, dw2);
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
#define ROPE(NAME, T, N)                                                                                               \
  KERNEL(rope_forward_##NAME, WARPS *WARP, const T *q, const T *k, const T *wq, const T *wk, const float *cos,         \
         const float *sin, T *yq, T *yk, uint32_t tokens, uint32_t heads, uint32_t kv_heads, uint32_t half,            \
         uint32_t rotated, uint32_t lanes, float sign, float eps_q, float eps_k, uint32_t apart_q, uint32_t apart_k,   \
         float plus) {                                                                                                 \
    const Heads<T> of = blockIdx.y == 0 ? Heads<T>{q, wq, nullptr, yq, heads, eps_q, apart_q, plus}                    \
                                        : Heads<T>{k, wk, nullptr, yk, kv_heads, eps_k, apart_k, plus};                \
    const bool vectors = (half | rotated) % PACK == 0 && of.apart % PACK == 0 && is_aligned(of.x) &&                   \
                         is_aligned(of.w) && is_aligned(of.out) && is_aligned(cos) && is_aligned(sin);                 \
    if (vectors) forward<T, N, PACK>(of, cos, sin, tokens, half, rotated, lanes, sign);                                \
    else forward<T, N, 1>(of, cos, sin, tokens, half, rotated, lanes, sign);                                           \
  }                                                                                                                    \
  KERNEL(rope_backward_##NAME, WARPS *WARP, const T *q, const T *k, const T *wq, const T *wk, const float *cos,        \
         const float *sin, const T *dyq, const T *dyk, T *dq, T *dk, float *partial, uint32_t tokens, uint32_t heads,  \
         uint32_t kv_heads, uint32_t half, uint32_t rotated, uint32_t lanes, uint32_t per, float eps_q, float eps_k,   \
         uint32_t apart_q, uint32_t apart_k, float plus) {                                                             \
    const Heads<T> of = blockIdx.y == 0 ? Heads<T>{q, wq, dyq, dq, heads, eps_q, apart_q, plus}                        \
                                        : Heads<T>{k, wk, dyk, dk, kv_heads, eps_k, apart_k, plus};                    \
    const bool vectors = (half | rotated) % PACK == 0 && of.apart % PACK == 0 && is_aligned(of.x) &&                   \
                         is_aligned(of.w) && is_aligned(of.dy) && is_aligned(of.out) && is_aligned(cos) &&             \
                         is_aligned(sin);                                                                              \
    if (vectors) backward<T, N, PACK>(of, cos, sin, partial, tokens, half, rotated, lanes, per);                       \
    else backward<T, N, 1>(of, cos, sin, partial, tokens, half, rotated, lanes, per);                                  \
  }

ROPE(f32, float, PACK)
ROPE(bf16, bf16, PACK)
ROPE(f16, f16, PACK)
// Heads of more than 256 channels.
ROPE(wide_f32, float, 8)
ROPE(wide_bf16, bf16, 8)
ROPE(wide_f16, f16, 8)
