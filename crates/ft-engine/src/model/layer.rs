//! One decoder layer: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`.

use super::feed_forward::mlp::{self, Mlp};
use super::feed_forward::{self, Mixture};
use super::linear::Linear;
use super::mixer::{self, Mixer};
use super::norm::Norm;
use super::pass::batch::Context;
use super::pass::sink::Sink;
use candle_core::Result;
use ft_kernels::Tensor;
use ft_kernels::dispatch::Groups;
use ft_kernels::padded::Padded;
use ft_kernels::route::Balance;
use std::sync::Arc;

/// A decoder layer.
#[derive(Clone, Debug)]
pub struct Layer {
    pub attn_norm: Norm,
    /// Attention, or the delta rule.
    pub attn: Mixer,
    pub mlp_norm: Norm,
    pub mlp: FeedForward,
}

/// Feed-forward part of a layer.
#[derive(Clone, Debug)]
pub enum FeedForward {
    /// One SwiGLU for all tokens.
    Dense(Box<Mlp>),
    /// A mixture of experts.
    Mixture(Box<Mixture>),
}

impl FeedForward {
    /// Spare columns for an input like `x`: see [`Linear::fused_rank`].
    fn fused_rank(&self, x: &Tensor) -> usize {
        match self {
            FeedForward::Dense(b) => b.fused_rank(x),
            FeedForward::Mixture(_) => 0,
        }
    }

    /// Whether the backward pass needs the input.
    fn needs_input(&self) -> bool {
        match self {
            FeedForward::Dense(b) => b.needs_input(),
            FeedForward::Mixture(b) => b.needs_input(),
        }
    }

    /// Restores the saved activations from the input `x` and the remains in `kept`.
    fn restore(&self, kept: FeedForwardSaved, x: &Padded, ctx: &Context) -> Result<FeedForwardSaved> {
        use FeedForwardSaved as Saved;
        Ok(match (self, kept) {
            (FeedForward::Dense(b), Saved::Dropped(_)) => Saved::Dense(Box::new(b.recompute(x, ctx)?)),
            (FeedForward::Mixture(b), Saved::Dropped(groups)) => {
                Saved::Mixture(Box::new(b.recompute(&x.values()?, ctx, groups)?))
            }
            (FeedForward::Dense(b), Saved::Dense(mut s)) => {
                b.restore(&mut s, &x.values()?);
                Saved::Dense(s)
            }
            (FeedForward::Mixture(b), Saved::Mixture(mut s)) => {
                b.restore(&mut s, &x.values()?)?;
                Saved::Mixture(s)
            }
            _ => candle_core::bail!("{OTHER}"),
        })
    }
}

/// Error for a bug in the walk.
const OTHER: &str = "backward through another layer than forward, or before what it needs was computed again";

/// Recompute level of a layer. Higher levels save less and recompute more in the backward pass, including
/// everything from the lower levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Saves everything, recomputes nothing.
    #[default]
    None,
    /// Recomputes everything that takes no matrix product: norms, rotated queries and keys, gathered expert
    /// inputs.
    Norms,
    /// Recomputes the feed-forward part too; saves the output of attention.
    FeedForward,
    /// Recomputes the whole layer from its input and the routing decisions.
    Full,
}

impl Level {
    /// All levels, in order.
    pub const ALL: [Level; 4] = [Level::None, Level::Norms, Level::FeedForward, Level::Full];
}

/// Saved activations of a layer, besides its input; reduced by [`Saved::keep`].
#[derive(Debug)]
pub struct Saved {
    /// Residual stream after attention `[t, d]`, and attention's saved activations. `None` if attention is
    /// recomputed.
    attn: Option<(Tensor, mixer::Saved)>,
    mlp: FeedForwardSaved,
}

#[derive(Debug)]
enum FeedForwardSaved {
    Dense(Box<mlp::Saved>),
    Mixture(Box<feed_forward::Saved>),
    /// To be recomputed; for a mixture, with this routing.
    Dropped(Option<Arc<Groups>>),
}

impl Saved {
    /// Drops the activations that are recomputed at `level`. Routing decisions are always retained.
    pub fn keep(mut self, level: Level) -> Self {
        if level >= Level::Full {
            self.attn = None;
        }
        if level >= Level::FeedForward {
            self.mlp = FeedForwardSaved::Dropped(self.routing());
        }
        if level >= Level::Norms {
            if let Some((_, attn)) = &mut self.attn {
                attn.drop_inputs();
            }
            match &mut self.mlp {
                FeedForwardSaved::Dense(s) => s.drop_inputs(),
                FeedForwardSaved::Mixture(s) => s.drop_inputs(),
                FeedForwardSaved::Dropped(_) => {}
            }
        }
        self
    }

    /// Saved activations of a mixture, with the router's outputs. `None` for dense or dropped ones.
    pub fn routed(&self) -> Option<&feed_forward::Saved> {
        match &self.mlp {
            FeedForwardSaved::Mixture(s) => Some(s),
            _ => None,
        }
    }

    /// Routing decisions of a sparse layer.
    pub fn routing(&self) -> Option<Arc<Groups>> {
        match &self.mlp {
            FeedForwardSaved::Dense(_) => None,
            FeedForwardSaved::Mixture(s) => Some(Arc::clone(&s.groups)),
            FeedForwardSaved::Dropped(groups) => groups.clone(),
        }
    }
}

impl Layer {
    /// All linears, in the order of the forward pass.
    pub fn linears(&self) -> Vec<&Linear> {
        let mut all = self.attn.linears();
        match &self.mlp {
            FeedForward::Dense(b) => all.extend(b.linears()),
            FeedForward::Mixture(b) => all.extend(b.linears()),
        }
        all
    }

    /// Removes the adapters, and keeps the weights.
    pub fn remove_adapters(&mut self) {
        let own = self.attn.linears_mut().into_iter();
        let of_mlp: Vec<&mut Linear> = match &mut self.mlp {
            FeedForward::Dense(b) => b.linears_mut().into(),
            FeedForward::Mixture(b) => b.linears_mut(),
        };
        own.chain(of_mlp).for_each(|linear| linear.lora = None);
    }

    /// Whether a matrix is 4-bit and dequantized in every product.
    pub fn is_packed(&self) -> bool {
        self.linears().into_iter().any(Linear::is_packed)
    }

    /// Whether expert products read 4-bit codes directly, even if the rest of the layer is dequantized.
    pub fn reads_codes(&self) -> bool {
        let w = &self.attn_norm.weight;
        matches!(&self.mlp, FeedForward::Mixture(b) if b.reads_codes(w.device(), w.dtype()))
    }

    /// A copy for one visit of the walk at recompute level `level`. Dequantizes the 4-bit matrices used
    /// twice in the visit; for a mixture, only experts with tokens by `routing`. Dropping the copy frees
    /// the memory.
    pub fn dequantized(&self, level: Level, routing: Option<&Groups>) -> Result<Self> {
        let on = self.attn_norm.weight.device();
        let mlp = match (&self.mlp, routing) {
            (FeedForward::Dense(b), _) => FeedForward::Dense(Box::new(b.dequantized()?)),
            (FeedForward::Mixture(b), Some(g)) => FeedForward::Mixture(Box::new(b.dequantized(g, on)?)),
            (FeedForward::Mixture(_), None) => {
                candle_core::bail!("a mixture dequantized before it has routed")
            }
        };
        Ok(Self {
            attn_norm: self.attn_norm.clone(),
            attn: if level == Level::Full { self.attn.dequantized()? } else { self.attn.clone() },
            mlp_norm: self.mlp_norm.clone(),
            mlp,
        })
    }

    /// Rebuilds the full saved activations from `kept`, the result of [`Saved::keep`].
    pub fn recompute(&self, x: &Tensor, ctx: &Context, level: Level, kept: Saved) -> Result<Saved> {
        if level == Level::None {
            return Ok(kept);
        }
        let (mid, normed, attn) = match kept.attn {
            None => {
                let (mid, normed, attn) = self.attend(x, ctx, None)?;
                (mid, Some(normed), attn)
            }
            Some((mid, mut attn)) => {
                let norm = || self.attn_norm.forward_padded(x, self.attn.fused_rank(x))?.values();
                let normed = self.attn.needs_input().then(norm).transpose()?;
                self.attn.restore(&mut attn, normed.as_ref(), ctx)?;
                drop(normed);
                let needed = level >= Level::FeedForward || self.mlp.needs_input();
                let norm = || self.mlp_norm.forward_padded(&mid, self.mlp.fused_rank(x));
                let normed = needed.then(norm).transpose()?;
                (mid, normed, attn)
            }
        };
        let mlp = match normed {
            Some(normed) => self.mlp.restore(kept.mlp, &normed, ctx)?,
            None => kept.mlp,
        };
        Ok(Saved { attn: Some((mid, attn)), mlp })
    }

    /// Attention half: returns the residual sum, the input of the feed-forward part, and the saved
    /// activations.
    fn attend(
        &self,
        x: &Tensor,
        ctx: &Context,
        cache: Option<&mut mixer::Cache>,
    ) -> Result<(Tensor, Padded, mixer::Saved)> {
        let normed = self.attn_norm.forward_padded(x, self.attn.fused_rank(x))?;
        let (a, attn) = self.attn.forward(&normed, ctx, cache)?;
        drop(normed);
        let (mid, normed) = self.mlp_norm.forward_add(x, a, self.mlp.fused_rank(x))?;
        Ok((mid, normed, attn))
    }

    /// Spare columns for the gradient of the layer's output: see [`Linear::fused_rank_back`].
    pub fn fused_rank_back(&self, like: &Tensor, ctx: &Context) -> usize {
        match &self.mlp {
            FeedForward::Dense(b) => b.down.fused_rank_back(like, ctx),
            FeedForward::Mixture(_) => 0,
        }
    }

    /// Forward pass: `[t, d]` -> `[t, d]`. `replay` is the routing of an earlier pass over the same tokens;
    /// it replaces the router's decision.
    pub fn forward(
        &self,
        x: &Tensor,
        ctx: &Context,
        cache: Option<&mut mixer::Cache>,
        replay: Option<Arc<Groups>>,
    ) -> Result<(Tensor, Saved)> {
        let (mid, normed, attn) = self.attend(x, ctx, cache)?;
        let (m, mlp) = match &self.mlp {
            FeedForward::Dense(b) => {
                b.forward(&normed, ctx).map(|(m, s)| (m, FeedForwardSaved::Dense(Box::new(s))))?
            }
            FeedForward::Mixture(b) => b
                .forward(&normed.values()?, ctx, replay)
                .map(|(m, s)| (m, FeedForwardSaved::Mixture(Box::new(s))))?,
        };
        Ok(((&mid + m)?, Saved { attn: Some((mid, attn)), mlp }))
    }

    /// Backward pass: returns the gradient of the input `x`, with `rank` spare columns. `balance` adds the
    /// gradients of the router losses.
    pub fn backward(
        &self,
        (x, s): (&Tensor, Saved),
        dy: &Padded,
        ctx: &Context,
        sink: &Sink<'_>,
        balance: Option<&Balance>,
        rank: usize,
    ) -> Result<Padded> {
        let Some((mid, attn)) = s.attn else { candle_core::bail!("{OTHER}") };
        let d_mid = {
            let dn = match (&self.mlp, s.mlp) {
                (FeedForward::Dense(b), FeedForwardSaved::Dense(s)) => b.backward(*s, dy, ctx, sink)?,
                (FeedForward::Mixture(b), FeedForwardSaved::Mixture(s)) => {
                    b.backward(*s, &dy.values()?, ctx, sink, balance)?
                }
                _ => candle_core::bail!("{OTHER}"),
            };
            let rank = self.attn.fused_rank_back(&dn, ctx);
            self.mlp_norm.backward_add(&mid, &dn, dy, rank, sink)?
        };
        drop(mid);
        let dn = self.attn.backward(attn, &d_mid, ctx, sink)?;
        self.attn_norm.backward_add(x, &dn, &d_mid, rank, sink)
    }
}
