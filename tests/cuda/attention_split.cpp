// Single-query attention split over blocks, compared with float64.
#include "../../crates/ft-kernels/src/attention/attention_split.cu"
#include "attention.h"

template <typename T>
static void one(const std::string &type, uint32_t keys, uint32_t heads, uint32_t groups, uint32_t n, uint32_t each,
                uint32_t window, unsigned seed) {
  const Case c = {{keys}, heads, groups, window, keys - 1};
  const float scale = 1 / sqrtf(static_cast<float>(n));
  const auto q = check::randn<T>(heads * n, seed), k = check::randn<T>(size_t(keys) * groups * n, seed + 1),
             v = check::randn<T>(size_t(keys) * groups * n, seed + 2);
  host::Buffer<T> bq(q), o(heads * n);
  Blocks<T> blocks(k, v, groups * n);
  const uint32_t first = keys > window ? keys - window : 0, parts = (keys - first + each - 1) / each,
                 line = 8 * VECTOR<T>;
  host::Buffer<float> sums(size_t(parts) * heads * n), lse(heads);
  host::Buffer<float2> stats(size_t(parts) * heads);
  const auto launch = [&](const std::string &name, Dim grid, size_t shared, auto... arguments) {
    void *pointers[] = {&arguments...};
    if (host::kernels().at(name).sizes.size() != sizeof...(arguments)) check::wrong(name + ": other arguments");
    host::launch(name.c_str(), grid, THREADS, shared, pointers);
  };
  const size_t shared = 4 * (heads / groups) * ((n + line - 1) / line * line + each + 4);
  launch("attention_split_" + type, grid(parts, groups), shared, bq.at(), blocks.table.at(), heads, groups, n, first,
         keys, each, scale, sums.at(), stats.at());
  launch("attention_join_" + type, grid(heads), 0, static_cast<const float *>(sums.at()),
         static_cast<const float2 *>(stats.at()), parts, n, o.at(), lse.at());
  const Want want = attention(c, n, double(scale), q, k, v, std::vector<T>(q.size()), o);
  check::close("o", o, want.o, check::BAR<T>);
  check::close("log-sum-exp", lse, want.lse, 1e-5);
}

template <typename T> static void all(const std::string &type) {
  constexpr uint32_t far = 0x7fffffff;
  one<T>(type, 130, 8, 1, 64, 64, far, 1);
  one<T>(type, 261, 4, 2, 128, 64, far, 2);
  one<T>(type, 200, 18, 2, 96, 96, 77, 3);
  one<T>(type, 65, 3, 3, 256, 64, far, 4);
  one<T>(type, 257, 7, 1, 40, 128, far, 5);
  one<T>(type, 1, 2, 1, 8, 64, far, 6);
  one<T>(type, 1030, 4, 2, 64, 96, far, 7);
  one<T>(type, 1100, 4, 2, 64, 64, 600, 8);
}

TEST(f32_of_one_query) { all<float>("f32"); }
TEST(bf16_of_one_query) { all<bf16>("bf16"); }
TEST(f16_of_one_query) { all<f16>("f16"); }

// 1024 keys, 4 query heads per key head.
TEST(measured) {
  one<float>("f32", 1024, 8, 2, 128, 64, 0x7fffffff, 1);
  one<bf16>("bf16", 1024, 8, 2, 128, 64, 0x7fffffff, 1);
  one<f16>("f16", 1024, 8, 2, 128, 64, 0x7fffffff, 1);
}
