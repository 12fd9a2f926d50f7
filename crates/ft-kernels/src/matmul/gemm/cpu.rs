//! CPU products on slices by the `gemm` crate (also used by candle), and products with an operand
//! generated tile by tile.

use super::threads::{Shared, is_serial, threads};
use crate::cpu::{Float, each_on};
use std::ops::Range;

/// A strided view of a matrix.
#[derive(Clone, Copy)]
pub struct Mat<'a, T> {
    pub(super) data: &'a [T],
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
    pub(super) rs: usize,
    pub(super) cs: usize,
}

impl<'a, T> Mat<'a, T> {
    /// A row-major `rows` x `cols` matrix with row stride `stride`.
    ///
    /// # Panics
    /// If the slice is too short (caller bug).
    pub fn new(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(
            rows == 0 || cols == 0 || data.len() >= (rows - 1) * stride + cols,
            "matrix outside its slice"
        );
        Self { data, rows, cols, rs: stride, cs: 1 }
    }

    /// A range of columns.
    ///
    /// # Panics
    /// If the range is out of bounds (caller bug).
    pub(super) fn columns(self, own: Range<usize>) -> Self {
        assert!(own.start <= own.end && own.end <= self.cols, "columns outside a matrix");
        let from = if own.is_empty() { 0 } else { own.start * self.cs };
        Self { data: &self.data[from..], cols: own.len(), ..self }
    }

    /// The transpose, without a copy.
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, rs: self.cs, cs: self.rs, ..self }
    }
}

/// `dst = alpha a b`, or `dst += alpha a b` with `add`. `dst` is row-major with row stride `stride`.
///
/// # Panics
/// If the shapes don't match (caller bug).
pub fn gemm<T: Float>(
    dst: &mut [T],
    stride: usize,
    add: bool,
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    alpha: T,
    parallel: bool,
) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert_eq!(k, b.rows, "inner sizes of a product");
    if m == 0 || n == 0 {
        return;
    }
    assert!(dst.len() >= (m - 1) * stride + n && stride >= n, "product outside its destination");
    if k == 0 {
        if !add {
            dst.chunks_mut(stride).take(m).for_each(|r| r[..n].fill(T::zero()));
        }
        return;
    }
    let threads =
        if parallel && !is_serial() { gemm::Parallelism::Rayon(0) } else { gemm::Parallelism::None };
    // SAFETY: Mat::new and the assertion above keep all reads and writes inside their slices, and `dst`
    // is borrowed mutably, so it overlaps neither operand.
    unsafe { raw(dst.as_mut_ptr(), stride, add, a, b, alpha, threads) }
}

/// `dst (+)= alpha a b`.
///
/// # Safety
/// `dst` points to `a.rows` rows of `b.cols` values with row stride `stride`, which nothing else accesses
/// during the call.
pub(super) unsafe fn raw<T: Float>(
    dst: *mut T,
    stride: usize,
    add: bool,
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    alpha: T,
    threads: gemm::Parallelism,
) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    // SAFETY: `dst` is valid by the contract of this function; Mat::new keeps reads inside the slices.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst,
            1,
            stride as isize,
            add,
            a.data.as_ptr(),
            a.cs as isize,
            a.rs as isize,
            b.data.as_ptr(),
            b.cs as isize,
            b.rs as isize,
            T::one(),
            alpha,
            false,
            false,
            false,
            threads,
        );
    }
}

/// Fills the tile of the given columns.
type Make<'s, T> = dyn Fn(Range<usize>, &mut [T]) + Sync + 's;

/// Origin of the right operand's tiles.
enum Source<'s, T> {
    /// Generated on demand; the flag means transposed.
    Generated(&'s Make<'s, T>, bool),
    /// Columns of a stored matrix.
    Stored(Mat<'s, T>),
}

/// `dst [m, n] = a B` (`+=` with `add`), where B [k, n] is generated one tile of columns at a time.
///
/// `make(columns, tile)` fills the tile of `columns`: row-major [k, columns], or [columns, k] if
/// `transposed`. Threads generate and multiply tiles of `width` columns in parallel, one thread per tile,
/// so the result does not depend on the number of threads. Extra memory: one tile per thread.
///
/// # Panics
/// If the shapes don't match (caller bug).
pub fn by_tiles<T: Float>(
    dst: &mut [T],
    n: usize,
    add: bool,
    a: Mat<'_, T>,
    width: usize,
    transposed: bool,
    make: &Make<'_, T>,
) {
    tiles(dst, n, add, a, width, Source::Generated(make, transposed));
}

/// `dst [m, n] = a b` (`+=` with `add`) for a stored `b` [k, n], in the tiling of [`by_tiles`], with
/// bit-identical results.
///
/// # Panics
/// If the shapes don't match (caller bug).
pub fn by_columns<T: Float>(dst: &mut [T], add: bool, a: Mat<'_, T>, width: usize, b: Mat<'_, T>) {
    assert_eq!(a.cols, b.rows, "inner sizes of a product");
    tiles(dst, b.cols, add, a, width, Source::Stored(b));
}

fn tiles<T: Float>(dst: &mut [T], n: usize, add: bool, a: Mat<'_, T>, width: usize, source: Source<'_, T>) {
    let (m, k) = (a.rows, a.cols);
    assert!(dst.len() >= m * n && width > 0, "product outside its destination");
    if m == 0 || n == 0 || k == 0 {
        if !add {
            dst[..m * n].fill(T::zero());
        }
        return;
    }
    let columns = Shared::new(dst.as_mut_ptr());
    let buffer = if matches!(source, Source::Generated(..)) { k * width.min(n) } else { 0 };
    let room = || vec![T::zero(); buffer];
    each_on(threads(), 0..n.div_ceil(width), room, |buffer, i| {
        let own = i * width..((i + 1) * width).min(n);
        let start = own.start;
        let b = match source {
            Source::Stored(b) => b.columns(own),
            Source::Generated(make, transposed) => {
                let tile = &mut buffer[..k * own.len()];
                make(own.clone(), tile);
                if transposed {
                    Mat::new(tile, own.len(), k, k).t()
                } else {
                    Mat::new(tile, k, own.len(), own.len())
                }
            }
        };
        // SAFETY: `dst` has m rows of n values and outlives the loop; the columns are in bounds, and belong to
        // this thread alone, since each index is drawn once.
        unsafe { raw(columns.at(start), n, add, a, b, T::one(), gemm::Parallelism::None) }
    });
}
