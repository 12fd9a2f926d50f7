// RMSNorm compared with float64: aligned and unaligned rows, rows longer than a block covers, partly
// filled blocks.
#include "../../crates/ft-kernels/src/layers/norm/norm.cu"
#include "call.h"

struct Norms {
  uint32_t rows, d, per;
  unsigned threads; // as in crates/ft-kernels/src/layers/norm/cuda.rs
  size_t skew;
  uint32_t room = 0; // padding of output rows, and of the rows added to dx
};

static const std::vector<Norms> CASES = {
    {3, 96, 1, 32, 0},     {5, 33, 2, 32, 0},    {9, 256, 8, 32, 0},  {2, 1500, 1, 96, 0},
    {4, 512, 3, 32, 1},    {1, 1, 1, 32, 0},     {3, 1100, 2, 32, 0}, // more values than the threads hold
    {5, 96, 2, 32, 0, 16}, {3, 40, 1, 32, 0, 3},
};

template <typename T> static void norms(const std::string &type) {
  const double eps = 0.1; // large enough that rows of one value don't nearly cancel
  unsigned seed = 1;
  for (const Norms &c : CASES)
    for (bool add : {false, true}) {
      const size_t n = static_cast<size_t>(c.rows) * c.d, blocks = (c.rows + c.per - 1) / c.per;
      host::Buffer<T> x(check::randn<T>(n, seed++), c.skew), a(check::randn<T>(n, seed++), c.skew),
          w(check::randn<T>(c.d, seed++)), dy(check::randn<T>(n, seed++), c.skew), sum(n, c.skew);
      const uint32_t apart = c.d + c.room;
      host::Buffer<T> y(static_cast<size_t>(c.rows) * apart), dx(y.size()), far(std::vector<T>(y.size()));
      for (size_t i = 0; i < n; i++) far[i / c.d * apart + i % c.d] = a[i];
      host::Buffer<float> partial(blocks * c.d);
      std::vector<double> xs = values(x), as = values(a), ws = values(w), ds = values(dy), want(n), grad(n), dw(c.d),
                          s = xs;
      if (add)
        for (size_t i = 0; i < n; i++) s[i] = rounded<T>(static_cast<float>(xs[i] + as[i]));
      // weights stored as w - 1, in every other case
      for (double &v : ws) v += c.room ? 1 : 0;
      for (uint32_t r = 0; r < c.rows; r++) {
        double squares = 0, dots = 0;
        for (uint32_t i = 0; i < c.d; i++) {
          const size_t at = static_cast<size_t>(r) * c.d + i;
          squares += s[at] * s[at], dots += ds[at] * ws[i] * s[at];
        }
        const double k = 1 / sqrt(squares / c.d + eps), f = dots * k * k * k / c.d;
        for (uint32_t i = 0; i < c.d; i++) {
          const size_t at = static_cast<size_t>(r) * c.d + i;
          want[at] = s[at] * k * ws[i];
          grad[at] = ds[at] * ws[i] * k - s[at] * f + (add ? as[at] : 0);
          dw[i] += ds[at] * s[at] * k;
        }
      }
      T *no = nullptr;
      const float e = eps, plus = c.room ? 1.0f : 0.0f;
      call("norm_forward_" + type, grid(blocks), c.threads, x.at(), add ? a.at() : no, w.at(), add ? sum.at() : no,
           y.at(), c.rows, c.d, apart, c.per, e, plus);
      check::close("y", compact(y, c.d, apart), want, check::BAR<T>);
      if (add) check::close("sum", sum, s, 0.0);
      for (bool weight : {false, true}) {
        float *none = nullptr;
        call((weight ? "norm_backward_weight_" : "norm_backward_") + type, grid(blocks), c.threads,
             add ? sum.at() : x.at(), w.at(), dy.at(), add ? far.at() : no, dx.at(), weight ? partial.at() : none,
             c.rows, c.d, apart, apart, c.per, e, plus);
        check::close("dx", compact(dx, c.d, apart), grad, check::BAR<T>);
      }
      host::Buffer<float> total(c.d);
      for (uint32_t i = 0; i < c.d; i++) {
        double t = 0;
        for (size_t b = 0; b < blocks; b++) t += partial[b * c.d + i];
        total[i] = static_cast<float>(t);
      }
      check::close("dw", total, dw, 1e-5);
    }
}

TEST(norms_in_f32) { norms<float>("f32"); }
TEST(norms_in_bf16) { norms<bf16>("bf16"); }
TEST(norms_in_f16) { norms<f16>("f16"); }

TEST(squares_that_overflow_are_no_number) {
  host::Buffer<float> x(std::vector<float>{1, 2, 1e30f, 1}), w(std::vector<float>{1, 1}), y(4);
  LAUNCH(norm_forward_f32, {2}, 0, x.at(), nullptr, w.at(), nullptr, y.at(), 2, 2, 2, 1, 1e-5f, 0.0f);
  if (!(y[0] == y[0] && y[1] == y[1]) || y[2] == y[2] || y[3] == y[3]) check::wrong("numbers");
}
