// Cross-entropy and gradient compared with float64: in place, and rounded into another matrix; with
// weights; aligned and unaligned columns, more than one iteration per block, large logits, and a target outside the
// columns.
#include "../../crates/ft-kernels/src/layers/loss/loss.cu"
#include "call.h"

template <typename T> static void losses(const std::string &type, bool over, bool weighted = false) {
  unsigned seed = 1;
  const float scale = 0.25f;
  for (auto [rows, columns] : std::vector<std::pair<size_t, uint32_t>>{{3, 4096}, {2, 7}, {1, 1}, {2, 5001}, {2, 1540}}) {
    host::Buffer<float> x(check::randn<float>(rows * columns, seed++, 5)), loss(rows);
    host::Buffer<T> d(rows * columns);
    host::Buffer<float> w(std::vector<float>{0.5f, -2.0f, 0.0f});
    std::vector<uint32_t> t;
    for (size_t r = 0; r < rows; r++) t.push_back(static_cast<uint32_t>(r * 7919 % columns));
    host::Buffer<uint32_t> targets(t);
    const std::vector<double> xs = values(x);
    std::vector<double> want, grad;
    for (size_t r = 0; r < rows; r++) {
      double most = -INFINITY, sum = 0;
      for (size_t i = 0; i < columns; i++) most = std::max(most, xs[r * columns + i]);
      for (size_t i = 0; i < columns; i++) sum += exp(xs[r * columns + i] - most);
      want.push_back(most + log(sum) - xs[r * columns + t[r]]);
      const double factor = scale * (weighted ? w[r] : 1.0f);
      for (size_t i = 0; i < columns; i++) grad.push_back(factor * (exp(xs[r * columns + i] - most) / sum - (i == t[r])));
    }
    T *out = over ? reinterpret_cast<T *>(x.at()) : d.at(), *no = nullptr;
    const float *const weights = weighted ? w.at() : nullptr;
    call("loss_" + type, grid(rows), THREADS, x.at(), targets.at(), weights, loss.at(), no, columns, 0.0f);
    check::close("losses alone", loss, want, 1e-5);
    call("loss_" + type, grid(rows), THREADS, x.at(), targets.at(), weights, loss.at(), out, columns, scale);
    check::close("losses", loss, want, 1e-5);
    if (over) check::close("gradient over the logits", x, grad, 1e-5);
    else check::close("gradient", d, grad, check::BAR<T>);
  }
}

TEST(losses_in_place) { losses<float>("f32", true); }
TEST(losses_beside) { losses<float>("f32", false); }
TEST(losses_in_bf16) { losses<bf16>("bf16", false); }
TEST(losses_in_f16) { losses<f16>("f16", false); }
TEST(weighted_losses) { losses<float>("f32", true, true); }
TEST(weighted_losses_in_bf16) { losses<bf16>("bf16", false, true); }

TEST(large_logits_stay_finite) {
  host::Buffer<float> x(std::vector<float>{1e30f, 0, -1e30f, 5}), loss(2);
  host::Buffer<uint32_t> t(std::vector<uint32_t>{0, 1});
  LAUNCH(loss_f32, {2}, 0, x.at(), t.at(), nullptr, loss.at(), nullptr, 2, 0.0f);
  check::close("losses", loss, {0, 0}, 0);
}

TEST(what_is_no_number_gives_none) {
  host::Buffer<float> x(std::vector<float>{0, NAN, INFINITY, 0, 0, 0}), loss(3);
  host::Buffer<uint32_t> t(std::vector<uint32_t>{0, 1, 2});
  LAUNCH(loss_f32, {3}, 0, x.at(), t.at(), nullptr, loss.at(), nullptr, 2, 0.0f);
  for (size_t i = 0; i < 3; i++)
    if (loss[i] == loss[i]) check::wrong("a number");
}
