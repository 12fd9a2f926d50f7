// Runs each asm instruction of device.cuh on its own, one fragment per block, to compare a GPU with the
// host emulation. `.ci/gpu bundle` compiles this for both, `gpu_check instructions` compares.
#include "../../crates/ft-kernels/src/cuda/device.cuh"

// This lane's `n` words, in blocks of one warp.
DEVICE const uint32_t *mine(const uint32_t *in, int n) {
  return in + (static_cast<size_t>(blockIdx.x) * WARP + threadIdx.x) * n;
}
DEVICE uint32_t *mine(uint32_t *out, int n) { return out + (static_cast<size_t>(blockIdx.x) * WARP + threadIdx.x) * n; }

// A lane's fragments: four words of a, two of b, four floats of d.
template <typename T> DEVICE void fragment_mma(const uint32_t *in, uint32_t *out) {
  const uint32_t *x = mine(in, 10);
  const uint32_t a[4] = {x[0], x[1], x[2], x[3]};
  float d[4];
  for (int i = 0; i < 4; i++) d[i] = reinterpret_cast<const float *>(x)[6 + i];
  mma<T>(d, a, x[4], x[5]);
  for (int i = 0; i < 4; i++) mine(out, 4)[i] = __float_as_uint(d[i]);
}

KERNEL(one_mma_bf16, 32, const uint32_t *in, uint32_t *out) { fragment_mma<bf16>(in, out); }
KERNEL(one_mma_f16, 32, const uint32_t *in, uint32_t *out) { fragment_mma<f16>(in, out); }

KERNEL(one_ldmatrix, 32, const uint32_t *in, uint32_t *out) {
  SHARED_ARRAY(uint4, rows, 32);
  store_16(rows + threadIdx.x, load_16(mine(in, 4)));
  __syncthreads();
  uint32_t r[4];
  ldmatrix_x4(r, rows + threadIdx.x);
  for (int i = 0; i < 4; i++) mine(out, 4)[i] = r[i];
}

KERNEL(one_ldmatrix_trans, 32, const uint32_t *in, uint32_t *out) {
  SHARED_ARRAY(uint4, rows, 32);
  store_16(rows + threadIdx.x, load_16(mine(in, 4)));
  __syncthreads();
  uint32_t r[4];
  ldmatrix_x4_trans(r, rows + threadIdx.x);
  for (int i = 0; i < 4; i++) mine(out, 4)[i] = r[i];
}

// Two groups; the second copies only for lanes with an odd first word, and zeros otherwise.
KERNEL(one_cp_async, 32, const uint32_t *in, uint32_t *out) {
  SHARED_ARRAY(uint4, first, 32);
  SHARED_ARRAY(uint4, second, 32);
  const uint32_t *x = mine(in, 4);
  cp_async_16(first + threadIdx.x, x, true);
  cp_async_commit();
  cp_async_16(second + threadIdx.x, x, x[0] % 2 == 1);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();
  const uint4 a = load_16(first + (threadIdx.x + 1) % WARP);
  cp_async_wait<0>();
  __syncthreads();
  const uint4 b = load_16(second + (threadIdx.x + 1) % WARP);
  store_16(mine(out, 8), a);
  store_16(mine(out, 8) + 4, b);
}

KERNEL(one_exp2, 32, const uint32_t *in, uint32_t *out) {
  *mine(out, 1) = __float_as_uint(exp2_fast(*reinterpret_cast<const float *>(mine(in, 1))));
}

template <typename T> DEVICE void fragment_pack(const uint32_t *in, uint32_t *out) {
  const float *x = reinterpret_cast<const float *>(mine(in, 2));
  *mine(out, 1) = pack<T>(x[0], x[1]);
}

KERNEL(one_pack_bf16, 32, const uint32_t *in, uint32_t *out) { fragment_pack<bf16>(in, out); }
KERNEL(one_pack_f16, 32, const uint32_t *in, uint32_t *out) { fragment_pack<f16>(in, out); }

KERNEL(one_warp, 32, const uint32_t *in, uint32_t *out) {
  const float x = *reinterpret_cast<const float *>(mine(in, 1));
  mine(out, 2)[0] = __float_as_uint(warp_sum(x));
  mine(out, 2)[1] = __float_as_uint(warp_max(x));
}
