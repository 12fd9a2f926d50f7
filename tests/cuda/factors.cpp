// Gradients of LoRA's factors: several slabs and blocks of rows, edges in each direction, ranks that are no vector.
#include "../../crates/ft-kernels/src/adapters/factors/factors.cu"
#include "call.h"

struct Shape {
  uint32_t t, o, r, apart, u_apart, tiles;
  bool add;
};

template <typename T> static void gradients(const std::string &type, const Shape &s) {
  const uint32_t R = s.r <= 16 ? 16 : 32, slabs = (s.o + SLAB - 1) / SLAB, all = (s.t + TOKENS - 1) / TOKENS,
                 blocks = (all + s.tiles - 1) / s.tiles;
  host::Buffer<T> dy(check::randn<T>(size_t(s.t) * s.apart, 1)), b(check::randn<T>(size_t(s.o) * s.r, 2)),
      u(check::randn<T>(size_t(s.t) * s.u_apart, 3));
  const uint32_t du_apart = s.r + 3;
  host::Buffer<T> du(check::randn<T>(size_t(s.t) * du_apart, 4));
  host::Buffer<float> parts_u(size_t(slabs) * s.t * R), parts_b(size_t(blocks) * s.o * R),
      db(check::randn<float>(size_t(s.o) * s.r, 5));
  std::vector<double> g = values(dy), bs = values(b), us = values(u), want_u = values(du), want_b = values(db);
  for (size_t t = 0; t < s.t; t++)
    for (size_t r = 0; r < s.r; r++) {
      double sum = 0;
      for (size_t o = 0; o < s.o; o++) sum += g[t * s.apart + o] * bs[o * s.r + r];
      want_u[t * du_apart + r] = 0.5 * sum;
    }
  for (size_t o = 0; o < s.o; o++)
    for (size_t r = 0; r < s.r; r++) {
      double sum = 0;
      for (size_t t = 0; t < s.t; t++) sum += g[t * s.apart + o] * us[t * s.u_apart + r];
      want_b[o * s.r + r] = (s.add ? want_b[o * s.r + r] : 0) + 2 * sum;
    }
  const std::string name = "factors_" + std::to_string(R) + "_" + type;
  const T *from = dy.at(), *by = b.at(), *low = u.at();
  float *pu = parts_u.at(), *pb = parts_b.at();
  uint32_t apart = s.apart, t = s.t, o = s.o, u_apart = s.u_apart, r = s.r, tiles = s.tiles;
  void *arguments[] = {&from, &apart, &t, &o, &by, &low, &u_apart, &r, &tiles, &pu, &pb};
  host::launch(name.c_str(), grid(slabs, blocks), THREADS, STAGES * TILE_BYTES + B_BYTES + 2 * U_BYTES, arguments);
  call("factors_sum_" + type, grid(((s.t + s.o) * s.r + THREADS - 1) / THREADS), THREADS, parts_u.at(), slabs,
       parts_b.at(), blocks, s.t, s.o, s.r, R, 0.5f, du.at(), du_apart, 2.0f, uint32_t(s.add), db.at());
  check::close("du", du, want_u, check::BAR<T>);
  check::close("dB", db, want_b, 1e-5);
}

template <typename T> static void all(const std::string &type) {
  gradients<T>(type, {9, 8, 4, 16, 12, 1, false}); // one part of a tile
  gradients<T>(type,
               {300, 584, 16, 600, 48, 2, true}); // a slab of 72 columns, a block of one tile, values left between rows
  gradients<T>(type, {130, 1024, 24, 1024, 24, 1, false});
  gradients<T>(type, {129, 520, 31, 520, 33, 1, true}); // not aligned
}

TEST(factors_in_bf16) { all<bf16>("bf16"); }
TEST(factors_in_f16) { all<f16>("f16"); }
TEST(measured_factors) {
  gradients<bf16>("bf16", {256, 1024, 16, 1024, 16, 1, false}),
      gradients<bf16>("bf16", {256, 512, 32, 512, 32, 1, false});
  gradients<f16>("f16", {256, 1024, 16, 1024, 16, 1, false}), gradients<f16>("f16", {256, 512, 32, 512, 32, 1, false});
}
