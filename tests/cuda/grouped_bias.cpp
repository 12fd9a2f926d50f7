// Biases of experts compared with float64: experts without rows, first and last, widths with tails, frozen biases.
#include "../../crates/ft-kernels/src/experts/grouped/grouped_bias.cu"
#include "call.h"

template <typename T> static void biases(const std::string &type, bool aligned) {
  unsigned seed = 1;
  const std::vector<uint32_t> tails{1, 33, 300}, measured{1024};
  const std::vector<std::vector<uint32_t>> some{{0, 3, 0, 0, 5, 1, 0}, {4}, {0, 2}}, full{{128, 128, 256}};
  for (uint32_t width : aligned ? measured : tails)
    for (const std::vector<uint32_t> &rows : aligned ? full : some) {
      const uint32_t experts = static_cast<uint32_t>(rows.size());
      std::vector<uint32_t> firsts{0};
      for (uint32_t n : rows) firsts.push_back(firsts.back() + n);
      const uint32_t all = firsts.back();
      host::Buffer<uint32_t> starts(firsts);
      host::Buffer<T> b(check::randn<T>(static_cast<size_t>(experts) * width, seed++)),
          y(check::randn<T>(static_cast<size_t>(all) * width, seed++));
      host::Buffer<float> grads(check::randn<float>(static_cast<size_t>(experts) * width, seed++));
      std::vector<Bias> list;
      // every third bias is frozen
      for (uint32_t e = 0; e < experts; e++)
        list.push_back({b.at() + static_cast<size_t>(e) * width, e % 3 == 2 ? -1 : static_cast<int64_t>(e) * width});
      host::Buffer<Bias> table(list);
      const std::vector<double> bs = values(b), ys = values(y);
      std::vector<double> want = ys, sums = values(grads);
      for (uint32_t e = 0; e < experts; e++)
        for (uint32_t r = firsts[e]; r < firsts[e + 1]; r++)
          for (uint32_t i = 0; i < width; i++) {
            want[static_cast<size_t>(r) * width + i] += bs[static_cast<size_t>(e) * width + i];
            if (e % 3 != 2) sums[static_cast<size_t>(e) * width + i] += ys[static_cast<size_t>(r) * width + i];
          }
      call("grouped_bias_sum_" + type, grid((width + 31) / 32, experts), THREADS, table.at(), starts.at(), width,
           y.at(), grads.at());
      check::close("gradient", grads, sums, 1e-5);
      call("grouped_bias_add_" + type, grid(all), THREADS, table.at(), starts.at(), experts, width, y.at());
      check::close("sum", y, want, check::BAR<T>);
    }
}

TEST(biases_in_f32) { biases<float>("f32", false); }
TEST(biases_in_bf16) { biases<bf16>("bf16", false); }
TEST(biases_in_f16) { biases<f16>("f16", false); }
TEST(measured_in_f32) { biases<float>("f32", true); }
TEST(measured_in_bf16) { biases<bf16>("bf16", true); }
TEST(measured_in_f16) { biases<f16>("f16", true); }
