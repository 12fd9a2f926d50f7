// Tensor-core attention: all head sizes, both dtypes, compared with float64.
#include "../../crates/ft-kernels/src/attention/attention_backward.cu"
#include "../../crates/ft-kernels/src/attention/attention_forward.cu"
#include "attention.h"

// Heads of `channels` channels with the kernels of size `n`.
template <typename T> void all(const char *type, uint32_t n, const std::vector<Case> &cases, uint32_t channels = 0) {
  const size_t row = 2 * n, held = n <= 96    ? PARTS<64> * STAGES<64>
                                   : n <= 128 ? PARTS<128> * STAGES<128>
                                              : PARTS<256> * STAGES<256>;
  const unsigned share = n > 256 ? 2 : 1, share_kv = n > 256 ? 4 : 1;
  const size_t slots = share > 1 ? 2 * OF_SLOT : 0;
  const std::vector<size_t> shared = {
      (64 / share + 2 * (n > 128 ? 32 : 64)) * row, (128 / share + 2 * (n > 128 ? 16 : 32)) * row + 512 / share + slots,
      (128 / share_kv + 64 * held) * row + 256 * held + slots, (64 + 2 * (n > 64 ? 32 : 64)) * row,
      (128 + 128 * held) * row + held * 512 + held / 2 * 16384};
  unsigned seed = 1;
  for (const Case &c : cases)
    run<T>(c, channels ? channels : n, std::string(type) + "_" + std::to_string(n), shared, share,
           n == 192 ? 3 : (n + 127) / 128, check::BAR<T>, seed++);
}

// The first cases have one key, two, whole tiles, tails, several documents.
static std::vector<Case> few_cases() {
  std::vector<Case> all = cases();
  if (!check::nightly()) all = {all[3], all[4], all[10]};
  return all;
}

TEST(bf16_of_64_channels) { all<bf16>("bf16", 64, cases()); }
TEST(bf16_of_96_channels) { all<bf16>("bf16", 96, cases()); }
TEST(bf16_of_128_channels) { all<bf16>("bf16", 128, cases()); }
TEST(bf16_of_256_channels) { all<bf16>("bf16", 256, cases()); }
TEST(bf16_of_512_channels) { all<bf16>("bf16", 512, few_cases()), all<bf16>("bf16", 512, few_cases(), 320); }
TEST(bf16_of_channels_between_sizes) {
  all<bf16>("bf16", 64, few_cases(), 40), all<bf16>("bf16", 96, few_cases(), 80),
      all<bf16>("bf16", 128, few_cases(), 112);
  all<bf16>("bf16", 192, few_cases(), 160), all<bf16>("bf16", 192, few_cases());
}
// f16 differs from bf16 by its conversions: one head size, all in the nightly tier
TEST(f16_of_64_channels) { all<f16>("f16", 64, cases()); }
TEST(f16_of_other_channels) {
  if (check::nightly())
    for (uint32_t n : {96u, 128u, 192u, 256u, 512u}) all<f16>("f16", n, cases());
}

static void measured(uint32_t n) {
  const std::vector<Case> whole = {{{128}, 2, 1}};
  all<bf16>("bf16", n, whole), all<f16>("f16", n, whole);
}
TEST(measured_64) { measured(64); }
TEST(measured_96) { measured(96); }
TEST(measured_128) { measured(128); }
TEST(measured_192) { measured(192); }
TEST(measured_256) { measured(256); }
TEST(measured_512) { measured(512); }
