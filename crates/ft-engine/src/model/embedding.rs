//! The token embedding: frozen, trained in full or by row, or with LoRA.

use super::layer_inputs::LayerInputs;
use super::linear::Rows;
use super::pass::batch::{Batch, Context};
use super::pass::grad_accumulator::{GradAccumulator, Slot};
use candle_core::{DType, Result};
use ft_kernels::{Tensor, embed, gemm, upcast};

/// The token embedding.
#[derive(Clone, Debug)]
pub struct Embedding {
    /// Table `[v, d]`, in the compute dtype, or in half precision if frozen.
    pub table: Tensor,
    /// Compute dtype.
    pub dtype: DType,
    /// Factor on the embeddings, rounded to the compute dtype.
    pub scale: f64,
    /// Gradient slot, if trained in full.
    pub slot: Option<Slot>,
    pub lora: Option<EmbeddingLora>,
    /// Rows trained on their own, for new tokens.
    pub rows: Option<Rows>,
    /// Inputs of the layers, if the model has per-layer inputs.
    pub layer_inputs: Option<Box<LayerInputs>>,
}

/// LoRA on the table: `table + s (B A)^T`, A `[r, v]`, B `[d, r]`.
#[derive(Clone, Debug)]
pub struct EmbeddingLora {
    pub a: Tensor,
    pub b: Tensor,
    /// Gradient slots of A and B; `None` in inference.
    pub slots: Option<(Slot, Slot)>,
    /// Scale s of the update.
    pub scale: f64,
}

impl Embedding {
    /// Whether the table, rows or the adapter train.
    pub fn trains(&self) -> bool {
        self.slot.is_some()
            || self.lora.as_ref().is_some_and(|l| l.slots.is_some())
            || self.rows.as_ref().is_some_and(|r| r.slot.is_some())
            || self.layer_inputs.as_ref().is_some_and(|i| i.trains())
    }

    /// Whether the backward pass uses weights: a plain table's gradient does not depend on the table.
    pub fn uses_weights(&self) -> bool {
        self.lora.is_some() || self.layer_inputs.is_some()
    }

    /// Starts a pass: hands the layers their inputs, made from `ids` `[t]` and their embeddings `x` `[t, d]`.
    pub fn begin(&self, x: &Tensor, ids: &Tensor, ctx: &Context) -> Result<()> {
        match &self.layer_inputs {
            None => Ok(()),
            Some(inputs) => inputs.forward(x, ids, ctx, self.trains()),
        }
    }

    /// Embeddings `[t, d]` of `ids` `[t]`.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.rows.iter().try_for_each(|r| r.write(&self.table))?;
        let y = embed::forward_in(&self.table, ids, self.dtype)?;
        if let Some(l) = &self.lora {
            gemm::matmul_acc(&y, &l.rows(ids)?, false, &l.b, true, l.scale)?;
        }
        scaled(y, self.scale, self.dtype)
    }

    /// Adds the gradients of trained tensors to the accumulator, given the gradient of the embeddings; `noise` as in
    /// [`Batch::noisy`]. The padding token gives none to tables and rows, as in PyTorch; to B it does.
    pub fn backward(
        &self,
        batch: &Batch,
        ctx: &Context,
        noise: f64,
        dy: &Tensor,
        accum: &GradAccumulator<'_>,
    ) -> Result<()> {
        let through = match &self.layer_inputs {
            None => None,
            Some(inputs) => {
                let x = || batch.noisy(self.forward(&batch.ids)?, noise);
                inputs.backward(batch, ctx, &x, accum)?
            }
        };
        let dy = through.map_or_else(|| Ok(dy.clone()), |d| dy + d)?;
        let (ids, dy) = (&batch.ids, &scaled(dy, self.scale, self.dtype)?);
        if let Some(slot) = self.slot {
            accum.rows(slot, ids, batch.by_id.as_ref(), None, dy)?;
        }
        if let Some((rows, slot)) = self.rows.as_ref().and_then(|r| Some((r, r.slot?))) {
            accum.rows(slot, ids, batch.by_id.as_ref(), Some(&rows.ids), dy)?;
        }
        if let Some((l, (a_slot, b_slot))) = self.lora.as_ref().and_then(|l| Some((l, l.slots?))) {
            accum.product(b_slot, dy, &l.rows(ids)?, l.scale)?;
            let du = (upcast(&gemm::matmul(dy, false, &l.b, false)?)? * l.scale)?;
            accum.columns(a_slot, ids, batch.pad, &du)?;
        }
        Ok(())
    }
}

/// `x` times a factor rounded to the compute dtype.
pub(super) fn scaled(x: Tensor, scale: f64, dtype: DType) -> Result<Tensor> {
    let scale = match dtype {
        DType::BF16 => half::bf16::from_f64(scale).to_f64(),
        DType::F16 => half::f16::from_f64(scale).to_f64(),
        _ => scale,
    };
    if scale == 1.0 { Ok(x) } else { x * scale }
}

impl EmbeddingLora {
    /// Columns of A for `ids`, transposed: `[t, r]`.
    fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        self.a.index_select(ids, 1)?.t()?.contiguous()
    }
}
