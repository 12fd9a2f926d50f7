//! `ft bench`: some steps of a recipe's shape on made-up rows: speed, time by part, peak against the plan.

use super::Job;
use super::step::{Setup, timed_step};
use super::watch::{self, Watch};
use crate::data::{Dataset, Example, Stats};
use crate::hub::Want;
use crate::kernel::gemm;
use crate::optim::Optimizer;
use crate::plan::{Workload, rates, report};
use crate::recipe::{Recipe, Weights};
use crate::rng::{Purpose, Stream};
use crate::walk::{Part, RouterLosses, Times};
use candle_core::{Device, Tensor};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Instant;

/// Products whose best time is the machine's rate.
const PRODUCTS: usize = 8;

/// What was measured.
#[derive(Debug)]
pub struct Measured {
    /// As `ft bench --json` prints it.
    pub json: Value,
    /// As `ft bench` prints it.
    pub text: String,
    /// Where the rate was kept for plans.
    pub kept: Option<PathBuf>,
}

/// Runs a warm-up step and `steps` more on full rows of random tokens, every one supervised: the workload
/// that `ft plan` plans for. Nothing is written but the measured rate.
///
/// # Errors
/// As a run's, up to the first step.
pub fn run(mut recipe: Recipe, steps: usize) -> crate::Result<Measured> {
    // what bench measures is speed; a folder with config.json alone is enough for random weights
    let want = if recipe.model.weights == Weights::Random { Want::Config } else { Want::Weights };
    recipe.data.eval.clear();
    let job = Job::open(recipe, want, true)?;
    let r = &job.recipe;
    let data = rows(r, job.config.vocab);
    let mut plan = job.plan(Workload::of_recipe(r));
    watch::check(&job, &plan)?;
    plan.workload.steps = Some(steps as u64);
    let mut watch = Watch::begin(&plan, &job.device);
    let (decoder, params) = job.build(true, &|_| {})?;
    let optimizer = Optimizer::new(&params, &r.optimizer);
    let setup = Setup {
        decoder: &decoder,
        params: &params,
        optimizer: &optimizer,
        device: &job.device,
        seed: r.run.seed,
        micro_rows: r.run.micro_rows,
        recompute: plan.recompute,
        clip: r.run.clip,
        router: RouterLosses { aux: r.router.aux_loss, z: r.router.z_loss },
    };
    let all: Vec<usize> = (0..data.rows.len()).collect();
    // far below what changes a loss: the numbers must stay finite, and nothing is kept
    let lr = 1e-9;
    let mut warm = Times::start(true);
    timed_step(&setup, &data, &all, 0, lr, &mut warm).map_err(|e| watch.explain(e))?;
    // before and after, so that a machine that others use too is caught at its best
    let sizes = plan.workload.train.tokens as usize;
    let before = matmul_rate(&job, sizes)?;
    let mut times = Times::start(true);
    let mut tokens = 0;
    for step in 0..steps {
        tokens += timed_step(&setup, &data, &all, step as u64 + 1, lr, &mut times)
            .map_err(|e| watch.explain(e))?
            .tokens;
        watch.look();
    }
    watch.look();
    let matmul = matmul_rate(&job, sizes)?.max(before);
    let flops = plan.work.total() * plan.micro_batches as f64 * steps as f64;
    let rate = rates::Rate { matmul, step: flops / times.total() };
    let kept = rates::save(plan.machine, rate)?;

    let speed = tokens as f64 / times.total();
    let parts: serde_json::Map<String, Value> =
        Part::ALL.iter().map(|p| (p.word().to_string(), json!(times.seconds(*p) / steps as f64))).collect();
    let json = json!({
        "tokens_per_second": speed, "step_seconds": times.total() / steps as f64, "parts": parts,
        "matmul_flops": matmul, "step_flops": rate.step, "share_of_matmul": rate.step / matmul,
        "peak_device_bytes": watch.peak(), "planned_peak_bytes": plan.total(), "plan": watch.json(),
    });
    let mut text =
        format!("{}\n{speed:.0} tokens/s, {:.2} s a step\n", watch.line(), times.total() / steps as f64);
    for p in Part::ALL.into_iter().filter(|p| times.seconds(*p) > 0.0) {
        let share = times.seconds(p) / times.total();
        text += &format!(
            "  {:<10} {:>8.3} s  {:>5.1}%\n",
            p.word(),
            times.seconds(p) / steps as f64,
            100.0 * share
        );
    }
    text += &format!(
        "arithmetic {:.1} GFLOP/s, {:.0}% of the {:.1} of a large product\n",
        rate.step / 1e9,
        100.0 * rate.step / matmul,
        matmul / 1e9
    );
    let apart = 100.0 * (watch.peak() as f64 / plan.total().max(1) as f64 - 1.0);
    text += &format!(
        "memory     {} at the fullest, the plan said {} ({apart:+.2}%)\n",
        report::bytes(watch.peak()),
        report::bytes(plan.total())
    );
    text.extend(watch.verdict().map(|w| w + "\n"));
    Ok(Measured { json, text, kept })
}

/// Full rows of random tokens for one step.
fn rows(r: &Recipe, vocab: usize) -> Dataset {
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
    let rows = (0..examples.len()).map(|i| vec![i]).collect();
    Dataset { examples, rows, stats: Stats::default(), hash: String::new() }
}

/// Operations a second of the best of some products of the model's own size.
fn matmul_rate(job: &Job, tokens: usize) -> crate::Result<f64> {
    let (d, f) = (job.config.hidden, job.config.intermediate.max(job.config.hidden));
    let tokens = tokens.clamp(1, 4096);
    let make = |rows: usize, cols: usize| -> candle_core::Result<Tensor> {
        Tensor::rand(-1f32, 1f32, (rows, cols), &Device::Cpu)?.to_dtype(job.dtype)?.to_device(&job.device)
    };
    let (a, b) = (make(tokens, d)?, make(f, d)?);
    let mut best = f64::INFINITY;
    for _ in 0..PRODUCTS {
        let start = Instant::now();
        gemm::matmul(&a, false, &b, true)?;
        job.device.synchronize()?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(2.0 * (tokens * d * f) as f64 / best.max(1e-9))
}
