// Enough of CUDA to run a kernel's source on the host: the threads of a block are fibers that run until they wait for
// each other, in a shuffle of their warp or at a barrier of their block. A shuffle that a lane does not reach, or lanes
// that wait in different ones, end the program: on a GPU they would be undefined.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx, blockDim;

// Numbers: round to nearest, ties to even.
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  _Float16 value;
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((b + 0x7fff + ((b >> 16) & 1)) >> 16)};
}
inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t b = static_cast<uint32_t>(x.bits) << 16;
  float f;
  memcpy(&f, &b, 4);
  return f;
}
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }

template <typename T> T __ldcs(const T *p) { return *p; }

namespace host {

enum class State { Ready, Shuffle, Barrier, Done };
enum class Kind { Index, Xor };

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  State state = State::Ready;
  Kind kind;
  int argument, width;
  float value;
};

static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static unsigned current;
static std::function<void()> body;

[[noreturn]] inline void fail(const char *why) {
  fprintf(stderr, "block %u, thread %u: %s\n", blockIdx.x, current, why);
  exit(1);
}

inline void wait(State state) {
  fibers[current].state = state;
  swapcontext(&fibers[current].context, &scheduler);
}

inline float shuffle(Kind kind, unsigned mask, float value, int argument, int width) {
  if (mask != 0xffffffffu) fail("a shuffle of a part of a warp");
  Fiber &f = fibers[current];
  f.kind = kind, f.value = value, f.argument = argument, f.width = width;
  wait(State::Shuffle);
  return fibers[current].value;
}

inline void entry() {
  body();
  fibers[current].state = State::Done;
  swapcontext(&fibers[current].context, &scheduler);
}

// Gives every lane of a warp what it waits for, if all wait in one shuffle.
inline bool exchange(unsigned first) {
  unsigned waiting = 0;
  for (unsigned i = first; i < first + 32; i++) waiting += fibers[i].state == State::Shuffle;
  if (waiting == 0) return false;
  float out[32];
  for (unsigned i = first; i < first + 32; i++) {
    const Fiber &f = fibers[i];
    current = i;
    if (f.state != State::Shuffle) fail("other lanes of the warp wait in a shuffle");
    if (f.kind != fibers[first].kind || f.width != fibers[first].width) fail("lanes wait in different shuffles");
    const int lane = i - first;
    // as the instruction has it: the low bits of the argument, within the lane's part of the warp
    const int from = f.kind == Kind::Xor ? lane ^ f.argument : lane / f.width * f.width + (f.argument & (f.width - 1));
    if (from < 0 || from > 31) fail("a shuffle from no lane");
    out[lane] = fibers[first + from].value;
  }
  for (unsigned i = first; i < first + 32; i++) fibers[i].value = out[i - first], fibers[i].state = State::Ready;
  return true;
}

// Runs `kernel` for `blocks` blocks of `threads` threads, one block after the other.
inline void launch(unsigned blocks, unsigned threads, std::function<void()> kernel) {
  body = kernel;
  blockDim.x = threads;
  fibers.resize(threads);
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    for (Fiber &f : fibers) {
      f.state = State::Ready;
      f.stack.resize(1 << 16);
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.data();
      f.context.uc_stack.ss_size = f.stack.size();
      f.context.uc_link = nullptr;
      makecontext(&f.context, entry, 0);
    }
    for (bool running = true; running;) {
      for (unsigned i = 0; i < threads; i++)
        if (fibers[i].state == State::Ready) {
          current = threadIdx.x = i;
          swapcontext(&scheduler, &fibers[i].context);
        }
      bool exchanged = false;
      for (unsigned w = 0; w < threads; w += 32) exchanged |= exchange(w);
      if (exchanged) continue;
      // no thread is ready and none waits in a shuffle: all at a barrier, or all done
      running = false;
      for (Fiber &f : fibers) running |= f.state == State::Barrier;
      for (unsigned i = 0; running && i < threads; i++) {
        current = i;
        if (fibers[i].state != State::Barrier) fail("other threads wait at a barrier");
        fibers[i].state = State::Ready;
      }
    }
  }
}

} // namespace host

inline float __shfl_sync(unsigned mask, float value, int lane, int width = 32) {
  return host::shuffle(host::Kind::Index, mask, value, lane, width);
}
inline float __shfl_xor_sync(unsigned mask, float value, int bits) {
  return host::shuffle(host::Kind::Xor, mask, value, bits, 32);
}
inline void __syncthreads() { host::wait(host::State::Barrier); }
