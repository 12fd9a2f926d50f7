// The causal convolution compared with float64: tiles of several documents, a single document without a list, few and
// many taps, channels that fill no block.
#include "../../crates/ft-kernels/src/delta/conv/delta_conv.cu"
#include "call.h"

struct Row {
  std::vector<uint32_t> docs;
  uint32_t channels, taps;
};
static const std::vector<Row> CASES = {{{70, 1, 5}, 130, 4}, {{3, 64}, 7, 1}, {{66}, 5, 8}, {{2, 2, 2}, 129, 3}};

// Tiles as crates/ft-kernels/src/attention/tiles.rs makes them, in order.
static std::vector<uint32_t> tiles(const std::vector<uint32_t> &docs) {
  std::vector<uint32_t> list;
  uint32_t begin = 0;
  for (uint32_t n : docs) {
    for (uint32_t at = 0; at < n; at += ROWS)
      list.insert(list.end(), {begin + at, n - at < ROWS ? n - at : ROWS, begin, begin + n});
    begin += n;
  }
  return list;
}

template <typename T> static void convolutions(const std::string &type) {
  unsigned seed = 1;
  for (const Row &r : CASES) {
    uint32_t t = 0;
    for (uint32_t n : r.docs) t += n;
    const size_t n = static_cast<size_t>(t) * r.channels;
    host::Buffer<T> x(check::randn<T>(n, seed++)), w(check::randn<T>(r.channels * r.taps, seed++)),
        dy(check::randn<T>(n, seed++)), y(n), dx(n);
    const std::vector<double> xs = values(x), ws = values(w), ds = values(dy);
    std::vector<double> want(n), grad(n), dw(r.channels * r.taps);
    uint32_t begin = 0;
    for (uint32_t doc : r.docs) {
      for (uint32_t c = 0; c < r.channels; c++)
        for (uint32_t i = begin; i < begin + doc; i++) {
          double s = 0;
          for (uint32_t j = 0; j < r.taps && j <= i - begin; j++)
            s += ws[c * r.taps + r.taps - 1 - j] * xs[(i - j) * r.channels + c];
          const double open = 1 / (1 + exp(-s)), g = ds[i * r.channels + c] * open * (1 + s * (1 - open));
          want[i * r.channels + c] = s * open;
          for (uint32_t j = 0; j < r.taps && j <= i - begin; j++) {
            grad[(i - j) * r.channels + c] += g * ws[c * r.taps + r.taps - 1 - j];
            dw[c * r.taps + r.taps - 1 - j] += g * xs[(i - j) * r.channels + c];
          }
        }
      begin += doc;
    }
    host::Buffer<uint32_t> list(tiles(r.docs));
    const size_t blocks = list.size() / 4;
    const Dim all = grid(blocks, (r.channels + THREADS - 1) / THREADS);
    call("delta_conv_forward_" + type, all, THREADS, x.at(), w.at(), list.at(), y.at(), t, r.channels, r.taps);
    check::close("y", y, want, check::BAR<T>);
    host::Buffer<float> partial(blocks * r.channels * r.taps);
    float *none = nullptr;
    for (bool weights : {false, true}) {
      call("delta_conv_backward_" + type, all, THREADS, x.at(), w.at(), dy.at(), list.at(), dx.at(),
           weights ? partial.at() : none, t, r.channels, r.taps);
      check::close("dx", dx, grad, check::BAR<T>);
    }
    host::Buffer<float> total(dw.size());
    for (size_t i = 0; i < dw.size(); i++) {
      double sum = 0;
      for (size_t b = 0; b < blocks; b++) sum += partial[b * dw.size() + i];
      total[i] = static_cast<float>(sum);
    }
    check::close("dw", total, dw, 1e-4);
    if (r.docs.size() > 1) continue;
    uint32_t *no = nullptr;
    call("delta_conv_forward_" + type, all, THREADS, x.at(), w.at(), no, y.at(), t, r.channels, r.taps);
    check::close("y of one document", y, want, check::BAR<T>);
  }
}

TEST(convolutions_in_f32) { convolutions<float>("f32"); }
TEST(convolutions_in_bf16) { convolutions<bf16>("bf16"); }
TEST(convolutions_in_f16) { convolutions<f16>("f16"); }
