// Router, one warp per token: softmax over experts, top-k in descending order (ties go to the lower expert),
// gates, the backward pass, and sums over tokens for the router losses.
#include "../../cuda/device.cuh"

constexpr int THREADS = 256; // same as in crates/ft-kernels/src/experts/route/cuda.rs

// Whether expert a with probability x ranks before expert b with probability y.
DEVICE bool precedes(float x, uint32_t a, float y, uint32_t b) { return x > y || (x == y && a < b); }

// `chosen` `[t, k]` is written, or read if `replay`. k is at most 32: lane j handles choice j.
KERNEL(route_forward, THREADS, const float *logits, uint32_t tokens, uint32_t experts, uint32_t k, uint32_t replay,
       uint32_t normalise, uint32_t *chosen, float *probs, float *lse, float *gates) {
  const uint32_t lane = threadIdx.x % WARP, t = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
  if (t >= tokens) return;
  const uint64_t row = static_cast<uint64_t>(t) * experts, own = static_cast<uint64_t>(t) * k + lane;
  const float *x = logits + row;
  float *p = probs + row;
  float most = -INFINITY, sum = 0;
  for (uint32_t e = lane; e < experts; e += WARP) most = fmaxf(most, x[e]);
  most = warp_max(most);
  for (uint32_t e = lane; e < experts; e += WARP) sum += expf(x[e] - most);
  sum = warp_sum(sum);
  for (uint32_t e = lane; e < experts; e += WARP) p[e] = expf(x[e] - most) / sum;
  if (lane == 0) lse[t] = most + logf(sum);

  uint32_t mine = 0;
  if (replay) {
    if (lane < k) mine = chosen[own];
  } else {
    // repeatedly the best expert after the last one chosen
    float last = INFINITY;
    uint32_t at = 0;
    for (uint32_t j = 0; j < k; j++) {
      float best = -1.0f;
      uint32_t found = experts;
      for (uint32_t e = lane; e < experts; e += WARP) {
        const float v = p[e];
        const bool left = last == INFINITY || precedes(last, at, v, e);
        if (left && precedes(v, e, best, found)) best = v, found = e;
      }
#pragma unroll
      for (int step = WARP / 2; step > 0; step /= 2) {
        const float v = __shfl_xor_sync(ALL, best, step);
        const uint32_t e = __shfl_xor_sync(ALL, found, step);
        if (precedes(v, e, best, found)) best = v, found = e;
      }
      // NaN rows have no best expert: pick any, and let the loss check report the NaN
      if (found == experts) found = j;
      last = best, at = found;
      if (lane == j) mine = found;
    }
    if (lane < k) chosen[own] = mine;
  }
  __syncwarp(); // make probabilities of other lanes visible
  const float gate = lane < k ? p[mine] : 0.0f;
  const float all = warp_sum(gate);
  if (lane < k) gates[own] = normalise ? gate / all : gate;
}

// Gradient of the logits. `extra` [experts], or null, is added to the gradient of the probabilities; the
// z-loss adds z * lse * p, with the factor 2 of the square included in z.
KERNEL(route_backward, THREADS, const float *probs, const float *lse, const float *gates, const uint32_t *chosen,
       const float *dgates, const float *extra, float z, uint32_t tokens, uint32_t experts, uint32_t k,
       uint32_t normalise, float *dlogits) {
  const uint32_t lane = threadIdx.x % WARP, t = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
  if (t >= tokens) return;
  const uint64_t row = static_cast<uint64_t>(t) * experts, own = static_cast<uint64_t>(t) * k + lane;
  const float *p = probs + row;
  float d = 0;
  uint32_t mine = experts;
  if (lane < k) d = dgates[own], mine = chosen[own];
  if (normalise) {
    const float mean = warp_sum(lane < k ? gates[own] * d : 0.0f);
    const float sum = warp_sum(lane < k ? p[mine] : 0.0f);
    d = (d - mean) / sum;
  }
  float inner = 0;
  for (uint32_t first = 0; first < experts; first += WARP) {
    const uint32_t e = first + lane;
    float g = extra != nullptr && e < experts ? extra[e] : 0.0f;
    for (uint32_t j = 0; j < k; j++) {
      const float add = __shfl_sync(ALL, d, static_cast<int>(j));
      if (__shfl_sync(ALL, mine, static_cast<int>(j)) == e) g += add;
    }
    if (e < experts) {
      dlogits[row + e] = g;
      inner += p[e] * g;
    }
  }
  const float shift = z * lse[t] - warp_sum(inner);
  for (uint32_t e = lane; e < experts; e += WARP) dlogits[row + e] = p[e] * (dlogits[row + e] + shift);
}

// Per-layer sums `[2 experts + 1]`: tokens of each expert from `starts` `[experts + 1]`; sum of the
// probabilities of each expert; sum of squared logsumexp. The last experts + 1 sums are 0 if `probs` is null.
// Each block computes 32 of them.
constexpr int SUM_THREADS = 1024;
KERNEL(route_sums, SUM_THREADS, const float *probs, const float *lse, const uint32_t *starts, uint32_t tokens,
       uint32_t experts, double *out) {
  constexpr uint32_t ROWS = SUM_THREADS / WARP;
  SHARED_ARRAY(double, parts, SUM_THREADS);
  const uint32_t lane = threadIdx.x % WARP, part = threadIdx.x / WARP, e = blockIdx.x * WARP + lane;
  double sum = 0;
  if (probs != nullptr && e <= experts) {
    for (uint32_t t = part; t < tokens; t += ROWS) {
      const double v = e < experts ? probs[static_cast<uint64_t>(t) * experts + e] : lse[t];
      sum += e < experts ? v : v * v;
    }
  }
  parts[threadIdx.x] = sum;
  __syncthreads();
  if (part != 0 || e > experts) return;
  for (uint32_t i = 1; i < ROWS; i++) sum += parts[i * WARP + lane];
  out[experts + e] = sum;
  if (e < experts) out[e] = starts[e + 1] - starts[e];
}

// Gradient of the load-balancing loss for each probability: `factor` times the tokens
// of the expert over all layers.
KERNEL(route_balance, THREADS, const double *sums, uint32_t layers, uint32_t experts, float factor, float *out) {
  const uint32_t e = blockIdx.x * THREADS + threadIdx.x;
  if (e >= experts) return;
  double count = 0;
  for (uint32_t l = 0; l < layers; l++) count += sums[static_cast<uint64_t>(l) * (2 * experts + 1) + e];
  out[e] = static_cast<float>(count * factor);
}
