//! The optimizer over the flat buffers, the learning-rate schedule, the gradient norm.

mod offload;
mod schedule;

pub use offload::{PIECE, STAGED};
pub use schedule::Schedule;

use crate::adapt::Params;
use crate::kernel::Tensor;
use crate::kernel::optimizer::{AdamW, adamw, sum_squares};
use crate::recipe::{self, Decay};
use candle_core::{DType, Result};
use std::sync::atomic::Ordering;

/// Global L2 norm of all gradients.
pub fn grad_norm(params: &Params) -> Result<f64> {
    let grads: Vec<Tensor> = params.grads().into_iter().flatten().collect();
    Ok(sum_squares(&grads)?.sqrt())
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
        let on_cpu = params.units.iter().flatten().all(|u| u.compute.device().is_cpu());
        let piece = if on_cpu { PIECE } else { STAGED };
        let staged = offload::Staged::default();
        Self { groups, betas: o.betas, eps: o.eps, weight_decay: o.weight_decay, piece, staged }
    }

    /// Update number `t` (from 1) with the learning rates `lr` and the gradients times `grad_scale`; what the layers
    /// compute with is up to date afterwards. On CUDA the gradients are then zero.
    pub fn step(&self, params: &Params, t: u64, lr: Rate<'_>, grad_scale: f64) -> Result<()> {
        let numbers = |s: &ParamGroup| AdamW {
            lr: lr(s.peak) * s.lr_scale,
            betas: self.betas,
            eps: self.eps,
            weight_decay: if s.decays { self.weight_decay } else { 0.0 },
            t,
            grad_scale,
        };
        if params.offloaded {
            let groups: Vec<_> = self.groups.iter().map(|s| (s, numbers(s))).collect();
            return offload::step(params, &groups, self.piece, &self.staged);
        }
        for s in &self.groups {
            let Some(Some(unit)) = params.units.get(s.unit) else { continue };
            let (Some(grads), Some((m, v))) = (&unit.grads, &unit.moments) else {
                candle_core::bail!("unit {} has no gradients or moments", s.unit);
            };
            let part = |x: &Tensor| x.narrow(0, s.start, s.len);
            // f32 weights are what the layers compute with
            let copy = if unit.compute.dtype() == DType::F32 { None } else { Some(part(&unit.compute)?) };
            adamw(&part(&unit.master)?, &part(m)?, &part(v)?, &part(grads)?, copy.as_ref(), &numbers(s))?;
        }
        // the groups are all that trains; between them nothing is ever added
        let mut grads = params.units.iter().flatten().filter_map(|u| u.grads.as_ref());
        params.zeroed.store(grads.all(|g| !g.device().is_cpu()), Ordering::Relaxed);
        Ok(())
    }
}
