//! Output gate of attention: `y = o sigmoid(gate)`, elementwise (Qiu et al., "Gated attention for large language
//! models", 2025). Queries and gates come from one projection, side by side in every head.

use crate::Tensor;
use crate::cpu::blocks::{BLOCK, Values, ghosts, written};
use crate::cpu::{Float, is_native, on_real, vectorised};
use crate::padded::Padded;
use crate::swiglu::{logistic, sigmoid};
use candle_core::Result;

/// Values per task.
const CHUNK: usize = 16 * 1024;

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
    let o = o.values()?;
    if is_native(gate) {
        return on_real!(o.dtype(), forward_cpu(&o, gate));
    }
    o * sigmoid(gate)?
}

/// Gradients of `o` and `gate` from the gradient of the output of [`forward`].
pub fn backward(o: &Padded, gate: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    let o = o.values()?;
    if is_native(gate) {
        return on_real!(o.dtype(), backward_cpu(&o, gate, dy));
    }
    let s = sigmoid(gate)?;
    let d_o = (dy * &s)?;
    let d_gate = ((&d_o * &o)? * (1.0 - &s)?)?;
    Ok((d_o, d_gate))
}

fn forward_cpu<T: Float>(o: &Tensor, gate: &Tensor) -> Result<Tensor> {
    let like = (gate.shape(), gate.dtype());
    if let Some([y]) = ghosts::<T, 1>(&[o, gate], like, BLOCK, |_| ()) {
        return Ok(y);
    }
    let (o, g) = (Values::<T>::of(o)?, Values::<T>::of(gate)?);
    let ([y], _) = written(like, CHUNK, |from, out| {
        let [mut of_o, mut of_g] = [Vec::new(), Vec::new()];
        out.each(BLOCK, |at, [y]| {
            let own = from + at..from + at + y.len();
            let (o, g) = (o.read(own.clone(), &mut of_o), g.read(own, &mut of_g));
            vectorised(|| y.iter_mut().zip(o).zip(g).for_each(|((y, o), g)| *y = *o * logistic(*g)));
        });
    })?;
    Ok(y)
}

fn backward_cpu<T: Float>(o: &Tensor, gate: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor)> {
    let like = (gate.shape(), gate.dtype());
    if let Some([d_o, d_gate]) = ghosts::<T, 2>(&[o, gate, dy], like, BLOCK, |_| ()) {
        return Ok((d_o, d_gate));
    }
    let [o, g, d] = [Values::<T>::of(o)?, Values::of(gate)?, Values::of(dy)?];
    let ([d_o, d_gate], _) = written(like, CHUNK, |from, out| {
        let [mut of_o, mut of_g, mut of_d] = [Vec::new(), Vec::new(), Vec::new()];
        out.each(BLOCK, |at, [d_o, d_gate]| {
            let own = || from + at..from + at + d_o.len();
            let (o, g, d) = (o.read(own(), &mut of_o), g.read(own(), &mut of_g), d.read(own(), &mut of_d));
            vectorised(|| {
                for ((d_o, d_gate), ((o, g), d)) in d_o.iter_mut().zip(d_gate).zip(o.iter().zip(g).zip(d)) {
                    let s = logistic(*g);
                    *d_o = *d * s;
                    *d_gate = *d * *o * s * (T::one() - s);
                }
            });
        });
    })?;
    Ok((d_o, d_gate))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, composed, gradient, randn};
    use candle_core::DType;

    #[test]
    fn gradients() -> Result<()> {
        let [o, g, dy] = [1, 2, 3].map(|seed| randn(seed, (5, 6), DType::F64));
        let (o, g, dy) = (o?, g?, dy?);
        let run = |o: &Tensor, g: &Tensor| forward(&Padded::of(o)?, g);
        let (d_o, d_gate) = backward(&Padded::of(&o)?, &g, &dy)?;
        gradient("o", &o, &d_o, &dy, |o| run(o, &g));
        gradient("gate", &g, &d_gate, &dy, |g| run(&o, g));
        composed(|| {
            close(&run(&o, &g)?, &(&o * sigmoid(&g)?)?, 1e-14);
            let (a, b) = backward(&Padded::of(&o)?, &g, &dy)?;
            close(&a, &d_o, 1e-14);
            close(&b, &d_gate, 1e-14);
            Ok(())
        })
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
