//! The token-mixing part of a layer: attention, or the delta rule.

use super::attention::{self, Attention};
use super::delta::{self, DeltaNet};
use super::linear::Linear;
use super::pass::batch::Context;
use super::pass::grad_accumulator::GradAccumulator;
use candle_core::Result;
use ft_kernels::Tensor;
use ft_kernels::delta::State;
use ft_kernels::padded::Padded;

/// Token mixer of a layer.
#[derive(Clone, Debug)]
pub enum Mixer {
    Attention(Box<Attention>),
    /// Linear attention by the gated delta rule.
    Delta(Box<DeltaNet>),
}

/// Saved activations.
#[derive(Debug)]
pub enum Saved {
    Attention(Box<attention::Saved>),
    Delta(Box<delta::Saved>),
}

/// A layer's state of earlier tokens, in generation.
#[derive(Debug)]
pub enum Cache {
    /// Keys and values of every token.
    Attention(attention::Cache),
    /// A state of fixed size.
    Delta(State),
}

/// Error for a bug in the walk.
const OTHER: &str = "a layer met the activations or the cache of a layer of another kind";

impl Cache {
    /// Drops all but the first `n` tokens. Returns whether that is possible: a state of the tokens read so far cannot
    /// go back, except to none.
    pub fn truncate(&mut self, n: usize) -> bool {
        match self {
            Cache::Attention(cache) => cache.truncate(n),
            Cache::Delta(state) if n == 0 => *state = State::default(),
            Cache::Delta(_) => return false,
        }
        true
    }
}

impl Saved {
    /// Drops the activations restored by [`Mixer::restore`].
    pub fn drop_inputs(&mut self) {
        match self {
            Saved::Attention(s) => s.drop_inputs(),
            Saved::Delta(s) => s.drop_inputs(),
        }
    }
}

impl Mixer {
    /// All linears, in the order of the forward pass.
    pub fn linears(&self) -> Vec<&Linear> {
        match self {
            Mixer::Attention(a) => a.linears().collect(),
            Mixer::Delta(d) => d.projections.iter().chain([&d.out]).collect(),
        }
    }

    /// An empty cache for at most `tokens` tokens.
    pub fn cache(&self, tokens: usize) -> Cache {
        match self {
            Mixer::Attention(_) => Cache::Attention(attention::Cache::new(tokens)),
            Mixer::Delta(_) => Cache::Delta(State::default()),
        }
    }

    /// A copy with dequantized 4-bit matrices.
    pub fn dequantized(&self) -> Result<Self> {
        Ok(match self {
            Mixer::Attention(a) => Mixer::Attention(Box::new(a.dequantized()?)),
            Mixer::Delta(d) => Mixer::Delta(Box::new(d.dequantized()?)),
        })
    }

    /// Spare columns for an input like `x`: see [`Linear::fused_rank`].
    pub fn fused_rank(&self, x: &Tensor) -> usize {
        match self {
            Mixer::Attention(a) => a.fused_rank(x),
            Mixer::Delta(d) => d.fused_rank(x),
        }
    }

    /// Spare columns for the gradient of the output: see [`Linear::fused_rank_back`].
    pub fn fused_rank_back(&self, like: &Tensor, ctx: &Context) -> usize {
        match self {
            Mixer::Attention(a) => a.o.fused_rank_back(like, ctx),
            Mixer::Delta(d) => d.out.fused_rank_back(like, ctx),
        }
    }

    /// Whether the backward pass needs the input.
    pub fn needs_input(&self) -> bool {
        match self {
            Mixer::Attention(a) => a.needs_input(),
            Mixer::Delta(d) => d.needs_input(),
        }
    }

    /// Restores the activations dropped by [`Saved::drop_inputs`] from the input `x`, if needed.
    pub fn restore(&self, s: &mut Saved, x: Option<&Tensor>, ctx: &Context) -> Result<()> {
        match (self, s) {
            (Mixer::Attention(a), Saved::Attention(s)) => a.restore(s, x, ctx),
            (Mixer::Delta(d), Saved::Delta(s)) => {
                d.restore(s, x);
                Ok(())
            }
            _ => candle_core::bail!("{OTHER}"),
        }
    }

    /// Forward pass: `[t, d]` -> `[t, d]`. With a cache, the tokens continue its document.
    pub fn forward(&self, x: &Padded, ctx: &Context, cache: Option<&mut Cache>) -> Result<(Tensor, Saved)> {
        match (self, cache) {
            (Mixer::Attention(a), None) => {
                a.forward(x, ctx, None).map(|(y, s)| (y, Saved::Attention(Box::new(s))))
            }
            (Mixer::Attention(a), Some(Cache::Attention(cache))) => {
                a.forward(x, ctx, Some(cache)).map(|(y, s)| (y, Saved::Attention(Box::new(s))))
            }
            (Mixer::Delta(d), None) => d.forward(x, ctx, None).map(|(y, s)| (y, Saved::Delta(Box::new(s)))),
            (Mixer::Delta(d), Some(Cache::Delta(state))) => {
                d.forward(x, ctx, Some(state)).map(|(y, s)| (y, Saved::Delta(Box::new(s))))
            }
            _ => candle_core::bail!("{OTHER}"),
        }
    }

    /// Backward pass: returns the gradient of the input.
    pub fn backward(
        &self,
        s: Saved,
        dy: &Padded,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
    ) -> Result<Tensor> {
        match (self, s) {
            (Mixer::Attention(a), Saved::Attention(s)) => a.backward(*s, dy, ctx, accum),
            (Mixer::Delta(d), Saved::Delta(s)) => d.backward(*s, dy, ctx, accum),
            _ => candle_core::bail!("{OTHER}"),
        }
    }
}
