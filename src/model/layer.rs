//! One decoder layer: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`.

use super::attention::{self, Attention};
use super::batch::Context;
use super::linear::Linear;
use super::mlp::{self, Mlp};
use super::moe::{self, Mixture};
use super::norm::Norm;
use super::sink::Sink;
use crate::kernel::Tensor;
use crate::kernel::group::Groups;
use crate::kernel::padded::Padded;
use crate::kernel::route::Balance;
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

/// What the backward pass needs.
#[derive(Debug)]
pub struct Saved {
    /// Input [t, d].
    x: Tensor,
    /// After attention [t, d].
    mid: Tensor,
    attn: attention::Saved,
    mlp: FeedForwardSaved,
}

#[derive(Debug)]
enum FeedForwardSaved {
    Dense(Box<mlp::Saved>),
    Mixture(Box<moe::Saved>),
}

impl Saved {
    /// How the router of a sparse layer decided.
    pub fn routed(&self) -> Option<&moe::Saved> {
        match &self.mlp {
            FeedForwardSaved::Dense(_) => None,
            FeedForwardSaved::Mixture(s) => Some(s),
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

    /// The same layer for one visit of the walk: its 4-bit matrices dequantized, of a mixture those of the experts that
    /// have tokens by `routing`. Dropping it gives the memory back.
    pub fn dequantized(&self, routing: Option<&Groups>) -> Result<Self> {
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
            attn: self.attn.dequantized()?,
            mlp_norm: self.mlp_norm.clone(),
            mlp,
        })
    }

    /// What forward saves, for a layer that is computed again for backward; `replay` as there.
    pub fn recompute(&self, x: Tensor, ctx: &Context, replay: Option<Arc<Groups>>) -> Result<Saved> {
        let (mid, normed, attn) = self.attend(&x, ctx, None)?;
        let mlp = match &self.mlp {
            FeedForward::Dense(b) => FeedForwardSaved::Dense(Box::new(b.recompute(&normed, ctx)?)),
            FeedForward::Mixture(b) => {
                FeedForwardSaved::Mixture(Box::new(b.recompute(&normed.values()?, ctx, replay)?))
            }
        };
        Ok(Saved { x, mid, attn, mlp })
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
        let room = match &self.mlp {
            FeedForward::Dense(b) => b.room(x),
            FeedForward::Mixture(_) => 0,
        };
        let (mid, normed) = self.mlp_norm.forward_add(x, a, room)?;
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
        Ok(((&mid + m)?, Saved { x: x.clone(), mid, attn, mlp }))
    }

    /// Backward: the gradient of the input, with room for `rank` columns more. `balance` is what losses on the router add.
    pub fn backward(
        &self,
        s: Saved,
        dy: &Padded,
        ctx: &Context,
        sink: &Sink<'_>,
        balance: Option<&Balance>,
        rank: usize,
    ) -> Result<Padded> {
        let d_mid = {
            let dn = match (&self.mlp, s.mlp) {
                (FeedForward::Dense(b), FeedForwardSaved::Dense(s)) => b.backward(*s, dy, ctx, sink)?,
                (FeedForward::Mixture(b), FeedForwardSaved::Mixture(s)) => {
                    b.backward(*s, &dy.values()?, ctx, sink, balance)?
                }
                _ => candle_core::bail!("backward through another layer than forward"),
            };
            let room = self.attn.o.room_back(&dn, ctx);
            self.mlp_norm.backward_add(&s.mid, &dn, dy, room, sink)?
        };
        drop(s.mid);
        let dn = self.attn.backward(s.attn, &d_mid, ctx, sink)?;
        self.attn_norm.backward_add(&s.x, &dn, &d_mid, rank, sink)
    }
}
