//! Gradient reduction: sums the gradients of one micro-batch per rank, unit by unit, during the backward
//! walk.
//!
//! Micro-batches are dealt to ranks in turn. Gradients of a unit are added in rank order to the sum of
//! earlier micro-batches, so the order of summation is the order of micro-batches, for any ZeRO stage and
//! any number of ranks above one. With sharded gradients, a rank keeps only the sum of one shard, and the
//! local gradients of a unit live from the visit to the reduction. On CUDA, the reduction of a unit
//! overlaps with the next visit, and completes when that visit ends.

use super::gather::Gather;
use candle_core::{DType, Device};
use ft_engine::adapt::Params;
use ft_engine::adapt::buffer::Held;
use ft_engine::adapt::params::Unit;
use ft_engine::model::sink::Sink;
use ft_engine::optim::{self, Optimizer};
use ft_engine::ranks::{At, Comm};
use ft_engine::walk::{Hooks, Visit};
use ft_kernels::Tensor;
use ft_kernels::crossing::Arrival;
use ft_kernels::optimizer::Squares;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

/// Reduces the gradients of a sink over ranks, around the visits of a training pass. Includes the gathering
/// of weights.
pub struct Reduce<'a> {
    params: &'a Params,
    comm: &'a dyn Comm,
    sink: &'a Sink<'a>,
    /// Units with gradients, in the order of the backward walk. Empty on one rank, because the sink holds
    /// the sums.
    units: Vec<usize>,
    /// Number of units reduced in the current micro-batch.
    done: Cell<usize>,
    /// Pending reductions, oldest first.
    open: RefCell<VecDeque<Open<'a>>>,
    /// Pending all-gather of a reduced gradient, below ZeRO stage 2.
    gathered: RefCell<Option<Arrival>>,
    gather: Gather<'a>,
    update: Option<InBackward<'a>>,
}

/// A pending reduction.
struct Open<'a> {
    arrival: Arrival,
    /// Number, buffers and local sum of a unit with replicated gradients; the sum is all-gathered
    /// afterwards.
    part: Option<(usize, &'a Unit, Tensor)>,
}

/// Optimizer update within the backward pass (`optimizer.in_backward`).
pub struct InBackward<'a> {
    pub optimizer: &'a Optimizer,
    /// Step, learning rates and factor on the gradients.
    pub at: optim::At<'a>,
    pub device: &'a Device,
    /// Sums of squares of the gradients used on this rank, with their units.
    pub squares: RefCell<Vec<(usize, Squares)>>,
}

impl<'a> Reduce<'a> {
    /// Creates the reduction for the micro-batches of a step.
    pub fn new(
        gather: Gather<'a>,
        params: &'a Params,
        comm: &'a dyn Comm,
        sink: &'a Sink<'a>,
        update: Option<InBackward<'a>>,
    ) -> Self {
        let comes = comm.world() > 1 || update.is_some();
        let units = (0..params.units.len()).rev().filter(|u| comes && params.units[*u].is_some()).collect();
        Self {
            params,
            comm,
            sink,
            units,
            done: Cell::new(0),
            open: RefCell::default(),
            gathered: RefCell::default(),
            gather,
            update,
        }
    }

    /// Sum of squares of this rank's shard of all gradients; `None` without updates in the backward pass.
    ///
    /// # Errors
    /// Device errors.
    pub fn squares(&self) -> candle_core::Result<Option<f64>> {
        let Some(update) = &self.update else { return Ok(None) };
        let mut squares = update.squares.borrow_mut();
        // Sorted by unit, to match the order of summation of a separate update.
        squares.sort_by_key(|(unit, _)| *unit);
        let all: Vec<f64> = squares.drain(..).map(|(_, s)| s.read()).collect::<candle_core::Result<_>>()?;
        Ok(Some(all.iter().sum()))
    }

    /// Ends a micro-batch, or the turn of a rank without one: reduces all remaining units.
    ///
    /// # Errors
    /// Lost rank.
    pub fn end(&self) -> ft_base::Result<()> {
        self.down_to(0)?;
        self.done.set(0);
        self.close(0)
    }

    /// Reduces the remaining units from the last one down to `unit`.
    fn down_to(&self, unit: usize) -> ft_base::Result<()> {
        while let Some(next) = self.units.get(self.done.get()).filter(|u| **u >= unit) {
            if let Some(buffers) = &self.params.units[*next] {
                self.sum(*next, buffers)?;
            }
            self.done.set(self.done.get() + 1);
        }
        Ok(())
    }

    /// Gradients for the update of a unit on this rank: the whole unit, or the shard of this rank.
    fn for_update(&self, number: usize, unit: &Unit, device: &Device) -> ft_base::Result<Held> {
        let mine = self.sink.take(number);
        let zeros = |n: usize| Tensor::zeros(n, DType::F32, device);
        if self.comm.world() == 1 {
            // No token reached the trained tensors of this unit.
            let values = mine.map_or_else(|| zeros(unit.len), Ok)?;
            return Ok(Held { at: 0..unit.len, values });
        }
        let part = zeros(unit.part.len())?;
        self.comm
            .reduce_scatter(At::unit("the sum of gradients", number), mine, unit.part.clone(), &part)?
            .wait()?;
        if self.params.shard.stage >= 1 {
            return Ok(Held { at: unit.part.clone(), values: part });
        }
        let (values, parts) = (zeros(unit.len)?, self.params.shard.parts(unit.len));
        self.comm
            .all_gather(At::unit("the gathering of gradients", number), part, &parts, &values)?
            .wait()?;
        Ok(Held { at: 0..unit.len, values })
    }

    fn sum(&self, number: usize, unit: &'a Unit) -> ft_base::Result<()> {
        if let Some(update) = &self.update {
            let grads = self.for_update(number, unit, update.device)?;
            update.squares.borrow_mut().push((number, Squares::of(&grads.of(unit.part.clone())?)?));
            return update.optimizer.step_unit(self.params, self.comm, number, &grads, &update.at);
        }
        let mine = self.sink.take(number);
        let Some(Held { values, .. }) = &unit.grads else { return Ok(()) };
        let sum = At::unit("the sum of gradients", number);
        let open = if self.params.shard.stage >= 2 {
            Open { arrival: self.comm.reduce_scatter(sum, mine, unit.part.clone(), values)?, part: None }
        } else {
            // Every rank sums one part, and the parts are then all-gathered.
            let part: Tensor =
                values.narrow(0, unit.part.start, unit.part.len())?.real()?.force_contiguous()?.into();
            let arrival = self.comm.reduce_scatter(sum, mine, unit.part.clone(), &part)?;
            Open { arrival, part: Some((number, unit, part)) }
        };
        // On a device, this reduction overlaps with the next visit.
        let stays = usize::from(!values.device().is_cpu());
        self.open.borrow_mut().push_back(open);
        self.close(stays)
    }

    /// Completes the oldest pending reductions, until `stay` are left.
    fn close(&self, stay: usize) -> ft_base::Result<()> {
        while self.open.borrow().len() > stay {
            let Some(Open { arrival, part }) = self.open.borrow_mut().pop_front() else { break };
            arrival.wait()?;
            if let Some((number, unit, part)) = part
                && let Some(Held { values, .. }) = &unit.grads
            {
                let at = At::unit("the gathering of gradients", number);
                let arrival = self.comm.all_gather(at, part, &self.params.shard.parts(unit.len), values)?;
                // Completes before the next all-gather, or at the end of the micro-batch.
                self.gathered.borrow_mut().replace(arrival).map_or(Ok(()), Arrival::wait)?;
            }
        }
        if stay == 0 {
            self.gathered.borrow_mut().take().map_or(Ok(()), Arrival::wait)?;
        }
        Ok(())
    }
}

impl Hooks for Reduce<'_> {
    fn arrive(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        self.gather.arrive(visit, next)
    }

    fn leave(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        self.gather.leave(visit, next)?;
        if visit.is_backward() { self.down_to(visit.unit) } else { Ok(()) }
    }
}
