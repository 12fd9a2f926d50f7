// A matrix in 4-bit quantization blocks, as read by dequantize.cu and rows.cu. Rounds value by value like
// crates/ft-kernels/src/quantized/cpu.rs, so results are bit-identical.
//
// A warp processes a chunk: 1024 consecutive values, starting at a multiple of 32. Blocks have a
// power-of-two size of at least 32, so a chunk touches at most 32 blocks: each lane computes one scale
// and shares it by shuffle. The codebook is held in registers, one entry per lane and two copies per
// warp, so a lookup is a shuffle without bank conflicts. A lane loads enough codes to produce 16 bytes of
// output, so loads and stores of a warp are contiguous: 128 and 512 bytes for 16-bit values.
//
// host_tests.rs compares these files, compiled for the host, with the CPU implementation.
#pragma once
#include "../cuda/device.cuh"

constexpr int CHUNK = 1024;

// The matrix. Kernels take the fields as separate arguments.
struct Matrix {
  const uint8_t *packed; // two codes per byte, the first in the high half
  // [256, 2]: the two values of each byte; the second values of bytes 0 to 15 form the codebook
  const float *pairs;
  const float *scales;        // [blocks], or [groups] with double quantization
  const uint8_t *scale_codes; // [blocks], or null
  const float *map;           // [256], or null
  uint32_t group;             // scales per group
  float offset;               // added to each scale
  uint32_t shift;             // values per block: 2^shift
  uint64_t total;             // values in the matrix, fewer than 2^37, so block indices have 32 bits
  uint32_t spread;            // stride of map entries: 2^spread

  // The scale of a block, rounded after the product and after the sum as on the CPU: no FMA.
  DEVICE float scale(uint64_t block) const {
    if (scale_codes == nullptr) return scales[block];
    return __fadd_rn(__fmul_rn(map[static_cast<uint32_t>(scale_codes[block]) << spread],
                               scales[static_cast<uint32_t>(block) / group]),
                     offset);
  }

  // A lane's codebook entry.
  DEVICE float entry(unsigned lane) const { return pairs[2 * (lane & 15) + 1]; }

  // Loads N codes from value `at` on, first byte lowest. `at` is a multiple of N, and the address is
  // aligned.
  template <int N> DEVICE uint32_t load(uint64_t at) const {
    static_assert(N == 8 || N == 4, "a load of 4 or 2 bytes");
    const uint8_t *from = packed + at / 2;
    // streaming load: the dequantized tile, not the codes, should stay in the cache
    if constexpr (N == 8) return __ldcs(reinterpret_cast<const unsigned int *>(from));
    else return __ldcs(reinterpret_cast<const unsigned short *>(from));
  }

  // The same without alignment; zero past the last byte.
  template <int N> DEVICE uint32_t codes(uint64_t at) const {
    if (at + N <= total && reinterpret_cast<uintptr_t>(packed + at / 2) % (N / 2) == 0) return load<N>(at);
    uint32_t word = 0;
    const uint64_t bytes = (total + 1) / 2;
#pragma unroll 1
    for (int i = 0; i < N / 2; i++)
      if (at / 2 + i < bytes) word |= static_cast<uint32_t>(packed[at / 2 + i]) << (8 * i);
    return word;
  }
};

// Copies the scale map to shared memory (a barrier must follow), since a warp looks up arbitrary entries.
// COPIES interleaved copies give lanes separate banks: no conflicts for blocks of 64 and more. Called by
// all 256 threads of the block.
constexpr int COPIES = 16;
DEVICE Matrix bring_map(const Matrix &m, float *shared) {
  if (m.map != nullptr) {
    const float own = m.map[threadIdx.x];
#pragma unroll
    for (unsigned i = 0; i < COPIES; i++)
      store_4(shared + threadIdx.x * COPIES + (i + threadIdx.x / 2) % COPIES, __float_as_uint(own));
  }
  Matrix own = m;
  own.map = shared + threadIdx.x % COPIES, own.spread = 4;
  return own;
}

// The scales of the chunk at `base`, up to value `end`, one block per lane.
DEVICE float lane_scale(const Matrix &m, uint64_t base, uint64_t end, unsigned lane) {
  const uint64_t block = (base >> m.shift) + lane;
  const uint64_t last = (end < base + CHUNK ? end : base + CHUNK) - 1;
  return block <= last >> m.shift ? m.scale(block) : 0.0f;
}

// Dequantizes the N codes in `word`, found at `at` in the chunk at `base`, rounded to Source. All lanes
// must participate.
template <typename Source, int N>
DEVICE void values(const Matrix &m, uint32_t word, uint64_t at, uint64_t base, float scales, float entry,
                   float (&out)[N]) {
  const float scale = __shfl_sync(ALL, scales, static_cast<int>((at >> m.shift) - (base >> m.shift)));
#pragma unroll
  for (int i = 0; i < N; i++) {
    // the shuffle takes the source lane modulo 16, so higher bits need no masking
    const float code = __shfl_sync(ALL, entry, static_cast<int>(word >> (8 * (i / 2) + (i % 2 ? 0 : 4))), 16);
    out[i] = rounded<Source>(__fmul_rn(code, scale));
  }
}

// Kernel parameters of a matrix, and the matrix built from them.
#define MATRIX                                                                                                         \
  const uint8_t *packed, const float *pairs, const float *scales, const uint8_t *scale_codes, const float *map,        \
      uint32_t group, float offset, uint32_t shift, uint64_t total
#define MATRIX_OF {packed, pairs, scales, scale_codes, map, group, offset, shift, total, 0}
