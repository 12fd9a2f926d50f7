//! Shares of a rank in the model, by kind of parallelism.

use ft_engine::model::modules::{Group, Module};
use ft_recipe::Recipe;

/// World sizes by kind of parallelism.
pub(super) struct Ranks {
    /// Ranks of a stage: they split states by ZeRO.
    pub(super) stage: u64,
    pub(super) zero: u8,
    pub(super) tensor: u64,
    expert: u64,
    pipeline: u64,
    layers: u64,
}

impl Ranks {
    pub(super) fn of(r: &Recipe, layers: usize) -> Self {
        let p = &r.parallel;
        Self {
            stage: p.stage(),
            zero: p.zero,
            tensor: p.tensor as u64,
            expert: p.expert as u64,
            pipeline: p.pipeline as u64,
            layers: layers as u64,
        }
    }

    /// This rank's share of a module's `bytes`, sharded from ZeRO stage `stage` on over the ranks that hold copies.
    /// With a pipeline this is the largest stage: its share of the layers, plus both ends of the model.
    pub(super) fn share(&self, m: &Module, bytes: u64, stage: u8) -> u64 {
        let whole = matches!(m.group, Group::Norms | Group::Recurrence | Group::Sinks);
        let by = match m.expert {
            _ if self.zero >= stage => self.stage,
            Some(_) => self.expert,
            None if whole => 1,
            None => self.tensor,
        };
        let mine = bytes.div_ceil(by);
        if self.pipeline > 1 && m.layer.is_some() {
            return mine * self.layers.div_ceil(self.pipeline) / self.layers.max(1);
        }
        mine
    }
}
