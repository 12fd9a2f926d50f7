// act(gate) * up and gradients compared with float64: the activations, gate and up apart, in halves of a row and in
// turn, aligned values, tails, unaligned starts.
#include "../../crates/ft-kernels/src/layers/swiglu/swiglu.cu"
#include "call.h"

struct Act {
  uint32_t kind;
  float alpha, limit;
  // Output, and derivatives by gate and up.
  std::array<double, 3> of(double g, double u) const {
    const auto logistic = [](double x) { return 1 / (1 + exp(-x)); };
    if (kind == 1) {
      const double k = sqrt(2 / M_PI), t = tanh(k * (g + 0.044715 * g * g * g));
      const double d = 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * k * (1 + 3 * 0.044715 * g * g);
      return {0.5 * g * (1 + t) * u, u * d, 0.5 * g * (1 + t)};
    }
    if (kind == 2) {
      const double gc = std::min<double>(g, limit), uc = std::max<double>(-limit, std::min<double>(u, limit)),
                   s = logistic(alpha * gc);
      return {(uc + 1) * gc * s, g > limit ? 0 : (uc + 1) * s * (1 + alpha * gc * (1 - s)),
              std::abs(u) > limit ? 0 : gc * s};
    }
    const double s = logistic(g);
    if (kind == 3) return {s * u, u * s * (1 - s), s};
    return {g * s * u, u * s * (1 + g * (1 - s)), g * s};
  }
};
static const Act SILU = {0, 0, 0}, GELU = {1, 0, 0}, CLAMPED = {2, 1.702f, 1.5f}, SIGMOID = {3, 0, 0};

template <typename T> static void apart(const std::string &type, Act act) {
  unsigned seed = 1;
  struct Rows {
    uint32_t rows, width, room;
    size_t skew;
  };
  for (auto [rows, width, room, skew] : std::vector<Rows>{{2, 2048, 0, 0},
                                                          {1, 3, 0, 0},
                                                          {1, 2050, 0, 0},
                                                          {3, 777, 0, 1},
                                                          {2, 2500, 0, 3},
                                                          {3, 96, 16, 0},
                                                          {2, 40, 3, 0}}) {
    const size_t n = static_cast<size_t>(rows) * width;
    const uint32_t stride = width + room;
    host::Buffer<T> g(check::randn<T>(n, seed++, 3), skew), u(check::randn<T>(n, seed++), skew),
        dy(check::randn<T>(n, seed++), skew), y(static_cast<size_t>(rows) * stride, skew), dg(y.size(), skew),
        du(n, skew), h(n, skew);
    const std::vector<double> gs = values(g), us = values(u), ds = values(dy);
    std::vector<double> want(n), wg(n), wu(n);
    for (size_t i = 0; i < n; i++) {
      const auto [value, of_gate, of_up] = act.of(gs[i], us[i]);
      want[i] = value, wg[i] = ds[i] * of_gate, wu[i] = ds[i] * of_up;
    }
    const size_t each = VECTOR<T> * THREADS;
    const Dim blocks = grid(rows, (width + each - 1) / each);
    T *no = nullptr;
    call("swiglu_forward_" + type, blocks, THREADS, g.at(), u.at(), y.at(), width, stride, width, 1u, 0u, act.kind,
         act.alpha, act.limit);
    check::close("y", compact(y, width, stride), want, check::BAR<T>);
    const auto backward = [&](T *dy, T *dg, T *du, T *h, uint32_t of_gate, uint32_t of_up) {
      call("swiglu_backward_" + type, blocks, THREADS, g.at(), u.at(), dy, dg, du, h, width, of_gate, of_up, width, 1u,
           0u, act.kind, act.alpha, act.limit);
    };
    for (bool again : {false, true}) {
      backward(dy.at(), dg.at(), du.at(), again ? h.at() : no, stride, width);
      check::close("dgate", compact(dg, width, stride), wg, check::BAR<T>), check::close("dup", du, wu, check::BAR<T>);
    }
    check::close("h", h, want, check::BAR<T>);
    // in place over dy, and with padded rows of dup
    backward(dy.at(), du.at(), dg.at(), dy.at(), width, stride);
    check::close("dgate", du, wg, check::BAR<T>), check::close("dup", compact(dg, width, stride), wu, check::BAR<T>),
        check::close("h", dy, want, check::BAR<T>);
  }
}

// Rows of gate and up: halves, or values in turn.
template <typename T> static void joint(const std::string &type, Act act) {
  unsigned seed = 100;
  struct Rows {
    uint32_t rows, width;
    size_t skew;
  };
  for (auto [rows, width, skew] : std::vector<Rows>{{2, 2048, 0}, {3, 33, 0}, {2, 40, 1}})
    for (bool in_turn : {false, true}) {
      const size_t n = static_cast<size_t>(rows) * width;
      const uint32_t step = in_turn ? 2 : 1, beside = in_turn ? 1 : width;
      host::Buffer<T> x(check::randn<T>(2 * n, seed++, 2), skew), dy(check::randn<T>(n, seed++), skew), y(n, skew),
          dx(2 * n, skew), h(n, skew);
      const std::vector<double> xs = values(x), ds = values(dy);
      std::vector<double> want(n), wx(2 * n);
      for (size_t i = 0; i < n; i++) {
        const size_t at = i / width * 2 * width + i % width * step;
        const auto [value, of_gate, of_up] = act.of(xs[at], xs[at + beside]);
        want[i] = value, wx[at] = ds[i] * of_gate, wx[at + beside] = ds[i] * of_up;
      }
      const size_t each = VECTOR<T> * THREADS;
      const Dim blocks = grid(rows, (width + each - 1) / each);
      T *no = nullptr;
      call("swiglu_forward_" + type, blocks, THREADS, x.at(), no, y.at(), width, width, 2 * width, step, beside,
           act.kind, act.alpha, act.limit);
      check::close("y", y, want, check::BAR<T>);
      call("swiglu_backward_" + type, blocks, THREADS, x.at(), no, dy.at(), dx.at(), no, h.at(), width, 2 * width, 0u,
           2 * width, step, beside, act.kind, act.alpha, act.limit);
      check::close("dx", dx, wx, check::BAR<T>), check::close("h", h, want, check::BAR<T>);
    }
}

// Rows times a factor each: gradients, and those of the factors. Gate and up apart, or in one row of both.
template <typename T> static void weighted(const std::string &type, Act act) {
  unsigned seed = 200;
  struct Rows {
    uint32_t rows, width;
    bool joint;
    size_t skew;
  };
  for (auto [rows, width, joint, skew] : std::vector<Rows>{
           {3, 768, false, 0}, {2, 2560, false, 0}, {5, 33, false, 1}, {3, 40, true, 0}, {2, 2100, true, 0}}) {
    const size_t n = static_cast<size_t>(rows) * width;
    const uint32_t of_input = joint ? 2 * width : width;
    host::Buffer<T> gate(check::randn<T>(static_cast<size_t>(rows) * of_input, seed++, 2), skew),
        up(check::randn<T>(n, seed++), skew), dy(check::randn<T>(n, seed++), skew), dgate(gate.size(), skew),
        dup(n, skew);
    const std::vector<double> gs = values(gate), us = values(up), ds = values(dy);
    std::vector<uint32_t> order(rows);
    for (uint32_t r = 0; r < rows; r++) order[r] = (r + 1) % rows;
    host::Buffer<uint32_t> pair(order);
    host::Buffer<float> factors(check::randn<float>(rows, seed++)), dfactors(rows);
    std::vector<double> wg(gate.size()), wu(n), wf(rows);
    for (size_t i = 0; i < n; i++) {
      const uint32_t own = order[i / width];
      const size_t at = i / width * of_input + i % width;
      const auto [value, of_gate, of_up] = act.of(gs[at], joint ? gs[at + width] : us[i]);
      wg[at] = factors[own] * ds[i] * of_gate, (joint ? wg[at + width] : wu[i]) = factors[own] * ds[i] * of_up,
      wf[own] += ds[i] * value;
    }
    T *no = nullptr;
    const uint32_t threads = std::min<uint32_t>(THREADS, (width + VECTOR<T> * WARP - 1) / (VECTOR<T> * WARP) * WARP);
    call("swiglu_weighted_" + type, grid(rows), threads, gate.at(), joint ? no : up.at(), dy.at(), pair.at(),
         factors.at(), dgate.at(), joint ? no : dup.at(), dfactors.at(), width, of_input, 1u, joint ? width : 0u,
         act.kind, act.alpha, act.limit);
    check::close("dgate", dgate, wg, check::BAR<T>);
    if (!joint) check::close("dup", dup, wu, check::BAR<T>);
    check::close("dfactors", dfactors, wf, 2 * check::BAR<T>);
  }
}

template <typename T> static void all(const std::string &type) {
  for (Act act : {SILU, GELU, CLAMPED, SIGMOID}) apart<T>(type, act), joint<T>(type, act);
  for (Act act : {SILU, GELU, CLAMPED}) weighted<T>(type, act); // experts have no sigmoid
}

TEST(swiglu_in_f32) { all<float>("f32"); }
TEST(swiglu_in_bf16) { all<bf16>("bf16"); }
TEST(swiglu_in_f16) { all<f16>("f16"); }

// The gradient of an open gate is small, not 0: the sigmoid is not rounded before its slope.
TEST(open_gates_have_gradients) {
  const std::vector<bf16> one = {Number<bf16>::from(1)};
  host::Buffer<bf16> g(std::vector<bf16>{Number<bf16>::from(8)}), u(one), dy(one), dg(1), du(1);
  bf16 *no = nullptr;
  call("swiglu_backward_bf16", grid(1), THREADS, g.at(), u.at(), dy.at(), dg.at(), du.at(), no, 1u, 1u, 1u, 1u, 1u, 0u,
       SIGMOID.kind, 0.0f, 0.0f);
  check::close("dgate", dg, {exp(-8) / ((1 + exp(-8)) * (1 + exp(-8)))}, check::BAR<bf16>);
}

// silu is 0, not NaN, if e^-x overflows; so is gelu.
TEST(large_gates_stay_numbers) {
  host::Buffer<float> g(std::vector<float>{-200, 200, 0, -1e9f}), u(std::vector<float>{1, 1, 1, 1}), y(4);
  for (uint32_t kind : {0u, 1u}) {
    call("swiglu_forward_f32", grid(1), THREADS, g.at(), u.at(), y.at(), 4u, 4u, 4u, 1u, 0u, kind, 0.0f, 0.0f);
    check::close("y", y, {0, 200, 0, 0}, 1e-6);
  }
}
