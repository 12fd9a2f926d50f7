//! One optimizer step, and evaluation.

use super::gather::Gather;
use super::guard;
use super::reduce::{InBackward, Reduce};
use super::{Job, LossScale};
use candle_core::Device;
use ft_base::memory::place;
use ft_data::{Dataset, Micro, Size};
use ft_engine::adapt::Params;
use ft_engine::model::batch::HostBatch;
use ft_engine::model::sink::Sink;
use ft_engine::model::{Batch, Decoder};
use ft_engine::optim::{self, Optimizer, Rate};
use ft_engine::ranks::{self, At, Comm};
use ft_engine::walk::{self, Execution, Hooks, Load, NoHooks, Outline, RouterLosses, Times, Walk, visit};
use ft_kernels::loss;
use ft_kernels::tensor::Real;
use std::cell::{Cell, RefCell};

/// Number of evaluation micro-batches per rank between reductions of the loss.
const SHARED: usize = 1 << 12;

/// Inputs of a step that are constant over a run.
pub struct Setup<'a> {
    /// The model.
    pub decoder: &'a Decoder,
    /// Trained tensors and optimizer states.
    pub params: &'a Params,
    /// The optimizer.
    pub optimizer: &'a Optimizer,
    /// Device to compute on.
    pub device: &'a Device,
    /// Seed of dropout and NEFTune noise.
    pub seed: u64,
    /// Execution chosen by the plan.
    pub execution: Execution,
    /// Maximum global gradient norm; 0 disables clipping.
    pub clip: f64,
    /// Coefficients of the router losses.
    pub router: RouterLosses,
    /// NEFTune noise scale, alpha; 0 disables noise.
    pub neftune: f64,
    /// Loss scale, for f16. Changed by [`accumulate`] and [`update`].
    pub loss_scale: Cell<Option<LossScale>>,
    /// Data-parallel ranks; [`ft_engine::ranks::alone`] for a single one.
    pub comm: &'a dyn Comm,
}

impl<'a> Setup<'a> {
    /// Takes settings and device from a job.
    pub fn new(
        job: &'a Job,
        (decoder, params, optimizer): (&'a Decoder, &'a Params, &'a Optimizer),
        execution: Execution,
        loss_scale: Option<LossScale>,
        comm: &'a dyn Comm,
    ) -> Self {
        let r = &job.recipe;
        Self {
            decoder,
            params,
            optimizer,
            device: &job.device,
            seed: r.run.seed,
            execution,
            clip: r.run.clip,
            router: RouterLosses { aux: r.router.aux_loss, z: r.router.z_loss },
            neftune: r.data.neftune,
            loss_scale: Cell::new(loss_scale),
            comm,
        }
    }

    /// Factor on the loss in the backward pass; 1 without loss scaling.
    fn loss_factor(&self) -> f64 {
        self.loss_scale.get().map_or(1.0, LossScale::factor)
    }
}

/// Result of a step.
#[derive(Clone, Debug)]
pub struct Stepped {
    /// Mean loss over the targets of the step.
    pub loss: f64,
    /// Load-balancing loss and z-loss, averaged over micro-batches, before multiplication by the
    /// coefficients.
    pub router_losses: (f64, f64),
    /// Number of tokens per expert.
    pub load: Load,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// Number of tokens processed.
    pub tokens: usize,
    /// Number of targets.
    pub targets: usize,
    /// True for the trained tensors reached by the backward pass.
    pub reached: Vec<bool>,
}

/// Converts a micro-batch of a dataset to the input of the model.
pub fn host(m: &Micro) -> HostBatch<'_> {
    HostBatch { ids: &m.ids, positions: &m.positions, docs: &m.docs, targets: &m.targets }
}

/// Rows of a step.
#[derive(Clone, Copy)]
pub struct StepRows<'a> {
    /// Training data.
    pub data: &'a Dataset,
    /// Row indices.
    pub rows: &'a [usize],
    /// Step, from 0.
    pub step: u64,
}

/// Runs one step: accumulates gradients over all micro-batches, normalized by the number of targets in the
/// step, then updates the weights with learning rates `lr`.
///
/// # Errors
/// [`super::Error::NonFinite`], before any update.
pub fn train_step(s: &Setup<'_>, at: StepRows<'_>, lr: Rate<'_>) -> ft_base::Result<Stepped> {
    timed_step(s, at, lr, &mut Times::off())
}

/// As [`train_step`]. Adds the time of every part to `times`.
///
/// # Errors
/// As [`train_step`].
pub fn timed_step(
    s: &Setup<'_>,
    at: StepRows<'_>,
    lr: Rate<'_>,
    times: &mut Times,
) -> ft_base::Result<Stepped> {
    update(s, accumulate(s, at, lr, times, &|| 0)?, lr, times)
}

/// Accumulated gradients of a step, in the buffers of [`Params`], together with losses and counts.
pub struct Summed<'a> {
    at: StepRows<'a>,
    loss: f64,
    router_losses: (f64, f64),
    load: Load,
    tokens: usize,
    targets: usize,
    reached: Vec<bool>,
    /// Gradient norm, without the loss scale.
    grad_norm: f64,
}

/// Returns the number of a received signal, or 0 to continue.
pub type Stop<'a> = &'a dyn Fn() -> u64;

/// Shares the result of `stop` between ranks, and returns an error if any rank received a signal.
fn agree(comm: &dyn Comm, stop: Stop<'_>) -> ft_base::Result<()> {
    let all = comm.all_gather_object(At::all("whether to go on"), &stop())?;
    match all.into_iter().find(|asked| *asked != 0) {
        Some(asked) => Err(super::Error::Abandoned(asked).into()),
        None => Ok(()),
    }
}

/// Accumulates the gradients of all micro-batches of a step, dealt to the ranks in turn. Resets earlier
/// gradients and changes no weights, so a failed step can be repeated. Calls `stop` before every
/// micro-batch. In f16, repeats the step with a lower loss scale after an overflow. With
/// `optimizer.in_backward`, updates weights during the backward pass with learning rates `lr`; such a step
/// cannot be repeated.
///
/// # Errors
/// Device errors; [`super::Error::Abandoned`].
pub fn accumulate<'a>(
    s: &Setup<'_>,
    at: StepRows<'a>,
    lr: Rate<'_>,
    times: &mut Times,
    stop: Stop<'_>,
) -> ft_base::Result<Summed<'a>> {
    loop {
        let summed = accumulate_scaled(s, at, lr, times, stop)?;
        let overflowed = summed.loss.is_finite() && !summed.grad_norm.is_finite();
        match s.loss_scale.get().and_then(LossScale::after_overflow) {
            Some(lower) if overflowed => s.loss_scale.set(Some(lower)),
            _ => return Ok(summed),
        }
    }
}

fn accumulate_scaled<'a>(
    s: &Setup<'_>,
    at: StepRows<'a>,
    lr: Rate<'_>,
    times: &mut Times,
    stop: Stop<'_>,
) -> ft_base::Result<Summed<'a>> {
    let StepRows { data, rows, step } = at;
    let (grads, lens) = (s.params.grads(), s.params.lens());
    let sink = match s.comm.world() {
        1 if !s.params.in_backward => Sink::new(&grads, s.params.tensors.len()).over(s.params.new_sums()?),
        _ => {
            s.params.zero_grads()?;
            Sink::live(&lens, s.device, s.params.tensors.len())
        }
    };
    let gather = Gather::new(s.decoder, s.params, s.comm);
    let in_backward = s.params.in_backward.then(|| InBackward {
        optimizer: s.optimizer,
        at: optim::At { t: step + 1, lr, grad_scale: 1.0 },
        device: s.device,
        squares: RefCell::default(),
    });
    let reduce = Reduce::new(gather, s.params, s.comm, &sink, in_backward);
    // Sizes only. The tensors of a micro-batch are built when it runs.
    let chunks = rows.chunks(s.execution.micro_rows.max(1)).map(|r| Ok((r, Size::of(data, r)?)));
    let mut micros = chunks.collect::<Result<Vec<(&[usize], Size)>, ft_data::Error>>()?;
    micros.retain(|(_, size)| size.tokens > 0);
    if s.params.in_backward && micros.len() > s.comm.world() {
        return Err(
            super::Error::Usage("optimizer.in_backward: a step of several micro-batches".into()).into()
        );
    }
    let targets: usize = micros.iter().map(|(_, size)| size.targets).sum();
    let tokens: usize = micros.iter().map(|(_, size)| size.tokens).sum();
    let scale = 1.0 / targets.max(1) as f64;
    let mut losses = loss::Running::default();
    let mut first = (0, 0);
    let lowest = s.params.lowest_unit();
    let share = 1.0 / micros.len().max(1) as f64;
    let factor = s.loss_factor();
    let router = RouterLosses { aux: s.router.aux * share * factor, z: s.router.z * share * factor };
    let mut routings = Vec::new();
    for turn in micros.chunks(s.comm.world()) {
        agree(s.comm, stop)?;
        for (rank, (rows, size)) in turn.iter().enumerate() {
            if rank == s.comm.rank() {
                let m = Micro::collate(data, rows)?;
                let batch = Batch::new(&s.decoder.config, host(&m), first, Some((s.seed, step)), s.device)?;
                let mut walk = Walk::chosen(s.decoder, lowest, &s.execution)
                    .router_losses(router)
                    .neftune(s.neftune)
                    .hooks(&reduce)
                    .timed(times);
                losses.keep(walk.train(&batch, scale * factor, &sink)?)?;
                routings.push(walk.into_routing());
            }
            first = (first.0 + size.tokens, first.1 + size.targets);
        }
        if s.comm.rank() >= turn.len() {
            visit::pass(Outline::of(s.decoder).training(lowest), &reduce, &mut |_| Ok(()))?;
        }
        reduce.end()?;
        #[cfg(test)]
        small_device::check(&s.execution, step)?;
    }
    if micros.is_empty() {
        reduce.end()?;
    }
    sink.settle(None)?;
    place::enter(place::Phase::Step, 0);
    let loss = losses.total()?;
    let (mut router_losses, mut load) = ((0.0, 0.0), Load::default());
    for routing in routings {
        let decided = routing.read()?;
        load.add(&decided);
        if router != RouterLosses::default() {
            let (aux, z) = decided.losses()?;
            router_losses = (router_losses.0 + aux * share, router_losses.1 + z * share);
        }
    }
    let squares = reduce.squares()?.map_or_else(|| optim::grad_squares(s.params), Ok)?;
    let mine = Sums { loss, router_losses, squares, reached: sink.reached(), load };
    let all = mine.over_ranks(s.comm)?;
    let grad_norm = all.squares.sqrt() / factor;
    let Sums { loss, router_losses, reached, load, .. } = all;
    Ok(Summed { at, loss: loss * scale, router_losses, load, tokens, targets, reached, grad_norm })
}

/// Sums over the micro-batches of one rank, except gradients.
#[derive(Debug, Default)]
struct Sums {
    loss: f64,
    router_losses: (f64, f64),
    /// Sum of squares of this rank's shard of the gradients.
    squares: f64,
    reached: Vec<bool>,
    load: Load,
}

impl Sums {
    /// Sums over all ranks, in rank order.
    fn over_ranks(&self, comm: &dyn Comm) -> ft_base::Result<Self> {
        let (aux, z) = self.router_losses;
        let mut words: Vec<u64> = [self.loss, aux, z, self.squares].map(f64::to_bits).into();
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
            sum.router_losses.0 += number();
            sum.router_losses.1 += number();
            sum.squares += number();
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

/// Clips the accumulated gradients and updates the weights with learning rates `lr`.
///
/// # Errors
/// [`super::Error::NonFinite`], before any update.
pub fn update(
    s: &Setup<'_>,
    summed: Summed<'_>,
    lr: Rate<'_>,
    times: &mut Times,
) -> ft_base::Result<Stepped> {
    let Summed { at, loss, router_losses, load, tokens, targets, reached, grad_norm } = summed;
    let StepRows { data, rows, step } = at;
    let total = loss + router_losses.0 + router_losses.1;
    let factor = optim::clip_factor(grad_norm, s.clip);
    guard::finite((s.params, s.comm), step + 1, total, (grad_norm, factor), data, rows)?;
    if !s.params.in_backward {
        s.optimizer.step(s.params, s.comm, step + 1, lr, factor / s.loss_factor())?;
    }
    s.loss_scale.set(s.loss_scale.get().map(LossScale::after_step));
    times.lap(walk::Part::Step, s.device)?;
    Ok(Stepped { loss, router_losses, load, grad_norm, tokens, targets, reached })
}

/// Mean loss over a dataset, and number of targets.
pub fn evaluate(
    decoder: &Decoder,
    data: &Dataset,
    execution: &Execution,
    device: &Device,
) -> ft_base::Result<(f64, usize)> {
    evaluate_until(decoder, (&ranks::alone(), &NoHooks), data, execution, device, &|| 0)
}

/// As [`evaluate`], with micro-batches dealt to the ranks in turn. Calls `stop` before every micro-batch.
/// All ranks run a pass in every turn, because `around` contains collectives.
///
/// # Errors
/// As [`evaluate`]; [`super::Error::Abandoned`]; lost rank.
pub fn evaluate_until(
    decoder: &Decoder,
    (comm, around): (&dyn Comm, &dyn Hooks),
    data: &Dataset,
    execution: &Execution,
    device: &Device,
    stop: Stop<'_>,
) -> ft_base::Result<(f64, usize)> {
    let (count, micro) = (data.rows.len(), execution.micro_rows.max(1));
    let mut micros = (0..count).step_by(micro).map(|at| (at..(at + micro).min(count)).collect::<Vec<_>>());
    let (mut sums, mut sum, mut targets) = (Vec::new(), 0.0, 0);
    loop {
        let turn: Vec<Vec<usize>> = micros.by_ref().take(comm.world()).collect();
        if turn.is_empty() || sums.len() == SHARED {
            sum = shared(comm, &mut sums, sum)?;
        }
        if turn.is_empty() {
            return Ok((sum / targets.max(1) as f64, targets));
        }
        agree(comm, stop)?;
        let sizes = turn.iter().map(|rows| Ok(Size::of(data, rows)?.targets));
        let sizes = sizes.collect::<Result<Vec<usize>, ft_data::Error>>()?;
        targets += sizes.iter().sum::<usize>();
        let mine = turn.get(comm.rank()).zip(sizes.get(comm.rank()));
        match mine {
            Some((rows, n)) if *n > 0 => {
                let m = Micro::collate(data, rows)?;
                let batch = Batch::new(&decoder.config, host(&m), (0, 0), None, device)?;
                let mut walk = Walk::chosen(decoder, None, execution).hooks(around);
                sums.push(loss::total(&walk.eval(&batch)?)?.to_bits());
            }
            _ => {
                visit::pass(Outline::of(decoder).forward(), around, &mut |_| Ok(()))?;
                sums.extend(mine.map(|_| 0f64.to_bits()));
            }
        }
    }
}

/// Adds the losses of all ranks to `sum`, in the order of rows, so the result does not depend on the number
/// of ranks.
fn shared(comm: &dyn Comm, sums: &mut Vec<u64>, sum: f64) -> ft_base::Result<f64> {
    let all = comm.all_gather_object(At::all("the evaluation's losses"), &*sums)?;
    sums.clear();
    let turns = all.first().map_or(0, Vec::len);
    let each = (0..turns).flat_map(|turn| all.iter().filter_map(move |rank| rank.get(turn)));
    Ok(each.fold(sum, |sum, bits| sum + f64::from_bits(*bits)))
}

/// Computes the logits `[t, v]` of all tokens in a micro-batch.
pub fn probe(decoder: &Decoder, around: &dyn Hooks, m: &Micro, device: &Device) -> ft_base::Result<Real> {
    let batch = Batch::new(&decoder.config, host(m), (0, 0), None, device)?;
    Ok(Walk::new(decoder, None, 0).hooks(around).logits(&batch)?.real()?.clone())
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
