//! Search for the fastest execution that fits the budget, by the plan's own cost model.
//!
//! Five settings are open: recompute level of the layers, place of the recomputed layers' inputs,
//! dequantization of 4-bit weights, logit chunk size, and micro-batch rows if `run.micro_rows` is
//! "auto". The search compares all combinations and takes the fitting one with the least [`Work`] per
//! row. A larger budget therefore never costs time, except that inputs move to the host only to save at
//! least 1%.

use super::ledger::Peak;
use super::report::bytes;
use super::step::{Levels, Parts};
use super::work::Work;
use super::{Machine, Prepared, Tokens, Workload};
use candle_core::Result;
use ft_engine::model::head::Head;
use ft_engine::model::layer::Level;
use ft_engine::walk::{Dequantize, Execution, Inputs, Recomputed};
use ft_recipe::{Offload, Recompute};

/// Tokens of a micro-batch beyond which larger ones save no relevant time.
const ENOUGH: u64 = 1 << 16;
/// Largest number of micro-batch sizes compared.
const SIZES: usize = 24;
/// Logit chunk sizes compared, as fractions of the default.
const CHUNKS: [(u64, u64); 6] = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (4, 1)];
/// Smallest logit chunk, in rows.
const FEWEST: u64 = 16;

/// Divisor of a CUDA budget for the reserve: 1/25 stays free if possible, since the planned allocator
/// overhead is unconfirmed on GPUs.
const KEPT_BACK: u64 = 25;

/// Divisor of host memory for automatically offloaded inputs: at most 1/2, since page-locked memory is
/// lost to other processes.
pub const OF_THE_HOST: u64 = 2;

/// Smallest relative saving to justify offloading inputs; transfer costs are unconfirmed on GPUs.
const WORTH: f64 = 0.01;

/// Bytes of a budget to leave free.
pub fn reserve(machine: Machine, budget: u64) -> u64 {
    if machine.cuda { budget / KEPT_BACK } else { 0 }
}

/// Result of the search.
#[derive(Clone, Debug)]
pub struct Decision {
    pub execution: Execution,
    pub reasons: Reasons,
    /// Device peak.
    pub peak: Peak,
    /// Work of a micro-batch.
    pub work: Work,
    /// Workload with the chosen micro-batch.
    pub workload: Workload,
}

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

/// Candidate settings of a recipe; no list is empty.
struct Open {
    rows: Vec<usize>,
    heads: Vec<u64>,
    dequantize: Vec<Dequantize>,
    /// Device before host.
    inputs: Vec<Inputs>,
    /// Lists ordered from most memory and least time to least memory and most time.
    recompute: Vec<Vec<Recomputed>>,
}

impl Open {
    fn of(p: &Prepared<'_>) -> Self {
        let (r, walked) = (p.inputs.recipe, p.walked());
        // without a budget there is nothing to search for
        let known = p.inputs.budget.is_some();
        let whole = |level| vec![vec![Recomputed::mixed((walked, level), Level::None, walked)]];
        let recompute = match r.memory.recompute {
            Recompute::None => whole(Level::None),
            Recompute::Norms => whole(Level::Norms),
            Recompute::FeedForward => whole(Level::FeedForward),
            Recompute::Layers(n) => vec![vec![n.min(walked).into()]],
            Recompute::Auto if known => mixes(walked),
            Recompute::All | Recompute::Auto => whole(Level::Full),
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

    /// All combinations of input place, logit chunk (as an index) and dequantization.
    fn others(&self) -> impl Iterator<Item = (Inputs, usize, Dequantize)> + '_ {
        let heads = move |i| (0..self.heads.len()).map(move |h| (i, h));
        let pairs = self.inputs.iter().flat_map(move |i| heads(*i));
        pairs.flat_map(|(i, h)| self.dequantize.iter().map(move |d| (i, h, *d)))
    }
}

/// For each pair of recompute levels, all splits with the higher level on the lower layers. The best pair
/// depends on row length and machine; a third level could gain at most one layer's worth.
fn mixes(walked: usize) -> Vec<Vec<Recomputed>> {
    let mix = |level, rest| (0..=walked).map(move |n| Recomputed::mixed((n, level), rest, walked)).collect();
    let lower = |level| Level::ALL.into_iter().filter(move |l| *l < level);
    Level::ALL.into_iter().flat_map(|level| lower(level).map(move |rest| mix(level, rest))).collect()
}

/// Divisors of `rows` as micro-batch sizes, smallest first.
fn sizes(rows: usize, length: u64) -> Vec<usize> {
    let enough = (ENOUGH / length.max(1)).max(1) as usize;
    let divisors = (1..=rows.min(enough).max(1)).filter(|n| rows.is_multiple_of(*n));
    divisors.take(SIZES).collect()
}

/// A candidate micro-batch size.
struct Size<'p> {
    rows: usize,
    workload: Workload,
    parts: Parts<'p>,
    /// Simulation with mean-sized micro-batches; `None` if equal to the largest.
    mean: Option<Parts<'p>>,
}

impl<'p> Size<'p> {
    /// `whole` is a micro-batch of `largest` rows, scaled down so that all sizes are compared on the same
    /// tokens.
    fn new(p: &'p Prepared<'_>, open: &Open, rows: usize, (whole, largest): (Tokens, usize)) -> Result<Self> {
        let workload = p.workload(rows);
        let part = |n: u64| (n as f64 * rows as f64 / largest as f64).round() as u64;
        let mean = Tokens { tokens: part(whole.tokens), targets: part(whole.targets), ..workload.train };
        let of = |train| p.parts(Workload { train, eval: None, ..workload }, &open.heads);
        let mean = (mean != workload.train).then(|| of(mean)).transpose()?;
        Ok(Self { rows, workload, parts: p.parts(workload, &open.heads)?, mean })
    }

    /// Work per row and peak bytes of a combination.
    fn weigh(&self, levels: Levels) -> Weighed {
        let work = self.mean.as_ref().unwrap_or(&self.parts).work(levels).total() / self.rows as f64;
        let rank = if levels.inputs.on_host { work * (1.0 + WORTH) } else { work };
        Weighed { levels, work, rank, total: self.parts.total(levels) }
    }
}

/// A combination with its cost.
#[derive(Clone, Copy)]
struct Weighed {
    levels: Levels,
    /// Work per row.
    work: f64,
    /// Sort key: work per row, plus the required saving for inputs on the host.
    rank: f64,
    /// Peak bytes.
    total: u64,
}

/// Takes the fastest combination that fits and leaves the reserve free; if none does, the one with the
/// smallest peak.
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
                        // later entries recompute more and only take longer
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
                // more rows do not fit either
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

/// Context for wording the reasons.
struct Told<'a, 'p> {
    p: &'a Prepared<'p>,
    open: &'a Open,
    size: &'a Size<'p>,
    chosen: Weighed,
    /// Whether the choice fits and leaves the reserve free.
    fits: bool,
    /// Rows of the smallest micro-batch that did not fit.
    too_large: Option<usize>,
    /// Least work per row among fitting combinations with inputs on the device.
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

    /// Time saved by the choice over another combination, in words.
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
