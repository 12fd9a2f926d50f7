//! Reasons of the choices, in words.

use super::candidates::{BatchSize, Scored, SearchSpace};
use super::prepared::Prepared;
use crate::memory::Settings;
use crate::units::bytes;
use ft_engine::walk::Dequantize;
use ft_recipe::Recompute;

/// Reason for each choice, in words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reasons {
    pub recompute: String,
    /// For the place of recomputed layers' inputs.
    pub inputs: String,
    pub dequantize: String,
    /// For the logit chunk.
    pub head_rows: String,
    pub micro_rows: String,
}

/// Context for wording the reasons.
pub(super) struct Explanation<'a, 'p> {
    pub(super) p: &'a Prepared<'p>,
    pub(super) open: &'a SearchSpace,
    pub(super) size: &'a BatchSize<'p>,
    pub(super) chosen: Scored,
    /// Whether the choice fits and leaves the reserve free.
    pub(super) fits: bool,
    /// Rows of the smallest micro-batch over budget.
    pub(super) too_large: Option<usize>,
    /// Least work per row among fitting combinations with inputs on the device.
    pub(super) without: Option<f64>,
}

const NO_BUDGET: &str = "auto; no budget known: set memory.budget";

impl Explanation<'_, '_> {
    pub(super) fn reasons(&self) -> Reasons {
        Reasons {
            recompute: self.recompute(),
            inputs: self.inputs(),
            dequantize: self.dequantized(),
            head_rows: self.logit_chunk(),
            micro_rows: self.micro_rows(),
        }
    }

    /// Time saved by the choice over another combination, in words.
    fn spares(&self, other: Settings) -> String {
        let other = self.size.weigh(other).work;
        format!("{:.1}% of a step", 100.0 * (1.0 - self.chosen.work / other))
    }

    fn inputs(&self) -> String {
        let (r, chosen) = (self.p.inputs.recipe, self.chosen.settings);
        if self.open.inputs.len() == 1 {
            return match (&r.memory.offload, self.p.inputs.machine.cuda) {
                (Some(_), _) => "the recipe says so",
                (None, false) => "the host is the device",
                (None, true) if r.memory.recompute != Recompute::Auto => "memory.recompute is not auto",
                (None, true) if r.parallel.pipeline > 1 => "with parallel.pipeline they stay on the device",
                (None, true) if self.p.inputs.budget.is_none() => NO_BUDGET,
                (None, true) => "auto: memory of the host is not known; memory.host_budget says it",
            }
            .into();
        }
        match (chosen.inputs.on_host && chosen.recompute.layers() > 1, self.without) {
            (true, Some(w)) => {
                let spared = 100.0 * (1.0 - self.chosen.work / w);
                format!("auto: saves {spared:.1}% of a step, with less computed again")
            }
            (true, None) if self.fits => "auto: nothing fits without".into(),
            (true, None) => "auto: what takes least".into(),
            (false, _) if chosen.recompute.layers() == 0 => "auto: none is needed".into(),
            (false, _) => {
                "auto: moving them spares too little of a step, or takes too much of the host".into()
            }
        }
    }

    fn recompute(&self) -> String {
        let (Some(budget), Recompute::Auto) = (self.p.inputs.budget, self.p.inputs.recipe.memory.recompute)
        else {
            return match self.p.inputs.recipe.memory.recompute {
                Recompute::All => "the recipe says all",
                Recompute::None => "the recipe says none",
                Recompute::Norms => "the recipe says norms",
                Recompute::FeedForward => "the recipe says feed_forward",
                Recompute::Layers(_) => "the recipe says so",
                Recompute::Auto => NO_BUDGET,
            }
            .into();
        };
        match self.chosen.settings.recompute.layers() {
            _ if !self.fits && self.chosen.total <= budget => {
                let left = bytes(budget - self.chosen.total);
                format!("auto: what takes least; it leaves {left} of {} free", bytes(budget))
            }
            _ if !self.fits => "auto: not even recomputing all layers fits".into(),
            0 => "auto: all saved activations fit".into(),
            _ => format!("auto: the fastest that fits {}", bytes(budget)),
        }
    }

    fn dequantized(&self) -> String {
        let chosen = self.chosen.settings;
        let with = |dequantize| Settings { dequantize, ..chosen };
        match self.p.inputs.recipe.memory.dequantize {
            _ if !self.p.packed() => "no 4-bit weights".into(),
            ft_recipe::Dequantize::PerMatmul | ft_recipe::Dequantize::PerLayer => "the recipe says so".into(),
            ft_recipe::Dequantize::Auto if self.p.inputs.budget.is_none() => NO_BUDGET.into(),
            ft_recipe::Dequantize::Auto if chosen.recompute.products() == 0 => {
                "auto: no product is recomputed, so each weight is dequantized once a pass anyway".into()
            }
            ft_recipe::Dequantize::Auto if chosen.dequantize == Dequantize::PerLayer => {
                format!("auto: dequantizing a layer once saves {}", self.spares(with(Dequantize::PerMatmul)))
            }
            ft_recipe::Dequantize::Auto
                if self.size.weigh(with(Dequantize::PerLayer)).work < self.chosen.work =>
            {
                "auto: a whole dequantized layer does not fit".into()
            }
            ft_recipe::Dequantize::Auto => {
                "auto: dequantizing again is faster than keeping a whole layer".into()
            }
        }
    }

    fn logit_chunk(&self) -> String {
        let (chosen, open) = (self.chosen.settings, self.open);
        if !self.p.head_is_free() {
            return "default: gradients are summed over chunks".into();
        }
        let usual = Settings { head: 0, ..chosen };
        match (open.heads[chosen.head], open.heads[0]) {
            _ if open.heads.len() == 1 => NO_BUDGET.into(),
            (n, u) if n > u => format!("auto: larger than the default, saves {}", self.spares(usual)),
            (n, u) if n < u => "auto: smaller than the default, to fit".into(),
            _ => "auto: the default".into(),
        }
    }

    fn micro_rows(&self) -> String {
        let r = self.p.inputs.recipe;
        let mut why = match (r.run.micro_rows.is_auto(), self.too_large) {
            (false, _) => return "the recipe says so".into(),
            _ if self.p.inputs.budget.is_none() => NO_BUDGET.into(),
            (true, Some(n)) if self.fits => format!("auto: the fastest that fits; {n} rows do not"),
            (true, Some(_)) if self.p.inputs.budget.is_some_and(|b| self.chosen.total <= b) => {
                "auto: what takes least; the reserve does not fit beside more".to_string()
            }
            (true, Some(_)) => "auto: not even one row fits".to_string(),
            (true, None) if r.parallel.pipeline > 1 && self.open.rows.len() == 1 => {
                "auto: as many as fit on every stage".to_string()
            }
            (true, None) => {
                format!("auto: the fastest of {:?}, with what each has to recompute", self.open.rows)
            }
        };
        if r.router.aux_loss != 0.0 {
            why += "; router.aux_loss is a mean over such micro-batches";
        }
        why
    }
}
