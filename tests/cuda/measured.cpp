// Access costs of row-wise and elementwise kernels, at sizes without tails. Runs where accesses are counted, and with
// the other instrumentation each night.
#include "../../crates/ft-kernels/src/cuda/device.cuh"
#include "../../crates/ft-kernels/src/cuda/rows.cuh"
#include "../../crates/ft-kernels/src/adapters/dropout/stream.cuh"
#include "../../crates/ft-kernels/src/quantized/codes.cuh"
#include "call.h"

namespace add {
#include "../../crates/ft-kernels/src/arithmetic/add/add.cu"
}
namespace bias {
#include "../../crates/ft-kernels/src/layers/bias/bias.cu"
}
namespace columns {
#include "../../crates/ft-kernels/src/matmul/columns.cu"
}
namespace dora {
#include "../../crates/ft-kernels/src/adapters/dora/dora.cu"
}
namespace dropout {
#include "../../crates/ft-kernels/src/adapters/dropout/dropout.cu"
}
namespace embed {
#include "../../crates/ft-kernels/src/layers/embed/embed.cu"
}
namespace loss {
#include "../../crates/ft-kernels/src/layers/loss/loss.cu"
}
namespace norm {
#include "../../crates/ft-kernels/src/layers/norm/norm.cu"
}
namespace optimizer {
#include "../../crates/ft-kernels/src/optimizer/optimizer.cu"
}
namespace quantized {
#include "../../crates/ft-kernels/src/quantized/dequantize.cu"
#include "../../crates/ft-kernels/src/quantized/rows.cu"
} // namespace quantized
namespace rope {
#include "../../crates/ft-kernels/src/layers/rope/rope.cu"
}
namespace spread {
#include "../../crates/ft-kernels/src/experts/spread/spread.cu"
}
namespace swiglu {
#include "../../crates/ft-kernels/src/layers/swiglu/swiglu.cu"
}

constexpr uint32_t R = 16, D = 1024; // rows, and values per row

template <typename T> static void measure(const std::string &type) {
  const size_t n = R * D;
  const uint64_t rows = R, width = D, count = n;
  const unsigned each = 256 * VECTOR<T>;
  host::Buffer<T> a(check::randn<T>(n, 1)), b(check::randn<T>(n, 2)), c(check::randn<T>(n, 3)), d(n), e(n), f(n),
      w(check::randn<T>(D, 4));
  host::Buffer<float> x(check::randn<float>(n, 5)), y(check::randn<float>(n, 6)), z(check::randn<float>(n, 7)),
      g(check::randn<float>(D, 8)), one(R), two(R), part(R * D);
  host::Buffer<uint32_t> list(std::vector<uint32_t>{7, 0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15}),
      starts(std::vector<uint32_t>{0, 1, 3, 5, 16});
  uint32_t *all = nullptr;
  float *none = nullptr;

  call("norm_forward_" + type, grid(R / 8), D / 2 / VECTOR<T>, a.at(), b.at(), w.at(), d.at(), e.at(), R, D, D, 8u,
       1e-5f, 0.0f);
  call("norm_backward_" + type, grid(R / 8), D / 2 / VECTOR<T>, a.at(), w.at(), b.at(), c.at(), d.at(), none, R, D, D,
       D, 8u, 1e-5f, 0.0f);
  call("norm_backward_weight_" + type, grid(R / 8), D / 2 / VECTOR<T>, a.at(), w.at(), b.at(), c.at(), d.at(),
       part.at(), R, D, D, D, 8u, 1e-5f, 0.0f);
  call("swiglu_forward_" + type, grid(R, D / each ? D / each : 1), 256 < D / VECTOR<T> ? 256 : D / VECTOR<T>, a.at(),
       b.at(), d.at(), D, D, D, 1u, 0u, 0u, 0.0f, 0.0f);
  call("swiglu_backward_" + type, grid(R, D / each ? D / each : 1), 256 < D / VECTOR<T> ? 256 : D / VECTOR<T>, a.at(),
       b.at(), c.at(), d.at(), e.at(), f.at(), D, D, D, D, 1u, 0u, 0u, 0.0f, 0.0f);
  call("swiglu_weighted_" + type, grid(R), 256 < D / VECTOR<T> ? 256 : D / VECTOR<T>, a.at(), b.at(), c.at(), list.at(),
       x.at(), d.at(), e.at(), one.at(), D, D, 1u, 0u, 0u, 0.0f, 0.0f);
  call("loss_" + type, grid(4), 512, x.at(), list.at(), all, one.at(), d.at(), 4 * D, 0.5f, 0.0f);
  host::Buffer<float> kept(std::vector<float>(16, 0.25f));
  call("loss_distill_" + type, grid(4), 512, x.at(), list.at(), list.at(), kept.at(), all, one.at(), two.at(), d.at(),
       4 * D, 4u, 2.0f, 0.25f, 0.5f, 0.0f);
  call("dropout_" + type, grid(R, D / each ? D / each : 1), 256, a.at(), b.at(), all, d.at(), D, D, count, 1.25f, 1u,
       2u, 3u, 4u, 5000000u, 0u, D);
  call("embed_rows_" + type, grid(R), 128, a.at(), list.at(), d.at(), R, D);
  call("embed_gradient_" + type, grid(4), 128, z.at(), list.at(), starts.at(), list.at(), b.at(), D, 0.5f);
  call("optimizer_adamw_" + type, grid(n / 1024), 256, x.at(), y.at(), z.at(), part.at(), d.at(), count, 1.0f, 0.1f,
       0.99f, 0.01f, 1.0f, 1e-3f, 1.0f, 1e-8f);
  // heads of 128 channels
  host::Buffer<float> cos(check::randn<float>(R * 64, 9)), sin(check::randn<float>(R * 64, 10)), partial(2 * 4 * 128);
  call("rope_forward_" + type, grid(R / 4, 2), 128, a.at(), b.at(), w.at(), w.at(), cos.at(), sin.at(), d.at(), e.at(),
       R, 8u, 8u, 64u, 64u, 16u, 1.0f, 1e-5f, 1e-5f, D, D, 0.0f);
  call("rope_backward_" + type, grid(R / 4, 2), 128, a.at(), b.at(), w.at(), w.at(), cos.at(), sin.at(), c.at(), a.at(),
       d.at(), e.at(), partial.at(), R, 8u, 8u, 64u, 64u, 16u, 4u, 1e-5f, 1e-5f, D, D, 0.0f);

  // scatter rows
  call("spread_" + type, grid(R), 256, list.at(), a.at(), rows, width, d.at());
  std::vector<double> want(n), as = values(a), bs = values(b), cs = values(c), ws = values(w), gs = values(g);
  for (size_t i = 0; i < n; i++) want[list[i / D] * D + i % D] = as[i];
  check::close("spread", d, want, 0);
  // columns 16 to 32 of one matrix to columns 32 to 48 of another
  for (size_t i = 0; i < R; i++)
    for (size_t c = 0; c < 16; c++) want[i * D + 32 + c] = as[i * D + 16 + c];
  call("columns_" + type, grid(1), 256, a.at() + 16, D, d.at() + 32, D, R, 16u);
  check::close("columns", d, want, 0);
  // a sum of two tensors
  for (size_t i = 0; i < n; i++) want[i] = as[i] + bs[i];
  call("add_" + type, grid(n * sizeof(T) / 4096), 256, a.at(), b.at(), d.at(), count);
  check::close("a sum", d, want, check::BAR<T>);
  // a bias and its gradient
  for (size_t i = 0; i < n; i++) want[i] = cs[i] + ws[i % D];
  call("bias_add_" + type, grid(R), 256, w.at(), rows, width, c.at());
  check::close("bias", c, want, check::BAR<T>);
  std::vector<double> sums = gs;
  for (size_t i = 0; i < n; i++) sums[i % D] += as[i];
  call("bias_sum_" + type, grid(D / 32), 256, a.at(), rows, width, g.at(), 1u);
  check::close("gradient of a bias", g, sums, 1e-5);
  // DoRA kernels
  const std::vector<double> fs = values(g), cs2 = values(c);
  for (size_t i = 0; i < n; i++) want[i] = 0.5 * (fs[i % D] + 1.0) * as[i] + bs[i] - 0.5 * cs2[i];
  call("dora_scale_" + type, grid(R), 256, a.at(), g.at(), 1.0f, 0.5f, b.at(), c.at(), rows, width, d.at());
  check::close("dora", d, want, check::BAR<T>);
  host::Buffer<float> inverse(check::randn<float>(D, 11)), dm(std::vector<float>(D, 1.0f));
  std::vector<double> dms(D, 1.0), is = values(inverse);
  for (size_t i = 0; i < n; i++) dms[i % D] += is[i % D] * as[i] * bs[i];
  call("dora_sum_" + type, grid(D / 32), 256, a.at(), b.at(), inverse.at(), rows, width, dm.at(), 1u);
  check::close("gradient of a magnitude", dm, dms, 1e-5);
  for (double &v : dms) v -= 1.0;
  call("dora_sum_" + type, grid(D / 32), 256, a.at(), b.at(), inverse.at(), rows, width, dm.at(), 0u);
  check::close("the first gradient of a magnitude", dm, dms, 1e-5);
  // 32 rows of rank 32: w.(BA) = times . b, |BA|^2 = b^T gram b
  host::Buffer<float> squares(std::vector<float>(32, 5000.0f)), gram(32 * 32), magnitude(check::randn<float>(32, 12)),
      first(32), second(32);
  for (uint32_t i = 0; i < 32 * 32; i++) gram[i] = i / 32 == i % 32 ? 2.0f : 0.125f;
  call("dora_norms_" + type, grid(4), 256, a.at(), b.at(), gram.at(), squares.at(), magnitude.at(), 0.5f, uint64_t(32),
       32u, first.at(), second.at());
  std::vector<double> norms;
  for (uint32_t r = 0; r < 32; r++) {
    double s = 5000;
    for (uint32_t i = 0; i < 32; i++) {
      s += as[r * 32 + i] * bs[r * 32 + i];
      for (uint32_t k = 0; k < 32; k++) s += 0.25 * bs[r * 32 + i] * bs[r * 32 + k] * gram[i * 32 + k];
    }
    norms.push_back(1 / sqrt(s));
  }
  check::close("inverse norms", second, norms, 1e-5);
}

TEST(measured_in_f32) { measure<float>("f32"); }
TEST(measured_in_bf16) { measure<bf16>("bf16"); }
TEST(measured_in_f16) { measure<f16>("f16"); }

TEST(measured_sums) {
  host::Buffer<float> x(check::randn<float>(8192, 5));
  host::Buffer<double> partial(8), many(std::vector<double>(512, 1.0)), sum(1);
  call("optimizer_squares_f32", grid(8), 256, x.at(), static_cast<uint64_t>(8192), partial.at());
  call("optimizer_total", grid(1), 256, many.at(), 512u, sum.at());
  if (sum[0] != 512.0) check::wrong("a sum");
}

// Dequantization with double quantization: necessary bytes relative to bytes of touched sectors, i.e. the
// achievable fraction of copy bandwidth.
TEST(bytes_of_nested_codes) {
  const uint64_t rows = 512, cols = 1024, total = rows * cols, blocks = total / 64;
  std::mt19937 random(1);
  std::vector<uint8_t> some(total / 2), numbers(blocks);
  for (uint8_t &x : some) x = static_cast<uint8_t>(random());
  for (uint8_t &x : numbers) x = static_cast<uint8_t>(random());
  host::Buffer<uint8_t> codes(some), scale_codes(numbers);
  host::Buffer<float> pairs(check::randn<float>(512, 1)), absmax(check::randn<float>(blocks / 256, 2)),
      map(check::randn<float>(256, 3));
  host::Buffer<bf16> out(total), x(check::randn<bf16>(8 * cols, 4)), y(8 * rows);
  const bf16 *none = nullptr;
  const auto share = [&](const std::string &name, double needed, double least) {
    const auto found = host::counts().find(name);
    if (found == host::counts().end() || found->second.sectors == 0) return; // built without access callbacks
    const double moved = 32.0 * static_cast<double>(found->second.sectors);
    printf("%s: %.1f%% of what moves is needed\n", name.c_str(), 100 * needed / moved);
    if (!(needed >= least * moved)) check::wrong(name + ": " + std::to_string(needed / moved));
    if (static_cast<double>(found->second.passes) > 1.02 * static_cast<double>(found->second.phases))
      check::wrong(name + ": bank conflicts");
  };
  const double matrix = total / 2.0 + blocks + blocks / 64.0;
  host::forget();
  call("dequantize_f32_bf16", grid(rows / 8), 256, codes.at(), pairs.at(), absmax.at(), scale_codes.at(), map.at(),
       256u, 0.25f, 6u, total, uint64_t(0), total, total, 1u, uint32_t(rows), total, none, 0u, 0u, uint64_t(0),
       uint64_t(0), out.at());
  share("dequantize_f32_bf16", matrix + 2.0 * total, 0.85);
  for (uint64_t i = 0; i < total; i++) {
    const uint64_t block = i / 64;
    const float w = pairs[2 * (i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4) + 1] *
                    (map[scale_codes[block]] * absmax[block / 256] + 0.25f);
    if (Number<bf16>::widen(out[i]) != rounded<bf16>(w)) check::wrong("value " + std::to_string(i));
  }
}

// Codes of 64 x 1024 values in blocks of 64.
TEST(measured_codes) {
  const uint64_t rows = 64, cols = 1024, total = rows * cols;
  host::Buffer<uint8_t> codes(std::vector<uint8_t>(total / 2, 0x5a));
  host::Buffer<float> pairs(check::randn<float>(512, 1)), scales(check::randn<float>(total / 64, 2));
  uint8_t *none = nullptr;
  float *map = nullptr;
  const auto each = [&](const std::string &source, const std::string &type, auto kind) {
    using T = decltype(kind);
    host::Buffer<T> x(check::randn<T>(8 * cols, 3)), y(8 * rows);
    // with an adapter of rank 16 to the right
    const uint64_t apart = cols + 16;
    host::Buffer<T> b(check::randn<T>(rows * 16, 4)), out(rows * apart);
    call("dequantize_" + source + "_" + type, grid(rows / 8 + 1), 256, codes.at(), pairs.at(), scales.at(), none, map,
         1u, 0.0f, 6u, total, uint64_t(0), cols, cols, uint32_t(rows), 1u, apart, b.at(), uint32_t(rows), 16u,
         uint64_t(16), cols, out.at());
    for (uint32_t tokens : {1u, 8u}) {
      for (uint32_t i = 0; i < 8 * rows; i++) y[i] = Number<T>::from(0.0f);
      call("rows_" + source + "_" + type + "_" + std::to_string(tokens), grid(rows / (tokens == 1 ? 4 : 2)), 128,
           codes.at(), pairs.at(), scales.at(), none, map, 1u, 0.0f, 6u, total, x.at(), tokens, rows, cols, y.at());
      std::vector<double> want(8 * rows);
      for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t r = 0; r < rows; r++) {
          double sum = 0;
          for (uint32_t c = 0; c < cols; c++) {
            const float w = pairs[2 * (c % 2 ? 10 : 5) + 1] * scales[(r * cols + c) / 64];
            sum +=
                Number<T>::widen(x[t * cols + c]) * static_cast<double>(rounded<T>(source == "bf16"  ? rounded<bf16>(w)
                                                                                   : source == "f16" ? rounded<f16>(w)
                                                                                                     : w));
          }
          want[t * rows + r] = sum;
        }
      check::close("rows", y, want, check::BAR<T>);
    }
  };
  for (const char *source : {"f32", "bf16", "f16"}) each(source, "f32", 0.0f);
  for (const char *source : {"f32", "f16"}) each(source, "bf16", bf16{});
  for (const char *source : {"f32", "bf16"}) each(source, "f16", f16{});
}
