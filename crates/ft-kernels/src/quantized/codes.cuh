// A matrix of 4-bit codes in blocks, as the kernels of dequantize.cu and rows.cu read it: what crates/ft-kernels/src/quantized/cpu.rs
// does, value by value with the same roundings, so that both give the same bits.
//
// A warp works on a chunk: 1024 consecutive values from a multiple of 32 on. A chunk touches at most 32 blocks (blocks
// have 32 values or more, a power of two), so each lane dequantizes the scale of one block, once, and the others get it by a
// shuffle. The codebook lies in registers, one entry a lane and twice a warp: a look-up is a shuffle too, without banks
// to conflict. A lane takes as many codes at a time as fill 16 bytes of output, so that a warp's loads and its stores
// are each one contiguous range: 128 and 512 bytes for 16-bit values.
//
// host_tests.rs runs these files on the host and holds them to the CPU version.
#pragma once
#include "../cuda/device.cuh"

constexpr int CHUNK = 1024;

// The matrix. The kernels' arguments are these, one by one.
struct Matrix {
  const uint8_t *packed;      // two codes a byte, the first in its upper half
  const float *pairs;         // [256, 2]: the two values of each byte; those of 0 to 15 end with the codebook
  const float *scales;        // [blocks]; with double quantization [groups]
  const uint8_t *scale_codes; // [blocks], or null
  const float *map;           // [256], or null
  uint32_t group;             // scales a group
  float offset;               // what is added to each scale
  uint32_t shift;             // a block has 2^shift values
  uint64_t total;             // values in the matrix, fewer than 2^37: the number of a block has 32 bits
  uint32_t spread;            // entries of the map are 2^spread values apart

  // The scale of a block, rounded after the product and after the sum, as on the CPU: no fused multiply-add.
  DEVICE float scale(uint64_t block) const {
    if (scale_codes == nullptr) return scales[block];
    return __fadd_rn(__fmul_rn(map[static_cast<uint32_t>(scale_codes[block]) << spread], scales[static_cast<uint32_t>(block) / group]), offset);
  }

  // A lane's entry of the codebook.
  DEVICE float entry(unsigned lane) const { return pairs[2 * (lane & 15) + 1]; }

  // The N codes from value `at` on, a multiple of N, the first byte lowest; they lie at the address of a whole load.
  template <int N> DEVICE uint32_t load(uint64_t at) const {
    static_assert(N == 8 || N == 4, "a load of 4 or 2 bytes");
    const uint8_t *from = packed + at / 2;
    // read once: not worth a place in the caches, where the dequantized tile is to stay
    if constexpr (N == 8) return __ldcs(reinterpret_cast<const unsigned int *>(from));
    else return __ldcs(reinterpret_cast<const unsigned short *>(from));
  }

  // The same wherever they lie. What is beyond the last byte is zero.
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

// The matrix with its map in shared memory, behind a barrier, for the look-ups of a warp are of any entries. There are COPIES of it, so
// that lanes look each into banks of their own: with blocks of 64 and more no two into one. 256 threads call, all of a block.
constexpr int COPIES = 16;
DEVICE Matrix bring_map(const Matrix &m, float *shared) {
  if (m.map != nullptr) {
    const float own = m.map[threadIdx.x];
#pragma unroll
    for (unsigned i = 0; i < COPIES; i++) store_4(shared + threadIdx.x * COPIES + (i + threadIdx.x / 2) % COPIES, __float_as_uint(own));
  }
  Matrix own = m;
  own.map = shared + threadIdx.x % COPIES, own.spread = 4;
  return own;
}

// The scales of the blocks of the chunk at `base` up to value `end`, one a lane.
DEVICE float lane_scale(const Matrix &m, uint64_t base, uint64_t end, unsigned lane) {
  const uint64_t block = (base >> m.shift) + lane;
  const uint64_t last = (end < base + CHUNK ? end : base + CHUNK) - 1;
  return block <= last >> m.shift ? m.scale(block) : 0.0f;
}

// The N values of the codes in `word`, at `at` in the chunk at `base`, rounded to Source. Called by whole warps.
template <typename Source, int N>
DEVICE void values(const Matrix &m, uint32_t word, uint64_t at, uint64_t base, float scales,
                                       float entry, float (&out)[N]) {
  const float scale = __shfl_sync(ALL, scales, static_cast<int>((at >> m.shift) - (base >> m.shift)));
#pragma unroll
  for (int i = 0; i < N; i++) {
    // the source lane is taken modulo the width: the code's upper neighbours do not matter
    const float code = __shfl_sync(ALL, entry, static_cast<int>(word >> (8 * (i / 2) + (i % 2 ? 0 : 4))), 16);
    out[i] = rounded<Source>(__fmul_rn(code, scale));
  }
}

// The arguments of a kernel that are its matrix, and the matrix of them.
#define MATRIX                                                                                                         \
  const uint8_t *packed, const float *pairs, const float *scales, const uint8_t *scale_codes, const float *map,        \
      uint32_t group, float offset, uint32_t shift, uint64_t total
#define MATRIX_OF                                                                                                      \
  { packed, pairs, scales, scale_codes, map, group, offset, shift, total, 0 }
