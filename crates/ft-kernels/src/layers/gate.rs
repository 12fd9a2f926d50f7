//! Output gate of attention: `y = o sigmoid(gate)`, elementwise (Qiu et al., "Gated attention for large language
//! models", 2025). Queries and gates come from one projection, side by side in every head.

use crate::Tensor;
use crate::padded::Padded;
use crate::swiglu::{self, Activation, Glu, Joint};
use candle_core::Result;

/// The sigmoid of the gate, times the output.
const GATE: Glu = Glu { activation: Activation::Sigmoid, joint: Joint::Halves };

/// Splits the rows `[t, h 2c]` of a projection into queries `[t, h, c]` and gates `[t, h c]`.
pub fn split(y: &Tensor, heads: usize) -> Result<(Tensor, Tensor)> {
    let (t, width) = y.dims2()?;
    let c = width / heads / 2;
    let by_head = y.reshape((t, heads, 2 * c))?;
    let half = |i: usize| by_head.narrow(2, i * c, c)?.contiguous();
    Ok((half(0)?, half(1)?.reshape((t, heads * c))?))
}

/// Inverse of [`split`], for gradients: rows `[t, h c]` of queries and of gates to `[t, h 2c]`.
pub fn join(queries: &Padded, gates: &Tensor, heads: usize) -> Result<Padded> {
    let (t, width) = queries.dims();
    let by_head = |x: &Tensor| x.reshape((t, heads, width / heads));
    let both = Tensor::cat(&[by_head(&queries.values()?.contiguous()?)?, by_head(gates)?], 2)?;
    Padded::of(&both.reshape((t, 2 * width))?)
}

/// `o sigmoid(gate)`, for rows `[t, n]`.
pub fn forward(o: &Padded, gate: &Tensor) -> Result<Tensor> {
    swiglu::forward(GATE, gate, Some(&o.values()?))
}

/// Gradients of `o` and `gate` from the gradient of the output of [`forward`].
pub fn backward(o: &Padded, gate: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    let (d_gate, d_o) = swiglu::backward_pair(GATE, gate, &o.values()?, dy)?;
    Ok((d_o, d_gate))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, gradient, randn};
    use candle_core::DType;

    #[test]
    fn gradients_match_finite_differences() -> Result<()> {
        let [o, g, dy] = [1, 2, 3].map(|seed| randn(seed, (5, 6), DType::F64));
        let (o, g, dy) = (o?, g?, dy?);
        let run = |o: &Tensor, g: &Tensor| forward(&Padded::of(o)?, g);
        let (d_o, d_gate) = backward(&Padded::of(&o)?, &g, &dy)?;
        gradient("o", &o, &d_o, &dy, |o| run(o, &g));
        gradient("gate", &g, &d_gate, &dy, |g| run(&o, g));
        close(&run(&o, &g)?, &(&o * swiglu::sigmoid(&g)?)?, 1e-14);
        Ok(())
    }

    /// Each head has its query first.
    #[test]
    fn a_projection_is_split_and_joined() -> Result<()> {
        let y = Tensor::arange(0f32, 24.0, &candle_core::Device::Cpu)?.reshape((2, 12))?;
        let (q, gate) = split(&y, 2)?;
        assert_eq!(q.dims(), [2, 2, 3]);
        let first = |t: &Tensor| t.flatten_all()?.narrow(0, 0, 6)?.to_vec1::<f32>();
        assert_eq!(first(&q)?, [0.0, 1.0, 2.0, 6.0, 7.0, 8.0]);
        assert_eq!(first(&gate)?, [3.0, 4.0, 5.0, 9.0, 10.0, 11.0]);
        close(&join(&Padded::of(&q.reshape((2, 6))?)?, &gate, 2)?.values()?, &y, 0.0);
        Ok(())
    }
}
