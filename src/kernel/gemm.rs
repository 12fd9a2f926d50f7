//! Matrix products, with and without accumulation into an existing tensor.
//!
//! On the CPU everything goes through the `gemm` crate, which candle uses too, but with accumulation
//! (`c += alpha a b`) and without candle's zero-filled output. On CUDA it is cuBLAS: through candle, and with
//! accumulation through [`super::cuda`].

pub use super::packing::{ghost_tiles, make_slabs, slabs, work};

use super::cpu::{Real, View, ghosts, in_place, is_native, on_real, tensor, view};
use super::ghost::Ghost;
use super::ledger::Cost;
use super::packing::packing;
use super::upcast;
use crate::kernel::Tensor;
use candle_core::{DType, Result};
use rayon::prelude::*;
use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    static SERIAL: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` with every product of this thread on this thread alone: for callers that share out independent
/// products themselves. The products' bits do not change.
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

/// A strided view of a matrix.
#[derive(Clone, Copy)]
pub struct Mat<'a, T> {
    data: &'a [T],
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    rs: usize,
    cs: usize,
}

impl<'a, T> Mat<'a, T> {
    /// Row-major `rows` x `cols` with `stride` elements from row to row.
    ///
    /// # Panics
    /// If the slice is too short: a bug of the caller.
    pub fn new(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(
            rows == 0 || cols == 0 || data.len() >= (rows - 1) * stride + cols,
            "matrix outside its slice"
        );
        Self { data, rows, cols, rs: stride, cs: 1 }
    }

    /// Some of the columns.
    ///
    /// # Panics
    /// If they are not inside: a bug of the caller.
    fn columns(self, own: Range<usize>) -> Self {
        assert!(own.start <= own.end && own.end <= self.cols, "columns outside a matrix");
        let from = if own.is_empty() { 0 } else { own.start * self.cs };
        Self { data: &self.data[from..], cols: own.len(), ..self }
    }

    /// The transpose, without moving anything.
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, rs: self.cs, cs: self.rs, ..self }
    }
}

/// `dst = alpha a b`, or `dst += alpha a b` with `add`; `dst` is row-major with `stride`.
///
/// # Panics
/// If the shapes don't fit: a bug of the caller.
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
        if parallel && !SERIAL.get() { gemm::Parallelism::Rayon(0) } else { gemm::Parallelism::None };
    // SAFETY: Mat::new and the assertion above keep every element that is read or written inside its slice,
    // and `dst` is borrowed mutably, so that it overlaps neither operand.
    unsafe { raw(dst.as_mut_ptr(), stride, add, a, b, alpha, threads) }
}

/// `dst (+)= alpha a b`.
///
/// # Safety
/// `dst` points to `a.rows` rows of `b.cols` values, `stride` apart, that nothing else reads or writes.
unsafe fn raw<T: Real>(
    dst: *mut T,
    stride: usize,
    add: bool,
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    alpha: T,
    threads: gemm::Parallelism,
) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    // SAFETY: the caller's for `dst`; Mat::new keeps what is read inside its slice.
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

/// A destination that threads share, each writing columns of its own.
struct Columns<T>(*mut T);

// SAFETY: the pointer is used by `by_tiles` alone, which gives each thread other columns.
unsafe impl<T: Send> Send for Columns<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Columns<T> {}

impl<T> Columns<T> {
    /// From column `c` on.
    ///
    /// # Safety
    /// Column `c` is inside the destination.
    unsafe fn from(&self, c: usize) -> *mut T {
        // SAFETY: the caller's.
        unsafe { self.0.add(c) }
    }
}

/// Fills a tile: its columns, and where their values go.
type Make<'s, T> = dyn Fn(Range<usize>, &mut [T]) + Sync + 's;

/// Where the tiles of a product come from.
enum Source<'s, T> {
    /// Made when they are needed, transposed or not.
    Made(&'s Make<'s, T>, bool),
    /// Columns of a matrix.
    Of(Mat<'s, T>),
}

/// `dst [m, n] = a B` (`+=` with `add`) for a B [k, n] that is made a tile of columns at a time.
///
/// `make(columns, tile)` fills the tile of `columns`: row-major [k, columns], or with `transposed`
/// [columns, k]. Threads make and multiply tiles of `width` columns side by side, each product by one
/// thread: the result does not depend on their number. Beside the destination there is one tile a thread.
///
/// # Panics
/// If the shapes don't fit: a bug of the caller.
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

/// `dst [m, n] = a b` (`+=` with `add`) for a `b` [k, n] that is there, the same tiles of `width` columns at a
/// time as [`by_tiles`] takes: the same bits.
///
/// # Panics
/// If the shapes don't fit: a bug of the caller.
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
            // SAFETY: `dst` has m rows of n values and outlives the loop; these columns are inside and,
            // each number being drawn once, of this thread alone.
            unsafe { raw(columns.from(start), n, add, a, b, T::one(), gemm::Parallelism::None) }
        }
    };
    let workers = if SERIAL.get() { 1 } else { rayon::current_num_threads().min(tiles) };
    if workers <= 1 {
        work();
    } else {
        (0..workers).into_par_iter().with_max_len(1).for_each(|_| work());
    }
}

fn mat<'a, T: Real>(v: &'a View<'_, T>, t: &Tensor, transposed: bool) -> Result<Mat<'a, T>> {
    let (rows, cols) = t.dims2()?;
    let m = Mat::new(v, rows, cols, cols);
    Ok(if transposed { m.t() } else { m })
}

fn sizes(a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> Result<(usize, usize, usize)> {
    let ((ar, ac), (br, bc)) = (a.dims2()?, b.dims2()?);
    let ((m, k), (kb, n)) = (if ta { (ac, ar) } else { (ar, ac) }, if tb { (bc, br) } else { (br, bc) });
    if k != kb {
        candle_core::bail!("matmul: {:?} (transposed: {ta}) x {:?} (transposed: {tb})", a.shape(), b.shape());
    }
    Ok((m, k, n))
}

fn matmul_cpu<T: Real>(a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> Result<Tensor> {
    let (m, k, n) = sizes(a, ta, b, tb)?;
    if let Some([y]) =
        ghosts::<T, 1>(&[a, b], [((m, n).into(), a.dtype())], |l| l.touch(packing((m, k, n), ta, tb)))
    {
        return Ok(y);
    }
    let (av, bv) = (view::<T>(a)?, view::<T>(b)?);
    let (am, bm) = (mat(&av, a, ta)?, mat(&bv, b, tb)?);
    let mut out = vec![T::zero(); m * n];
    gemm(&mut out, n, false, am, bm, T::one(), true);
    tensor(out, (m, n), a.dtype())
}

/// `op(a) op(b)` of two matrices, `op` the transpose where the flag says so.
///
/// # Shapes
/// `a` [m, k] (or [k, m] transposed), `b` [k, n] (or [n, k]) -> [m, n], in `a`'s dtype.
pub fn matmul(a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> Result<Tensor> {
    work(a, ta, b, None)?;
    if is_native(a) {
        return on_real!(a.dtype(), matmul_cpu(a, ta, b, tb));
    }
    let b = b.to_dtype(a.dtype())?;
    let (a, b) = (if ta { a.t()? } else { a.clone() }, if tb { b.t()? } else { b });
    a.matmul(&b)
}

/// As [`matmul`], in the dtype of sums: on CUDA the sums of half-precision values are given as they are, unrounded.
pub fn matmul_wide(a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> Result<Tensor> {
    if is_native(a) || !super::is_half(a) || a.dtype() != b.dtype() {
        return upcast(&matmul(a, ta, b, tb)?);
    }
    let (m, _, n) = sizes(a, ta, b, tb)?;
    if let Some(g) = a.ghost() {
        g.ledger().work(Cost { started: 1.0, ..Cost::default() });
        work(a, ta, b, None)?;
        return Ok(Ghost::new(g.ledger(), (m, n), DType::F32).into());
    }
    #[cfg(feature = "cuda")]
    return super::cuda::gemm::wide(a.real()?, ta, b.real()?, tb, (m, n)).map(Tensor::Real);
    #[cfg(not(feature = "cuda"))]
    candle_core::bail!("matmul: [{m}, {n}] on a device that this build does not have")
}

fn acc_cpu<T: Real>(c: &Tensor, a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<()> {
    let (m, k, n) = sizes(a, ta, b, tb)?;
    if c.dims2()? != (m, n) {
        candle_core::bail!("matmul: {:?} += {:?} ({ta}) x {:?} ({tb})", c.shape(), a.shape(), b.shape());
    }
    if ghosts::<T, 0>(&[a, b], [], |l| l.touch(packing((m, k, n), ta, tb))).is_some() {
        return Ok(());
    }
    let (av, bv) = (view::<T>(a)?, view::<T>(b)?);
    let (am, bm) = (mat(&av, a, ta)?, mat(&bv, b, tb)?);
    in_place::<T>("matmul", c, |dst| {
        gemm(dst, n, true, am, bm, T::of(alpha), true);
        Ok(())
    })
}

/// As [`acc_cpu`] into half precision: added in f32, rounded once.
fn acc_half(c: &Tensor, a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<()> {
    let (m, k, n) = sizes(a, ta, b, tb)?;
    if c.dims2()? != (m, n) {
        candle_core::bail!("matmul: {:?} += {:?} ({ta}) x {:?} ({tb})", c.shape(), a.shape(), b.shape());
    }
    if let Some(g) = c.ghost() {
        let _sum = g.ledger().hold(4 * (m * n) as u64);
        ghosts::<f32, 0>(&[a, b], [], |l| l.touch(packing((m, k, n), ta, tb)));
        g.ledger().touch(g.bytes());
        return Ok(());
    }
    let mut sum = match view::<f32>(c)? {
        View::Owned(values) => values,
        borrowed => borrowed.to_vec(),
    };
    {
        let (av, bv) = (view::<f32>(a)?, view::<f32>(b)?);
        let (am, bm) = (mat(&av, a, ta)?, mat(&bv, b, tb)?);
        gemm(&mut sum, n, true, am, bm, alpha as f32, true);
    }
    c.slice_set(&tensor(sum, (m, n), c.dtype())?, 0, 0)
}

/// `c += alpha op(a) op(b)`, in place.
///
/// `c` is contiguous and may be a view into a larger buffer; it is f32 where gradients accumulate, whatever
/// the dtype of the operands.
pub fn matmul_acc(c: &Tensor, a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<()> {
    work(a, ta, b, Some(c))?;
    match (is_native(c), c.dtype()) {
        (true, DType::F32 | DType::F64) => on_real!(c.dtype(), acc_cpu(c, a, ta, b, tb, alpha)),
        (true, _) => acc_half(c, a, ta, b, tb, alpha),
        (false, _) => add(c, a, ta, b, tb, alpha),
    }
}

/// [`matmul_acc`] on another device than the CPU, with its work written down already.
pub fn add(c: &Tensor, a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<()> {
    // before it is transposed, so that whole lines are read
    let same;
    let b = if b.dtype() == a.dtype() {
        b
    } else {
        same = b.to_dtype(a.dtype())?;
        &same
    };
    // cuBLAS adds to what is there
    if let Some(g) = c.ghost()
        && g.ledger().machine().cuda
        && [a, b, c].into_iter().all(Tensor::is_contiguous)
    {
        g.ledger().work(Cost { started: 1.0, ..Cost::default() });
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    if let (Tensor::Real(c), Tensor::Real(a), Tensor::Real(b)) = (c, a, b)
        && super::cuda::gemm::accumulate(c, a, ta, b, tb, alpha)?
    {
        return Ok(());
    }
    acc_composed(c, a, ta, b, tb, alpha)
}

fn acc_composed(c: &Tensor, a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<()> {
    let (a, b) = (if ta { a.t()? } else { a.clone() }, if tb { b.t()? } else { b.clone() });
    let p = (upcast(&a.matmul(&b)?)? * alpha)?;
    c.slice_set(&(upcast(c)? + p)?.to_dtype(c.dtype())?, 0, 0)
}

/// One product to accumulate into a part of a flat buffer: see [`accumulate`].
#[derive(Clone, Debug)]
pub struct GradProduct {
    /// First element of the part.
    pub offset: usize,
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub cols: usize,
    /// [t, rows].
    pub a: Tensor,
    /// [t, cols].
    pub b: Tensor,
    /// Factor on the product.
    pub alpha: f64,
    /// How many parts it stands for: one, but in a plan.
    pub alike: f64,
}

/// `flat[part] += alpha a^T b` for parts that do not overlap.
///
/// On the CPU the parts are computed side by side, each by one thread, where there are many of them: the
/// gradients of many small experts. `flat` is one contiguous dimension.
pub fn accumulate(flat: &Tensor, mut parts: Vec<GradProduct>) -> Result<()> {
    if let Some(g) = flat.ghost() {
        // operands of another type are copied, all at once; the work was counted with the expert
        let copies = |p: &GradProduct| {
            if p.a.dtype() == flat.dtype() { 0 } else { 4 * (p.a.elem_count() + p.b.elem_count()) }
        };
        let bytes: f64 = parts.iter().map(|p| p.alike * copies(p) as f64).sum();
        g.ledger().touch(if is_native(flat) { bytes as u64 } else { 0 });
        return Ok(());
    }
    parts.sort_by_key(|p| p.offset);
    let apart = parts.windows(2).all(|w| w[0].offset + w[0].rows * w[0].cols <= w[1].offset);
    let many = parts.len() >= 2 * rayon::current_num_threads();
    if many && apart && is_native(flat) && matches!(flat.dtype(), DType::F32 | DType::F64) {
        return on_real!(flat.dtype(), accumulate_cpu(flat, &parts));
    }
    for p in &parts {
        let c = flat.narrow(0, p.offset, p.rows * p.cols)?.reshape((p.rows, p.cols))?;
        matmul_acc(&c, &p.a, true, &p.b, false, p.alpha)?;
    }
    Ok(())
}

fn accumulate_cpu<T: Real>(flat: &Tensor, parts: &[GradProduct]) -> Result<()> {
    let mut views = Vec::with_capacity(parts.len());
    for p in parts {
        let ((ta, rows), (tb, cols)) = (p.a.dims2()?, p.b.dims2()?);
        if ta != tb || (rows, cols) != (p.rows, p.cols) {
            candle_core::bail!("gradients: {:?}^T x {:?} into {rows} x {cols}", p.a.shape(), p.b.shape());
        }
        views.push((view::<T>(&p.a)?, view::<T>(&p.b)?));
    }
    let mats = parts
        .iter()
        .zip(&views)
        .map(|(p, (a, b))| Ok((mat(a, &p.a, true)?, mat(b, &p.b, false)?)))
        .collect::<Result<Vec<_>>>()?;
    in_place::<T>("gradients", flat, |mut rest| {
        let (mut work, mut at) = (Vec::with_capacity(parts.len()), 0);
        for (p, (a, b)) in parts.iter().zip(&mats) {
            let Some((_, tail)) = rest.split_at_mut_checked(p.offset - at) else {
                candle_core::bail!("gradients: a part outside of its buffer");
            };
            let Some((own, tail)) = tail.split_at_mut_checked(p.rows * p.cols) else {
                candle_core::bail!("gradients: a part outside of its buffer");
            };
            (rest, at) = (tail, p.offset + p.rows * p.cols);
            work.push((own, p.cols, T::of(p.alpha), *a, *b));
        }
        work.into_par_iter()
            .with_max_len(1)
            .for_each(|(own, cols, alpha, a, b)| gemm(own, cols, true, a, b, alpha, false));
        Ok(())
    })
}

/// `c += x`, in place and in `c`'s dtype.
pub fn acc(c: &Tensor, x: &Tensor) -> Result<()> {
    let sum = (c + x.to_dtype(c.dtype())?.reshape(c.shape())?)?;
    c.slice_set(&sum, 0, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::check::{close, randn};

    #[test]
    fn products_agree_with_candle() -> Result<()> {
        for dtype in [DType::F64, DType::F32] {
            let (a, b) = (randn(1, (7, 5), dtype)?, randn(2, (3, 5), dtype)?);
            close(&matmul(&a, false, &b, true)?, &a.matmul(&b.t()?)?, 1e-6);
            let (a, b) = (randn(1, (5, 7), dtype)?, randn(2, (5, 3), dtype)?);
            close(&matmul(&a, true, &b, false)?, &a.t()?.matmul(&b)?, 1e-6);
        }
        Ok(())
    }

    #[test]
    fn accumulation_reaches_only_its_view() -> Result<()> {
        let flat = Tensor::ones(40, DType::F32, &candle_core::Device::Cpu)?;
        let (a, b) = (randn(3, (6, 4), DType::F32)?, randn(4, (6, 5), DType::F32)?);
        let c = flat.narrow(0, 10, 20)?.reshape((4, 5))?;
        matmul_acc(&c, &a, true, &b, false, 0.5)?;
        close(&c, &((a.t()?.matmul(&b)? * 0.5)? + 1.0)?, 1e-6);
        let (head, tail) =
            (flat.narrow(0, 0, 10)?.to_vec1::<f32>()?, flat.narrow(0, 30, 10)?.to_vec1::<f32>()?);
        assert!(head.iter().chain(&tail).all(|x| *x == 1.0));
        let other = Tensor::ones((4, 5), DType::F32, &candle_core::Device::Cpu)?;
        acc_composed(&other, &a, true, &b, false, 0.5)?;
        close(&other, &c, 1e-6);
        Ok(())
    }

    #[test]
    fn parts_are_accumulated_as_one_by_one() -> Result<()> {
        let flat = Tensor::ones(4 * 64, DType::F32, &candle_core::Device::Cpu)?;
        let one_by_one = flat.copy()?;
        // enough parts for any machine, out of order, with gaps
        let count = 64.min(4 * rayon::current_num_threads());
        let mut parts = Vec::new();
        for i in (0..count).rev() {
            let (a, b) = (randn(i as u64, (3, 1), DType::F32)?, randn(i as u64 + 99, (3, 3), DType::F32)?);
            let p = GradProduct { offset: 4 * i, rows: 1, cols: 3, a, b, alpha: 0.5, alike: 1.0 };
            let c = one_by_one.narrow(0, p.offset, 3)?.reshape((1, 3))?;
            matmul_acc(&c, &p.a, true, &p.b, false, p.alpha)?;
            parts.push(p);
        }
        let mut overlapping = parts.clone();
        accumulate(&flat, parts.clone())?;
        assert_eq!(flat.to_vec1::<f32>()?, one_by_one.to_vec1::<f32>()?);
        overlapping[0].offset = overlapping[1].offset;
        accumulate(&flat, overlapping)?;
        parts[0].offset = 4 * 64;
        assert!(accumulate(&flat, parts.clone()).is_err());
        parts[0].offset = 0;
        parts[0].rows = 2;
        assert!(accumulate(&flat, parts).is_err());
        Ok(())
    }

    #[test]
    fn bf16_is_widened_and_views_are_not_their_parent() -> Result<()> {
        let all = randn(5, (8, 6), DType::BF16)?;
        let x = randn(6, (4, 6), DType::BF16)?;
        let w = all.narrow(0, 2, 3)?;
        let want = x.to_dtype(DType::F32)?.matmul(&w.to_dtype(DType::F32)?.t()?)?.to_dtype(DType::BF16)?;
        close(&matmul(&x, false, &w, true)?, &want, 1e-2);
        Ok(())
    }

    #[test]
    fn a_factor_is_not_rounded_to_half_precision() -> Result<()> {
        let (a, b) = (randn(7, (4, 3), DType::BF16)?, randn(8, (3, 5), DType::BF16)?);
        let start = randn(9, (4, 5), DType::BF16)?;
        let exact =
            (upcast(&start)? + (upcast(&a)?.matmul(&upcast(&b)?)? * (4.0 / 3.0))?)?.to_dtype(DType::BF16)?;
        let c = start.copy()?;
        matmul_acc(&c, &a, false, &b, false, 4.0 / 3.0)?;
        assert_eq!(upcast(&c)?.to_vec2::<f32>()?, upcast(&exact)?.to_vec2::<f32>()?);
        // the composition rounds the product, never the factor: within one rounding of it
        let c = start.copy()?;
        acc_composed(&c, &a, false, &b, false, 4.0 / 3.0)?;
        close(&upcast(&c)?, &upcast(&exact)?, 1e-2);
        Ok(())
    }

    #[test]
    fn shapes_that_do_not_fit_are_errors() -> Result<()> {
        let (a, b) = (randn(1, (7, 5), DType::F32)?, randn(2, (3, 4), DType::F32)?);
        assert!(matmul(&a, false, &b, true).is_err());
        assert!(matmul_acc(&a, &a, false, &b, true, 1.0).is_err());
        Ok(())
    }
}
