//! Gated RMSNorm of heads: `y = norm(o) w silu(z)`.

use crate::Tensor;
use crate::norm::{self, Scale};
use crate::swiglu::{self, Glu};
use candle_core::{Result, bail};

/// `[t, h v]` as rows of heads `[t h, v]`.
fn heads(x: &Tensor, of: Scale<'_>) -> Result<Tensor> {
    let d = of.weight.elem_count();
    if d == 0 || !x.dims2()?.1.is_multiple_of(d) {
        bail!("gated norm: {:?} by heads of {d}", x.shape());
    }
    x.reshape((x.elem_count() / d, d))
}

/// Normalizes every head of `o` `[t, h v]` and multiplies by the weight `[v]` and `silu(z)`, `z` `[t, h v]`.
pub fn forward(o: &Tensor, z: &Tensor, of: Scale<'_>) -> Result<Tensor> {
    let normed = norm::forward(&heads(o, of)?, of)?;
    swiglu::forward(Glu::default(), &heads(z, of)?, Some(&normed))?.reshape(o.shape())
}

/// Gradients of `o` and `z` and, if requested, partial sums `[p, v]` of the weight's: see [`norm::backward`].
pub fn backward(
    o: &Tensor,
    z: &Tensor,
    of: Scale<'_>,
    dy: &Tensor,
    want_dw: bool,
) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let o_heads = heads(o, of)?;
    let normed = norm::forward(&o_heads, of)?;
    let (dz, d_normed) = swiglu::backward_pair(Glu::default(), &heads(z, of)?, &normed, &heads(dy, of)?)?;
    drop(normed);
    let (d_o, dw) = norm::backward(&o_heads, of, &d_normed, want_dw)?;
    Ok((d_o.reshape(o.shape())?, dz.reshape(o.shape())?, dw))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, gradient, randn};
    use candle_core::DType;

    #[test]
    fn gradients_match_finite_differences() -> Result<()> {
        for (t, h, v) in [(3, 2, 4), (70, 1, 3), (1, 1, 1)] {
            let [o, z, dy] = [1, 2, 3].map(|seed| randn(seed, (t, h * v), DType::F64));
            let (o, z, dy, w) = (o?, z?, dy?, randn(4, v, DType::F64)?);
            let (d_o, dz, dw) = backward(&o, &z, Scale::new(&w, 0.1), &dy, true)?;
            gradient("o", &o, &d_o, &dy, |o| forward(o, &z, Scale::new(&w, 0.1)));
            gradient("z", &z, &dz, &dy, |z| forward(&o, z, Scale::new(&w, 0.1)));
            let dw = dw.expect("wanted").flatten_all()?;
            gradient("w", &w, &dw, &dy, |w| forward(&o, &z, Scale::new(w, 0.1)));
        }
        Ok(())
    }

    /// The gate multiplies the normalized head.
    #[test]
    fn a_closed_gate_gives_nothing() -> Result<()> {
        let (o, w) = (randn(1, (9, 12), DType::F32)?, randn(3, 4, DType::F32)?);
        let y = forward(&o, &o.zeros_like()?, Scale::new(&w, 1e-3))?;
        close(&y, &o.zeros_like()?, 0.0);
        Ok(())
    }
}
