// silu(gate) * up and gradients compared with float64: aligned values, tails, unaligned starts.
#include "../../crates/ft-kernels/src/layers/swiglu/swiglu.cu"
#include "call.h"

template <typename T> static void swiglu(const std::string &type) {
  unsigned seed = 1;
  struct Rows { uint32_t rows, width, room; size_t skew; };
  for (auto [rows, width, room, skew] : std::vector<Rows>{{2, 2048, 0, 0}, {1, 1, 0, 0}, {1, 2050, 0, 0}, {3, 777, 0, 1}, {2, 2500, 0, 3}, {3, 96, 16, 0}, {2, 40, 3, 0}}) {
    const size_t n = static_cast<size_t>(rows) * width;
    const uint32_t apart = width + room;
    host::Buffer<T> g(check::randn<T>(n, seed++, 3), skew), u(check::randn<T>(n, seed++), skew), dy(check::randn<T>(n, seed++), skew),
        y(static_cast<size_t>(rows) * apart, skew), dg(y.size(), skew), du(n, skew), h(n, skew);
    const std::vector<double> gs = values(g), us = values(u), ds = values(dy);
    std::vector<double> want(n), wg(n), wu(n);
    for (size_t i = 0; i < n; i++) {
      const double s = 1 / (1 + exp(-gs[i]));
      want[i] = gs[i] * s * us[i], wu[i] = ds[i] * gs[i] * s, wg[i] = ds[i] * us[i] * s * (1 + gs[i] * (1 - s));
    }
    const size_t each = VECTOR<T> * THREADS;
    const Dim blocks = grid(rows, (width + each - 1) / each);
    T *no = nullptr;
    call("swiglu_forward_" + type, blocks, THREADS, g.at(), u.at(), y.at(), width, apart);
    check::close("y", compact(y, width, apart), want, check::BAR<T>);
    for (bool again : {false, true}) {
      call("swiglu_backward_" + type, blocks, THREADS, g.at(), u.at(), dy.at(), dg.at(), du.at(), again ? h.at() : no, width, apart, width);
      check::close("dgate", compact(dg, width, apart), wg, check::BAR<T>), check::close("dup", du, wu, check::BAR<T>);
    }
    check::close("h", h, want, check::BAR<T>);
    // in place over dy, and with padded rows of dup
    call("swiglu_backward_" + type, blocks, THREADS, g.at(), u.at(), dy.at(), du.at(), dg.at(), dy.at(), width, width, apart);
    check::close("dgate", du, wg, check::BAR<T>), check::close("dup", compact(dg, width, apart), wu, check::BAR<T>), check::close("h", dy, want, check::BAR<T>);
  }
}

TEST(swiglu_in_f32) { swiglu<float>("f32"); }
TEST(swiglu_in_bf16) { swiglu<bf16>("bf16"); }
TEST(swiglu_in_f16) { swiglu<f16>("f16"); }

// silu is 0, not NaN, if e^-x overflows.
TEST(large_gates_stay_numbers) {
  host::Buffer<float> g(std::vector<float>{-200, 200, 0, -1e30f}), u(std::vector<float>{1, 1, 1, 1}), y(4);
  LAUNCH(swiglu_forward_f32, {1}, 0, g.at(), u.at(), y.at(), 4, 4);
  check::close("y", y, {0, 200, 0, 0}, 1e-6);
}
