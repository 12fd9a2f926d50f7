// Shared code of the test programs: named tests, random values, comparison with float64.
#pragma once
#include <random>

namespace check {

struct Test {
  const char *name;
  void (*run)();
};
inline std::vector<Test> &tests() {
  static std::vector<Test> all;
  return all;
}
struct Add {
  Add(const char *name, void (*run)()) { tests().push_back({name, run}); }
};
inline const char *running = "";

// Whether loads and stores are counted.
#ifdef __SANITIZE_THREAD__
constexpr bool COUNTED = true;
#else
constexpr bool COUNTED = false;
#endif

// The nightly tier (FT_TIER=nightly): all cases of the slow tests.
inline bool nightly() {
  const char *tier = getenv("FT_TIER");
  return tier && std::string(tier) == "nightly";
}

[[noreturn]] inline void wrong(const std::string &what) {
  fprintf(stderr, "%s: %s\n", running, what.c_str());
  fflush(stderr);
  _Exit(1);
}

// Random values representable in T.
template <typename T> std::vector<T> randn(size_t n, unsigned seed, float scale = 1.0f) {
  std::mt19937 r(seed);
  std::normal_distribution<float> d;
  std::vector<T> v(n);
  for (T &x : v) x = Number<T>::from(scale * d(r));
  return v;
}

// Relative L2 distance of two lists; infinite if any value is NaN.
template <typename T> double distance(host::Buffer<T> &got, const std::vector<double> &want) {
  double apart = 0, length = 0;
  if (got.size() != want.size()) wrong("another number of values");
  for (size_t i = 0; i < want.size(); i++) {
    const double e = static_cast<double>(Number<T>::widen(got[i])) - want[i];
    apart += e * e, length += want[i] * want[i];
  }
  const double d = sqrt(apart) / std::max(sqrt(length), 1e-30);
  return d == d ? d : INFINITY;
}

template <typename T> void close(const char *what, host::Buffer<T> &got, const std::vector<double> &want, double bar) {
  const double d = distance(got, want);
  if (!(d <= bar)) {
    char s[200];
    snprintf(s, sizeof s, "%s: %.2e, bar %.0e", what, d, bar);
    wrong(s);
  }
}
template <typename T> void close(const char *what, host::Buffer<T> &&got, const std::vector<double> &want, double bar) {
  close(what, got, want, bar);
}

// Tolerance for rounding to T: half an ulp of a value, doubled.
template <typename T> constexpr double BAR = sizeof(T) == 4 ? 2e-6 : std::is_same<T, bf16>::value ? 4e-3 : 5e-4;

} // namespace check

#define TEST(NAME)                                                                                                     \
  static void NAME();                                                                                                  \
  static const check::Add NAME##_added(#NAME, NAME);                                                                   \
  static void NAME()

// Runs all tests, or the named ones. Then prints access costs of the kernels in tests with the prefix
// `measured`, one line per kernel. These tests must use sizes without tails, and run where accesses are counted.
int main(int count, char **names) {
  std::map<std::string, host::Counts> measured;
  for (const check::Test &t : check::tests()) {
    bool wanted = count == 1;
    for (int i = 1; i < count; i++) wanted |= std::string(t.name) == names[i];
    const bool counts = std::string(t.name).rfind("measured", 0) == 0;
    if (!wanted || (counts && !check::COUNTED && !check::nightly())) continue;
    check::running = t.name;
    host::forget();
    t.run();
    printf("ok: %s\n", t.name);
    if (counts) measured.insert(host::counts().begin(), host::counts().end());
  }
  for (const auto &[name, c] : measured)
    printf("kernel %s %.1f %.2f\n", name.c_str(),
           c.sectors ? 100.0 * static_cast<double>(c.asked) / (32.0 * static_cast<double>(c.sectors)) : 100.0,
           c.phases ? static_cast<double>(c.passes) / static_cast<double>(c.phases) : 1.0);
}
