//! Per-layer inputs (Gemma 4): for each token and layer, the sum of an embedding and of a normalized projection of the
//! token's embedding.

use super::embedding::scaled;
use super::linear::Linear;
use super::norm::Norm;
use super::pass::batch::{Batch, Context};
use super::pass::grad_accumulator::{GradAccumulator, Slot};
use candle_core::{DType, Result};
use ft_kernels::{Tensor, embed};
use std::f64::consts::FRAC_1_SQRT_2;

/// Source of the inputs of all layers.
#[derive(Clone, Debug)]
pub struct LayerInputs {
    /// Embeddings `[v, l p]`, in the compute dtype, or in half precision if frozen.
    pub table: Tensor,
    /// Gradient slot, if the table trains.
    pub slot: Option<Slot>,
    /// `[d]` -> `[l p]`.
    pub projection: Linear,
    /// Norm of the projection for each layer, with a weight `[p]`.
    pub norm: Norm,
    /// Width d of the residual stream.
    pub hidden: usize,
    /// Compute dtype.
    pub dtype: DType,
}

impl LayerInputs {
    /// Whether anything here trains.
    pub fn trains(&self) -> bool {
        self.slot.is_some() || self.norm.slot.is_some() || self.projection.needs_input()
    }

    /// Values for a layer, p.
    fn width(&self) -> usize {
        self.norm.weight.elem_count()
    }

    /// The projection of embeddings, a row for each layer of a token: `[t, d]` -> `[t l, p]`.
    fn projected(&self, x: &Tensor, ctx: &Context) -> Result<(Tensor, super::linear::Saved)> {
        let (y, saved) = self.projection.forward(x, ctx)?;
        let y = (y * (self.hidden as f64).powf(-0.5))?;
        Ok((y.reshape((y.elem_count() / self.width(), self.width()))?, saved))
    }

    /// Hands the layers their inputs; `wants` is whether their gradient is wanted.
    pub fn forward(&self, x: &Tensor, ids: &Tensor, ctx: &Context, wants: bool) -> Result<()> {
        let (t, _) = x.dims2()?;
        let normed = self.norm.forward(&self.projected(x, ctx)?.0)?.reshape((t, self.table.dim(1)?))?;
        let own = scaled(embed::forward_in(&self.table, ids, self.dtype)?, self.scale(), self.dtype)?;
        ctx.shared_state.set_inputs(0, ((normed + own)? * FRAC_1_SQRT_2)?, wants);
        Ok(())
    }

    /// Factor on the embeddings.
    fn scale(&self) -> f64 {
        (self.width() as f64).sqrt()
    }

    /// Adds the gradients of trained tensors to the accumulator; returns the gradient of the token embeddings, which
    /// `x` makes again. `None` if no layer gave a gradient.
    pub fn backward(
        &self,
        batch: &Batch,
        ctx: &Context,
        x: &dyn Fn() -> Result<Tensor>,
        accum: &GradAccumulator<'_>,
    ) -> Result<Option<Tensor>> {
        let Some(d) = ctx.shared_state.take_inputs() else { return Ok(None) };
        let shape = d.shape().clone();
        let d = (d * FRAC_1_SQRT_2)?;
        if let Some(slot) = self.slot {
            let d = scaled(d.clone(), self.scale(), self.dtype)?;
            accum.rows(slot, &batch.ids, batch.by_id.as_ref(), None, &d)?;
        }
        let (projected, saved) = self.projected(&x()?, ctx)?;
        let d = self.norm.backward(&projected, &d.reshape(projected.shape())?, accum)?;
        drop(projected);
        let d = (d * (self.hidden as f64).powf(-0.5))?.reshape(shape)?;
        Ok(Some(self.projection.backward(&saved, &d, ctx, accum, None)?))
    }
}
