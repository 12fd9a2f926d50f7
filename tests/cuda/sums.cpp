// Casts, sums of tensors, and sums of ranks' parts: exact.
#include "../../crates/ft-kernels/src/cuda/device.cuh"
#include "../../crates/ft-kernels/src/cuda/rows.cuh"
#include "call.h"

namespace add {
#include "../../crates/ft-kernels/src/arithmetic/add/add.cu"
}
namespace cast {
#include "../../crates/ft-kernels/src/arithmetic/cast/cast.cu"
}
namespace sum {
#include "../../crates/ft-kernels/src/transfer/sum/sum.cu"
}

// Casts to another type and back, and sums of a tensor with itself: exact, also of an odd count.
template <typename T> static void casts(const std::string &type) {
  for (size_t n : {4096, 1027}) {
    host::Buffer<T> x(check::randn<T>(n, 1)), back(n);
    host::Buffer<float> y(n);
    const uint64_t count = n;
    call("cast_" + type + "_f32", grid((n + 1023) / 1024), 256, x.at(), y.at(), count);
    check::close("to f32", y, values(x), 0);
    call("cast_f32_" + type, grid((n + 1023) / 1024), 256, y.at(), back.at(), count);
    check::close("and back", back, values(x), 0);
    std::vector<double> twice = values(x);
    for (double &v : twice) v *= 2;
    call("add_" + type, grid((n + 2047) / 2048), 256, x.at(), x.at(), back.at(), count);
    check::close("a sum", back, twice, 0);
  }
}

TEST(casts_of_bf16) { casts<bf16>("bf16"); }
TEST(casts_of_f16) { casts<f16>("f16"); }
TEST(measured_casts) {
  host::Buffer<float> y(check::randn<float>(4096, 1));
  host::Buffer<bf16> b(4096);
  host::Buffer<f16> h(4096);
  const uint64_t count = 4096;
  call("cast_f32_bf16", grid(4), 256, y.at(), b.at(), count),
      call("cast_bf16_f32", grid(4), 256, b.at(), y.at(), count);
  call("cast_f32_f16", grid(4), 256, y.at(), h.at(), count), call("cast_f16_f32", grid(4), 256, h.at(), y.at(), count);
}

// Sums parts of several ranks in order: this rank's own part in the middle, first or last, or absent.
TEST(sums_of_parts_in_order) {
  for (const size_t n : {4096, 1003, 1})
    for (const uint32_t others : {0u, 1u, 3u})
      for (uint32_t own_at = 0; own_at <= others + 1; own_at++) {
        const bool own = own_at <= others;
        if (!own && others == 0) continue;
        const uint32_t parts = others + (own ? 1 : 0), at = own ? own_at : ~0u;
        host::Buffer<float> mine(check::randn<float>(n, 1)), rest(check::randn<float>(others ? others * n : 1, 2)),
            to(check::randn<float>(n, 3));
        std::vector<double> want(n);
        for (size_t i = 0; i < n; i++) {
          float sum = to[i];
          for (uint32_t p = 0, next = 0; p < parts; p++) sum += p == at ? mine[i] : rest[next++ * n + i];
          want[i] = sum;
        }
        const float *none = nullptr;
        call("sum_parts_f32", grid((n + 255) / 256), 256, own ? static_cast<const float *>(mine.at()) : none, at,
             others ? static_cast<const float *>(rest.at()) : none, parts, static_cast<uint64_t>(n), to.at());
        check::close("a sum of parts", to, want, 0);
      }
}
TEST(measured_sums_of_parts) {
  host::Buffer<float> mine(check::randn<float>(4096, 1)), rest(check::randn<float>(3 * 4096, 2)),
      to(check::randn<float>(4096, 3));
  call("sum_parts_f32", grid(16), 256, static_cast<const float *>(mine.at()), 1u, static_cast<const float *>(rest.at()),
       4u, static_cast<uint64_t>(4096), to.at());
}
