// Cross-entropy and gradient compared with float64: in place, and rounded into another matrix; with
// weights; aligned and unaligned columns, more than one iteration per block, large logits, and a target outside the
// columns, a limit of the logits. Distillation the same, with empty places, kept tokens that are the target, and as
// many as there are threads.
#include "../../crates/ft-kernels/src/layers/loss/loss.cu"
#include "call.h"
#include <tuple>

// Logits within a limit, if it is not 0, and the derivative there.
static std::vector<double> limited(std::vector<double> x, double cap) {
  if (cap > 0)
    for (double &v : x) v = cap * tanh(v / cap);
  return x;
}
static double slope(double limited, double cap) { return cap > 0 ? 1 - limited / cap * (limited / cap) : 1; }

template <typename T> static void losses(const std::string &type, bool over, bool weighted = false, float cap = 0) {
  unsigned seed = 1;
  const float scale = 0.25f;
  for (auto [rows, columns] :
       std::vector<std::pair<size_t, uint32_t>>{{3, 4096}, {2, 7}, {1, 1}, {2, 5001}, {2, 1540}}) {
    host::Buffer<float> x(check::randn<float>(rows * columns, seed++, 5)), loss(rows);
    host::Buffer<T> d(rows * columns);
    host::Buffer<float> w(std::vector<float>{0.5f, -2.0f, 0.0f});
    std::vector<uint32_t> t;
    for (size_t r = 0; r < rows; r++) t.push_back(static_cast<uint32_t>(r * 7919 % columns));
    host::Buffer<uint32_t> targets(t);
    const std::vector<double> xs = limited(values(x), cap);
    std::vector<double> want, grad;
    for (size_t r = 0; r < rows; r++) {
      double most = -INFINITY, sum = 0;
      for (size_t i = 0; i < columns; i++) most = std::max(most, xs[r * columns + i]);
      for (size_t i = 0; i < columns; i++) sum += exp(xs[r * columns + i] - most);
      want.push_back(most + log(sum) - xs[r * columns + t[r]]);
      const double factor = scale * (weighted ? w[r] : 1.0f);
      for (size_t i = 0; i < columns; i++) {
        const double y = xs[r * columns + i];
        grad.push_back(factor * (exp(y - most) / sum - (i == t[r])) * slope(y, cap));
      }
    }
    T *out = over ? reinterpret_cast<T *>(x.at()) : d.at(), *no = nullptr;
    const float *const weights = weighted ? w.at() : nullptr;
    call("loss_" + type, grid(rows), THREADS, x.at(), targets.at(), weights, loss.at(), no, columns, 0.0f, cap);
    check::close("losses alone", loss, want, 1e-5);
    call("loss_" + type, grid(rows), THREADS, x.at(), targets.at(), weights, loss.at(), out, columns, scale, cap);
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
TEST(limited_losses) { losses<float>("f32", true, false, 6.0f); }
TEST(limited_losses_in_bf16) { losses<bf16>("bf16", false, true, 6.0f); }

TEST(large_logits_stay_finite) {
  host::Buffer<float> x(std::vector<float>{1e30f, 0, -1e30f, 5}), loss(2);
  host::Buffer<uint32_t> t(std::vector<uint32_t>{0, 1});
  LAUNCH(loss_f32, {2}, 0, x.at(), t.at(), nullptr, loss.at(), nullptr, 2, 0.0f, 0.0f);
  check::close("losses", loss, {0, 0}, 0);
}

TEST(what_is_no_number_gives_none) {
  host::Buffer<float> x(std::vector<float>{0, NAN, INFINITY, 0, 0, 0}), loss(3);
  host::Buffer<uint32_t> t(std::vector<uint32_t>{0, 1, 2});
  LAUNCH(loss_f32, {3}, 0, x.at(), t.at(), nullptr, loss.at(), nullptr, 2, 0.0f, 0.0f);
  for (size_t i = 0; i < 3; i++)
    if (loss[i] == loss[i]) check::wrong("a number");
}

template <typename T>
static void distillation(const std::string &type, bool over, bool weighted, float temperature, float cap = 0) {
  unsigned seed = 1;
  const float scale = 0.25f, alpha = 0.7f;
  const std::vector<std::tuple<size_t, uint32_t, uint32_t>> sizes = {
      {3, 4096, 64}, {2, 7, 7}, {1, 2, 1}, {2, 5001, 512}, {2, 1540, 3}};
  for (auto [rows, columns, kept] : sizes) {
    host::Buffer<float> x(check::randn<float>(rows * columns, seed++, 5)), loss(rows), divergence(rows);
    host::Buffer<T> d(rows * columns);
    host::Buffer<float> w(std::vector<float>{0.5f, -2.0f, 0.0f});
    std::vector<uint32_t> t, i;
    std::vector<float> p;
    for (size_t r = 0; r < rows; r++) {
      t.push_back(static_cast<uint32_t>(r * 7919 % columns));
      double sum = 0;
      for (uint32_t k = 0; k < kept; k++) {
        i.push_back(static_cast<uint32_t>((t[r] + k * (columns / kept)) % columns)); // the target first
        p.push_back(kept > 1 && k == kept - 1 ? 0.0f : 1.0f / (1 + k));              // the last place is empty
        sum += p.back();
      }
      for (uint32_t k = 0; k < kept; k++) p[r * kept + k] = static_cast<float>(p[r * kept + k] / sum);
      if (kept > 1) i.back() = 4000000000u;
    }
    host::Buffer<uint32_t> targets(t), ids(i);
    host::Buffer<float> probs(p);
    const std::vector<double> xs = limited(values(x), cap);
    std::vector<double> want, apart, grad;
    for (size_t r = 0; r < rows; r++) {
      const double *row = &xs[r * columns];
      double most = -INFINITY, sum = 0, soft = 0, kd = 0;
      for (size_t c = 0; c < columns; c++) most = std::max(most, row[c]);
      for (size_t c = 0; c < columns; c++) sum += exp(row[c] - most), soft += exp((row[c] - most) / temperature);
      want.push_back(most + log(sum) - row[t[r]]);
      const double factor = scale * (weighted ? w[r] : 1.0f);
      const size_t from = grad.size();
      for (size_t c = 0; c < columns; c++)
        grad.push_back(factor * ((1 - alpha) * (exp(row[c] - most) / sum - (c == t[r])) +
                                 alpha * temperature * exp((row[c] - most) / temperature) / soft));
      for (uint32_t k = 0; k < kept; k++) {
        const double q = p[r * kept + k];
        if (q == 0) continue;
        const uint32_t id = i[r * kept + k];
        kd += q * (log(q) - (row[id] - most) / temperature + log(soft));
        grad[from + id] -= factor * alpha * temperature * q;
      }
      for (size_t c = 0; c < columns; c++) grad[from + c] *= slope(row[c], cap);
      apart.push_back(temperature * temperature * kd);
    }
    T *out = over ? reinterpret_cast<T *>(x.at()) : d.at(), *no = nullptr;
    const float *const weights = weighted ? w.at() : nullptr;
    call("loss_distill_" + type, grid(rows), THREADS, x.at(), targets.at(), ids.at(), probs.at(), weights, loss.at(),
         divergence.at(), no, columns, kept, temperature, 0.0f, 0.0f, cap);
    check::close("losses alone", loss, want, 1e-5);
    check::close("divergences alone", divergence, apart, 1e-5);
    call("loss_distill_" + type, grid(rows), THREADS, x.at(), targets.at(), ids.at(), probs.at(), weights, loss.at(),
         divergence.at(), out, columns, kept, temperature, scale * (1 - alpha), scale * alpha * temperature, cap);
    check::close("losses", loss, want, 1e-5);
    check::close("divergences", divergence, apart, 1e-5);
    if (over) check::close("gradient over the logits", x, grad, 1e-5);
    else check::close("gradient", d, grad, check::BAR<T>);
  }
}

TEST(distillation_in_place) { distillation<float>("f32", true, false, 2.0f); }
TEST(distillation_beside) { distillation<float>("f32", false, true, 1.0f); }
TEST(distillation_in_bf16) { distillation<bf16>("bf16", false, true, 2.0f); }
TEST(distillation_in_f16) { distillation<f16>("f16", false, false, 0.5f); }
TEST(limited_distillation) { distillation<float>("f32", true, true, 2.0f, 6.0f); }

TEST(a_kept_token_outside_the_columns_gives_none) {
  host::Buffer<float> x(std::vector<float>{0, 1}), p(std::vector<float>{1}), loss(1), divergence(1);
  host::Buffer<uint32_t> t(std::vector<uint32_t>{0}), i(std::vector<uint32_t>{2});
  float *no = nullptr;
  call("loss_distill_f32", grid(1), THREADS, x.at(), t.at(), i.at(), p.at(), static_cast<const float *>(nullptr),
       loss.at(), divergence.at(), no, 2u, 1u, 1.0f, 0.0f, 0.0f, 0.0f);
  if (divergence[0] == divergence[0] || loss[0] != loss[0]) check::wrong("a number, or no loss");
}
