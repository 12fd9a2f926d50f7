// Router and sorting of tokens by expert: choices, gates, gradients, sums and schedules, compared with
// host results.
#include "../../crates/ft-kernels/src/experts/route/route.cu"
namespace dispatch {
#include "../../crates/ft-kernels/src/experts/dispatch/dispatch.cu"
}
#include "call.h"
#include <algorithm>

struct Router {
  uint32_t t, e, k;
  bool normalise, ties;
};

static void route(const Router &r, unsigned seed) {
  const size_t n = r.t * r.e, pairs = r.t * r.k;
  host::Buffer<float> logits(check::randn<float>(n, seed, 2)), probs(n), lse(r.t), gates(pairs), again(pairs);
  if (r.ties)
    for (size_t i = 0; i < n; i++) logits[i] = static_cast<float>(static_cast<int>(logits[i]));
  host::Buffer<uint32_t> chosen(pairs);
  const Dim blocks = grid((r.t + 7) / 8);
  call("route_forward", blocks, THREADS, logits.at(), r.t, r.e, r.k, 0u, uint32_t(r.normalise), chosen.at(), probs.at(),
       lse.at(), gates.at());
  const std::vector<double> x = values(logits);
  std::vector<double> p(n), l(r.t), g(pairs);
  for (uint32_t t = 0; t < r.t; t++) {
    double sum = 0, all = 0;
    for (uint32_t e = 0; e < r.e; e++) sum += exp(x[t * r.e + e]);
    l[t] = log(sum);
    std::vector<uint32_t> order;
    for (uint32_t e = 0; e < r.e; e++) p[t * r.e + e] = exp(x[t * r.e + e]) / sum, order.push_back(e);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return logits[t * r.e + a] > logits[t * r.e + b]; });
    for (uint32_t j = 0; j < r.k; j++) {
      if (chosen[t * r.k + j] != order[j]) check::wrong("another expert");
      all += p[t * r.e + order[j]];
    }
    for (uint32_t j = 0; j < r.k; j++) g[t * r.k + j] = p[t * r.e + order[j]] / (r.normalise ? all : 1);
  }
  check::close("probabilities", probs, p, 1e-6), check::close("logsumexp", lse, l, 1e-6),
      check::close("gates", gates, g, 1e-6);
  // replays the same choices
  call("route_forward", blocks, THREADS, logits.at(), r.t, r.e, r.k, 1u, uint32_t(r.normalise), chosen.at(), probs.at(),
       lse.at(), again.at());
  check::close("gates again", again, values(gates), 0);

  host::Buffer<float> dgates(check::randn<float>(pairs, seed + 1)), extra(check::randn<float>(r.e, seed + 2)), dx(n);
  float *no = nullptr;
  for (bool losses : {false, true}) {
    const float z = losses ? 0.25f : 0.0f;
    call("route_backward", blocks, THREADS, probs.at(), lse.at(), gates.at(), chosen.at(), dgates.at(),
         losses ? extra.at() : no, z, r.t, r.e, r.k, uint32_t(r.normalise), dx.at());
    std::vector<double> want(n);
    for (uint32_t t = 0; t < r.t; t++) {
      double mean = 0, sum = 1, inner = 0;
      if (r.normalise) {
        sum = 0;
        for (uint32_t j = 0; j < r.k; j++)
          mean += gates[t * r.k + j] * dgates[t * r.k + j], sum += p[t * r.e + chosen[t * r.k + j]];
      }
      std::vector<double> d(r.e);
      for (uint32_t e = 0; e < r.e; e++) d[e] = losses ? extra[e] : 0;
      for (uint32_t j = 0; j < r.k; j++) d[chosen[t * r.k + j]] += (dgates[t * r.k + j] - mean) / sum;
      for (uint32_t e = 0; e < r.e; e++) inner += p[t * r.e + e] * d[e];
      for (uint32_t e = 0; e < r.e; e++) want[t * r.e + e] = p[t * r.e + e] * (d[e] + z * l[t] - inner);
    }
    check::close("dlogits", dx, want, 2e-6);
  }

  // sorted by expert, then by pair
  host::Buffer<uint32_t> starts(r.e + 1), token(pairs), pair(pairs), place(pairs);
  call("dispatch_sort", grid(r.e), dispatch::SORT_THREADS, chosen.at(), uint32_t(pairs), r.k, starts.at(), token.at(),
       pair.at(), place.at());
  std::vector<uint32_t> order(pairs);
  for (uint32_t i = 0; i < pairs; i++) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return chosen[a] < chosen[b]; });
  for (uint32_t i = 0; i < pairs; i++)
    if (pair[i] != order[i] || token[i] != order[i] / r.k || place[order[i]] != i) check::wrong("another order");
  std::vector<uint2> want;
  for (uint32_t e = 0; e < r.e; e++)
    for (uint32_t first = starts[e]; first < starts[e + 1]; first += 32) want.push_back(make_uint2(e, first));
  const uint32_t most = static_cast<uint32_t>(pairs / 32 + std::min<size_t>(pairs, r.e));
  if (want.size() > most) check::wrong("more tiles than there may be");
  want.resize(most, make_uint2(dispatch::NONE, 0));
  host::Buffer<uint2> tiles(most);
  host::launch("dispatch_tiles", grid((most + 255) / 256), 256, 4 * r.e,
               [&] { dispatch::dispatch_tiles(starts.at(), r.e, 32, most, tiles.at()); });
  for (uint32_t i = 0; i < most; i++)
    if (tiles[i].x != want[i].x || tiles[i].y != want[i].y) check::wrong("another schedule");

  // sums over tokens, and results computed from them
  host::Buffer<double> sums(2 * r.e + 1);
  for (bool losses : {false, true}) {
    call("route_sums", grid((r.e + 32) / 32), SUM_THREADS, losses ? probs.at() : no, losses ? lse.at() : no,
         starts.at(), r.t, r.e, sums.at());
    for (uint32_t e = 0; e <= r.e; e++) {
      double sum = 0;
      for (uint32_t t = 0; losses && t < r.t; t++) sum += e < r.e ? p[t * r.e + e] : l[t] * l[t];
      if (fabs(sums[r.e + e] - sum) > 1e-5 * (1 + sum)) check::wrong("a sum");
      if (e < r.e && sums[e] != starts[e + 1] - starts[e]) check::wrong("a count");
    }
  }
  host::Buffer<double> two(2 * (2 * r.e + 1));
  for (size_t i = 0; i < two.size(); i++) two[i] = sums[i % (2 * r.e + 1)];
  host::Buffer<float> dp(r.e);
  call("route_balance", grid((r.e + 255) / 256), THREADS, two.at(), 2u, r.e, 0.5f, dp.at());
  for (uint32_t e = 0; e < r.e; e++)
    if (dp[e] != static_cast<float>(sums[e])) check::wrong("a share");
}

TEST(routes_of_all_sizes) {
  unsigned seed = 1;
  for (const Router &r : std::vector<Router>{{70, 4, 2, true, false},
                                             {9, 33, 3, false, true},
                                             {100, 128, 8, true, true},
                                             {1, 8, 8, false, false},
                                             {300, 6, 1, true, false}})
    route(r, seed++);
}

TEST(rows_without_numbers_are_routed_somewhere) {
  host::Buffer<float> logits(std::vector<float>(5, NAN)), probs(5), lse(1), gates(2);
  host::Buffer<uint32_t> chosen(2);
  call("route_forward", grid(1), THREADS, logits.at(), 1u, 5u, 2u, 0u, 1u, chosen.at(), probs.at(), lse.at(),
       gates.at());
  if (chosen[0] != 0 || chosen[1] != 1) check::wrong("other experts");
}

// Gathers rows into expert order and back.
template <typename T>
static void rows(const std::string &type, uint32_t tokens, uint32_t k, uint32_t width, unsigned seed) {
  const uint32_t n = tokens * k;
  std::vector<uint32_t> pairs(n), where(n), of(n);
  for (uint32_t i = 0; i < n; i++) pairs[i] = (i * 7 + 3) % n; // 7 divides none of the row counts
  for (uint32_t i = 0; i < n; i++) where[pairs[i]] = i, of[i] = pairs[i] / k;
  host::Buffer<uint32_t> pair(pairs), place(where), token(of);
  host::Buffer<T> x(check::randn<T>(tokens * width, seed)), y(n * width), z(tokens * width),
      add(check::randn<T>(tokens * width, seed + 1));
  host::Buffer<float> gates(check::randn<float>(n, seed + 2)), dgates(n);
  const std::vector<double> xs = values(x), as = values(add);
  call("dispatch_gather_" + type, grid(n), 128, x.at(), token.at(), width, y.at());
  std::vector<double> want(n * width);
  for (uint32_t i = 0; i < n * width; i++) want[i] = xs[of[i / width] * width + i % width];
  check::close("gathered", y, want, 0);
  T *no = nullptr;
  float *none = nullptr;
  for (bool gated : {false, true}) {
    std::vector<double> sum(tokens * width), ys = values(y);
    for (uint32_t i = 0; i < n; i++)
      for (uint32_t c = 0; c < width; c++)
        sum[i / k * width + c] += (gated ? gates[i] : 1.0) * ys[where[i] * width + c];
    if (gated)
      for (size_t i = 0; i < sum.size(); i++) sum[i] += as[i];
    call("dispatch_combine_" + type, grid(tokens), 128, y.at(), place.at(), gated ? gates.at() : none,
         gated ? add.at() : no, k, width, z.at());
    check::close("combined", z, sum, check::BAR<T>);
  }
  // outputs are replaced by their gradients
  std::vector<double> dots(n), ys = values(y);
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t c = 0; c < width; c++) {
      const double d = as[of[i] * width + c];
      dots[pairs[i]] += d * ys[i * width + c], want[i * width + c] = gates[pairs[i]] * d;
    }
  // rows times their gates, apart and in place
  host::Buffer<T> weighed(n * width);
  std::vector<double> products(n * width);
  for (uint32_t i = 0; i < n * width; i++) products[i] = gates[pairs[i / width]] * ys[i];
  const uint32_t each = 128 * VECTOR<T>;
  call("dispatch_weigh_" + type, grid((n * width + each - 1) / each), 128, y.at(), pair.at(), gates.at(),
       static_cast<uint64_t>(n * width), width, weighed.at());
  check::close("weighed", weighed, products, check::BAR<T>);
  for (size_t i = 0; i < n * width; i++) weighed[i] = y[i];
  call("dispatch_weigh_" + type, grid((n * width + each - 1) / each), 128, weighed.at(), pair.at(), gates.at(),
       static_cast<uint64_t>(n * width), width, weighed.at());
  check::close("weighed in place", weighed, products, check::BAR<T>);
  call("dispatch_scale_" + type, grid(n), 128, add.at(), token.at(), pair.at(), gates.at(), width, y.at(), dgates.at());
  check::close("gradient of gates", dgates, dots, 1e-5), check::close("gradient of rows", y, want, check::BAR<T>);
}

template <typename T> static void all(const std::string &type) {
  rows<T>(type, 10, 2, 64, 1), rows<T>(type, 5, 3, 50, 2), rows<T>(type, 3, 1, 7, 3), rows<T>(type, 2, 4, 2048, 4);
}
TEST(rows_in_f32) { all<float>("f32"); }
TEST(rows_in_bf16) { all<bf16>("bf16"); }
TEST(rows_in_f16) { all<f16>("f16"); }

TEST(measured) {
  route({64, 128, 8, true, false}, 1);
  rows<float>("f32", 10, 2, 1024, 1), rows<bf16>("bf16", 10, 2, 1024, 1), rows<f16>("f16", 10, 2, 1024, 1);
}
