//! One decoder layer: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`.

use super::attention::{self, Attention};
use super::batch::Context;
use super::linear::Linear;
use super::mlp::{self, Mlp};
use super::moe::{self, Mixture};
use super::norm::Norm;
use super::sink::Sink;
use ft_kernels::Tensor;
use ft_kernels::group::Groups;
use ft_kernels::padded::Padded;
use ft_kernels::route::Balance;
use candle_core::Result;
use std::sync::Arc;

/// One layer.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Norm before attention.
    pub attn_norm: Norm,
    /// Attention.
    pub attn: Attention,
    /// Norm before the feed-forward block.
    pub mlp_norm: Norm,
    /// Feed-forward block.
    pub mlp: FeedForward,
}

/// The feed-forward block of a layer.
#[derive(Clone, Debug)]
pub enum FeedForward {
    /// One for all tokens.
    Dense(Box<Mlp>),
    /// Experts behind a router.
    Mixture(Box<Mixture>),
}

impl FeedForward {
    /// Columns that belong beside an input like `x`: see [`Linear::room`].
    fn room(&self, x: &Tensor) -> usize {
        match self {
            FeedForward::Dense(b) => b.room(x),
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

    /// What forward saves of the input `x`, of what was kept of it.
    fn again(&self, kept: FeedForwardSaved, x: &Padded, ctx: &Context) -> Result<FeedForwardSaved> {
        use FeedForwardSaved as Saved;
        Ok(match (self, kept) {
            (FeedForward::Dense(b), Saved::Again(_)) => Saved::Dense(Box::new(b.recompute(x, ctx)?)),
            (FeedForward::Mixture(b), Saved::Again(groups)) => {
                Saved::Mixture(Box::new(b.recompute(&x.values()?, ctx, groups)?))
            }
            (FeedForward::Dense(b), Saved::Dense(mut s)) => {
                b.again(&mut s, &x.values()?);
                Saved::Dense(s)
            }
            (FeedForward::Mixture(b), Saved::Mixture(mut s)) => {
                b.again(&mut s, &x.values()?)?;
                Saved::Mixture(s)
            }
            _ => candle_core::bail!("{OTHER}"),
        })
    }
}

/// What a bug of the walk would be.
const OTHER: &str = "backward through another layer than forward, or before what it needs was computed again";

/// What of a layer is computed again for its backward pass: each level does what those before it do, and keeps less.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing.
    #[default]
    Nothing,
    /// What takes no product: norms, rotated queries and keys, the rows that enter experts.
    Norms,
    /// The feed-forward block too; what attention gave is kept.
    FeedForward,
    /// All of it, from its input and how its router decided.
    All,
}

impl Level {
    /// All of them, in order.
    pub const EACH: [Level; 4] = [Level::Nothing, Level::Norms, Level::FeedForward, Level::All];
}

/// What the backward pass needs beside the input, or what of that is kept until then: [`Saved::keep`].
#[derive(Debug)]
pub struct Saved {
    /// After attention [t, d], and what attention's own backward pass needs, unless attention is computed again.
    attn: Option<(Tensor, attention::Saved)>,
    mlp: FeedForwardSaved,
}

#[derive(Debug)]
enum FeedForwardSaved {
    Dense(Box<mlp::Saved>),
    Mixture(Box<moe::Saved>),
    /// To be computed again, of a mixture by this routing.
    Again(Option<Arc<Groups>>),
}

impl Saved {
    /// What of it is kept where the rest is computed again: all that decides what a level takes.
    pub fn keep(mut self, level: Level) -> Self {
        if level >= Level::All {
            self.attn = None;
        }
        if level >= Level::FeedForward {
            self.mlp = FeedForwardSaved::Again(self.routing());
        }
        if level >= Level::Norms {
            if let Some((_, attn)) = &mut self.attn {
                attn.without_input();
            }
            match &mut self.mlp {
                FeedForwardSaved::Dense(s) => s.without_input(),
                FeedForwardSaved::Mixture(s) => s.without_input(),
                FeedForwardSaved::Again(_) => {}
            }
        }
        self
    }

    /// What the router of a sparse layer gave.
    pub fn routed(&self) -> Option<&moe::Saved> {
        match &self.mlp {
            FeedForwardSaved::Mixture(s) => Some(s),
            _ => None,
        }
    }

    /// How the router of a sparse layer decided.
    pub fn routing(&self) -> Option<Arc<Groups>> {
        match &self.mlp {
            FeedForwardSaved::Dense(_) => None,
            FeedForwardSaved::Mixture(s) => Some(Arc::clone(&s.groups)),
            FeedForwardSaved::Again(groups) => groups.clone(),
        }
    }
}

impl Layer {
    /// Its linears, in the order of the forward pass.
    pub fn linears(&self) -> Vec<&Linear> {
        let mut all = self.attn.linears().to_vec();
        match &self.mlp {
            FeedForward::Dense(b) => all.extend(b.linears()),
            FeedForward::Mixture(b) => all.extend(b.linears()),
        }
        all
    }

    /// Whether a matrix here is 4-bit and is dequantized in each product.
    pub fn is_packed(&self) -> bool {
        self.linears().into_iter().any(Linear::is_packed)
    }

    /// Whether products take the 4-bit codes of its experts as they are, however the rest of it is dequantized.
    pub fn reads_codes(&self) -> bool {
        let w = &self.attn_norm.weight;
        matches!(&self.mlp, FeedForward::Mixture(b) if b.reads_codes(w.device(), w.dtype()))
    }

    /// The same layer for one visit of the walk, which computes `level` again: those of its 4-bit matrices dequantized that
    /// are multiplied twice, of a mixture those of the experts that have tokens by `routing`. Dropping it gives the memory
    /// back.
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
            attn: if level == Level::All { self.attn.dequantized()? } else { self.attn.clone() },
            mlp_norm: self.mlp_norm.clone(),
            mlp,
        })
    }

    /// What forward saves, of what [`Saved::keep`] left of it.
    pub fn recompute(&self, x: &Tensor, ctx: &Context, level: Level, kept: Saved) -> Result<Saved> {
        if level == Level::Nothing {
            return Ok(kept);
        }
        let (mid, normed, attn) = match kept.attn {
            None => {
                let (mid, normed, attn) = self.attend(x, ctx, None)?;
                (mid, Some(normed), attn)
            }
            Some((mid, mut attn)) => {
                let normed = match self.attn.needs_input() {
                    true => Some(self.attn_norm.forward_padded(x, self.attn.room(x))?.values()?),
                    false => None,
                };
                self.attn.again(&mut attn, normed.as_ref(), ctx)?;
                drop(normed);
                let normed = match level >= Level::FeedForward || self.mlp.needs_input() {
                    true => Some(self.mlp_norm.forward_padded(&mid, self.mlp.room(x))?),
                    false => None,
                };
                (mid, normed, attn)
            }
        };
        let mlp = match normed {
            Some(normed) => self.mlp.again(kept.mlp, &normed, ctx)?,
            None => kept.mlp,
        };
        Ok(Saved { attn: Some((mid, attn)), mlp })
    }

    /// Through attention: the sum with the input, and what enters the feed-forward block.
    fn attend(
        &self,
        x: &Tensor,
        ctx: &Context,
        cache: Option<&mut attention::Cache>,
    ) -> Result<(Tensor, Padded, attention::Saved)> {
        let normed = self.attn_norm.forward_padded(x, self.attn.room(x))?;
        let (a, attn) = self.attn.forward(&normed, ctx, cache)?;
        drop(normed);
        let (mid, normed) = self.mlp_norm.forward_add(x, a, self.mlp.room(x))?;
        Ok((mid, normed, attn))
    }

    /// Columns that belong beside the gradient of this layer's output: see [`Linear::room_back`].
    pub fn room_back(&self, like: &Tensor, ctx: &Context) -> usize {
        match &self.mlp {
            FeedForward::Dense(b) => b.down.room_back(like, ctx),
            FeedForward::Mixture(_) => 0,
        }
    }

    /// Forward: [t, d] -> [t, d]. `replay` is the routing of an earlier pass over the same tokens, which is
    /// taken over instead of decided anew.
    pub fn forward(
        &self,
        x: &Tensor,
        ctx: &Context,
        cache: Option<&mut attention::Cache>,
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

    /// Backward: the gradient of the input `x`, with room for `rank` columns more. `balance` is what losses on the router
    /// add.
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
            let room = self.attn.o.room_back(&dn, ctx);
            self.mlp_norm.backward_add(&mid, &dn, dy, room, sink)?
        };
        drop(mid);
        let dn = self.attn.backward(attn, &d_mid, ctx, sink)?;
        self.attn_norm.backward_add(x, &dn, &d_mid, rank, sink)
    }
}
