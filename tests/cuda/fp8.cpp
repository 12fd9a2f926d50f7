// Casts to 8-bit floats: every code and every half way between two, rows and matrices as they are and transposed.
#include "../../crates/ft-kernels/src/matmul/fp8/fp8.cu"
#include "call.h"

// The number of a code.
static double number(unsigned code, int mantissa, int bias) {
  const int exponent = (code & 0x7f) >> mantissa, rest = code & ((1 << mantissa) - 1);
  const double size =
      exponent == 0 ? ldexp(rest, 1 - bias - mantissa) : ldexp((1 << mantissa) + rest, exponent - bias - mantissa);
  return code & 0x80 ? -size : size;
}

template <typename To> static void every_code(int mantissa, int bias, unsigned last) {
  for (unsigned code = 0; code <= last; code++)
    for (unsigned sign : {0u, 0x80u}) {
      const float x = static_cast<float>(number(code | sign, mantissa, bias));
      if (To::from(x) != (code | sign) && x != 0) check::wrong("a number of the format changes");
      if (code == last) continue;
      const float next = static_cast<float>(number((code + 1) | sign, mantissa, bias)), middle = (x + next) / 2;
      const unsigned even = code % 2 ? code + 1 : code;
      if ((To::from(middle) & 0x7f) != even) check::wrong("half way: not to even");
      if ((To::from(nextafterf(middle, x)) & 0x7f) != code) check::wrong("below half way: not down");
      if ((To::from(nextafterf(middle, next)) & 0x7f) != code + 1) check::wrong("above half way: not up");
    }
  for (float x : {1e30f, INFINITY})
    if (To::from(x) != last || To::from(-x) != (last | 0x80)) check::wrong("beyond the largest");
  if ((To::from(NAN) & 0x7f) != 0x7f) check::wrong("NaN");
}

TEST(codes_of_e4m3) { every_code<e4m3>(3, 7, 0x7e); }
TEST(codes_of_e5m2) { every_code<e5m2>(2, 15, 0x7b); }

static double most(const std::vector<double> &v) {
  double most = 0;
  for (double x : v) most = std::max(most, fabs(x));
  return most;
}

// Codes times the scale against the values: within half a unit of the last place of each, or of the smallest subnormal.
static void close(const char *what, double got, double want, double scale, int mantissa, int bias) {
  const double unit = ldexp(fabs(want), -mantissa - 1) * 1.01 + scale * ldexp(1.0, 1 - bias - mantissa) * 0.51;
  if (!(fabs(got - want) <= unit)) check::wrong(what);
}

static void rows(const std::string &format, int mantissa, int bias, double largest, uint32_t t, uint32_t cols,
                 uint32_t apart, uint32_t skip, bool all) {
  host::Buffer<bf16> from(check::randn<bf16>(size_t(t) * apart, 1));
  for (size_t r = 0; r < t; r++) // rows of other sizes; one of zeros
    for (size_t c = 0; c < apart; c++)
      from[r * apart + c] =
          __float2bfloat16_rn(r == 1 ? 0.0f : __bfloat162float(from[r * apart + c]) * ldexpf(1.0f, -int(r % 3)));
  host::Buffer<float> parts(PARTS), scales(t);
  host::Buffer<uint8_t> to(size_t(t) * cols);
  if (all)
    call("fp8_amax_bf16", grid(std::min<size_t>(PARTS, t)), THREADS, from.at() + skip, apart, t, cols, parts.at());
  call("fp8_rows_" + format + "_bf16", grid(t), THREADS, from.at() + skip, apart, cols,
       all ? parts.at() : (float *)nullptr, to.at(), scales.at());
  std::vector<double> v = values(from), own;
  double whole = 0;
  for (size_t r = 0; r < t; r++) {
    own.assign(v.begin() + r * apart + skip, v.begin() + r * apart + skip + cols);
    whole = std::max(whole, most(own));
  }
  for (size_t r = 0; r < t; r++) {
    own.assign(v.begin() + r * apart + skip, v.begin() + r * apart + skip + cols);
    const double scale = scales[r], want = std::max(all ? whole : most(own), ldexp(1, -100)) / largest;
    if (fabs(scale / want - 1) > 1e-6) check::wrong("a scale");
    for (size_t c = 0; c < cols; c++)
      close("a value", scale * number(to[r * cols + c], mantissa, bias), own[c], scale, mantissa, bias);
  }
}

TEST(rows_with_a_scale_each) {
  rows("e4m3", 3, 7, 448, 5, 64, 64, 0, false);
  rows("e5m2", 2, 15, 57344, 4, 2320, 2328, 8, false);
  rows("e4m3", 3, 7, 448, 3, 48, 51, 1, false); // not aligned
}
TEST(rows_with_one_scale) {
  rows("e4m3", 3, 7, 448, 6, 272, 280, 0, true);
  rows("e5m2", 2, 15, 57344, 600, 16, 19, 3, true);
}

// A matrix against its values, as it is or transposed.
static void cast_is(host::Buffer<uint8_t> &to, host::Buffer<float> &scales, const std::vector<double> &w, uint32_t rows,
                    uint32_t cols, bool transposed) {
  const double scale = scales[0];
  if (fabs(scale / (most(w) / 448) - 1) > 1e-6) check::wrong("the scale");
  for (size_t i = 0; i < scales.size(); i++)
    if (scales[i] != scales[0]) check::wrong("copies of the scale");
  for (size_t r = 0; r < rows; r++)
    for (size_t c = 0; c < cols; c++)
      close("a weight", scale * number(to[transposed ? c * rows + r : r * cols + c], 3, 7), w[r * cols + c], scale, 3,
            7);
}

static void matrix(uint32_t rows, uint32_t cols, uint32_t apart, bool transposed, bool known = false) {
  host::Buffer<bf16> from(check::randn<bf16>(size_t(rows) * apart, 2));
  std::vector<float> maxima(PARTS);
  if (known) maxima[7] = float(most(values(from)));
  host::Buffer<float> parts(maxima), scales(transposed ? cols : rows);
  host::Buffer<uint8_t> to(size_t(rows) * cols);
  if (!known)
    call("fp8_amax_bf16", grid(std::min<size_t>(PARTS, rows)), THREADS, from.at(), apart, rows, cols, parts.at());
  call("fp8_matrix_bf16", grid((cols + TILE - 1) / TILE, (rows + TILE - 1) / TILE), THREADS, from.at(), apart, rows,
       cols, (const float *)parts.at(), uint32_t(transposed), to.at(), scales.at(), uint32_t(scales.size()));
  std::vector<double> all = values(from), w;
  for (size_t r = 0; r < rows; r++) w.insert(w.end(), all.begin() + r * apart, all.begin() + r * apart + cols);
  cast_is(to, scales, w, rows, cols, transposed);
}

TEST(matrices) {
  matrix(16, 16, 16, false), matrix(16, 32, 32, true);
  matrix(80, 144, 152, false), matrix(144, 80, 85, true);
}
TEST(measured_casts) {
  matrix(256, 192, 192, false, true), matrix(256, 192, 192, true, true);
  rows("e4m3", 3, 7, 448, 4, 4096, 4096, 0, false);
  rows("e5m2", 2, 15, 57344, 4, 4096, 4096, 0, false);
}

// 4-bit blocks with nested scales against values that are computed here.
static void blocks(uint32_t rows, uint32_t cols, uint32_t shift, bool nested, bool transposed) {
  const size_t n = size_t(rows) * cols, count = n >> shift;
  std::vector<uint8_t> codes(n / 2), scale_codes(count);
  for (size_t i = 0; i < codes.size(); i++) codes[i] = uint8_t(i * 2654435761u >> 7);
  for (size_t i = 0; i < count; i++) scale_codes[i] = uint8_t(i * 40503u >> 3);
  std::vector<float> pairs(512), map(256), absmax(nested ? (count + 3) / 4 : count);
  for (int b = 0; b < 256; b++) pairs[2 * b] = (b >> 4) / 7.5f - 1, pairs[2 * b + 1] = (b & 15) / 7.5f - 1;
  for (int b = 0; b < 256; b++) map[b] = (b - 127.7f) / 128.3f;
  for (size_t i = 0; i < absmax.size(); i++) absmax[i] = 0.01f + float(i % 7) * 0.001f;
  const float offset = nested ? 0.02f : 0.0f;
  std::vector<double> w(n);
  double top = 0;
  for (size_t i = 0; i < n; i++) {
    const size_t b = i >> shift;
    const float scale = nested ? map[scale_codes[b]] * absmax[b / 4] + offset : absmax[b];
    const uint8_t byte = codes[i / 2];
    w[i] = rounded<bf16>(pairs[2 * (i % 2 ? byte & 15 : byte >> 4) + 1] * scale);
    top = std::max(top, fabs(double(scale)));
  }
  host::Buffer<uint8_t> packed(codes), of_scales(scale_codes);
  host::Buffer<float> table(pairs), maps(map), scale(absmax), parts(PARTS), out(transposed ? cols : rows);
  host::Buffer<uint8_t> to(n);
  const uint8_t *nested_codes = nested ? of_scales.at() : nullptr;
  const float *nested_map = nested ? maps.at() : nullptr;
  const uint8_t *at = packed.at();
  const float *pairs_at = table.at(), *scales_at = scale.at(), *parts_at = parts.at();
  const uint32_t group = nested ? 4u : 1u;
  call("fp8_amax_blocks", grid(std::min<size_t>(PARTS, (count + THREADS - 1) / THREADS)), THREADS, at, pairs_at,
       scales_at, nested_codes, nested_map, group, offset, shift, uint64_t(n), 1.0f, parts.at());
  call("fp8_blocks_f32_bf16", grid((cols + TILE - 1) / TILE, (rows + TILE - 1) / TILE), THREADS, at, pairs_at,
       scales_at, nested_codes, nested_map, group, offset, shift, uint64_t(n), rows, cols, parts_at,
       uint32_t(transposed), to.at(), out.at(), uint32_t(out.size()));
  const double by = out[0];
  if (fabs(by / (top / 448) - 1) > 1e-6) check::wrong("the scale of blocks");
  for (size_t r = 0; r < rows; r++)
    for (size_t c = 0; c < cols; c++)
      close("a 4-bit weight", by * number(to[transposed ? c * rows + r : r * cols + c], 3, 7), w[r * cols + c], by, 3,
            7);
}

TEST(four_bit_blocks) {
  blocks(16, 64, 6, false, false), blocks(80, 144, 5, true, true);
  blocks(144, 80, 6, true, false);
}
