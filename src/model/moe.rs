//! A mixture of experts: a router chooses `k` experts for each token, and their outputs are added, each times
//! its gate.
//!
//! The router computes in f32 whatever the compute dtype. Experts are ordinary SwiGLU blocks on the rows that
//! they were chosen for; an expert without tokens costs nothing. On the CPU, many experts run side by side, one
//! thread each; with few, one after the other with all threads in each product.
//!
//! What was decided is a value ([`Groups`]): a layer that is computed again takes it over.

use super::decoder::Context;
use super::linear::{self, Linear};
use super::mlp::{self, Mlp};
use super::sink::Sink;
use crate::kernel::group::{self, Groups, Run};
use crate::kernel::route::{self, Balance, Routed};
use candle_core::{DType, Result, Tensor};
use std::borrow::Cow;
use std::sync::Arc;

/// Router and experts of one layer.
#[derive(Clone, Debug)]
pub struct Mixture {
    /// [d] -> [e].
    pub router: Linear,
    /// Experts.
    pub experts: Vec<Mlp>,
    /// Experts a token.
    pub top_k: usize,
    /// Whether a token's gates are scaled to sum to one.
    pub normalise: bool,
}

/// What the backward pass needs, and what the losses on the router are computed from.
#[derive(Debug)]
pub struct Saved {
    /// Who goes where.
    pub groups: Arc<Groups>,
    /// Probabilities [t, e], f32.
    pub probs: Tensor,
    /// logsumexp of the router's logits [t], f32.
    pub lse: Tensor,
    gates: Tensor,
    router: linear::Saved,
    /// Of the experts that have tokens.
    experts: Vec<mlp::Saved>,
    /// Their outputs, [rows, d] each, before the gates.
    out: Vec<Tensor>,
}

impl Mixture {
    /// Forward: [t, d] -> [t, d]. `replay` is the routing of an earlier pass over the same tokens.
    pub fn forward(&self, x: &Tensor, ctx: &Context, replay: Option<Arc<Groups>>) -> Result<(Tensor, Saved)> {
        let (logits, router) = self.router.forward(&wide(x)?, ctx)?;
        let (probs, lse) = route::softmax(&logits)?;
        let groups = match replay {
            Some(g) => g,
            None => {
                let chosen = route::choose(&probs, self.top_k)?;
                Arc::new(Groups::new(chosen, self.top_k, self.experts.len(), x.device())?)
            }
        };
        let gates = route::gates(&probs, &groups.expert, self.top_k, self.normalise)?;
        let rows = groups.gather(x)?;
        let one = |run: Run| -> Result<_> {
            let ctx = self.context(ctx, &groups, &run);
            self.experts[run.expert].forward(&rows.narrow(0, run.start, run.rows)?, &ctx)
        };
        let runs = groups.runs();
        let done: Vec<(Tensor, mlp::Saved)> = if group::side_by_side(runs.len(), x.device()) {
            group::each(runs, |r| r.rows, one)?
        } else {
            runs.into_iter().map(one).collect::<Result<_>>()?
        };
        let (out, experts): (Vec<Tensor>, Vec<mlp::Saved>) = done.into_iter().unzip();
        let y = groups.combine(&out, Some(&gates), x.dtype())?;
        Ok((y, Saved { groups, probs, lse, gates, router, experts, out }))
    }

    /// Backward: the gradient of the input. `balance` is what losses on the router add.
    pub fn backward(
        &self,
        s: Saved,
        dy: &Tensor,
        ctx: &Context,
        sink: &Sink<'_>,
        balance: Option<&Balance>,
    ) -> Result<Tensor> {
        let groups = &s.groups;
        let dgates = groups.dots(&s.out, dy)?;
        drop(s.out);
        let runs = groups.runs();
        for (e, _) in groups.counts().enumerate().filter(|(_, n)| *n == 0) {
            self.experts[e].linears().into_iter().flat_map(Linear::slots).for_each(|slot| sink.touch(slot));
        }
        let work: Vec<(Run, mlp::Saved)> = runs.into_iter().zip(s.experts).collect();
        let one = |(run, saved): (Run, mlp::Saved), sink: &Sink<'_>| -> Result<Tensor> {
            let ctx = self.context(ctx, groups, &run);
            let dout = groups.gather_scaled(dy, &s.gates, &run)?;
            self.experts[run.expert].backward(saved, &dout, &ctx, sink)
        };
        let dx: Vec<Tensor> = if group::side_by_side(work.len(), dy.device()) {
            let done = group::each(
                work,
                |(r, _)| r.rows,
                |w| {
                    let own = Sink::collecting();
                    Ok((one(w, &own)?, own.collected()))
                },
            )?;
            let (dx, later): (Vec<Tensor>, Vec<_>) = done.into_iter().unzip();
            sink.add_all(later.into_iter().flatten())?;
            dx
        } else {
            work.into_iter().map(|w| one(w, sink)).collect::<Result<_>>()?
        };
        let dx = groups.combine(&dx, None, dy.dtype())?;
        let routed = Routed {
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

    /// The context of one expert's rows: its dropout goes by token.
    fn context<'a>(&self, ctx: &'a Context, groups: &Groups, run: &Run) -> Cow<'a, Context> {
        let linears = self.experts[run.expert].linears();
        let drops = linears.iter().any(|l| l.lora.as_ref().is_some_and(|l| l.dropout > 0.0));
        match ctx.dropout {
            Some(_) if drops => Cow::Owned(ctx.for_tokens(groups.tokens_of(run))),
            _ => Cow::Borrowed(ctx),
        }
    }
}

fn wide(t: &Tensor) -> Result<Tensor> {
    if t.dtype() == DType::F64 { Ok(t.clone()) } else { t.to_dtype(DType::F32) }
}
