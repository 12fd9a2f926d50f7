//! `ft bench`: times steps of a recipe on random rows. Reports tokens per second, time by part, throughput
//! relative to the fastest matrix product of the machine, and peak memory relative to the plan.

use super::fp8::Fp8Error;
use super::matmul::MatmulRate;
use super::measured::{Measured, kept, now};
use super::probe::before as probe_before;
use super::report::{Limit, StepTimes};
use crate::train::Error;
use crate::train::job::Job;
use crate::train::memory::{MemoryMonitor, limits};
use crate::train::step::{LossScale, StepInput, TrainContext, TrainedModel};
use ft_base::memory;
use ft_base::rng::{Purpose, Stream};
use ft_data::{Content, Dataset, Example, Teacher};
use ft_engine::ranks;
use ft_engine::walk::{Part, Times};
use ft_hub::Want;
use ft_kernels::gemm::pairs;
use ft_plan::{Workload, rates};
use ft_recipe::{Format, Recipe, ScoreTargets, TOP_K, Task, Weights};
use serde_json::json;
use std::path::Path;

/// Runs one warm-up step and `steps` timed steps on full rows of random tokens. Every token is a target, as
/// `ft plan` assumes. Writes nothing except the measured rate, and the rates of the card before it, by `program` as for
/// [`probe_before`]. Fails as a run up to the first step, and for more than one rank.
pub fn run(mut recipe: Recipe, steps: usize, program: Option<&Path>) -> ft_base::Result<Measured> {
    // With random weights, `config.json` is enough to measure speed.
    let want = if recipe.model.weights == Weights::Random { Want::Config } else { Want::Weights };
    // Rows are generated; data files are ignored.
    recipe.data.train.clear();
    recipe.data.eval.clear();
    recipe.data.eval_share = 0.0;
    let job = Job::open(recipe, want, true)?;
    let r = &job.recipe;
    if r.parallel.ranks() > 1 {
        let why = "ft bench measures one rank\n  hint: parallel.data=1";
        return Err(Error::at(r, "parallel.data", why).into());
    }
    let data = rows(r, job.config.vocab)?;
    probe_before(&job, program);
    let mut plan = job.plan_without_files(Workload::of_recipe)?;
    limits::check(&job, &plan)?;
    plan.workload.steps = Some(steps as u64);
    let mut monitor = MemoryMonitor::begin(&plan, &job);
    let planned = monitor.planned();
    let loaded = job.load(true).map_err(|e| planned.explain(e))?;
    monitor.loaded(&loaded.1);
    let model = TrainedModel::new(&job, loaded);
    let (scale, alone) = (LossScale::new(job.dtype, r.memory.scale), ranks::alone());
    let cx = TrainContext::new(&job, &model, &alone, plan.execution, scale);
    let all: Vec<usize> = (0..data.rows.len()).collect();
    // The learning rate of 1e-9 keeps the numbers finite over any number of steps.
    let input = |step: u64| StepInput { data: &data, rows: &all, step, lr: &|_| 1e-9 };
    let step = |n: u64| -> ft_base::Result<(usize, Times)> {
        let (mut times, input) = (Times::start(&job.device)?, input(n));
        let tokens = cx.timed_step(&input, &mut times)?.tokens;
        times.settle()?;
        Ok((tokens, times))
    };
    step(0).map_err(|e| planned.explain(e))?;
    monitor.measure();
    let mut products = MatmulRate::new(&job, plan.workload.train.tokens as usize);
    products.measure()?;
    let limits = Part::ALL.map(|p| Limit::of(p, &plan, &model.params));
    let mut timed = StepTimes { times: Vec::with_capacity(steps), tokens: 0, limits };
    for n in 0..steps {
        // Excludes the memory of the timed products from the peak of the step.
        memory::reset_peak();
        let (tokens, times) = step(n as u64 + 1).map_err(|e| planned.explain(e))?;
        timed.tokens += tokens;
        timed.times.push(times);
        monitor.measure();
        products.measure()?;
    }
    let fp8 = Fp8Error::measure(&model, &job.device, || cx.step(&input(0)))?;
    let step = plan.step_work() / timed.fastest();
    let rate = rates::Rate { step, date: Some(now()), probed: None };
    let kept = kept(rates::save(plan.machine, job.config.family.model_type, rate));
    let mut json = timed.json(&plan, &monitor, &products);
    json["products"] = json!(job.products()?.map(pairs::Path::word));
    fp8.iter().for_each(|fp8| json["fp8"] = fp8.json());
    json["threads"] = json!(rayon::current_num_threads());
    let (computes, threads) = (job.computes()?, rayon::current_num_threads());
    let fp8 = fp8.map_or(String::new(), |fp8| fp8.text());
    let text = format!("{computes}, {threads} threads\n{}{fp8}", timed.text(&plan, &monitor, &products));
    Ok(Measured { json, text, kept })
}

/// Values of a teacher at `targets` targets, as many per target as `ft logits` writes by default.
fn teacher(vocab: usize, targets: usize) -> Teacher {
    let kept = TOP_K.min(vocab);
    let ids = (0..targets).flat_map(|t| (0..kept).map(move |k| ((t + k * (vocab / kept)) % vocab) as u32));
    Teacher { kept, ids: ids.collect(), logits: vec![0.0; targets * kept] }
}

/// Generates full rows of random tokens for one step.
fn rows(r: &Recipe, vocab: usize) -> ft_base::Result<Dataset> {
    let s = Stream::new(r.run.seed, Purpose::Sample, 0, 0);
    let length = r.data.max_length;
    let content = match r.task.format() {
        Some(Format::Preference) => Content::Pair(length),
        Some(Format::Unpaired) => Content::Rated(true),
        _ => Content::Document,
    };
    let length = if content == Content::Pair(length) { 2 * length } else { length };
    let id = |i: usize| ((u64::from(s.word(i as u64)) * vocab as u64) >> 32) as u32;
    let examples: Vec<Example> = (0..r.run.batch_rows)
        .map(|row| {
            let ids: Vec<u32> = (0..length).map(|i| id(row * length + i)).collect();
            let label = |id: &u32| match &r.data.scores {
                ScoreTargets::Classes(names) => row % names.len().max(1),
                _ => *id as usize,
            };
            let labels = ids.iter().map(|id| label(id) as i32).collect();
            let scored = r.task.has_scores();
            let teacher =
                if r.task == Task::Distill { teacher(vocab, length - 1) } else { Teacher::default() };
            Example { ids, labels, content, teacher, scored, line: row + 1, ..Example::default() }
        })
        .collect();
    let rows: Vec<Vec<usize>> = (0..examples.len()).map(|i| vec![i]).collect();
    Ok(Dataset::of(&examples, &rows)?)
}
