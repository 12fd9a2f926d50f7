// CUDA emulation on the host, as needed by crates/ft-kernels/src/cuda/device.cuh: kernel sources are compiled as
// plain C++ with this header in place of the CUDA headers, and run by host.cpp. Blocks run one after
// another. The threads of a block are fibers, scheduled in a seeded random order; each runs until a warp
// instruction or a barrier.
//
// The program ends (exit status 3, reporting kernel, block and thread) on:
// - lanes of a warp waiting at different instructions, or warps done while others wait at a barrier;
// - a read of shared memory that is uninitialized, not yet delivered by cp.async, or out of bounds;
// - conflicting accesses of two threads to a byte of shared memory without a barrier (or __syncwarp) in
//   between;
// - conflicting accesses of two blocks to a byte of a Buffer.
//
// Plain C++ loads and stores are observed if compiled with -fsanitize=thread, through the inserted
// callbacks, which host.cpp implements. With -fsanitize=address,undefined instead, out-of-bounds and
// misaligned accesses to Buffers and undefined arithmetic are detected.
//
// crates/ft-kernels/src/cuda/host_tests.rs compiles and runs the programs in this folder, both ways. The test of a
// source is a file here:
//
//   #include "../../crates/ft-kernels/src/scale.cu"
//   #include "check.h"
//   TEST(scales_every_value) {
//     host::Buffer<bf16> x(n), y(n);
//     LAUNCH(scale_bf16, ({blocks}), 0, x.at(), 2.0f, n, y.at());
//   }
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define NOT_WATCHED __attribute__((no_sanitize("thread"), noinline))

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};
extern Dim threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace host {

enum class Op { None, Mma, MmaTf32, Load, LoadTransposed, Shuffle, Vote, SyncWarp, Barrier, Done };
enum class Lane { Index, Xor, Up, Down };

// A thread's pending operation, with the addresses of its registers.
struct Meet {
  Op op = Op::None;
  void *out = nullptr;
  const void *a = nullptr, *b = nullptr;
  int kind = 0, argument = 0, width = 32;
  uint32_t value = 0;
};

// A kernel registered by KERNEL.
struct Kernel {
  unsigned threads;
  std::vector<size_t> sizes; // argument sizes
  std::function<void(void **)> call;
};
std::map<std::string, Kernel> &kernels();

template <typename... Args, size_t... I>
std::function<void(void **)> caller(void (*f)(Args...), std::index_sequence<I...>) {
  return [f](void **p) { f(*static_cast<Args *>(p[I])...); };
}
struct Known {
  template <typename... Args> Known(const char *name, unsigned threads, void (*f)(Args...)) {
    kernels()[name] = {threads, {sizeof(Args)...}, caller(f, std::index_sequence_for<Args...>{})};
  }
};

void launch(const char *name, Dim grid, unsigned threads, size_t shared_bytes, const std::function<void()> &body);
void launch(const char *name, Dim grid, unsigned threads, size_t shared_bytes, void **arguments);
// Seeds the thread order.
void seed(unsigned n);
// Reports a failure and exits.
[[noreturn]] void fail(const std::string &why);

unsigned char *dynamic_shared();
void *static_shared(const void *key, size_t bytes);
void meet(const Meet &m);
void access(const void *p, size_t n, bool write, const void *at);
void cp_async(void *to, const void *from, bool some);
void cp_async_commit();
void cp_async_wait(int left);

// Device memory with bounds known to host.cpp, used by Buffer.
void *allocate(size_t bytes, size_t skew);
void release(void *p, size_t skew);

// Device values: exactly `n`, initialized to NaN (0xff bytes), starting `skew` values past an aligned
// address.
template <typename T> class Buffer {
  T *p;
  size_t n, skew;

public:
  explicit Buffer(size_t n, size_t skew = 0)
      : p(static_cast<T *>(allocate(n * sizeof(T), skew * sizeof(T)))), n(n), skew(skew) {}
  explicit Buffer(const std::vector<T> &v, size_t skew = 0) : Buffer(v.size(), skew) {
    for (size_t i = 0; i < n; i++) p[i] = v[i];
  }
  Buffer(const Buffer &) = delete;
  ~Buffer() { release(p, skew * sizeof(T)); }
  T *at() { return p; }
  size_t size() const { return n; }
  T &operator[](size_t i) { return p[i]; }
};

// Access costs of a kernel since the last call of `forget`.
struct Counts {
  uint64_t launches = 0;
  // 32-byte sectors of global memory touched by warps, bytes requested from them
  uint64_t sectors = 0, asked = 0;
  uint64_t phases = 0, passes = 0; // shared memory: minimum passes by width, and passes with bank conflicts
  uint64_t mma = 0;
};
std::map<std::string, Counts> &counts();
void forget();

} // namespace host

#define KERNEL(NAME, THREADS, ...)                                                                                     \
  void NAME(__VA_ARGS__);                                                                                              \
  static const host::Known NAME##_known(#NAME, THREADS, NAME);                                                         \
  void NAME(__VA_ARGS__)
#define SIDE_BY_SIDE(BLOCKS, THREADS) THREADS
#define SHARED_BYTES(NAME) unsigned char *const NAME = host::dynamic_shared()
#define SHARED_ARRAY(TYPE, NAME, COUNT)                                                                                \
  static const char NAME##_key = 0;                                                                                    \
  TYPE *const NAME = static_cast<TYPE *>(host::static_shared(&NAME##_key, sizeof(TYPE) * (COUNT)))

// Launches a kernel with the thread count of its definition, or with THREADS. `GRID` is a Dim in braces;
// with more than one number, macros require parentheses around it.
#define LAUNCH_OF(NAME, GRID, THREADS, SHARED, ...)                                                                    \
  host::launch(#NAME, Dim GRID, THREADS, SHARED, [&] { NAME(__VA_ARGS__); })
#define LAUNCH(NAME, GRID, SHARED, ...) LAUNCH_OF(NAME, GRID, host::kernels().at(#NAME).threads, SHARED, __VA_ARGS__)

// ---- numbers: round to nearest, ties to even ----

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  _Float16 value;
};
inline uint32_t __float_as_uint(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  return b;
}
inline float __uint_as_float(uint32_t b) {
  float x;
  memcpy(&x, &b, 4);
  return x;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t b = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((b + 0x7fff + ((b >> 16) & 1)) >> 16)};
}
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
template <typename T> T min(T a, T b) { return b < a ? b : a; }
template <typename T> T max(T a, T b) { return a < b ? b : a; }
template <typename T> T __ldg(const T *p) { return *p; }
template <typename T> T __ldcs(const T *p) { return *p; }
template <typename T> void __stcs(T *p, T x) { *p = x; }

// ---- warp and block instructions ----

inline void __syncthreads() { host::meet({host::Op::Barrier}); }
inline void __syncwarp(unsigned = 0xffffffffu) { host::meet({host::Op::SyncWarp}); }

template <typename T> T host_shuffle(unsigned mask, T v, host::Lane kind, int argument, int width) {
  static_assert(sizeof(T) == 4, "a shuffle of 4 bytes");
  if (mask != 0xffffffffu) host::fail("a shuffle of a part of a warp");
  host::Meet m{host::Op::Shuffle};
  uint32_t out;
  m.out = &out, m.kind = static_cast<int>(kind), m.argument = argument, m.width = width;
  memcpy(&m.value, &v, 4);
  host::meet(m);
  memcpy(&v, &out, 4);
  return v;
}
template <typename T> T __shfl_sync(unsigned mask, T v, int lane, int width = 32) {
  return host_shuffle(mask, v, host::Lane::Index, lane, width);
}
template <typename T> T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32) {
  return host_shuffle(mask, v, host::Lane::Xor, bits, width);
}
template <typename T> T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
  return host_shuffle(mask, v, host::Lane::Up, static_cast<int>(by), width);
}
template <typename T> T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
  return host_shuffle(mask, v, host::Lane::Down, static_cast<int>(by), width);
}
inline unsigned __ballot_sync(unsigned mask, bool v) {
  if (mask != 0xffffffffu) host::fail("a vote of a part of a warp");
  host::Meet m{host::Op::Vote};
  uint32_t out;
  m.out = &out, m.value = v;
  host::meet(m);
  return out;
}
inline bool __any_sync(unsigned mask, bool v) { return __ballot_sync(mask, v) != 0; }
inline bool __all_sync(unsigned mask, bool v) { return __ballot_sync(mask, v) == 0xffffffffu; }

// ---- functions of device.cuh ----

template <typename T> uint32_t pack(float low, float high);
template <> inline uint32_t pack<__nv_bfloat16>(float low, float high) {
  return __float2bfloat16_rn(low).bits | static_cast<uint32_t>(__float2bfloat16_rn(high).bits) << 16;
}
template <> inline uint32_t pack<__half>(float low, float high) {
  const __half pair[2] = {__float2half_rn(low), __float2half_rn(high)};
  uint32_t bits;
  memcpy(&bits, pair, 4);
  return bits;
}
inline float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.0f : y;
}
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t which) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t y = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t digit = which >> 4 * i & 15, byte = bytes >> (digit & 7) * 8 & 255;
    y |= (digit & 8 ? byte >> 7 ? 255u : 0u : byte) << 8 * i;
  }
  return y;
}
template <typename T> void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t b[2] = {b0, b1};
  host::Meet m{host::Op::Mma};
  m.out = d, m.a = a, m.b = b, m.kind = sizeof(T) == 2 && std::is_same<T, __half>::value;
  host::meet(m);
}
inline uint32_t to_tf32(float x) {
  const uint32_t b = __float_as_uint(x);
  return x != x || x - x != 0.0f ? b : (b + 0x1000) & ~0x1fffu;
}
inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  host::Meet m{host::Op::MmaTf32};
  m.out = d, m.a = a, m.b = b;
  host::meet(m);
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void *row) { host::meet({host::Op::Load, r, row}); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) { host::meet({host::Op::LoadTransposed, r, row}); }
// Touches 16 bytes on behalf of AddressSanitizer, since host.cpp is not instrumented.
NOT_WATCHED inline void read_16(const void *p) {
  volatile char first = *static_cast<const volatile char *>(p), last = static_cast<const volatile char *>(p)[15];
  (void)first, (void)last;
}
inline void cp_async_16(void *to, const void *from, bool some) {
  if (some) read_16(from);
  host::cp_async(to, from, some);
}
inline void cp_async_commit() { host::cp_async_commit(); }
template <int N> void cp_async_wait() { host::cp_async_wait(N); }
// As a barrier of the whole block, since all groups meet equally often.
template <int THREADS, int PARTS> void part_barrier(int) { __syncthreads(); }
NOT_WATCHED inline uint32_t load_4(const void *p) {
  host::access(p, 4, false, __builtin_return_address(0));
  return *static_cast<const uint32_t *>(p);
}
NOT_WATCHED inline void store_4(void *p, uint32_t v) {
  host::access(p, 4, true, __builtin_return_address(0));
  *static_cast<uint32_t *>(p) = v;
}
NOT_WATCHED inline uint2 load_8(const void *p) {
  host::access(p, 8, false, __builtin_return_address(0));
  return *static_cast<const uint2 *>(p);
}
NOT_WATCHED inline void store_8(void *p, uint2 v) {
  host::access(p, 8, true, __builtin_return_address(0));
  *static_cast<uint2 *>(p) = v;
}
NOT_WATCHED inline uint4 load_16(const void *p) {
  host::access(p, 16, false, __builtin_return_address(0));
  return *static_cast<const uint4 *>(p);
}
NOT_WATCHED inline void store_16(void *p, uint4 v) {
  host::access(p, 16, true, __builtin_return_address(0));
  *static_cast<uint4 *>(p) = v;
}
#define store_16_global store_16
