//! Gradients of a step, accumulated over the micro-batches.

use super::context::{StepInput, StepOutput, TrainContext};
use super::gather::Gather;
use super::loss_scale::LossScale;
use super::micros::MicroBatches;
use super::reduce::{InBackward, Reduce};
use super::sums::{Collected, Sums};
use super::turn::{LocalMicroBatch, Stop, check_stop};
use crate::train::Error;
use crate::train::distill;
use crate::train::objective::Objective;
use crate::train::preference::{Tally, samples_of};
use candle_core::Device;
use ft_base::memory::place;
use ft_data::Micro;
use ft_engine::model::grad_accumulator::GradAccumulator;
use ft_engine::optim;
use ft_engine::walk::{RouterLosses, Times, Walk};
use ft_kernels::{Tensor, loss};
use ft_recipe::Part;
use std::cell::RefCell;

impl TrainContext<'_> {
    /// Accumulates the gradients of all micro-batches of a step in the buffers of the parameters. The
    /// micro-batches are dealt to the ranks in turn. Resets earlier gradients and changes no weights, so a
    /// failed step can be repeated. Calls `stop` before every micro-batch. In f16, repeats the step with a
    /// lower loss scale after an overflow. With `optimizer.in_backward`, updates weights during the
    /// backward pass; such a step cannot be repeated.
    ///
    /// # Errors
    /// Device errors; [`Error::Abandoned`].
    pub fn accumulate(
        &self,
        input: &StepInput<'_>,
        times: &mut Times,
        stop: Stop<'_>,
    ) -> ft_base::Result<StepOutput> {
        loop {
            let output = self.accumulate_scaled(input, times, stop)?;
            let overflowed = output.loss.is_finite() && !output.grad_norm.is_finite();
            match self.loss_scale.get().and_then(LossScale::after_overflow) {
                Some(lower) if overflowed => self.loss_scale.set(Some(lower)),
                _ => return Ok(output),
            }
        }
    }

    /// As [`TrainContext::accumulate`], with the current loss scale.
    fn accumulate_scaled(
        &self,
        input: &StepInput<'_>,
        times: &mut Times,
        stop: Stop<'_>,
    ) -> ft_base::Result<StepOutput> {
        let (params, comm) = (&self.model.params, self.comm);
        let (grads, lens) = (params.grads(), params.lens());
        let alone = self.ranks().ranks_per_stage() == 1;
        let accum = if alone && !params.in_backward {
            GradAccumulator::new(&grads, params.tensors.len()).over(params.new_sums())
        } else {
            params.zero_grads()?;
            GradAccumulator::live((&lens, &params.slots), self.device())
        };
        let gather = Gather::new(&self.model.decoder, params, comm);
        let in_backward = params.in_backward.then(|| InBackward {
            optimizer: &self.model.optimizer,
            at: optim::UpdateArgs { t: input.step + 1, lr: input.lr, grad_scale: 1.0 },
            device: self.device(),
            squares: RefCell::default(),
        });
        let reduce = Reduce::new(gather, params, comm, &accum, in_backward);
        let batches = MicroBatches::new(input.data, input.rows, self.execution.micro_rows)?;
        if params.in_backward && batches.all.len() > self.ranks().data_parallel_size() {
            let why = "optimizer.in_backward: a step of several micro-batches";
            return Err(Error::Usage(why.into()).into());
        }
        let objective = self.step_objective(input, stop)?;
        let passes = Passes { input, batches: &batches, accum: &accum, reduce: &reduce, objective };
        let mine = self.run_micro_batches(&passes, times, stop)?;
        let sums = mine.over_ranks(comm, self.ranks().stages())?;
        let (loss, metrics) = match objective {
            Some(objective) => objective.result(&sums.tally),
            None => {
                let [loss, divergence] = [sums.loss, sums.divergence].map(|sum| sum * batches.scale(None));
                let (loss, mut metrics) = distill::loss(self.distillation(), loss, divergence);
                metrics.extend(batches.metrics(input.data));
                (loss, metrics)
            }
        };
        let grad_norm = sums.total_squares().sqrt() / self.loss_factor();
        Ok(StepOutput {
            loss,
            metrics,
            router_losses: sums.router_losses,
            load: sums.load,
            grad_norm,
            tokens: batches.size.tokens,
            targets: batches.size.targets,
            reached: sums.reached,
        })
    }

    /// The task, for losses of whole documents. If they are compared or rated, with KTO's estimate from a pass over all
    /// samples of the step.
    fn step_objective(
        &self,
        input: &StepInput<'_>,
        stop: Stop<'_>,
    ) -> ft_base::Result<Option<Objective<'_>>> {
        let mut objective = self.objective(Part::Train);
        if let Some(Objective::Preferences(preferences, group)) = &mut objective {
            let gather = Gather::new(&self.model.decoder, &self.model.params, self.comm);
            let samples = samples_of(input.data, input.rows.iter().copied())?;
            let place = (group.part, input.step as usize * self.job.recipe.run.batch_rows);
            *group = preferences.kl(&self.scorer(&gather), input.data, place, &samples, stop)?;
        }
        Ok(objective)
    }

    /// Runs the micro-batches of this rank, and reduces the gradients of all ranks.
    fn run_micro_batches(
        &self,
        passes: &Passes<'_, '_>,
        times: &mut Times,
        stop: Stop<'_>,
    ) -> ft_base::Result<Sums> {
        let Passes { batches, accum, reduce, .. } = *passes;
        let params = &self.model.params;
        let share = 1.0 / batches.all.len().max(1) as f64;
        let (RouterLosses { aux, z }, factor) = (self.router(), share * self.loss_factor());
        let router = RouterLosses { aux: aux * factor, z: z * factor };
        let mut got = Collected::default();
        if self.ranks().stages() > 1 {
            check_stop(self.comm, stop)?;
            self.run_stages(passes, router, &mut got, times)?;
        } else {
            self.run_turns(passes, router, &mut got, times, stop)?;
        }
        if batches.all.is_empty() {
            reduce.end()?;
        }
        accum.settle(None)?;
        reduce.end_step()?;
        place::enter(place::Phase::Step, 0);
        let (loss, divergence) = (got.losses.total()?, got.divergences.total()?);
        let mut sums = Sums { loss, divergence, tally: got.tally, ..Sums::default() };
        let share = router.any().then_some(share);
        got.routings.iter().try_for_each(|r| sums.add_routing(r, share))?;
        sums.squares = match reduce.squares()? {
            Some(squares) => squares,
            None if self.ranks().stages() > 1 => optim::squares_by_flat(params)?,
            None => vec![(0, optim::grad_squares(params)?)],
        };
        sums.reached = accum.reached();
        Ok(sums)
    }

    /// Runs the micro-batches of this rank, in the turns of all ranks.
    fn run_turns(
        &self,
        passes: &Passes<'_, '_>,
        router: RouterLosses,
        got: &mut Collected,
        times: &mut Times,
        stop: Stop<'_>,
    ) -> ft_base::Result<()> {
        let Passes { input, batches, accum, reduce, objective } = *passes;
        let (decoder, lowest) = (&self.model.decoder, self.model.params.lowest_unit());
        let (seed, neftune) = (self.job.recipe.run.seed, self.job.recipe.data.neftune);
        let (factor, ranks) = (self.loss_factor(), self.ranks());
        let (context, mut unsaid) = (ranks.row_groups(), Tally::default());
        for turn in batches.all.chunks(ranks.data_parallel_size()) {
            check_stop(self.comm, stop)?;
            // Without a micro-batch for this rank, an empty one.
            let (rows, first) = turn.get(ranks.data_parallel_rank()).copied().unwrap_or_default();
            let own = LocalMicroBatch::new(Micro::collate(input.data, rows)?, context.as_ref());
            if !own.is_empty() {
                let random = (first, Some((seed, input.step)));
                let batch = own.batch(&decoder.config, random, self.distillation(), self.device())?;
                let sums = if ranks.reports_loss() { &mut got.tally } else { &mut unsaid };
                let (of, device) = (&own, self.device());
                let mut weigh =
                    objective.map(|o| move |losses: &[Tensor]| weigh(o, of, losses, sums, device));
                let mut walk = Walk::chosen(decoder, lowest, &self.execution)
                    .router_losses(router)
                    .neftune(neftune)
                    .hooks(reduce)
                    .timed(times)
                    .objective(weigh.as_mut().map(|w| w as _));
                let all = walk.train(&batch, batches.scale(objective) * factor, accum);
                let all = all.map_err(|e| self.comm.cause(e))?;
                got.divergences.keep(walk.take_divergences(), &own.micro().weights)?;
                got.routings.push(walk.into_routing());
                if objective.is_none() {
                    got.losses.keep(all, &own.micro().weights)?;
                }
            } else {
                let mut walk = Walk::chosen(decoder, lowest, &self.execution).hooks(reduce);
                walk.idle_train((seed, input.step), accum)?;
            }
            reduce.end()?;
            #[cfg(test)]
            small_device::check(&self.execution, input.step)?;
        }
        Ok(())
    }
}

/// Inputs of the passes of a step.
#[derive(Clone, Copy)]
pub(super) struct Passes<'a, 's> {
    pub input: &'a StepInput<'a>,
    pub batches: &'a MicroBatches<'a>,
    pub accum: &'a GradAccumulator<'s>,
    pub reduce: &'a Reduce<'s>,
    pub objective: Option<Objective<'a>>,
}

/// Weights of the targets of a rank from their losses, by the losses of the whole micro-batch.
pub(super) fn weigh(
    objective: Objective<'_>,
    own: &LocalMicroBatch<'_>,
    losses: &[Tensor],
    tally: &mut Tally,
    device: &Device,
) -> candle_core::Result<Tensor> {
    let values = loss::on_host(losses.to_vec())?.concat();
    let values = own.whole_losses(values).map_err(candle_core::Error::wrap)?;
    let mut weights = own.own_of(objective.weigh(&own.whole, values, tally));
    let n = weights.len();
    // A device has no address for zero bytes.
    weights.resize(n.max(1), 0.0);
    Tensor::new(&weights[..], device)?.narrow(0, 0, n)
}

/// Test device with too little memory, unless enough layers are recomputed.
#[cfg(test)]
pub mod small_device {
    use ft_engine::walk::Execution;
    use std::cell::Cell;

    thread_local! {
        /// First failing step, and number of recomputed layers that suffices.
        pub static SMALL: Cell<Option<(u64, usize)>> = const { Cell::new(None) };
    }

    /// Fails with the out-of-memory error of CUDA.
    pub fn check(execution: &Execution, step: u64) -> candle_core::Result<()> {
        match SMALL.get() {
            Some((from, layers)) if step >= from && execution.recompute.layers() < layers => {
                Err(candle_core::Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY)".into()))
            }
            _ => Ok(()),
        }
    }
}
