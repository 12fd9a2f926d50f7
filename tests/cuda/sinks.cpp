// Attention sinks compared with float64: corrected output and log-sum-exp, and the gradient of the sinks.
#include "../../crates/ft-kernels/src/attention/sinks/sinks.cu"
#include "call.h"

template <typename T> static void sinks(const std::string &type, bool aligned) {
  unsigned seed = 1;
  struct Sizes {
    uint32_t tokens, heads, channels, room;
  };
  const std::vector<Sizes> tails{{5, 3, 64, 0}, {70, 2, 33, 7}, {1, 1, 8, 0}, {300, 2, 256, 16}},
      measured{{64, 4, 128, 0}};
  for (auto [tokens, heads, channels, room] : aligned ? measured : tails) {
    const uint32_t apart = heads * channels + room;
    host::Buffer<T> o(check::randn<T>(static_cast<size_t>(tokens) * apart, seed++)),
        s(check::randn<T>(heads, seed++, 3)),
        d_o(check::randn<T>(static_cast<size_t>(tokens) * heads * channels, seed++));
    host::Buffer<float> lse(check::randn<float>(static_cast<size_t>(heads) * tokens, seed++, 5)), grad(heads);
    const std::vector<double> os = values(o), ss = values(s), ds = values(d_o), ls = values(lse);
    std::vector<double> want = os, sums = ls, grads(heads);
    for (size_t t = 0; t < tokens; t++)
      for (size_t h = 0; h < heads; h++) {
        const double own = ls[h * tokens + t], top = std::max(own, ss[h]),
                     sum = top + log(exp(own - top) + exp(ss[h] - top));
        sums[h * tokens + t] = sum;
        for (size_t i = 0; i < channels; i++) want[t * apart + h * channels + i] *= exp(own - sum);
      }
    call("sinks_forward_" + type, grid((tokens + WARP - 1) / WARP, heads), WARP, s.at(), tokens, channels, apart,
         o.at(), lse.at());
    check::close("o", o, want, check::BAR<T>), check::close("lse", lse, sums, 1e-6);
    const std::vector<double> rounded = values(o);
    double length = 0;
    for (size_t t = 0; t < tokens; t++)
      for (size_t h = 0; h < heads; h++) {
        double dot = 0;
        for (size_t i = 0; i < channels; i++)
          dot += rounded[t * apart + h * channels + i] * ds[(t * heads + h) * channels + i];
        grads[h] -= exp(ss[h] - sums[h * tokens + t]) * dot, length += std::abs(dot);
      }
    call("sinks_gradient_" + type, grid(heads), THREADS, s.at(), o.at(), d_o.at(), lse.at(), tokens, heads, channels,
         apart, grad.at());
    for (size_t h = 0; h < heads; h++)
      if (!(std::abs(grad[h] - grads[h]) <= 1e-5 * length)) check::wrong("gradient of a sink");
  }
}

TEST(sinks_in_f32) { sinks<float>("f32", false); }
TEST(sinks_in_bf16) { sinks<bf16>("bf16", false); }
TEST(sinks_in_f16) { sinks<f16>("f16", false); }
TEST(measured_in_f32) { sinks<float>("f32", true); }
TEST(measured_in_bf16) { sinks<bf16>("bf16", true); }
TEST(measured_in_f16) { sinks<f16>("f16", true); }

// A sink far above all scores leaves nothing, one far below changes nothing.
TEST(far_sinks_stay_numbers) {
  host::Buffer<float> o(std::vector<float>{1, 2, 3, 4}), s(std::vector<float>{1e4f, -1e4f}),
      lse(std::vector<float>{2, 3});
  call("sinks_forward_f32", grid(1, 2), WARP, s.at(), 1u, 2u, 4u, o.at(), lse.at());
  check::close("o", o, {0, 0, 3, 4}, 1e-6), check::close("lse", lse, {1e4, 3}, 1e-6);
}
