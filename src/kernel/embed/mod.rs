//! Token embedding: rows of a table by id, and the gradient of the table.

use super::cpu::{Real, ghosts, in_place, is_cpu, view};
use crate::kernel::{Ledger, Tensor};
use candle_core::{DType, Result};

/// Rows of `table` [v, d] for `ids` `[t]` (u32) -> [t, d].
pub fn forward(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    table.index_select(ids, 0)
}

/// `grad[ids[i]] += scale * dy[i]` for every token, in place.
///
/// # Shapes
/// `grad` [v, d], f32 (f64 in tests) and contiguous; `ids` `[t]` u32; `dy` [t, d].
pub fn backward(grad: &Tensor, ids: &Tensor, dy: &Tensor, scale: f64) -> Result<()> {
    if is_cpu(grad) {
        let list = |l: &Ledger| l.touch(4 * ids.elem_count() as u64);
        if ghosts::<f32, 0>(&[dy], [], list).is_some() {
            return Ok(());
        }
        let ids = ids.to_vec1::<u32>()?;
        return match grad.dtype() {
            DType::F64 => scatter_cpu::<f64>(grad, &ids, dy, scale),
            _ => scatter_cpu::<f32>(grad, &ids, dy, scale),
        };
    }
    scatter_composed(grad, ids, dy, scale)
}

fn scatter_cpu<T: Real>(grad: &Tensor, ids: &[u32], dy: &Tensor, scale: f64) -> Result<()> {
    let (v, d) = grad.dims2()?;
    let g = view::<T>(dy)?;
    if ids.iter().any(|i| *i as usize >= v) || g.len() != ids.len() * d {
        candle_core::bail!(
            "embedding: an id outside the table of {v} rows, or {:?} rows of gradient",
            dy.shape()
        );
    }
    in_place::<T>("embedding-backward", grad, |grad| {
        for (id, g) in ids.iter().zip(g.chunks(d)) {
            let row = &mut grad[*id as usize * d..][..d];
            row.iter_mut().zip(g).for_each(|(r, g)| *r += *g * T::of(scale));
        }
        Ok(())
    })
}

fn scatter_composed(grad: &Tensor, ids: &Tensor, dy: &Tensor, scale: f64) -> Result<()> {
    let dy = (dy.to_dtype(grad.dtype())? * scale)?;
    grad.slice_set(&grad.index_add(ids, &dy, 0)?, 0, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::check::{close, gradient, randn};
    use candle_core::Device;

    #[test]
    fn gradient_with_repeated_ids() -> Result<()> {
        let table = randn(1, (6, 3), DType::F64)?;
        let ids = Tensor::new(&[4u32, 0, 4, 5, 4], &Device::Cpu)?;
        let dy = randn(2, (5, 3), DType::F64)?;
        let grad = Tensor::zeros((6, 3), DType::F64, &Device::Cpu)?;
        backward(&grad, &ids, &dy, 1.0)?;
        gradient("table", &table, &grad, &dy, |t| forward(t, &ids));
        let composed = Tensor::zeros((6, 3), DType::F64, &Device::Cpu)?;
        scatter_composed(&composed, &ids, &dy, 1.0)?;
        close(&composed, &grad, 1e-12);
        Ok(())
    }

    #[test]
    fn an_id_outside_the_table_is_an_error() -> Result<()> {
        let grad = Tensor::zeros((6, 3), DType::F32, &Device::Cpu)?;
        let ids = Tensor::new(&[6u32], &Device::Cpu)?;
        assert!(backward(&grad, &ids, &randn(1, (1, 3), DType::F32)?, 1.0).is_err());
        Ok(())
    }
}
