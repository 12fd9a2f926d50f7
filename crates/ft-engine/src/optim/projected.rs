//! GaLore update of a matrix, equivalent to the authors' `galore_torch`: AdamW on the projected gradient; the
//! update is projected back and scaled. The projection is recomputed every `gap` updates. Moments persist
//! across projections, so the signs of singular vectors, left open by the SVD, matter: the entry of largest magnitude
//! is positive.

use crate::params::buffers::LocalShard;
use crate::params::buffers::moments::MomentsView;
use crate::params::buffers::projected::Projected;
use crate::params::{FlatParam, Params};
use candle_core::{DType, Device, Result};
use ft_base::rng::{Purpose, Stream};
use ft_kernels::decompose::Matrix;
use ft_kernels::optimizer::{AdamW, adamw, adamw8bit, round};
use ft_kernels::{Real, Tensor, to_host};

/// Constants of the method.
#[derive(Clone, Copy, Debug)]
pub(super) struct GaLore {
    /// Updates between projections.
    pub gap: u64,
    /// Factor on the update.
    pub scale: f64,
}

impl GaLore {
    /// Updates one matrix; `k` holds learning rate and weight decay.
    pub fn step(
        &self,
        params: &Params,
        (flat, p): (&FlatParam, &Projected),
        grads: &LocalShard,
        k: &AdamW,
    ) -> Result<()> {
        let slot = &params.slots[p.index];
        let g = grads.of(slot.range())?.reshape(p.dims)?;
        if (k.t - 1).is_multiple_of(self.gap) {
            update_basis(params, p, &g, k.t)?;
        }
        let (rows, cols) = p.low;
        let low = p.project(&g)?.reshape(rows * cols)?;
        let delta = Tensor::zeros(rows * cols, DType::F32, g.device())?;
        let inner = AdamW { weight_decay: 0.0, ..*k };
        for range in p.moments.parts(&(0..rows * cols)).into_iter().filter(|r| !r.is_empty()) {
            match p.moments.of(range)? {
                MomentsView::F32([m, v]) => adamw(&delta, &m, &v, &low, None, &inner)?,
                MomentsView::EightBit(all) => adamw8bit(&delta, &all, &low, None, &inner)?,
            }
        }
        drop(low);
        let delta = delta.reshape((rows, cols))?;
        if flat.keeps(&slot.range()) {
            self.apply(p, &flat.master.of(slot.range())?, &delta, k)?;
            return flat.refresh(slot.range());
        }
        flat.compute_on(slot.range(), g.real()?.device(), |weights| {
            // a temporary f32 copy of this matrix
            let wide = weights.to_dtype(DType::F32)?;
            self.apply(p, &wide, &delta, k)?;
            round(&wide, weights, flat.draws(k.t, slot.offset))
        })
    }

    /// Adds the update of the projection to f32 weights, and applies weight decay.
    fn apply(&self, p: &Projected, weights: &Tensor, delta: &Tensor, k: &AdamW) -> Result<()> {
        p.add_back(&weights.reshape(p.dims)?, delta, self.scale)?;
        if k.weight_decay != 0.0 {
            let less = (weights * (1.0 - k.lr * k.weight_decay))?;
            weights.slice_set(&less, 0, 0)?;
        }
        Ok(())
    }
}

/// Computes a new basis, the leading singular vectors of a gradient, on the host.
fn update_basis(params: &Params, p: &Projected, g: &Tensor, t: u64) -> Result<()> {
    let (short, rank) = p.basis.dims2()?;
    let name = &params.tensors[p.index].name;
    let values: Vec<f32> = to_host(g.real()?)?.flatten_all()?.to_vec1()?;
    if !values.iter().all(|x| x.is_finite()) {
        // reported with the step's norm
        return Ok(());
    }
    let stream = Stream::new(0, Purpose::Projection, t, p.index as u64);
    let Some(found) = Matrix::new(&values, p.dims).and_then(|m| m.largest(rank, stream)) else {
        candle_core::bail!("{name}: the singular values of its gradient cannot be found");
    };
    let vectors = if p.is_right() { found.right } else { found.left };
    let mut basis = vec![0f32; short * rank];
    for (k, v) in vectors.column_iter().enumerate() {
        // fix the sign: the entry of largest magnitude is positive
        let largest = v.iter().copied().fold(0f64, |m, x| if x.abs() > m.abs() { x } else { m });
        let sign = if largest < 0.0 { -1.0 } else { 1.0 };
        v.iter().enumerate().for_each(|(r, x)| basis[r * rank + k] = (sign * x) as f32);
    }
    let basis = Real::from_vec(basis, (short, rank), &Device::Cpu)?.to_device(g.real()?.device())?;
    p.basis.slice_set(&basis.into(), 0, 0)
}
