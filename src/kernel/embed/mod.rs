//! Token embedding: rows of a table by id, and the gradient of the table.

mod cuda;

use super::cpu::{Real, ghosts, in_place, is_cpu, view};
use crate::kernel::{Ledger, Tensor};
use candle_core::{DType, Result};

/// Rows of `table` [v, d] for `ids` `[t]` (u32) -> [t, d].
pub fn forward(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    if is_cpu(table) { table.index_select(ids, 0) } else { cuda::forward(table, ids) }
}

/// The tokens of a micro-batch sorted by id, those of one id in their order.
#[derive(Clone, Debug)]
pub struct ById {
    /// The ids that there are, rising; where the tokens of each begin in the order, and the end; the order.
    list: Vec<u32>,
    ids: usize,
}

impl ById {
    /// Sorts tokens.
    pub fn new(ids: &[u32]) -> Self {
        let mut order: Vec<u32> = (0..ids.len() as u32).collect();
        order.sort_by_key(|i| ids[*i as usize]);
        let (mut list, mut starts) = (Vec::new(), Vec::new());
        for (at, i) in order.iter().enumerate() {
            let id = ids[*i as usize];
            if list.last() != Some(&id) {
                list.push(id);
                starts.push(at as u32);
            }
        }
        starts.push(ids.len() as u32);
        let count = list.len();
        list.extend(starts.into_iter().chain(order));
        Self { list, ids: count }
    }
}

/// `grad[ids[i]] += scale * dy[i]` for every token, in place; `by_id` are the same tokens, for CUDA.
///
/// # Shapes
/// `grad` [v, d], f32 (f64 in tests) and contiguous; `ids` `[t]` u32; `dy` [t, d].
pub fn backward(grad: &Tensor, ids: &Tensor, by_id: Option<&ById>, dy: &Tensor, scale: f64) -> Result<()> {
    if !is_cpu(grad) {
        return cuda::backward(grad, by_id, dy, scale);
    }
    let list = |l: &Ledger| l.touch(4 * ids.elem_count() as u64);
    if ghosts::<f32, 0>(&[dy], [], list).is_some() {
        return Ok(());
    }
    let ids = ids.to_vec1::<u32>()?;
    match grad.dtype() {
        DType::F64 => scatter_cpu::<f64>(grad, &ids, dy, scale),
        _ => scatter_cpu::<f32>(grad, &ids, dy, scale),
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::check::{gradient, randn};
    use candle_core::Device;

    #[test]
    fn gradient_with_repeated_ids() -> Result<()> {
        let table = randn(1, (6, 3), DType::F64)?;
        let ids = Tensor::new(&[4u32, 0, 4, 5, 4], &Device::Cpu)?;
        let dy = randn(2, (5, 3), DType::F64)?;
        let grad = Tensor::zeros((6, 3), DType::F64, &Device::Cpu)?;
        backward(&grad, &ids, None, &dy, 1.0)?;
        gradient("table", &table, &grad, &dy, |t| forward(t, &ids));
        Ok(())
    }

    #[test]
    fn an_id_outside_the_table_is_an_error() -> Result<()> {
        let grad = Tensor::zeros((6, 3), DType::F32, &Device::Cpu)?;
        let ids = Tensor::new(&[6u32], &Device::Cpu)?;
        assert!(backward(&grad, &ids, None, &randn(1, (1, 3), DType::F32)?, 1.0).is_err());
        Ok(())
    }

    #[test]
    fn tokens_sorted_by_id() {
        let by_id = ById::new(&[4, 0, 4, 5, 4]);
        assert_eq!((by_id.ids, by_id.list), (3, vec![0, 4, 5, 0, 1, 4, 5, 1, 0, 2, 4, 3]));
        let none = ById::new(&[]);
        assert_eq!((none.ids, none.list), (0, vec![0]));
    }
}
