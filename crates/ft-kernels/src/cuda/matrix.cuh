// Matrices [rows, D] of 16-bit values in shared memory, swizzled for tensor core loads.
#pragma once
#include "device.cuh"

// A value that the compiler does not derive others from ahead of time, so that these take no registers in between.
DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Offset of a piece of 8 values. The swizzle avoids bank conflicts both for one piece of 8 consecutive
// rows (ldmatrix) and for adjacent pieces of a row (copies and stores).
template <int D> DEVICE int place(int row, int piece) {
  constexpr int PIECES = D / 8;
  static_assert(PIECES % 4 == 0, "rows of whole half-lines of banks");
  return (row * PIECES + (piece ^ (PIECES % 8 == 0 ? row & 7 : row >> 1 & 3))) * 16;
}

// Offsets of a lane's rows for ldmatrix. The swizzle is linear under XOR and repeats after SPAN bytes of a row and after
// 16 rows, so a loop computes at most four offsets from its corner; the others differ by constants. Rows and columns
// are multiples of 16 and are added to those of the corner; columns without a carry into it.
template <int D> struct Corner {
  static constexpr int SPAN = D / 8 % 8 == 0 ? 128 : 64;
  int offset;
  DEVICE int at(int row, int col) const { return (offset ^ col * 2 % SPAN) + col * 2 / SPAN * SPAN + row * D * 2; }
};

// Corners of fragments for mma, from a row and a column on. left: 16 rows x 16 columns. right_transposed: two right
// operands from 16 columns and 8 + 8 rows, loaded by `load`. right: two right operands from 16 rows and 8 + 8 columns,
// left_transposed: a left operand from the transpose of 16 x 16 values, both loaded by `load_transposed`.
template <int D> DEVICE Corner<D> left(int row, int col, int lane) { return {place<D>(row + lane % 16, col / 8 + lane / 16)}; }
template <int D> DEVICE Corner<D> right_transposed(int row, int col, int lane) {
  return {place<D>(row + lane / 16 * 8 + lane % 8, col / 8 + lane / 8 % 2)};
}
template <int D> DEVICE Corner<D> right(int row, int col, int lane) {
  return {place<D>(row + lane / 8 % 2 * 8 + lane % 8, col / 8 + lane / 16)};
}
template <int D> DEVICE Corner<D> left_transposed(int row, int col, int lane) { return right_transposed<D>(row, col, lane); }

template <int D> DEVICE void load(uint32_t (&f)[4], const unsigned char *m, Corner<D> corner, int row, int col) {
  ldmatrix_x4(f, m + corner.at(row, col));
}
template <int D> DEVICE void load_transposed(uint32_t (&f)[4], const unsigned char *m, Corner<D> corner, int row, int col) {
  ldmatrix_x4_trans(f, m + corner.at(row, col));
}
