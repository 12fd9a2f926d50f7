//! Router: softmax over all experts, top-k selection, gates, and the backward pass.
//!
//! With probabilities `p = softmax(x)`, chosen experts `c_j` and `s = sum_j p[c_j]`: `gate_j = p[c_j]`, or
//! `p[c_j] / s` with normalized gates. The selection has no gradient. Router losses (see [`Balance`]) add
//! gradients to `p` and `x`.
//!
//! Ties go to the lower expert on every device.

pub mod cuda;

use crate::Tensor;
use crate::cpu::{Float, ROWS, each, ghosts, is_native, on_real, tensor, view};
use crate::tensor::Ghost;
use candle_core::{D, DType, Result};

/// Gradient terms of the router losses, the same for all tokens of a layer.
///
/// Load-balancing loss (Fedus et al., 2021, as in transformers, over the tokens of all sparse layers):
/// `E sum_e f_e P_e`, with f_e the token-expert pairs of expert e per token, treated as a constant, and P_e
/// the mean of p_e. z-loss (Zoph et al., "ST-MoE", 2022, eq. 5): mean over the tokens of a layer of
/// `logsumexp(x)^2`, summed over layers.
#[derive(Clone, Debug, Default)]
pub struct Balance {
    /// Gradient of the probability of each expert, including the coefficient; empty for none.
    pub dp: Vec<f64>,
    /// The same as a tensor `[e]` in f32, for layers with routing on the device.
    pub on_device: Option<Tensor>,
    /// Factor on the gradient of `logsumexp(x)^2` of each token, including coefficient and mean.
    pub z: f64,
}

/// Probabilities `[t, e]` and logsumexp `[t]` of logits `[t, e]`, in f32 (f64 in tests).
pub fn softmax(logits: &Tensor) -> Result<(Tensor, Tensor)> {
    if is_native(logits) { on_real!(logits.dtype(), softmax_cpu(logits)) } else { softmax_composed(logits) }
}

fn softmax_cpu<T: Float>(logits: &Tensor) -> Result<(Tensor, Tensor)> {
    let (t, e) = logits.dims2()?;
    let out = [((t, e).into(), T::DTYPE), (t.into(), T::DTYPE)];
    if let Some([p, lse]) = ghosts::<T, 2>(&[logits], out, |_| ()) {
        return Ok((p, lse));
    }
    let x = view::<T>(logits)?;
    let (mut p, mut lse) = (vec![T::zero(); t * e], vec![T::zero(); t]);
    each(p.chunks_mut(ROWS * e).zip(lse.chunks_mut(ROWS)).zip(x.chunks(ROWS * e)), |((p, lse), x)| {
        for ((p, lse), x) in p.chunks_mut(e).zip(lse).zip(x.chunks(e)) {
            let max = x.iter().copied().fold(T::lowest(), |m, x| if x > m { x } else { m });
            p.iter_mut().zip(x).for_each(|(p, x)| *p = (*x - max).exp());
            let sum: T = p.iter().copied().sum();
            p.iter_mut().for_each(|p| *p /= sum);
            *lse = max + sum.ln();
        }
    });
    Ok((tensor(p, (t, e), T::DTYPE)?, tensor(lse, t, T::DTYPE)?))
}

fn softmax_composed(logits: &Tensor) -> Result<(Tensor, Tensor)> {
    let max = logits.max_keepdim(D::Minus1)?;
    let e = logits.broadcast_sub(&max)?.exp()?;
    let sum = e.sum_keepdim(D::Minus1)?;
    Ok((e.broadcast_div(&sum)?, (max + sum.log()?)?.squeeze(1)?))
}

/// The `k` most likely experts of each token in descending order: `[t * k]` on the host.
pub fn choose(probs: &Tensor, k: usize) -> Result<Vec<u32>> {
    let (_, e) = probs.dims2()?;
    if k == 0 || k > e {
        candle_core::bail!("routing: {k} of {e} experts");
    }
    if is_native(probs) {
        on_real!(probs.dtype(), choose_cpu(probs, k))
    } else {
        choose_composed(probs, k)?.flatten_all()?.to_vec1::<u32>()
    }
}

fn choose_cpu<T: Float>(probs: &Tensor, k: usize) -> Result<Vec<u32>> {
    let (t, e) = probs.dims2()?;
    let p = view::<T>(probs)?;
    let mut out = vec![0u32; t * k];
    each(out.chunks_mut(ROWS * k).zip(p.chunks(ROWS * e)), |(out, p)| {
        for (out, p) in out.chunks_mut(k).zip(p.chunks(e)) {
            // a short sorted list; ties go behind earlier entries. The first k values are always taken, even
            // NaN, so that the loss check can report it
            let mut len = 0;
            for (i, x) in p.iter().enumerate() {
                let at = out[..len].iter().position(|o| *x > p[*o as usize]).unwrap_or(len);
                if at < k {
                    len = (len + 1).min(k);
                    out.copy_within(at..len - 1, at + 1);
                    out[at] = i as u32;
                }
            }
        }
    });
    Ok(out)
}

/// Takes the maximum k times, so that ties go to the lower expert (candle's sort is not stable on CUDA).
fn choose_composed(probs: &Tensor, k: usize) -> Result<Tensor> {
    let (t, e) = probs.dims2()?;
    let device = probs.device();
    let iota = Tensor::arange(0f32, e as f32, device)?.unsqueeze(0)?.broadcast_as((t, e))?.contiguous()?;
    let none = Tensor::full(e as f32, (t, e), device)?;
    let gone = Tensor::full(-1f32, (t, e), device)?;
    let mut left = probs.to_dtype(DType::F32)?;
    let mut out = Vec::with_capacity(k);
    for _ in 0..k {
        let max = left.max_keepdim(D::Minus1)?;
        let best = left.broadcast_eq(&max)?.where_cond(&iota, &none)?.min_keepdim(D::Minus1)?;
        // NaN equals nothing: clamp to the last expert, and let the loss check report the NaN
        let best = best.minimum((e - 1) as f64)?;
        left = iota.broadcast_eq(&best)?.where_cond(&gone, &left)?;
        out.push(best);
    }
    Tensor::cat(&out, 1)?.to_dtype(DType::U32)
}

/// The chosen experts as an index tensor `[t, k]` on the device of `probs` `[t, e]`.
pub(crate) fn index(chosen: &[u32], k: usize, probs: &Tensor) -> Result<Tensor> {
    let shape = (probs.dim(0)?, k);
    match probs.ghost() {
        Some(g) => Ok(Ghost::new(g.ledger(), shape, DType::U32).into()),
        None => Tensor::from_slice(chosen, shape, probs.device()),
    }
}

/// Gates `[t, k]` of the chosen experts `[t * k]`.
pub fn gates(probs: &Tensor, chosen: &[u32], k: usize, normalise: bool) -> Result<Tensor> {
    let g = probs.gather(&index(chosen, k, probs)?, 1)?;
    if normalise { g.broadcast_div(&g.sum_keepdim(1)?) } else { Ok(g) }
}

/// Results of the forward pass used by [`backward`].
pub struct RouterOutput<'a> {
    /// Probabilities `[t, e]`.
    pub probs: &'a Tensor,
    /// logsumexp of the logits, `[t]`.
    pub lse: &'a Tensor,
    /// Gates `[t, k]`.
    pub gates: &'a Tensor,
    /// Chosen experts `[t * k]`.
    pub chosen: &'a [u32],
    /// Whether gates are normalized.
    pub normalise: bool,
}

/// Gradient of the logits `[t, e]` from the gradient of the gates `[t, k]` and the router losses.
pub fn backward(r: &RouterOutput<'_>, dgates: &Tensor, balance: Option<&Balance>) -> Result<Tensor> {
    let e = r.probs.dim(1)?;
    if let Some(b) = balance.filter(|b| !b.dp.is_empty() && b.dp.len() != e) {
        candle_core::bail!("routing: {} gradients for {e} experts", b.dp.len());
    }
    if is_native(r.probs) {
        on_real!(r.probs.dtype(), backward_cpu(r, dgates, balance))
    } else {
        backward_composed(r, dgates, balance)
    }
}

fn backward_cpu<T: Float>(
    r: &RouterOutput<'_>,
    dgates: &Tensor,
    balance: Option<&Balance>,
) -> Result<Tensor> {
    let ((t, e), k) = (r.probs.dims2()?, dgates.dim(1)?);
    let out = [((t, e).into(), r.probs.dtype())];
    if let Some([dx]) = ghosts::<T, 1>(&[r.probs, r.gates, dgates, r.lse], out, |_| ()) {
        return Ok(dx);
    }
    let (p, g) = (view::<T>(r.probs)?, view::<T>(r.gates)?);
    let (dg, lse) = (view::<T>(dgates)?, view::<T>(r.lse)?);
    let (p, g, dg, lse) = (&*p, &*g, &*dg, &*lse);
    let extra: Vec<T> = match balance {
        Some(b) if !b.dp.is_empty() => b.dp.iter().map(|x| T::of(*x)).collect(),
        _ => vec![T::zero(); e],
    };
    let z = T::of(2.0 * balance.map_or(0.0, |b| b.z));
    let mut dx = vec![T::zero(); t * e];
    each(dx.chunks_mut(ROWS * e).enumerate(), |(block, dx)| {
        for (i, dx) in dx.chunks_mut(e).enumerate() {
            let t = block * ROWS + i;
            let (p, g, dg) = (&p[t * e..][..e], &g[t * k..][..k], &dg[t * k..][..k]);
            let chosen = &r.chosen[t * k..][..k];
            // gradient of p, in place
            dx.copy_from_slice(&extra);
            let (mean, sum) = if r.normalise {
                let mean: T = g.iter().zip(dg).map(|(g, d)| *g * *d).sum();
                (mean, chosen.iter().map(|c| p[*c as usize]).sum())
            } else {
                (T::zero(), T::one())
            };
            for (c, d) in chosen.iter().zip(dg) {
                dx[*c as usize] += (*d - mean) / sum;
            }
            let inner: T = p.iter().zip(dx.iter()).map(|(p, d)| *p * *d).sum();
            let shift = z * lse[t] - inner;
            dx.iter_mut().zip(p).for_each(|(d, p)| *d = *p * (*d + shift));
        }
    });
    tensor(dx, (t, e), r.probs.dtype())
}

/// Sums by expert `[t, e]` of values `[t, k]` of the chosen experts `[t, k]`.
pub fn by_expert(values: &Tensor, chosen: &Tensor, e: usize) -> Result<Tensor> {
    let ((t, k), dtype) = (values.dims2()?, values.dtype());
    let iota = Tensor::arange(0u32, e as u32, values.device())?.unsqueeze(0)?.broadcast_as((t, e))?;
    let iota = iota.contiguous()?;
    // One column at a time by comparison: candle does not support scatter_add for every dtype.
    let column = |j: usize| -> Result<Tensor> {
        let here = iota.broadcast_eq(&chosen.narrow(1, j, 1)?.contiguous()?)?.to_dtype(dtype)?;
        here.broadcast_mul(&values.narrow(1, j, 1)?.contiguous()?)
    };
    (1..k).try_fold(column(0)?, |sum, j| sum + column(j)?)
}

fn backward_composed(r: &RouterOutput<'_>, dgates: &Tensor, balance: Option<&Balance>) -> Result<Tensor> {
    let ((t, e), k) = (r.probs.dims2()?, dgates.dim(1)?);
    let (device, dtype) = (r.probs.device(), r.probs.dtype());
    let chosen = index(r.chosen, k, r.probs)?;
    let d = if r.normalise {
        let sum = r.probs.gather(&chosen, 1)?.sum_keepdim(1)?;
        let mean = (r.gates * dgates)?.sum_keepdim(1)?;
        dgates.broadcast_sub(&mean)?.broadcast_div(&sum)?
    } else {
        dgates.clone()
    };
    let mut dp = match balance {
        Some(b) if !b.dp.is_empty() => Tensor::new(b.dp.as_slice(), device)?
            .to_dtype(dtype)?
            .unsqueeze(0)?
            .broadcast_as((t, e))?
            .contiguous()?,
        _ => r.probs.zeros_like()?,
    };
    dp = (dp + by_expert(&d, &chosen, e)?)?;
    let inner = (r.probs * &dp)?.sum_keepdim(1)?;
    let z = 2.0 * balance.map_or(0.0, |b| b.z);
    let shift = ((r.lse.unsqueeze(1)? * z)? - inner)?;
    r.probs * dp.broadcast_add(&shift)?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, gradient, randn, values};
    use candle_core::Device;

    const T: usize = 40;
    const E: usize = 6;

    #[test]
    fn gradients_with_and_without_normalising() -> Result<()> {
        for (k, normalise) in [(2, true), (3, false), (1, false), (E, true)] {
            let x = randn(1, (T, E), DType::F64)?;
            let dg = randn(2, (T, k), DType::F64)?;
            let (probs, lse) = softmax(&x)?;
            let chosen = choose(&probs, k)?;
            let g = gates(&probs, &chosen, k, normalise)?;
            let r = RouterOutput { probs: &probs, lse: &lse, gates: &g, chosen: &chosen, normalise };
            let what = format!("logits, {k}, {normalise}");
            let dx = backward(&r, &dg, None)?;
            gradient(&what, &x, &dx, &dg, |x| gates(&softmax(x)?.0, &chosen, k, normalise));
            // the part of the gates is linear in dg: the difference is the gradient of the router losses
            let dp = (0..E).map(|e| 0.3 * e as f64 - 0.7).collect();
            let balance = Balance { dp, z: 0.05, ..Balance::default() };
            let with = backward(&r, &dg, Some(&balance))?;
            let weights = Tensor::new(balance.dp.as_slice(), &Device::Cpu)?;
            let one = Tensor::ones(T, DType::F64, &Device::Cpu)?;
            gradient(&what, &x, &(&with - &dx)?, &one, |x| {
                let (p, lse) = softmax(x)?;
                p.broadcast_mul(&weights)?.sum(1)? + (lse.sqr()? * balance.z)?
            });
            close(&backward_composed(&r, &dg, Some(&balance))?, &with, 1e-12);
            close(&backward_composed(&r, &dg, None)?, &dx, 1e-12);
        }
        Ok(())
    }

    #[test]
    fn choices_are_the_highest_and_ties_go_to_the_lower_expert() -> Result<()> {
        let p = Tensor::new(
            &[[0.1f32, 0.4, 0.1, 0.4], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 1.0, 0.0]],
            &Device::Cpu,
        )?;
        assert_eq!(choose(&p, 3)?, [1, 3, 0, 0, 1, 2, 2, 0, 1]);
        assert_eq!(choose(&p, 1)?, [1, 0, 2]);
        assert_eq!(choose(&p, 4)?, [1, 3, 0, 2, 0, 1, 2, 3, 2, 0, 1, 3]);
        let many = softmax(&randn(3, (200, E), DType::F32)?)?.0;
        for (p, k) in [(&p, 3), (&p, 4), (&many, 1), (&many, 4)] {
            assert_eq!(choose_composed(p, k)?.flatten_all()?.to_vec1::<u32>()?, choose(p, k)?);
        }
        for (row, chosen) in many.to_vec2::<f32>()?.iter().zip(choose(&many, 4)?.chunks(4)) {
            let mut order: Vec<u32> = (0..E as u32).collect();
            order.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]));
            assert_eq!(chosen, &order[..4]);
        }
        assert!(choose(&p, 5).is_err() && choose(&p, 0).is_err());
        Ok(())
    }

    #[test]
    fn nan_is_routed_to_experts_that_exist() -> Result<()> {
        let p = Tensor::new(&[[f32::NAN, f32::NAN, f32::NAN]], &Device::Cpu)?;
        assert_eq!(choose(&p, 2)?, [0, 1]);
        assert!(choose_composed(&p, 2)?.flatten_all()?.to_vec1::<u32>()?.iter().all(|e| *e < 3));
        Ok(())
    }

    #[test]
    fn softmax_of_large_logits_and_composition() -> Result<()> {
        let x = Tensor::new(&[[1e30f32, 0.0], [-1e30, -1e30], [2.0, 1.0]], &Device::Cpu)?;
        let (p, lse) = softmax(&x)?;
        // exponentials below the smallest normal number are clamped
        assert_eq!(
            values(&p).iter().map(|p| (p * 1e9).round() / 1e9).collect::<Vec<_>>()[..4],
            [1.0, 0.0, 0.5, 0.5]
        );
        let (cp, clse) = softmax_composed(&x)?;
        close(&cp, &p, 1e-7);
        close(&clse, &lse, 1e-7);
        Ok(())
    }
}
