// AdamW and its copy against float64, whole vectors, tails and buffers that begin at none; sums of squares that f32 does
// not hold.
#include "../../src/kernel/optimizer/optimizer.cu"
#include "call.h"

template <typename T> static void update(const std::string &type, bool with) {
  unsigned seed = 1;
  for (auto [n, skew] : std::vector<std::pair<size_t, size_t>>{{4096, 0}, {1, 0}, {2050, 0}, {777, 1}}) {
    std::vector<float> squares = check::randn<float>(n, seed++);
    for (float &v : squares) v *= v;
    host::Buffer<float> p(check::randn<float>(n, seed++), skew), m(check::randn<float>(n, seed++), skew), v(squares, skew), g(check::randn<float>(n, seed++), skew);
    host::Buffer<T> copy(n, skew);
    std::vector<double> ps = values(p), ms = values(m), vs = values(v), gs = values(g);
    const double b1 = 0.9, b2 = 0.99, lr = 1e-2, wd = 0.1, eps = 1e-8, t = 3, scale = 0.5;
    for (size_t i = 0; i < n; i++) {
      const double grad = gs[i] * scale;
      ms[i] += (grad - ms[i]) * (1 - b1), vs[i] = vs[i] * b2 + (1 - b2) * grad * grad;
      ps[i] -= lr * wd * ps[i] + lr / (1 - pow(b1, t)) * ms[i] / (sqrt(vs[i] / (1 - pow(b2, t))) + eps);
    }
    const size_t each = 4 * THREADS;
    const uint64_t count = n;
    T *no = nullptr;
    call("optimizer_adamw_" + type, grid((n + each - 1) / each), THREADS, p.at(), m.at(), v.at(), g.at(), with ? copy.at() : no, count, float(scale),
         float(1 - b1), float(b2), float(1 - b2), float(1 - lr * wd), float(lr / (1 - pow(b1, t))), float(sqrt(1 - pow(b2, t))), float(eps));
    check::close("p", p, ps, 1e-6), check::close("m", m, ms, 1e-6), check::close("v", v, vs, 1e-6);
    for (size_t i = 0; i < n; i++)
      if (g[i] != 0.0f) check::wrong("the gradient is not zero");
    for (size_t i = 0; with && i < n; i++)
      if (Number<T>::widen(copy[i]) != rounded<T>(p[i])) check::wrong("the copy is not the rounded weight");
  }
}

TEST(updates_in_f32) { update<float>("f32", false); }
TEST(updates_with_a_copy_in_bf16) { update<bf16>("bf16", true); }
TEST(updates_with_a_copy_in_f16) { update<f16>("f16", true); }

TEST(sums_of_squares) {
  for (auto [n, skew, blocks, scale] : std::vector<std::tuple<size_t, size_t, size_t, float>>{{9001, 0, 3, 1}, {5, 1, 1, 1e25f}, {2000, 3, 2, 1e-25f}}) {
    host::Buffer<float> x(check::randn<float>(n, 5, scale), skew);
    host::Buffer<double> partial(blocks), sum(1);
    call("optimizer_squares_f32", grid(blocks), THREADS, x.at(), static_cast<uint64_t>(n), partial.at());
    call("optimizer_total", grid(1), THREADS, partial.at(), static_cast<uint32_t>(blocks), sum.at());
    double want = 0;
    for (double v : values(x)) want += v * v;
    if (!(std::abs(sum[0] - want) <= 1e-12 * want)) check::wrong("the sum of squares");
  }
}
