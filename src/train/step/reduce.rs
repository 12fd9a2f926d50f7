//! Gradient reduction: sums the gradients of one micro-batch per rank, unit by unit, during the backward
//! walk.
//!
//! Micro-batches are dealt to ranks in turn. Gradients of a unit are added in rank order to the sum of
//! earlier micro-batches, so the order of summation is the order of micro-batches, for any ZeRO stage and
//! any number of ranks above one. With sharded gradients, a rank keeps only the sum of one shard, and the
//! local gradients of a unit live from the visit to the reduction. On CUDA, the reduction of a unit
//! overlaps with the next visit, and completes at the visit's end.

use super::gather::Gather;
use candle_core::{DType, Device};
use ft_engine::model::grad_accumulator::GradAccumulator;
use ft_engine::optim::{self, Optimizer};
use ft_engine::params::buffers::{FlatKind, LocalShard};
use ft_engine::params::{FlatParam, Params};
use ft_engine::ranks::{CollectiveId, Comm};
use ft_engine::walk::{Hooks, Stage, Visit};
use ft_kernels::Tensor;
use ft_kernels::crossing::PendingTransfer;
use ft_kernels::optimizer::Squares;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

/// Reduces the gradients of an accumulator over ranks, around the visits of a training pass. Includes the gathering
/// of weights.
pub struct Reduce<'a> {
    params: &'a Params,
    comm: &'a dyn Comm,
    accum: &'a GradAccumulator<'a>,
    /// Buffers with gradients, in the order of the backward walk. Empty on a single rank of a stage, because the
    /// accumulator holds the sums.
    flats: Vec<(usize, &'a FlatParam)>,
    /// Buffers shared by the first and the last stage: summed once, at the end of the step.
    ends: Vec<(usize, &'a FlatParam)>,
    /// Lowest unit reduced in the current micro-batch; at first, the number of units.
    lowest: Cell<usize>,
    /// Pending reductions, oldest first.
    open: RefCell<VecDeque<Open<'a>>>,
    /// Pending all-gather of a reduced gradient, below ZeRO stage 2.
    gathered: RefCell<Option<PendingTransfer>>,
    gather: Gather<'a>,
    update: Option<InBackward<'a>>,
}

/// A pending reduction.
struct Open<'a> {
    flat: &'a FlatParam,
    arrival: PendingTransfer,
    /// Local sum of replicated gradients, all-gathered afterwards.
    part: Option<Tensor>,
}

/// Optimizer update within the backward pass (`optimizer.in_backward`).
pub struct InBackward<'a> {
    pub optimizer: &'a Optimizer,
    /// Step, learning rates and factor on the gradients.
    pub at: optim::UpdateArgs<'a>,
    pub device: &'a Device,
    /// Sums of squares of the gradients used on this rank, with the number of the buffer.
    pub squares: RefCell<Vec<(usize, Squares)>>,
}

impl<'a> Reduce<'a> {
    /// Creates the reduction for the micro-batches of a step.
    pub fn new(
        gather: Gather<'a>,
        params: &'a Params,
        comm: &'a dyn Comm,
        accum: &'a GradAccumulator<'a>,
        update: Option<InBackward<'a>>,
    ) -> Self {
        let comes = params.split.mesh.stage() > 1 || update.is_some();
        let flats = (0..params.frozen.len()).rev().flat_map(|unit| params.of_unit(unit));
        let (ends, flats): (Vec<_>, Vec<_>) = flats.partition(|(_, f)| f.kind == FlatKind::Ends);
        let flats = if comes { flats } else { Vec::new() };
        Self {
            params,
            comm,
            accum,
            flats,
            ends,
            lowest: Cell::new(params.frozen.len()),
            open: RefCell::default(),
            gathered: RefCell::default(),
            gather,
            update,
        }
    }

    /// Sums of squares of this rank's shard of the gradients, by buffer; `None` without updates in the backward pass.
    pub fn squares(&self) -> candle_core::Result<Option<Vec<(usize, f64)>>> {
        let Some(update) = &self.update else { return Ok(None) };
        let mut squares = update.squares.borrow_mut();
        // Sorted, to match the order of summation of a separate update.
        squares.sort_by_key(|(number, _)| *number);
        squares
            .drain(..)
            .map(|(number, s)| Ok((number, s.read()?)))
            .collect::<candle_core::Result<_>>()
            .map(Some)
    }

    /// Ends a step: sums the gradients of buffers shared by the first and the last stage.
    pub fn end_step(&self) -> ft_base::Result<()> {
        for (number, flat) in &self.ends {
            let Some(LocalShard { values, .. }) = &flat.grads else {
                self.sum(*number, flat)?;
                continue;
            };
            let shared = self.params.split.mesh.stage() > 1;
            let mine = if shared { self.accum.take(*number)? } else { Some(values.clone()) };
            let part = Tensor::zeros(flat.part.len(), DType::F32, values.real()?.device())?;
            self.scatter(flat, mine, &part)?.wait()?;
            self.gather_parts(flat, part, values)?.wait()?;
        }
        Ok(())
    }

    /// Ends a micro-batch, or the turn of a rank without one: reduces all remaining units.
    pub fn end(&self) -> ft_base::Result<()> {
        self.down_to(0)?;
        self.lowest.set(self.params.frozen.len());
        self.close(None)
    }

    /// Reduces the remaining units from the last one down to `unit`. On a device, the reductions of a unit overlap with
    /// the visit of the next one and complete after it. They complete by unit, not by buffer: ranks hold buffers of
    /// different experts, but must agree on the order of all collectives.
    fn down_to(&self, unit: usize) -> ft_base::Result<()> {
        for unit in (unit..self.lowest.get()).rev() {
            for (number, flat) in self.flats.iter().filter(|(_, f)| f.unit == unit) {
                self.sum(*number, flat)?;
            }
            self.close(Some(unit))?;
            self.lowest.set(unit);
        }
        Ok(())
    }

    /// Starts the sum of a buffer's gradients over ranks: this rank gets one part, added to `to`.
    fn scatter(
        &self,
        flat: &FlatParam,
        mine: Option<Tensor>,
        to: &Tensor,
    ) -> ft_base::Result<PendingTransfer> {
        let group = self.params.split.group(self.comm, flat.kind);
        let at = CollectiveId::unit("the sum of gradients", flat.unit);
        group.reduce_scatter(at, mine, flat.part.clone(), to)
    }

    /// Starts the all-gather of the parts of a sum to `to`.
    fn gather_parts(&self, flat: &FlatParam, part: Tensor, to: &Tensor) -> ft_base::Result<PendingTransfer> {
        let group = self.params.split.group(self.comm, flat.kind);
        let at = CollectiveId::unit("the gathering of gradients", flat.unit);
        group.all_gather(at, part, &flat.shard.parts(flat.len), to)
    }

    /// Gradients for the update of a buffer on this rank: the whole buffer, or the shard of this rank.
    fn for_update(&self, number: usize, flat: &FlatParam, device: &Device) -> ft_base::Result<LocalShard> {
        let mine = self.accum.take(number)?;
        let zeros = |n: usize| Tensor::zeros(n, DType::F32, device);
        if self.params.split.group(self.comm, flat.kind).world() == 1 {
            // No token reached the trained tensors of this buffer.
            let values = mine.map_or_else(|| zeros(flat.len), Ok)?;
            return Ok(LocalShard { at: 0..flat.len, values });
        }
        let part = zeros(flat.part.len())?;
        self.scatter(flat, mine, &part)?.wait()?;
        if flat.shard.stage >= 1 {
            return Ok(LocalShard { at: flat.part.clone(), values: part });
        }
        let values = zeros(flat.len)?;
        self.gather_parts(flat, part, &values)?.wait()?;
        Ok(LocalShard { at: 0..flat.len, values })
    }

    fn sum(&self, number: usize, flat: &'a FlatParam) -> ft_base::Result<()> {
        if let Some(update) = &self.update {
            let grads = self.for_update(number, flat, update.device)?;
            update.squares.borrow_mut().push((number, Squares::of(&grads.of(flat.part.clone())?)?));
            return update.optimizer.step_flat(self.params, self.comm, number, &grads, &update.at);
        }
        let mine = self.accum.take(number)?;
        let Some(LocalShard { values, .. }) = &flat.grads else { return Ok(()) };
        // Below ZeRO stage 2, every rank sums one part, and the parts are then all-gathered.
        let part = if flat.shard.stage >= 2 {
            None
        } else {
            let part = values.narrow(0, flat.part.start, flat.part.len())?;
            Some(Tensor::from(part.real()?.force_contiguous()?))
        };
        let arrival = self.scatter(flat, mine, part.as_ref().unwrap_or(values))?;
        self.open.borrow_mut().push_back(Open { flat, arrival, part });
        if values.device().is_cpu() { self.close(None) } else { Ok(()) }
    }

    /// Completes the pending reductions, except for unit `keep`.
    fn close(&self, keep: Option<usize>) -> ft_base::Result<()> {
        while self.open.borrow().front().is_some_and(|open| Some(open.flat.unit) != keep) {
            let Some(Open { flat, arrival, part }) = self.open.borrow_mut().pop_front() else { break };
            arrival.wait()?;
            if let (Some(part), Some(LocalShard { values, .. })) = (part, &flat.grads) {
                let arrival = self.gather_parts(flat, part, values)?;
                // Completes before the next all-gather, or at the end of the micro-batch.
                self.gathered.borrow_mut().replace(arrival).map_or(Ok(()), PendingTransfer::wait)?;
            }
        }
        if keep.is_none() {
            self.gathered.borrow_mut().take().map_or(Ok(()), PendingTransfer::wait)?;
        }
        Ok(())
    }
}

impl Hooks for Reduce<'_> {
    fn experts(&self) -> Option<&dyn Comm> {
        self.gather.experts()
    }

    fn stage(&self) -> Option<&Stage<'_>> {
        self.gather.stage()
    }

    fn pre_visit(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        self.gather.pre_visit(visit, next)
    }

    fn post_visit(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        self.gather.post_visit(visit, next)?;
        if visit.is_backward() { self.down_to(visit.unit) } else { Ok(()) }
    }
}
