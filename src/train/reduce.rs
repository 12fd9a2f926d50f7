//! The gradients of a micro-batch of each rank, summed over the ranks unit by unit as the backward walk leaves each.
//!
//! Micro-batches are dealt to ranks in turn, and a unit's gradients are added in rank order to what the earlier
//! micro-batches gave: the order of the step's micro-batches, at every ZeRO stage and for every number of ranks above one.
//! Where gradients are split, a rank keeps the sum of its part alone, and a micro-batch's own gradients live from the
//! unit's visit to their sum. Between CUDA devices a unit's sum goes on while the next unit is visited, and is over at the
//! end of that visit.

use super::gather::Gather;
use ft_engine::adapt::Params;
use ft_engine::adapt::buffer::Held;
use ft_engine::adapt::params::Unit;
use ft_engine::comm::{At, Comm};
use ft_kernels::Tensor;
use ft_kernels::crossing::Arrival;
use ft_kernels::optimizer::Squares;
use ft_engine::model::sink::Sink;
use ft_engine::optim::{self, Optimizer};
use ft_engine::walk::{Around, Visit};
use candle_core::{DType, Device};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

/// Sums what a sink has over the ranks, around the visits of a training pass, for which weights are gathered.
pub struct Reduce<'a> {
    params: &'a Params,
    comm: &'a dyn Comm,
    sink: &'a Sink<'a>,
    /// Units that have gradients, as the backward walk comes to them; none on one rank, whose sink has the sums.
    units: Vec<usize>,
    /// How many of them are done with this micro-batch.
    done: Cell<usize>,
    /// Sums that are on their way, the oldest first.
    open: RefCell<VecDeque<Open<'a>>>,
    /// The sum that is being given to all.
    given: RefCell<Option<Arrival>>,
    gather: Gather<'a>,
    update: Option<InBackward<'a>>,
}

/// A sum on its way.
struct Open<'a> {
    arrival: Arrival,
    /// That of this rank's part, of a unit of which all get the sums.
    part: Option<(usize, &'a Unit, Tensor)>,
}

/// The update of each unit when its gradients are there.
pub struct InBackward<'a> {
    /// What updates it.
    pub optimizer: &'a Optimizer,
    /// Which update it is.
    pub at: optim::At<'a>,
    /// Where gradients are.
    pub device: &'a Device,
    /// Sums of squares of this rank's part of the gradients, by unit.
    pub squares: RefCell<Vec<(usize, Squares)>>,
}

impl<'a> Reduce<'a> {
    /// For the micro-batches of a step.
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
            given: RefCell::default(),
            gather,
            update,
        }
    }

    /// The sum of squares of this rank's part of all gradients, where units were updated with them.
    ///
    /// # Errors
    /// Of the device.
    pub fn squares(&self) -> candle_core::Result<Option<f64>> {
        let Some(update) = &self.update else { return Ok(None) };
        let mut squares = update.squares.borrow_mut();
        // added in the order of the units, as where all gradients are there at once
        squares.sort_by_key(|(unit, _)| *unit);
        let all: Vec<f64> = squares.drain(..).map(|(_, s)| s.read()).collect::<candle_core::Result<_>>()?;
        Ok(Some(all.iter().sum()))
    }

    /// Ends a micro-batch, or the turn of a rank that has none: sums what no visit came to.
    ///
    /// # Errors
    /// A rank that is lost.
    pub fn end(&self) -> ft_base::Result<()> {
        self.down_to(0)?;
        self.done.set(0);
        self.close(0)
    }

    /// Sums the gradients of a unit that was left, and those of all before it.
    fn down_to(&self, unit: usize) -> ft_base::Result<()> {
        while let Some(next) = self.units.get(self.done.get()).filter(|u| **u >= unit) {
            if let Some(buffers) = &self.params.units[*next] {
                self.sum(*next, buffers)?;
            }
            self.done.set(self.done.get() + 1);
        }
        Ok(())
    }

    /// The gradients of a unit that this rank updates it with: all of them, or of its part.
    fn for_update(&self, number: usize, unit: &Unit, device: &Device) -> ft_base::Result<Held> {
        let mine = self.sink.take(number);
        let zeros = |n: usize| Tensor::zeros(n, DType::F32, device);
        if self.comm.world() == 1 {
            // no token came to what trains here
            let values = mine.map_or_else(|| zeros(unit.len), Ok)?;
            return Ok(Held { at: 0..unit.len, values });
        }
        let part = zeros(unit.part.len())?;
        self.comm.add(At::unit("the sum of gradients", number), mine, unit.part.clone(), &part)?.wait()?;
        if self.params.shard.stage >= 1 {
            return Ok(Held { at: unit.part.clone(), values: part });
        }
        let (values, parts) = (zeros(unit.len)?, self.params.shard.parts(unit.len));
        self.comm.gather(At::unit("the gathering of gradients", number), part, &parts, &values)?.wait()?;
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
            Open { arrival: self.comm.add(sum, mine, unit.part.clone(), values)?, part: None }
        } else {
            // each rank sums its part, and gives it to all
            let part: Tensor =
                values.narrow(0, unit.part.start, unit.part.len())?.real()?.force_contiguous()?.into();
            let arrival = self.comm.add(sum, mine, unit.part.clone(), &part)?;
            Open { arrival, part: Some((number, unit, part)) }
        };
        // what goes on does so while the next unit is visited
        let stays = usize::from(!values.device().is_cpu());
        self.open.borrow_mut().push_back(open);
        self.close(stays)
    }

    /// Ends what is on its way but for so many sums, the youngest.
    fn close(&self, stay: usize) -> ft_base::Result<()> {
        while self.open.borrow().len() > stay {
            let Some(Open { arrival, part }) = self.open.borrow_mut().pop_front() else { break };
            arrival.wait()?;
            if let Some((number, unit, part)) = part
                && let Some(Held { values, .. }) = &unit.grads
            {
                let at = At::unit("the gathering of gradients", number);
                let arrival = self.comm.gather(at, part, &self.params.shard.parts(unit.len), values)?;
                // nobody reads it before the end
                self.given.borrow_mut().replace(arrival).map_or(Ok(()), Arrival::wait)?;
            }
        }
        if stay == 0 {
            self.given.borrow_mut().take().map_or(Ok(()), Arrival::wait)?;
        }
        Ok(())
    }
}

impl Around for Reduce<'_> {
    fn arrive(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        self.gather.arrive(visit, next)
    }

    fn leave(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        self.gather.leave(visit, next)?;
        if visit.is_backward() { self.down_to(visit.unit) } else { Ok(()) }
    }
}
