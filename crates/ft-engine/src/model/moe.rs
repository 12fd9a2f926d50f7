//! Mixture of experts: a router selects the top `k` experts per token; expert outputs are summed, weighted
//! by gates.
//!
//! The router always computes in f32. Experts are SwiGLUs on the rows routed to them; an expert without
//! tokens costs nothing. On the CPU, many experts run in parallel, one thread per expert; a few run one
//! after another, with all threads in every product.
//!
//! Routing decisions are a value ([`Groups`]); recompute reuses them.
//!
//! On CUDA, routing stays on the device and all experts are computed together ([`super::experts`]). Experts
//! unsupported by grouped products (DoRA, for example) run one after another, with routing lists on the
//! host.
//!
//! Some families have a shared expert ([`Shared`]): applied to every token and scaled by a sigmoid gate.

use super::batch::Context;
use super::experts::{self, Banks};
use super::linear::{self, Linear};
use super::mlp::{self, Mlp};
use super::sink::Sink;
use candle_core::Result;
use ft_kernels::Tensor;
use ft_kernels::dispatch::{self, ExpertRows, Groups, Sorted};
use ft_kernels::padded::Padded;
use ft_kernels::route::cuda::Routed;
use ft_kernels::route::{self, Balance, RouterOutput};
use ft_kernels::swiglu;
use ft_kernels::tensor::On;
use ft_kernels::upcast;
use std::borrow::Cow;
use std::sync::{Arc, Mutex};

/// Router and experts of one layer.
#[derive(Clone, Debug)]
pub struct Mixture {
    /// `[d]` -> `[e]`.
    pub router: Linear,
    /// Experts. Fixed after construction: `banks` caches pointers to their weights.
    pub(super) experts: Vec<Mlp>,
    /// Number of identical experts represented by each entry of `experts`; 1 except in a plan.
    pub(super) alike: Vec<usize>,
    pub shared: Option<Shared>,
    /// Experts per token.
    pub top_k: usize,
    /// Whether a token's gates are normalized to sum to one.
    pub normalise: bool,
    /// Pointer tables for the grouped products, built on first use.
    pub(super) banks: Arc<Mutex<Made>>,
}

/// Grouped experts, with the value of [`moves`](crate::kernel::vacant::moves) they were built at: weights
/// may move later.
pub(super) type Made = Option<(u64, Arc<Banks>)>;

/// Shared expert: `sigmoid(gate(x)) * mlp(x)`.
#[derive(Clone, Debug)]
pub struct Shared {
    /// `[d]` -> `[d]`.
    pub mlp: Mlp,
    /// `[d]` -> `[1]`.
    pub gate: Linear,
}

/// Saved activations of a shared expert.
#[derive(Debug)]
pub(super) struct SharedSaved {
    mlp: mlp::Saved,
    gate: linear::Saved,
    /// Output `[t, d]` of the SwiGLU, before the gate.
    out: Tensor,
    /// `sigmoid(gate(x))` `[t, 1]`, f32.
    open: Tensor,
}

impl Shared {
    /// Computes the expert's output and gate, without their product.
    pub(super) fn saved(&self, x: &Tensor, ctx: &Context) -> Result<SharedSaved> {
        let (out, mlp) = self.mlp.forward(&Padded::of(x)?, ctx)?;
        let (logit, gate) = self.gate.forward(x, ctx)?;
        let open = swiglu::sigmoid(&upcast(&logit)?)?;
        Ok(SharedSaved { mlp, gate, out, open })
    }

    /// Backward pass: returns the gradient of the input.
    pub(super) fn backward(
        &self,
        s: SharedSaved,
        dy: &Tensor,
        ctx: &Context,
        sink: &Sink<'_>,
    ) -> Result<Tensor> {
        let slope = (&s.open * (1.0 - &s.open)?)?;
        let dlogit = ((upcast(dy)? * upcast(&s.out)?)?.sum_keepdim(1)? * slope)?.to_dtype(dy.dtype())?;
        drop(s.out);
        let dout = dy.broadcast_mul(&s.open.to_dtype(dy.dtype())?)?;
        let dx = self.mlp.backward(s.mlp, &Padded::of(&dout)?, ctx, sink)?;
        self.gate.backward(&s.gate, &dlogit, ctx, sink, Some(dx))
    }
}

/// Error for a bug in the walk.
pub(super) const OTHER: &str = "a mixture goes by the routing of another device, or of other adapters";

/// Saved activations, including the inputs of the router losses.
#[derive(Debug)]
pub struct Saved {
    /// Routing decisions.
    pub groups: Arc<Groups>,
    /// Router probabilities `[t, e]`, f32.
    pub probs: Tensor,
    /// logsumexp of the router's logits `[t]`, f32.
    pub lse: Tensor,
    pub(super) gates: Tensor,
    pub(super) router: linear::Saved,
    pub(super) experts: Experts,
    pub(super) shared: Option<SharedSaved>,
}

/// Saved activations of the experts.
#[derive(Debug)]
pub(super) enum Experts {
    /// One entry per expert with tokens, and expert outputs `[rows, d]` before the gates.
    Each(Vec<mlp::Saved>, Vec<Tensor>),
    /// Of all experts, computed together.
    Together(Box<experts::Saved>),
}

impl Saved {
    /// Drops the inputs; [`Mixture::again`] restores them.
    pub fn without_input(&mut self) {
        self.router.x = None;
        match &mut self.experts {
            Experts::Each(saved, _) => saved.iter_mut().for_each(mlp::Saved::without_input),
            Experts::Together(saved) => saved.x = None,
        }
        if let Some(shared) = &mut self.shared {
            shared.mlp.without_input();
            shared.gate.x = None;
        }
    }

    /// Routing results on the device; `None` if routing is on the host.
    pub fn routed(&self) -> Option<(&Sorted, Routed)> {
        let sorted = self.groups.sorted()?;
        let (chosen, probs) = (sorted.chosen.clone(), self.probs.clone());
        Some((sorted, Routed { chosen, probs, lse: self.lse.clone(), gates: self.gates.clone() }))
    }
}

impl Mixture {
    /// Builds a mixture; `alike` has the number of identical experts per entry: 1 except in a plan.
    pub fn new(
        router: Linear,
        (experts, alike): (Vec<Mlp>, Vec<usize>),
        shared: Option<Shared>,
        top_k: usize,
        normalise: bool,
    ) -> Self {
        Self { router, experts, alike, shared, top_k, normalise, banks: Arc::default() }
    }

    /// A copy with dequantized 4-bit matrices of the experts with tokens.
    pub fn dequantized(&self, groups: &Groups, on: On<'_>) -> Result<Self> {
        // Experts computed together have no runs here: grouped products dequantize on the fly.
        let (mut experts, mut banks) = (self.experts.clone(), Arc::clone(&self.banks));
        for run in groups.runs() {
            experts[run.expert] = groups.times(&run, on, || self.experts[run.expert].dequantized())?;
            banks = Arc::default();
        }
        let shared = self.shared.as_ref().map(|s| {
            Ok::<_, candle_core::Error>(Shared { mlp: s.mlp.dequantized()?, gate: s.gate.dequantized()? })
        });
        Ok(Self {
            router: self.router.dequantized()?,
            experts,
            shared: shared.transpose()?,
            alike: self.alike.clone(),
            banks,
            ..*self
        })
    }

    /// The routed experts.
    pub fn experts(&self) -> &[Mlp] {
        &self.experts
    }

    /// All linears, in the order of the forward pass.
    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        let shared = self.shared.iter().flat_map(|s| s.mlp.linears().into_iter().chain([&s.gate]));
        [&self.router].into_iter().chain(self.experts.iter().flat_map(Mlp::linears)).chain(shared)
    }

    /// Forward pass: `[t, d]` -> `[t, d]`. `replay` is the routing of an earlier pass over the same tokens.
    pub fn forward(&self, x: &Tensor, ctx: &Context, replay: Option<Arc<Groups>>) -> Result<(Tensor, Saved)> {
        let s = self.recompute(x, ctx, replay)?;
        let open = |s: &SharedSaved| s.out.broadcast_mul(&s.open.to_dtype(x.dtype())?);
        let shared = s.shared.as_ref().map(open).transpose()?;
        let y = match (&s.experts, s.groups.sorted()) {
            (Experts::Together(e), Some(sorted)) => {
                sorted.combine(&e.out, Some(&s.gates), shared.as_ref())?
            }
            (Experts::Each(_, out), None) => {
                let y = s.groups.combine(out, Some(&s.gates), x.dtype())?;
                shared.map_or(Ok(y.clone()), |shared| y + shared)?
            }
            _ => candle_core::bail!("{OTHER}"),
        };
        Ok((y, s))
    }

    /// Recomputes the saved activations: the forward pass without the final sum over experts.
    pub fn recompute(&self, x: &Tensor, ctx: &Context, replay: Option<Arc<Groups>>) -> Result<Saved> {
        let (logits, router) = self.router.forward(&upcast(x)?, ctx)?;
        if self.together(x.device(), x.dtype()) {
            return self.recompute_together(x, ctx, &logits, router, replay);
        }
        let (probs, lse) = route::softmax(&logits)?;
        let groups = match replay {
            Some(g) => g,
            None => {
                let of = |l: &Linear| {
                    let rank = l.lora.as_ref().and_then(|l| l.a.dim(0).ok()).unwrap_or(0);
                    rank + l.weight.dims().map_or(0, |(o, i)| if l.needs_input() { o + i } else { 0 })
                };
                let kept = |e: usize| self.experts[e].linears().into_iter().map(of).sum();
                Arc::new(Groups::choose(&probs, self.top_k, &self.alike, kept)?)
            }
        };
        let gates = route::gates(&probs, &groups.expert, self.top_k, self.normalise)?;
        let rows = groups.gather(x)?;
        let one = |run: ExpertRows| -> Result<_> {
            let ctx = self.context(ctx, &groups, &run);
            self.experts[run.expert].forward(&Padded::of(&rows.narrow(0, run.start, run.rows)?)?, &ctx)
        };
        let (runs, on) = (groups.runs(), x.device());
        let one = |run: ExpertRows| groups.times(&run, on, || one(run));
        let done: Vec<(Tensor, mlp::Saved)> = if dispatch::side_by_side(groups.busy(), on) {
            dispatch::each(on, runs, |r| r.rows, one)?
        } else {
            runs.into_iter().map(one).collect::<Result<_>>()?
        };
        let (out, experts): (Vec<Tensor>, Vec<mlp::Saved>) = done.into_iter().unzip();
        let shared = self.shared.as_ref().map(|s| s.saved(x, ctx)).transpose()?;
        Ok(Saved { groups, probs, lse, gates, router, experts: Experts::Each(experts, out), shared })
    }

    /// Whether the backward pass needs the input.
    pub fn needs_input(&self) -> bool {
        self.linears().any(Linear::needs_input)
    }

    /// Restores the input `x` and the expert inputs gathered from it.
    pub fn again(&self, s: &mut Saved, x: &Tensor) -> Result<()> {
        if self.router.needs_input() {
            s.router.x = Some(upcast(x)?);
        }
        if self.experts.iter().any(Mlp::needs_input) {
            match (&mut s.experts, s.groups.sorted()) {
                (Experts::Together(saved), Some(sorted)) => saved.x = Some(sorted.gather(x)?),
                (Experts::Each(saved, _), None) => {
                    let rows = s.groups.gather(x)?;
                    for (run, s) in s.groups.runs().iter().zip(saved) {
                        let x = rows.narrow(0, run.start, run.rows)?;
                        self.experts[run.expert].again(s, &x);
                    }
                }
                _ => candle_core::bail!("{OTHER}"),
            }
        }
        if let (Some(shared), Some(s)) = (&self.shared, &mut s.shared) {
            shared.mlp.again(&mut s.mlp, x);
            s.gate.x = shared.gate.input(x);
        }
        Ok(())
    }

    /// Backward pass: returns the gradient of the input. `balance` adds the gradients of the router losses.
    pub fn backward(
        &self,
        s: Saved,
        dy: &Tensor,
        ctx: &Context,
        sink: &Sink<'_>,
        balance: Option<&Balance>,
    ) -> Result<Tensor> {
        if matches!(s.experts, Experts::Together(_)) {
            return self.backward_together(s, dy, ctx, sink, balance);
        }
        let Experts::Each(saved, out) = s.experts else { candle_core::bail!("{OTHER}") };
        let groups = &s.groups;
        let dgates = groups.dots(&out, dy)?;
        drop(out);
        let runs = groups.runs();
        for (e, _) in groups.counts().enumerate().filter(|(_, n)| *n == 0) {
            self.experts[e].linears().into_iter().flat_map(Linear::slots).for_each(|slot| sink.touch(slot));
        }
        let work: Vec<(ExpertRows, mlp::Saved)> = runs.into_iter().zip(saved).collect();
        let on = dy.device();
        let one = |(run, saved): (ExpertRows, mlp::Saved), sink: &Sink<'_>| -> Result<Tensor> {
            groups.times(&run, on, || {
                let ctx = self.context(ctx, groups, &run);
                let dout = groups.gather_scaled(dy, &s.gates, &run)?;
                self.experts[run.expert].backward(saved, &Padded::of(&dout)?, &ctx, sink)
            })
        };
        let dx: Vec<Tensor> = if dispatch::side_by_side(groups.busy(), on) {
            let one = |w| {
                let own = Sink::collecting();
                Ok((one(w, &own)?, own.collected()))
            };
            let done = dispatch::each(on, work, |(r, _)| r.rows, one)?;
            let (dx, later): (Vec<Tensor>, Vec<_>) = done.into_iter().unzip();
            sink.add_all(later.into_iter().flatten())?;
            dx
        } else {
            work.into_iter().map(|w| one(w, sink)).collect::<Result<_>>()?
        };
        let mut dx = groups.combine(&dx, None, dy.dtype())?;
        if let (Some(shared), Some(saved)) = (&self.shared, s.shared) {
            dx = (dx + shared.backward(saved, dy, ctx, sink)?)?;
        }
        let routed = RouterOutput {
            probs: &s.probs,
            lse: &s.lse,
            gates: &s.gates,
            chosen: &groups.expert,
            normalise: self.normalise,
        };
        let dlogits = route::backward(&routed, &dgates, balance)?;
        let own = self.router.backward(&s.router, &dlogits, ctx, sink, None)?;
        dx + own.to_dtype(dy.dtype())?
    }

    /// Context for the rows of one expert: dropout depends on the token.
    fn context<'a>(&self, ctx: &'a Context, groups: &Groups, run: &ExpertRows) -> Cow<'a, Context> {
        let linears = self.experts[run.expert].linears();
        let drops = linears.iter().any(|l| l.lora.as_ref().is_some_and(|l| l.dropout > 0.0));
        match ctx.dropout {
            Some(_) if drops && run.alike == 1.0 => Cow::Owned(ctx.for_tokens(groups.tokens_of(run))),
            _ => Cow::Borrowed(ctx),
        }
    }
}

#[cfg(test)]
#[path = "moe_tests.rs"]
mod tests;
