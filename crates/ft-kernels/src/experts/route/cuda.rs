//! Router on CUDA; all results stay on the device.

use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::tensor::ghosts;
use candle_core::{DType, Result};

/// Threads per block, same as in route.cu; one warp per token.
const THREADS: u32 = 256;
/// Tokens per block.
const TOKENS: usize = 8;
/// Threads per block of the sums.
const SUM_THREADS: u32 = 1024;
/// Maximum number of experts per token: one lane per choice.
pub const MOST: usize = 32;

/// Routing of the tokens of a layer.
#[derive(Clone, Debug)]
pub struct Routed {
    /// The `k` most likely experts of each token in descending order, `[t, k]` u32.
    pub chosen: Tensor,
    /// Probabilities of all experts `[t, e]`, f32.
    pub probs: Tensor,
    /// logsumexp of the logits `[t]`, f32.
    pub lse: Tensor,
    /// Gates of the chosen experts `[t, k]`, f32.
    pub gates: Tensor,
}

/// Routes tokens by f32 logits `[t, e]`. `replay` reuses the choices of an earlier pass.
pub fn forward(logits: &Tensor, k: usize, replay: Option<&Tensor>, normalise: bool) -> Result<Routed> {
    let (t, e) = logits.dims2()?;
    if k == 0 || k > e.min(MOST) || logits.dtype() != DType::F32 || replay.is_some_and(|r| r.dims() != [t, k])
    {
        candle_core::bail!("routing on CUDA: {k} of {e} experts, {:?}, {replay:?}", logits.dtype());
    }
    let f32s = |shape: candle_core::Shape| (shape, DType::F32);
    let out = [f32s((t, e).into()), f32s(t.into()), f32s((t, k).into())];
    if let Some([probs, lse, gates]) = ghosts(&[logits], out, |_| ()) {
        let chosen = match replay {
            Some(c) => c.clone(),
            None => Tensor::zeros((t, k), DType::U32, logits.device())?,
        };
        return Ok(Routed { chosen, probs, lse, gates });
    }
    let logits = logits.contiguous()?;
    let chosen = replay.map_or_else(|| empty(&logits, (t, k), DType::U32), |c| Ok(c.clone()))?;
    let new = |shape: candle_core::Shape| empty(&logits, shape, DType::F32);
    let (probs, lse, gates) = (new((t, e).into())?, new(t.into())?, new((t, k).into())?);
    let launch = Launch::named(&logits, compiled!(ROUTE), "route_forward")?;
    let launch = launch.with(args![&logits, t, e, k, u32::from(replay.is_some()), u32::from(normalise)])?;
    let launch = launch.with(args![&chosen, &probs, &lse, &gates])?;
    // SAFETY: logits and probabilities have t rows of e values, choices and gates t rows of k values, with k
    // at most 32 and at most e.
    unsafe { launch.run(Grid::new(t.div_ceil(TOKENS), THREADS)) }?;
    Ok(Routed { chosen, probs, lse, gates })
}

/// Gradient of the logits `[t, e]` from the gradient of the gates `[t, k]` and the router
/// losses: `extra` `[e]` in f32 is added to the gradient of the probabilities; `z` is the factor
/// on the gradient of `logsumexp^2`.
pub fn backward(
    r: &Routed,
    dgates: &Tensor,
    extra: Option<&Tensor>,
    z: f64,
    normalise: bool,
) -> Result<Tensor> {
    let ((t, e), k) = (r.probs.dims2()?, r.gates.dim(1)?);
    let in_f32 = [Some(dgates), extra].into_iter().flatten().all(|x| x.dtype() == DType::F32);
    if dgates.dims() != [t, k] || extra.is_some_and(|x| x.dims() != [e]) || !in_f32 {
        candle_core::bail!("routing: gradients {:?} and {extra:?} of {t} tokens, {k} of {e}", dgates.shape());
    }
    if let Some([dx]) = ghosts(&[&r.probs, dgates], [((t, e).into(), DType::F32)], |_| ()) {
        return Ok(dx);
    }
    let dgates = dgates.contiguous()?;
    let dx = empty(&r.probs, (t, e), DType::F32)?;
    let launch = Launch::named(&r.probs, compiled!(ROUTE), "route_backward")?;
    let launch = launch.with(args![&r.probs, &r.lse, &r.gates, &r.chosen, &dgates, extra, 2.0 * z as f32])?;
    let launch = launch.with(args![t, e, k, u32::from(normalise), &dx])?;
    // SAFETY: `r` has the shapes made by `forward`; `dgates` has t rows of k values and
    // `extra` e values, as checked above.
    unsafe { launch.run(Grid::new(t.div_ceil(TOKENS), THREADS)) }?;
    Ok(dx)
}

/// Sums of a layer, `[2 e + 1]` in f64: tokens of each expert, sum of the probabilities of each
/// expert, sum of `logsumexp^2`. The last e + 1 sums are 0 unless `losses` is set. `starts` `[e + 1]`
/// holds the first row of each expert.
pub fn sums(r: &Routed, starts: &Tensor, losses: bool) -> Result<Tensor> {
    let (t, e) = r.probs.dims2()?;
    if starts.dims() != [e + 1] {
        candle_core::bail!("routing: {:?} for {e} experts", starts.shape());
    }
    if let Some([out]) = ghosts(&[&r.probs], [((2 * e + 1).into(), DType::F64)], |_| ()) {
        return Ok(out);
    }
    let out = empty(&r.probs, 2 * e + 1, DType::F64)?;
    let launch = Launch::named(&r.probs, compiled!(ROUTE), "route_sums")?;
    let launch = launch.with(args![losses.then_some(&r.probs), losses.then_some(&r.lse), starts, t, e])?;
    let launch = launch.with(args![&out])?;
    // SAFETY: t rows of e probabilities, t logsumexps, e + 1 starts and 2 e + 1 outputs; each block computes
    // 32 of e + 1 sums.
    unsafe { launch.run(Grid::new((e + 1).div_ceil(32), SUM_THREADS)) }?;
    Ok(out)
}

/// `factor` times the tokens of each expert, `[e]` f32, summed over layers from `sums` `[layers, 2 e + 1]`.
pub fn share(sums: &Tensor, factor: f64) -> Result<Tensor> {
    let (layers, e) = (sums.dim(0)?, sums.dim(1)? / 2);
    let out = empty(sums, e, DType::F32)?;
    let launch = Launch::named(sums, compiled!(ROUTE), "route_balance")?;
    let launch = launch.with(args![sums, layers, e, factor as f32, &out])?;
    // SAFETY: `sums` has `layers` rows of 2 e + 1 values and the output has e values.
    unsafe { launch.run(Grid::new(e.div_ceil(THREADS as usize), THREADS)) }?;
    Ok(out)
}
