// Grouped GEMMs compared with float64: dense and 4-bit matrices, mixed and missing adapters, experts
// without rows, sizes that are no multiples of tiles or vectors, and sums of two tables in one launch.
#include "../../crates/ft-kernels/src/experts/grouped/grouped_half.cu"
namespace many {
#include "../../crates/ft-kernels/src/experts/grouped/grouped_many.cu"
}
namespace plain {
#include "../../crates/ft-kernels/src/experts/grouped/grouped_plain.cu"
}
namespace single {
#include "../../crates/ft-kernels/src/experts/grouped/grouped_one.cu"
}
#include "../../crates/ft-kernels/src/experts/grouped/grouped_dropout.cu"
#include "check.h"
#include <algorithm>
#include <memory>

// Of the values in a block: 64, 32, 256.
static const uint32_t SHIFTS[] = {6, 5, 8};

struct Sizes {
  std::vector<uint32_t> rows; // by expert
  uint32_t i, o;
  std::vector<uint32_t> ranks; // by expert
  uint32_t codes;              // every n-th expert has codes; 0 for none
  bool nested;
  uint32_t skew = 0; // misalignment of x
};

static const float CODE[16] = {-1.0f, -0.696f, -0.525f, -0.395f, -0.284f, -0.185f, -0.091f, 0.0f,
                               0.08f, 0.161f,  0.246f,  0.338f,  0.441f,  0.563f,  0.723f,  1.0f};

// A table of experts: kernel inputs, and the same values in float64.
template <typename T> struct Bank {
  std::vector<std::unique_ptr<host::Buffer<T>>> w, a, b;
  std::vector<std::unique_ptr<host::Buffer<uint8_t>>> packed, scale_codes;
  std::vector<std::unique_ptr<host::Buffer<float>>> scales;
  host::Buffer<float> pairs{512}, map{256};
  std::vector<std::vector<double>> wd, ad, bd;
  host::Buffer<Expert> table;
  std::vector<float> scale;
  uint64_t gradients = 0;

  static std::vector<double> wide(host::Buffer<T> &x) {
    std::vector<double> v(x.size());
    for (size_t i = 0; i < v.size(); i++) v[i] = Number<T>::widen(x[i]);
    return v;
  }

  Bank(const Sizes &s, unsigned seed) : table(s.rows.size()) {
    for (uint32_t i = 0; i < 256; i++)
      pairs[2 * i] = CODE[i >> 4], pairs[2 * i + 1] = CODE[i & 15], map[i] = i / 255.0f;
    std::mt19937 random(seed);
    for (size_t e = 0; e < s.rows.size(); e++) {
      Expert x;
      memset(&x, 0, sizeof x);
      const bool coded = s.codes != 0 && e % s.codes == 0;
      const uint32_t shift = coded ? SHIFTS[e / s.codes % 3] : 6;
      const size_t n = static_cast<size_t>(s.i) * s.o, blocks = ((n - 1) >> shift) + 1;
      std::vector<double> values(n);
      w.emplace_back(new host::Buffer<T>(check::randn<T>(coded ? 1 : n, seed + 10 * e, 0.3f)));
      packed.emplace_back(new host::Buffer<uint8_t>((n + 1) / 2));
      scale_codes.emplace_back(new host::Buffer<uint8_t>(blocks));
      scales.emplace_back(new host::Buffer<float>(blocks));
      for (size_t i = 0; i < packed[e]->size(); i++) (*packed[e])[i] = static_cast<uint8_t>(random());
      for (size_t i = 0; i < blocks; i++)
        (*scale_codes[e])[i] = static_cast<uint8_t>(random()), (*scales[e])[i] = 0.1f + (random() % 100) / 200.0f;
      x.source = e % 3;
      if (coded) {
        x.packed = packed[e]->at(), x.pairs = pairs.at(), x.scales = scales[e]->at(), x.group_shift = 2,
        x.shift = shift, x.offset = 0.25f;
        if (s.nested) x.scale_codes = scale_codes[e]->at(), x.map = map.at();
        for (size_t i = 0; i < n; i++) {
          const float factor = s.nested ? map[(*scale_codes[e])[i >> shift]] * (*scales[e])[(i >> shift) / 4] + 0.25f
                                        : (*scales[e])[i >> shift];
          const uint8_t byte = (*packed[e])[i / 2];
          float v = CODE[i % 2 ? byte & 15 : byte >> 4] * factor;
          v = x.source == 0 ? v : x.source == 1 ? rounded<bf16>(v) : rounded<f16>(v);
          values[i] = rounded<T>(v);
        }
      } else {
        x.weight = w[e]->at(), values = wide(*w[e]);
      }
      wd.push_back(values);
      x.rank = s.ranks[e], x.scale = 0.5f + 0.25f * static_cast<float>(e);
      scale.push_back(x.scale);
      a.emplace_back(new host::Buffer<T>(check::randn<T>(x.rank * s.i, seed + 10 * e + 1, 0.3f)));
      b.emplace_back(new host::Buffer<T>(check::randn<T>(x.rank * s.o, seed + 10 * e + 2, 0.3f)));
      if (x.rank) x.a = a[e]->at(), x.b = b[e]->at();
      ad.push_back(wide(*a[e])), bd.push_back(wide(*b[e]));
      const auto place = [&](bool some, size_t values) {
        const uint64_t at = gradients;
        gradients += some ? (values + 63) / 64 * 64 : 0;
        return some ? at : NOWHERE;
      };
      x.grad_weight = place(!coded && e % 2 == 0, n), x.grad_a = place(x.rank, x.rank * s.i),
      x.grad_b = place(x.rank, x.rank * s.o);
      table[e] = x;
    }
  }
};

template <typename T> static std::vector<double> wide(host::Buffer<T> &x) { return Bank<T>::wide(x); }

template <typename... A> static void start(const std::string &name, Dim grid, size_t shared, A... arguments) {
  void *pointers[] = {&arguments...};
  const size_t sizes[] = {sizeof arguments...};
  const host::Kernel &k = host::kernels().at(name);
  if (k.sizes != std::vector<size_t>(sizes, sizes + sizeof...(A))) check::wrong(name + ": other arguments");
  host::launch(name.c_str(), grid, k.threads, shared, pointers);
}

// Shared memory of products with tiles of `rows` rows, as in crates/ft-kernels/src/experts/grouped/mod.rs.
static size_t shared_of(const std::string &kind, size_t rows) {
  const size_t constants = 2 * (128 + (16 + 256) * 4);
  if (kind == "") return 3 * (rows + 128) * 64 + 2 * 128;
  return kind == "coded_" ? (4 * rows + 2 * 128) * 64 + constants - 2 * 256 * 4
                          : 4 * (rows + 128) * 64 + constants + 32 * 128;
}

static Dim blocks(size_t x, size_t y, size_t z = 1) {
  Dim d;
  d.x = static_cast<unsigned>(x), d.y = static_cast<unsigned>(y), d.z = static_cast<unsigned>(z);
  return d;
}

template <typename T> static void grouped(const std::string &type, const Sizes &s, unsigned seed) {
  constexpr bool HALF = sizeof(T) == 2;
  const double bar = 2 * check::BAR<T>;
  const uint32_t experts = static_cast<uint32_t>(s.rows.size());
  Bank<T> bank(s, seed), more(s, seed + 1000);
  std::vector<uint32_t> starts = {0};
  for (uint32_t r : s.rows) starts.push_back(starts.back() + r);
  const uint32_t n = starts.back(), most = *std::max_element(s.ranks.begin(), s.ranks.end()),
                 ranks = (most + 7) / 8 * 8;
  host::Buffer<uint32_t> begins(starts);
  host::Buffer<T> x(check::randn<T>(n * s.i, seed + 1), s.skew), dy(check::randn<T>(n * s.o, seed + 2)),
      dy2(check::randn<T>(n * s.o, seed + 3));
  host::Buffer<T> u(n * ranks), y(n * s.o), du(n * ranks), du2(n * ranks), dx(n * s.i);
  const std::vector<double> xs = wide(x), ds = wide(dy), ds2 = wide(dy2);
  const Expert *none = nullptr;
  T *no = nullptr;

  // rows per tile, and adjacent tiles in backward; 1 in both directions
  struct Kind {
    const char *name;
    uint32_t rows, beside;
  };
  for (const Kind &kind : HALF ? std::vector<Kind>{{"", 128, 1}, {"coded_", 128, 1}, {"few_", 32, WIDE}}
                               : std::vector<Kind>{{"", 64, 1}}) {
    const std::string name = kind.name;
    // the kernel of values takes no codes
    if (HALF && name == "" && s.codes != 0) continue;
    const uint32_t rows = kind.rows;
    // the schedule, plus one unused tile
    std::vector<uint2> list;
    for (uint32_t e = 0; e < experts; e++)
      for (uint32_t r = 0; r < s.rows[e]; r += rows) list.push_back(make_uint2(e, starts[e] + r));
    list.push_back(make_uint2(NONE, 0));
    host::Buffer<uint2> tiles(list);
    const size_t side = HALF ? 128 : 64, shared = HALF ? shared_of(name, rows) : 0;
    const auto columns = [&](uint32_t c) { return (c + side - 1) / side; };
    const auto shared_columns = [&](uint32_t c) { return (columns(c) + kind.beside - 1) / kind.beside; };
    const auto expert_of = [&](uint32_t row) {
      return static_cast<uint32_t>(std::upper_bound(starts.begin(), starts.end(), row) - starts.begin()) - 1;
    };
    // compares only columns up to the expert's rank
    const auto low = [&](host::Buffer<T> &got, const std::vector<double> &in, uint32_t wide_in,
                         const std::vector<std::vector<double>> &m, bool lies, Bank<T> &bank) {
      double apart = 0, length = 1e-30;
      for (uint32_t t = 0; t < n; t++) {
        const uint32_t e = expert_of(t), r = s.ranks[e];
        for (uint32_t c = 0; c < r; c++) {
          double sum = 0;
          for (uint32_t k = 0; k < wide_in; k++)
            sum += in[t * wide_in + k] * (lies ? m[e][c * wide_in + k] : m[e][k * r + c]);
          sum *= bank.scale[e];
          const double d = Number<T>::widen(got[t * ranks + c]) - sum;
          apart += d * d, length += sum * sum;
        }
      }
      if (!(sqrt(apart / length) <= bar)) check::wrong("low rank: " + std::to_string(sqrt(apart / length)));
    };
    if (most > 0) {
      start("grouped_" + name + "forward_" + type, blocks(columns(ranks), list.size()), shared, bank.table.at(), x.at(),
            no, none, no, no, s.i, s.o, ranks, 1u, begins.at(), tiles.at(), u.at(), no);
      low(u, xs, s.i, bank.ad, true, bank);
      start("grouped_" + name + "backward_" + type, blocks(shared_columns(ranks), list.size()), shared, bank.table.at(),
            dy.at(), no, none, no, no, s.o, s.i, ranks, 1u, begins.at(), tiles.at(), du.at(), no);
      low(du, ds, s.o, bank.bd, false, bank);
      start("grouped_" + name + "backward_" + type, blocks(shared_columns(ranks), list.size()), shared, more.table.at(),
            dy2.at(), no, none, no, no, s.o, s.i, ranks, 1u, begins.at(), tiles.at(), du2.at(), no);
    }
    // whole vectors by a kernel of their own too
    if (most > 0 && name == "coded_" && s.i % 8 == 0 && s.o % 8 == 0 && s.skew == 0) {
      host::Buffer<T> other(n * ranks);
      const auto narrow = [&](const std::string &way, host::Buffer<T> &wide, uint32_t in, uint32_t out) {
        start("grouped_low_" + way + type, blocks((ranks + LOW - 1) / LOW, list.size()), 3 * 2 * 64 * (128 + LOW),
              bank.table.at(), wide.at(), no, none, no, no, in, out, ranks, 1u, begins.at(), tiles.at(), other.at(),
              no);
      };
      narrow("forward_", x, s.i, s.o), low(other, xs, s.i, bank.ad, true, bank);
      narrow("backward_", dy, s.o, s.i), low(other, ds, s.o, bank.bd, false, bank);
    }
    start("grouped_" + name + "forward_" + type, blocks(columns(s.o), list.size()), shared, bank.table.at(), x.at(),
          u.at(), none, no, no, s.i, s.o, ranks, 0u, begins.at(), tiles.at(), y.at(), no);
    start("grouped_" + name + "backward_" + type, blocks(shared_columns(s.i), list.size()), shared, bank.table.at(),
          dy.at(), du.at(), static_cast<const Expert *>(more.table.at()), dy2.at(), du2.at(), s.o, s.i, ranks, 0u,
          begins.at(), tiles.at(), dx.at(), no);
    // results of two tables in one launch are those of a launch each
    const auto together = [&](const std::string &kernel, const Dim &grid, size_t shared, host::Buffer<T> &x,
                              host::Buffer<T> &x2, T *u, T *u2, uint32_t in, uint32_t out, uint32_t low) {
      const uint32_t width = low ? ranks : out;
      host::Buffer<T> one(n * width), two(n * width), first(n * width), second(n * width);
      const auto zero = [&](host::Buffer<T> &b) {
        for (size_t i = 0; i < b.size(); i++) b[i] = Number<T>::from(0.0f);
      };
      zero(one), zero(two), zero(first), zero(second);
      const Expert *const other = more.table.at();
      start(kernel, grid, shared, bank.table.at(), x.at(), u, none, no, no, in, out, ranks, low, begins.at(),
            tiles.at(), one.at(), no);
      start(kernel, grid, shared, more.table.at(), x2.at(), u2, none, no, no, in, out, ranks, low, begins.at(),
            tiles.at(), two.at(), no);
      start(kernel, blocks(2 * grid.x, grid.y), shared, bank.table.at(), x.at(), u, other, x2.at(), u2, in, out, ranks,
            low, begins.at(), tiles.at(), first.at(), second.at());
      if (memcmp(one.at(), first.at(), one.size() * sizeof(T)) != 0 ||
          memcmp(two.at(), second.at(), two.size() * sizeof(T)) != 0)
        check::wrong(kernel + ": other results together");
    };
    if (n < 50) {
      together("grouped_" + name + "forward_" + type, blocks(columns(s.o), list.size()), shared, x, x, u.at(), u.at(),
               s.i, s.o, 0);
      if (most > 0) {
        together("grouped_" + name + "backward_" + type, blocks(shared_columns(ranks), list.size()), shared, dy, dy2,
                 no, no, s.o, s.i, 1);
        if (name == "coded_" && s.i % 8 == 0 && s.o % 8 == 0 && s.skew == 0)
          together("grouped_low_forward_" + type, blocks((ranks + LOW - 1) / LOW, list.size()),
                   3 * 2 * 64 * (128 + LOW), x, x, no, no, s.i, s.o, 1);
      }
      if (rows == 32)
        together("grouped_one_" + type, blocks((s.o + 31) / 32, list.size()), 2 * s.i, x, x, u.at(), u.at(), s.i, s.o,
                 0);
    }
    const std::vector<double> us = wide(u), dus = wide(du), dus2 = wide(du2);
    std::vector<double> want(n * s.o), want_x(n * s.i);
    for (uint32_t t = 0; t < n; t++) {
      const uint32_t e = expert_of(t), r = s.ranks[e];
      for (uint32_t c = 0; c < s.o; c++) {
        double sum = 0;
        for (uint32_t k = 0; k < s.i; k++) sum += xs[t * s.i + k] * bank.wd[e][c * s.i + k];
        for (uint32_t k = 0; k < r; k++) sum += us[t * ranks + k] * bank.bd[e][c * r + k];
        want[t * s.o + c] = sum;
      }
      for (uint32_t c = 0; c < s.i; c++) {
        double sum = 0;
        for (uint32_t k = 0; k < s.o; k++)
          sum += ds[t * s.o + k] * bank.wd[e][k * s.i + c] + ds2[t * s.o + k] * more.wd[e][k * s.i + c];
        for (uint32_t k = 0; k < r; k++)
          sum += dus[t * ranks + k] * bank.ad[e][k * s.i + c] + dus2[t * ranks + k] * more.ad[e][k * s.i + c];
        want_x[t * s.i + c] = sum;
      }
    }
    check::close("y", y, want, bar), check::close("dx", dx, want_x, bar);
    if (rows == 32) {
      // a few values per warp
      const auto some = [](uint32_t c) { return (c + 31) / 32; };
      if (most > 0) {
        host::Buffer<T> other(n * ranks);
        start("grouped_one_" + type, blocks(some(ranks), list.size()), 2 * s.i, bank.table.at(), x.at(), no, none, no,
              no, s.i, s.o, ranks, 1u, begins.at(), tiles.at(), other.at(), no);
        low(other, xs, s.i, bank.ad, true, bank);
      }
      host::Buffer<T> other(n * s.o);
      start("grouped_one_" + type, blocks(some(s.o), list.size()), 2 * s.i, bank.table.at(), x.at(), u.at(), none, no,
            no, s.i, s.o, ranks, 0u, begins.at(), tiles.at(), other.at(), no);
      check::close("y by warps", other, want, bar);
    }
  }

  // gradients accumulate; gaps between them stay unchanged
  std::vector<float> old = check::randn<float>(bank.gradients + 1, seed + 4);
  host::Buffer<float> grads(old);
  std::vector<double> want(old.begin(), old.end());
  const size_t side = HALF ? 128 : 64, shared = HALF ? 65536 : 0;
  const auto columns = [&](uint32_t c) { return (c + side - 1) / side; };
  const auto gradient = [&](Gradient which, host::Buffer<T> &a, uint32_t wa, host::Buffer<T> &b, uint32_t wb,
                            uint32_t rows, uint32_t cols) {
    start("grouped_gradient_" + type, blocks(columns(cols), columns(rows), experts), shared, bank.table.at(),
          static_cast<uint32_t>(which), a.at(), wa, b.at(), wb, rows, cols, begins.at(), grads.at());
    const std::vector<double> as = wide(a), bs = wide(b);
    for (uint32_t e = 0; e < experts; e++) {
      const Destination to = destination(bank.table[e], which, rows, cols);
      if (to.at == NOWHERE) continue;
      for (uint32_t y = 0; y < to.rows; y++)
        for (uint32_t x = 0; x < to.cols; x++)
          for (uint32_t t = starts[e]; t < starts[e + 1]; t++)
            want[to.at + y * to.cols + x] += as[t * wa + y] * bs[t * wb + x];
    }
  };
  // of adapters: whole vectors by a kernel of their own too, onto a buffer of its own
  if constexpr (HALF)
    if (most > 0 && s.i % 8 == 0 && s.o % 8 == 0 && s.skew == 0) {
      host::Buffer<float> own(old);
      const auto low = [&](uint32_t of_b, host::Buffer<T> &narrow, host::Buffer<T> &wide, uint32_t width) {
        start("grouped_low_gradient_" + type, blocks(columns(width), (ranks + LOW - 1) / LOW, experts),
              4 * 64 * (128 + LOW), bank.table.at(), of_b, narrow.at(), ranks, wide.at(), width, begins.at(), own.at(),
              none, no, no);
      };
      low(0, du, x, s.i), low(1, u, dy, s.o);
      std::vector<double> sums(old.begin(), old.end());
      want.swap(sums);
      gradient(OF_A, du, ranks, x, s.i, most, s.i), gradient(OF_B, dy, s.o, u, ranks, s.o, most);
      check::close("gradients of adapters", own, want, 2e-6);
      // of two tables in one launch
      host::Buffer<float> apart(old), both(old);
      const auto a_of = [&](const Expert *table, host::Buffer<T> &low, const Expert *more, T *more_low, T *more_wide,
                            host::Buffer<float> &to) {
        start("grouped_low_gradient_" + type, blocks(columns(s.i), (more ? 2 : 1) * ((ranks + LOW - 1) / LOW), experts),
              4 * 64 * (128 + LOW), table, 0u, low.at(), ranks, x.at(), s.i, begins.at(), to.at(), more, more_low,
              more_wide);
      };
      // gradients of the second table follow those of the first
      host::Buffer<Expert> after(experts);
      for (uint32_t e = 0; e < experts; e++) {
        Expert entry = more.table[e];
        entry.grad_a = bank.table[e].grad_b; // whose place is as large, or not read again
        after[e] = entry;
      }
      if (s.i == s.o) {
        a_of(bank.table.at(), du, none, no, no, apart), a_of(after.at(), u, none, no, no, apart);
        a_of(bank.table.at(), du, after.at(), u.at(), x.at(), both);
        if (memcmp(apart.at(), both.at(), apart.size() * sizeof(float)) != 0) check::wrong("other gradients together");
      }
      want.swap(sums);
      for (size_t i = 0; i < old.size(); i++) grads[i] = old[i];
    }
  gradient(OF_WEIGHT, dy, s.o, x, s.i, s.o, s.i);
  if (most > 0) gradient(OF_A, du, ranks, x, s.i, most, s.i), gradient(OF_B, dy, s.o, u, ranks, s.o, most);
  check::close("gradients", grads, want, 2e-6);
}

// Dropout on rows sorted by expert, one stream per expert, with the numbers checked in dropout.cpp.
template <typename T> static void dropout(const std::string &type, uint32_t width, bool add) {
  const uint32_t tokens = 9, k = 2, n = tokens * k, experts = 3;
  std::vector<Expert> list(experts);
  for (uint32_t e = 0; e < experts; e++) {
    memset(&list[e], 0, sizeof list[e]);
    list[e].stream = 7 * e << 8 | 5, list[e].threshold = e * 3000000u,
    list[e].keep = 1.0f + 0.25f * static_cast<float>(e);
  }
  std::vector<uint32_t> choices(n), pairs(n);
  for (uint32_t i = 0; i < n; i++) choices[i] = i * 5 % experts, pairs[i] = (i * 7 + 3) % n;
  host::Buffer<Expert> table(list);
  host::Buffer<uint32_t> chosen(choices), pair(pairs);
  host::Buffer<T> x(check::randn<T>(n * width, 1)), more(check::randn<T>(n * width, 2)), y(n * width);
  start("grouped_dropout_" + type, blocks(n, 1), 0, table.at(), chosen.at(), pair.at(), k, x.at(),
        add ? more.at() : static_cast<T *>(nullptr), width, uint64_t(100), 11u, 12u, 3u, y.at());
  const std::vector<double> xs = wide(x), ms = wide(more);
  std::vector<double> want(n * width);
  for (uint32_t r = 0; r < n; r++) {
    const Expert &e = list[choices[pairs[r]]];
    const Stream s = {11, 12, 3, e.stream, e.threshold};
    for (uint32_t c = 0; c < width; c++)
      want[r * width + c] = (s.keeps((100 + pairs[r] / k) * uint64_t(width) + c) ? xs[r * width + c] * e.keep : 0) +
                            (add ? ms[r * width + c] : 0);
  }
  check::close("dropout", y, want, check::BAR<T>);
}

template <typename T> static void all(const std::string &type) {
  for (uint32_t width : {64u, 50u})
    for (bool add : {false, true}) dropout<T>(type, width, add);
  std::vector<Sizes> sizes = {
      {{5, 0, 40, 1}, 64, 96, {8, 8, 0, 16}, 2, false},
      {{3, 130, 0}, 96, 160, {4, 16, 5}, 1, true},
      {{9, 2}, 50, 37, {3, 0}, 2, true},
      {{33, 7}, 72, 136, {0, 0}, 0, false, 1},
      {{70}, 32, 200, {40}, 1, true},
      // more columns than a block covers, and more scales than its window holds
      {{9, 0, 3}, 1600, 200, {8, 0, 3}, 1, true},
      {{20}, 896, 136, {16}, 1, true},
      {{20, 3}, 64, 64, {16, 40}, 0, false},
      {{4}, 896, 64, {0}, 1, false},
      // one case per tile shape for partly filled experts
      {{100, 90, 60}, 480, 72, {8, 0, 3}, 1, true},
  };
  // f16 differs from bf16 by its conversions
  if (type == "f16" && !check::nightly()) sizes.resize(5);
  unsigned seed = 1;
  for (const Sizes &s : sizes) grouped<T>(type, s, seed++);
}

TEST(products_in_f32) { all<float>("f32"); }
TEST(products_in_bf16) { all<bf16>("bf16"); }
TEST(products_in_f16) { all<f16>("f16"); }

// Bytes of touched sectors, relative to codes, scales and tokens. In forward everything is read once,
// except tokens (once per column tile) and some scales. Every ninth case, all in the nightly tier.
TEST(bytes) {
  if (!check::COUNTED) return;
  struct Case {
    const char *name;
    uint32_t tokens, i, o;
    bool nested = true;
  };
  const uint32_t d = 2048, f = 768; // Qwen3-30B-A3B; Mixtral has 4096 and 14336
  int number = 0;
  for (const Case &c : {Case{"one", 1, d, f},
                        {"one", 1, 4096, 256},
                        {"one", 1, 14336, 128},
                        {"one", 1, d, f, false},
                        {"few_forward", 1, d, f},
                        {"few_forward", 1, f, d},
                        {"few_forward", 8, d, f},
                        {"few_forward", 8, f, d},
                        {"coded_forward", 33, d, f},
                        {"coded_forward", 33, f, d},
                        {"coded_forward", 128, d, f},
                        {"coded_forward", 128, f, d},
                        {"few_backward", 1, d, f},
                        {"few_backward", 1, f, d},
                        {"few_backward", 8, d, f},
                        {"few_backward", 8, f, d},
                        {"few_backward", 8, d, f, false},
                        {"few_backward", 8, f, d, false},
                        {"few_backward", 1, 4096, 1024},
                        {"few_backward", 1, 14336, 256},
                        {"coded_backward", 33, d, f},
                        {"coded_backward", 64, f, d},
                        {"coded_backward", 96, 14336, 256},
                        {"coded_backward", 72, d, f, false},
                        {"coded_backward", 128, d, f},
                        {"coded_backward", 128, f, d},
                        {"coded_backward", 128, 4096, 1024},
                        {"coded_backward", 128, 14336, 256}}) {
    if (number++ % 9 && !check::nightly()) continue;
    const std::string name = std::string("grouped_") + c.name + "_bf16";
    const bool one = name.find("one") != std::string::npos, forward = one || name.find("forward") != std::string::npos;
    const bool few = name.find("few_backward") != std::string::npos;
    const uint32_t beside = few ? WIDE : 1; // column tiles of a block
    const uint32_t in = forward ? c.i : c.o, out = forward ? c.o : c.i, side = one ? 32 : 128 * beside,
                   columns = (out + side - 1) / side;
    Bank<bf16> bank({{c.tokens}, c.i, c.o, {0}, 1, c.nested}, 7);
    bank.table[0].group_shift = 8;
    host::Buffer<uint32_t> starts(std::vector<uint32_t>{0, c.tokens});
    host::Buffer<uint2> tiles(std::vector<uint2>{make_uint2(0, 0)});
    host::Buffer<bf16> x(check::randn<bf16>(c.tokens * in, 1)), y(c.tokens * out);
    bf16 *const no = nullptr;
    host::forget();
    start(name, blocks(columns, 1),
          one ? 2 * in
              : shared_of(std::string(c.name).find("coded_") == 0 ? "coded_" : "few_", c.tokens > 32 ? 128 : 32),
          bank.table.at(), x.at(), no, static_cast<const Expert *>(nullptr), no, no, in, out, 0u, 0u, starts.at(),
          tiles.at(), y.at(), no);
    const auto found = host::counts().find(name);
    if (found == host::counts().end()) check::wrong(name + " is not counted");
    const double codes = c.i * c.o / 2.0 + c.i * c.o / 64.0 * (c.nested ? 1 + 4.0 / 256 : 4),
                 tokens = 2.0 * c.tokens * (in * columns + out);
    const double moved = 32.0 * static_cast<double>(found->second.sectors);
    printf("%s of [%u, %u], %u tokens: %.3f of codes and scales, %.3f with tokens\n", name.c_str(), c.o, c.i, c.tokens,
           moved / codes, moved / (codes + tokens));
    // With many rows, each load of a sector of codes comes with one of scales (backward: every second one), from the
    // cache but for the first of 32 blocks, and some of absmax. Each nested scale also has one of its map of 1 KiB,
    // which the cache keeps.
    const double of_scales = (forward ? 1.0 : 0.5) * (c.nested ? 1.2 : 1.0), of_map = c.nested ? 1.0 : 0.0;
    const double again = name.find("coded_") != std::string::npos ? c.i * c.o / 2.0 * (of_scales + of_map) : 0;
    if (!(moved <= 1.1 * (codes + tokens + again)))
      check::wrong(name + ": " + std::to_string(moved / (codes + tokens)) + " of codes, scales and tokens");
  }
}

TEST(measured) {
  dropout<float>("f32", 4096, true), dropout<bf16>("bf16", 4096, true), dropout<f16>("f16", 4096, true);
  for (bool codes : {false, true}) {
    const Sizes s = {{128, 128}, 256, 128, {32, 32}, codes, false};
    grouped<float>("f32", s, 1), grouped<bf16>("bf16", s, 1), grouped<f16>("f16", s, 1);
    const Sizes half_full = {{96, 64}, 512, 128, {32, 32}, codes, false};
    grouped<bf16>("bf16", half_full, 1), grouped<f16>("f16", half_full, 1);
  }
}
