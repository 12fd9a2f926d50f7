//! Memory layouts of matrices.

use candle_core::Layout;

/// Row stride of a matrix with contiguous, non-overlapping rows; `None` for other layouts.
pub fn row_stride(layout: &Layout) -> Option<usize> {
    let (&[rows, cols], &[stride, step]) = (layout.dims(), layout.stride()) else { return None };
    match (cols <= 1 || step == 1, rows <= 1) {
        (true, true) => Some(cols.max(1)),
        (true, false) if stride >= cols.max(1) => Some(stride),
        _ => None,
    }
}
