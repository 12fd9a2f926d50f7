//! Cross-entropy on CUDA, with losses and gradient in one launch.

use super::Gradient;
use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::tensor::ghosts;
use candle_core::{DType, Result};

/// Threads per block, same as in loss.cu; one block per row.
const THREADS: u32 = 512;

/// Losses `[n]` of f32 logits `[n, v]` and, if requested, the gradient, in place if it is f32.
pub fn cross_entropy(
    logits: Tensor,
    targets: &Tensor,
    gradient: Option<Gradient<'_>>,
) -> Result<(Tensor, Option<Tensor>)> {
    let (n, v) = logits.dims2()?;
    if targets.dims() != [n] || logits.dtype() != DType::F32 {
        candle_core::bail!(
            "cross-entropy: {:?} targets for {:?} {:?}",
            targets.shape(),
            logits.shape(),
            logits.dtype()
        );
    }
    let losses = (n.into(), DType::F32);
    let (scale, dtype) = gradient.map_or((0.0, DType::F32), |g| (g.scale, g.dtype));
    if gradient.is_some() && dtype != DType::F32 {
        if let Some([losses, d]) = ghosts(&[&logits], [losses, ((n, v).into(), dtype)], |_| ()) {
            return Ok((losses, Some(d)));
        }
    } else if let Some([losses]) = ghosts(&[&logits], [losses], |_| ()) {
        return Ok((losses, gradient.map(|_| logits)));
    }
    let (logits, targets) = (logits.contiguous()?, targets.contiguous()?);
    let weights = gradient.and_then(|g| g.weights).map(Tensor::contiguous).transpose()?;
    if weights.as_ref().is_some_and(|w| w.dims() != [n] || w.dtype() != DType::F32) {
        candle_core::bail!("cross-entropy: weights of another shape or dtype than [{n}] in f32");
    }
    let losses = empty(&logits, n, DType::F32)?;
    let out = match gradient {
        None => None,
        Some(Gradient { dtype: DType::F32, .. }) => Some(logits.clone()),
        Some(_) => Some(empty(&logits, (n, v), dtype)?),
    };
    let launch = Launch::of(out.as_ref().unwrap_or(&logits), compiled!(LOSS), "loss")?;
    let launch =
        launch.with(args![&logits, &targets, weights.as_ref(), &losses, out.as_ref(), v, scale as f32])?;
    // SAFETY: logits and gradient have n rows of v values, one block per row; targets, weights and losses
    // have n values, as checked above. In place, each thread writes a logit only after reading it.
    unsafe { launch.run(Grid::new(n, THREADS)) }?;
    Ok((losses, out))
}
