//! The end of the model: final norm, output head and loss, some token rows at a time.
//!
//! Logits never exist whole, and only for tokens that predict a supervised target.

use super::decoder::{Batch, Context};
use super::linear::Linear;
use super::norm::Norm;
use super::sink::Sink;
use crate::kernel::loss;
use crate::kernel::wide;
use candle_core::{Result, Tensor};

/// Bytes of f32 logits that a chunk holds at the most.
pub const CHUNK_BYTES: usize = 64 << 20;

/// Final norm and output head.
#[derive(Clone, Debug)]
pub struct Head {
    /// Final norm.
    pub norm: Norm,
    /// `[d]` -> `[v]`.
    pub linear: Linear,
    /// Vocabulary.
    pub vocab: usize,
}

/// What the head gives for a micro-batch.
#[derive(Debug)]
pub struct Output {
    /// Losses of the targets, in chunks, on the device (f32).
    pub losses: Vec<Tensor>,
    /// Gradient of the head's input [t, d], if it was wanted.
    pub dx: Option<Tensor>,
}

impl Head {
    /// Rows of a chunk.
    pub fn chunk_rows(vocab: usize) -> usize {
        (CHUNK_BYTES / (4 * vocab.max(1))).max(16)
    }

    /// Whether anything here trains.
    pub fn trains(&self) -> bool {
        self.norm.slot.is_some() || self.linear.needs_input()
    }

    /// Logits of all rows of `x` [n, d]: [n, v] in f32 (f64 for f64). For generation and tests.
    pub fn logits(&self, x: &Tensor, ctx: &Context) -> Result<Tensor> {
        let (y, _) = self.linear.forward(&self.norm.forward(x)?, ctx)?;
        wide(&y)
    }

    /// Losses of the batch's targets; with a sink, also the gradients of `scale * sum(losses)`.
    pub fn loss(&self, x: &Tensor, batch: &Batch, backward: Option<(f64, &Sink<'_>)>) -> Result<Output> {
        let n = batch.target_count;
        let (mut losses, mut grads) = (Vec::new(), Vec::new());
        let step = Self::chunk_rows(self.vocab);
        for from in (0..n).step_by(step) {
            let rows = step.min(n - from);
            let ctx = batch.context.for_targets(batch.first_target + from);
            let index = batch.target_rows.narrow(0, from, rows)?;
            let targets = batch.targets.narrow(0, from, rows)?;
            let hx = x.index_select(&index, 0)?;
            let (y, saved) = self.linear.forward(&self.norm.forward(&hx)?, &ctx)?;
            let dtype = y.dtype();
            let logits = wide(&y)?;
            drop(y);
            let (loss, dlogits) = loss::cross_entropy(logits, &targets, backward.map(|(scale, _)| scale))?;
            losses.push(loss);
            if let (Some(dl), Some((_, sink))) = (dlogits, backward) {
                let dn = self.linear.backward(&saved, &dl.to_dtype(dtype)?, &ctx, sink, None)?;
                grads.push(self.norm.backward(&hx, &dn, sink)?);
            }
        }
        let dx = match backward {
            None => None,
            Some(_) => {
                let dx = x.zeros_like()?;
                Some(if grads.is_empty() {
                    dx
                } else {
                    dx.index_add(&batch.target_rows, &Tensor::cat(&grads, 0)?, 0)?
                })
            }
        };
        Ok(Output { losses, dx })
    }
}
