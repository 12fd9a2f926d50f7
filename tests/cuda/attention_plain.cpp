// Attention without tensor cores: f32, and head sizes without tensor-core kernels, compared with float64.
#include "../../crates/ft-kernels/src/attention/attention_plain.cu"
#include "attention.h"

template <typename T> void all(const char *type, std::vector<uint32_t> channels) {
  unsigned seed = 1;
  for (uint32_t n : channels)
    for (Case c : cases()) {
      // as for tensor cores, with a third of the tokens
      for (uint32_t &d : c.docs) d = (d + 2) / 3;
      c.first_query /= 3;

      const size_t one = 4 * (n + 32) * 4;
      run<T>(c, n, type, {one, one, 2 * one}, 1, 1, check::BAR<T>, seed++);
    }
}

TEST(f32_of_any_channels) { all<float>("f32", {1, 4, 33}); }
TEST(bf16_of_any_channels) { all<bf16>("bf16", {80}); }
TEST(f16_of_any_channels) { all<f16>("f16", {7}); }

TEST(measured) {
  const Case whole = {{64}, 2, 1};
  const size_t one = 4 * (64 + 32) * 4;
  run<float>(whole, 64, "f32", {one, one, 2 * one}, 1, 1, check::BAR<float>, 1);
  run<bf16>(whole, 64, "bf16", {one, one, 2 * one}, 1, 1, check::BAR<bf16>, 1);
  run<f16>(whole, 64, "f16", {one, one, 2 * one}, 1, 1, check::BAR<f16>, 1);
}
