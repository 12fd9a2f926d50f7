//! `ft bench`: times steps of a recipe on random rows. Reports tokens per second, time by part, throughput
//! relative to the fastest matrix product of the machine, and peak memory relative to the plan.

use super::products::Products;
use super::step::{Setup, StepRows, timed_step};
use super::watch::{self, Watch};
use super::{Error, Job, LossScale};
use ft_base::memory;
use ft_base::rng::{Purpose, Stream};
use ft_data::hub::Want;
use ft_data::{Dataset, Example};
use ft_engine::comm;
use ft_engine::optim::Optimizer;
use ft_engine::params::buffers::moments::Moments;
use ft_engine::params::{Params, Unit};
use ft_engine::walk::{Part, Times};
use ft_kernels::gemm::pairs;
use ft_plan::{Plan, Workload, rates, report};
use ft_recipe::{Recipe, Weights};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::PathBuf;

/// Result of a benchmark.
#[derive(Debug)]
pub struct Measured {
    /// Output of `ft bench --json`.
    pub json: Value,
    /// Output of `ft bench`.
    pub text: String,
    /// File of the measured rate, read by later plans.
    pub kept: Option<PathBuf>,
}

/// Runs one warm-up step and `steps` timed steps on full rows of random tokens. Every token is a target, as
/// `ft plan` assumes. Writes nothing except the measured rate.
///
/// # Errors
/// As a run, up to the first step.
pub fn run(mut recipe: Recipe, steps: usize) -> ft_base::Result<Measured> {
    // With random weights, `config.json` is enough to measure speed.
    let want = if recipe.model.weights == Weights::Random { Want::Config } else { Want::Weights };
    // Rows are generated; data files are ignored.
    recipe.data.train.clear();
    recipe.data.eval.clear();
    recipe.data.eval_share = 0.0;
    let job = Job::open(recipe, want, true)?;
    let r = &job.recipe;
    if r.parallel.ranks() > 1 {
        let place = r.place("parallel.data");
        let why = "ft bench measures one rank\n  hint: parallel.data=1";
        return Err(Error::Usage(format!("{place}: {why}")).into());
    }
    let data = rows(r, job.config.vocab)?;
    let mut plan = job.plan_without_files(Workload::of_recipe)?;
    watch::check(&job, &plan)?;
    plan.workload.steps = Some(steps as u64);
    let mut watch = Watch::begin(&plan, &job);
    let planned = watch.planned();
    let (decoder, params) = job.load(true).map_err(|e| planned.explain(e))?;
    watch.loaded(&params);
    let optimizer = Optimizer::new(&params, &r.optimizer);
    let (scale, alone) = (LossScale::new(job.dtype, r.memory.scale), comm::alone());
    let setup = Setup::new(&job, (&decoder, &params, &optimizer), plan.execution, scale, &alone);
    let all: Vec<usize> = (0..data.rows.len()).collect();
    // The learning rate of 1e-9 keeps the numbers finite over any number of steps.
    let step = |n: u64| -> ft_base::Result<(usize, Times)> {
        let mut times = Times::start(&job.device)?;
        let at = StepRows { data: &data, rows: &all, step: n };
        let tokens = timed_step(&setup, at, &|_| 1e-9, &mut times)?.tokens;
        times.settle()?;
        Ok((tokens, times))
    };
    step(0).map_err(|e| planned.explain(e))?;
    watch.look();
    let mut products = Products::new(&job, plan.workload.train.tokens as usize);
    products.look()?;
    let limits = Part::ALL.map(|p| Bound::of(p, &plan, &params));
    let mut timed = Timed { times: Vec::with_capacity(steps), tokens: 0, limits };
    for n in 0..steps {
        // Excludes the memory of the timed products from the peak of the step.
        memory::reset_peak();
        let (tokens, times) = step(n as u64 + 1).map_err(|e| planned.explain(e))?;
        timed.tokens += tokens;
        timed.times.push(times);
        watch.look();
        products.look()?;
    }
    let rate =
        rates::Rate { matmul: products.rate(), step: plan.step_work() / timed.mean(), copy: products.copy() };
    let kept = rates::save(plan.machine, rate)?;
    let mut json = timed.json(&plan, &watch, &products);
    json["products"] = json!(job.products()?.map(pairs::Path::word));
    json["threads"] = json!(rayon::current_num_threads());
    let (computes, threads) = (job.computes()?, rayon::current_num_threads());
    let text = format!("{computes}, {threads} threads\n{}", timed.text(&plan, &watch, &products));
    Ok(Measured { json, text, kept })
}

/// Floating-point operations of a step.
fn flops(plan: &Plan) -> f64 {
    plan.work.flops() * plan.micro_batches as f64
}

/// Amount of work in a part of a step, for comparison with a limit of the machine.
enum Bound {
    /// Floating-point operations of matrix products.
    Products(f64),
    /// Bytes read and written.
    Bytes(f64),
}

impl Bound {
    /// Work of a part of a step; `None` if only the time is known.
    fn of(part: Part, plan: &Plan, params: &Params) -> Option<Self> {
        let (w, n) = (plan.work, plan.micro_batches as f64);
        let [up, down] = w.head;
        match part {
            Part::Forward => Some(Bound::Products(n * (w.forward - up))),
            Part::Head => Some(Bound::Products(n * (up + down))),
            Part::Recompute => Some(Bound::Products(n * w.recompute)),
            Part::Backward => Some(Bound::Products(n * (w.backward - down))),
            Part::Step if !params.offloaded && !params.weights_offloaded => {
                // AdamW reads and writes weights and moments, reads gradients, and writes the copy in the
                // compute dtype.
                let bytes = |u: &Unit| {
                    let compute = u.compute.whole.dtype().size_in_bytes();
                    let moments = u.moments.as_ref().map_or(0, Moments::bytes);
                    (u.len * (12 + if compute < 4 { compute } else { 0 })) as f64 + (2 * moments) as f64
                };
                Some(Bound::Bytes(params.units.iter().flatten().map(bytes).sum()))
            }
            Part::Data | Part::Step => None,
        }
    }

    /// Lower bound of the time, in seconds.
    fn seconds(&self, products: &Products) -> f64 {
        match self {
            Bound::Products(flops) => flops / products.rate(),
            Bound::Bytes(bytes) => bytes / products.copy(),
        }
    }
}

/// Times of the measured steps.
struct Timed {
    times: Vec<Times>,
    tokens: usize,
    /// Indexed by [`Part`].
    limits: [Option<Bound>; Part::ALL.len()],
}

impl Timed {
    /// Seconds of all steps.
    fn total(&self) -> f64 {
        self.times.iter().map(Times::total).sum()
    }

    /// Mean seconds per step.
    fn mean(&self) -> f64 {
        self.total() / self.times.len() as f64
    }

    /// Seconds of the fastest step, for comparison with the fastest product.
    fn fastest(&self) -> f64 {
        self.times.iter().map(Times::total).fold(f64::INFINITY, f64::min)
    }

    /// Mean seconds per step in a part.
    fn part(&self, p: Part) -> f64 {
        self.times.iter().map(|t| t.seconds(p)).sum::<f64>() / self.times.len() as f64
    }

    /// Fraction of the machine limit reached in a part; `None` for parts without time or without a limit.
    fn share(&self, p: Part, products: &Products) -> Option<f64> {
        let least = self.limits[p as usize].as_ref()?.seconds(products);
        (self.part(p) > 0.0).then(|| least / self.part(p))
    }

    fn speed(&self) -> f64 {
        self.tokens as f64 / self.total()
    }

    fn json(&self, plan: &Plan, watch: &Watch, products: &Products) -> Value {
        let parts: Map<String, Value> =
            Part::ALL.iter().map(|p| (p.word().to_string(), json!(self.part(*p)))).collect();
        let shares: Map<String, Value> =
            Part::ALL.iter().map(|p| (p.word().to_string(), json!(self.share(*p, products)))).collect();
        let best = flops(plan) / self.fastest();
        json!({
            "tokens_per_second": self.speed(), "step_seconds": self.mean(),
            "fastest_step_seconds": self.fastest(), "parts": parts, "shares": shares,
            "flops_per_step": flops(plan), "step_flops": flops(plan) / self.mean(),
            "matmul_flops": products.rate(), "matmul_shape": products.fastest(),
            "share_of_matmul": best / products.rate(), "copy_bytes_per_second": products.copy(),
            "peak_device_bytes": watch.peak(), "planned_peak_bytes": plan.engine(), "memory": watch.compared(),
            "plan": watch.json(),
        })
    }

    fn text(&self, plan: &Plan, watch: &Watch, products: &Products) -> String {
        let mut text =
            format!("{}\n{:.0} tokens/s, {:.2} s a step\n", watch.line(), self.speed(), self.mean());
        for p in Part::ALL {
            // Parts without work show a dash.
            let _ = match self.part(p) {
                s if s > 0.0 => {
                    let limit = match (&self.limits[p as usize], self.share(p, products)) {
                        (Some(Bound::Products(_)), Some(x)) => format!("  {:>5.1}% of products", 100.0 * x),
                        (Some(Bound::Bytes(_)), Some(x)) => format!("  {:>5.1}% of a copy", 100.0 * x),
                        _ => String::new(),
                    };
                    let of_step = 100.0 * s / self.mean();
                    writeln!(text, "  {:<10} {s:>8.3} s  {of_step:>5.1}%{limit}", p.word())
                }
                _ => writeln!(text, "  {:<10} {:>8}", p.word(), "-"),
            };
        }
        let best = flops(plan) / self.fastest();
        let _ = writeln!(
            text,
            "arithmetic {:.1} GFLOP/s in the fastest step: {:.0}% of the {:.1} of the fastest product ({}); \
             copies {:.1} GB/s",
            best / 1e9,
            100.0 * best / products.rate(),
            products.rate() / 1e9,
            products.fastest(),
            products.copy() / 1e9
        );
        let apart = |planned: u64, measured: u64| match planned {
            0 => String::new(),
            _ => format!("{:+.2}%", 100.0 * (measured as f64 / planned as f64 - 1.0)),
        };
        let _ = writeln!(text, "memory                            planned    measured");
        let compared = watch.compared();
        let of = |side: &str, key: &str| compared[side][key].as_u64().unwrap_or(0);
        let keys: Vec<&String> = compared["planned"].as_object().into_iter().flat_map(Map::keys).collect();
        let parts = keys.iter().map(|k| (k.replace('_', " "), of("planned", k), of("measured", k)));
        for (name, planned, measured) in parts.chain([("at its peak".into(), plan.engine(), watch.peak())]) {
            if planned > 0 || measured > 0 {
                let (p, m) = (report::bytes(planned), report::bytes(measured));
                let _ = writeln!(text, "  {name:<27} {p:>11} {m:>11}  {}", apart(planned, measured));
            }
        }
        text.extend(watch.verdict().map(|w| w + "\n"));
        text
    }
}

/// Generates full rows of random tokens for one step.
fn rows(r: &Recipe, vocab: usize) -> ft_base::Result<Dataset> {
    let s = Stream::new(r.run.seed, Purpose::Sample, 0, 0);
    let length = r.data.max_length;
    let id = |i: usize| ((u64::from(s.word(i as u64)) * vocab as u64) >> 32) as u32;
    let examples: Vec<Example> = (0..r.run.batch_rows)
        .map(|row| {
            let ids: Vec<u32> = (0..length).map(|i| id(row * length + i)).collect();
            let labels = ids.iter().map(|i| *i as i32).collect();
            Example { ids, labels, source: 0, line: row + 1 }
        })
        .collect();
    let rows: Vec<Vec<usize>> = (0..examples.len()).map(|i| vec![i]).collect();
    Ok(Dataset::of(&examples, &rows)?)
}
