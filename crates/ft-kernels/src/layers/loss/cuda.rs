//! Cross-entropy and distillation on CUDA, with losses and gradient in one launch.

use super::{Gradient, Teacher};
use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::tensor::ghosts_and;
use candle_core::{DType, Result, Shape};

/// Threads per block, same as in loss.cu; one block per row.
const THREADS: u32 = 512;

/// Whether these are `n` targets.
fn are_targets(targets: &Tensor, n: usize) -> bool {
    targets.dims() == [n] && targets.dtype() == DType::U32
}

/// Contiguous weights `[n]` of the targets, f32, if any. `what` names the operation in errors.
fn weights_of(gradient: Option<Gradient<'_>>, n: usize, what: &str) -> Result<Option<Tensor>> {
    let weights = gradient.and_then(|g| g.weights).map(Tensor::contiguous).transpose()?;
    if weights.as_ref().is_some_and(|w| w.dims() != [n] || w.dtype() != DType::F32) {
        candle_core::bail!("{what}: weights of another shape or dtype than [{n}] in f32");
    }
    Ok(weights)
}

/// Shape and dtype of a gradient in a half precision; one in f32 overwrites the logits.
fn halves(logits: &Tensor, gradient: Option<Gradient<'_>>) -> Option<(Shape, DType)> {
    gradient.filter(|g| g.dtype != DType::F32).map(|g| (logits.shape().clone(), g.dtype))
}

/// Buffer of the gradient: the logits, or in a half precision a new one.
fn output(logits: &Tensor, gradient: Option<Gradient<'_>>) -> Result<Option<Tensor>> {
    match halves(logits, gradient) {
        Some((shape, dtype)) => empty(logits, shape, dtype).map(Some),
        None => Ok(gradient.map(|_| logits.clone())),
    }
}

/// Losses `[n]` of f32 logits `[n, v]` and, if requested, the gradient, in place if it is f32.
pub fn cross_entropy(
    logits: Tensor,
    cap: Option<f64>,
    targets: &Tensor,
    gradient: Option<Gradient<'_>>,
) -> Result<(Tensor, Option<Tensor>)> {
    let (n, v) = logits.dims2()?;
    if !are_targets(targets, n) || logits.dtype() != DType::F32 {
        candle_core::bail!(
            "cross-entropy: {:?} targets in {:?} for {:?} {:?}",
            targets.shape(),
            targets.dtype(),
            logits.shape(),
            logits.dtype()
        );
    }
    let losses = [(n.into(), DType::F32)];
    if let Some(([losses], d)) = ghosts_and(&[&logits], losses, halves(&logits, gradient)) {
        return Ok((losses, d.or_else(|| gradient.map(|_| logits))));
    }
    let (logits, targets) = (logits.contiguous()?, targets.contiguous()?);
    let weights = weights_of(gradient, n, "cross-entropy")?;
    let losses = empty(&logits, n, DType::F32)?;
    let out = output(&logits, gradient)?;
    let launch = Launch::of(out.as_ref().unwrap_or(&logits), compiled!(LOSS), "loss")?;
    let launch = launch.with(args![&logits, &targets, weights.as_ref(), &losses, out.as_ref(), v])?;
    let scale = gradient.map_or(0.0, |g| g.scale);
    let launch = launch.with(args![scale as f32, cap.unwrap_or(0.0) as f32])?;
    // SAFETY: logits and gradient have n rows of v values, one block per row; targets, weights and losses
    // have n values, as checked above. In place, each thread writes a logit only after reading it.
    unsafe { launch.run(Grid::new(n, THREADS)) }?;
    Ok((losses, out))
}

/// Cross-entropies and divergences `[n]` of f32 logits `[n, v]` and, if requested, the gradient, in place if it is f32.
/// Shapes of the teacher are checked.
pub fn distillation(
    logits: Tensor,
    cap: Option<f64>,
    targets: &Tensor,
    teacher: Teacher<'_>,
    gradient: Option<Gradient<'_>>,
) -> Result<([Tensor; 2], Option<Tensor>)> {
    let ((n, v), (_, k)) = (logits.dims2()?, teacher.ids.dims2()?);
    if !are_targets(targets, n) || logits.dtype() != DType::F32 {
        let (targets, dtype, logits) = (targets.shape(), targets.dtype(), &logits);
        candle_core::bail!(
            "distillation: {targets:?} targets in {dtype:?} for {:?} {:?}",
            logits.shape(),
            logits.dtype()
        );
    }
    let losses = || (n.into(), DType::F32);
    if let Some((both, d)) = ghosts_and(&[&logits], [losses(), losses()], halves(&logits, gradient)) {
        return Ok((both, d.or_else(|| gradient.map(|_| logits))));
    }
    let (logits, targets) = (logits.contiguous()?, targets.contiguous()?);
    let (ids, probs) = (teacher.ids.contiguous()?, teacher.probs.contiguous()?);
    let weights = weights_of(gradient, n, "distillation")?;
    let (ce, kd) = (empty(&logits, n, DType::F32)?, empty(&logits, n, DType::F32)?);
    let out = output(&logits, gradient)?;
    let Teacher { temperature, alpha, .. } = teacher;
    let scale = gradient.map_or(0.0, |g| g.scale);
    let factors = [temperature, scale * (1.0 - alpha), scale * alpha * temperature].map(|x| x as f32);
    let launch = Launch::of(out.as_ref().unwrap_or(&logits), compiled!(LOSS), "loss_distill")?;
    let launch = launch.with(args![&logits, &targets, &ids, &probs, weights.as_ref()])?;
    let launch = launch.with(args![&ce, &kd, out.as_ref(), v, k])?;
    let launch = launch.with(args![factors[0], factors[1], factors[2], cap.unwrap_or(0.0) as f32])?;
    // SAFETY: logits and gradient have n rows of v values, one block per row; ids and probabilities n rows of k values,
    // at most one for each thread; targets, weights and losses n values, as checked above and by the caller. In place,
    // each thread writes a logit only after all reads of it.
    unsafe { launch.run(Grid::new(n, THREADS)) }?;
    Ok(([ce, kd], out))
}
