//! The optimizer over the flat buffers, the learning-rate schedule, the gradient norm.

mod offload;
mod schedule;

pub use offload::PIECE;
pub use schedule::Schedule;

use crate::adapt::Params;
use crate::adapt::params::{Unit, common};
use crate::comm::{At, Comm};
use crate::kernel::Tensor;
use crate::kernel::optimizer::{AdamW, adamw, sum_squares};
use crate::recipe::{self, Decay};
use candle_core::{DType, Result};

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
}

impl Optimizer {
    /// The optimizer of a recipe for these tensors.
    pub fn new(params: &Params, o: &recipe::Optimizer) -> Self {
        let mut groups: Vec<ParamGroup> = Vec::new();
        for (t, s) in params.tensors.iter().zip(&params.slots) {
            let decays = o.weight_decay != 0.0 && (o.decay == Decay::All || t.matrix);
            let peak = o.peak_lr(t.part.method());
            let end = s.offset + t.elements();
            match groups.last_mut() {
                Some(l) if (l.unit, l.peak, l.lr_scale, l.decays) == (s.unit, peak, t.lr_scale, decays) => {
                    l.len = end - l.start;
                }
                _ => groups.push(ParamGroup {
                    unit: s.unit,
                    start: s.offset,
                    len: t.elements(),
                    peak,
                    lr_scale: t.lr_scale,
                    decays,
                }),
            }
        }
        Self { groups, betas: o.betas, eps: o.eps, weight_decay: o.weight_decay, piece: PIECE }
    }

    /// Update number `t` (from 1) with the learning rates `lr` and the gradients times `grad_scale`; what the layers
    /// compute with is up to date afterwards, on every rank.
    ///
    /// # Errors
    /// A rank that is lost; a tensor operation that fails.
    pub fn step(
        &self,
        params: &Params,
        comm: &dyn Comm,
        t: u64,
        lr: Rate<'_>,
        grad_scale: f64,
    ) -> crate::Result<()> {
        for (number, unit) in params.units.iter().enumerate() {
            let Some(unit) = unit else { continue };
            for s in self.groups.iter().filter(|s| s.unit == number) {
                let k = AdamW {
                    lr: lr(s.peak) * s.lr_scale,
                    betas: self.betas,
                    eps: self.eps,
                    weight_decay: if s.decays { self.weight_decay } else { 0.0 },
                    t,
                    grad_scale,
                };
                self.update(unit, s, params.offloaded, &k)?;
            }
            if params.shard.stage >= 1 && params.shard.ranks > 1 {
                // a copy: nobody reads a buffer that another writes
                let mine = unit.compute.narrow(0, unit.part.start, unit.part.len())?;
                let mine = mine.real()?.force_contiguous()?.into();
                let parts = params.shard.parts(unit.len);
                comm.gather(
                    At::unit("the gathering of updated weights", number),
                    mine,
                    &parts,
                    &unit.compute,
                )?;
            }
        }
        Ok(())
    }

    /// The update of what this rank holds of a group.
    fn update(&self, unit: &Unit, s: &ParamGroup, offloaded: bool, k: &AdamW) -> Result<()> {
        let (Some(grads), Some((m, v))) = (&unit.grads, &unit.moments) else {
            candle_core::bail!("unit {} has no gradients or moments", s.unit);
        };
        let mine = common(&m.at, &(s.start..s.start + s.len));
        if mine.is_empty() {
            return Ok(());
        }
        let (master, grads) = (unit.master.of(mine.clone())?, grads.of(mine.clone())?);
        let (m, v) = (m.of(mine.clone())?, v.of(mine.clone())?);
        let compute = unit.compute.narrow(0, mine.start, mine.len())?;
        if offloaded {
            return offload::step(&compute, &grads, [&master, &m, &v], self.piece, k);
        }
        // f32 weights are what the layers compute with
        let copy = if compute.dtype() == DType::F32 { None } else { Some(compute) };
        adamw(&master, &m, &v, &grads, copy.as_ref(), k)
    }
}
