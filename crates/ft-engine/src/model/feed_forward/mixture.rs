//! Passes of a mixture.

use super::mlp::{self, Mlp};
use super::shared::{Shared, SharedSaved};
use super::types::{GroupedCache, Mixture, OTHER, Saved, SavedExperts};
use crate::model::linear::Linear;
use crate::model::pass::batch::Context;
use crate::model::pass::sink::Sink;
use candle_core::Result;
use ft_kernels::dispatch::{self, ExpertRows, Groups};
use ft_kernels::padded::Padded;
use ft_kernels::route::{self, Balance, RouterOutput};
use ft_kernels::tensor::On;
use ft_kernels::{Tensor, upcast};
use std::borrow::Cow;
use std::sync::Arc;

impl Mixture {
    /// Builds a mixture; `copies` has the number of identical experts per entry: 1 except in a plan.
    pub fn new(
        router: Linear,
        (experts, copies): (Vec<Mlp>, Vec<usize>),
        shared: Option<Shared>,
        top_k: usize,
        normalise: bool,
    ) -> Self {
        Self { router, experts, copies, shared, top_k, normalise, grouped: Arc::default() }
    }

    /// A copy with dequantized 4-bit matrices of the experts with tokens.
    pub fn dequantized(&self, groups: &Groups, on: On<'_>) -> Result<Self> {
        // Experts computed together have no runs here: grouped products dequantize on the fly.
        let (mut experts, mut grouped) = (self.experts.clone(), Arc::clone(&self.grouped));
        for run in groups.runs() {
            experts[run.expert] = groups.times(&run, on, || self.experts[run.expert].dequantized())?;
            grouped = Arc::default();
        }
        let shared = self.shared.as_ref().map(|s| {
            Ok::<_, candle_core::Error>(Shared { mlp: s.mlp.dequantized()?, gate: s.gate.dequantized()? })
        });
        Ok(Self {
            router: self.router.dequantized()?,
            experts,
            shared: shared.transpose()?,
            copies: self.copies.clone(),
            grouped,
            ..*self
        })
    }

    /// The routed experts.
    pub fn experts(&self) -> &[Mlp] {
        &self.experts
    }

    /// All linears, in the order of the forward pass.
    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        let shared = self.shared.iter().flat_map(|s| s.mlp.linears().chain([&s.gate]));
        [&self.router].into_iter().chain(self.experts.iter().flat_map(Mlp::linears)).chain(shared)
    }

    /// As [`Mixture::linears`], to change them. Detaches this copy from the others' pointer tables.
    pub fn linears_mut(&mut self) -> Vec<&mut Linear> {
        self.grouped = GroupedCache::default();
        let shared = self.shared.iter_mut().flat_map(|s| s.mlp.linears_mut().chain([&mut s.gate]));
        let experts = self.experts.iter_mut().flat_map(Mlp::linears_mut);
        [&mut self.router].into_iter().chain(experts).chain(shared).collect()
    }

    /// Forward pass: `[t, d]` -> `[t, d]`. `replay` is the routing of an earlier pass over the same tokens.
    pub fn forward(&self, x: &Tensor, ctx: &Context, replay: Option<Arc<Groups>>) -> Result<(Tensor, Saved)> {
        let s = self.recompute(x, ctx, replay)?;
        let open = |s: &SharedSaved| s.out.broadcast_mul(&s.open.to_dtype(x.dtype())?);
        let shared = s.shared.as_ref().map(open).transpose()?;
        let y = match (&s.experts, s.groups.sorted()) {
            (SavedExperts::Grouped(e), Some(sorted)) => {
                sorted.combine(&e.out, Some(&s.gates), shared.as_ref())?
            }
            (SavedExperts::PerExpert(_, out), None) => {
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
        if self.is_grouped(x.device(), x.dtype()) {
            return self.recompute_grouped(x, ctx, &logits, router, replay);
        }
        let (probs, lse) = route::softmax(&logits)?;
        let groups = match replay {
            Some(g) => g,
            None => {
                let of = |l: &Linear| {
                    let rank = l.lora.as_ref().and_then(|l| l.a.dim(0).ok()).unwrap_or(0);
                    rank + l.weight.dims().map_or(0, |(o, i)| if l.needs_input() { o + i } else { 0 })
                };
                let kept = |e: usize| self.experts[e].linears().map(of).sum();
                Arc::new(Groups::choose(&probs, self.top_k, &self.copies, kept)?)
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
        Ok(Saved {
            groups,
            probs,
            lse,
            gates,
            router,
            experts: SavedExperts::PerExpert(experts, out),
            shared,
        })
    }

    /// Whether the backward pass needs the input.
    pub fn needs_input(&self) -> bool {
        self.linears().any(Linear::needs_input)
    }

    /// Restores the input `x` and the expert inputs gathered from it.
    pub fn restore(&self, s: &mut Saved, x: &Tensor) -> Result<()> {
        if self.router.needs_input() {
            s.router.x = Some(upcast(x)?);
        }
        if self.experts.iter().any(Mlp::needs_input) {
            match (&mut s.experts, s.groups.sorted()) {
                (SavedExperts::Grouped(saved), Some(sorted)) => saved.x = Some(sorted.gather(x)?),
                (SavedExperts::PerExpert(saved, _), None) => {
                    let rows = s.groups.gather(x)?;
                    for (run, s) in s.groups.runs().iter().zip(saved) {
                        let x = rows.narrow(0, run.start, run.rows)?;
                        self.experts[run.expert].restore(s, &x);
                    }
                }
                _ => candle_core::bail!("{OTHER}"),
            }
        }
        if let (Some(shared), Some(s)) = (&self.shared, &mut s.shared) {
            shared.mlp.restore(&mut s.mlp, x);
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
        if matches!(s.experts, SavedExperts::Grouped(_)) {
            return self.backward_grouped(s, dy, ctx, sink, balance);
        }
        let SavedExperts::PerExpert(saved, out) = s.experts else { candle_core::bail!("{OTHER}") };
        let groups = &s.groups;
        let dgates = groups.dots(&out, dy)?;
        drop(out);
        let runs = groups.runs();
        for (e, _) in groups.counts().enumerate().filter(|(_, n)| *n == 0) {
            self.experts[e].linears().flat_map(Linear::slots).for_each(|slot| sink.touch(slot));
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
    fn context<'a, 'b>(
        &self,
        ctx: &'a Context<'b>,
        groups: &Groups,
        run: &ExpertRows,
    ) -> Cow<'a, Context<'b>> {
        let mut linears = self.experts[run.expert].linears();
        let drops = linears.any(|l| l.lora.as_ref().is_some_and(|l| l.dropout > 0.0));
        match ctx.dropout {
            Some(_) if drops && run.alike == 1.0 => Cow::Owned(ctx.for_tokens(groups.tokens_of(run))),
            _ => Cow::Borrowed(ctx),
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
