//! Attention sinks (Xiao et al., 2023; gpt-oss): a learned logit a head takes part in the softmax, without a
//! key and a value.
//!
//! With a sink s, the log-sum-exp l of a query becomes `l' = ln(e^l + e^s)`, and its output shrinks by
//! `e^(l - l')`. The backward pass of attention goes by l' and the shrunken output alone and needs no change:
//! `p = e^(score - l')`, `delta = d_o . o`. The sink's own gradient is `-e^(s - l') delta`, summed over queries.

use super::sequences::Saved;
use crate::Tensor;
use crate::cpu::{self, Float, Value, dot, in_place, is_cpu, on_real, tensor, view};
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::ledger::Ledger;
use crate::tensor::ghosts;
use candle_core::{DType, Result};

/// Threads per block of the gradient, same as in sinks.cu.
const THREADS: u32 = 256;
/// Threads per block of the forward pass: a warp.
const WARP: u32 = 32;
/// Queries per task on the CPU.
const QUERIES: usize = 64;

/// Sizes of an output of `sinks` `[h]`: queries, heads, channels.
fn sizes(saved: &Saved, sinks: &Tensor) -> Result<(usize, usize, usize)> {
    let (h, (t, width)) = (sinks.elem_count(), saved.o.dims());
    if h == 0 || width % h != 0 || saved.lse.elem_count() != t * h || sinks.dtype() != saved.o.dtype() {
        candle_core::bail!(
            "sinks: {:?} {:?} on {t} rows of {width}, log-sum-exp {:?}",
            sinks.shape(),
            sinks.dtype(),
            saved.lse.shape()
        );
    }
    Ok((t, h, width / h))
}

/// Adds sinks `[h]` to the softmax of a forward pass of attention: output and log-sum-exp change in place.
pub fn forward(saved: &Saved, sinks: &Tensor) -> Result<()> {
    let (t, h, c) = sizes(saved, sinks)?;
    if is_cpu(sinks) {
        return on_real!(saved.lse.dtype(), forward_cpu(saved, sinks, (t, h, c)));
    }
    let o = saved.o.all();
    if ghosts(&[o, sinks], [], |_| ()).is_some() {
        return Ok(());
    }
    let launch = Launch::of(sinks, compiled!(SINKS), "sinks_forward")?;
    let launch = launch.with(args![sinks, t, c, saved.o.stride(), o, &saved.lse])?;
    // SAFETY: o has t rows of h c values with its stride, lse is [h, t], as checked by `sizes`; one warp for
    // 32 queries of a head.
    unsafe { launch.run(Grid::new(t.div_ceil(WARP as usize), WARP).by(h)) }
}

/// Gradient of the sinks `[1, h]` from the gradient `d_o` `[t, h, c]` of the output, after [`forward`].
pub fn backward(saved: &Saved, sinks: &Tensor, d_o: &Tensor) -> Result<Tensor> {
    let (t, h, c) = sizes(saved, sinks)?;
    if d_o.elem_count() != t * h * c || d_o.dtype() != sinks.dtype() {
        candle_core::bail!("sinks: the gradient {:?} {:?} of the output", d_o.shape(), d_o.dtype());
    }
    if is_cpu(sinks) {
        return on_real!(saved.lse.dtype(), backward_cpu(saved, sinks, d_o, (t, h, c)));
    }
    let o = saved.o.all();
    if let Some([grad]) = ghosts(&[o, d_o, sinks], [((1, h).into(), DType::F32)], |_| ()) {
        return Ok(grad);
    }
    let d_o = d_o.contiguous()?;
    let grad = empty(sinks, (1, h), DType::F32)?;
    let launch = Launch::of(sinks, compiled!(SINKS), "sinks_gradient")?;
    let launch = launch.with(args![sinks, o, &d_o, &saved.lse, t, h, c, saved.o.stride(), &grad])?;
    // SAFETY: as in `forward`; d_o has t rows of h c values; one block for each head.
    unsafe { launch.run(Grid::new(h, THREADS)) }?;
    Ok(grad)
}

fn forward_cpu<T: Float>(saved: &Saved, sinks: &Tensor, (t, h, c): (usize, usize, usize)) -> Result<()> {
    let during = |l: &Ledger| l.touch((t * h * T::DTYPE.size_in_bytes()) as u64);
    if cpu::ghosts::<T, 0>(&[sinks], [], during).is_some() {
        return Ok(());
    }
    let s = view::<T>(sinks)?;
    let mut factors = vec![T::zero(); t * h];
    in_place::<T>("sinks", &saved.lse, |lse| {
        for (i, (l, factor)) in lse.iter_mut().zip(&mut factors).enumerate() {
            let d = s[i % h] - *l;
            *factor = T::one() / (T::one() + d.exp());
            // ln(1 + e^d) without overflow
            let (far, near) = if d > T::zero() { (d, -d) } else { (T::zero(), d) };
            *l += far + (T::one() + near.exp()).ln();
        }
        Ok(())
    })?;
    let o = saved.o.values()?;
    match o.dtype() {
        DType::F64 => scale::<f64, T>(&o, &factors, c),
        DType::F32 => scale::<f32, T>(&o, &factors, c),
        DType::BF16 => scale::<half::bf16, T>(&o, &factors, c),
        _ => scale::<half::f16, T>(&o, &factors, c),
    }
}

/// Multiplies the `c` values of every query and head by its factor.
fn scale<V: Value, T: Float>(o: &Tensor, factors: &[T], c: usize) -> Result<()> {
    in_place::<V>("sinks", o, |o| {
        cpu::each(o.chunks_mut(QUERIES * c).zip(factors.chunks(QUERIES)), |(o, factors)| {
            for (o, factor) in o.chunks_mut(c).zip(factors) {
                let factor = factor.to_f64();
                o.iter_mut().for_each(|x| *x = V::from_f64(x.to_f64() * factor));
            }
        });
        Ok(())
    })
}

fn backward_cpu<T: Float>(
    saved: &Saved,
    sinks: &Tensor,
    d_o: &Tensor,
    (t, h, c): (usize, usize, usize),
) -> Result<Tensor> {
    let o = saved.o.values()?;
    if let Some([grad]) = cpu::ghosts::<T, 1>(&[&o, d_o, sinks], [((1, h).into(), T::DTYPE)], |_| ()) {
        return Ok(grad);
    }
    let (s, lse, o, d_o) = (view::<T>(sinks)?, view::<T>(&saved.lse)?, view::<T>(&o)?, view::<T>(d_o)?);
    let (s, lse, o, d_o) = (&*s, &*lse, &*o, &*d_o);
    let part = |first: usize| {
        let mut sums = vec![T::zero(); h];
        for i in first * h..((first + QUERIES).min(t)) * h {
            let own = i * c..(i + 1) * c;
            sums[i % h] -= (s[i % h] - lse[i]).exp() * dot(&o[own.clone()], &d_o[own]);
        }
        sums
    };
    let parts = cpu::map((0..t).step_by(QUERIES), part);
    let mut grad = vec![T::zero(); h];
    for part in parts {
        grad.iter_mut().zip(part).for_each(|(g, p)| *g += p);
    }
    tensor(grad, (1, h), T::DTYPE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{self, Causal, Sequences};
    use crate::check::{close, gradient, randn};
    use candle_core::Device;

    /// Output of attention with sinks.
    fn output(q: &Tensor, k: &Tensor, v: &Tensor, sinks: &Tensor, how: &Causal<'_>) -> Result<Tensor> {
        let saved = attention::forward(q, k, v, how, 0)?;
        forward(&saved, sinks)?;
        saved.o.values()?.reshape(q.shape())
    }

    #[test]
    fn gradients_with_sinks() -> Result<()> {
        let (docs, h, c) = ([5, 3, 70], 4, 2);
        let t = docs.iter().sum::<usize>();
        let [q, dy] = [1, 2].map(|seed| randn(seed, (t, h, c), DType::F64));
        let [k, v] = [3, 4].map(|seed| randn(seed, (t, 2, c), DType::F64));
        let (q, dy, k, v, s) = (q?, dy?, k?, v?, randn(5, h, DType::F64)?);
        let seqs = Sequences::new(&docs, 0, &Device::Cpu)?;
        for window in [None, Some(4)] {
            let how = Causal { seqs: &seqs, window, scale: 0.7 };
            let saved = attention::forward(&q, &k, &v, &how, 0)?;
            forward(&saved, &s)?;
            let ds = backward(&saved, &s, &dy)?.flatten_all()?;
            let (dq, dk, dv) = attention::backward(&q, &k, &v, &saved, &dy, &how, 0)?;
            gradient("q", &q, &dq, &dy, |q| output(q, &k, &v, &s, &how));
            gradient("k", &k, &dk, &dy, |k| output(&q, k, &v, &s, &how));
            gradient("v", &v, &dv.values()?.reshape(v.shape())?, &dy, |v| output(&q, &k, v, &s, &how));
            gradient("sinks", &s, &ds, &dy, |s| output(&q, &k, &v, s, &how));
        }
        Ok(())
    }

    /// A sink far below all scores takes no part, one far above takes all.
    #[test]
    fn sinks_without_effect_and_with_all() -> Result<()> {
        for (dtype, bar) in [(DType::F32, 1e-6), (DType::BF16, 1e-2)] {
            let (q, k) = (randn(1, (9, 2, 4), dtype)?, randn(2, (9, 2, 4), dtype)?);
            let seqs = Sequences::new(&[9], 0, &Device::Cpu)?;
            let how = Causal { seqs: &seqs, window: None, scale: 0.5 };
            let sinks = |x: f64| Tensor::full(x as f32, 2, &Device::Cpu)?.to_dtype(dtype);
            let plain = attention::forward(&q, &k, &k, &how, 0)?.o.values()?.reshape(q.shape())?;
            close(&output(&q, &k, &k, &sinks(-200.0)?, &how)?, &plain, bar);
            let none = output(&q, &k, &k, &sinks(300.0)?, &how)?;
            assert_eq!(none.to_dtype(DType::F32)?.real()?.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
        }
        Ok(())
    }
}
