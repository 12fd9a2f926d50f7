//! The recurrence, forward and backward in chunks. Per value head, with a state S `[k, v]` that starts from zero:
//!
//! ```text
//! q, k to unit length, q times k_dim^-1/2;  b = sigmoid(b);  g = -exp(a_log) softplus(a + bias)
//! S <- exp(g) S;  S <- S + k (b (v - S^T k))^T;  o = S^T q
//! ```

mod chunk;
mod cpu;
mod cuda;
mod gates;

use super::Heads;
use crate::Tensor;
use crate::attention::Sequences;
use crate::cpu::{is_cpu, on_real};
use crate::ledger::Cost;
use candle_core::Result;

/// Added to the squared length of a query or key.
pub(super) const EPS: f64 = 1e-6;

/// Inputs of the recurrence.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    pub heads: Heads,
    /// Queries, keys and values `[t, c]`, after the convolution.
    pub qkv: &'a Tensor,
    /// Decay and rate of every value head before their nonlinearities `[t, h]`.
    pub a: &'a Tensor,
    pub b: &'a Tensor,
    /// Logarithm of the decay's factor, and the bias of `a`, `[h]`.
    pub a_log: &'a Tensor,
    pub bias: &'a Tensor,
}

/// State of a layer between the tokens of one document, in generation.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// States of all heads `[h, k, v]`, f32; `None` before the first token.
    pub(super) heads: Option<Tensor>,
    /// Last inputs of the convolution `[taps - 1, c]`; `None` before the first token.
    pub(super) taps: Option<Tensor>,
}

impl State {
    /// Bytes of a layer's state, for a convolution of `taps` and channels of `width` bytes.
    pub fn bytes(heads: Heads, taps: usize, width: usize) -> usize {
        4 * heads.state() + taps.saturating_sub(1) * heads.channels() * width
    }
}

/// Tokens of a chunk: products over pairs of tokens should not outweigh those with the state.
pub fn chunk(heads: Heads) -> usize {
    if heads.key_dim * heads.value_dim >= 64 * 64 { 64 } else { 32 }
}

impl Inputs<'_> {
    fn check(&self) -> Result<usize> {
        let (heads, (t, c)) = (self.heads, self.qkv.dims2()?);
        let of_head = |x: &Tensor| x.dims() == [t, heads.values];
        let vectors = [self.a_log, self.bias].iter().all(|x| x.dims() == [heads.values]);
        let whole = heads.keys > 0 && heads.values.is_multiple_of(heads.keys);
        if c != heads.channels() || !whole || !of_head(self.a) || !of_head(self.b) || !vectors {
            candle_core::bail!("delta rule: {:?} of {heads:?} with {:?}", self.qkv.shape(), self.a.shape());
        }
        Ok(t)
    }

    /// Records the FLOPs of the products for ghosts, `times` those of the forward pass.
    fn work(&self, times: f64) {
        let Some(g) = self.qkv.ghost() else { return };
        let (Heads { values, key_dim: k, value_dim: v, .. }, l) = (self.heads, chunk(self.heads) as f64);
        let (t, k, v) = (self.qkv.dims()[0] as f64 * values as f64, k as f64, v as f64);
        let flops = 2.0 * t * (3.0 * k * v + l * (2.0 * k + 1.5 * v));
        g.ledger().work(Cost { flops: times * flops, delta: times * flops, ..Cost::default() });
    }
}

/// Outputs `[t, h v]` in the dtype of the inputs. With a state, the tokens continue its document, and the state moves
/// on; otherwise every document of `seqs` starts from zero.
pub fn forward(x: &Inputs<'_>, seqs: &Sequences, state: Option<&mut State>) -> Result<Tensor> {
    let t = x.check()?;
    if state.is_none() {
        seqs.cover(t)?;
    }
    x.work(1.0);
    if is_cpu(x.qkv) {
        on_real!(x.qkv.dtype(), cpu::forward(x, seqs, state))
    } else {
        cuda::forward(x, seqs, state)
    }
}

/// Gradients of the inputs, from the gradient of the output.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[t, c]`.
    pub qkv: Tensor,
    /// `[t, h]`.
    pub a: Tensor,
    pub b: Tensor,
    /// Partial sums `[p, h]` of the gradients of `a_log` and `bias`, f32 (f64 for f64).
    pub a_log: Tensor,
    pub bias: Tensor,
}

/// Gradients of the inputs of [`forward`] without a state, from the gradient `d_o` `[t, h v]` of its output. Recomputes
/// the states; nothing else than the inputs is saved.
pub fn backward(x: &Inputs<'_>, d_o: &Tensor, seqs: &Sequences) -> Result<Gradients> {
    let t = x.check()?;
    if d_o.dims() != [t, x.heads.value_width()] {
        candle_core::bail!("delta rule: a gradient {:?} of {:?}", d_o.shape(), x.heads);
    }
    seqs.cover(t)?;
    x.work(3.5);
    if is_cpu(x.qkv) {
        on_real!(x.qkv.dtype(), cpu::backward(x, d_o, seqs))
    } else {
        cuda::backward(x, d_o, seqs)
    }
}

#[cfg(test)]
mod host_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
pub use cuda::shared_memory;
