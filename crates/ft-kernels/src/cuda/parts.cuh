// Products on tensor cores of f32 values and of values of T, the type of the model. An operand is a sum of parts:
// values of T are one part, f32 values two. With f32 as T, parts are tf32. The product of two second parts is left out.
//
// A fragment has 16 columns of the contraction, in two tiles of eight. Of each tile a lane holds columns 2t and 2t + 1
// (t: lane % 4), as mma does for 16 bits, so an accumulator is the left fragment of the next product without shuffles.
// The mma of tf32 expects columns t and t + 4; both operands are permuted alike, which leaves the product unchanged.
#pragma once
#include "device.cuh"

// ---- pairs of values ----

template <typename T> DEVICE void unpack_pair(float (&x)[2], uint32_t bits) {
  union {
    uint32_t bits;
    T value[2];
  } of = {bits};
  x[0] = Number<T>::widen(of.value[0]), x[1] = Number<T>::widen(of.value[1]);
}
template <typename T> DEVICE void load_pair(float (&x)[2], const T *p) {
  if constexpr (sizeof(T) == 4) {
    const uint2 bits = load_8(p);
    x[0] = __uint_as_float(bits.x), x[1] = __uint_as_float(bits.y);
  } else unpack_pair<T>(x, load_4(p));
}
template <typename T> DEVICE void store_pair(T *p, float low, float high) {
  if constexpr (sizeof(T) == 4) store_8(p, make_uint2(__float_as_uint(low), __float_as_uint(high)));
  else store_4(p, pack<T>(low, high));
}

// Clamps to the finite range of f16. An infinite first part would make the second one x - inf, and the product NaN.
template <typename T> DEVICE float finite(float x) {
  if constexpr (std::is_same<T, f16>::value) return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
  else return x;
}

// ---- matrices of f32 in planes of T: two of 16 bits, one of 32 ----

template <typename T> constexpr uint32_t PLANES = sizeof(T) == 2 ? 2 : 1;

// Stores a value to a matrix whose planes are `plane` values apart.
template <typename T> DEVICE void store_planes(T *p, uint32_t plane, float x) {
  store(p, x);
  if constexpr (PLANES<T> == 2) store(p + plane, x - load(p));
}
template <typename T> DEVICE float load_planes(const T *p, uint32_t plane) {
  return PLANES<T> == 2 ? load(p) + load(p + plane) : load(p);
}

// ---- operands ----

// N pairs in PARTS parts.
template <typename T, int N, int PARTS> struct Operand {
  static constexpr bool WIDE = sizeof(T) == 4;
  static constexpr int COUNT = WIDE ? 2 : PARTS;
  uint32_t part[COUNT][N][WIDE ? 2 : 1];

  // A pair of f32 values.
  DEVICE void set(int i, const float (&x)[2]) {
    if constexpr (WIDE) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        part[0][i][e] = to_tf32(x[e]);
        part[1][i][e] = to_tf32(x[e] - __uint_as_float(part[0][i][e]));
      }
    } else {
      static_assert(PARTS == 2, "f32 values are two parts");
      float high[2];
      part[0][i][0] = pack<T>(x[0], x[1]);
      unpack_pair<T>(high, part[0][i][0]);
      part[1][i][0] = pack<T>(x[0] - high[0], x[1] - high[1]);
    }
  }
};
// 16 rows x 16 columns; pair: 2 tile + half of the rows. And 16 rows x 8 columns; pair: tile.
template <typename T, int PARTS> using Left = Operand<T, 4, PARTS>;
template <typename T, int PARTS> using Right = Operand<T, 2, PARTS>;

template <typename T, int A, int B>
DEVICE void product_of(float (&d)[4], const Left<T, A> &a, int of_a, const Right<T, B> &b, int of_b) {
  const auto &x = a.part[of_a];
  const auto &y = b.part[of_b];
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      const uint32_t left[4] = {x[2 * tile][0], x[2 * tile + 1][0], x[2 * tile][1], x[2 * tile + 1][1]},
                     right[2] = {y[tile][0], y[tile][1]};
      mma_tf32(d, left, right);
    }
  } else {
    const uint32_t left[4] = {x[0][0], x[1][0], x[2][0], x[3][0]};
    mma<T>(d, left, y[0][0], y[1][0]);
  }
}

// d += a b
template <typename T, int A, int B> DEVICE void product(float (&d)[4], const Left<T, A> &a, const Right<T, B> &b) {
  if constexpr (Left<T, A>::COUNT == 2) product_of<T>(d, a, 1, b, 0);
  if constexpr (Right<T, B>::COUNT == 2) product_of<T>(d, a, 0, b, 1);
  product_of<T>(d, a, 0, b, 0);
}

// ---- fragments ----

// The left operand of two adjacent sums, each column times its factor; CLAMPED: by `finite`.
template <bool CLAMPED, typename T>
DEVICE void left_of(Left<T, 2> &a, const float (&sum)[2][4], const float (&factor)[2][2]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float x[2] = {sum[i / 2][i % 2 * 2] * factor[i / 2][0], sum[i / 2][i % 2 * 2 + 1] * factor[i / 2][1]};
    if constexpr (CLAMPED) x[0] = finite<T>(x[0]), x[1] = finite<T>(x[1]);
    a.set(i, x);
  }
}

// A left operand from a matrix in shared memory, whose rows of 16-bit values start at multiples of 16 bytes. Matrices
// of f32 in T have two parts, in planes.
template <typename T, int PARTS>
DEVICE void load_left(Left<T, PARTS> &a, const T *m, uint32_t stride, uint32_t plane = 0) {
  const uint32_t lane = threadIdx.x % WARP;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float x[2];
      load_pair(x, m + (lane / 4 + i % 2 * 8) * stride + lane % 4 * 2 + i / 2 * 8);
      a.set(i, x);
    }
  } else {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      uint32_t bits[4];
      ldmatrix_x4(bits, m + p * plane + lane % 16 * stride + lane / 16 * 8);
#pragma unroll
      for (int i = 0; i < 4; i++) a.part[p][i][0] = bits[i];
    }
  }
}

// Two right operands side by side from a matrix [k, n], or from its transpose.
template <bool TRANSPOSED, typename T, int PARTS>
DEVICE void load_right(Right<T, PARTS> (&b)[2], const T *m, uint32_t stride, uint32_t plane = 0) {
  const uint32_t lane = threadIdx.x % WARP;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; i++) { // operand i / 2, tile i % 2
      const uint32_t row = i % 2 * 8 + lane % 4 * 2, col = i / 2 * 8 + lane / 4;
      float x[2];
      if constexpr (TRANSPOSED) load_pair(x, m + col * stride + row);
      else x[0] = m[row * stride + col], x[1] = m[(row + 1) * stride + col];
      b[i / 2].set(i % 2, x);
    }
  } else {
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      uint32_t bits[4];
      if constexpr (TRANSPOSED)
        ldmatrix_x4(bits, m + p * plane + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
      else ldmatrix_x4_trans(bits, m + p * plane + lane % 16 * stride + lane / 16 * 8);
#pragma unroll
      for (int i = 0; i < 4; i++) b[i / 2].part[p][i % 2][0] = bits[i];
    }
  }
}
