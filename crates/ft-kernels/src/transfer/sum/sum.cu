// Adds the parts of several ranks in rank order.
#include "../../cuda/rows.cuh"

constexpr int THREADS = 256;

// to[i] += value i of each part in order. Part `own_at` is `own`; the other parts are concatenated in
// `others`.
KERNEL(sum_parts_f32, THREADS, const float *own, uint32_t own_at, const float *others, uint32_t parts, uint64_t n,
       float *to) {
  const uint64_t i = uint64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= n) return;
  float sum = to[i];
  for (uint32_t p = 0, next = 0; p < parts; p++) sum += p == own_at ? own[i] : others[next++ * n + i];
  to[i] = sum;
}
