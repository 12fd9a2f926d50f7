//! Candidate execution settings of a recipe, and their costs.

use super::prepared::Prepared;
use crate::memory::{Settings, Simulation};
use crate::workload::{Tokens, Workload};
use candle_core::Result;
use ft_engine::model::head::Head;
use ft_engine::model::layer::Level;
use ft_engine::walk::{Dequantize, Inputs, Recomputed};
use ft_recipe::{Offload, Recipe, Recompute};

/// Tokens of a micro-batch; larger ones save no relevant time.
const ENOUGH_TOKENS: u64 = 1 << 16;

/// Largest number of micro-batch sizes compared.
const SIZES: usize = 24;

/// Logit chunk sizes compared, as fractions of the default.
const CHUNKS: [(u64, u64); 6] = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (4, 1)];

/// Smallest logit chunk, in rows.
const MIN_CHUNK: u64 = 16;

/// Smallest relative saving to justify offloading inputs; transfer costs are unconfirmed on GPUs.
const MIN_SAVING: f64 = 0.01;

/// Candidate settings of a recipe; no list is empty.
pub(super) struct SearchSpace {
    pub(super) rows: Vec<usize>,
    pub(super) heads: Vec<u64>,
    pub(super) dequantize: Vec<Dequantize>,
    /// Device before host.
    pub(super) inputs: Vec<Inputs>,
    /// Lists ordered from most memory and least time to least memory and most time.
    pub(super) recompute: Vec<Vec<Recomputed>>,
}

impl SearchSpace {
    pub(super) fn of(p: &Prepared<'_>) -> Self {
        let (r, walked) = (p.inputs.recipe, p.shape.walked());
        // nothing to search for without a budget
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
        let usual = Head::chunk_rows(p.shape.head.vocab, p.inputs.machine.cuda) as u64;
        let heads = match p.head_is_free() && known {
            true => CHUNKS.iter().map(|(n, d)| (usual * n / d).max(MIN_CHUNK)).collect(),
            false => vec![usual],
        };
        let rows = match r.run.micro_rows.is_auto() && known {
            true => sizes(r.run.batch_rows / r.parallel.data.max(1), enough_rows(r)),
            false => vec![r.run.micro_rows.count()],
        };
        Self { rows, heads, dequantize, inputs, recompute }
    }

    /// All combinations of input place, logit chunk (as an index) and dequantization.
    pub(super) fn others(&self) -> impl Iterator<Item = (Inputs, usize, Dequantize)> + '_ {
        let heads = move |i| (0..self.heads.len()).map(move |h| (i, h));
        let pairs = self.inputs.iter().flat_map(move |i| heads(*i));
        pairs.flat_map(|(i, h)| self.dequantize.iter().map(move |d| (i, h, *d)))
    }
}

/// For each pair of recompute settings, all splits with the higher level on the lower layers. The best pair
/// depends on row length and machine; a third level could gain at most one layer's worth.
fn mixes(walked: usize) -> Vec<Vec<Recomputed>> {
    let mix = |level, rest| (0..=walked).map(move |n| Recomputed::mixed((n, level), rest, walked)).collect();
    let lower = |level| Level::ALL.into_iter().filter(move |l| *l < level);
    Level::ALL.into_iter().flat_map(|level| lower(level).map(move |rest| mix(level, rest))).collect()
}

/// Rows of a micro-batch; larger ones save no relevant time.
pub(super) fn enough_rows(r: &Recipe) -> usize {
    (ENOUGH_TOKENS / (r.data.max_length as u64).max(1)).max(1) as usize
}

/// Divisors of `rows` as micro-batch sizes of up to `enough` rows, smallest first.
fn sizes(rows: usize, enough: usize) -> Vec<usize> {
    let divisors = (1..=rows.min(enough).max(1)).filter(|n| rows.is_multiple_of(*n));
    divisors.take(SIZES).collect()
}

/// A candidate micro-batch size.
pub(super) struct BatchSize<'p> {
    pub(super) rows: usize,
    pub(super) workload: Workload,
    pub(super) simulation: Simulation<'p>,
    /// Simulation with mean-sized micro-batches; `None` if equal to the largest.
    pub(super) mean: Option<Simulation<'p>>,
    /// Ratio of a step's time to the time of all micro-batches: above 1 if stages of a pipeline wait.
    bubble_factor: f64,
}

impl<'p> BatchSize<'p> {
    /// `whole` is a micro-batch of `largest` rows, scaled down to compare all sizes on the same tokens.
    pub(super) fn new(
        p: &'p Prepared<'_>,
        open: &SearchSpace,
        rows: usize,
        (whole, largest): (Tokens, usize),
    ) -> Result<Self> {
        let workload = p.workload(rows);
        let part = |n: u64| (n as f64 * rows as f64 / largest as f64).round() as u64;
        let mean = Tokens { tokens: part(whole.tokens), targets: part(whole.targets), ..workload.train };
        let of = |train| p.simulate(Workload { train, eval: None, ..workload }, &open.heads);
        let mean = (mean != workload.train).then(|| of(mean)).transpose()?;
        let (simulation, bubble_factor) = (p.simulate(workload, &open.heads)?, p.bubble_factor(rows));
        Ok(Self { rows, workload, simulation, mean, bubble_factor })
    }

    /// Work per row and peak bytes of a combination.
    pub(super) fn weigh(&self, settings: Settings) -> Scored {
        let work = self.mean.as_ref().unwrap_or(&self.simulation).work(settings).total();
        let work = work * self.bubble_factor / self.rows as f64;
        let rank = if settings.inputs.on_host { work * (1.0 + MIN_SAVING) } else { work };
        Scored { settings, work, rank, total: self.simulation.total(settings) }
    }
}

/// A combination with its cost.
#[derive(Clone, Copy)]
pub(super) struct Scored {
    pub(super) settings: Settings,
    /// Work per row.
    pub(super) work: f64,
    /// Sort key: work per row, plus the required saving for inputs on the host.
    pub(super) rank: f64,
    /// Peak bytes.
    pub(super) total: u64,
}
