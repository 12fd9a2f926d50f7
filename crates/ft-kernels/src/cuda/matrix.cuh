// Matrices [rows, D] of 16-bit values in shared memory, swizzled for tensor core loads.
#pragma once
#include "device.cuh"

// Offset of a piece of 8 values. The swizzle avoids bank conflicts both for one piece of 8 consecutive
// rows (ldmatrix) and for adjacent pieces of a row (copies and stores).
template <int D> DEVICE int place(int row, int piece) {
  constexpr int PIECES = D / 8;
  static_assert(PIECES % 4 == 0, "rows of whole half-lines of banks");
  return (row * PIECES + (piece ^ (PIECES % 8 == 0 ? row & 7 : row >> 1 & 3))) * 16;
}

// Fragments for mma. left: 16 rows x 16 columns. right_transposed: two right operands from 16 columns and
// 8 + 8 rows, transposed. right: two right operands from 16 rows and 8 + 8 columns.
template <int D> DEVICE void left(uint32_t (&a)[4], const unsigned char *m, int row, int col, int lane) {
  ldmatrix_x4(a, m + place<D>(row + lane % 16, col / 8 + lane / 16));
}
template <int D> DEVICE void right_transposed(uint32_t (&b)[4], const unsigned char *m, int row, int col, int lane) {
  ldmatrix_x4(b, m + place<D>(row + lane / 16 * 8 + lane % 8, col / 8 + lane / 8 % 2));
}
template <int D> DEVICE void right(uint32_t (&b)[4], const unsigned char *m, int row, int col, int lane) {
  ldmatrix_x4_trans(b, m + place<D>(row + lane / 8 % 2 * 8 + lane % 8, col / 8 + lane / 16));
}

// Left operand from the transpose of a matrix, 16 x 16; `row` and `col` refer to the stored matrix.
template <int D> DEVICE void left_transposed(uint32_t (&a)[4], const unsigned char *m, int row, int col, int lane) {
  ldmatrix_x4_trans(a, m + place<D>(row + lane / 16 * 8 + lane % 8, col / 8 + lane / 8 % 2));
}
