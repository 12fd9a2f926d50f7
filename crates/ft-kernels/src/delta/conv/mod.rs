//! Causal depthwise convolution over the tokens of a document, then SiLU: `y_t = silu(sum_j w_j x_(t-j))`, with zeros
//! before a document's first token.

mod cpu;
mod cuda;

use super::State;
use crate::Tensor;
use crate::attention::Sequences;
use crate::cpu::{is_cpu, on_real};
use candle_core::{Result, bail};

/// Sizes: tokens, channels, taps.
pub(super) fn sizes(x: &Tensor, w: &Tensor) -> Result<(usize, usize, usize)> {
    let (t, c) = x.dims2()?;
    match w.dims() {
        &[channels, taps] if channels == c && taps > 0 => Ok((t, c, taps)),
        other => bail!("convolution: {:?} with taps {other:?}", x.shape()),
    }
}

/// Convolves the rows `x` `[t, c]` by the taps `w` `[c, n]`, the last one of which belongs to the token itself. With a
/// state, the tokens continue its document.
pub fn forward(x: &Tensor, w: &Tensor, seqs: &Sequences, state: Option<&mut State>) -> Result<Tensor> {
    let (t, c, taps) = sizes(x, w)?;
    let Some(state) = state else {
        seqs.cover(t)?;
        return from_zero(x, w, Some(seqs));
    };
    // Earlier inputs come first, as tokens of the same document, and their outputs are dropped.
    let all = match &state.taps {
        Some(before) => Tensor::cat(&[before.clone(), x.clone()], 0)?,
        None => x.clone(),
    };
    let rows = all.dim(0)?;
    let kept = rows.min(taps - 1);
    state.taps = (kept > 0).then(|| all.narrow(0, rows - kept, kept)?.force_contiguous()).transpose()?;
    let y = from_zero(&all, w, None)?;
    y.narrow(0, rows - t, t)?.contiguous()?.reshape((t, c))
}

/// Convolves documents, or without `seqs` a single one.
fn from_zero(x: &Tensor, w: &Tensor, seqs: Option<&Sequences>) -> Result<Tensor> {
    if is_cpu(x) { on_real!(x.dtype(), cpu::forward(x, w, seqs)) } else { cuda::forward(x, w, seqs) }
}

/// Gradient of `x` and, if requested, partial sums `[p, c n]` of the gradient of `w` in f32 (f64 for f64), from the
/// gradient `dy` of the output without a state. Recomputes the convolution.
pub fn backward(
    x: &Tensor,
    w: &Tensor,
    dy: &Tensor,
    seqs: &Sequences,
    want_dw: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let (t, ..) = sizes(x, w)?;
    if dy.shape() != x.shape() {
        bail!("convolution: {:?} with a gradient {:?}", x.shape(), dy.shape());
    }
    seqs.cover(t)?;
    if is_cpu(x) {
        on_real!(x.dtype(), cpu::backward(x, w, dy, seqs, want_dw))
    } else {
        cuda::backward(x, w, dy, seqs, want_dw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, gradient, randn};
    use candle_core::{DType, Device};

    #[test]
    fn gradients_match_finite_differences() -> Result<()> {
        for (docs, c, taps) in [(&[5, 1, 3][..], 3, 4), (&[2, 2], 2, 1), (&[70, 40], 2, 3)] {
            let (seqs, t) = (Sequences::new(docs, 0, &Device::Cpu)?, docs.iter().sum::<usize>());
            let (x, w) = (randn(1, (t, c), DType::F64)?, randn(2, (c, taps), DType::F64)?);
            let dy = randn(3, (t, c), DType::F64)?;
            let (dx, dw) = backward(&x, &w, &dy, &seqs, true)?;
            gradient("x", &x, &dx, &dy, |x| forward(x, &w, &seqs, None));
            let dw = dw.expect("wanted").sum_keepdim(0)?.reshape((c, taps))?;
            gradient("w", &w, &dw, &dy, |w| forward(&x, w, &seqs, None));
        }
        Ok(())
    }

    /// Documents give the same bits alone, and token by token those of the whole.
    #[test]
    fn a_document_starts_from_zero_and_a_state_continues_it() -> Result<()> {
        let docs = [40, 3, 50];
        let (x, w) = (randn(1, (93, 6), DType::F32)?, randn(2, (6, 4), DType::F32)?);
        let y = forward(&x, &w, &Sequences::new(&docs, 0, &Device::Cpu)?, None)?;
        let mut start = 0;
        for n in docs {
            let seqs = Sequences::new(&[n], 0, &Device::Cpu)?;
            let (own, want) = (x.narrow(0, start, n)?.contiguous()?, y.narrow(0, start, n)?.contiguous()?);
            close(&forward(&own, &w, &seqs, None)?, &want, 0.0);
            let mut state = State::default();
            for (at, n) in [(0, 1), (1, 1), (2, n - 2)] {
                let part = own.narrow(0, at, n)?.contiguous()?;
                let got = forward(&part, &w, &seqs, Some(&mut state))?;
                close(&got, &want.narrow(0, at, n)?.contiguous()?, 0.0);
            }
            start += n;
        }
        Ok(())
    }
}
