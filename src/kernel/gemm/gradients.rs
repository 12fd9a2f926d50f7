//! Gradients that accumulate in parts of one flat buffer.

use super::cpu::gemm;
use super::{mat, matmul_acc};
use crate::kernel::Tensor;
use crate::kernel::cpu::{Real, in_place, is_native, on_real, view};
use candle_core::{DType, Result};
use rayon::prelude::*;

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
