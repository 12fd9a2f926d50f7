// Reference attention in float64, and test cases for all variants.
#include <algorithm>
#include <memory>
#include "call.h"

struct Case {
  std::vector<uint32_t> docs;
  uint32_t heads, groups, window = 0x7fffffff, first_query = 0;
  uint32_t tokens() const {
    uint32_t n = 0;
    for (uint32_t d : docs) n += d;
    return n;
  }
};

// As in attention/tiles.rs: the heaviest tiles first.
inline std::vector<Tile> tiles_of(const Case &c, bool queries) {
  std::vector<Tile> out;
  uint32_t at = 0;
  for (uint32_t d : c.docs) {
    for (uint32_t i = queries ? std::max(at, c.first_query) : at; i < at + d; i += ROWS)
      out.push_back({i, std::min<uint32_t>(ROWS, at + d - i), at, at + d});
    at += d;
  }
  std::stable_sort(out.begin(), out.end(), [&](const Tile &a, const Tile &b) {
    return queries ? a.first + a.rows - a.begin > b.first + b.rows - b.begin : a.end - a.first > b.end - b.first;
  });
  return out;
}

// Keys and values [tokens, width] in cache blocks (attention/cache.rs); the last block may be shorter.
template <typename T> struct Blocks {
  std::vector<std::unique_ptr<host::Buffer<T>>> held;
  host::Buffer<uint64_t> table;
  Blocks(const std::vector<T> &k, const std::vector<T> &v, size_t width)
      : table((k.size() / width + BLOCK - 1) / BLOCK * 2) {
    for (size_t i = 0; i < table.size(); i++) {
      const std::vector<T> &all = i % 2 == 0 ? k : v;
      const size_t from = i / 2 * BLOCK * width, to = std::min(all.size(), from + BLOCK * width);
      held.emplace_back(new host::Buffer<T>(
          std::vector<T>(all.begin() + static_cast<long>(from), all.begin() + static_cast<long>(to))));
      table[i] = reinterpret_cast<uint64_t>(held.back()->at());
    }
  }
};

struct Want {
  std::vector<double> o, lse, dq, dk, dv;
};

template <typename T> double wide(T x) { return Number<T>::widen(x); }

template <typename T>
Want attention(const Case &c, uint32_t n, double scale, const std::vector<T> &q, const std::vector<T> &k,
               const std::vector<T> &v, const std::vector<T> &d_o, host::Buffer<T> &o) {
  const uint32_t keys = c.tokens(), t = keys - c.first_query;
  Want w;
  w.o.resize(q.size()), w.dq.resize(q.size()), w.dk.resize(k.size()), w.dv.resize(k.size()),
      w.lse.resize(size_t(t) * c.heads);
  std::vector<uint32_t> begin;
  for (uint32_t d : c.docs) begin.insert(begin.end(), d, static_cast<uint32_t>(begin.size()));
  for (uint32_t i = 0; i < t; i++)
    for (uint32_t h = 0; h < c.heads; h++) {
      const uint32_t query = i + c.first_query, g = h / (c.heads / c.groups);
      const uint32_t first = std::max<int64_t>(begin[query], int64_t(query) + 1 - c.window);
      const size_t at = (size_t(i) * c.heads + h) * n;
      std::vector<double> p, dp;
      double top = -1e300, sum = 0, delta = 0;
      for (uint32_t j = first; j <= query; j++) {
        const size_t key = (size_t(j) * c.groups + g) * n;
        double s = 0, d = 0;
        for (uint32_t x = 0; x < n; x++)
          s += wide(q[at + x]) * wide(k[key + x]), d += wide(d_o[at + x]) * wide(v[key + x]);
        p.push_back(s * scale), dp.push_back(d), top = std::max(top, s * scale);
      }
      for (double &x : p) sum += x = exp(x - top);
      w.lse[size_t(h) * t + i] = top + log(sum);
      for (size_t j = 0; j < p.size(); j++) {
        const size_t key = (size_t(first + j) * c.groups + g) * n;
        p[j] /= sum;
        for (uint32_t x = 0; x < n; x++) w.o[at + x] += p[j] * wide(v[key + x]);
      }
      // from the saved, rounded output, as in the kernels
      for (uint32_t x = 0; x < n; x++) delta += wide(d_o[at + x]) * wide(o[at + x]);
      for (size_t j = 0; j < p.size(); j++) {
        const size_t key = (size_t(first + j) * c.groups + g) * n;
        const double ds = p[j] * (dp[j] - delta) * scale;
        for (uint32_t x = 0; x < n; x++) {
          w.dq[at + x] += ds * wide(k[key + x]), w.dk[key + x] += ds * wide(q[at + x]),
              w.dv[key + x] += p[j] * wide(d_o[at + x]);
        }
      }
    }
  return w;
}

// Runs the kernels with suffix `name` on a case. `shared`: shared memory of the three kernels, and of pairs forward and
// for dk and dv; `zq`, `z`: blocks per tile of queries and of keys in the third grid dimension.
template <typename T>
void run(const Case &c, uint32_t n, const std::string &name, std::vector<size_t> shared, unsigned zq, unsigned z,
         double bar, unsigned seed) {
  const uint32_t keys = c.tokens(), t = keys - c.first_query;
  const size_t nq = size_t(t) * c.heads * n, nk = size_t(keys) * c.groups * n;
  const float scale = 1 / sqrtf(static_cast<float>(n));
  const auto q = check::randn<T>(nq, seed), k = check::randn<T>(nk, seed + 1), v = check::randn<T>(nk, seed + 2),
             d_o = check::randn<T>(nq, seed + 3);
  host::Buffer<T> bq(q), bk(k), bv(v), bg(d_o), dq(nq), dk(nk);
  // with padded rows of o and dv
  const uint32_t of_o = c.heads * n, of_v = c.groups * n, room = 16;
  host::Buffer<T> far(size_t(t) * (of_o + room)), wide_v(size_t(keys) * (of_v + room));
  host::Buffer<float> lse(size_t(t) * c.heads), delta(size_t(t) * c.heads);
  host::Buffer<Tile> tq(tiles_of(c, true)), tk(tiles_of(c, false));
  host::seed(seed);
  const auto launch = [&](const char *kernel, Dim grid, size_t bytes, auto... rest) {
    const std::string full = kernel + name;
    const bool of_keys = full.find("_kv_") != std::string::npos;
    Shape s = {t, c.heads, c.groups, n, c.first_query, c.window, scale, (of_keys ? of_v : of_o) + room};
    std::vector<void *> arguments = {static_cast<void *>(&rest)...};
    // the shape arguments follow the tiles: the first non-pointer
    const std::vector<size_t> &sizes = host::kernels().at(full).sizes;
    const size_t at = static_cast<size_t>(std::find(sizes.begin(), sizes.end(), 4u) - sizes.begin());
    void *shape[] = {&s.tokens, &s.heads, &s.groups, &s.channels, &s.first_query, &s.window, &s.scale, &s.apart};
    arguments.insert(arguments.begin() + static_cast<long>(at), shape, shape + 8);
    if (arguments.size() != sizes.size()) check::wrong(full + ": another number of arguments");
    host::launch(full.c_str(), grid, host::kernels().at(full).threads, bytes, arguments.data());
  };
  launch("attention_forward_", {unsigned(tq.size() * c.heads), 1, zq}, shared[0], bq.at(), bk.at(), bv.at(), tq.at(),
         far.at(), lse.at());
  // reading from a cache gives the same bits
  Blocks<T> blocks(k, v, of_v);
  host::Buffer<T> again(size_t(t) * (of_o + room));
  host::Buffer<float> lse_again(lse.size());
  launch("attention_cached_", {unsigned(tq.size() * c.heads), 1, zq}, shared[0], bq.at(), blocks.table.at(), tq.at(),
         again.at(), lse_again.at());
  if (memcmp(lse.at(), lse_again.at(), lse.size() * 4) != 0) check::wrong(name + ": another log-sum-exp of a cache");
  for (size_t i = 0; i < t; i++)
    if (memcmp(far.at() + i * (of_o + room), again.at() + i * (of_o + room), of_o * sizeof(T)) != 0)
      check::wrong(name + ": another output of a cache");
  launch("attention_backward_q_", {unsigned(tq.size() * c.heads), 1, zq}, shared[1], bq.at(), bk.at(), bv.at(),
         far.at(), bg.at(), lse.at(), tq.at(), delta.at(), dq.at());
  launch("attention_backward_kv_", {unsigned(tk.size() * c.groups), 1, z}, shared[2], bq.at(), bk.at(), bv.at(),
         bg.at(), lse.at(), delta.at(), tk.at(), dk.at(), wide_v.at());
  host::Buffer<T> bo = compact(far, of_o, of_o + room), dv = compact(wide_v, of_v, of_v + room);
  const Want want = attention(c, n, scale, q, k, v, d_o, bo);
  check::close("o", bo, want.o, bar);
  check::close("log-sum-exp", lse, want.lse, 1e-5);
  // if each query sees one key, the first two gradients are zero up to rounding
  const double least = sqrt(double(nk)) * 0.01;
  const auto grown = [&](std::vector<double> w, host::Buffer<T> &got, const char *what) {
    double length = 0, apart = 0;
    for (size_t i = 0; i < w.size(); i++) {
      const double e = wide(got[i]) - w[i];
      length += w[i] * w[i], apart += e * e;
    }
    const double d = sqrt(apart) / std::max(sqrt(length), least);
    if (!(d <= 2 * bar))
      check::wrong(name + " " + what + ": " + std::to_string(d) + " of " + std::to_string(t) + " queries");
  };
  grown(want.dq, dq, "dq"), grown(want.dk, dk, "dk"), grown(want.dv, dv, "dv");
  if (!host::kernels().count("attention_forward_pair_" + name)) return;
  // warps with twice as many queries or keys; gradients have the same bits
  launch("attention_forward_pair_", {unsigned(tq.size() * c.heads), 1, zq}, shared[3], bq.at(), bk.at(), bv.at(),
         tq.at(), again.at(), lse_again.at());
  check::close("log-sum-exp by pairs", lse_again, want.lse, 1e-5);
  host::Buffer<T> other = compact(again, of_o, of_o + room), other_dq(nq);
  check::close("o by pairs", other, want.o, bar);
  host::Buffer<T> cached(size_t(t) * (of_o + room));
  host::Buffer<float> other_lse(lse.size()), other_delta(delta.size());
  launch("attention_cached_pair_", {unsigned(tq.size() * c.heads), 1, zq}, shared[3], bq.at(), blocks.table.at(),
         tq.at(), cached.at(), other_lse.at());
  host::Buffer<T> of_cache = compact(cached, of_o, of_o + room);
  if (memcmp(other_lse.at(), lse_again.at(), lse.size() * 4) != 0 ||
      memcmp(of_cache.at(), other.at(), other.size() * sizeof(T)) != 0)
    check::wrong(name + ": another output of a cache by pairs");
  launch("attention_backward_q_pair_", {unsigned(tq.size() * c.heads), 1, zq}, shared[1], bq.at(), bk.at(), bv.at(),
         far.at(), bg.at(), lse.at(), tq.at(), other_delta.at(), other_dq.at());
  if (memcmp(dq.at(), other_dq.at(), nq * sizeof(T)) != 0 ||
      memcmp(delta.at(), other_delta.at(), delta.size() * 4) != 0)
    check::wrong(name + ": another dq by pairs");
  if (!host::kernels().count("attention_backward_kv_pair_" + name)) return;
  host::Buffer<T> other_dk(nk), other_wide(wide_v.size());
  launch("attention_backward_kv_pair_", {unsigned(tk.size() * c.groups), 1, z}, shared[4], bq.at(), bk.at(), bv.at(),
         bg.at(), lse.at(), delta.at(), tk.at(), other_dk.at(), other_wide.at());
  host::Buffer<T> other_dv = compact(other_wide, of_v, of_v + room);
  if (memcmp(dk.at(), other_dk.at(), nk * sizeof(T)) != 0 || memcmp(dv.at(), other_dv.at(), nk * sizeof(T)) != 0)
    check::wrong(name + ": another dk or dv by pairs");
}

inline std::vector<Case> cases() {
  return {
      {{1}, 1, 1},
      {{2}, 2, 1},
      {{64}, 2, 1},
      {{65}, 2, 2},
      {{70, 1, 59}, 4, 2},
      {{150, 3, 33}, 1, 1},
      {{66, 10}, 1, 1, 1},
      {{150, 30}, 1, 1, 40},
      {{140}, 1, 1, 64},
      {{90}, 2, 1, 0x7fffffff, 89},
      {{140}, 2, 1, 50, 100},
      {{150}, 1, 1, 20, 140},
      // longer than one cache block
      {{1100}, 2, 1, 0x7fffffff, 1090},
      {{1600}, 1, 1, 300, 1530},
  };
}
