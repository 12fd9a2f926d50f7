// Embedding lookup, and the table's gradient from sorted tokens, compared with float64.
#include "../../crates/ft-kernels/src/layers/embed/embed.cu"
#include "call.h"

template <typename T> static void table(const std::string &type) {
  unsigned seed = 1;
  for (uint32_t columns : {96u, 33u, 2100u}) {
    const std::vector<uint32_t> tokens = {4, 0, 4, 5, 4};
    const uint32_t v = 6, t = 5;
    host::Buffer<T> rows(check::randn<T>(v * columns, seed++)), y(t * columns),
        dy(check::randn<T>(t * columns, seed++));
    host::Buffer<uint32_t> ids(tokens), unique(std::vector<uint32_t>{0, 4, 5}),
        starts(std::vector<uint32_t>{0, 1, 4, 5}), order(std::vector<uint32_t>{1, 0, 2, 4, 3});
    std::vector<double> want, all = values(rows), ds = values(dy), grad(v * columns, 1.0);
    for (uint32_t i = 0; i < t; i++)
      for (uint32_t c = 0; c < columns; c++) {
        want.push_back(all[tokens[i] * columns + c]);
        grad[tokens[i] * columns + c] += 0.5 * ds[i * columns + c];
      }
    // one part per row, and as many as in the launch code
    for (size_t parts : {size_t(1), (columns * sizeof(T) + 16 * THREADS - 1) / (16 * THREADS)}) {
      call("embed_rows_" + type, grid(t, parts), THREADS, rows.at(), ids.at(), y.at(), v, columns);
      check::close("rows", y, want, 0);
      host::Buffer<float> g(std::vector<float>(v * columns, 1.0f));
      call("embed_gradient_" + type, grid(3, parts), THREADS, g.at(), unique.at(), starts.at(), order.at(), dy.at(),
           columns, 0.5f);
      check::close("gradient", g, grad, 1e-6);
    }
    host::Buffer<uint32_t> outside(std::vector<uint32_t>{6});
    call("embed_rows_" + type, grid(1), THREADS, rows.at(), outside.at(), y.at(), v, columns);
    if (load(y.at()) == load(y.at())) check::wrong("an id that is no row gives numbers");
  }
}

TEST(tables_in_f32) { table<float>("f32"); }
TEST(tables_in_bf16) { table<bf16>("bf16"); }
TEST(tables_in_f16) { table<f16>("f16"); }
