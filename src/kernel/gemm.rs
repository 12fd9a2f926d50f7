//! Matrix products, with and without accumulation into an existing tensor.
//!
//! On the CPU everything goes through the `gemm` crate, which candle uses too, but with accumulation
//! (`c += alpha a b`) and without candle's zero-filled output. On CUDA it is cuBLAS through candle.

use super::cpu::{Real, View, in_place, is_cpu, on_real, tensor, view};
use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

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
    let threads = if parallel { gemm::Parallelism::Rayon(0) } else { gemm::Parallelism::None };
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

// SAFETY: the pointer is used by `by_panels` alone, which gives each thread other columns.
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

/// `dst [m, n] = a B` (`+=` with `add`) for a B [k, n] that is made a panel of columns at a time.
///
/// `make(columns, panel)` fills the panel of `columns`: row-major [k, columns], or with `transposed`
/// [columns, k]. Threads make and multiply panels of `width` columns side by side, each product by one
/// thread: the result does not depend on their number. Beside the destination there is one panel a thread.
///
/// # Panics
/// If the shapes don't fit: a bug of the caller.
pub fn by_panels<T: Real>(
    dst: &mut [T],
    n: usize,
    add: bool,
    a: Mat<'_, T>,
    width: usize,
    transposed: bool,
    make: &(dyn Fn(Range<usize>, &mut [T]) + Sync),
) {
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
    let panels = n.div_ceil(width);
    let work = || {
        let mut buffer = vec![T::zero(); k * width.min(n)];
        loop {
            let start = next.fetch_add(1, Ordering::Relaxed).saturating_mul(width);
            if start >= n {
                return;
            }
            let own = start..(start + width).min(n);
            let panel = &mut buffer[..k * own.len()];
            make(own.clone(), panel);
            let b = match transposed {
                true => Mat::new(panel, own.len(), k, k).t(),
                false => Mat::new(panel, k, own.len(), own.len()),
            };
            // SAFETY: `dst` has m rows of n values and outlives the loop; these columns are inside and,
            // each number being drawn once, of this thread alone.
            unsafe { raw(columns.from(start), n, add, a, b, T::one(), gemm::Parallelism::None) }
        }
    };
    let workers = rayon::current_num_threads().min(panels);
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

fn matmul_cpu<T: Real>(a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> Result<Tensor> {
    let (av, bv) = (view::<T>(a)?, view::<T>(b)?);
    let (am, bm) = (mat(&av, a, ta)?, mat(&bv, b, tb)?);
    if am.cols != bm.rows {
        candle_core::bail!("matmul: {:?} (transposed: {ta}) x {:?} (transposed: {tb})", a.shape(), b.shape());
    }
    let (m, n) = (am.rows, bm.cols);
    let mut out = vec![T::zero(); m * n];
    gemm(&mut out, n, false, am, bm, T::one(), true);
    tensor(out, (m, n), a.dtype())
}

/// `op(a) op(b)` of two matrices, `op` the transpose where the flag says so.
///
/// # Shapes
/// `a` [m, k] (or [k, m] transposed), `b` [k, n] (or [n, k]) -> [m, n], in `a`'s dtype.
pub fn matmul(a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> Result<Tensor> {
    if is_cpu(a) {
        return on_real!(a.dtype(), matmul_cpu(a, ta, b, tb));
    }
    let (a, b) = (if ta { a.t()? } else { a.clone() }, if tb { b.t()? } else { b.clone() });
    a.matmul(&b)
}

fn acc_cpu<T: Real>(c: &Tensor, a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<()> {
    let (av, bv) = (view::<T>(a)?, view::<T>(b)?);
    let (am, bm) = (mat(&av, a, ta)?, mat(&bv, b, tb)?);
    let (m, n) = c.dims2()?;
    if am.cols != bm.rows || (m, n) != (am.rows, bm.cols) {
        candle_core::bail!("matmul: {:?} += {:?} ({ta}) x {:?} ({tb})", c.shape(), a.shape(), b.shape());
    }
    in_place::<T>("matmul", c, |dst| {
        gemm(dst, n, true, am, bm, T::of(alpha), true);
        Ok(())
    })
}

/// `c += alpha op(a) op(b)`, in place.
///
/// `c` is contiguous and may be a view into a larger buffer; it is f32 where gradients accumulate, whatever
/// the dtype of the operands.
pub fn matmul_acc(c: &Tensor, a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<()> {
    if is_cpu(c) && matches!(c.dtype(), DType::F32 | DType::F64) {
        return on_real!(c.dtype(), acc_cpu(c, a, ta, b, tb, alpha));
    }
    acc_composed(c, a, ta, b, tb, alpha)
}

fn acc_composed(c: &Tensor, a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<()> {
    let p = (matmul(a, ta, b, tb)?.to_dtype(c.dtype())? * alpha)?;
    c.slice_set(&(c + p)?, 0, 0)
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
    fn bf16_is_widened_and_views_are_not_their_parent() -> Result<()> {
        let all = randn(5, (8, 6), DType::BF16)?;
        let x = randn(6, (4, 6), DType::BF16)?;
        let w = all.narrow(0, 2, 3)?;
        let want = x.to_dtype(DType::F32)?.matmul(&w.to_dtype(DType::F32)?.t()?)?.to_dtype(DType::BF16)?;
        close(&matmul(&x, false, &w, true)?, &want, 1e-2);
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
