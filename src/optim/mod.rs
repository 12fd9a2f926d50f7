//! The optimizer over the flat buffers, the learning-rate schedule, the gradient norm.

mod offload;
mod projected;
mod schedule;

pub use offload::{PIECE, STAGED};
pub use schedule::Schedule;

use crate::adapt::Params;
use crate::adapt::buffer::Held;
use crate::adapt::moments::Of;
use crate::adapt::params::Unit;
use crate::adapt::selection::Part;
use crate::comm::{self, Comm};
use crate::kernel::Tensor;
use crate::kernel::optimizer::{AdamW, adamw, adamw_rounded, adamw8bit, adamw8bit_rounded, sum_squares};
use crate::recipe::{self, Decay, OptimizerName};
use candle_core::{DType, Result};
use projected::GaLore;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// The sum of squares of this rank's part of all gradients. Over all ranks they are every gradient's, split alike at
/// every ZeRO stage.
pub fn grad_squares(params: &Params) -> Result<f64> {
    let mine = |u: &Unit| u.grads.as_ref().map(|g| g.of(u.part.clone()));
    let grads: Vec<Tensor> = params.units.iter().flatten().filter_map(mine).collect::<Result<_>>()?;
    sum_squares(&grads)
}

/// The factor that brings a norm down to `clip` (0: no clipping), as `torch.nn.utils.clip_grad_norm_`.
pub fn clip_factor(norm: f64, clip: f64) -> f64 {
    if clip > 0.0 { (clip / (norm + 1e-6)).min(1.0) } else { 1.0 }
}

/// The learning rate of an update, by the peak of what it updates (see [`Schedule::at`]).
pub type Rate<'a> = &'a dyn Fn(f64) -> f64;

/// A range of a unit's buffer that takes one learning rate and one weight decay.
#[derive(Clone, Debug, PartialEq)]
struct ParamGroup {
    unit: usize,
    start: usize,
    len: usize,
    /// Peak learning rate before the factor.
    peak: f64,
    lr_scale: f64,
    decays: bool,
}

/// AdamW over a model's trained tensors.
#[derive(Debug)]
pub struct Optimizer {
    groups: Vec<ParamGroup>,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
    /// Values that are on their way to or from the host at once, where the states live there.
    piece: usize,
    staged: offload::Staged,
    /// Where gradients are projected.
    galore: Option<GaLore>,
    /// Whether eps stands beside the second moment before its bias is corrected: the authors' of GaLore.
    eps_first: bool,
}

impl Optimizer {
    /// The optimizer of a recipe for these tensors.
    pub fn new(params: &Params, o: &recipe::Optimizer) -> Self {
        let mut groups: Vec<ParamGroup> = Vec::new();
        let mut placed: Vec<_> = params.tensors.iter().zip(&params.slots).collect();
        placed.sort_by_key(|(_, s)| (s.unit, s.offset));
        for (t, s) in placed {
            let decays = o.weight_decay != 0.0 && (o.decay == Decay::All || t.matrix);
            let peak = o.peak_lr(t.part.method());
            let factor = o.factor(t.lr_scale, t.part == Part::B);
            let end = s.offset + t.elements();
            match groups.last_mut() {
                Some(l) if (l.unit, l.peak, l.lr_scale, l.decays) == (s.unit, peak, factor, decays) => {
                    l.len = end - l.start;
                }
                _ => groups.push(ParamGroup {
                    unit: s.unit,
                    start: s.offset,
                    len: t.elements(),
                    peak,
                    lr_scale: factor,
                    decays,
                }),
            }
        }
        let on_cpu = params.units.iter().flatten().all(|u| u.compute.whole.device().is_cpu());
        let piece = if on_cpu { PIECE } else { STAGED };
        let staged = offload::Staged::default();
        let galore = o.name.projects().then_some(GaLore { gap: o.galore_gap as u64, scale: o.galore_scale });
        let eps_first = o.name == OptimizerName::Galore;
        let (betas, eps, weight_decay) = (o.betas, o.eps, o.weight_decay);
        Self { groups, betas, eps, weight_decay, piece, staged, galore, eps_first }
    }

    /// Update number `t` (from 1) with the learning rates `lr` and the gradients times `grad_scale`; what the layers
    /// compute with is up to date afterwards, on every rank (where ranks split it, once it is gathered). On CUDA the gradients are then zero.
    ///
    /// # Errors
    /// A lost rank; a tensor operation that fails.
    pub fn step(
        &self,
        params: &Params,
        comm: &dyn Comm,
        t: u64,
        lr: Rate<'_>,
        grad_scale: f64,
    ) -> crate::Result<()> {
        let mut mine = Vec::new();
        for (number, unit) in params.units.iter().enumerate() {
            let Some(unit) = unit else { continue };
            let Some(grads) = &unit.grads else {
                return Err(candle_core::Error::Msg(format!("unit {number} has no gradients")).into());
            };
            self.project((number, unit), params, grads, &At { t, lr, grad_scale })?;
            mine.extend(self.updates((number, unit), grads, &At { t, lr, grad_scale })?);
        }
        self.run(params, &mine)?;
        for number in 0..params.units.len() {
            gather(params, number, comm)?;
        }
        // the groups are all that trains; between them nothing is ever added. An update on the host leaves them as they are
        let mut grads = params.units.iter().flatten().filter_map(|u| u.grads.as_ref());
        let zeroed = !params.offloaded
            && self.galore.is_none()
            && params.shard.ranks == 1
            && grads.all(|g| !g.values.device().is_cpu());
        params.zeroed.store(zeroed, Ordering::Relaxed);
        Ok(())
    }

    /// As [`Optimizer::step`], of one unit, with gradients that are not its own: at least those of what this rank updates.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    pub fn step_unit(
        &self,
        params: &Params,
        comm: &dyn Comm,
        number: usize,
        grads: &Held,
        at: &At<'_>,
    ) -> crate::Result<()> {
        if let Some(Some(unit)) = params.units.get(number) {
            self.project((number, unit), params, grads, at)?;
            self.run(params, &self.updates((number, unit), grads, at)?)?;
        }
        gather(params, number, comm)
    }

    /// The updates of what this rank has of a unit.
    fn updates<'a>(
        &self,
        (number, unit): (usize, &'a Unit),
        grads: &'a Held,
        at: &At<'_>,
    ) -> Result<Vec<Update<'a>>> {
        let Some(moments) = &unit.moments else { candle_core::bail!("unit {number} has no moments") };
        let numbers = |s: &ParamGroup| self.numbers(s, at);
        let mut mine = Vec::new();
        for s in self.groups.iter().filter(|s| s.unit == number) {
            let parts = moments.parts(&(s.start..s.start + s.len));
            let parts = parts.iter().flat_map(|part| unit.by_kept(part));
            mine.extend(parts.map(|range| Update { unit, grads, range, k: numbers(s) }));
        }
        mine.retain(|u| !u.range.is_empty());
        Ok(mine)
    }

    fn numbers(&self, s: &ParamGroup, at: &At<'_>) -> AdamW {
        // m / (sqrt(v) + eps) by the root of the correction is m / (sqrt(v / c) + eps / sqrt(c))
        let root = (1.0 - self.betas[1].powf(at.t as f64)).sqrt();
        AdamW {
            lr: (at.lr)(s.peak) * s.lr_scale,
            betas: self.betas,
            eps: if self.eps_first { self.eps / root } else { self.eps },
            weight_decay: if s.decays { self.weight_decay } else { 0.0 },
            t: at.t,
            grad_scale: at.grad_scale,
        }
    }

    /// Updates those matrices of a unit whose gradients are projected.
    fn project(
        &self,
        (number, unit): (usize, &Unit),
        params: &Params,
        grads: &Held,
        at: &At<'_>,
    ) -> Result<()> {
        let Some(galore) = &self.galore else { return Ok(()) };
        for p in &unit.projected {
            let start = params.slots[p.index].offset;
            let of = |g: &&ParamGroup| g.unit == number && (g.start..g.start + g.len).contains(&start);
            let Some(group) = self.groups.iter().find(of) else {
                candle_core::bail!("{} has no learning rate", params.tensors[p.index].name);
            };
            galore.step(params, (unit, p), grads, &self.numbers(group, at))?;
        }
        Ok(())
    }

    fn run(&self, params: &Params, updates: &[Update<'_>]) -> Result<()> {
        match params.offloaded || params.weights_offloaded {
            true => {
                let longest = self.groups.iter().map(|g| g.len).max().unwrap_or(0);
                offload::step(updates, self.piece, (longest, params.pin), &self.staged)
            }
            false => updates.iter().try_for_each(Update::on_device),
        }
    }
}

/// Which update it is.
pub struct At<'a> {
    /// Its number, from 1.
    pub t: u64,
    /// Learning rates.
    pub lr: Rate<'a>,
    /// Factor on gradients.
    pub grad_scale: f64,
}

/// Gives every rank what the others have updated of a unit, where each updates a part.
fn gather(params: &Params, number: usize, comm: &dyn Comm) -> crate::Result<()> {
    let Some(Some(unit)) = params.units.get(number) else { return Ok(()) };
    if params.shard.stage == 0 || params.shard.ranks == 1 || params.is_split() {
        return Ok(());
    }
    let (at, parts) =
        (comm::At::unit("the gathering of updated weights", number), params.shard.parts(unit.len));
    for all in unit.shared() {
        // a copy: nobody reads a buffer that another writes
        let mine = all.narrow(0, unit.part.start, unit.part.len())?;
        comm.gather(at, mine.real()?.force_contiguous()?.into(), &parts, all)?.wait()?;
    }
    Ok(())
}

/// The update of a range of a unit's buffers, all of it in one parameter group.
#[derive(Clone)]
struct Update<'a> {
    unit: &'a Unit,
    grads: &'a Held,
    range: Range<usize>,
    k: AdamW,
}

impl Update<'_> {
    fn grads(&self) -> Result<Tensor> {
        self.grads.of(self.range.clone())
    }

    /// Master weights.
    fn master(&self) -> Result<Tensor> {
        self.unit.master.of(self.range.clone())
    }

    /// What the layers compute with.
    fn compute(&self) -> Result<Tensor> {
        self.unit.compute.held.of(self.range.clone())
    }

    /// Whether what the layers compute with is all there is of these weights.
    fn is_rounded(&self) -> bool {
        !self.unit.keeps(&self.range)
    }

    /// Updates the states from gradients that are where they are, and `copy`; weights without an f32 copy, wherever they are.
    fn apply(&self, grads: &Tensor, copy: Option<&Tensor>) -> Result<()> {
        let Some(moments) = &self.unit.moments else { candle_core::bail!("no moments to update") };
        let moments = moments.of(self.range.clone())?;
        if self.is_rounded() {
            return self.apply_rounded(grads, moments);
        }
        let p = self.master()?;
        match moments {
            Of::Wide([m, v]) => adamw(&p, &m, &v, grads, copy, &self.k),
            Of::Coded(all) => adamw8bit(&p, &all, grads, copy, &self.k),
        }
    }

    fn apply_rounded(&self, grads: &Tensor, moments: Of) -> Result<()> {
        let held = self.compute()?;
        let draws = self.unit.draws(self.k.t, self.range.start);
        // itself, where it is there already
        let p: Tensor = held.real()?.to_device(grads.real()?.device())?.into();
        match moments {
            Of::Wide([m, v]) => adamw_rounded(&p, [&m, &v, grads], draws, &self.k)?,
            Of::Coded(all) => adamw8bit_rounded(&p, &all, grads, draws, &self.k)?,
        }
        let (p, home) = (p.real()?, held.real()?.device());
        match p.device().same_device(home) {
            true => Ok(()),
            false => held.slice_set(&p.to_device(home)?.into(), 0, 0),
        }
    }

    /// Where the states are beside what the layers compute with.
    fn on_device(&self) -> Result<()> {
        // f32 weights are what the layers compute with
        let copied = self.unit.compute.whole.dtype() != DType::F32 && !self.is_rounded();
        let copy = copied.then(|| self.compute()).transpose()?;
        self.apply(&self.grads()?, copy.as_ref())
    }
}
