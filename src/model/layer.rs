//! One decoder layer: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`.

use super::attention::{self, Attention};
use super::decoder::Context;
use super::mlp::{self, Mlp};
use super::norm::Norm;
use super::sink::Sink;
use candle_core::{Result, Tensor};

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
    pub mlp: Mlp,
}

/// What the backward pass needs.
#[derive(Debug)]
pub struct Saved {
    /// Input [t, d].
    x: Tensor,
    /// After attention [t, d].
    mid: Tensor,
    attn: attention::Saved,
    mlp: mlp::Saved,
}

impl Layer {
    /// Forward: [t, d] -> [t, d].
    pub fn forward(
        &self,
        x: &Tensor,
        ctx: &Context,
        cache: Option<&mut attention::Cache>,
    ) -> Result<(Tensor, Saved)> {
        let (a, attn) = self.attn.forward(&self.attn_norm.forward(x)?, ctx, cache)?;
        let mid = (x + a)?;
        let (m, mlp) = self.mlp.forward(&self.mlp_norm.forward(&mid)?, ctx)?;
        Ok(((&mid + m)?, Saved { x: x.clone(), mid, attn, mlp }))
    }

    /// Backward: the gradient of the input.
    pub fn backward(&self, s: Saved, dy: &Tensor, ctx: &Context, sink: &Sink<'_>) -> Result<Tensor> {
        let d_mid = {
            let dn = self.mlp.backward(s.mlp, dy, ctx, sink)?;
            (dy + self.mlp_norm.backward(&s.mid, &dn, sink)?)?
        };
        drop(s.mid);
        let dn = self.attn.backward(s.attn, &d_mid, ctx, sink)?;
        d_mid + self.attn_norm.backward(&s.x, &dn, sink)?
    }
}
