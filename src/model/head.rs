//! The end of the model: final norm, output head and loss, some token rows at a time.
//!
//! Logits never exist whole, and only for tokens that predict a supervised target.

use super::batch::{Batch, Context};
use super::linear::Linear;
use super::norm::Norm;
use super::sink::Sink;
use crate::kernel::Tensor;
use crate::kernel::upcast;
use crate::kernel::{Role, loss};
use candle_core::Result;
use std::ops::Range;

/// Bytes of f32 logits that a chunk of the usual size holds at the most.
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

/// `n` targets in as few chunks of at most `rows` as there can be, as even as can be: a last chunk of one row would
/// be a product of another kind (matrix by vector), with other bits.
pub fn chunks(n: usize, rows: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + Clone {
    let count = n.div_ceil(rows.max(1));
    (0..count).map(move |i| chunk_start(n, count, i)..chunk_start(n, count, i + 1))
}

fn chunk_start(n: usize, count: usize, i: usize) -> usize {
    // n * i / count, of which the product may not fit
    n / count * i + n % count * i / count
}

impl Head {
    /// Rows of a chunk of the usual size.
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
        upcast(&y)
    }

    /// Losses of the batch's targets, at most `rows` of them at a time; with a sink, also the gradients of
    /// `scale * sum(losses)`.
    ///
    /// Losses and the input's gradient have the same bits for any `rows` (see [`chunks`]); gradients of what trains
    /// here are sums over the chunks.
    pub fn loss(
        &self,
        x: &Tensor,
        batch: &Batch,
        rows: usize,
        backward: Option<(f64, &Sink<'_>)>,
    ) -> Result<Output> {
        let (mut losses, mut grads) = (Vec::new(), Vec::new());
        x.each(chunks(batch.target_count, rows), Range::len, |chunk| {
            let (from, rows) = (chunk.start, chunk.len());
            let ctx = batch.context.for_targets(batch.first_target + from);
            let index = batch.target_rows.narrow(0, from, rows)?;
            let targets = batch.targets.narrow(0, from, rows)?;
            let hx = x.index_select(&index, 0)?;
            let normed = self.norm.forward(&hx)?;
            let (saved, loss, dlogits) = x.role(Role::Logits, || -> Result<_> {
                let (y, saved) = self.linear.forward(&normed, &ctx)?;
                drop(normed);
                let dtype = y.dtype();
                let logits = upcast(&y)?;
                drop(y);
                let (loss, dl) = loss::cross_entropy(logits, &targets, backward.map(|(scale, _)| scale))?;
                Ok((saved, loss, dl.map(|dl| dl.to_dtype(dtype)).transpose()?))
            })?;
            losses.push(loss);
            if let (Some(dl), Some((_, sink))) = (dlogits, backward) {
                let dn = self.linear.backward(&saved, &dl, &ctx, sink, None)?;
                drop(dl);
                grads.push(self.norm.backward(&hx, &dn, sink)?);
            }
            Ok(())
        })?;
        let dx = match backward {
            None => None,
            Some(_) => {
                let dx = x.zeros_like()?;
                Some(if grads.is_empty() {
                    dx
                } else {
                    dx.index_add(&batch.target_rows, &Tensor::end_to_end(&grads, batch.target_count)?, 0)?
                })
            }
        };
        Ok(Output { losses, dx })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_few_and_even() {
        for (n, rows) in [(0, 16), (1, 16), (16, 16), (17, 16), (511, 110), (100, 1000), (33, 1)] {
            let all: Vec<Range<usize>> = chunks(n, rows).collect();
            assert_eq!(all.len(), n.div_ceil(rows));
            assert_eq!(all.iter().map(|c| c.len()).sum::<usize>(), n);
            assert!(all.windows(2).all(|w| w[0].end == w[1].start), "{all:?}");
            let (least, most) = (all.iter().map(|c| c.len()).min(), all.iter().map(|c| c.len()).max());
            assert!(most <= Some(rows) || n == 0, "{all:?}");
            assert!(most.zip(least).is_none_or(|(a, b)| a - b <= 1), "{all:?}");
        }
    }
}
