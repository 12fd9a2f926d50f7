//! Experts split over ranks. Rows are dispatched to the owners of their experts, and the outputs combined:
//!
//! ```text
//! source   router, rows sorted by expert -> counts -> rows out        outputs in -> gates -> sum
//! owner                                     rows in, sorted again -> own experts -> outputs out
//! ```
//!
//! The backward pass does the same: it dispatches gradients times gates, and combines gradients of the inputs. Gates,
//! router and shared expert stay at the source. No row is dropped or padded. A rank without rows takes part:
//! [`Mixture::idle_forward`].

use super::mixture::gather;
use super::mlp::Mlp;
use super::types::{Mixture, OTHER, SavedExperts};
use crate::model::linear::Linear;
use crate::model::pass::batch::{Context, DropoutKey};
use crate::model::pass::grad_accumulator::GradAccumulator;
use crate::ranks::{CollectiveId, Comm};
use candle_core::{DType, Result};
use ft_kernels::Tensor;
use ft_kernels::dispatch::{DispatchCounts, ExpertRows, Groups, RowExchange, ranges};
use ft_kernels::ledger::{Cost, Peers};
use ft_kernels::tensor::{Ghost, On};
use std::borrow::Cow;
use std::sync::Arc;

/// Faults that tests must notice.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Gradients of outputs are dispatched without their gates.
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
    /// Number of experts of the layer, and first one on this rank.
    pub experts: usize,
    pub first: usize,
    /// Whether any expert has dropout.
    pub drops: bool,
    /// Unit of the walk, for messages.
    pub unit: usize,
}

/// Saved activations, at the source and at the owner.
#[derive(Debug)]
pub struct Saved {
    exchange: Arc<RowExchange>,
    /// Of the own experts, on rows of all ranks; `None` if no row has come.
    local: Option<SavedExperts>,
    /// Outputs of this rank's rows `[n, d]`, sorted by expert, before the gates; `None` without rows.
    pub(super) out: Option<Tensor>,
}

/// Width, dtype and device of rows.
#[derive(Clone, Copy)]
pub struct RowSpec<'a>(pub usize, pub DType, pub On<'a>);

impl<'a> RowSpec<'a> {
    /// As the rows of a tensor.
    pub(super) fn of(x: &'a Tensor) -> Result<Self> {
        Ok(Self(x.dim(1)?, x.dtype(), x.device()))
    }
}

/// The rows of each expert with rows, out of all rows sorted by expert.
pub(super) fn parts(rows: &Tensor, groups: &Groups) -> Result<Vec<Tensor>> {
    groups.runs().iter().map(|run| rows.narrow(0, run.start, run.rows)).collect()
}

impl Saved {
    /// Outputs by expert with rows.
    pub(super) fn parts(&self, groups: &Groups) -> Result<Vec<Tensor>> {
        let Some(out) = &self.out else { candle_core::bail!("{OTHER}") };
        parts(out, groups)
    }

    /// The exchange, to repeat the pass with.
    pub fn exchange(&self) -> Arc<RowExchange> {
        Arc::clone(&self.exchange)
    }

    /// Drops the inputs of the own experts; [`Mixture::restore_rows`] restores them.
    pub fn drop_inputs(&mut self) {
        self.local.iter_mut().for_each(SavedExperts::drop_inputs);
    }
}

impl Mixture {
    /// The experts on rows sorted by expert.
    pub(super) fn forward_dispatched(
        &self,
        groups: &Groups,
        rows: Tensor,
        ctx: &Context,
        like: RowSpec<'_>,
    ) -> Result<Saved> {
        let exchange = groups.exchange(|| self.exchange_counts(Some(groups), ctx, like))?;
        self.forward_rows(Some(rows), exchange, ctx, like)
    }

    /// A pass for rows of other ranks alone; `exchange` comes from an earlier pass.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn idle_forward(
        &self,
        ctx: &Context,
        exchange: Option<Arc<RowExchange>>,
        like: RowSpec<'_>,
    ) -> Result<Saved> {
        let exchange = match exchange {
            Some(exchange) => exchange,
            None => Arc::new(self.exchange_counts(None, ctx, like)?),
        };
        self.forward_rows(None, exchange, ctx, like)
    }

    /// Whether expert `e` of the layer is here.
    pub fn has(&self, e: usize) -> bool {
        self.owned.is_none_or(|o| (o.first..o.first + o.experts / o.ranks).contains(&e))
    }

    /// Whether ranks split the experts.
    pub fn is_split(&self) -> bool {
        self.owned.is_some()
    }

    /// Restores the inputs of the experts from rows sorted by expert: they are dispatched again, to owners that need
    /// them.
    pub(super) fn restore_dispatched(&self, saved: &mut Saved, rows: Tensor, ctx: &Context) -> Result<()> {
        let like = rows.clone();
        self.restore_rows(saved, Some(rows), ctx, RowSpec::of(&like)?)
    }

    /// Backward pass of the experts: from gradients of the outputs, sorted by expert, to gradients of the inputs.
    pub(super) fn backward_dispatched(
        &self,
        saved: Saved,
        rows: Tensor,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
    ) -> Result<Tensor> {
        let like = rows.clone();
        match self.backward_rows(saved, Some(rows), ctx, accum, RowSpec::of(&like)?)? {
            Some(dx) => Ok(dx),
            None => candle_core::bail!("{OTHER}"),
        }
    }

    /// Exchanges the numbers of rows by expert with all ranks.
    fn exchange_counts(
        &self,
        groups: Option<&Groups>,
        ctx: &Context,
        RowSpec(_, dtype, on): RowSpec<'_>,
    ) -> Result<RowExchange> {
        let Some(owned) = self.owned else { candle_core::bail!("{OTHER}") };
        let grouped = self.is_grouped(on, dtype).then_some(dtype);
        let device = match on {
            On::Real(device) => device,
            On::Ghost(ledger) => {
                let Some(groups) = groups else { candle_core::bail!("{OTHER}") };
                let rows = groups.tokens * groups.top_k;
                let here = groups.arriving(owned.experts / owned.ranks, &self.copies, ledger, grouped)?;
                return Ok(RowExchange::planned(here, rows, owned.ranks));
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
        let needs_input = self.experts.iter().any(Mlp::needs_input);
        let mine = DispatchCounts { counts, tokens, needs_input };
        let comm = peers(ctx)?;
        let at = CollectiveId::unit("the counts of rows for experts", owned.unit);
        let said = comm.all_gather_bytes(at, &words(&mine), true).map_err(candle_core::Error::wrap)?;
        let all: Vec<DispatchCounts> =
            said.iter().map(|bytes| dispatch_counts(bytes, owned.experts)).collect();
        RowExchange::new(&all, comm.rank(), (device, grouped))
    }

    /// Rows sorted by expert to their owners, through the experts, and back in the same order.
    fn forward_rows(
        &self,
        rows: Option<Tensor>,
        exchange: Arc<RowExchange>,
        ctx: &Context,
        like: RowSpec<'_>,
    ) -> Result<Saved> {
        let received = self.transfer(rows, &exchange, (Direction::Dispatch, &[]), ctx, like)?;
        let here = &exchange.here;
        let rows = received.map(|rows| gather(here, &rows)).transpose()?;
        let (local, out) = match (rows, here.sorted()) {
            (None, _) => (None, None),
            (Some(rows), Some(sorted)) => {
                let mut saved = self.grouped_experts(like.1)?.forward(rows, ctx, sorted, true)?;
                // The gradients of the gates are computed at the source.
                let Some(out) = saved.out.take() else { candle_core::bail!("{OTHER}") };
                let y = sorted.combine(&out, None, None)?;
                (Some(SavedExperts::Grouped(Box::new(saved))), Some(y))
            }
            (Some(rows), None) => {
                let context = |run: &ExpertRows| self.context_of(ctx, &exchange, run);
                let (out, saved) = self.each_forward(here, &rows, context)?;
                let y = here.combine(&out, None, like.1)?;
                (Some(SavedExperts::PerExpert(saved, Vec::new())), Some(y))
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
        let out = self.transfer(out, &exchange, (Direction::Combine, &[]), ctx, like)?;
        Ok(Saved { exchange, local, out })
    }

    /// Backward pass: from gradients of the outputs to gradients of the inputs. `None` for the rows of other ranks
    /// alone.
    ///
    /// # Errors
    /// As [`Mixture::idle_forward`].
    pub fn backward_rows(
        &self,
        saved: Saved,
        rows: Option<Tensor>,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
        like: RowSpec<'_>,
    ) -> Result<Option<Tensor>> {
        let Saved { exchange, local, out } = saved;
        drop(out);
        #[cfg(test)]
        let rows = match FAULT.get() {
            Some(Fault::Mean) => rows.map(|r| r / exchange.sent.len() as f64).transpose()?,
            _ => rows,
        };
        let received = self.transfer(rows, &exchange, (Direction::Dispatch, &[]), ctx, like)?;
        let here = &exchange.here;
        let dout = received.map(|rows| gather(here, &rows)).transpose()?;
        let dx = match (local, dout, here.sorted()) {
            (None, None, _) => {
                let slots = self.experts.iter().flat_map(Mlp::linears).flat_map(Linear::slots);
                slots.for_each(|slot| accum.touch(slot));
                None
            }
            (Some(SavedExperts::Grouped(saved)), Some(dout), Some(sorted)) => {
                let (dx, _) = self.grouped_backward(*saved, (dout, None), ctx, sorted, accum)?;
                Some(sorted.combine(&dx, None, None)?)
            }
            (Some(SavedExperts::PerExpert(saved, _)), Some(dout), None) => {
                let dout = |run: &ExpertRows| dout.narrow(0, run.start, run.rows);
                let context = |run: &ExpertRows| self.context_of(ctx, &exchange, run);
                let dx = self.each_backward((here, saved), dout, context, like.2, accum)?;
                Some(here.combine(&dx, None, like.1)?)
            }
            _ => candle_core::bail!("{OTHER}"),
        };
        #[cfg(test)]
        let dx = match FAULT.get() {
            Some(Fault::Inputs) => dx.map(|dx| dx * 0.0).transpose()?,
            _ => dx,
        };
        self.transfer(dx, &exchange, (Direction::Combine, &[]), ctx, like)
    }

    /// Restores the inputs dropped by [`Saved::drop_inputs`]; `rows` as in [`Mixture::backward_rows`].
    ///
    /// # Errors
    /// As [`Mixture::idle_forward`].
    pub fn restore_rows(
        &self,
        s: &mut Saved,
        rows: Option<Tensor>,
        ctx: &Context,
        like: RowSpec<'_>,
    ) -> Result<()> {
        let needs = &s.exchange.needs;
        if !needs.contains(&true) {
            return Ok(());
        }
        let received = self.transfer(rows, &s.exchange, (Direction::Dispatch, needs), ctx, like)?;
        let here = &s.exchange.here;
        match (&mut s.local, received) {
            (_, None) => Ok(()),
            (Some(local), Some(rows)) => self.restore_experts(local, here, gather(here, &rows)?, ctx),
            (None, Some(_)) => candle_core::bail!("{OTHER}"),
        }
    }

    /// Context for the rows of one expert: dropout depends on the token of the step.
    fn context_of<'a>(
        &self,
        ctx: &'a Context<'a>,
        exchange: &RowExchange,
        run: &ExpertRows,
    ) -> Cow<'a, Context<'a>> {
        #[cfg(test)]
        if FAULT.get() == Some(Fault::Rows) {
            return Cow::Owned(ctx.for_tokens(exchange.here.tokens_of(run)));
        }
        match ctx.dropout {
            Some(_) if self.drops(run.expert) && run.alike == 1.0 => {
                let rows = Some(Arc::new(exchange.tokens_of(exchange.here.tokens_of(run))));
                let dropout = ctx.dropout.map(|d| DropoutKey { first_row: 0, ..d });
                Cow::Owned(Context { rows, dropout, ..ctx.clone() })
            }
            _ => Cow::Borrowed(ctx),
        }
    }

    /// Sends runs of rows to the ranks, and returns the incoming rows in the order of ranks; `None` without any. With
    /// `needs`, only to ranks that need them.
    fn transfer(
        &self,
        rows: Option<Tensor>,
        exchange: &RowExchange,
        (direction, needs): (Direction, &[bool]),
        ctx: &Context,
        RowSpec(d, dtype, on): RowSpec<'_>,
    ) -> Result<Option<Tensor>> {
        let (out, into) = match direction {
            Direction::Dispatch => (&exchange.sent, &exchange.received),
            Direction::Combine => (&exchange.received, &exchange.sent),
        };
        let me = exchange.me;
        let wanted = |rank: usize| needs.get(rank).is_none_or(|n| *n);
        let total: usize = into.iter().sum();
        let to = match on {
            On::Ghost(ledger) => {
                // The sizes of a plan are even, but for a rest kept here.
                let stays = out.get(me).copied().unwrap_or(0);
                let received = Tensor::from(Ghost::new(ledger, (total, d), dtype));
                let bytes = (total.saturating_sub(stays) * d * dtype.size_in_bytes()) as f64;
                ledger.work(Cost::exchange(Peers::Experts, bytes));
                return Ok(Some(received));
            }
            On::Real(device) if total > 0 && wanted(me) => Some(Tensor::zeros((total, d), dtype, device)?),
            On::Real(_) => None,
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
        let at = CollectiveId::unit(direction.what(), unit);
        let arrival = peers(ctx)?.exchange(at, &send, &fill).map_err(candle_core::Error::wrap)?;
        if let (Some(to), Some(own)) = (&to, piece(&rows, out, me)?.filter(|_| wanted(me))) {
            to.slice_set(&own, 0, ranges(into)[me].start)?;
        }
        arrival.wait()?;
        Ok(to)
    }
}

/// Direction of rows.
#[derive(Clone, Copy)]
enum Direction {
    /// To the owners of the experts.
    Dispatch,
    /// Back to the sources.
    Combine,
}

impl Direction {
    fn what(self) -> &'static str {
        match self {
            Direction::Dispatch => "the rows to their experts",
            Direction::Combine => "the rows back from their experts",
        }
    }
}

fn peers<'a>(ctx: &Context<'a>) -> Result<&'a dyn Comm> {
    match ctx.experts {
        Some(peers) => Ok(peers),
        None => candle_core::bail!("experts are split over ranks, and this pass is of one: a bug in ft"),
    }
}

/// Counts as bytes: whether the owner needs inputs, counts, tokens.
fn words(d: &DispatchCounts) -> Vec<u8> {
    let all = [u32::from(d.needs_input)]
        .into_iter()
        .chain(d.counts.iter().copied())
        .chain(d.tokens.iter().copied());
    all.flat_map(u32::to_ne_bytes).collect()
}

fn dispatch_counts(bytes: &[u8], experts: usize) -> DispatchCounts {
    let mut words = bytes.as_chunks().0.iter().map(|b| u32::from_ne_bytes(*b));
    let needs_input = words.next() == Some(1);
    DispatchCounts { needs_input, counts: words.by_ref().take(experts).collect(), tokens: words.collect() }
}
