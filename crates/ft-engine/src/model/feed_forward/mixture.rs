//! Passes of a mixture.

use super::expert_parallel::{self, RowSpec};
use super::mlp::{self, Mlp};
use super::shared::{Shared, SharedSaved};
use super::types::{Gates, GroupedCache, Mixture, OTHER, Routing, Saved, SavedExperts};
use crate::model::delta::Parameter;
use crate::model::linear::Linear;
use crate::model::pass::batch::Context;
use crate::model::pass::grad_accumulator::GradAccumulator;
use candle_core::Result;
use ft_kernels::dispatch::{self, ExpertRows, Groups};
use ft_kernels::padded::Padded;
use ft_kernels::route::{self, Balance, RouterOutput};
use ft_kernels::tensor::On;
use ft_kernels::{Tensor, upcast};
use std::borrow::Cow;
use std::sync::Arc;

/// Inputs of a mixture `[t, d]`.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    pub experts: &'a Tensor,
    /// The router's in f32, if it has one of its own.
    pub router: Option<&'a Tensor>,
}

impl<'a> Inputs<'a> {
    /// The same for experts and router.
    pub fn both(x: &'a Tensor) -> Self {
        Self { experts: x, router: None }
    }

    fn router(self) -> Result<Tensor> {
        self.router.map_or_else(|| upcast(self.experts), |x| Ok(x.clone()))
    }
}

/// Factors `[t, k]` of the chosen experts `[t, k]`, f32.
fn factors_of(factors: &Parameter, chosen: &Tensor) -> Result<Tensor> {
    upcast(&factors.value)?.index_select(&chosen.flatten_all()?, 0)?.reshape(chosen.shape())
}

/// Rows of `x` `[t, d]`, sorted by expert.
pub(super) fn gather(groups: &Groups, x: &Tensor) -> Result<Tensor> {
    match groups.sorted() {
        Some(sorted) => sorted.gather(x),
        None => groups.gather(x),
    }
}

impl Mixture {
    /// A mixture with all experts on this rank, without a shared expert; `copies` has the number of identical experts
    /// per entry: 1 except in a plan.
    pub fn new(
        router: Linear,
        (experts, copies): (Vec<Mlp>, Vec<usize>),
        top_k: usize,
        normalise: bool,
    ) -> Self {
        let (shared, factors, owned, grouped) = (None, None, None, Arc::default());
        Self { router, experts, copies, shared, factors, top_k, normalise, owned, grouped }
    }

    /// A copy with dequantized 4-bit matrices of the experts with tokens.
    pub fn dequantized(&self, groups: &Groups, on: On<'_>) -> Result<Self> {
        // Experts computed together have no runs here: grouped products dequantize on the fly.
        let (mut experts, mut grouped) = (self.experts.clone(), Arc::clone(&self.grouped));
        let groups = groups.computed();
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
            factors: self.factors.clone(),
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
    pub fn forward(
        &self,
        x: Inputs<'_>,
        ctx: &Context,
        replay: Option<Arc<Groups>>,
    ) -> Result<(Tensor, Saved)> {
        let mut s = self.enter(x, ctx, replay, true)?;
        let x = x.experts;
        let open = |s: &SharedSaved| s.out.broadcast_mul(&s.open.to_dtype(x.dtype())?);
        let (shared, gates) = (s.shared.as_ref().map(open).transpose()?, Some(&s.gates.factored));
        let out = match &s.experts {
            SavedExperts::Grouped(e) => e.out.as_ref(),
            SavedExperts::Dispatched(dispatched) => dispatched.out.as_ref(),
            SavedExperts::PerExpert(..) => None,
        };
        let y = match (s.groups.sorted(), out) {
            (Some(sorted), Some(out)) => sorted.combine(out, gates, shared.as_ref())?,
            _ => {
                let parts = match &s.experts {
                    SavedExperts::PerExpert(_, out) => out,
                    SavedExperts::Dispatched(dispatched) => &dispatched.parts(&s.groups)?,
                    SavedExperts::Grouped(_) => candle_core::bail!("{OTHER}"),
                };
                let y = s.groups.combine(parts, gates, x.dtype())?;
                shared.map_or(Ok(y.clone()), |shared| y + shared)?
            }
        };
        if let SavedExperts::Grouped(e) = &mut s.experts
            && !self.grouped_experts(x.dtype())?.reads_outputs()
        {
            e.out = None;
        }
        Ok((y, s))
    }

    /// Recomputes the saved activations: the forward pass without the final sum over experts, and without their outputs
    /// if the backward pass does not read them.
    pub fn recompute(&self, x: Inputs<'_>, ctx: &Context, replay: Option<Arc<Groups>>) -> Result<Saved> {
        self.enter(x, ctx, replay, false)
    }

    /// The forward pass up to the outputs of the experts; these only if `outputs` or the backward pass asks for them.
    fn enter(
        &self,
        x: Inputs<'_>,
        ctx: &Context,
        replay: Option<Arc<Groups>>,
        outputs: bool,
    ) -> Result<Saved> {
        let (logits, router) = self.router.forward(&x.router()?, ctx)?;
        let x = x.experts;
        let is_grouped = self.is_grouped(x.device(), x.dtype());
        let (groups, probs, lse, gates) = if is_grouped {
            self.route_on_device(&logits, x.dtype(), replay)?
        } else {
            self.route(&logits, replay)?
        };
        if groups.sorted().is_some() != is_grouped {
            candle_core::bail!("{OTHER}");
        }
        let rows = gather(&groups, x)?;
        let shared = || self.shared.as_ref().map(|s| s.saved(x, ctx)).transpose();
        let (experts, shared) = match groups.sorted() {
            _ if self.owned.is_some() => {
                // A device computes the shared expert while the host waits for counts.
                let shared = shared()?;
                let saved = self.forward_dispatched(&groups, rows, ctx, RowSpec::of(x)?)?;
                (SavedExperts::Dispatched(Box::new(saved)), shared)
            }
            Some(sorted) => {
                let saved = self.grouped_experts(x.dtype())?.forward(rows, ctx, sorted, outputs)?;
                (SavedExperts::Grouped(Box::new(saved)), shared()?)
            }
            None => {
                let (out, saved) =
                    self.each_forward(&groups, &rows, |run| self.context(ctx, &groups, run))?;
                (SavedExperts::PerExpert(saved, out), shared()?)
            }
        };
        Ok(Saved { groups, probs, lse, gates, router, experts, shared })
    }

    /// Routing on the host.
    fn route(&self, logits: &Tensor, replay: Option<Arc<Groups>>) -> Result<Routing> {
        let (probs, lse) = route::softmax(logits)?;
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
        let gates = self.factored(gates, || groups.chosen(&probs))?;
        Ok((groups, probs, lse, gates))
    }

    /// Experts one by one, or side by side, on `rows` sorted by expert: outputs and saved activations by run.
    pub(super) fn each_forward<'a>(
        &self,
        groups: &Groups,
        rows: &Tensor,
        context: impl Fn(&ExpertRows) -> Cow<'a, Context<'a>> + Sync,
    ) -> Result<(Vec<Tensor>, Vec<mlp::Saved>)> {
        let one = |run: ExpertRows| -> Result<_> {
            let x = Padded::of(&rows.narrow(0, run.start, run.rows)?)?;
            self.experts[run.expert].forward(&x, &context(&run))
        };
        let (runs, on) = (groups.runs(), rows.device());
        let one = |run: ExpertRows| groups.times(&run, on, || one(run));
        let done: Vec<(Tensor, mlp::Saved)> = if dispatch::side_by_side(groups.busy(), on) {
            dispatch::each(on, runs, |r| r.rows, one)?
        } else {
            runs.into_iter().map(one).collect::<Result<_>>()?
        };
        Ok(done.into_iter().unzip())
    }

    /// Backward pass of [`Mixture::each_forward`]; `dout` are gradients of the outputs of a run.
    pub(super) fn each_backward<'a>(
        &self,
        (groups, saved): (&Groups, Vec<mlp::Saved>),
        dout: impl Fn(&ExpertRows) -> Result<Tensor> + Sync,
        context: impl Fn(&ExpertRows) -> Cow<'a, Context<'a>> + Sync,
        on: On<'_>,
        accum: &GradAccumulator<'_>,
    ) -> Result<Vec<Tensor>> {
        for (e, _) in groups.counts().enumerate().filter(|(_, n)| *n == 0) {
            self.experts[e].linears().flat_map(Linear::slots).for_each(|slot| accum.touch(slot));
        }
        let work: Vec<(ExpertRows, mlp::Saved)> = groups.runs().into_iter().zip(saved).collect();
        let one = |(run, saved): (ExpertRows, mlp::Saved), accum: &GradAccumulator<'_>| -> Result<Tensor> {
            groups.times(&run, on, || {
                self.experts[run.expert].backward(saved, &Padded::of(&dout(&run)?)?, &context(&run), accum)
            })
        };
        if !dispatch::side_by_side(groups.busy(), on) {
            return work.into_iter().map(|w| one(w, accum)).collect();
        }
        let one = |w| {
            let own = GradAccumulator::collecting();
            Ok((one(w, &own)?, own.collected()))
        };
        let done = dispatch::each(on, work, |(r, _)| r.rows, one)?;
        let (dx, later): (Vec<Tensor>, Vec<_>) = done.into_iter().unzip();
        accum.add_all(later.into_iter().flatten())?;
        Ok(dx)
    }

    /// Whether the backward pass needs the input. Experts of other ranks may.
    pub fn needs_input(&self) -> bool {
        self.owned.is_some() || self.linears().any(Linear::needs_input)
    }

    /// Restores the inputs, and the experts' inputs gathered from them.
    pub fn restore(&self, s: &mut Saved, x: Inputs<'_>, ctx: &Context) -> Result<()> {
        if self.router.needs_input() {
            s.router.x = Some(x.router()?);
        }
        let x = x.experts;
        if self.owned.is_some() || self.experts.iter().any(Mlp::needs_input) {
            let rows = gather(&s.groups, x)?;
            self.restore_experts(&mut s.experts, &s.groups, rows, ctx)?;
        }
        if let (Some(shared), Some(s)) = (&self.shared, &mut s.shared) {
            shared.mlp.restore(&mut s.mlp, x);
            s.gate.x = shared.gate.input(x);
        }
        Ok(())
    }

    /// Restores the inputs of the experts from rows sorted by expert.
    pub(super) fn restore_experts(
        &self,
        saved: &mut SavedExperts,
        groups: &Groups,
        rows: Tensor,
        ctx: &Context,
    ) -> Result<()> {
        match saved {
            SavedExperts::Dispatched(dispatched) => return self.restore_dispatched(dispatched, rows, ctx),
            SavedExperts::Grouped(saved) => saved.x = Some(rows),
            SavedExperts::PerExpert(saved, _) => {
                for (run, saved) in groups.runs().iter().zip(saved) {
                    self.experts[run.expert].restore(saved, &rows.narrow(0, run.start, run.rows)?);
                }
            }
        }
        Ok(())
    }

    /// Backward pass: returns the gradient of the input. `balance` adds the gradients of the router losses.
    pub fn backward(
        &self,
        s: Saved,
        dy: &Tensor,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
        balance: Option<&Balance>,
    ) -> Result<Tensor> {
        let (dx, of_router) = self.backward_apart(s, dy, ctx, accum, balance)?;
        dx + of_router.to_dtype(dy.dtype())?
    }

    /// As [`Mixture::backward`]: the gradients of the experts' input, and of the router's in f32.
    pub(super) fn backward_apart(
        &self,
        s: Saved,
        dy: &Tensor,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
        balance: Option<&Balance>,
    ) -> Result<(Tensor, Tensor)> {
        if s.groups.sorted().is_some() {
            return self.backward_grouped(s, dy, ctx, accum, balance);
        }
        let groups = Arc::clone(&s.groups);
        let (dgates, dx) = match s.experts {
            SavedExperts::PerExpert(saved, out) => {
                let dgates = groups.dots(&out, dy)?;
                drop(out);
                let dout = |run: &ExpertRows| groups.gather_scaled(dy, &s.gates.factored, run);
                let context = |run: &ExpertRows| self.context(ctx, &groups, run);
                (dgates, self.each_backward((&groups, saved), dout, context, dy.device(), accum)?)
            }
            SavedExperts::Dispatched(dispatched) => {
                let parts = dispatched.parts(&groups)?;
                let dgates = groups.dots(&parts, dy)?;
                drop(parts);
                let rows = groups.gather_scaled(dy, &s.gates.factored, &groups.whole())?;
                #[cfg(test)]
                let rows = match expert_parallel::FAULT.get() {
                    Some(expert_parallel::Fault::Gates) => groups.gather(dy)?,
                    _ => rows,
                };
                let dx = self.backward_dispatched(*dispatched, rows, ctx, accum)?;
                (dgates, expert_parallel::parts(&dx, &groups)?)
            }
            SavedExperts::Grouped(_) => candle_core::bail!("{OTHER}"),
        };
        let mut dx = groups.combine(&dx, None, dy.dtype())?;
        if let (Some(shared), Some(saved)) = (&self.shared, s.shared) {
            dx = (dx + shared.backward(saved, dy, ctx, accum)?)?;
        }
        let dgates = self.factors_back(&s.gates, dgates, || groups.chosen(&s.probs), accum)?;
        let routed = RouterOutput {
            probs: &s.probs,
            lse: &s.lse,
            gates: &s.gates.plain,
            chosen: &groups.expert,
            normalise: self.normalise,
        };
        let dlogits = route::backward(&routed, &dgates, balance)?;
        Ok((dx, self.router.backward(&s.router, &dlogits, ctx, accum, None)?))
    }

    /// Gates times the factors of their experts; `chosen` `[t, k]` are these.
    pub(super) fn factored(&self, plain: Tensor, chosen: impl FnOnce() -> Result<Tensor>) -> Result<Gates> {
        let factored = match &self.factors {
            None => plain.clone(),
            Some(f) => (&plain * factors_of(f, &chosen()?)?)?,
        };
        Ok(Gates { plain, factored })
    }

    /// Gradient of the gates as routed, from the gradient of the gates with factors.
    pub(super) fn factors_back(
        &self,
        gates: &Gates,
        dfactored: Tensor,
        chosen: impl FnOnce() -> Result<Tensor>,
        accum: &GradAccumulator<'_>,
    ) -> Result<Tensor> {
        let Some(f) = &self.factors else { return Ok(dfactored) };
        let chosen = chosen()?;
        if let Some(slot) = f.slot {
            let own = (&gates.plain * &dfactored)?;
            accum.column_sums(slot, &route::by_expert(&own, &chosen, f.value.elem_count())?)?;
        }
        dfactored * factors_of(f, &chosen)?
    }

    /// Context for the rows of one expert: dropout depends on the token.
    fn context<'a, 'b>(
        &self,
        ctx: &'a Context<'b>,
        groups: &Groups,
        run: &ExpertRows,
    ) -> Cow<'a, Context<'b>> {
        match ctx.dropout {
            Some(_) if self.drops(run.expert) && run.alike == 1.0 => {
                Cow::Owned(ctx.for_tokens(groups.tokens_of(run)))
            }
            _ => Cow::Borrowed(ctx),
        }
    }

    /// Whether an expert has dropout.
    pub(super) fn drops(&self, expert: usize) -> bool {
        let mut linears = self.experts[expert].linears();
        linears.any(|l| l.lora.as_ref().is_some_and(|l| l.dropout > 0.0))
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
