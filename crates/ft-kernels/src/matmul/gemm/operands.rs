//! Operands of a product of tensors: sizes and views.

use super::cpu::Mat;
use crate::Tensor;
use candle_core::Result;

/// A stored matrix, transposed if the flag is set.
pub(super) fn mat<'a, T>(v: &'a [T], t: &Tensor, transposed: bool) -> Result<Mat<'a, T>> {
    let (rows, cols) = t.dims2()?;
    let m = Mat::new(v, rows, cols, cols);
    Ok(if transposed { m.t() } else { m })
}

/// Sizes (m, k, n) of a product.
pub(super) fn sizes(a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> Result<(usize, usize, usize)> {
    let ((ar, ac), (br, bc)) = (a.dims2()?, b.dims2()?);
    let ((m, k), (kb, n)) = (if ta { (ac, ar) } else { (ar, ac) }, if tb { (bc, br) } else { (br, bc) });
    if k != kb {
        candle_core::bail!("matmul: {:?} (transposed: {ta}) x {:?} (transposed: {tb})", a.shape(), b.shape());
    }
    Ok((m, k, n))
}

/// Sizes (m, k, n), checked against `c`.
pub(super) fn sizes_onto(
    c: &Tensor,
    a: &Tensor,
    ta: bool,
    b: &Tensor,
    tb: bool,
) -> Result<(usize, usize, usize)> {
    let (m, k, n) = sizes(a, ta, b, tb)?;
    if c.dims2()? != (m, n) {
        candle_core::bail!("matmul: {:?} += {:?} ({ta}) x {:?} ({tb})", c.shape(), a.shape(), b.shape());
    }
    Ok((m, k, n))
}
