//! What the plan chooses: the fastest by its own account of time that fits the budget.
//!
//! Five things are open: how much of how many layers is computed again, where the inputs of those wait, how their 4-bit weights
//! are dequantized, how many logits exist at once, and with `run.micro_rows = "auto"` the rows of a micro-batch. All combinations are compared; what is
//! chosen has the least [`Work`] a row of those that fit, so that a larger budget never means more time, but for the
//! hundredth that inputs on the host have to save.

use super::ledger::Peak;
use super::report::bytes;
use super::step::{Levels, Parts};
use super::work::Work;
use super::{Machine, Prepared, Tokens, Workload};
use ft_engine::model::head::Head;
use ft_engine::model::layer::Level;
use ft_recipe::{Offload, Recompute};
use ft_engine::walk::{Dequantize, Execution, Inputs, Recomputed};
use candle_core::Result;

/// Tokens of a micro-batch beyond which a larger one spares nothing worth having.
const ENOUGH: u64 = 1 << 16;
/// Micro-batches that are compared at the most.
const SIZES: usize = 24;
/// The head's chunks that are compared, as shares of the usual one.
const CHUNKS: [(u64, u64); 6] = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (4, 1)];
/// Fewest rows of a chunk.
const FEWEST: u64 = 16;

/// Parts of a CUDA device's budget, of which one is kept back where the choices allow it: no GPU has confirmed what the
/// allocator is planned to hold.
const KEPT_BACK: u64 = 25;

/// Part of the host's memory that inputs take at the most where nobody said that they wait there: others live there too, and
/// page-locked memory is nobody else's.
pub const OF_THE_HOST: u64 = 2;

/// Share of a step that they save at the least there: no GPU has confirmed what crossing costs.
const WORTH: f64 = 0.01;

/// Bytes of a budget that the choices keep back.
pub fn reserve(machine: Machine, budget: u64) -> u64 {
    if machine.cuda { budget / KEPT_BACK } else { 0 }
}

/// What was chosen, and what that gives.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The execution.
    pub execution: Execution,
    /// Why.
    pub reasons: Reasons,
    /// The device at its peak.
    pub peak: Peak,
    /// Work of a micro-batch.
    pub work: Work,
    /// Tokens, with these micro-batches.
    pub workload: Workload,
}

/// Why each choice was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reasons {
    /// Of the recompute level.
    pub recompute: String,
    /// Of where inputs wait.
    pub inputs: String,
    /// Of how weights are dequantized.
    pub dequantize: String,
    /// Of the head's chunk.
    pub head_rows: String,
    /// Of the micro-batch.
    pub micro_rows: String,
}

/// What may be chosen for a recipe; none of the lists is empty.
struct Open {
    rows: Vec<usize>,
    heads: Vec<u64>,
    dequantize: Vec<Dequantize>,
    /// On the device first.
    inputs: Vec<Inputs>,
    /// In each list what takes less comes later, and takes longer.
    recompute: Vec<Vec<Recomputed>>,
}

impl Open {
    fn of(p: &Prepared<'_>) -> Self {
        let (r, walked) = (p.inputs.recipe, p.walked());
        // without a budget nothing says how far to go
        let known = p.inputs.budget.is_some();
        let whole = |level| vec![vec![Recomputed::mixed((walked, level), Level::Nothing, walked)]];
        let recompute = match r.memory.recompute {
            Recompute::None => whole(Level::Nothing),
            Recompute::Norms => whole(Level::Norms),
            Recompute::FeedForward => whole(Level::FeedForward),
            Recompute::Layers(n) => vec![vec![n.min(walked).into()]],
            Recompute::Auto if known => mixes(walked),
            Recompute::All | Recompute::Auto => whole(Level::All),
        };
        let dequantize = match r.memory.dequantize {
            ft_recipe::Dequantize::PerLayer if p.packed() => vec![Dequantize::PerLayer],
            ft_recipe::Dequantize::Auto if p.packed() && known => {
                vec![Dequantize::PerMatmul, Dequantize::PerLayer]
            }
            _ => vec![Dequantize::PerMatmul],
        };
        let at = |on_host| Inputs { on_host, pin: r.memory.pin };
        let inputs = match p.inputs_are_open() {
            true => vec![at(false), at(true)],
            false => vec![at(r.memory.offloads(Offload::Activations))],
        };
        let usual = Head::chunk_rows(p.vocab() as usize, p.inputs.machine.cuda) as u64;
        let heads = match p.head_is_free() && known {
            true => CHUNKS.iter().map(|(n, d)| (usual * n / d).max(FEWEST)).collect(),
            false => vec![usual],
        };
        let rows = match r.run.micro_rows.is_auto() && known {
            true => sizes(r.run.batch_rows / r.parallel.data.max(1), r.data.max_length as u64),
            false => vec![r.run.micro_rows.count()],
        };
        Self { rows, heads, dequantize, inputs, recompute }
    }

    /// Places of inputs, chunks and ways of dequantizing, in every combination.
    fn others(&self) -> impl Iterator<Item = (Inputs, usize, Dequantize)> + '_ {
        let heads = move |i| (0..self.heads.len()).map(move |h| (i, h));
        let pairs = self.inputs.iter().flat_map(move |i| heads(*i));
        pairs.flat_map(|(i, h)| self.dequantize.iter().map(move |d| (i, h, *d)))
    }
}

/// Layers at one level and those above them at a lower one, for all two: which of them spares most a byte depends on how
/// long rows are, and on the machine. More than two are never better by more than a layer's part.
fn mixes(walked: usize) -> Vec<Vec<Recomputed>> {
    let mix = |level, rest| (0..=walked).map(move |n| Recomputed::mixed((n, level), rest, walked)).collect();
    let lower = |level| Level::EACH.into_iter().filter(move |l| *l < level);
    Level::EACH.into_iter().flat_map(|level| lower(level).map(move |rest| mix(level, rest))).collect()
}

/// Micro-batches that divide `rows`, the smallest first.
fn sizes(rows: usize, length: u64) -> Vec<usize> {
    let enough = (ENOUGH / length.max(1)).max(1) as usize;
    let divisors = (1..=rows.min(enough).max(1)).filter(|n| rows.is_multiple_of(*n));
    divisors.take(SIZES).collect()
}

/// A micro-batch of some rows.
struct Size<'p> {
    rows: usize,
    workload: Workload,
    parts: Parts<'p>,
    /// Of micro-batches of the mean size, where that is another.
    mean: Option<Parts<'p>>,
}

impl<'p> Size<'p> {
    /// `whole` are the tokens of a micro-batch of `largest` rows: micro-batches are compared on the same step.
    fn new(p: &'p Prepared<'_>, open: &Open, rows: usize, (whole, largest): (Tokens, usize)) -> Result<Self> {
        let workload = p.workload(rows);
        let part = |n: u64| (n as f64 * rows as f64 / largest as f64).round() as u64;
        let mean = Tokens { tokens: part(whole.tokens), targets: part(whole.targets), ..workload.train };
        let of = |train| p.parts(Workload { train, eval: None, ..workload }, &open.heads);
        let mean = (mean != workload.train).then(|| of(mean)).transpose()?;
        Ok(Self { rows, workload, parts: p.parts(workload, &open.heads)?, mean })
    }

    /// Work a row, and peak bytes.
    fn weigh(&self, levels: Levels) -> Weighed {
        let work = self.mean.as_ref().unwrap_or(&self.parts).work(levels).total() / self.rows as f64;
        let rank = if levels.inputs.on_host { work * (1.0 + WORTH) } else { work };
        Weighed { levels, work, rank, total: self.parts.total(levels) }
    }
}

/// One combination.
#[derive(Clone, Copy)]
struct Weighed {
    levels: Levels,
    /// Work a row.
    work: f64,
    /// That, with what it has to be worth: what combinations are compared by.
    rank: f64,
    /// peak bytes.
    total: u64,
}

/// Compares all combinations and takes the fastest that fits and leaves the reserve; where none does, the one that takes
/// least.
pub fn choose(p: &Prepared<'_>) -> Result<Decision> {
    let open = Open::of(p);
    let budget = p.inputs.budget.map_or(u64::MAX, |b| b - reserve(p.inputs.machine, b));
    let largest = open.rows[open.rows.len() - 1];
    let whole = (p.workload(largest).train, largest);
    let of_rows = |rows: &usize| Size::new(p, &open, *rows, whole);
    let first = of_rows(&open.rows[0])?;
    let most = open.recompute.iter().flatten().copied().max().unwrap_or_default();
    let (inputs, dequantize) = (open.inputs[0], open.dequantize[0]);
    let mut least = first.weigh(Levels { recompute: most, inputs, dequantize, head: 0 });
    let mut without: Option<f64> = None;
    let mut best: Option<(Size<'_>, Weighed)> = None;
    let mut too_large = None;
    for size in std::iter::once(Ok(first)).chain(open.rows[1..].iter().map(of_rows)) {
        let size = size?;
        let mut found: Option<Weighed> = None;
        for (inputs, head, dequantize) in open.others() {
            for list in &open.recompute {
                for recompute in list {
                    if open.inputs.len() > 1 && !p.host_has_room(&size.workload, *recompute, inputs) {
                        continue;
                    }
                    let this = size.weigh(Levels { recompute: *recompute, inputs, dequantize, head });
                    if best.is_none() && this.total < least.total {
                        least = this;
                    }
                    if this.total <= budget {
                        if found.is_none_or(|f| (this.rank, this.total) < (f.rank, f.total)) {
                            found = Some(this);
                        }
                        if !inputs.on_host {
                            without = Some(without.map_or(this.work, |w| w.min(this.work)));
                        }
                        // recomputing more only takes longer
                        break;
                    }
                }
            }
        }
        match found {
            Some(found) if best.as_ref().is_none_or(|(_, b)| found.rank < b.rank) => {
                best = Some((size, found));
            }
            Some(_) => {}
            None => {
                // nor do more rows fit
                too_large = Some(size.rows);
                break;
            }
        }
    }
    let fits = best.is_some();
    let (size, chosen) = match best {
        Some(best) => best,
        None => (of_rows(&open.rows[0])?, least),
    };
    let execution = Execution {
        micro_rows: size.rows,
        recompute: chosen.levels.recompute,
        inputs: chosen.levels.inputs,
        dequantize: chosen.levels.dequantize,
        head_rows: usize::try_from(open.heads[chosen.levels.head]).unwrap_or(usize::MAX),
    };
    let told = Told { p, open: &open, size: &size, chosen, fits, too_large, without };
    Ok(Decision {
        execution,
        reasons: told.reasons(),
        peak: size.parts.peak(chosen.levels),
        work: size.parts.work(chosen.levels),
        workload: size.workload,
    })
}

/// A decision as it is told.
struct Told<'a, 'p> {
    p: &'a Prepared<'p>,
    open: &'a Open,
    size: &'a Size<'p>,
    chosen: Weighed,
    /// Whether it fits and leaves the reserve.
    fits: bool,
    /// Rows of the smallest micro-batch that did not fit.
    too_large: Option<usize>,
    /// The least work a row of what fits with inputs on the device.
    without: Option<f64>,
}

const NO_BUDGET: &str = "auto; no budget known: set memory.budget";

impl Told<'_, '_> {
    fn reasons(&self) -> Reasons {
        Reasons {
            recompute: self.recompute(),
            inputs: self.inputs(),
            dequantize: self.dequantized(),
            head_rows: self.head_rows(),
            micro_rows: self.micro_rows(),
        }
    }

    /// By how much the chosen combination is faster than another, in words.
    fn spares(&self, other: Levels) -> String {
        let other = self.size.weigh(other).work;
        format!("{:.1}% of a step", 100.0 * (1.0 - self.chosen.work / other))
    }

    fn inputs(&self) -> String {
        let (r, chosen) = (self.p.inputs.recipe, self.chosen.levels);
        if self.open.inputs.len() == 1 {
            return match (&r.memory.offload, self.p.inputs.machine.cuda) {
                (Some(_), _) => "the recipe says so",
                (None, false) => "the host is the device",
                (None, true) if r.memory.recompute != Recompute::Auto => "memory.recompute is not auto",
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
        match self.chosen.levels.recompute.layers() {
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
        let chosen = self.chosen.levels;
        let with = |dequantize| Levels { dequantize, ..chosen };
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

    fn head_rows(&self) -> String {
        let (chosen, open) = (self.chosen.levels, self.open);
        if !self.p.head_is_free() {
            return "default: gradients are summed over chunks".into();
        }
        let usual = Levels { head: 0, ..chosen };
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
