//! CPU products on slices by the `gemm` crate (also used by candle), and products with an operand
//! generated tile by tile.

use super::super::cpu::Real;
use rayon::prelude::*;
use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    static SERIAL: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` with single-threaded products, for callers that parallelize over independent products.
/// Results are bit-identical.
pub fn serial<R>(f: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            SERIAL.set(self.0);
        }
    }
    let _restore = Restore(SERIAL.replace(true));
    f()
}

/// Whether products called from this thread are single-threaded.
pub fn is_serial() -> bool {
    SERIAL.get()
}

/// Number of threads for a product called from this thread.
pub fn threads() -> usize {
    if is_serial() { 1 } else { rayon::current_num_threads() }
}

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
pub fn gemm<T: Real>(
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
pub(super) unsafe fn raw<T: Real>(
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

/// A destination shared by threads writing disjoint columns.
pub(super) struct Columns<T>(pub(super) *mut T);

// SAFETY: `by_tiles`, `by_columns` and the products in `stored` give each thread disjoint columns.
unsafe impl<T: Send> Send for Columns<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Columns<T> {}

impl<T> Columns<T> {
    /// Pointer to column `c`.
    ///
    /// # Safety
    /// Column `c` is inside the destination.
    pub(super) unsafe fn from(&self, c: usize) -> *mut T {
        // SAFETY: `c` is in bounds by the contract of this function.
        unsafe { self.0.add(c) }
    }
}

/// Fills the tile of the given columns.
type Make<'s, T> = dyn Fn(Range<usize>, &mut [T]) + Sync + 's;

/// Origin of the right operand's tiles.
enum Source<'s, T> {
    /// Generated on demand; the flag means transposed.
    Made(&'s Make<'s, T>, bool),
    /// Columns of a stored matrix.
    Of(Mat<'s, T>),
}

/// `dst [m, n] = a B` (`+=` with `add`), where B [k, n] is generated one tile of columns at a time.
///
/// `make(columns, tile)` fills the tile of `columns`: row-major [k, columns], or [columns, k] if
/// `transposed`. Threads generate and multiply tiles of `width` columns in parallel, one thread per tile,
/// so the result does not depend on the number of threads. Extra memory: one tile per thread.
///
/// # Panics
/// If the shapes don't match (caller bug).
pub fn by_tiles<T: Real>(
    dst: &mut [T],
    n: usize,
    add: bool,
    a: Mat<'_, T>,
    width: usize,
    transposed: bool,
    make: &Make<'_, T>,
) {
    tiles(dst, n, add, a, width, Source::Made(make, transposed));
}

/// `dst [m, n] = a b` (`+=` with `add`) for a stored `b` [k, n], in the tiling of [`by_tiles`], with
/// bit-identical results.
///
/// # Panics
/// If the shapes don't match (caller bug).
pub fn by_columns<T: Real>(dst: &mut [T], add: bool, a: Mat<'_, T>, width: usize, b: Mat<'_, T>) {
    assert_eq!(a.cols, b.rows, "inner sizes of a product");
    tiles(dst, b.cols, add, a, width, Source::Of(b));
}

fn tiles<T: Real>(dst: &mut [T], n: usize, add: bool, a: Mat<'_, T>, width: usize, source: Source<'_, T>) {
    let (m, k) = (a.rows, a.cols);
    assert!(dst.len() >= m * n && width > 0, "product outside its destination");
    if m == 0 || n == 0 || k == 0 {
        if !add {
            dst[..m * n].fill(T::zero());
        }
        return;
    }
    let columns = Columns(dst.as_mut_ptr());
    let next = AtomicUsize::new(0);
    let tiles = n.div_ceil(width);
    let work = || {
        let made = matches!(source, Source::Made(..));
        let mut buffer = vec![T::zero(); if made { k * width.min(n) } else { 0 }];
        loop {
            let start = next.fetch_add(1, Ordering::Relaxed).saturating_mul(width);
            if start >= n {
                return;
            }
            let own = start..(start + width).min(n);
            let b = match source {
                Source::Of(b) => b.columns(own),
                Source::Made(make, transposed) => {
                    let tile = &mut buffer[..k * own.len()];
                    make(own.clone(), tile);
                    match transposed {
                        true => Mat::new(tile, own.len(), k, k).t(),
                        false => Mat::new(tile, k, own.len(), own.len()),
                    }
                }
            };
            // SAFETY: `dst` has m rows of n values and outlives the loop; the columns are in bounds, and
            // belong to this thread alone, since each tile index is drawn once.
            unsafe { raw(columns.from(start), n, add, a, b, T::one(), gemm::Parallelism::None) }
        }
    };
    let workers = threads().min(tiles);
    if workers <= 1 {
        work();
    } else {
        (0..workers).into_par_iter().with_max_len(1).for_each(|_| work());
    }
}
