//! Token embedding: table lookup, and the gradient of the table.

mod by_id;
mod cuda;

pub use by_id::ById;

use crate::cpu;
use crate::cpu::{Float, Halves, ROWS, each, ghosts, in_place, is_cpu, vectorised, view};
use crate::tensor::Ghost;
use crate::{Ledger, Tensor};
use candle_core::{DType, Device, Result, WithDType};
use std::borrow::Cow;

/// Looks up rows of `table` `[v, d]` for `ids` `[t]` (u32) -> `[t, d]`.
pub fn forward(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    if !is_cpu(table) {
        return cuda::forward(table, ids);
    }
    match (table, table.dtype()) {
        (Tensor::Real(_), DType::F32) if table.is_contiguous() => {
            gathered(&view::<f32>(table)?, table.dims2()?, &ids.to_vec1::<u32>()?, |x| *x)
        }
        (Tensor::Real(_), DType::BF16) if table.is_contiguous() => {
            gathered(&Halves::of(table)?, table.dims2()?, &ids.to_vec1::<u32>()?, |x| *x)
        }
        _ => table.index_select(ids, 0),
    }
}

/// Like [`forward`], with output in `dtype`: rows of a half-precision table are widened.
pub fn forward_in(table: &Tensor, ids: &Tensor, dtype: DType) -> Result<Tensor> {
    if let (Tensor::Real(_), DType::BF16, DType::F32, true) =
        (table, table.dtype(), dtype, is_cpu(table) && table.is_contiguous())
    {
        return gathered(&Halves::of(table)?, table.dims2()?, &ids.to_vec1::<u32>()?, |x| cpu::wide(*x));
    }
    if let (Some(g), true) = (table.ghost(), is_cpu(table)) {
        return Ok(Ghost::new(g.ledger(), (ids.elem_count(), table.dim(1)?), dtype).into());
    }
    forward(table, ids)?.to_dtype(dtype)
}

/// Looks up rows of a table `[v, d]` and applies `f` to the values, in parallel.
fn gathered<T: Sync, U: WithDType + Send>(
    table: &[T],
    (v, d): (usize, usize),
    ids: &[u32],
    f: impl Fn(&T) -> U + Sync,
) -> Result<Tensor> {
    if let Some(id) = ids.iter().find(|id| **id as usize >= v) {
        candle_core::bail!("embedding: id {id} of a table of {v} rows");
    }
    let mut out = vec![U::zero(); ids.len() * d];
    each(out.chunks_mut(ROWS * d.max(1)).zip(ids.chunks(ROWS)), |(out, ids)| {
        vectorised(|| {
            for (to, id) in out.chunks_mut(d.max(1)).zip(ids) {
                let from = &table[*id as usize * d..][..d];
                to.iter_mut().zip(from).for_each(|(t, x)| *t = f(x));
            }
        });
    });
    Tensor::from_vec(out, (ids.len(), d), &Device::Cpu)
}

/// `grad[ids[i]] += scale * dy[i]` for every token, in place. `by_id` holds the tokens that count, grouped; on the CPU
/// all count without it. With `of`, `grad` has one row per id in `of`, and other tokens are skipped.
///
/// # Shapes
/// `grad` `[v, d]` (or one row per id in `of`), f32 (f64 in tests), contiguous; `ids` `[t]` u32; `dy`
/// `[t, d]`.
pub fn backward(
    grad: &Tensor,
    (ids, by_id, of): (&Tensor, Option<&ById>, Option<&[u32]>),
    dy: &Tensor,
    scale: f64,
) -> Result<()> {
    if !is_cpu(grad) {
        let only = by_id.zip(of).map(|(all, of)| all.only(of));
        return cuda::backward(grad, only.as_ref().or(by_id), dy, scale);
    }
    // token ids, sorted order, and at most as many distinct ids and offsets
    let list = |l: &Ledger| l.touch(16 * ids.elem_count() as u64);
    if ghosts::<f32, 0>(&[dy], [], list).is_some() {
        return Ok(());
    }
    let ids = ids.to_vec1::<u32>()?;
    let all = by_id.map_or_else(|| Cow::Owned(ById::new(&ids)), Cow::Borrowed);
    let by_id = match of {
        None => all,
        Some(of) => Cow::Owned(all.only(of)),
    };
    match grad.dtype() {
        DType::F64 => scatter_cpu::<f64>(grad, ids.len(), &by_id, dy, scale),
        _ => scatter_cpu::<f32>(grad, ids.len(), &by_id, dy, scale),
    }
}

fn scatter_cpu<T: Float>(grad: &Tensor, tokens: usize, by_id: &ById, dy: &Tensor, scale: f64) -> Result<()> {
    let (v, d) = grad.dims2()?;
    let g = view::<T>(dy)?;
    if by_id.is_outside(v) || g.len() != tokens * d {
        candle_core::bail!(
            "embedding: an id outside the table of {v} rows, or {:?} rows of gradient",
            dy.shape()
        );
    }
    let g = &*g;
    in_place::<T>("embedding-backward", grad, |mut rest| {
        // disjoint mutable rows of the gradient, with their tokens in order
        let (mut work, mut at) = (Vec::with_capacity(by_id.ids), 0);
        for (id, tokens) in by_id.each() {
            let (row, tail) = std::mem::take(&mut rest)[(id - at) * d..].split_at_mut(d);
            (rest, at) = (tail, id + 1);
            work.push((row, tokens));
        }
        each(work.chunks_mut(ROWS), |rows| {
            for (row, tokens) in rows {
                for i in *tokens {
                    let g = &g[*i as usize * d..][..d];
                    row.iter_mut().zip(g).for_each(|(r, g)| *r += *g * T::of(scale));
                }
            }
        });
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, gradient, randn};
    use candle_core::Device;

    #[test]
    fn gradient_with_repeated_ids() -> Result<()> {
        let table = randn(1, (6, 3), DType::F64)?;
        let ids = Tensor::new(&[4u32, 0, 4, 5, 4], &Device::Cpu)?;
        let dy = randn(2, (5, 3), DType::F64)?;
        let grad = Tensor::zeros((6, 3), DType::F64, &Device::Cpu)?;
        backward(&grad, (&ids, None, None), &dy, 1.0)?;
        gradient("table", &table, &grad, &dy, |t| forward(t, &ids));
        Ok(())
    }

    /// More tokens than one task: lookup matches candle, and sums match sequential addition.
    #[test]
    fn lookups_and_sums_on_all_threads_match_candle() -> Result<()> {
        let list: Vec<u32> = (0..300u32).map(|i| i * i % 37).collect();
        let ids = Tensor::from_slice(&list, 300, &Device::Cpu)?;
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            let table = randn(1, (40, 5), dtype)?;
            let whole = table.index_select(&ids, 0)?;
            close(&forward(&table, &ids)?, &whole, 0.0);
            close(
                &forward(&table.narrow(0, 2, 38)?, &ids)?,
                &table.narrow(0, 2, 38)?.index_select(&ids, 0)?,
                0.0,
            );
        }
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let table = randn(4, (40, 5), dtype)?;
            let whole = table.to_dtype(DType::F32)?.index_select(&ids, 0)?;
            close(&forward_in(&table, &ids, DType::F32)?, &whole, 0.0);
        }
        let (dy, grad) = (randn(2, (300, 5), DType::F32)?, randn(3, (40, 5), DType::F32)?);
        let mut want = grad.to_vec2::<f32>()?;
        for (id, g) in list.iter().zip(dy.to_vec2::<f32>()?) {
            want[*id as usize].iter_mut().zip(g).for_each(|(w, g)| *w += g * 0.5);
        }
        backward(&grad, (&ids, None, None), &dy, 0.5)?;
        assert_eq!(grad.to_vec2::<f32>()?, want);
        Ok(())
    }

    #[test]
    fn an_id_outside_the_table_is_an_error() -> Result<()> {
        let table = randn(1, (6, 3), DType::F32)?;
        assert!(forward(&table, &Tensor::new(&[6u32], &Device::Cpu)?).is_err());
        let grad = Tensor::zeros((6, 3), DType::F32, &Device::Cpu)?;
        let ids = Tensor::new(&[6u32], &Device::Cpu)?;
        assert!(backward(&grad, (&ids, None, None), &randn(1, (1, 3), DType::F32)?, 1.0).is_err());
        Ok(())
    }

    /// The gradient of selected rows matches the gradient of the table.
    #[test]
    fn gradients_of_some_rows_are_those_of_the_table() -> Result<()> {
        let ids = Tensor::new(&[4u32, 0, 4, 5, 4], &Device::Cpu)?;
        let dy = randn(2, (5, 3), DType::F32)?;
        let table = Tensor::zeros((6, 3), DType::F32, &Device::Cpu)?;
        backward(&table, (&ids, None, None), &dy, 2.0)?;
        for of in [&[5u32, 1, 4][..], &[2], &[3, 1]] {
            let grad = Tensor::zeros((of.len(), 3), DType::F32, &Device::Cpu)?;
            backward(&grad, (&ids, None, Some(of)), &dy, 2.0)?;
            let index = Tensor::from_slice(of, of.len(), &Device::Cpu)?;
            close(&grad, &table.index_select(&index, 0)?, 0.0);
        }
        let only = ById::new(&[4, 0, 4, 5, 4]).only(&[5, 1, 4]);
        assert_eq!((only.ids, only.list), (2, vec![0, 2, 0, 1, 4, 3, 0, 2, 4]));
        Ok(())
    }

    /// Tokens left out of the groups give nothing, as those of PyTorch's `padding_idx`.
    #[test]
    fn tokens_left_out_give_no_gradient() -> Result<()> {
        let list = [4u32, 0, 4, 5, 4];
        let (ids, dy) = (Tensor::new(&list, &Device::Cpu)?, randn(2, (5, 3), DType::F32)?);
        let by_id = ById::new(&list).without(4);
        assert_eq!((by_id.ids, &by_id.list[..]), (2, &[0, 5, 0, 1, 2, 1, 3][..]));
        let [all, grad] = [(); 2].map(|()| Tensor::zeros((6, 3), DType::F32, &Device::Cpu));
        let (all, grad) = (all?, grad?);
        backward(&all, (&ids, None, None), &dy, 1.0)?;
        backward(&grad, (&ids, Some(&by_id), None), &dy, 1.0)?;
        let mut want = all.to_vec2::<f32>()?;
        want[4].fill(0.0);
        assert_eq!(grad.to_vec2::<f32>()?, want);
        let rows = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
        backward(&rows, (&ids, Some(&by_id), Some(&[4, 5])), &dy, 1.0)?;
        assert_eq!(rows.to_vec2::<f32>()?, [want[4].clone(), want[5].clone()]);
        Ok(())
    }

    #[test]
    fn tokens_are_grouped_by_id() {
        let by_id = ById::new(&[4, 0, 4, 5, 4]);
        assert_eq!((by_id.ids, by_id.list), (3, vec![0, 4, 5, 0, 1, 4, 5, 1, 0, 2, 4, 3]));
        let none = ById::new(&[]);
        assert_eq!((none.ids, none.list), (0, vec![0]));
    }
}
