//! Experts split over ranks. Rows travel to the owners of their experts, and the outputs back:
//!
//! ```text
//! source   router, rows sorted by expert -> counts -> rows out        outputs in -> gates -> sum
//! owner                                     rows in, sorted again -> own experts -> outputs out
//! ```
//!
//! The backward pass makes the same ways: gradients times gates out, gradients of the inputs back. Gates, router and
//! shared expert stay at the source. No row is dropped or padded. A rank without rows takes part: [`Mixture::serve`].

use super::grouped;
use super::mlp;
use super::types::{Gates, Mixture, OTHER, Saved as MixtureSaved, SavedExperts};
use crate::model::linear::{self, Linear};
use crate::model::pass::batch::{Context, DropoutKey};
use crate::model::pass::sink::Sink;
use crate::ranks::{At, Comm};
use candle_core::{DType, Device, Result};
use ft_kernels::Tensor;
use ft_kernels::dispatch::{Departure, ExpertRows, Groups, Travel, ranges};
use ft_kernels::ledger::{Cost, Peers};
use ft_kernels::tensor::{Ghost, On};
use std::borrow::Cow;
use std::sync::Arc;

const COUNTS: &str = "the counts of rows for experts";
const OUT: &str = "the rows to their experts";
const BACK: &str = "the rows back from their experts";

/// Faults that tests must notice.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Gradients of outputs travel without their gates.
    Gates,
    /// Gradients of inputs do not come back.
    Inputs,
    /// Gradients are divided by the number of ranks.
    Mean,
    /// Outputs return to the sources in reverse order.
    Sources,
    /// Dropout is drawn by the row at the owner.
    Rows,
}

#[cfg(test)]
thread_local! {
    /// Fault of this thread's rank.
    pub static FAULT: std::cell::Cell<Option<Fault>> = const { std::cell::Cell::new(None) };
}

/// Part of a rank in the experts of a layer.
#[derive(Clone, Copy, Debug)]
pub struct LocalExperts {
    /// Ranks that split the experts.
    pub ranks: usize,
    /// Experts of the layer, and the first one that is here.
    pub experts: usize,
    pub first: usize,
    /// Whether any expert has dropout.
    pub drops: bool,
    /// Unit of the walk, for messages.
    pub unit: usize,
}

/// Saved activations of the own experts, on rows of all ranks.
#[derive(Debug)]
enum Here {
    /// No row has come.
    Nothing,
    Each(Vec<mlp::Saved>),
    Grouped(Box<grouped::Saved>),
}

/// Saved activations, at the source and at the owner.
#[derive(Debug)]
pub struct Saved {
    travel: Arc<Travel>,
    here: Here,
    /// Outputs of this rank's rows `[n, d]`, sorted by expert, before the gates; `None` without rows.
    pub(super) out: Option<Tensor>,
}

/// Saved activations of a rank that had no rows of its own.
#[derive(Debug)]
pub struct Served(Saved);

/// Width, dtype and device of rows.
#[derive(Clone, Copy)]
pub struct RowSpec<'a>(pub usize, pub DType, pub On<'a>);

impl<'a> RowSpec<'a> {
    /// As the rows of a tensor.
    fn of(x: &'a Tensor) -> Result<Self> {
        Ok(Self(x.dim(1)?, x.dtype(), x.device()))
    }
}

/// The rows of each expert with rows, out of all rows sorted by expert.
pub(super) fn parts(rows: Option<&Tensor>, groups: &Groups) -> Result<Vec<Tensor>> {
    let Some(rows) = rows else { candle_core::bail!("{OTHER}") };
    groups.runs().iter().map(|run| rows.narrow(0, run.start, run.rows)).collect()
}

impl Saved {
    /// Outputs by expert with rows.
    pub(super) fn parts(&self, groups: &Groups) -> Result<Vec<Tensor>> {
        parts(self.out.as_ref(), groups)
    }

    /// Drops the inputs of the own experts.
    pub(super) fn drop_inputs(&mut self) {
        match &mut self.here {
            Here::Nothing => {}
            Here::Each(saved) => saved.iter_mut().for_each(mlp::Saved::drop_inputs),
            Here::Grouped(saved) => saved.x = None,
        }
    }
}

impl Served {
    /// The travel, with which the pass is made again.
    pub fn travel(&self) -> Arc<Travel> {
        Arc::clone(&self.0.travel)
    }

    /// Drops the inputs of the own experts; [`Mixture::serve_restore`] restores them.
    pub fn drop_inputs(&mut self) {
        self.0.drop_inputs();
    }
}

/// Routing at the source: groups, router probabilities, logsumexp, gates; and the router's saved activations.
type Routing = ((Arc<Groups>, Tensor, Tensor, Gates), linear::Saved);

impl Mixture {
    /// As [`Mixture::recompute`], from rows sorted by expert.
    pub(super) fn recompute_away(
        &self,
        x: &Tensor,
        rows: Tensor,
        ctx: &Context,
        ((groups, probs, lse, gates), router): Routing,
    ) -> Result<MixtureSaved> {
        // A device computes the shared expert while the host waits for counts.
        let shared = self.shared.as_ref().map(|s| s.saved(x, ctx)).transpose()?;
        let travel = groups.travel(|| self.depart(Some(&groups), ctx, RowSpec::of(x)?))?;
        let (here, out) = self.visit(Some(rows), &travel, ctx, RowSpec::of(x)?)?;
        let experts = SavedExperts::Away(Box::new(Saved { travel, here, out }));
        Ok(MixtureSaved { groups, probs, lse, gates, router, experts, shared })
    }

    /// Outputs of the experts times their gates, plus that of the shared expert.
    pub(super) fn combine_away(
        &self,
        s: &MixtureSaved,
        away: &Saved,
        shared: Option<Tensor>,
        dtype: DType,
    ) -> Result<Tensor> {
        match (s.groups.sorted(), &away.out) {
            (Some(sorted), Some(out)) => sorted.combine(out, Some(&s.gates.factored), shared.as_ref()),
            _ => self.combine(s, &away.parts(&s.groups)?, shared, dtype),
        }
    }

    /// A pass for rows of other ranks alone; `travel` is that of an earlier pass.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn serve(&self, ctx: &Context, travel: Option<Arc<Travel>>, like: RowSpec<'_>) -> Result<Served> {
        let travel = match travel {
            Some(travel) => travel,
            None => Arc::new(self.depart(None, ctx, like)?),
        };
        let (here, out) = self.visit(None, &travel, ctx, like)?;
        Ok(Served(Saved { travel, here, out }))
    }

    /// Restores inputs dropped by [`Served::drop_inputs`].
    ///
    /// # Errors
    /// As [`Mixture::serve`].
    pub fn serve_restore(&self, served: &mut Served, ctx: &Context, like: RowSpec<'_>) -> Result<()> {
        self.restore_rows(&mut served.0, None, ctx, like)
    }

    /// Backward pass of [`Mixture::serve`].
    ///
    /// # Errors
    /// As [`Mixture::serve`].
    pub fn serve_backward(&self, s: Served, ctx: &Context, sink: &Sink<'_>, like: RowSpec<'_>) -> Result<()> {
        self.back(s.0, None, ctx, sink, like).map(drop)
    }

    /// Whether expert `e` of the layer is here.
    pub fn has(&self, e: usize) -> bool {
        self.owned.is_none_or(|o| (o.first..o.first + o.experts / o.ranks).contains(&e))
    }

    /// Whether ranks split the experts.
    pub fn is_split(&self) -> bool {
        self.owned.is_some()
    }

    /// Restores the inputs of the experts from rows sorted by expert: they travel again, to owners that need them.
    pub(super) fn restore_away(&self, saved: &mut Saved, rows: Option<Tensor>, ctx: &Context) -> Result<()> {
        match rows {
            Some(rows) => {
                let like = rows.clone();
                self.restore_rows(saved, Some(rows), ctx, RowSpec::of(&like)?)
            }
            None => candle_core::bail!("{OTHER}"),
        }
    }

    /// Backward pass of the experts: from gradients of the outputs, sorted by expert, to those of the inputs.
    pub(super) fn backward_away(
        &self,
        saved: Saved,
        rows: Option<Tensor>,
        ctx: &Context,
        sink: &Sink<'_>,
    ) -> Result<Option<Tensor>> {
        let Some(like) = rows.clone() else { candle_core::bail!("{OTHER}") };
        self.back(saved, rows, ctx, sink, RowSpec::of(&like)?)
    }

    /// Tells all ranks how many rows go to each expert, and hears the same.
    fn depart(
        &self,
        groups: Option<&Groups>,
        ctx: &Context,
        RowSpec(_, dtype, on): RowSpec<'_>,
    ) -> Result<Travel> {
        let Some(owned) = self.owned else { candle_core::bail!("{OTHER}") };
        let grouped = self.is_grouped(on, dtype).then_some(dtype);
        let device = match on {
            On::Real(device) => device,
            On::Ghost(ledger) => {
                let Some(groups) = groups else { candle_core::bail!("{OTHER}") };
                let rows = groups.tokens * groups.top_k;
                let here = groups.arriving(owned.experts / owned.ranks, &self.copies, ledger, grouped)?;
                return Ok(Travel::planned(here, rows, owned.ranks));
            }
        };
        let draws = ctx.dropout.filter(|_| owned.drops);
        let (counts, mut tokens) = match groups {
            Some(groups) => groups.on_host(draws.is_some())?,
            None => (vec![0; owned.experts], Vec::new()),
        };
        let first = draws.map_or(0, |d| d.first_row as u32);
        let place = |t: u32| ctx.rows.as_ref().and_then(|rows| rows.get(t as usize)).map_or(t, |row| *row);
        tokens.iter_mut().for_each(|t| *t = place(*t).wrapping_add(first));
        let needs_input = self.experts.iter().any(mlp::Mlp::needs_input);
        let mine = Departure { counts, tokens, needs_input };
        let comm = peers(ctx)?;
        let said = comm.all_gather_bytes(At::unit(COUNTS, owned.unit), &words(&mine), true).map_err(told)?;
        let all: Vec<Departure> = said.iter().map(|bytes| departure(bytes, owned.experts)).collect();
        Travel::new(&all, comm.rank(), (device, grouped))
    }

    /// Rows sorted by expert to their owners, through the experts, and back in the same order.
    fn visit(
        &self,
        rows: Option<Tensor>,
        travel: &Travel,
        ctx: &Context,
        like: RowSpec<'_>,
    ) -> Result<(Here, Option<Tensor>)> {
        let came = self.exchange(rows, travel, (Way::Out, &[]), ctx, like)?;
        let (here, out) = match (came, travel.here.sorted()) {
            (None, _) => (Here::Nothing, None),
            (Some(came), Some(sorted)) => {
                let rows = sorted.gather(&came)?;
                drop(came);
                let mut saved = self.grouped_experts(like.1)?.forward(rows, ctx, sorted, true)?;
                // The gradients of the gates are computed at the source.
                let Some(out) = saved.out.take() else { candle_core::bail!("{OTHER}") };
                (Here::Grouped(Box::new(saved)), Some(sorted.combine(&out, None, None)?))
            }
            (Some(came), None) => {
                let rows = travel.here.gather(&came)?;
                drop(came);
                let context = |run: &ExpertRows| self.context_of(ctx, travel, run);
                let (out, saved) = self.each_forward(&travel.here, &rows, context)?;
                (Here::Each(saved), Some(travel.here.combine(&out, None, like.1)?))
            }
        };
        #[cfg(test)]
        let out = match (FAULT.get(), out) {
            (Some(Fault::Sources), Some(out)) => {
                let n = out.dim(0)?;
                let rows: Vec<Tensor> = (0..n).map(|i| out.narrow(0, n - 1 - i, 1)).collect::<Result<_>>()?;
                Some(Tensor::cat(&rows, 0)?)
            }
            (_, out) => out,
        };
        Ok((here, self.exchange(out, travel, (Way::Back, &[]), ctx, like)?))
    }

    /// Backward pass of [`Mixture::visit`].
    fn back(
        &self,
        saved: Saved,
        rows: Option<Tensor>,
        ctx: &Context,
        sink: &Sink<'_>,
        like: RowSpec<'_>,
    ) -> Result<Option<Tensor>> {
        let Saved { travel, here, out } = saved;
        drop(out);
        #[cfg(test)]
        let rows = match FAULT.get() {
            Some(Fault::Mean) => rows.map(|r| r / travel.sent.len() as f64).transpose()?,
            _ => rows,
        };
        let came = self.exchange(rows, &travel, (Way::Out, &[]), ctx, like)?;
        let dx = match (here, came, travel.here.sorted()) {
            (Here::Nothing, None, _) => {
                let slots = self.experts.iter().flat_map(mlp::Mlp::linears).flat_map(Linear::slots);
                slots.for_each(|slot| sink.touch(slot));
                None
            }
            (Here::Grouped(saved), Some(came), Some(sorted)) => {
                let dout = sorted.gather(&came)?;
                drop(came);
                let (dx, _) = self.grouped_backward(*saved, (dout, None), ctx, sorted, sink)?;
                Some(sorted.combine(&dx, None, None)?)
            }
            (Here::Each(saved), Some(came), None) => {
                let dout = travel.here.gather(&came)?;
                drop(came);
                let dout = |run: &ExpertRows| dout.narrow(0, run.start, run.rows);
                let context = |run: &ExpertRows| self.context_of(ctx, &travel, run);
                let dx = self.each_backward((&travel.here, saved), dout, context, like.2, sink)?;
                Some(travel.here.combine(&dx, None, like.1)?)
            }
            _ => candle_core::bail!("{OTHER}"),
        };
        #[cfg(test)]
        let dx = match FAULT.get() {
            Some(Fault::Inputs) => dx.map(|dx| dx * 0.0).transpose()?,
            _ => dx,
        };
        self.exchange(dx, &travel, (Way::Back, &[]), ctx, like)
    }

    fn restore_rows(
        &self,
        s: &mut Saved,
        rows: Option<Tensor>,
        ctx: &Context,
        like: RowSpec<'_>,
    ) -> Result<()> {
        let needs = &s.travel.needs;
        if !needs.contains(&true) {
            return Ok(());
        }
        let Some(came) = self.exchange(rows, &s.travel, (Way::Out, needs), ctx, like)? else { return Ok(()) };
        match (&mut s.here, s.travel.here.sorted()) {
            (Here::Grouped(saved), Some(sorted)) => saved.x = Some(sorted.gather(&came)?),
            (Here::Each(saved), None) => {
                let rows = s.travel.here.gather(&came)?;
                for (run, saved) in s.travel.here.runs().iter().zip(saved) {
                    self.experts[run.expert].restore(saved, &rows.narrow(0, run.start, run.rows)?);
                }
            }
            _ => candle_core::bail!("{OTHER}"),
        }
        Ok(())
    }

    /// Context for the rows of one expert: dropout depends on the token of the step.
    fn context_of<'a>(
        &self,
        ctx: &'a Context<'a>,
        travel: &Travel,
        run: &ExpertRows,
    ) -> Cow<'a, Context<'a>> {
        #[cfg(test)]
        if FAULT.get() == Some(Fault::Rows) {
            return Cow::Owned(ctx.for_tokens(travel.here.tokens_of(run)));
        }
        match ctx.dropout {
            Some(_) if self.drops(run.expert) && run.alike == 1.0 => {
                let rows = Some(Arc::new(travel.tokens_of(travel.here.tokens_of(run))));
                let dropout = ctx.dropout.map(|d| DropoutKey { first_row: 0, ..d });
                Cow::Owned(Context { rows, dropout, ..ctx.clone() })
            }
            _ => Cow::Borrowed(ctx),
        }
    }

    /// Sends runs of rows to the ranks, and returns the incoming rows in the order of ranks; `None` without any. With
    /// `needs`, only to ranks that need them.
    fn exchange(
        &self,
        rows: Option<Tensor>,
        travel: &Travel,
        (way, needs): (Way, &[bool]),
        ctx: &Context,
        RowSpec(d, dtype, on): RowSpec<'_>,
    ) -> Result<Option<Tensor>> {
        let (out, into) = match way {
            Way::Out => (&travel.sent, &travel.received),
            Way::Back => (&travel.received, &travel.sent),
        };
        let me = travel.me;
        let wanted = |rank: usize| needs.get(rank).is_none_or(|n| *n);
        let total: usize = into.iter().sum();
        let to = match on {
            On::Ghost(ledger) => {
                // The sizes of a plan are even, but for a rest that stays here.
                let stays = out.get(me).copied().unwrap_or(0);
                let came = Tensor::from(Ghost::new(ledger, (total, d), dtype));
                let bytes = (total.saturating_sub(stays) * d * dtype.size_in_bytes()) as f64;
                ledger.work(Cost::exchange(Peers::Experts, bytes));
                return Ok(Some(came));
            }
            On::Real(device) => receiving(total, d, dtype, device, wanted(me))?,
        };
        let piece = |t: &Option<Tensor>, lens: &[usize], rank: usize| -> Result<Option<Tensor>> {
            match (t, lens[rank]) {
                (_, 0) | (None, _) => Ok(None),
                (Some(t), n) => t.narrow(0, ranges(lens)[rank].start, n).map(Some),
            }
        };
        let rows = rows.map(|r| r.contiguous()).transpose()?;
        let (mut send, mut fill) = (Vec::new(), Vec::new());
        for rank in (0..out.len()).filter(|r| *r != me) {
            send.extend(piece(&rows, out, rank)?.filter(|_| wanted(rank)).map(|t| (rank, t)));
            fill.extend(piece(&to, into, rank)?.filter(|_| wanted(me)).map(|t| (rank, t)));
        }
        let unit = self.owned.map_or(0, |o| o.unit);
        let arrival = peers(ctx)?.exchange(At::unit(way.what(), unit), &send, &fill).map_err(told)?;
        if let (Some(to), Some(own)) = (&to, piece(&rows, out, me)?.filter(|_| wanted(me))) {
            to.slice_set(&own, 0, ranges(into)[me].start)?;
        }
        arrival.wait()?;
        Ok(to)
    }
}

/// Direction of rows.
#[derive(Clone, Copy)]
enum Way {
    /// To the owners of the experts.
    Out,
    /// Back to the sources.
    Back,
}

impl Way {
    fn what(self) -> &'static str {
        match self {
            Way::Out => OUT,
            Way::Back => BACK,
        }
    }
}

/// Room for rows that come; `None` if none do.
fn receiving(rows: usize, d: usize, dtype: DType, device: &Device, wanted: bool) -> Result<Option<Tensor>> {
    if rows == 0 || !wanted { Ok(None) } else { Tensor::zeros((rows, d), dtype, device).map(Some) }
}

fn peers<'a>(ctx: &Context<'a>) -> Result<&'a dyn Comm> {
    match ctx.experts {
        Some(peers) => Ok(peers.0),
        None => candle_core::bail!("experts are split over ranks, and this pass is of one: a bug in ft"),
    }
}

/// Wraps an error of a collective in a layer. [`crate::walk::Walk`] returns the error of the group instead.
fn told(e: ft_base::Error) -> candle_core::Error {
    candle_core::Error::wrap(e)
}

/// A departure as bytes: whether the owner needs inputs, counts, tokens.
fn words(d: &Departure) -> Vec<u8> {
    let all = [u32::from(d.needs_input)]
        .into_iter()
        .chain(d.counts.iter().copied())
        .chain(d.tokens.iter().copied());
    all.flat_map(u32::to_ne_bytes).collect()
}

fn departure(bytes: &[u8], experts: usize) -> Departure {
    let mut words = bytes.as_chunks().0.iter().map(|b| u32::from_ne_bytes(*b));
    let needs_input = words.next() == Some(1);
    Departure { needs_input, counts: words.by_ref().take(experts).collect(), tokens: words.collect() }
}
