// Causal depthwise convolution within documents, then SiLU, and its gradients. A block takes a tile of tokens of one
// document (tiles of attention: first token, tokens, begin and end of the document) and THREADS channels; a thread
// walks over the tokens of one channel, with the last inputs in registers. Sums over tokens are per tile, in order.
#include "../../cuda/rows.cuh"

constexpr int THREADS = 128;  // same as in crates/ft-kernels/src/delta/conv/cuda.rs
constexpr int TAPS = 8;       // most taps
constexpr uint32_t ROWS = 64; // tokens of a tile without a list

struct Tile {
  uint32_t first, rows, begin, end;
};

// The tile of this block: of the list, or of a single document of `tokens`.
DEVICE Tile tile_of(const uint32_t *tiles, uint32_t tokens) {
  const uint32_t *own = tiles + 4 * blockIdx.x;
  if (tiles != nullptr) return {own[0], own[1], own[2], own[3]};
  const uint32_t first = blockIdx.x * ROWS;
  return {first, tokens - first < ROWS ? tokens - first : ROWS, 0, tokens};
}

// The taps of a channel by distance, and the inputs before a tile.
template <typename T> struct Window {
  float w[TAPS], x[TAPS];
  DEVICE Window(const T *in, const T *weight, Tile t, uint32_t c, uint32_t channels, uint32_t taps) {
#pragma unroll
    for (int j = 0; j < TAPS; j++) {
      const uint32_t tap = j;
      w[j] = tap < taps ? load(weight + static_cast<size_t>(c) * taps + taps - 1 - tap) : 0.0f;
      // moved on before the first token
      const bool some = tap + 1 < taps && tap < t.first - t.begin;
      x[j] = some ? load(in + static_cast<size_t>(t.first - 1 - tap) * channels + c) : 0.0f;
    }
  }
  DEVICE float next(float now) {
#pragma unroll
    for (int j = TAPS - 1; j > 0; j--) x[j] = x[j - 1];
    x[0] = now;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < TAPS; j++) sum = fmaf(w[j], x[j], sum);
    return sum;
  }
};

template <typename T>
DEVICE void forward(const T *x, const T *weight, const uint32_t *tiles, T *y, uint32_t tokens, uint32_t channels,
                    uint32_t taps) {
  const Tile t = tile_of(tiles, tokens);
  const uint32_t c = blockIdx.y * THREADS + threadIdx.x;
  if (c >= channels) return;
  Window<T> window(x, weight, t, c, channels, taps);
  for (uint32_t i = t.first; i < t.first + t.rows; i++) {
    const float s = window.next(load(x + static_cast<size_t>(i) * channels + c));
    store(y + static_cast<size_t>(i) * channels + c, s * logistic(s));
  }
}

// dx[i] = sum_j w[j] ds[i + j]: `later` holds the sums of the last tokens, complete after as many further ones as taps.
template <typename T>
DEVICE void backward(const T *x, const T *weight, const T *dy, const uint32_t *tiles, T *dx, float *partial,
                     uint32_t tokens, uint32_t channels, uint32_t taps) {
  const Tile t = tile_of(tiles, tokens);
  const uint32_t c = blockIdx.y * THREADS + threadIdx.x;
  if (c >= channels) return;
  Window<T> window(x, weight, t, c, channels, taps);
  float later[TAPS], dw[TAPS];
#pragma unroll
  for (int j = 0; j < TAPS; j++) later[j] = dw[j] = 0.0f;
  const uint32_t own = t.first + t.rows, all = own + taps - 1, last = all < t.end ? all : t.end;
  for (uint32_t i = t.first; i < all; i++) {
    float ds = 0.0f;
    if (i < last) {
      const size_t at = static_cast<size_t>(i) * channels + c;
      const float s = window.next(load(x + at)), open = logistic(s);
      ds = load(dy + at) * open * (1.0f + s * (1.0f - open));
    }
#pragma unroll
    for (int j = TAPS - 1; j > 0; j--) later[j] = later[j - 1];
    later[0] = 0.0f;
#pragma unroll
    for (int j = 0; j < TAPS; j++) {
      later[j] = fmaf(window.w[j], ds, later[j]);
      if (i < own) dw[j] = fmaf(ds, window.x[j], dw[j]);
    }
    const uint32_t done = i - (taps - 1);
    if (i >= t.first + taps - 1 && done < own) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < TAPS; j++)
        if (static_cast<uint32_t>(j) == taps - 1) sum = later[j];
      store(dx + static_cast<size_t>(done) * channels + c, sum);
    }
  }
  if (partial == nullptr) return;
  float *const out = partial + (static_cast<size_t>(blockIdx.x) * channels + c) * taps;
#pragma unroll
  for (int j = 0; j < TAPS; j++)
    if (static_cast<uint32_t>(j) < taps) out[taps - 1 - j] = dw[j];
}

#define CONV(NAME, T)                                                                                                  \
  KERNEL(delta_conv_forward_##NAME, THREADS, const T *x, const T *weight, const uint32_t *tiles, T *y,                 \
         uint32_t tokens, uint32_t channels, uint32_t taps) {                                                          \
    forward<T>(x, weight, tiles, y, tokens, channels, taps);                                                           \
  }                                                                                                                    \
  KERNEL(delta_conv_backward_##NAME, THREADS, const T *x, const T *weight, const T *dy, const uint32_t *tiles, T *dx,  \
         float *partial, uint32_t tokens, uint32_t channels, uint32_t taps) {                                          \
    backward<T>(x, weight, dy, tiles, dx, partial, tokens, channels, taps);                                            \
  }

CONV(f32, float)
CONV(bf16, bf16)
CONV(f16, f16)
