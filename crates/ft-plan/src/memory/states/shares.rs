//! Shares of a rank in the model, by kind of parallelism.

use ft_engine::adapters::Selection;
use ft_engine::model::Units;
use ft_engine::model::modules::{Group, Module};
use ft_engine::params::buffers::cut_module;
use ft_recipe::Recipe;
use std::ops::Range;

/// World sizes by kind of parallelism.
pub(super) struct Ranks {
    /// Ranks of a stage: they split states by ZeRO.
    pub(super) stage: u64,
    pub(super) zero: u8,
    pub(super) tensor: u64,
    /// Ranks of an expert group.
    pub(super) expert: u64,
    /// Experts of the rank with the most trained values, if ranks split them.
    pub(super) own: Option<Range<usize>>,
    /// Units of the stage.
    units: Units,
    tied: bool,
    /// Ranks of the first and the last stage, if these share a trained table.
    pub(super) ends: Option<u64>,
}

impl Ranks {
    pub(super) fn of(r: &Recipe, selection: &Selection, units: Units) -> Self {
        let p = &r.parallel;
        let shared = selection.tied && selection.parts().iter().any(|t| t.module.group == Group::Embedding);
        Self {
            stage: p.stage(),
            zero: p.zero,
            tensor: p.tensor as u64,
            expert: p.expert as u64,
            own: own(selection, p.expert),
            units,
            tied: selection.tied,
            ends: (p.pipeline > 1 && shared).then(|| 2 * p.stage()),
        }
    }

    /// Whether the rank holds a module.
    pub(super) fn has(&self, m: &Module) -> bool {
        let unit = m.unit(self.units.layers);
        let here = self.units.has(unit) || self.tied && unit == 0 && self.units.has_head();
        here && m.expert.is_none_or(|e| self.own.as_ref().is_none_or(|own| own.contains(&e)))
    }

    /// This rank's share of `bytes`, sharded over `copies` from ZeRO stage `stage` on.
    pub(super) fn share(&self, copies: u64, bytes: u64, stage: u8) -> u64 {
        bytes.div_ceil(if self.zero >= stage { copies } else { 1 })
    }
}

/// The selection with the dimensions of modules on a rank.
pub(super) fn cut(selection: &Selection, ranks: usize) -> Selection {
    let modules = selection.modules.iter().map(|(m, choice)| (cut_module(m, ranks), *choice));
    Selection { modules: modules.collect(), ..selection.clone() }
}

/// The experts of the rank with the most trained values in experts; the first of several.
pub fn own(selection: &Selection, ranks: usize) -> Option<Range<usize>> {
    if ranks <= 1 {
        return None;
    }
    let experts = selection.modules.iter().filter_map(|(m, _)| m.expert).max().map_or(0, |e| e + 1);
    let n = experts / ranks;
    let mut trained = vec![0u64; ranks];
    for part in selection.parts() {
        if let Some(sum) = part.module.expert.and_then(|e| trained.get_mut(e / n.max(1))) {
            *sum += part.elements() as u64;
        }
    }
    let most = trained.iter().copied().max().unwrap_or(0);
    let member = trained.iter().position(|n| *n == most).unwrap_or(0);
    Some(member * n..(member + 1) * n)
}
