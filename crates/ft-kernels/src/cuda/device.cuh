// Shared header of the CUDA sources. Instructions without a C++ equivalent are small functions with two
// versions: inline asm for nvcc, and a host version for C++ compilers, emulated by tests/cuda/host.h.
// Kernels contain no asm.
//
// A kernel is written once:
//
//   KERNEL(scale_bf16, 256, const bf16 *x, float factor, uint64_t n, bf16 *y) { scale(x, factor, n, y); }
//
// 256 is the number of threads per block. With nvcc this defines a __global__ function with C linkage and
// launch bounds; on the host, a function launched by name in tests/cuda.
#pragma once
#include <stdint.h>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define KERNEL(NAME, THREADS, ...) extern "C" __global__ void __launch_bounds__(THREADS) NAME(__VA_ARGS__)
// For KERNEL, in place of THREADS: also requests BLOCKS resident blocks per SM.
#define SIDE_BY_SIDE(BLOCKS, THREADS) THREADS, BLOCKS
// Dynamic shared memory, and a static array.
#define SHARED_BYTES(NAME) extern __shared__ __align__(128) unsigned char NAME[]
#define SHARED_ARRAY(TYPE, NAME, COUNT) __shared__ __align__(16) TYPE NAME[COUNT]
#else
#include "host.h"
#endif

#define DEVICE __device__ __forceinline__

using bf16 = __nv_bfloat16;
using f16 = __half;

constexpr int WARP = 32;
constexpr unsigned ALL = 0xffffffffu;

// ---- numbers: f32 arithmetic, rounded once when stored ----

// Storage types.
template <typename T> struct Number;

template <> struct Number<float> {
  static DEVICE float from(float x) { return x; }
  static DEVICE float widen(float x) { return x; }
};

template <> struct Number<bf16> {
  static DEVICE bf16 from(float x) { return __float2bfloat16_rn(x); }
  static DEVICE float widen(bf16 x) { return __bfloat162float(x); }
};

template <> struct Number<f16> {
  static DEVICE f16 from(float x) { return __float2half_rn(x); }
  static DEVICE float widen(f16 x) { return __half2float(x); }
};

// Rounds to the nearest value of T; the result is f32.
template <typename T> DEVICE float rounded(float x) { return Number<T>::widen(Number<T>::from(x)); }

// Two values in one register, the first in the low half.
template <typename T> DEVICE uint32_t pack(float low, float high);

#ifdef __CUDACC__
template <> DEVICE uint32_t pack<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t *>(&pair);
}

template <> DEVICE uint32_t pack<f16>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t *>(&pair);
}
#endif

// A value that the compiler does not derive others from ahead of time, so that these take no registers in between.
DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// ---- memory ----

// Values of T per 16-byte access.
template <typename T> constexpr int VECTOR = 16 / static_cast<int>(sizeof(T));

#ifdef __CUDACC__
// Accesses of 16, 8 or 4 bytes in one instruction.
DEVICE uint32_t load_4(const void *p) { return *static_cast<const uint32_t *>(p); }
DEVICE void store_4(void *p, uint32_t v) { *static_cast<uint32_t *>(p) = v; }
DEVICE uint2 load_8(const void *p) { return *static_cast<const uint2 *>(p); }
DEVICE void store_8(void *p, uint2 v) { *static_cast<uint2 *>(p) = v; }
DEVICE uint4 load_16(const void *p) { return *static_cast<const uint4 *>(p); }
DEVICE void store_16(void *p, uint4 v) { *static_cast<uint4 *>(p) = v; }

// A 16-byte store to global memory; volatile asm keeps the compiler from splitting it.
DEVICE void store_16_global(void *p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
#endif

DEVICE bool is_aligned(const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// One value, as f32.
template <typename T> DEVICE float load(const T *p) { return Number<T>::widen(*p); }
template <typename T> DEVICE void store(T *p, float x) { *p = Number<T>::from(x); }

// VECTOR<T> values of 16 bytes as f32.
template <typename T> DEVICE void unpack(uint4 bits, float (&out)[VECTOR<T>]) {
  union {
    uint4 bits;
    T value[VECTOR<T>];
  } of = {bits};
#pragma unroll
  for (int i = 0; i < VECTOR<T>; i++) out[i] = Number<T>::widen(of.value[i]);
}

// The same in one access. The address is 16-byte aligned.
template <typename T> DEVICE void load_vector(const T *p, float (&out)[VECTOR<T>]) { unpack<T>(load_16(p), out); }

// VECTOR<T> values packed into 16 bytes.
template <typename T> DEVICE uint4 packed(const float (&in)[VECTOR<T>]) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (sizeof(T) == 4) word[i] = __float_as_uint(in[i]);
    else word[i] = pack<T>(in[2 * i], in[2 * i + 1]);
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

template <typename T> DEVICE void store_vector(T *p, const float (&in)[VECTOR<T>]) { store_16(p, packed<T>(in)); }

// ---- sums and maxima in a fixed order; every lane gets the result ----

DEVICE float warp_sum(float x) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, step);
  return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, step));
  return x;
}

DEVICE uint32_t warp_max(uint32_t x) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(ALL, x, step));
  return x;
}

// Reductions over a block of THREADS threads, called by all of them. `scratch` holds one float per warp,
// and can be reused by the next call.
template <int THREADS> DEVICE float block_sum(float x, float *scratch) {
  x = warp_sum(x);
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < THREADS / WARP; w++) sum += scratch[w];
  __syncthreads();
  return sum;
}

template <int THREADS> DEVICE float block_max(float x, float *scratch) {
  x = warp_max(x);
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
  __syncthreads();
  float most = scratch[0];
#pragma unroll
  for (int w = 1; w < THREADS / WARP; w++) most = fmaxf(most, scratch[w]);
  __syncthreads();
  return most;
}

// ---- instructions ----

#ifdef __CUDACC__

// 2^x, accurate to about 2 ulp; subnormal results are flushed to 0.
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE uint32_t shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Four bytes of a (0 to 3) and b (4 to 7), by the four low hexadecimal digits of `which`; its fourth bit asks for the
// sign of the byte, eight times.
DEVICE uint32_t permute(uint32_t a, uint32_t b, uint32_t which) {
  uint32_t y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(which));
  return y;
}

// d += a b, per warp: a [16, 16] row-major, b [16, 8] column-major, d [16, 8] in f32.
template <typename T> DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <> DEVICE void mma<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <> DEVICE void mma<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Rounds to tf32, ties away from zero.
DEVICE uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// d += a b, per warp, in tf32: a [16, 8] row-major, b [8, 8] column-major, d [16, 8] in f32.
DEVICE void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four [8, 8] matrices of 16-bit values from shared memory; lane i supplies the address of row i %
// 8 of matrix i / 8.
DEVICE void ldmatrix_x4(uint32_t (&r)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, transposing each matrix.
DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Async copy of 16 bytes to shared memory, complete after cp_async_wait. Without `some`, writes zeros and
// reads nothing.
DEVICE void cp_async_16(void *to, const void *from, bool some) {
  const int bytes = some ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}

// Closes a group of copies; waits until at most N groups of this thread are pending. Copies of other
// threads need a barrier too.
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// A barrier of THREADS consecutive threads, group `part` of PARTS of a block. All groups meet equally often.
template <int THREADS, int PARTS> DEVICE void part_barrier(int part) {
  if constexpr (PARTS == 1) __syncthreads();
  else asm volatile("bar.sync %0, %1;" ::"r"(part + 1), "n"(THREADS) : "memory");
}

#endif
