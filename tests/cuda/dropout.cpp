// Dropout uses the numbers of src/rng.rs: published Philox test vectors, and one number per element.
#include "../../crates/ft-kernels/src/adapters/dropout/dropout.cu"
#include "call.h"

TEST(known_answers) {
  uint32_t w[4];
  Stream{0, 0, 0, 0, 0}.words(0, w);
  const uint32_t zeros[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  if (memcmp(w, zeros, sizeof w)) check::wrong("zeros");
  Stream{0xa4093822, 0x299f31d0, 0x13198a2e, 0x03707344, 0}.words(0x85a308d3243f6a88ull, w);
  const uint32_t pi[4] = {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
  if (memcmp(w, pi, sizeof w)) check::wrong("pi");
}

template <typename T> static void drops(const std::string &type) {
  const Stream s = {1, 2, 3, 4, 5000000};
  unsigned seed = 1;
  for (auto [rows, columns] : std::vector<std::pair<uint32_t, uint32_t>>{{3, 96}, {5, 33}, {2, 2100}, {2, 4100}}) {
    const size_t n = static_cast<size_t>(rows) * columns;
    const uint32_t apart = columns + (seed % 3) * 8;
    host::Buffer<T> x(check::randn<T>(static_cast<size_t>(rows) * apart, seed++)), a(check::randn<T>(n, seed++)), y(n);
    host::Buffer<uint32_t> list(std::vector<uint32_t>{7, 3, 9, 1, 0});
    T *no = nullptr;
    uint32_t *none = nullptr;
    for (bool listed : {false, true})
      for (bool add : {false, true}) {
        const uint64_t first = 1ull << 33;
        // all columns, or some of more
        const uint32_t from = add ? 16 : 0, all = columns + 3 * from;
        std::vector<double> want;
        for (uint32_t r = 0; r < rows; r++)
          for (uint32_t c = 0; c < columns; c++) {
            uint32_t w[4];
            const uint64_t number = (first + (listed ? list[r] : r)) * all + from + c;
            s.words(number / 4, w);
            const bool kept = (w[number % 4] >> 8) >= s.threshold;
            const size_t at = static_cast<size_t>(r) * columns + c;
            want.push_back((kept ? 1.25 * Number<T>::widen(x[static_cast<size_t>(r) * apart + c]) : 0) +
                           (add ? Number<T>::widen(a[at]) : 0));
          }
        const size_t parts = (columns * sizeof(T) + 16 * THREADS - 1) / (16 * THREADS);
        call("dropout_" + type, grid(rows, parts), THREADS, x.at(), add ? a.at() : no, listed ? list.at() : none,
             y.at(), columns, apart, first, 1.25f, s.key0, s.key1, s.high0, s.high1, s.threshold, from, all);
        check::close("y", y, want, check::BAR<T>);
      }
  }
}

TEST(dropout_in_f32) { drops<float>("f32"); }
TEST(dropout_in_bf16) { drops<bf16>("bf16"); }
TEST(dropout_in_f16) { drops<f16>("f16"); }
