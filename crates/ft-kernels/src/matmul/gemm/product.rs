//! Products of tensors, by device and dtype.

use super::cpu::gemm;
use super::operands::{mat, sizes, sizes_onto};
use super::{few, pairs, stored};
use crate::cpu::{Float, View, ghost_products, in_place, is_native, on_real, tensor, view};
#[cfg(feature = "cuda")]
use crate::cuda::gemm::{self as cuda, Precision};
use crate::matmul::packing::{packing, work};
use crate::tensor::{Ghost, Tensor, row_stride, started};
use crate::{is_half, scaled, upcast};
use candle_core::{DType, Result};

fn matmul_cpu<T: Float>(a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> Result<Tensor> {
    let (m, k, n) = sizes(a, ta, b, tb)?;
    if let Some([y]) =
        ghost_products::<T, 1>(&[a, b], [((m, n).into(), a.dtype())], |l| l.touch(packing((m, k, n), ta, tb)))
    {
        return Ok(y);
    }
    let (av, bv) = (view::<T>(a)?, view::<T>(b)?);
    let (am, bm) = (mat(&av, a, ta)?, mat(&bv, b, tb)?);
    let mut out = vec![T::zero(); m * n];
    gemm(&mut out, n, false, am, bm, T::one(), true);
    tensor(out, (m, n), a.dtype())
}

/// `op(a) op(b)`, where `op` transposes if the flag is set.
///
/// # Shapes
/// `a` [m, k] (or [k, m] transposed), `b` [k, n] (or [n, k]) -> [m, n], in `a`'s dtype.
pub fn matmul(a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> Result<Tensor> {
    multiply(a, ta, b, tb, 1.0, false)
}

/// [`matmul`] times `alpha`. CUDA and the dot-product path apply `alpha` to the f32 sums, before
/// rounding.
pub fn matmul_scaled(a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<Tensor> {
    multiply(a, ta, b, tb, alpha, false)
}

/// [`matmul`] in the accumulation dtype: on CUDA and the dot-product path, half-precision inputs give
/// unrounded f32 sums.
pub fn matmul_wide(a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> Result<Tensor> {
    multiply(a, ta, b, tb, 1.0, true)
}

/// `alpha op(a) op(b)`, in the accumulation dtype if `wide`.
fn multiply(a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64, wide: bool) -> Result<Tensor> {
    work(a, ta, b, None)?;
    if pairs::takes(&[a, b])? {
        return pairs::matmul(a, ta, b, tb, alpha, !wide);
    }
    if few::takes(a, ta, b, tb) {
        return few::matmul(a, b, alpha, if wide { DType::F32 } else { a.dtype() });
    }
    let y = if stored::takes(a, b) {
        scaled(&stored::matmul(a, ta, b, tb)?, alpha)?
    } else if is_native(a) {
        scaled(&on_real!(a.dtype(), matmul_cpu(a, ta, b, tb))?, alpha)?
    } else {
        let unrounded = wide && is_half(a) && a.dtype() == b.dtype();
        product_of(a, ta, b, tb, alpha, if unrounded { DType::F32 } else { a.dtype() })?
    };
    if wide { upcast(&y) } else { Ok(y) }
}

/// [`matmul`] off the CPU. The caller has recorded the FLOPs.
pub(crate) fn product(a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> Result<Tensor> {
    product_of(a, ta, b, tb, 1.0, a.dtype())
}

/// [`product`], added to `c` if given.
pub(crate) fn product_onto(c: Option<Tensor>, a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> Result<Tensor> {
    let Some(c) = c else { return product(a, ta, b, tb) };
    onto((&c, true), a, ta, b, tb, 1.0)?;
    Ok(c)
}

fn product_of(a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64, dtype: DType) -> Result<Tensor> {
    let (m, _, n) = sizes(a, ta, b, tb)?;
    #[cfg(feature = "cuda")]
    let precision = precision(a, b);
    let b = b.to_dtype(a.dtype())?;
    if let Some(g) = a.ghost() {
        started(g.ledger());
        return Ok(Ghost::new(g.ledger(), (m, n), dtype).into());
    }
    #[cfg(feature = "cuda")]
    if !a.device().is_cpu() {
        let out = crate::cuda::launch::empty(a, (m, n), dtype)?;
        let [a, b] = [a.contiguous_rows()?, b.contiguous_rows()?];
        cuda::gemm((out.real()?, false), (a.real()?, ta), (b.real()?, tb), alpha, precision)?;
        return Ok(out);
    }
    let (a, b) = (if ta { a.t()? } else { a.clone() }, if tb { b.t()? } else { b });
    scaled(&a.matmul(&b)?, alpha)?.to_dtype(dtype)
}

/// TF32 for f32 rows with a matrix stored in half precision, as a router's: it has all bits of the matrix and of rows
/// that come from half precision, and rounds others to 11 bits.
#[cfg(feature = "cuda")]
fn precision(a: &Tensor, b: &Tensor) -> Precision {
    if a.dtype() == DType::F32 && is_half(b) { Precision::Tf32 } else { Precision::F32 }
}

/// `c = alpha op(a) op(b)` in place, on CUDA. `c` may be a slice of a wider matrix, has contiguous rows
/// and the dtype of both operands.
///
/// # Errors
/// Shapes don't match, or the device is not CUDA.
pub fn matmul_into(c: &Tensor, a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<()> {
    work(a, ta, b, None)?;
    product_to((c, false), (a, ta), (b, tb), alpha)
}

/// Writes the product to `c` or adds it, on CUDA. The caller has recorded the FLOPs.
fn product_to(
    (c, add): (&Tensor, bool),
    (a, ta): (&Tensor, bool),
    (b, tb): (&Tensor, bool),
    alpha: f64,
) -> Result<()> {
    let (m, _, n) = sizes(a, ta, b, tb)?;
    if c.dims2()? != (m, n) {
        candle_core::bail!("matmul: {:?} = {:?} ({ta}) x {:?} ({tb})", c.shape(), a.shape(), b.shape());
    }
    let same = b.to_dtype(a.dtype())?;
    if let Some(g) = c.ghost() {
        started(g.ledger());
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    return cuda::gemm((c.real()?, add), (a.real()?, ta), (same.real()?, tb), alpha, precision(a, b));
    #[cfg(not(feature = "cuda"))]
    candle_core::bail!(
        "matmul: {add} {alpha} [{m}, {n}] in {:?} on a device that this build does not have",
        same.dtype()
    )
}

fn onto_cpu<T: Float>(
    (c, add): (&Tensor, bool),
    a: &Tensor,
    ta: bool,
    b: &Tensor,
    tb: bool,
    alpha: f64,
) -> Result<()> {
    let (m, k, n) = sizes_onto(c, a, ta, b, tb)?;
    if ghost_products::<T, 0>(&[a, b], [], |l| l.touch(packing((m, k, n), ta, tb))).is_some() {
        return Ok(());
    }
    let (av, bv) = (view::<T>(a)?, view::<T>(b)?);
    let (am, bm) = (mat(&av, a, ta)?, mat(&bv, b, tb)?);
    in_place::<T>("matmul", c, |dst| {
        gemm(dst, n, add, am, bm, T::of(alpha), true);
        Ok(())
    })
}

/// Like [`onto_cpu`] for a half-precision `c`: adds in f32 and rounds once.
fn acc_half(c: &Tensor, a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<()> {
    let (m, k, n) = sizes_onto(c, a, ta, b, tb)?;
    if let Some(g) = c.ghost() {
        let _sum = g.ledger().hold(4 * (m * n) as u64);
        ghost_products::<f32, 0>(&[a, b], [], |l| l.touch(packing((m, k, n), ta, tb)));
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
/// `c` is contiguous and may be a view into a larger buffer. Gradients accumulate in f32, whatever the
/// dtype of the operands.
pub fn matmul_acc(c: &Tensor, a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<()> {
    matmul_onto((c, true), a, ta, b, tb, alpha)
}

/// Like [`matmul_acc`]; overwrites `c` unless `add` is set.
pub fn matmul_onto(
    (c, add_to): (&Tensor, bool),
    a: &Tensor,
    ta: bool,
    b: &Tensor,
    tb: bool,
    alpha: f64,
) -> Result<()> {
    work(a, ta, b, Some(c))?;
    if pairs::takes(&[a, b])? && matches!(c.dtype(), DType::BF16 | DType::F32) {
        return pairs::onto((c, add_to), a, ta, b, tb, alpha);
    }
    if stored::takes(a, b) && c.dtype() == DType::F32 {
        return stored::onto((c, add_to), a, ta, b, tb, alpha);
    }
    if is_native(c) && matches!(c.dtype(), DType::F32 | DType::F64) {
        return on_real!(c.dtype(), onto_cpu((c, add_to), a, ta, b, tb, alpha));
    }
    if !is_native(c) {
        return onto((c, add_to), a, ta, b, tb, alpha);
    }
    if !add_to {
        c.zero_set()?;
    }
    acc_half(c, a, ta, b, tb, alpha)
}

/// [`matmul_onto`] off the CPU. The caller has recorded the FLOPs.
fn onto((c, add): (&Tensor, bool), a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<()> {
    // cuBLAS writes c, or accumulates into it, directly
    let takes = [a, b, c].into_iter().all(|t| row_stride(t.layout()).is_some())
        && (c.dtype() == a.dtype() || c.dtype() == DType::F32);
    if takes && !c.device().is_cpu() {
        return product_to((c, add), (a, ta), (b, tb), alpha);
    }
    if !add {
        c.zero_set()?;
    }
    // before transposing, to read whole rows
    acc_composed(c, a, ta, &b.to_dtype(a.dtype())?, tb, alpha)
}

pub(super) fn acc_composed(c: &Tensor, a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<()> {
    let (a, b) = (if ta { a.t()? } else { a.clone() }, if tb { b.t()? } else { b.clone() });
    let p = (upcast(&a.matmul(&b)?)? * alpha)?;
    c.slice_set(&(upcast(c)? + p)?.to_dtype(c.dtype())?, 0, 0)
}

/// `c += x`, in place, in `c`'s dtype.
pub fn acc(c: &Tensor, x: &Tensor) -> Result<()> {
    put((c, true), x)
}

/// `c = x`, or `+=` with `add`, in place, in `c`'s dtype.
pub fn put((c, add): (&Tensor, bool), x: &Tensor) -> Result<()> {
    let x = x.to_dtype(c.dtype())?.reshape(c.shape())?;
    c.slice_set(&if add { (c + x)? } else { x.contiguous()? }, 0, 0)
}
