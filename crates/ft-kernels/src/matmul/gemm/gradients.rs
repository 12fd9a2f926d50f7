//! Gradient products that accumulate into slices of one flat buffer.

use super::cpu::{Mat, gemm};
use super::pairs;
use super::pairs::{Onto, Right};
use super::product::matmul_onto;
use super::threads::serial;
use crate::Tensor;
use crate::cpu::{self, Float, Halves, in_place, is_native, on_real, view};
use candle_core::{DType, Result};
use half::bf16;

/// One `a^T b` product for [`accumulate`].
#[derive(Clone, Debug)]
pub struct GradProduct {
    /// First element of the slice.
    pub offset: usize,
    /// Rows of the slice.
    pub rows: usize,
    /// Columns of the slice.
    pub cols: usize,
    /// Left operand [t, rows].
    pub a: Tensor,
    /// Right operand [t, cols].
    pub b: Tensor,
    /// Factor on the product.
    pub alpha: f64,
    /// Whether to add to the slice instead of overwriting it.
    pub add: bool,
    /// Number of identical products represented by this one: 1, except in plans.
    pub alike: f64,
}

impl GradProduct {
    /// Both operands, `a` transposed.
    fn mats<'a, T>(&self, a: &'a [T], b: &'a [T]) -> Result<(Mat<'a, T>, Mat<'a, T>)> {
        let ((ta, rows), (tb, cols)) = (self.a.dims2()?, self.b.dims2()?);
        if ta != tb || (rows, cols) != (self.rows, self.cols) {
            let (a, b, [rows, cols]) = (self.a.shape(), self.b.shape(), [self.rows, self.cols]);
            candle_core::bail!("gradients: {a:?}^T x {b:?} into {rows} x {cols}");
        }
        Ok((Mat::new(a, ta, rows, rows).t(), Mat::new(b, tb, cols, cols)))
    }
}

/// `flat[slice] += alpha a^T b` (or `=`) for disjoint slices of a contiguous 1-D `flat`.
///
/// On the CPU, a large number of products (gradients of many small experts) runs in parallel, one thread
/// per product.
pub fn accumulate(flat: &Tensor, mut parts: Vec<GradProduct>) -> Result<()> {
    let mut by_dots = flat.dtype() == DType::F32;
    for p in &parts {
        by_dots &= pairs::takes(&[&p.a, &p.b])?;
    }
    if let Some(g) = flat.ghost() {
        // Operands of another dtype are all copied at once, or packed by each thread. The FLOPs are
        // recorded with the expert.
        let copies = |p: &GradProduct| {
            let other = [&p.a, &p.b].into_iter().filter(|t| t.dtype() != flat.dtype());
            p.alike * other.map(|t| 4 * t.elem_count()).sum::<usize>() as f64
        };
        let packed =
            |p: &GradProduct| Ok(pairs::packing((p.rows, p.a.dim(0)?, p.cols), 1, (true, false), false));
        let bytes = if by_dots {
            let most = parts.iter().map(packed).collect::<Result<Vec<u64>>>()?.into_iter().max();
            g.ledger().machine().threads * most.unwrap_or(0)
        } else {
            parts.iter().map(copies).sum::<f64>() as u64
        };
        g.ledger().touch(if is_native(flat) { bytes } else { 0 });
        return Ok(());
    }
    parts.sort_by_key(|p| p.offset);
    let apart = parts.windows(2).all(|w| w[0].offset + w[0].rows * w[0].cols <= w[1].offset);
    let many = parts.len() >= 2 * rayon::current_num_threads();
    match (many && apart && is_native(flat), flat.dtype()) {
        (true, DType::F32) if by_dots => accumulate_dots(flat, parts),
        (true, DType::F32 | DType::F64) => on_real!(flat.dtype(), accumulate_cpu(flat, &parts)),
        _ => parts.iter().try_for_each(|p| {
            let c = flat.narrow(0, p.offset, p.rows * p.cols)?.reshape((p.rows, p.cols))?;
            matmul_onto((&c, p.add), &p.a, true, &p.b, false, p.alpha)
        }),
    }
}

/// Views of both operands of all products.
fn views<'a, V>(parts: &'a [GradProduct], of: impl Fn(&'a Tensor) -> Result<V>) -> Result<Vec<(V, V)>> {
    parts.iter().map(|p| Ok((of(&p.a)?, of(&p.b)?))).collect()
}

fn accumulate_dots(flat: &Tensor, mut parts: Vec<GradProduct>) -> Result<()> {
    for p in &mut parts {
        (p.a, p.b) = (p.a.contiguous()?, p.b.contiguous()?);
    }
    let views = views(&parts, Halves::of)?;
    let mats =
        parts.iter().zip(&views).map(|(p, (a, b))| p.mats::<bf16>(a, b)).collect::<Result<Vec<_>>>()?;
    side_by_side::<f32>(flat, &parts, |own, p, i| {
        let (a, b) = mats[i];
        serial(|| pairs::product_onto(Onto::Wide(own), p.cols, p.add, a, Right::Stored(b), p.alpha as f32));
    })
}

fn accumulate_cpu<T: Float>(flat: &Tensor, parts: &[GradProduct]) -> Result<()> {
    let views = views(parts, view::<T>)?;
    let mats = parts.iter().zip(&views).map(|(p, (a, b))| p.mats(a, b)).collect::<Result<Vec<_>>>()?;
    side_by_side::<T>(flat, parts, |own, p, i| {
        let (a, b) = mats[i];
        gemm(own, p.cols, p.add, a, b, T::of(p.alpha), false);
    })
}

/// Runs `add(slice, product, index)` for every product, each on one thread. `parts` must be sorted by
/// offset.
fn side_by_side<T: Float>(
    flat: &Tensor,
    parts: &[GradProduct],
    add: impl Fn(&mut [T], &GradProduct, usize) + Sync,
) -> Result<()> {
    in_place::<T>("gradients", flat, |mut rest| {
        let (mut work, mut at) = (Vec::with_capacity(parts.len()), 0);
        for p in parts {
            let Some((_, tail)) = rest.split_at_mut_checked(p.offset - at) else {
                candle_core::bail!("gradients: a part outside of its buffer");
            };
            let Some((own, tail)) = tail.split_at_mut_checked(p.rows * p.cols) else {
                candle_core::bail!("gradients: a part outside of its buffer");
            };
            (rest, at) = (tail, p.offset + p.rows * p.cols);
            work.push((own, p));
        }
        cpu::each(work.into_iter().enumerate(), |(i, (own, p))| add(own, p, i));
        Ok(())
    })
}
