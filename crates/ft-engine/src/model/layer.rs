//! One decoder layer: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`. Some families normalize the
//! outputs too, or instead.

use super::delta::Parameter;
use super::feed_forward::mlp::{self, Mlp};
use super::feed_forward::{self, Beside, Inputs, Mixture, beside};
use super::linear::Linear;
use super::mixer::{self, Mixer};
use super::norm::Norm;
use super::pass::batch::Context;
use super::pass::grad_accumulator::GradAccumulator;
use super::pass::sequence_parallel::SequenceParallel;
use super::per_layer::{self, PerLayer};
use candle_core::Result;
use ft_kernels::Tensor;
use ft_kernels::dispatch::Groups;
use ft_kernels::padded::Padded;
use ft_kernels::route::Balance;
use std::sync::Arc;

/// A decoder layer.
#[derive(Clone, Debug)]
pub struct Layer {
    pub attn_norm: Option<Norm>,
    /// Attention, or the delta rule.
    pub attn: Mixer,
    /// Norm of the mixer's output.
    pub attn_post: Option<Norm>,
    pub mlp_norm: Option<Norm>,
    pub mlp: FeedForward,
    /// Norm of the feed-forward part's output.
    pub mlp_post: Option<Norm>,
    /// Use of the layer's inputs, if the model has per-layer inputs.
    pub per_layer: Option<Box<PerLayer>>,
    /// Factor `[1]` on the output, if the family has one.
    pub scalar: Option<Parameter>,
}

/// Feed-forward part of a layer.
#[derive(Clone, Debug)]
pub enum FeedForward {
    /// One gated feed-forward for all tokens.
    Dense(Box<Mlp>),
    /// A mixture of experts.
    Mixture(Box<Mixture>),
    /// Both, side by side; the layer has no norm before it.
    Beside(Box<Beside>),
}

impl FeedForward {
    /// The mixture, if there is one.
    pub fn mixture(&self) -> Option<&Mixture> {
        match self {
            FeedForward::Dense(_) => None,
            FeedForward::Mixture(b) => Some(b),
            FeedForward::Beside(b) => Some(&b.mixture),
        }
    }

    /// Spare columns for an input like `x`: see [`Linear::fused_rank`].
    fn fused_rank(&self, x: &Tensor) -> usize {
        match self {
            FeedForward::Dense(b) => b.fused_rank(x),
            FeedForward::Mixture(_) | FeedForward::Beside(_) => 0,
        }
    }

    /// Tensor-parallel ranks, if any. A mixture computes on the rank's own tokens.
    fn sequence_parallel<'c, 'a>(&self, ctx: &'c Context<'a>) -> Option<&'c SequenceParallel<'a>> {
        ctx.sequence_parallel.as_deref().filter(|_| matches!(self, FeedForward::Dense(_)))
    }

    /// Context of this part's tokens.
    fn context<'c, 'a>(&self, ctx: &'c Context<'a>) -> &'c Context<'a> {
        self.sequence_parallel(ctx).map_or(ctx, SequenceParallel::whole)
    }

    /// Whether the backward pass needs the input.
    fn needs_input(&self) -> bool {
        match self {
            FeedForward::Dense(b) => b.needs_input(),
            FeedForward::Mixture(b) => b.needs_input(),
            FeedForward::Beside(b) => b.needs_input(),
        }
    }

    /// Forward pass: `[t, d]` -> `[t, d]`. `replay` as in [`Layer::forward`].
    fn forward(
        &self,
        x: &Padded,
        ctx: &Context,
        replay: Option<Arc<Groups>>,
    ) -> Result<(Tensor, FeedForwardSaved)> {
        use FeedForwardSaved as Saved;
        match self {
            FeedForward::Dense(b) => b.forward(x, ctx).map(|(m, s)| (m, Saved::Dense(Box::new(s)))),
            FeedForward::Mixture(b) => {
                let x = x.values()?;
                b.forward(Inputs::both(&x), ctx, replay).map(|(m, s)| (m, Saved::Mixture(Box::new(s))))
            }
            FeedForward::Beside(b) => {
                b.forward(&x.values()?, ctx, replay).map(|(m, s)| (m, Saved::Beside(Box::new(s))))
            }
        }
    }

    /// Spare columns for the gradient of the output: see [`Linear::fused_rank_back`].
    fn fused_rank_back(&self, like: &Tensor, ctx: &Context) -> usize {
        match self {
            FeedForward::Dense(b) => b.down.fused_rank_back(like, ctx),
            FeedForward::Mixture(_) | FeedForward::Beside(_) => 0,
        }
    }

    /// Restores the saved activations from the input `x` and the remains in `kept`; also returns the output if
    /// `wants_output` and it is computed on the way.
    fn restore(
        &self,
        kept: FeedForwardSaved,
        x: &Padded,
        ctx: &Context,
        wants_output: bool,
    ) -> Result<(Option<Tensor>, FeedForwardSaved)> {
        use FeedForwardSaved as Saved;
        let saved = match (self, kept) {
            (_, Saved::Dropped(groups)) if wants_output => {
                let (m, saved) = self.forward(x, ctx, groups)?;
                return Ok((Some(m), saved));
            }
            (FeedForward::Dense(b), Saved::Dropped(_)) => Saved::Dense(Box::new(b.recompute(x, ctx)?)),
            (FeedForward::Mixture(b), Saved::Dropped(groups)) => {
                Saved::Mixture(Box::new(b.recompute(Inputs::both(&x.values()?), ctx, groups)?))
            }
            (FeedForward::Beside(b), Saved::Dropped(groups)) => {
                Saved::Beside(Box::new(b.forward(&x.values()?, ctx, groups)?.1))
            }
            (FeedForward::Dense(b), Saved::Dense(mut s)) => {
                b.restore(&mut s, &x.values()?);
                Saved::Dense(s)
            }
            (FeedForward::Mixture(b), Saved::Mixture(mut s)) => {
                b.restore(&mut s, Inputs::both(&x.values()?), ctx)?;
                Saved::Mixture(s)
            }
            (FeedForward::Beside(b), Saved::Beside(mut s)) => {
                b.restore(&mut s, &x.values()?, ctx)?;
                Saved::Beside(s)
            }
            _ => candle_core::bail!("{OTHER}"),
        };
        Ok((None, saved))
    }

    /// Backward pass: the gradient of the input `x`. Only experts beside a dense block read `x`: they have own norms.
    fn backward(
        &self,
        (x, saved): (&Tensor, FeedForwardSaved),
        dy: &Padded,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
        balance: Option<&Balance>,
    ) -> Result<Tensor> {
        use FeedForwardSaved as Saved;
        match (self, saved) {
            (FeedForward::Dense(b), Saved::Dense(s)) => b.backward(*s, dy, ctx, accum),
            (FeedForward::Mixture(b), Saved::Mixture(s)) => {
                b.backward(*s, &dy.values()?, ctx, accum, balance)
            }
            (FeedForward::Beside(b), Saved::Beside(s)) => {
                b.backward((x, *s), &dy.values()?, ctx, accum, balance)
            }
            _ => candle_core::bail!("{OTHER}"),
        }
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
    /// Recomputes everything without matrix products: norms, rotated queries and keys, gathered expert inputs.
    Norms,
    /// Recomputes the feed-forward part too; saves the output of attention.
    FeedForward,
    /// Recomputes the whole layer from the input and the routing decisions.
    Full,
}

impl Level {
    /// All levels, in order.
    pub const ALL: [Level; 4] = [Level::None, Level::Norms, Level::FeedForward, Level::Full];
}

/// Saved activations of a layer, besides the input; reduced by [`Saved::keep`].
#[derive(Debug)]
pub struct Saved {
    /// `None` if attention is recomputed.
    attn: Option<Attended>,
    mlp: FeedForwardSaved,
    /// Output of the feed-forward part `[t, d]`, if normalized; `None` if recomputed.
    mlp_out: Option<Tensor>,
    /// `None` if recomputed, or without per-layer inputs.
    per_layer: Option<Box<per_layer::Saved>>,
}

/// Saved activations of the attention half.
#[derive(Debug)]
struct Attended {
    /// Residual stream after attention `[t, d]`; `None` if computed again from `out`.
    mid: Option<Tensor>,
    /// Output of attention `[t, d]`, if normalized.
    out: Option<Tensor>,
    saved: mixer::Saved,
}

#[derive(Debug)]
enum FeedForwardSaved {
    Dense(Box<mlp::Saved>),
    Mixture(Box<feed_forward::Saved>),
    Beside(Box<beside::Saved>),
    /// To be recomputed; for a mixture, with this routing.
    Dropped(Option<Arc<Groups>>),
}

impl Saved {
    /// Drops the activations recomputed at `level`. Routing decisions are always retained.
    pub fn keep(mut self, level: Level) -> Self {
        if level >= Level::Full {
            self.attn = None;
        }
        if level >= Level::FeedForward {
            self.mlp = FeedForwardSaved::Dropped(self.routing());
            self.mlp_out = None;
            self.per_layer = None;
        }
        if level >= Level::Norms {
            self.per_layer.iter_mut().for_each(|s| s.drop_inputs());
            if let Some(Attended { mid, out, saved }) = &mut self.attn {
                saved.drop_inputs();
                if out.is_some() {
                    *mid = None;
                }
            }
            match &mut self.mlp {
                FeedForwardSaved::Dense(s) => s.drop_inputs(),
                FeedForwardSaved::Mixture(s) => s.drop_inputs(),
                FeedForwardSaved::Beside(s) => s.drop_inputs(),
                FeedForwardSaved::Dropped(_) => {}
            }
        }
        self
    }

    /// Saved activations of a mixture, with the router's outputs. `None` for dense or dropped ones.
    pub fn routed(&self) -> Option<&feed_forward::Saved> {
        match &self.mlp {
            FeedForwardSaved::Mixture(s) => Some(s),
            FeedForwardSaved::Beside(s) => Some(&s.mixture),
            _ => None,
        }
    }

    /// Routing decisions of a sparse layer.
    pub fn routing(&self) -> Option<Arc<Groups>> {
        match &self.mlp {
            FeedForwardSaved::Dropped(groups) => groups.clone(),
            _ => self.routed().map(|s| Arc::clone(&s.groups)),
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
            FeedForward::Beside(b) => all.extend(b.dense.linears().chain(b.mixture.linears())),
        }
        all.extend(self.per_layer.iter().flat_map(|p| [&p.gate, &p.projection]));
        all
    }

    /// Removes the adapters, and keeps the weights.
    pub fn remove_adapters(&mut self) {
        let mixer: Vec<&mut Linear> = match &mut self.attn {
            Mixer::Attention(a) => a.linears_mut().collect(),
            Mixer::Delta(d) => d.projections.iter_mut().chain([&mut d.out]).collect(),
        };
        let mlp: Vec<&mut Linear> = match &mut self.mlp {
            FeedForward::Dense(b) => b.linears_mut().collect(),
            FeedForward::Mixture(b) => b.linears_mut(),
            FeedForward::Beside(b) => b.dense.linears_mut().chain(b.mixture.linears_mut()).collect(),
        };
        let inputs = self.per_layer.iter_mut().flat_map(|p| [&mut p.gate, &mut p.projection]);
        mixer.into_iter().chain(mlp).chain(inputs).for_each(|linear| linear.lora = None);
    }

    /// Whether a matrix is 4-bit and dequantized in every product.
    pub fn is_packed(&self) -> bool {
        self.linears().into_iter().any(Linear::is_packed)
    }

    /// The weight of a norm, for device and compute dtype.
    fn sample(&self) -> Result<&Tensor> {
        let norms = [&self.attn_norm, &self.attn_post, &self.mlp_norm, &self.mlp_post];
        match norms.into_iter().flatten().next() {
            Some(norm) => Ok(&norm.weight),
            None => candle_core::bail!("a layer without norms"),
        }
    }

    /// Whether expert products read 4-bit codes directly, even if the rest of the layer is dequantized.
    pub fn reads_codes(&self) -> bool {
        let Some(b) = self.mlp.mixture() else { return false };
        self.sample().is_ok_and(|w| b.reads_codes(w.device(), w.dtype()))
    }

    /// A copy for one visit of the walk at recompute level `level`. Dequantizes the 4-bit matrices used
    /// twice in the visit; for a mixture, only experts with tokens by `routing`. Dropping the copy frees
    /// the memory.
    pub fn dequantized(&self, level: Level, routing: Option<&Groups>) -> Result<Self> {
        let on = self.sample()?.device();
        let mlp = match (&self.mlp, routing) {
            (FeedForward::Dense(b), _) => FeedForward::Dense(Box::new(b.dequantized()?)),
            (FeedForward::Mixture(b), Some(g)) => FeedForward::Mixture(Box::new(b.dequantized(g, on)?)),
            (FeedForward::Beside(b), Some(g)) => FeedForward::Beside(Box::new(b.dequantized(g)?)),
            (FeedForward::Mixture(_) | FeedForward::Beside(_), None) => {
                candle_core::bail!("a mixture dequantized before it has routed")
            }
        };
        let attn = if level == Level::Full { self.attn.dequantized()? } else { self.attn.clone() };
        let per_layer = self.per_layer.as_ref().map(|p| p.dequantized().map(Box::new)).transpose()?;
        Ok(Self { attn, mlp, per_layer, ..self.clone() })
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
            Some(Attended { mid, out, mut saved }) => {
                let input = || self.mixer_input(x, ctx)?.values();
                let normed = self.attn.needs_input().then(input).transpose()?;
                self.attn.restore(&mut saved, normed.as_ref(), ctx.whole())?;
                drop(normed);
                let mid = match (mid, &out, &self.attn_post) {
                    (Some(mid), ..) => mid,
                    (None, Some(a), Some(post)) => (x + post.forward(a)?)?,
                    _ => candle_core::bail!("{OTHER}"),
                };
                let needed = level >= Level::FeedForward || self.mlp.needs_input();
                let input = || {
                    let normed = self.input(&self.mlp_norm, &mid, ctx.room(self.mlp.fused_rank(x)))?;
                    gathered(normed, self.mlp.sequence_parallel(ctx), |all| self.mlp.fused_rank(all))
                };
                let normed = needed.then(input).transpose()?;
                (mid, normed, (out, saved))
            }
        };
        let wants_output = self.mlp_post.is_some() && kept.mlp_out.is_none();
        let (mlp_out, mlp) = match normed {
            Some(normed) => self.mlp.restore(kept.mlp, &normed, self.mlp.context(ctx), wants_output)?,
            None => (None, kept.mlp),
        };
        let mlp_out = mlp_out.map(|m| scattered(m, self.mlp.sequence_parallel(ctx))).transpose()?;
        let mlp_out = kept.mlp_out.or(mlp_out);
        let per_layer = self.inputs_again(kept.per_layer, &mid, mlp_out.as_ref(), ctx)?;
        let (out, saved) = attn;
        let attn = Some(Attended { mid: Some(mid), out, saved });
        Ok(Saved { attn, mlp, mlp_out, per_layer })
    }

    /// Rebuilds the activations of the layer's inputs, if it has them.
    fn inputs_again(
        &self,
        kept: Option<Box<per_layer::Saved>>,
        mid: &Tensor,
        mlp_out: Option<&Tensor>,
        ctx: &Context,
    ) -> Result<Option<Box<per_layer::Saved>>> {
        let Some(inputs) = &self.per_layer else { return Ok(None) };
        let x = || match (&self.mlp_post, mlp_out) {
            (Some(post), Some(m)) => mid + post.forward(m)?,
            _ => candle_core::bail!("{OTHER}"),
        };
        match kept {
            None => Ok(Some(Box::new(inputs.recompute(&x()?, ctx)?))),
            Some(mut saved) => {
                if inputs.needs_input() {
                    inputs.restore(&mut saved, &x()?);
                }
                Ok(Some(saved))
            }
        }
    }

    /// The input of a half, with `rank` spare columns if normalized.
    fn input(&self, norm: &Option<Norm>, x: &Tensor, rank: usize) -> Result<Padded> {
        match norm {
            Some(norm) => norm.forward_padded(x, rank),
            None => Padded::of(x),
        }
    }

    /// The input of the mixer, with the tokens of all tensor-parallel ranks.
    fn mixer_input(&self, x: &Tensor, ctx: &Context) -> Result<Padded> {
        let normed = self.input(&self.attn_norm, x, ctx.room(self.attn.fused_rank(x)))?;
        gathered(normed, ctx.sequence_parallel.as_deref(), |all| self.attn.fused_rank(all))
    }

    /// Attention half: returns the residual sum, the input of the feed-forward part, and the saved activations
    /// with attention's output, if normalized.
    fn attend(
        &self,
        x: &Tensor,
        ctx: &Context,
        cache: Option<&mut mixer::Cache>,
    ) -> Result<(Tensor, Padded, (Option<Tensor>, mixer::Saved))> {
        let normed = self.mixer_input(x, ctx)?;
        let (a, attn) = self.attn.forward(&normed, ctx.whole(), cache)?;
        drop(normed);
        let a = scattered(a, ctx.sequence_parallel.as_deref())?;
        let (a, out) = match &self.attn_post {
            Some(post) => (post.forward(&a)?, Some(a)),
            None => (a, None),
        };
        let (mid, normed) = match &self.mlp_norm {
            Some(norm) => norm.forward_add(x, a, ctx.room(self.mlp.fused_rank(x)))?,
            None => {
                let mid = (x + a)?;
                (mid.clone(), Padded::of(&mid)?)
            }
        };
        let normed = gathered(normed, self.mlp.sequence_parallel(ctx), |all| self.mlp.fused_rank(all))?;
        Ok((mid, normed, (out, attn)))
    }

    /// Spare columns for the gradient of the layer's output: see [`Linear::fused_rank_back`].
    pub fn fused_rank_back(&self, like: &Tensor, ctx: &Context) -> usize {
        if self.mlp_post.is_none() { ctx.room(self.mlp.fused_rank_back(like, ctx)) } else { 0 }
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
        let (mid, normed, (out, saved)) = self.attend(x, ctx, cache)?;
        let (m, mlp) = self.mlp.forward(&normed, self.mlp.context(ctx), replay)?;
        drop(normed);
        let m = scattered(m, self.mlp.sequence_parallel(ctx))?;
        let (m, mlp_out) = match &self.mlp_post {
            Some(post) => (post.forward(&m)?, Some(m)),
            None => (m, None),
        };
        let (y, per_layer) = self.finish((&mid + m)?, ctx)?;
        let attn = Some(Attended { mid: Some(mid), out, saved });
        Ok((y, Saved { attn, mlp, mlp_out, per_layer }))
    }

    /// The layer's output from the residual stream after the feed-forward part: with the layer's inputs, times the
    /// factor.
    fn finish(&self, x: Tensor, ctx: &Context) -> Result<(Tensor, Option<Box<per_layer::Saved>>)> {
        let (x, saved) = match &self.per_layer {
            None => (x, None),
            Some(inputs) => {
                let (y, saved) = inputs.forward(&x, ctx)?;
                (y, Some(Box::new(saved)))
            }
        };
        Ok((self.scaled(x)?, saved))
    }

    /// `x` times the factor on the output.
    fn scaled(&self, x: Tensor) -> Result<Tensor> {
        match &self.scalar {
            None => Ok(x),
            Some(s) => x.broadcast_mul(&s.value.to_dtype(x.dtype())?),
        }
    }

    /// Backward pass of [`Layer::finish`], if it does anything.
    fn finish_back(
        &self,
        saved: Option<Box<per_layer::Saved>>,
        dy: &Padded,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
    ) -> Result<Option<Padded>> {
        if self.scalar.is_none() && self.per_layer.is_none() {
            return Ok(None);
        }
        let dy = self.scaled(dy.values()?)?;
        let dx = match (&self.per_layer, saved) {
            (None, _) => dy,
            (Some(inputs), Some(saved)) => inputs.backward(*saved, &dy, ctx, accum)?,
            (Some(_), None) => candle_core::bail!("{OTHER}"),
        };
        Ok(Some(Padded::of(&dx)?))
    }

    /// Backward pass: returns the gradient of the input `x`, with `rank` spare columns. `balance` adds the
    /// gradients of the router losses.
    pub fn backward(
        &self,
        (x, s): (&Tensor, Saved),
        dy: &Padded,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
        balance: Option<&Balance>,
        rank: usize,
    ) -> Result<Padded> {
        let Some(Attended { mid: Some(mid), out, saved }) = s.attn else { candle_core::bail!("{OTHER}") };
        let finished = self.finish_back(s.per_layer, dy, ctx, accum)?;
        let dy = finished.as_ref().unwrap_or(dy);
        let d_mid = {
            let before = post_back(&self.mlp_post, s.mlp_out, dy, accum)?;
            let (sequence_parallel, context) = (self.mlp.sequence_parallel(ctx), self.mlp.context(ctx));
            let of = |all: &Tensor| self.mlp.fused_rank_back(all, context);
            let all = gathered(before.as_ref().unwrap_or(dy).clone(), sequence_parallel, of)?;
            drop(before);
            let dn = self.mlp.backward((&mid, s.mlp), &all, context, accum, balance)?;
            drop(all);
            let dn = scattered(dn, sequence_parallel)?;
            let rank = if self.attn_post.is_none() { self.attn.fused_rank_back(&dn, ctx) } else { 0 };
            let rank = ctx.room(rank);
            add_back(&self.mlp_norm, &mid, dn, dy, rank, accum)?
        };
        drop(mid);
        let before = post_back(&self.attn_post, out, &d_mid, accum)?;
        let of = |all: &Tensor| self.attn.fused_rank_back(all, ctx.whole());
        let all = gathered(before.as_ref().unwrap_or(&d_mid).clone(), ctx.sequence_parallel.as_deref(), of)?;
        drop(before);
        let dn = self.attn.backward(saved, &all, ctx.whole(), accum)?;
        drop(all);
        let dn = scattered(dn, ctx.sequence_parallel.as_deref())?;
        add_back(&self.attn_norm, x, dn, &d_mid, rank, accum)
    }
}

/// Rows of all tokens of a half, from this rank's rows; with `room` spare columns if gathered.
fn gathered(
    own: Padded,
    sequence_parallel: Option<&SequenceParallel<'_>>,
    room: impl Fn(&Tensor) -> usize,
) -> Result<Padded> {
    let Some(sequence_parallel) = sequence_parallel else { return Ok(own) };
    let all = sequence_parallel.gather(&own.values()?)?;
    drop(own);
    Padded::beside_room(&all, room(&all))
}

/// Rows of this rank's tokens, from a half's output of all tokens.
fn scattered(all: Tensor, sequence_parallel: Option<&SequenceParallel<'_>>) -> Result<Tensor> {
    match sequence_parallel {
        Some(sequence_parallel) => sequence_parallel.scatter(all),
        None => Ok(all),
    }
}

/// Gradient before the norm of a half's output `out`, if it has one.
fn post_back(
    norm: &Option<Norm>,
    out: Option<Tensor>,
    dy: &Padded,
    accum: &GradAccumulator<'_>,
) -> Result<Option<Padded>> {
    match (norm, out) {
        (None, _) => Ok(None),
        (Some(norm), Some(out)) => Ok(Some(Padded::of(&norm.backward(&out, &dy.values()?, accum)?)?)),
        (Some(_), None) => candle_core::bail!("{OTHER}"),
    }
}

/// Gradient of a half's input `x`: through the norm, if any, and the residual stream's `dy`.
fn add_back(
    norm: &Option<Norm>,
    x: &Tensor,
    dn: Tensor,
    dy: &Padded,
    rank: usize,
    accum: &GradAccumulator<'_>,
) -> Result<Padded> {
    match norm {
        Some(norm) => norm.backward_add(x, &dn, dy, rank, accum),
        None => Padded::of(&(dn + dy.values()?)?),
    }
}
