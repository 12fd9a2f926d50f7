// AdamW with f32 and 8-bit moments and with a compute copy, compared with float64: aligned buffers,
// tails, unaligned buffers. Also sums of squares beyond the range of f32.
#include "../../crates/ft-kernels/src/optimizer/optimizer.cu"
#include "call.h"

template <typename T> static void update(const std::string &type, bool with) {
  unsigned seed = 1;
  for (auto [n, skew] : std::vector<std::pair<size_t, size_t>>{{4096, 0}, {1, 0}, {2050, 0}, {777, 1}}) {
    std::vector<float> squares = check::randn<float>(n, seed++);
    for (float &v : squares) v *= v;
    host::Buffer<float> p(check::randn<float>(n, seed++), skew), m(check::randn<float>(n, seed++), skew),
        v(squares, skew), g(check::randn<float>(n, seed++), skew);
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
    call("optimizer_adamw_" + type, grid((n + each - 1) / each), THREADS, p.at(), m.at(), v.at(), g.at(),
         with ? copy.at() : no, count, float(scale), float(1 - b1), float(b2), float(1 - b2), float(1 - lr * wd),
         float(lr / (1 - pow(b1, t))), float(sqrt(1 - pow(b2, t))), float(eps));
    check::close("p", p, ps, 1e-6), check::close("m", m, ms, 1e-6), check::close("v", v, vs, 1e-6);
    for (size_t i = 0; with && i < n; i++)
      if (Number<T>::widen(copy[i]) != rounded<T>(p[i])) check::wrong("the copy is not the rounded weight");
  }
}

TEST(updates_in_f32) { update<float>("f32", false); }
TEST(updates_with_a_copy_in_bf16) { update<bf16>("bf16", true); }
TEST(updates_with_a_copy_in_f16) { update<f16>("f16", true); }

// The 16-bit value x rounds to for a given word, in exact arithmetic; `near` marks a tie within float
// error.
template <typename T> static double by_word(double x, uint32_t word, bool &near) {
  const bool half = sizeof(T) == 2 && rounded<T>(1.0f + 1.0f / 512) != 1.0f;
  int exponent;
  frexp(x, &exponent);
  // 8 significant bits for bf16; 11 for f16, fewer below 2^-14
  const double unit = half ? ldexp(1.0, std::max(exponent - 11, -24)) : ldexp(1.0, exponent - 8);
  const double steps = std::abs(x) / unit, low = floor(steps);
  const double share =
      half ? (exponent - 11 < -24 ? (word >> 8) / 16777216.0 : (word >> 19) / 8192.0) : (word >> 16) / 65536.0;
  const double beyond = share + (steps - low) - 1.0;
  near = std::abs(beyond) < 2e-3 || steps - low < 1e-3 || steps - low > 1 - 1e-3;
  const bool subnormal = half && exponent - 11 < -24;
  const bool up = subnormal ? share < steps - low : beyond >= 0;
  return copysign((low + (up ? 1.0 : 0.0)) * unit, x);
}

static uint32_t word_of(const Stream &s, uint64_t number) {
  uint32_t w[4];
  s.words(number / 4, w);
  return w[number % 4];
}

// Stochastic rounding: aligned values, tails, unaligned starts.
template <typename T> static void rounds(const std::string &type, float scale) {
  const Stream s = {1, 2, 3, 4, 0};
  for (auto [n, first] : std::vector<std::pair<size_t, uint64_t>>{{4096, 1ull << 33}, {1, 256}, {777, 3}}) {
    host::Buffer<float> x(check::randn<float>(n, 5, scale));
    host::Buffer<T> y(n);
    call("optimizer_round_" + type, grid((n + 1023) / 1024), THREADS, x.at(), y.at(), static_cast<uint64_t>(n), first,
         s.key0, s.key1, s.high0, s.high1);
    size_t sure = 0;
    for (size_t i = 0; i < n; i++) {
      bool near;
      const double want = by_word<T>(x[i], word_of(s, first + i), near);
      sure += !near;
      if (!near && Number<T>::widen(y[i]) != want) check::wrong("a value that its word does not say");
    }
    if (sure < n * 9 / 10) check::wrong("too few values are told");
  }
}

TEST(rounds_to_bf16) { rounds<bf16>("bf16", 1.0f); }
TEST(rounds_to_f16) { rounds<f16>("f16", 1.0f), rounds<f16>("f16", 1e-5f); }

// Updates of 16-bit weights without an f32 master copy: in f32, then stochastically rounded.
template <typename T> static void update_rounded(const std::string &type) {
  const Stream s = {1, 2, 3, 4, 0};
  unsigned seed = 1;
  for (auto [n, skew] : std::vector<std::pair<size_t, size_t>>{{4096, 0}, {1, 0}, {2050, 0}, {777, 1}}) {
    std::vector<float> squares = check::randn<float>(n, seed++);
    for (float &v : squares) v *= v;
    host::Buffer<float> m(check::randn<float>(n, seed++), skew), v(squares, skew),
        g(check::randn<float>(n, seed++), skew);
    host::Buffer<T> p(check::randn<T>(n, seed++), skew);
    std::vector<double> ps = values(p), ms = values(m), vs = values(v), gs = values(g);
    const double b1 = 0.9, b2 = 0.99, lr = 1e-2, wd = 0.1, eps = 1e-8, t = 3, scale = 0.5;
    const uint64_t count = n, first = 512;
    call("optimizer_adamw_rounded_" + type, grid((n + 4 * THREADS - 1) / (4 * THREADS)), THREADS, p.at(), m.at(),
         v.at(), g.at(), count, first, s.key0, s.key1, s.high0, s.high1, float(scale), float(1 - b1), float(b2),
         float(1 - b2), float(1 - lr * wd), float(lr / (1 - pow(b1, t))), float(sqrt(1 - pow(b2, t))), float(eps));
    for (size_t i = 0; i < n; i++) {
      const double grad = gs[i] * scale;
      ms[i] += (grad - ms[i]) * (1 - b1), vs[i] = vs[i] * b2 + (1 - b2) * grad * grad;
      ps[i] -= lr * wd * ps[i] + lr / (1 - pow(b1, t)) * ms[i] / (sqrt(vs[i] / (1 - pow(b2, t))) + eps);
      bool near;
      const double want = by_word<T>(ps[i], word_of(s, first + i), near);
      if (!near && Number<T>::widen(p[i]) != want) check::wrong("a weight that its word does not say");
    }
    check::close("m", m, ms, 1e-6), check::close("v", v, vs, 1e-6);
  }
}

TEST(updates_without_a_copy_in_bf16) { update_rounded<bf16>("bf16"); }
TEST(updates_without_a_copy_in_f16) { update_rounded<f16>("f16"); }

// The maps in crates/ft-kernels/src/optimizer/eight_bit.rs, of the first and the second moment.
static std::vector<float> maps() {
  std::vector<float> all;
  for (const bool sign : {true, false}) {
    std::vector<float> map = {0.0f, 1.0f};
    for (int decade = 0; decade < 7; decade++) {
      const int fractions = 1 << (sign ? decade : decade + 1);
      for (int i = 0; i < fractions; i++) {
        const float x = float((0.1 + 0.9 * (i + 0.5) / fractions) * pow(10, decade - 6));
        map.push_back(x);
        if (sign) map.push_back(-x);
      }
    }
    std::sort(map.begin(), map.end());
    all.insert(all.end(), map.begin(), map.end());
  }
  return all;
}

// Thread blocks for quantization blocks.
static Dim of_blocks(size_t blocks) {
  return grid((blocks + THREADS / WARP * BLOCKS_EACH - 1) / (THREADS / WARP * BLOCKS_EACH));
}

// The code of any value is that of the CPU's search: values around each bound, and between.
template <bool SIGNED> static void codes() {
  const std::vector<float> map = maps();
  float bound[512];
  for (size_t i = 0; i < 512; i++) bound[i] = i % 256 == 0 ? 0 : (map[i - 1] + map[i]) / 2;
  const Maps made = {nullptr, bound};
  const float *own = map.data() + (SIGNED ? 0 : 256);
  const auto compare = [&](float x) {
    uint32_t low = 0, high = 255;
    while (low < high) {
      const uint32_t at = (low + high) / 2;
      if ((own[at] + own[at + 1]) / 2 < x) low = at + 1;
      else high = at;
    }
    if (made.code<SIGNED>(x) != low) check::wrong("another code than the search finds");
  };
  for (const float sign : {1.0f, -1.0f}) {
    const auto both = [&](uint32_t bits) {
      const float x = sign * __uint_as_float(bits);
      if (x >= (SIGNED ? -1.0f : 0.0f) && x <= 1.0f) compare(x);
    };
    for (uint32_t c = 1; c < 256; c++)
      for (uint32_t away = 0; away < 9; away++)
        both(__float_as_uint(std::abs(bound[(SIGNED ? 0 : 256) + c])) + away - 4);
    for (uint32_t bits = 0; bits <= 0x3f800000u; bits += check::nightly() ? 101 : 9973) both(bits);
    both(0x3f800000u);
  }
}

TEST(codes_of_the_first_moment) { codes<true>(); }
TEST(codes_of_the_second_moment) { codes<false>(); }

// Two updates with 8-bit moments, on whole and partial blocks, of aligned buffers and others, compared with float64
// on the dequantized moments.
template <typename T> static void eight_bit(const std::string &type, bool with) {
  unsigned seed = 1;
  const std::vector<float> map = maps();
  host::Buffer<float> table(map);
  for (auto [n, skew] :
       std::vector<std::pair<size_t, size_t>>{{512, 0}, {777, 0}, {777, 1}, {1, 0}, {16384 + 600, 0}}) {
    const size_t blocks = (n + 255) / 256;
    host::Buffer<float> p(check::randn<float>(n, seed++), skew), ms(std::vector<float>(blocks, 0.0f)),
        vs(std::vector<float>(blocks, 0.0f));
    host::Buffer<uint8_t> m(std::vector<uint8_t>(n, 127)), v(std::vector<uint8_t>(n, 0));
    host::Buffer<T> copy(n);
    const double b1 = 0.9, b2 = 0.99, lr = 1e-2, wd = 0.1, eps = 1e-8, scale = 0.5;
    for (int t = 1; t <= 2; t++) {
      host::Buffer<float> g(check::randn<float>(n, seed++));
      std::vector<double> ps = values(p), gs = values(g), mean(n), square(n);
      for (size_t i = 0; i < n; i++) {
        const double grad = gs[i] * scale;
        mean[i] = double(map[m[i]]) * ms[i / 256] * b1 + grad * (1 - b1);
        square[i] = double(map[256 + v[i]]) * vs[i / 256] * b2 + grad * grad * (1 - b2);
        ps[i] = ps[i] * (1 - lr * wd) - lr / (1 - pow(b1, t)) * mean[i] / (sqrt(square[i] / (1 - pow(b2, t))) + eps);
      }
      T *no = nullptr;
      call("optimizer_adamw8bit_" + type, of_blocks(blocks), THREADS, p.at(), m.at(), ms.at(), v.at(), vs.at(), g.at(),
           with ? copy.at() : no, table.at(), static_cast<uint64_t>(n), float(scale), float(b1), float(1 - b1),
           float(b2), float(1 - b2), float(1 - lr * wd), float(lr / (1 - pow(b1, t))), float(sqrt(1 - pow(b2, t))),
           float(eps));
      check::close("p", p, ps, 1e-6);
      for (size_t b = 0; b < blocks; b++) {
        double most[2] = {0, 0};
        for (size_t i = 256 * b; i < std::min(n, 256 * (b + 1)); i++)
          most[0] = std::max(most[0], std::abs(mean[i])), most[1] = std::max(most[1], square[i]);
        if (std::abs(ms[b] - most[0]) > 1e-6 * most[0] || std::abs(vs[b] - most[1]) > 1e-6 * most[1])
          check::wrong("a scale");
      }
      for (size_t i = 0; i < n; i++) {
        // no other code is nearer
        const double x = mean[i] / ms[i / 256], y = square[i] / vs[i / 256];
        double near[2] = {9, 9};
        for (int c = 0; c < 256; c++)
          near[0] = std::min(near[0], std::abs(map[c] - x)), near[1] = std::min(near[1], std::abs(map[256 + c] - y));
        if (std::abs(map[m[i]] - x) > near[0] + 1e-6 || std::abs(map[256 + v[i]] - y) > near[1] + 1e-6)
          check::wrong("a code that is not the nearest");
        if (with && Number<T>::widen(copy[i]) != rounded<T>(p[i])) check::wrong("the copy is not the rounded weight");
      }
    }
  }
}

// With 8-bit moments, an update equals that of an f32 weight, rounded with the same word.
template <typename T> static void eight_bit_rounded(const std::string &type) {
  const Stream s = {1, 2, 3, 4, 0};
  const std::vector<float> map = maps();
  host::Buffer<float> table(map);
  for (const size_t n : {512, 777, 1}) {
    const size_t blocks = (n + 255) / 256;
    host::Buffer<T> p(check::randn<T>(n, 1));
    std::vector<float> wide(n);
    for (size_t i = 0; i < n; i++) wide[i] = Number<T>::widen(p[i]);
    const std::vector<float> zeros(blocks, 0.0f), gs = check::randn<float>(n, 2);
    const std::vector<uint8_t> means(n, 127), none(n, 0);
    host::Buffer<float> q(wide), ms(zeros), vs(zeros), ns(zeros), ws(zeros), g(gs), h(gs);
    host::Buffer<uint8_t> m(means), v(none), o(means), w(none);
    float *no = nullptr;
    const uint64_t count = n, first = 1024;
    call("optimizer_adamw8bit_f32", of_blocks(blocks), THREADS, q.at(), m.at(), ms.at(), v.at(), vs.at(), g.at(), no,
         table.at(), count, 0.5f, 0.9f, 0.1f, 0.99f, 0.01f, 0.999f, 0.1f, 0.1f, 1e-8f);
    call("optimizer_adamw8bit_rounded_" + type, of_blocks(blocks), THREADS, p.at(), o.at(), ns.at(), w.at(), ws.at(),
         h.at(), table.at(), count, first, s.key0, s.key1, s.high0, s.high1, 0.5f, 0.9f, 0.1f, 0.99f, 0.01f, 0.999f,
         0.1f, 0.1f, 1e-8f);
    for (size_t i = 0; i < n; i++) {
      if (Number<T>::widen(p[i]) != rounded_by<T>(q[i], word_of(s, first + i)))
        check::wrong("a weight that its word does not say");
      if (m[i] != o[i] || v[i] != w[i]) check::wrong("other moments");
    }
  }
}

TEST(updates_in_8_bits_without_a_copy_in_bf16) { eight_bit_rounded<bf16>("bf16"); }
TEST(updates_in_8_bits_without_a_copy_in_f16) { eight_bit_rounded<f16>("f16"); }

TEST(updates_in_8_bits_in_f32) { eight_bit<float>("f32", false); }
TEST(updates_in_8_bits_with_a_copy_in_bf16) { eight_bit<bf16>("bf16", true); }
TEST(updates_in_8_bits_with_a_copy_in_f16) { eight_bit<f16>("f16", true); }

// A NaN of any gradient makes both scales of its block NaN.
TEST(updates_in_8_bits_keep_nan) {
  const size_t n = 512;
  const std::vector<float> map = maps();
  host::Buffer<float> table(map);
  for (const size_t at : {0, 1, 127, 128, 254, 255}) {
    std::vector<float> gs = check::randn<float>(n, 3);
    gs[at] = NAN;
    const std::vector<float> zeros(2, 0.0f);
    host::Buffer<float> p(check::randn<float>(n, 1)), ms(zeros), vs(zeros), g(gs);
    host::Buffer<uint8_t> m(std::vector<uint8_t>(n, 127)), v(std::vector<uint8_t>(n, 0));
    float *no = nullptr;
    call("optimizer_adamw8bit_f32", of_blocks(2), THREADS, p.at(), m.at(), ms.at(), v.at(), vs.at(), g.at(), no,
         table.at(), static_cast<uint64_t>(n), 0.5f, 0.9f, 0.1f, 0.99f, 0.01f, 0.999f, 0.1f, 0.1f, 1e-8f);
    if (!std::isnan(ms[0]) || !std::isnan(vs[0])) check::wrong("a NaN that a scale lost");
    if (std::isnan(ms[1]) || std::isnan(vs[1])) check::wrong("a NaN of another block");
  }
}

// Sum of squares, and its error relative to f64.
static std::pair<double, double> squared(const std::vector<float> &values, size_t skew, size_t blocks) {
  host::Buffer<float> x(values, skew);
  host::Buffer<double> partial(blocks), sum(1);
  call("optimizer_squares_f32", grid(blocks), THREADS, x.at(), static_cast<uint64_t>(values.size()), partial.at());
  call("optimizer_total", grid(1), THREADS, partial.at(), static_cast<uint32_t>(blocks), sum.at());
  double want = 0;
  for (double v : values) want += v * v;
  return {sum[0], std::abs(sum[0] - want) / want};
}

TEST(sums_of_squares) {
  for (const float scale : {1.0f, 1e25f, 1e-25f, 1e18f, 1e-12f})
    for (auto [n, skew, blocks] :
         std::vector<std::tuple<size_t, size_t, size_t>>{{9001, 0, 3}, {5, 1, 1}, {5, 0, 1}, {2000, 3, 2}})
      if (!(squared(check::randn<float>(n, 5, scale), skew, blocks).second <= 1e-12))
        check::wrong("the sum of squares");
  if (squared(std::vector<float>(100, 0.0f), 0, 1).first != 0) check::wrong("the sum of zeros");
}

// The bound of paired sums, where squares have many bits and sizes differ.
TEST(sums_of_squares_are_bounded) {
  for (const float small : {0.75f, 0x1p-6f, 0x1p-12f, 0x1p-24f}) {
    std::vector<float> x(8192);
    for (size_t i = 0; i < x.size(); i++)
      x[i] = (i % 3 == 0 ? 1.0f : small) * (1.0f + 0x1p-23f * float(2 * (i * 7919 % 4000000) + 1));
    if (!(squared(x, 0, 2).second <= 0x1p-37)) check::wrong("the error of a sum of squares");
  }
}

TEST(sums_of_squares_keep_what_is_not_finite) {
  for (const size_t at : {0, 5, 1023, 2047}) {
    std::vector<float> x(2048, 1.0f);
    x[at] = NAN;
    if (!std::isnan(squared(x, 0, 1).first)) check::wrong("a NaN that is lost");
    x[at] = -INFINITY;
    if (squared(x, 0, 1).first != INFINITY) check::wrong("an infinity that is lost");
    x[at] = 3e38f;
    if (!(squared(x, 0, 1).second <= 1e-12)) check::wrong("a large value");
  }
}
