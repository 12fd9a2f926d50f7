//! One optimizer step, and evaluation.

use super::guard;
use crate::adapt::Params;
use crate::data::{Dataset, Micro};
use crate::kernel::loss;
use crate::log::place;
use crate::model::decoder::HostBatch;
use crate::model::sink::Sink;
use crate::model::{Batch, Decoder};
use crate::optim::{self, Optimizer, Rate};
use crate::walk::{Choices, Load, Part, RouterLosses, Times, Walk};
use candle_core::{Device, Tensor};

/// What stays the same over the steps of a run.
pub struct Setup<'a> {
    /// The model.
    pub decoder: &'a Decoder,
    /// What trains.
    pub params: &'a Params,
    /// The optimizer.
    pub optimizer: &'a Optimizer,
    /// Where to compute.
    pub device: &'a Device,
    /// Seed of dropout.
    pub seed: u64,
    /// What the plan chose.
    pub choices: Choices,
    /// Global gradient norm; 0 is off.
    pub clip: f64,
    /// Coefficients of the losses on routers.
    pub router: RouterLosses,
}

/// What a step did.
#[derive(Clone, Debug)]
pub struct Stepped {
    /// Mean loss of the step's targets.
    pub loss: f64,
    /// Load-balancing loss and z-loss before their coefficients, means over micro-batches; zero where not used.
    pub router_losses: (f64, f64),
    /// How often each expert was chosen.
    pub load: Load,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// Tokens that went through the model.
    pub tokens: usize,
    /// Supervised targets.
    pub targets: usize,
    /// Which trained tensors the backward pass reached.
    pub reached: Vec<bool>,
}

/// A micro-batch of a dataset as the model takes it.
pub fn host(m: &Micro) -> HostBatch<'_> {
    HostBatch { ids: &m.ids, positions: &m.positions, docs: &m.docs, targets: &m.targets }
}

/// One step: the gradients of all micro-batches of `rows`, normalised by the step's targets, then the update
/// with learning rates `lr`. `step` counts from 0.
///
/// # Errors
/// [`super::Error::NonFinite`] before anything is updated.
pub fn train_step(
    s: &Setup<'_>,
    data: &Dataset,
    rows: &[usize],
    step: u64,
    lr: Rate<'_>,
) -> crate::Result<Stepped> {
    step_until(s, data, rows, step, lr, &mut Times::start(false), &|| false)
}

/// As [`train_step`], adding the time of each part to `times`, and giving the step up once `stop` says so: it is asked
/// before each micro-batch, and nothing is updated then.
///
/// # Errors
/// As [`train_step`]; [`super::Error::Abandoned`].
pub fn step_until(
    s: &Setup<'_>,
    data: &Dataset,
    rows: &[usize],
    step: u64,
    lr: Rate<'_>,
    times: &mut Times,
    stop: &dyn Fn() -> bool,
) -> crate::Result<Stepped> {
    s.params.zero_grads()?;
    let grads = s.params.grads();
    let sink = Sink::new(&grads, s.params.tensors.len());
    let mut micros: Vec<Micro> =
        rows.chunks(s.choices.micro_rows.max(1)).map(|r| Micro::collate(data, r)).collect();
    micros.retain(|m| !m.ids.is_empty());
    let targets: usize = micros.iter().map(|m| m.targets.len()).sum();
    let tokens: usize = micros.iter().map(|m| m.ids.len()).sum();
    let scale = 1.0 / targets.max(1) as f64;
    let mut losses: Vec<Tensor> = Vec::new();
    let mut first = (0, 0);
    let lowest = s.params.lowest_unit();
    let share = 1.0 / micros.len().max(1) as f64;
    let router = RouterLosses { aux: s.router.aux * share, z: s.router.z * share };
    let (mut router_losses, mut load) = ((0.0, 0.0), Load::default());
    for m in &micros {
        if stop() {
            return Err(super::Error::Abandoned.into());
        }
        let batch = Batch::new(&s.decoder.config, host(m), first, Some((s.seed, step)), s.device)?;
        let mut walk = Walk::chosen(s.decoder, lowest, &s.choices).router_losses(router).timed(times);
        losses.extend(walk.train(&batch, scale, &sink)?);
        load.add(walk.routing());
        if router != RouterLosses::default() {
            let (aux, z) = walk.routing().losses()?;
            router_losses = (router_losses.0 + aux * share, router_losses.1 + z * share);
        }
        first = (first.0 + m.ids.len(), first.1 + m.targets.len());
    }
    place::enter(place::Phase::Step, 0);
    let loss = loss::total(&losses)? * scale;
    let grad_norm = optim::grad_norm(s.params)?;
    let total = loss + router_losses.0 + router_losses.1;
    let factor = optim::clip_factor(grad_norm, s.clip);
    guard::finite(s.params, step + 1, total, (grad_norm, factor), data, rows)?;
    s.optimizer.step(s.params, step + 1, lr, factor)?;
    times.lap(Part::Step, s.device)?;
    let reached = sink.reached();
    Ok(Stepped { loss, router_losses, load, grad_norm, tokens, targets, reached })
}

/// Mean loss over a dataset, and its number of targets.
pub fn evaluate(
    decoder: &Decoder,
    data: &Dataset,
    choices: &Choices,
    device: &Device,
) -> crate::Result<(f64, usize)> {
    evaluate_until(decoder, data, choices, device, &|| false)
}

/// As [`evaluate`], giving it up once `stop` says so, which is asked before each micro-batch.
///
/// # Errors
/// As [`evaluate`]; [`super::Error::Abandoned`].
pub fn evaluate_until(
    decoder: &Decoder,
    data: &Dataset,
    choices: &Choices,
    device: &Device,
    stop: &dyn Fn() -> bool,
) -> crate::Result<(f64, usize)> {
    let rows: Vec<usize> = (0..data.rows.len()).collect();
    let (mut sum, mut targets) = (0.0, 0);
    for chunk in rows.chunks(choices.micro_rows.max(1)) {
        if stop() {
            return Err(super::Error::Abandoned.into());
        }
        let m = Micro::collate(data, chunk);
        if m.targets.is_empty() {
            continue;
        }
        let batch = Batch::new(&decoder.config, host(&m), (0, 0), None, device)?;
        sum += loss::total(&Walk::chosen(decoder, None, choices).eval(&batch)?)?;
        targets += m.targets.len();
    }
    Ok((sum / targets.max(1) as f64, targets))
}

/// A probe of a model's logits: every token of the micro-batch [t, v].
pub fn probe(decoder: &Decoder, m: &Micro, device: &Device) -> crate::Result<Tensor> {
    let batch = Batch::new(&decoder.config, host(m), (0, 0), None, device)?;
    Ok(Walk::new(decoder, None, 0).logits(&batch)?)
}
