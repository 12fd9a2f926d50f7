//! Gradients of a step, accumulated over its micro-batches.

use super::context::{StepInput, StepOutput, TrainContext};
use super::gather::Gather;
use super::loss_scale::LossScale;
use super::reduce::{InBackward, Reduce};
use super::turn::{OwnMicro, Stop, check_stop};
use crate::train::Error;
use crate::train::distill;
use crate::train::objective::{Objective, StepObjective};
use crate::train::preference::{Tally, WORDS, samples_of};
use candle_core::Device;
use ft_base::memory::place;
use ft_data::{Dataset, Micro, Size};
use ft_engine::model::sink::Sink;
use ft_engine::optim;
use ft_engine::ranks::{At, Comm};
use ft_engine::walk::{Load, RouterLosses, Routing, Times, Walk};
use ft_kernels::{Tensor, loss};
use ft_recipe::Part;
use serde_json::{Map, Value, json};
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
        let sink = if comm.world() == 1 && !params.in_backward {
            Sink::new(&grads, params.tensors.len()).over(params.new_sums()?)
        } else {
            params.zero_grads()?;
            Sink::live(&lens, self.device(), params.tensors.len())
        };
        let gather = Gather::new(&self.model.decoder, params, comm);
        let in_backward = params.in_backward.then(|| InBackward {
            optimizer: &self.model.optimizer,
            at: optim::At { t: input.step + 1, lr: input.lr, grad_scale: 1.0 },
            device: self.device(),
            squares: RefCell::default(),
        });
        let reduce = Reduce::new(gather, params, comm, &sink, in_backward);
        let batches = MicroBatches::new(input.data, input.rows, self.execution.micro_rows)?;
        if params.in_backward && batches.all.len() > self.ranks().at_once() {
            let why = "optimizer.in_backward: a step of several micro-batches";
            return Err(Error::Usage(why.into()).into());
        }
        let objective = self.step_objective(input, stop)?;
        let mine = self.run_micro_batches(input, &batches, (&sink, &reduce, objective), times, stop)?;
        let sums = mine.over_ranks(comm)?;
        let (loss, metrics) = match objective {
            Some(objective) => objective.result(&sums.tally),
            None => {
                let [loss, divergence] = [sums.loss, sums.divergence].map(|sum| sum * batches.scale(None));
                let (loss, mut metrics) = distill::loss(self.distillation(), loss, divergence);
                metrics.extend(batches.metrics(input.data));
                (loss, metrics)
            }
        };
        Ok(StepOutput {
            loss,
            metrics,
            router_losses: sums.router_losses,
            load: sums.load,
            grad_norm: sums.squares.sqrt() / self.loss_factor(),
            tokens: batches.tokens,
            targets: batches.targets,
            reached: sums.reached,
        })
    }

    /// The task, if its loss is of whole documents. If they are compared or rated, with KTO's estimate from a pass over
    /// all samples of the step.
    fn step_objective(
        &self,
        input: &StepInput<'_>,
        stop: Stop<'_>,
    ) -> ft_base::Result<Option<StepObjective<'_>>> {
        let Some(of) = self.objective(Part::Train) else { return Ok(None) };
        let Objective::Preferences(preferences, _) = of else {
            return Ok(Some(StepObjective { of, group: None }));
        };
        let gather = Gather::new(&self.model.decoder, &self.model.params, self.comm);
        let samples = samples_of(input.data, input.rows.iter().copied())?;
        let first = input.step as usize * self.job.recipe.run.batch_rows;
        let place = (Part::Train, first);
        let group = preferences.kl(&self.scorer(&gather), input.data, place, &samples, stop)?;
        Ok(Some(StepObjective { of, group: Some(group) }))
    }

    /// Coefficients of the router losses, times a factor.
    fn router_times(&self, factor: f64) -> RouterLosses {
        let RouterLosses { aux, z } = self.router();
        RouterLosses { aux: aux * factor, z: z * factor }
    }

    /// Runs the micro-batches of this rank, and reduces the gradients of all ranks.
    fn run_micro_batches(
        &self,
        input: &StepInput<'_>,
        batches: &MicroBatches<'_>,
        (sink, reduce, objective): (&Sink<'_>, &Reduce<'_>, Option<StepObjective<'_>>),
        times: &mut Times,
        stop: Stop<'_>,
    ) -> ft_base::Result<Sums> {
        let (decoder, params, comm) = (&self.model.decoder, &self.model.params, self.comm);
        let (seed, neftune) = (self.job.recipe.run.seed, self.job.recipe.data.neftune);
        let (mut losses, mut divergences) = (loss::Running::default(), loss::Running::default());
        let (mut tally, mut first) = (Tally::default(), (0, 0));
        let (lowest, factor) = (params.lowest_unit(), self.loss_factor());
        let share = 1.0 / batches.all.len().max(1) as f64;
        let router = self.router_times(share * factor);
        let mut routings = Vec::new();
        let ranks = self.ranks();
        let (context, mut unsaid) = (ranks.of_tokens(), Tally::default());
        for turn in batches.all.chunks(ranks.at_once()) {
            check_stop(comm, stop)?;
            let mut own = None;
            for (i, (rows, size)) in turn.iter().enumerate() {
                if i == ranks.own() {
                    own = Some((OwnMicro::new(Micro::collate(input.data, rows)?, context.as_ref()), first));
                }
                first = (first.0 + size.tokens, first.1 + size.targets);
            }
            if let Some((own, first)) = own.filter(|(own, _)| !own.is_empty()) {
                let random = (first, Some((seed, input.step)));
                let batch = own.batch(&decoder.config, random, self.distillation(), self.device())?;
                let sums = if ranks.speaks() { &mut tally } else { &mut unsaid };
                let (of, device) = (&own, self.device());
                let mut weigh =
                    objective.map(|o| move |losses: &[Tensor]| weigh(o, of, losses, sums, device));
                let mut walk = Walk::chosen(decoder, lowest, &self.execution)
                    .router_losses(router)
                    .neftune(neftune)
                    .hooks(reduce)
                    .timed(times);
                if let Some(weigh) = &mut weigh {
                    walk = walk.objective(weigh);
                }
                let all = walk.train(&batch, batches.scale(objective) * factor, sink);
                let all = all.map_err(|e| ranks.cause(e))?;
                divergences.keep(walk.take_divergences(), &own.micro().weights)?;
                routings.push(walk.into_routing());
                if objective.is_none() {
                    losses.keep(all, &own.micro().weights)?;
                }
            } else {
                let mut walk = Walk::chosen(decoder, lowest, &self.execution).hooks(reduce);
                walk.serve_train((seed, input.step), sink)?;
            }
            reduce.end()?;
            #[cfg(test)]
            small_device::check(&self.execution, input.step)?;
        }
        if batches.all.is_empty() {
            reduce.end()?;
        }
        sink.settle(None)?;
        place::enter(place::Phase::Step, 0);
        let (loss, divergence) = (losses.total()?, divergences.total()?);
        let mut sums = Sums { loss, divergence, tally, ..Sums::default() };
        let share = (router != RouterLosses::default()).then_some(share);
        routings.iter().try_for_each(|r| sums.add_routing(r, share))?;
        sums.squares = reduce.squares()?.map_or_else(|| optim::grad_squares(params), Ok)?;
        sums.reached = sink.reached();
        Ok(sums)
    }
}

/// Weights of the targets of a rank from their losses, by the losses of the whole micro-batch.
fn weigh(
    objective: StepObjective<'_>,
    own: &OwnMicro<'_>,
    losses: &[Tensor],
    tally: &mut Tally,
    device: &Device,
) -> candle_core::Result<Tensor> {
    let values = loss::on_host(losses.to_vec())?.concat();
    let values = own.whole_losses(values).map_err(candle_core::Error::wrap)?;
    let mut weights = own.own_of(objective.weigh(&own.whole, values, tally)?);
    let n = weights.len();
    // A device has no address for zero bytes.
    weights.resize(n.max(1), 0.0);
    Tensor::new(&weights[..], device)?.narrow(0, 0, n)
}

/// Micro-batches of a step. Holds sizes only: the tensors of a micro-batch are built when it runs.
struct MicroBatches<'a> {
    /// Rows and size of every micro-batch with tokens.
    all: Vec<(&'a [usize], Size)>,
    tokens: usize,
    targets: usize,
    /// Sum of the weights of the targets.
    weight: f64,
    samples: usize,
}

impl<'a> MicroBatches<'a> {
    fn new(data: &Dataset, rows: &'a [usize], micro_rows: usize) -> Result<Self, ft_data::Error> {
        let sized = rows.chunks(micro_rows.max(1)).map(|r| Ok((r, Size::of(data, r)?)));
        let mut all = sized.collect::<Result<Vec<(&[usize], Size)>, ft_data::Error>>()?;
        all.retain(|(_, size)| size.tokens > 0);
        let tokens = all.iter().map(|(_, size)| size.tokens).sum();
        let targets = all.iter().map(|(_, size)| size.targets).sum();
        let weight = all.iter().map(|(_, size)| size.weight).sum();
        let samples = all.iter().map(|(_, size)| size.samples).sum();
        Ok(Self { all, tokens, targets, weight, samples })
    }

    /// Factor on the sum of losses: of targets by weight, or of samples.
    fn scale(&self, objective: Option<StepObjective<'_>>) -> f64 {
        let by_samples = objective.is_some_and(|o| o.of.is_by_samples());
        let all = if by_samples { self.samples as f64 } else { self.weight };
        if all > 0.0 { 1.0 / all } else { 1.0 }
    }

    /// Metrics of supervised fine-tuning.
    fn metrics(&self, data: &Dataset) -> Map<String, Value> {
        let weight = data.rows.weighted.then(|| ("target_weight".into(), json!(self.weight)));
        weight.into_iter().collect()
    }
}

/// Sums over the micro-batches of one rank, except gradients.
#[derive(Debug, Default)]
struct Sums {
    loss: f64,
    /// Divergence from the teacher, in distillation.
    divergence: f64,
    router_losses: (f64, f64),
    /// Sum of squares of this rank's shard of the gradients.
    squares: f64,
    reached: Vec<bool>,
    load: Load,
    tally: Tally,
}

impl Sums {
    /// Adds the expert load of a micro-batch, and its router losses with factor `share`, if used.
    fn add_routing(&mut self, routing: &Routing, share: Option<f64>) -> ft_base::Result<()> {
        let decided = routing.read()?;
        self.load.add(&decided);
        if let Some(share) = share {
            let ((aux, z), sum) = (decided.losses()?, self.router_losses);
            self.router_losses = (sum.0 + aux * share, sum.1 + z * share);
        }
        Ok(())
    }

    /// Sums over all ranks, in rank order.
    fn over_ranks(&self, comm: &dyn Comm) -> ft_base::Result<Self> {
        let (aux, z) = self.router_losses;
        let numbers = [self.loss, self.divergence, aux, z, self.squares];
        let mut words: Vec<u64> = numbers.map(f64::to_bits).into();
        words.extend(self.tally.words());
        words.extend(self.reached.iter().map(|r| u64::from(*r)));
        for (layer, counts) in &self.load.layers {
            words.extend([*layer as u64, counts.len() as u64]);
            words.extend(counts);
        }
        let mut sum = Self { reached: vec![false; self.reached.len()], ..Self::default() };
        for words in comm.all_gather_object(At::all("the loss and the gradient norm"), &words)? {
            let mut words = words.into_iter();
            let mut number = || words.next().map_or(f64::NAN, f64::from_bits);
            sum.loss += number();
            sum.divergence += number();
            sum.router_losses.0 += number();
            sum.router_losses.1 += number();
            sum.squares += number();
            let tally: Vec<u64> = words.by_ref().take(WORDS).collect();
            if let Ok(tally) = tally.try_into() {
                sum.tally.add(tally);
            }
            sum.reached.iter_mut().zip(&mut words).for_each(|(r, w)| *r |= w != 0);
            let mut load = Load::default();
            while let (Some(layer), Some(n)) = (words.next(), words.next()) {
                load.layers.push((layer as usize, words.by_ref().take(n as usize).collect()));
            }
            sum.load.merge(&load);
        }
        Ok(sum)
    }
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
