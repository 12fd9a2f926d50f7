// Biases of experts, for rows sorted by expert: added to the rows, and their gradients.
#include "../../cuda/rows.cuh"

constexpr int THREADS = 256; // same as in crates/ft-kernels/src/experts/grouped/bias.rs

// Written by bias.rs: address of the bias, and offset of its gradient or -1.
struct alignas(16) Bias {
  const void *values;
  int64_t gradient;
};

// y[row] += bias of its expert, one block per row.
template <typename T>
DEVICE void add(const Bias *biases, const uint32_t *starts, uint32_t experts, uint32_t width, T *y) {
  // the last expert that starts at or before the row; empty ones start where the next does
  uint32_t low = 0, high = experts;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (starts[middle] <= blockIdx.x) low = middle;
    else high = middle;
  }
  const T *own = static_cast<const T *>(biases[low].values);
  T *row = y + static_cast<size_t>(blockIdx.x) * width;
  for (uint32_t i = threadIdx.x; i < width; i += THREADS) store(row + i, load(row + i) + load(own + i));
}

// grads[offset + c] += sum over an expert's rows of dy[.., c]; experts in grid dimension y.
template <typename T>
DEVICE void sum(const Bias *biases, const uint32_t *starts, uint32_t width, const T *dy, float *grads) {
  const int64_t at = biases[blockIdx.y].gradient;
  const uint32_t first = starts[blockIdx.y], end = starts[blockIdx.y + 1];
  if (at < 0 || first == end) return;
  const T *rows = dy + static_cast<size_t>(first) * width;
  column_sums<THREADS / WARP>(
      end - first, width, grads + at, true, [&](float own, uint64_t i) { return own + load(rows + i); },
      [](uint64_t) { return 1.0f; });
}

#define GROUPED_BIAS(NAME, T)                                                                                          \
  KERNEL(grouped_bias_add_##NAME, THREADS, const Bias *biases, const uint32_t *starts, uint32_t experts,               \
         uint32_t width, T *y) {                                                                                       \
    add(biases, starts, experts, width, y);                                                                            \
  }                                                                                                                    \
  KERNEL(grouped_bias_sum_##NAME, THREADS, const Bias *biases, const uint32_t *starts, uint32_t width, const T *dy,    \
         float *grads) {                                                                                               \
    sum(biases, starts, width, dy, grads);                                                                             \
  }

GROUPED_BIAS(f32, float)
GROUPED_BIAS(bf16, bf16)
GROUPED_BIAS(f16, f16)
