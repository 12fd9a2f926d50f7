// Matrices [rows, D] of 16-bit values in shared memory, as products by tensor cores read them.
#pragma once
#include "device.cuh"

// Where a piece of 8 values of a row lies: turned so that a piece of 8 rows in a row, which ldmatrix reads at once, is in 8
// groups of banks, and so that pieces side by side are too, which copies and stores touch at once.
template <int D> DEVICE int place(int row, int piece) {
  constexpr int PIECES = D / 8;
  static_assert(PIECES % 4 == 0, "rows of whole half-lines of banks");
  return (row * PIECES + (piece ^ (PIECES % 8 == 0 ? row & 7 : row >> 1 & 3))) * 16;
}

// Fragments for mma: 16 rows and 16 columns as its left operand; as its right operands 16 columns and 8 + 8 rows of a
// matrix that is to be transposed; or of one that is not, 16 rows and 8 + 8 columns.
template <int D> DEVICE void left(uint32_t (&a)[4], const unsigned char *m, int row, int col, int lane) {
  ldmatrix_x4(a, m + place<D>(row + lane % 16, col / 8 + lane / 16));
}
template <int D> DEVICE void right_transposed(uint32_t (&b)[4], const unsigned char *m, int row, int col, int lane) {
  ldmatrix_x4(b, m + place<D>(row + lane / 16 * 8 + lane % 8, col / 8 + lane / 8 % 2));
}
template <int D> DEVICE void right(uint32_t (&b)[4], const unsigned char *m, int row, int col, int lane) {
  ldmatrix_x4_trans(b, m + place<D>(row + lane / 8 % 2 * 8 + lane % 8, col / 8 + lane / 16));
}

// 16 rows and 16 columns of the transpose of a matrix, as the left operand: `row` and `col` are those of the matrix.
template <int D> DEVICE void left_transposed(uint32_t (&a)[4], const unsigned char *m, int row, int col, int lane) {
  ldmatrix_x4_trans(a, m + place<D>(row + lane / 16 * 8 + lane % 8, col / 8 + lane / 8 % 2));
}
