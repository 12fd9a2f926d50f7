//! Search for the fastest execution within the budget, by the plan's own cost model.
//!
//! Five settings are open: recompute level of the layers, place of the recomputed layers' inputs,
//! dequantization of 4-bit weights, logit chunk size, and micro-batch rows if `run.micro_rows` is
//! "auto". The search compares all combinations and takes the fitting one with the least [`Work`] per
//! row. A larger budget therefore never costs time, except that inputs move to the host only to save at
//! least 1%.

use super::candidates::{BatchSize, Scored, SearchSpace, enough_rows};
use super::prepared::{Inputs, Prepared};
use super::reasons::{Explanation, Reasons};
use crate::memory::{Peak, Settings};
use crate::time::Work;
use crate::workload::{Tokens, Workload};
use candle_core::Result;
use ft_engine::walk::{Execution, Recomputed};
use ft_kernels::Machine;

/// Divisor of a CUDA budget for the reserve: 1/25 stays free if possible, since the planned allocator
/// overhead is unconfirmed on GPUs.
const RESERVE_DIVISOR: u64 = 25;

/// Bytes of a budget to leave free.
pub fn reserve(machine: Machine, budget: u64) -> u64 {
    if machine.cuda { budget / RESERVE_DIVISOR } else { 0 }
}

/// Result of the search.
#[derive(Clone, Debug)]
pub struct SearchResult {
    pub execution: Execution,
    pub reasons: Reasons,
    /// Device peak.
    pub peak: Peak,
    /// The mean training micro-batch.
    pub mean: Tokens,
    /// Work of the mean micro-batch.
    pub work: Work,
    /// Workload with the chosen micro-batch.
    pub workload: Workload,
}

/// Combinations seen so far.
struct Search<'s, 'p> {
    prepared: &'s Prepared<'p>,
    space: &'s SearchSpace,
    /// Bytes to stay within.
    budget: u64,
    /// The combination with the smallest peak.
    least: Scored,
    /// Least work per row among fitting combinations with inputs on the device.
    on_device: Option<f64>,
}

impl Search<'_, '_> {
    /// Fastest combination of a micro-batch size within the budget.
    fn fastest(&mut self, size: &BatchSize<'_>, tracks_least: bool) -> Option<Scored> {
        let (p, space, budget, mut least) = (self.prepared, self.space, self.budget, self.least);
        let mut fastest: Option<Scored> = None;
        for (inputs, head, dequantize) in space.others() {
            let host_fits =
                |r: &Recomputed| space.inputs.len() == 1 || p.host_has_room(&size.workload, *r, inputs);
            let settings = |r: &Recomputed| Settings { recompute: *r, inputs, dequantize, head };
            for list in &space.recompute {
                // more recomputed layers have more inputs on the host
                let list = &list[..list.partition_point(host_fits)];
                let mut total = |r: &Recomputed| {
                    let total = size.simulation.total(settings(r));
                    if tracks_least && total < least.total {
                        least = size.weigh(settings(r));
                    }
                    total
                };
                // later entries take longer; from the second one on, each takes less memory than the one before
                let Some((first, rest)) = list.split_first() else { continue };
                let Some(last) = rest.last().filter(|_| total(first) > budget) else {
                    self.take(&mut fastest, size.weigh(settings(first)));
                    continue;
                };
                if total(last) <= budget {
                    let fits = rest.partition_point(|r| total(r) > budget);
                    self.take(&mut fastest, size.weigh(settings(&rest[fits])));
                }
            }
        }
        self.least = least;
        fastest
    }

    /// Replaces the fastest combination so far by a faster one within the budget.
    fn take(&mut self, fastest: &mut Option<Scored>, s: Scored) {
        if s.total > self.budget {
            return;
        }
        if fastest.is_none_or(|f| (s.rank, s.total) < (f.rank, f.total)) {
            *fastest = Some(s);
        }
        if !s.settings.inputs.on_host {
            self.on_device = Some(self.on_device.map_or(s.work, |w| w.min(s.work)));
        }
    }
}

/// Work of a row of the largest micro-batch with nothing recomputed, and the micro-batch's rows.
pub fn least_work(i: &Inputs<'_>) -> ft_base::Result<(f64, usize)> {
    let p = Prepared::new(i, 0)?;
    let space = SearchSpace::of(&p);
    let rows = space.rows[space.rows.len() - 1];
    let (inputs, dequantize) = (ft_engine::walk::Inputs::default(), space.dequantize[0]);
    let settings = Settings { recompute: Recomputed::default(), inputs, dequantize, head: 0 };
    let work = p.simulate(p.workload(rows), &space.heads[..1])?.work(settings);
    Ok(((work.flops() + work.attention) / rows as f64, rows.max(enough_rows(i.recipe))))
}

/// Takes the fastest combination within the budget less the reserve, else the one with the smallest peak.
pub fn choose(p: &Prepared<'_>) -> Result<SearchResult> {
    search(p, SearchSpace::of(p))
}

/// As [`choose`], with micro-batches of `rows` rows.
pub fn choose_with_rows(p: &Prepared<'_>, rows: usize) -> Result<SearchResult> {
    search(p, SearchSpace { rows: vec![rows], ..SearchSpace::of(p) })
}

fn search(p: &Prepared<'_>, space: SearchSpace) -> Result<SearchResult> {
    let budget = p.inputs.budget.map_or(u64::MAX, |b| b - reserve(p.inputs.machine, b));
    let largest = space.rows[space.rows.len() - 1];
    let whole = (p.workload(largest).train, largest);
    let of_rows = |rows: &usize| BatchSize::new(p, &space, *rows, whole);
    let first = of_rows(&space.rows[0])?;
    let most = space.recompute.iter().flatten().copied().max().unwrap_or_default();
    let (inputs, dequantize) = (space.inputs[0], space.dequantize[0]);
    let least = first.weigh(Settings { recompute: most, inputs, dequantize, head: 0 });
    let mut search = Search { prepared: p, space: &space, budget, least, on_device: None };
    let mut best: Option<(BatchSize<'_>, Scored)> = None;
    let mut too_large = None;
    for size in std::iter::once(Ok(first)).chain(space.rows[1..].iter().map(of_rows)) {
        let size = size?;
        let Some(fastest) = search.fastest(&size, best.is_none()) else {
            // more rows do not fit either
            too_large = Some(size.rows);
            break;
        };
        if best.as_ref().is_none_or(|(_, b)| fastest.rank < b.rank) {
            best = Some((size, fastest));
        }
    }
    let fits = best.is_some();
    let (size, chosen) = match best {
        Some(best) => best,
        None => (of_rows(&space.rows[0])?, search.least),
    };
    let execution = Execution {
        micro_rows: size.rows,
        recompute: chosen.settings.recompute,
        inputs: chosen.settings.inputs,
        dequantize: chosen.settings.dequantize,
        head_rows: usize::try_from(space.heads[chosen.settings.head]).unwrap_or(usize::MAX),
    };
    let mean = p.mean(&size.workload);
    let work = if mean == size.workload.train {
        size.simulation.work(chosen.settings)
    } else {
        let (run, settings) = p.chosen(&Workload { train: mean, eval: None, ..size.workload }, &execution)?;
        run.work(settings)
    };
    let without = search.on_device;
    let why = Explanation { p, open: &space, size: &size, chosen, fits, too_large, without };
    Ok(SearchResult {
        execution,
        reasons: why.reasons(),
        peak: size.simulation.peak(chosen.settings),
        mean,
        work,
        workload: size.workload,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Model;
    use crate::{Target, host::Capacity};
    use ft_recipe::Recipe;
    use std::path::Path;

    /// The search by halves through lists of ever smaller memory agrees with an exhaustive search at every budget.
    #[test]
    fn search_by_halves_finds_the_best_of_all_combinations() -> ft_base::Result<()> {
        for (name, gib) in
            [("qwen3-8b-qlora", 6..20), ("qwen3-30b-a3b-qlora", 24..44), ("llama-3.1-8b-lora", 20..40)]
        {
            for gib in gib.step_by(3) {
                let keys =
                    [format!("memory.budget={gib}GiB"), "run.device=cuda".into(), "run.micro_rows=2".into()];
                let recipe = Recipe::load_for_plan(Path::new(name), &keys)?;
                let target = Target::from(true);
                let room = Capacity::of(crate::machine(&recipe, target));
                let model = Model::find(&recipe)?;
                model.with_inputs(&recipe, target, &room, |i| {
                    let p = Prepared::new(i, 0)?;
                    let space = SearchSpace::of(&p);
                    let budget = p.inputs.budget.map_or(u64::MAX, |b| b - reserve(p.inputs.machine, b));
                    let rows = space.rows[0];
                    let size = BatchSize::new(&p, &space, rows, (p.workload(rows).train, rows))?;
                    let others =
                        space.others().flat_map(|o| space.recompute.iter().flatten().map(move |r| (o, r)));
                    let all = others.map(|((inputs, head, dequantize), recompute)| {
                        size.weigh(Settings { recompute: *recompute, inputs, dequantize, head })
                    });
                    let fitting = all.filter(|s| s.total <= budget).map(|s| s.rank).min_by(f64::total_cmp);
                    let found = choose(&p)?;
                    let rank = size.simulation.work(Settings {
                        recompute: found.execution.recompute,
                        inputs: found.execution.inputs,
                        dequantize: found.execution.dequantize,
                        head: space
                            .heads
                            .iter()
                            .position(|h| *h == found.execution.head_rows as u64)
                            .unwrap_or(0),
                    });
                    let rank = rank.total() / rows as f64;
                    if let Some(best) = fitting {
                        assert!((rank / best - 1.0).abs() < 0.011, "{name} {gib}: {rank} {best}");
                    }
                    Ok(())
                })?;
            }
        }
        Ok(())
    }
}
