// Copies of columns between matrices of other widths: whole vectors, single values, and an empty part of the grid.
#include "../../crates/ft-kernels/src/matmul/columns.cu"
#include "call.h"
#include <array>

template <typename T> static void copies(const std::string &type) {
  for (auto [rows, cols, from_apart, to_apart, skip, to_skip] : std::vector<std::array<uint32_t, 6>>{
           {5, 16, 48, 24, 16, 8}, {70, 3, 9, 7, 1, 4}, {3, 8, 8, 33, 0, 5}, {1, 1, 1, 1, 0, 0}}) {
    const size_t before = size_t(rows) * to_apart;
    host::Buffer<T> from(check::randn<T>(size_t(rows) * from_apart, 1)), to(check::randn<T>(before, 2));
    std::vector<double> want = values(to), of = values(from);
    for (size_t r = 0; r < rows; r++)
      for (size_t c = 0; c < cols; c++) want[r * to_apart + to_skip + c] = of[r * from_apart + skip + c];
    call("columns_" + type, grid(2), THREADS, from.at() + skip, from_apart, to.at() + to_skip, to_apart, rows, cols);
    check::close("columns", to, want, 0);
  }
}

TEST(columns_in_f32) { copies<float>("f32"); }
TEST(columns_in_bf16) { copies<bf16>("bf16"); }
TEST(columns_in_f16) { copies<f16>("f16"); }
