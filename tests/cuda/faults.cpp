// Deliberate faults. crates/ft-kernels/src/cuda/host_tests.rs runs each test by name and checks the reported
// message.
#include "../../crates/ft-kernels/src/cuda/device.cuh"
#include "check.h"

// Doubles each value, passing it through shared memory to another thread; `fault` selects the error.
enum Fault : int {
  NONE,
  NO_BARRIER,
  BARRIER_IN_BRANCH,
  WARP_LEAVES,
  SHUFFLE_IN_BRANCH,
  NO_SYNCWARP,
  NO_WAIT,
  WAIT_NO_BARRIER,
  ARRAY,
  UNWRITTEN,
  ONE_PLACE,
  TAIL,
  MISALIGNED,
  OVERFLOW_,
  VALUE
};

KERNEL(doubles, 64, const float *x, uint32_t n, int fault, float *y) {
  SHARED_BYTES(bytes);
  SHARED_ARRAY(float, scratch, 2);
  float *values = reinterpret_cast<float *>(bytes);
  const unsigned i = threadIdx.x, at = blockIdx.x * 64 + i, lane = i % WARP;
  if (i < 16) cp_async_16(bytes + 16 * i, x + blockIdx.x * 64 + 4 * i, blockIdx.x * 64 + 4 * i < n);
  cp_async_commit();
  if (fault == NO_WAIT && i < 16) values[4 * i] += 1.0f;
  cp_async_wait<0>();
  if (fault == WAIT_NO_BARRIER && i == 0) scratch[0] = values[63];
  __syncthreads();
  if (fault == WARP_LEAVES && i >= WARP) return;
  float v = values[63 - i];
  if (fault == BARRIER_IN_BRANCH && lane < 7) __syncthreads();
  if (fault == SHUFFLE_IN_BRANCH) {
    if (lane < 16) v += __shfl_xor_sync(ALL, v, 1);
  }
  if (fault != NO_BARRIER) __syncthreads();
  values[i] = 2.0f * v;
  if (fault == NO_SYNCWARP) values[i] = values[i ^ 1];
  __syncthreads();
  if (i < (fault == ARRAY ? 3 : 2)) scratch[i] = 1.0f;
  __syncthreads();
  v = values[63 - i] * scratch[i % 2];
  if (fault == UNWRITTEN) v = values[2048 + i];
  if (fault == OVERFLOW_) v += static_cast<float>(static_cast<int>(i) * 0x7fffffff);
  if (fault == MISALIGNED && i == 1) store_16(y + 1, make_uint4(1, 2, 3, 4));
  if (fault == VALUE && at == 5) v = 7.0f;
  if (at < n || fault == TAIL) y[fault == ONE_PLACE ? i : at] = v;
}

static void run(Fault fault, size_t shared = 16384) {
  const uint32_t n = 100;
  host::Buffer<float> x(check::randn<float>(128, 1)), y(n);
  LAUNCH(doubles, ({2}), shared, x.at(), n, fault, y.at());
  std::vector<double> want;
  for (uint32_t i = 0; i < n; i++) want.push_back(2.0 * x[i]);
  check::close("y", y, want, 1e-7);
}

TEST(nothing_is_wrong) { run(NONE); }
TEST(barrier_left_out) { run(NO_BARRIER); }
TEST(barrier_in_a_branch) { run(BARRIER_IN_BRANCH); }
TEST(warp_leaves_before_a_barrier) { run(WARP_LEAVES); }
TEST(shuffle_in_a_branch) { run(SHUFFLE_IN_BRANCH); }
TEST(lanes_exchange_without_syncwarp) { run(NO_SYNCWARP); }
TEST(copy_is_not_waited_for) { run(NO_WAIT); }
TEST(copy_is_read_by_others_without_a_barrier) { run(WAIT_NO_BARRIER); }
TEST(shared_memory_is_too_small) { run(NONE, 240); }
TEST(shared_array_is_too_small) { run(ARRAY); }
TEST(shared_memory_is_not_written) { run(UNWRITTEN); }
TEST(two_blocks_write_one_value) { run(ONE_PLACE); }
TEST(tail_is_stored) { run(TAIL); }
TEST(vector_is_misaligned) { run(MISALIGNED); }
TEST(index_overflows) { run(OVERFLOW_); }
TEST(value_is_wrong) { run(VALUE); }
