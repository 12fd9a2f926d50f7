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

// Offsets of a lane's rows for ldmatrix. The swizzle is linear under XOR and repeats after SPAN bytes of a row and
// after 16 rows, so a loop computes at most four offsets from its corner; the others differ by constants. Rows and
// columns are multiples of 16 and are added to those of the corner; columns without a carry into it.
template <int D> struct Corner {
  static constexpr int SPAN = D / 8 % 8 == 0 ? 128 : 64;
  int offset;
  DEVICE int at(int row, int col) const { return (offset ^ col * 2 % SPAN) + col * 2 / SPAN * SPAN + row * D * 2; }
};

// Corners of fragments for mma, from a row and a column on. left: 16 rows x 16 columns. right_transposed: two right
// operands from 16 columns and 8 + 8 rows, loaded by `load`. right: two right operands from 16 rows and 8 + 8 columns,
// left_transposed: a left operand from the transpose of 16 x 16 values, both loaded by `load_transposed`.
template <int D> DEVICE Corner<D> left(int row, int col, int lane) {
  return {place<D>(row + lane % 16, col / 8 + lane / 16)};
}
template <int D> DEVICE Corner<D> right_transposed(int row, int col, int lane) {
  return {place<D>(row + lane / 16 * 8 + lane % 8, col / 8 + lane / 8 % 2)};
}
template <int D> DEVICE Corner<D> right(int row, int col, int lane) {
  return {place<D>(row + lane / 8 % 2 * 8 + lane % 8, col / 8 + lane / 16)};
}
template <int D> DEVICE Corner<D> left_transposed(int row, int col, int lane) {
  return right_transposed<D>(row, col, lane);
}

template <int D> DEVICE void load(uint32_t (&f)[4], const unsigned char *m, Corner<D> corner, int row, int col) {
  ldmatrix_x4(f, m + corner.at(row, col));
}
template <int D>
DEVICE void load_transposed(uint32_t (&f)[4], const unsigned char *m, Corner<D> corner, int row, int col) {
  ldmatrix_x4_trans(f, m + corner.at(row, col));
}

// ---- copies of rows ----

// A row of a matrix with rows of less than 4 GiB: one multiplication.
template <typename T> DEVICE const T *row_at(const T *first, uint32_t row, uint32_t stride) {
  const uint32_t bytes = stride * static_cast<uint32_t>(sizeof(T));
  const auto *const from = reinterpret_cast<const unsigned char *>(first);
  return reinterpret_cast<const T *>(from + static_cast<uint64_t>(row) * bytes);
}

// Rows with a fixed stride.
template <typename T> struct Stretch {
  const T *first;
  uint32_t stride;
  DEVICE const T *operator[](uint32_t row) const { return row_at(first, row, stride); }
};

// Starts an async copy of N rows of at most D columns by BY threads of consecutive numbers, from a multiple of BY on.
// Rows from `rows` on and columns from `columns` on, a multiple of 8, are filled with zeros; their addresses are not
// read. All pieces of a thread have one swizzle, so their offsets differ by constants.
template <int D, int N, int BY, typename Rows>
DEVICE void copy_rows(unsigned char *to, const Rows &from, uint32_t rows, uint32_t columns) {
  constexpr int LANES = D / 8 % 8 == 0 ? 8 : 4, STEP = BY / LANES; // LANES: threads per row
  static_assert(N % STEP == 0 && STEP % 8 == 0, "the same number of rows for each thread, of one swizzle");
  const uint32_t first = threadIdx.x % BY / LANES, piece = threadIdx.x % LANES;
  unsigned char *const at = to + place<D>(first, piece);
#pragma unroll
  for (int n = 0; n < N; n += STEP) {
    const auto *const row = from[first + n] + piece * 8;
#pragma unroll
    for (int c = 0; c < D; c += LANES * 8)
      cp_async_16(at + (n * D + c) * 2, row + c, first + n < rows && piece * 8 + c < columns);
  }
}

// The same for rows with a fixed stride.
template <int D, int N, int BY, typename T>
DEVICE void copy_rows(unsigned char *to, const T *from, uint32_t rows, uint32_t stride, uint32_t columns) {
  copy_rows<D, N, BY>(to, Stretch<T>{from, stride}, rows, columns);
}
