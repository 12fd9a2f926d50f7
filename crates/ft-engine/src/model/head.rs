//! Final norm, output head and loss, one logit chunk at a time.
//!
//! Logits exist for target queries only, and never all at once.

use super::linear::Linear;
use super::norm::Norm;
use super::pass::batch::{Batch, Context, Distillation, Teacher};
use super::pass::grad_accumulator::GradAccumulator;
use candle_core::Result;
use ft_kernels::Tensor;
use ft_kernels::spread::Spread;
use ft_kernels::{Role, embed, loss};
use std::ops::Range;

/// Byte limit of f32 logits per default chunk.
pub const CHUNK_BYTES: usize = 64 << 20;
/// Minimum of targets per default chunk on CUDA. Fewer rows take equally long, since the product reads the
/// whole matrix.
const CHUNK_CUDA: usize = 1024;

/// Final norm and output head.
#[derive(Clone, Debug)]
pub struct Head {
    pub norm: Norm,
    /// `[d]` -> `[v]`.
    pub linear: Linear,
    /// Vocabulary size v; outputs of a score head.
    pub vocab: usize,
    /// Whether the outputs are scores of documents, read at their last tokens, and not logits of the vocabulary.
    pub scores: bool,
    /// Limit of the logits: `cap tanh(logits / cap)`.
    pub cap: Option<f64>,
}

/// Result of the head for a micro-batch.
#[derive(Debug, Default)]
pub struct Output {
    /// Per-target losses, one tensor per chunk, on the device (f32). Of a score head: the outputs `[n v]`, flattened.
    pub losses: Vec<Tensor>,
    /// In distillation: per-target divergences from the teacher, in the same form.
    pub divergences: Vec<Tensor>,
    /// Gradient of the head's input `[t, d]`, if requested.
    pub dx: Option<Tensor>,
}

/// Backward pass of the head: gradients of `scale * sum(weights * losses)`.
#[derive(Clone, Copy)]
pub struct Backward<'a> {
    pub scale: f64,
    /// Weights of the targets `[n]`, f32; all 1 without.
    pub weights: Option<&'a Tensor>,
    pub accum: &'a GradAccumulator<'a>,
}

/// Weights of the targets `[n]`, f32, as a function of their losses. For losses of whole sequences. Of a score head:
/// the gradient of the outputs `[n v]`, flattened, f32, before the scale, as a function of the outputs.
pub type Objective<'a> = dyn FnMut(&[Tensor]) -> Result<Tensor> + 'a;

/// Splits `n` targets evenly into the fewest chunks of at most `rows`. Even chunks avoid a last chunk of
/// one row: a matrix-vector product rounds differently.
pub fn chunks(n: usize, rows: usize) -> impl DoubleEndedIterator<Item = Range<usize>> + Clone {
    let count = n.div_ceil(rows.max(1));
    (0..count).map(move |i| chunk_start(n, count, i)..chunk_start(n, count, i + 1))
}

fn chunk_start(n: usize, count: usize, i: usize) -> usize {
    // n * i / count, without overflow in the product.
    n / count * i + n % count * i / count
}

/// Cross-entropy of each target, and with a teacher the divergence from it.
type Losses = (Tensor, Option<Tensor>);

/// Losses of a logit chunk, and the gradient, if requested.
fn losses_of(
    logits: Tensor,
    cap: Option<f64>,
    targets: &Tensor,
    teacher: Option<&Teacher>,
    gradient: Option<loss::Gradient<'_>>,
) -> Result<(Losses, Option<Tensor>)> {
    let Some(Teacher { ids, probs, by: Distillation { temperature, alpha } }) = teacher else {
        let (loss, dlogits) = loss::cross_entropy(logits, cap, targets, gradient)?;
        return Ok(((loss, None), dlogits));
    };
    let teacher = loss::Teacher { ids, probs, temperature: *temperature, alpha: *alpha };
    let ([loss, divergence], dlogits) = loss::distillation(logits, cap, targets, teacher, gradient)?;
    Ok(((loss, Some(divergence)), dlogits))
}

impl Head {
    /// Rows of a default chunk, on CUDA or the CPU.
    pub fn chunk_rows(vocab: usize, cuda: bool) -> usize {
        (CHUNK_BYTES / (4 * vocab.max(1))).max(if cuda { CHUNK_CUDA } else { 16 })
    }

    /// Whether the norm or the head trains.
    pub fn trains(&self) -> bool {
        self.norm.slot.is_some() || self.linear.needs_input()
    }

    /// Logits `[n, v]` in f32 (f64 for f64) for all rows of `x` `[n, d]`. For generation and tests.
    pub fn logits(&self, x: &Tensor, ctx: &Context) -> Result<Tensor> {
        self.linear.write_rows()?;
        let (logits, _) = self.linear.forward_wide(&self.norm.forward(x)?, ctx)?;
        if let Some(cap) = self.cap { loss::capped(logits, cap) } else { Ok(logits) }
    }

    /// Forward and backward pass for the batch's targets, weighted as in the batch. An objective replaces
    /// these weights; this costs a separate forward pass, because logits are not kept.
    pub fn train(
        &self,
        x: &Tensor,
        batch: &Batch,
        rows: usize,
        (scale, objective): (f64, Option<&mut Objective<'_>>),
        accum: &GradAccumulator<'_>,
    ) -> Result<Output> {
        if self.scores {
            let Some(objective) = objective else { candle_core::bail!("a score head without an objective") };
            return self.score(x, batch, Some((scale, objective, accum)));
        }
        let weights = match objective {
            Some(weigh) => Some(weigh(&self.loss(x, batch, rows, None)?.losses)?),
            None => batch.weights.clone(),
        };
        self.loss(x, batch, rows, Some(Backward { scale, weights: weights.as_ref(), accum }))
    }

    /// Outputs of a score head for the batch's queries, and the gradients of the loss, if requested.
    fn score(
        &self,
        x: &Tensor,
        batch: &Batch,
        backward: Option<(f64, &mut Objective<'_>, &GradAccumulator<'_>)>,
    ) -> Result<Output> {
        if batch.target_count == 0 {
            // The objective is of all ranks with tokens of the micro-batch.
            let Some((_, objective, _)) = backward else { return Ok(Output::default()) };
            objective(&[])?;
            return Ok(Output { dx: Some(x.zeros_like()?), ..Output::default() });
        }
        let (ctx, index) = (batch.for_targets(0..batch.target_count), &batch.target_rows);
        let hx = embed::forward(x, index)?;
        let normed = self.norm.forward(&hx)?;
        let (scores, saved) = x.role(Role::Logits, || self.linear.forward_wide(&normed, &ctx))?;
        drop(normed);
        let losses = vec![scores.flatten_all()?];
        let Some((scale, objective, accum)) = backward else {
            return Ok(Output { losses, divergences: Vec::new(), dx: None });
        };
        let shape = (batch.target_count, self.vocab);
        let ds = x.role(Role::Logits, || {
            objective(&losses)?.reshape(shape)?.affine(scale, 0.0)?.to_dtype(x.dtype())
        })?;
        let dn = self.linear.backward(&saved, &ds, &ctx, accum, None)?;
        let mut dx = Spread::new(x)?;
        dx.put(index, self.norm.backward(&hx, &dn, accum)?)?;
        Ok(Output { losses, divergences: Vec::new(), dx: Some(dx.whole(index)?) })
    }

    /// Losses of the batch's targets, in chunks of at most `rows`, and the gradients, if requested. With a teacher,
    /// gradients are of both losses.
    ///
    /// Losses and the input's gradient are bit-identical for any `rows` (see [`chunks`]). Weight gradients
    /// of the head are sums over the chunks.
    pub fn loss(
        &self,
        x: &Tensor,
        batch: &Batch,
        rows: usize,
        backward: Option<Backward<'_>>,
    ) -> Result<Output> {
        if self.scores {
            return self.score(x, batch, None);
        }
        self.linear.write_rows()?;
        let (mut losses, mut divergences) = (Vec::new(), Vec::new());
        let mut dx = backward.map(|_| Spread::new(x)).transpose()?;
        x.each(chunks(batch.target_count, rows), Range::len, |chunk| {
            let (from, rows) = (chunk.start, chunk.len());
            let ctx = batch.for_targets(chunk.clone());
            let index = batch.target_rows.narrow(0, from, rows)?;
            let targets = batch.targets.narrow(0, from, rows)?;
            let hx = embed::forward(x, &index)?;
            let normed = self.norm.forward(&hx)?;
            let (saved, (loss, divergence), dlogits) = x.role(Role::Logits, || -> Result<_> {
                let (logits, saved) = self.linear.forward_wide(&normed, &ctx)?;
                drop(normed);
                let weights = backward.and_then(|b| b.weights);
                let weights = weights.map(|w| w.narrow(0, from, rows)).transpose()?;
                let gradient = backward.map(|b| {
                    let weights = weights.as_ref();
                    loss::Gradient { scale: b.scale, weights, dtype: x.dtype() }
                });
                let teacher = batch.teacher.as_ref().map(|t| t.narrow(from, rows)).transpose()?;
                let (losses, dl) = losses_of(logits, self.cap, &targets, teacher.as_ref(), gradient)?;
                Ok((saved, losses, dl))
            })?;
            losses.push(loss);
            divergences.extend(divergence);
            if let (Some(dl), Some(Backward { accum, .. }), Some(dx)) = (dlogits, backward, &mut dx) {
                let dn = self.linear.backward(&saved, &dl, &ctx, accum, None)?;
                drop(dl);
                dx.put(&index, self.norm.backward(&hx, &dn, accum)?)?;
            }
            Ok(())
        })?;
        let dx = dx.map(|dx| dx.whole(&batch.target_rows)).transpose()?;
        Ok(Output { losses, divergences, dx })
    }

    /// For each of the batch's targets, the `k` most probable of the first `limit` tokens with the logarithms of their
    /// probabilities, in chunks of at most `rows` targets. See [`loss::top`].
    pub fn top(
        &self,
        x: &Tensor,
        batch: &Batch,
        rows: usize,
        (k, limit): (usize, usize),
    ) -> Result<Vec<Vec<(u32, f32)>>> {
        let mut out = Vec::with_capacity(batch.target_count);
        for chunk in chunks(batch.target_count, rows) {
            let index = batch.target_rows.narrow(0, chunk.start, chunk.len())?;
            out.extend(loss::top(&self.logits(&embed::forward(x, &index)?, &batch.context)?, k, limit)?);
        }
        Ok(out)
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
