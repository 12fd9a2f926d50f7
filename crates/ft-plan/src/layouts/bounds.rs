//! Lower bounds of a layout's time and memory, from sums over the model: layouts beyond them need no plan.

use super::layout::Layout;
use super::predict::Rates;
use crate::time::actions::{Kind, Transfer};
use ft_engine::adapters::{Choice, Selection};
use ft_engine::params::build::ghost::is_quantized;
use ft_engine::ranks::{Axis, Mesh};
use ft_kernels::Machine;
use ft_recipe::{Master, OptimizerName, Quantize, Recipe};

/// Sums over the weights of a model: outside of experts, and of experts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sums {
    /// Bytes of frozen weights.
    frozen: [f64; 2],
    /// Values that train.
    trained: [f64; 2],
    /// Trained values of the embedding and the head, gathered at least once a micro-batch.
    ends: f64,
}

/// Lower bounds of a layout.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Seconds of a step.
    pub seconds: f64,
    /// Bytes of weights, gradients and optimizer on the device of a rank.
    pub memory: u64,
}

impl Sums {
    pub fn of(quantize: Quantize, selection: &Selection, m: Machine) -> Self {
        let mut sums = Self::default();
        for (module, choice) in selection.with_weights() {
            if !matches!(choice, Choice::Full { .. }) {
                let four_bit = is_quantized(module, choice, quantize);
                let width = if four_bit { 0.5 } else { m.width.min(m.stored) as f64 };
                sums.frozen[usize::from(module.expert.is_some())] += width * module.weight_values() as f64;
            }
        }
        for part in selection.parts() {
            sums.trained[usize::from(part.module.expert.is_some())] += part.elements() as f64;
            sums.ends += if part.module.layer.is_none() { part.elements() as f64 } else { 0.0 };
        }
        sums
    }
}

/// The model of the bounded layouts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Model {
    pub sums: Sums,
    /// Work of a row with nothing recomputed.
    pub row: f64,
    /// Bytes of a value in the compute dtype.
    pub width: f64,
    /// Most rows of a micro-batch.
    pub most_rows: usize,
}

impl Model {
    /// Bounds of a layout of a recipe.
    pub fn bounds(&self, r: &Recipe, layout: Layout, rates: Rates<'_>) -> Bounds {
        let Layout { pipeline, data, context, tensor, expert, zero } = layout;
        let stage = data * context * tensor;
        let kinds = [(Axis::Stage, tensor, stage), (Axis::ExpertReplica, expert, stage / expert)];
        let at = |from: u8, copies: usize| if zero >= from { copies as f64 } else { 1.0 };
        let plain = r.optimizer.name == OptimizerName::Adamw && r.optimizer.master == Master::Auto;
        let states = match (plain, self.width < 4.0) {
            (true, true) => 12.0,
            (true, false) => 8.0,
            (false, _) => 0.0,
        };
        let gradients = if r.optimizer.in_backward { 0.0 } else { 4.0 };
        let rows = r.run.batch_rows as f64 / data as f64;
        let least_micros = (rows / self.most_rows as f64).max(1.0);
        let most_micros =
            if r.run.micro_rows.is_auto() { rows } else { rows / r.run.micro_rows.count() as f64 };
        let mesh = Mesh { pipeline, data, context, tensor, expert };
        let (mut memory, mut micro, mut update) = (0.0, 0.0, 0.0);
        for (i, (axis, cut, copies)) in kinds.into_iter().enumerate() {
            let parts = (pipeline * cut) as f64;
            let (frozen, trained) = (self.sums.frozen[i] / parts, self.sums.trained[i] / parts);
            let weights = frozen + trained * self.width;
            let of_optimizer = trained * (gradients / at(2, copies) + states / at(1, copies));
            memory += if r.memory.offload.is_none() { weights / at(3, copies) + of_optimizer } else { 0.0 };
            let others = 1.0 - 1.0 / copies as f64;
            let members = rates.network.members(&mesh, axis, 0);
            let seconds = |kind, bytes: f64| {
                let t = Transfer { kind, axis, bytes: bytes * others, calls: 0.0 };
                if copies > 1 { rates.network.seconds(&t, members) } else { 0.0 }
            };
            // layers are gathered in both passes
            let once = if i == 0 { self.sums.ends / parts } else { 0.0 };
            let gathered = if zero >= 3 { frozen + (2.0 * trained - once) * self.width } else { 0.0 };
            let spread = if zero < 2 { trained * 4.0 } else { 0.0 };
            micro += seconds(Kind::Gather, gathered + spread) + seconds(Kind::Sum, trained * 4.0);
            let weights = if (1..3).contains(&zero) { trained * self.width } else { 0.0 };
            update += seconds(Kind::Gather, weights);
        }
        let ranks = (pipeline * stage) as f64;
        let waits = (1.0 + (pipeline - 1) as f64 / most_micros.max(1.0)) / rates.alone;
        let compute = self.row * r.run.batch_rows as f64 / ranks / rates.rate * waits.max(1.0);
        let links = micro * least_micros;
        let together = if rates.engines { compute.max(links) } else { compute + links };
        Bounds { seconds: together + update, memory: memory as u64 }
    }
}
