//! Output of a run: events in `metrics.jsonl`, progress, and the summary.

use super::server::ServerEvent;
use crate::log::{Metrics, TensorBoard, unix_time};
#[cfg(feature = "hub")]
use crate::log::{MlFlow, MlFlowRun};
use crate::train::Error;
use crate::train::eval::{self, Answer, EvalHistory, Evaluation};
use crate::train::job::Job;
use crate::train::memory::MemoryMonitor;
use crate::train::step::{StepOutput, TrainContext};
use ft_base::memory;
use ft_base::terminal::{Progress, StepFigures, shell_word, tell, warn};
use ft_data::{Dataset, PromptFormat, Scores};
use ft_engine::adapters::initial;
use ft_engine::model::modules;
use ft_engine::optim::Schedule;
use ft_engine::params::{LearningRate, learning_rates};
use ft_engine::ranks::{Axis, Comm, Mesh};
use ft_engine::walk::{self, Execution, Load};
use ft_kernels::gemm::pairs;
use ft_plan::report;
use ft_recipe::{Quantize, Recipe};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Metrics and progress of a run. Methods fail if the metrics cannot be written.
pub struct RunLog {
    pub metrics: Metrics,
    pub progress: Progress,
    schedule: Schedule,
    /// Learning rates by parameter group, highest first.
    rates: Vec<LearningRate>,
    /// Number of steps and expert load since the last `experts` event.
    load: (u64, Load),
    /// Seconds and tokens of all steps in this process.
    seconds: f64,
    tokens: u64,
}

/// Bytes received by this rank from other ranks so far; and of these, within layers: keys and values, rows of experts,
/// hidden states of other stages, tokens around cut matrices.
pub fn received(comm: &dyn Comm) -> [u64; 2] {
    let of = |axis| comm.received().along(axis);
    let within = [Axis::Context, Axis::Expert, Axis::Pipeline, Axis::Tensor];
    [comm.received().total(), within.into_iter().map(of).sum()]
}

impl RunLog {
    /// Opens the metrics of a run folder. `resumed` is the step of the checkpoint, if any.
    pub fn open(
        dir: &Path,
        recipe: &Recipe,
        resumed: Option<u64>,
        total: usize,
        (rates, schedule): (Vec<LearningRate>, Schedule),
    ) -> ft_base::Result<Self> {
        let mut metrics = Metrics::open(&dir.join("metrics.jsonl"), resumed)?;
        if recipe.log.csv {
            metrics.tabulate()?;
        }
        if recipe.log.tensorboard {
            metrics.add(TensorBoard::open(dir, resumed)?);
        }
        #[cfg(feature = "hub")]
        if let Some(run) = tracked(dir, recipe, resumed.is_some()) {
            metrics.add(MlFlow::start(run));
        }
        let progress = Progress::new(resumed.unwrap_or(0), total as u64);
        let load = (0, Load::default());
        Ok(Self { metrics, progress, schedule, rates, load, seconds: 0.0, tokens: 0 })
    }

    /// Prints a line above the progress bar.
    pub fn line(&self, text: &str) {
        self.progress.line(text);
    }

    /// Writes the `start` or `resume` event, and prints the plan of the run.
    pub fn start(
        &mut self,
        cx: &TrainContext<'_>,
        (data, eval): (&Dataset, Option<&Dataset>),
        (done, total): (u64, usize),
        identity: &BTreeMap<String, String>,
        monitor: &MemoryMonitor,
    ) -> ft_base::Result<()> {
        let (job, mesh) = (cx.job, Mesh::of(&cx.job.recipe.parallel));
        let all = modules::parameters(&job.config);
        let trained = cx.model.params.count();
        let hashes: serde_json::Map<_, _> = identity
            .iter()
            .filter_map(|(k, v)| Some((k.strip_prefix("hash.")?.to_string(), json!(v))))
            .collect();
        let mut event = json!({
            "event": if done > 0 { "resume" } else { "start" }, "name": job.recipe.name, "time": unix_time(),
            "command": std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect::<Vec<_>>(),
            "folders": folders(&job.recipe),
            "versions": {"ft": env!("CARGO_PKG_VERSION"), "candle": "0.11.1"},
            "model": {"source": job.model.source, "revision": job.model.revision,
                "family": job.config.family.model_type},
            "hashes": hashes,
            "parameters": {"total": all, "trainable": trained},
            "learning_rates": self.rates,
            "device": if job.device.is_cpu() { "cpu" } else { "cuda" },
            "products": job.products()?.map(pairs::Path::word),
            "ranks": cx.comm.world(), "mesh": mesh.to_string(), "zero": job.recipe.parallel.zero,
            "threads": rayon::current_num_threads(),
            "system": format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            "dtype": format!("{:?}", job.dtype).to_lowercase(),
            "data": {"rows_read": data.stats.rows_read, "cut": data.stats.truncated,
                "divided": data.stats.divided, "left_out": data.stats.drops,
                "eval": eval.map(|e| &e.hash)},
            "rows": data.rows.len(), "samples": data.samples.len(), "steps": total, "given": job.recipe.given(),
            "plan": monitor.json(),
        });
        if done > 0 {
            event["step"] = json!(done);
        }
        self.metrics.write(&event)?;
        let share = 100.0 * trained as f64 / all as f64;
        self.line(&format!(
            "{}: {} of {:.1} M parameters train ({share:.2}%), {} rows, {total} steps, {}",
            job.recipe.name,
            millions(trained as u64),
            all as f64 / 1e6,
            data.rows.len(),
            job.computes()?,
        ));
        if cx.comm.world() > 1 {
            self.line(&format!("{} ranks: {mesh}; ZeRO stage {}", cx.comm.world(), job.recipe.parallel.zero));
        }
        self.line(&format!("learning rate {}", learning_rates::line(&self.rates)));
        if let Some(how) = job.recipe.lora.init.decomposition() {
            self.line(&initial::line(how, job.recipe.model.quantize == Quantize::Nf4));
        }
        self.line(&monitor.line());
        Ok(())
    }

    /// Writes the `step` event of the completed step `step`, numbered from 0, and updates the progress
    /// bar.
    ///
    /// `lr` in the event is the highest learning rate. With more than one, `learning_rates` lists all, in
    /// the order of the `start` event. `before` are the bytes that [`received`] counted before the step.
    pub fn step(
        &mut self,
        cx: &TrainContext<'_>,
        output: &StepOutput,
        step: usize,
        (seconds, before): (f64, [u64; 2]),
        peak: u64,
    ) -> ft_base::Result<()> {
        self.seconds += seconds;
        self.tokens += output.tokens as u64;
        let optimizer = &cx.job.recipe.optimizer;
        let of = |r: &LearningRate| self.schedule.at(step, r.base(optimizer)) * r.lr_scale;
        let rates: Vec<f64> = self.rates.iter().map(of).collect();
        let lr = rates.iter().copied().fold(0.0, f64::max);
        let rate = output.tokens as f64 / seconds;
        let done = step as u64 + 1;
        let mut event = json!({
            "event": "step", "step": done, "loss": output.loss, "grad_norm": output.grad_norm, "lr": lr,
            "tokens": output.tokens, "target_tokens": output.targets, "seconds": seconds,
            "tokens_per_second": rate, "peak_device_bytes": peak, "peak_host_bytes": memory::peak_host_bytes(),
        });
        let (coefficients, (aux, z)) = (cx.router(), output.router_losses);
        for (key, coefficient, value) in [("aux_loss", coefficients.aux, aux), ("z_loss", coefficients.z, z)]
        {
            if coefficient != 0.0 {
                event[key] = json!(value);
            }
        }
        add_metrics(&mut event, &output.metrics);
        if cx.comm.world() > 1 {
            let [all, exchanged] = received(cx.comm);
            event["wire_bytes"] = json!(all - before[0]);
            let p = &cx.job.recipe.parallel;
            if [p.context, p.expert, p.pipeline, p.tensor].iter().any(|n| *n > 1) {
                event["wire_bytes_exchanged"] = json!(exchanged - before[1]);
            }
        }
        if let Some(scale) = cx.loss_scale.get() {
            event["loss_scale"] = json!(scale.factor());
        }
        if rates.len() > 1 {
            event["learning_rates"] = json!(rates);
        }
        self.metrics.write(&event)?;
        self.progress.step(done, StepFigures { loss: output.loss, grad_norm: output.grad_norm, lr, rate });
        Ok(())
    }

    /// Accumulates the expert load of a step; writes an `experts` event every [`LOAD_EVERY`] steps and
    /// after the last.
    pub fn experts(&mut self, step: u64, load: &Load, last: bool) -> ft_base::Result<()> {
        if load.layers.is_empty() {
            return Ok(());
        }
        self.load.0 += 1;
        self.load.1.merge(load);
        if last || step.is_multiple_of(LOAD_EVERY) {
            let (steps, load) = std::mem::take(&mut self.load);
            self.metrics.write(&load_event(step, steps, &load))?;
        }
        Ok(())
    }

    /// Reports an event of the server. Errors of the server do not stop the run.
    pub fn server(&mut self, step: u64, event: ServerEvent) -> ft_base::Result<()> {
        let (event, line) = match event {
            ServerEvent::Listening(address, process) => (
                json!({"event": "serving", "step": step, "address": address, "process": process}),
                format!("the newest checkpoint answers at {address}"),
            ),
            ServerEvent::Ended(how) => (
                json!({"event": "serving_ended", "step": step, "why": how}),
                format!("warning: the server ended, and training goes on without it: {how}"),
            ),
        };
        self.metrics.write(&event)?;
        self.line(&line);
        Ok(())
    }

    /// Writes the `replanned` event of a step, numbered from 0, with a warning.
    pub fn replanned(
        &mut self,
        step: u64,
        was: &Execution,
        e: &ft_base::Error,
        monitor: &MemoryMonitor,
    ) -> ft_base::Result<()> {
        let plan = monitor.plan();
        self.line(&format!(
            "warning: out of memory in step {}: it begins anew recomputing {}, not {}, which takes {} by the plan",
            step + 1,
            plan.execution.words(plan.walked),
            was.words(plan.walked),
            report::bytes(plan.total()),
        ));
        let event = json!({
            "event": "replanned", "step": step, "why": e.to_string(), "time": unix_time(), "plan": monitor.json(),
        });
        Ok(self.metrics.write(&event)?)
    }

    /// Writes the `eval` event, and one `answer` event per answer.
    pub fn evaluation(
        &mut self,
        step: u64,
        of: &Evaluation,
        scored: Option<&(Scores, Vec<Answer>)>,
    ) -> ft_base::Result<()> {
        let loss = of.loss;
        let mut event = json!({"event": "eval", "step": step, "loss": loss, "target_tokens": of.targets});
        add_metrics(&mut event, &of.metrics);
        let mut line = format!("evaluation after step {step}: loss {loss:.4}");
        line += &match metrics_line(&of.metrics) {
            text if text.is_empty() => format!(", perplexity {:.2}", loss.exp()),
            text => text,
        };
        if let Some((scores, _)) = scored {
            eval::add_to(&mut event, scores);
            line += &format!(", {}", eval::scores_line(scores));
        }
        self.metrics.write(&event)?;
        for a in scored.iter().flat_map(|(_, answers)| answers) {
            self.metrics.write(&json!({
                "event": "answer", "step": step, "prompt": a.prompt, "reply": a.reply, "reference": a.reference,
                "exact_match": a.exact_match, "rouge_l": a.rouge_l,
            }))?;
        }
        self.line(&line);
        Ok(())
    }

    /// Writes the `sample` event of prompt `number`, from 1.
    pub fn sample(
        &mut self,
        step: u64,
        (number, prompt): (usize, &str),
        reply: &str,
        form: PromptFormat,
    ) -> ft_base::Result<()> {
        let event = json!({
            "event": "sample", "step": step, "number": number, "prompt": prompt, "reply": reply,
            "form": form.word(),
        });
        self.metrics.write(&event)?;
        let how = if form == PromptFormat::Text { "continuing" } else { "asked" };
        self.line(&format!("after step {step}, {how} {prompt:?}: {reply:?}"));
        Ok(())
    }

    /// Writes the `checkpoint` event.
    pub fn checkpoint(&mut self, step: u64, path: &Path) -> ft_base::Result<()> {
        Ok(self.metrics.write(&json!({"event": "checkpoint", "step": step, "path": path}))?)
    }

    /// Writes the `stopped` event with the error of the run.
    pub fn stopped(&mut self, step: u64, e: &ft_base::Error, monitor: &MemoryMonitor) {
        self.progress.finish();
        let event = json!({
            "event": "stopped", "step": step, "code": e.exit_code() as u8, "why": e.to_string(), "time": unix_time(),
            "memory": monitor.compared(),
        });
        // On a full disk this fails too; the caller returns the first error.
        let _ = self.metrics.write(&event);
    }

    /// Writes the `end` event, with a warning if plan and measured memory differ. `of` is the step of the
    /// result.
    pub fn end(&mut self, step: u64, of: u64, result: &Path, monitor: &MemoryMonitor) -> ft_base::Result<()> {
        if let Some(warning) = monitor.verdict() {
            self.line(&warning);
        }
        Ok(self.metrics.write(&json!({
            "event": "end", "step": step, "of_step": of, "result": result, "peak_host_bytes": memory::peak_host_bytes(),
            "peak_device_bytes": monitor.peak(), "planned_peak_bytes": monitor.plan().engine(),
            "reserved_device_bytes": monitor.reserved(),
            "memory": monitor.compared(), "time": unix_time(),
        }))?)
    }

    /// Prints the summary of a run, and commands to use the result.
    pub fn summary(
        &self,
        job: &Job,
        step: u64,
        result: &Path,
        (history, serves): (&EvalHistory, bool),
        peak: u64,
    ) {
        let mut line = format!("step {step}");
        if let Some((step, value)) = history.best() {
            line += &format!(", best evaluation {} (step {step})", history.told(value));
        }
        if self.seconds > 0.0 {
            let rate = self.tokens as f64 / self.seconds;
            line += &format!(", {} tokens in {:.0} s ({rate:.0} a second)", self.tokens, self.seconds);
        }
        tell(&format!("done: {line}, at most {} of memory", report::bytes(peak)));
        if let Some((0, value)) = history.best_of_all().filter(|_| history.best().is_some()) {
            let told = history.told(value);
            warn(&format!("no evaluation was better than that before the first step: {told}"));
        }
        let word = |path: &Path| shell_word(&path.to_string_lossy()).into_owned();
        let (run, result) = (word(result.parent().unwrap_or(result)), word(result));
        let first = match job.config.scores {
            None => Some(format!("ft chat {result}")),
            Some(_) => job.recipe.data.evaluates().then(|| format!("ft eval {run}")),
        };
        let merge = (!job.selection.everything_full()).then(|| format!("ft merge {result} --out DIR"));
        let mut next: Vec<String> =
            first.into_iter().chain(merge).chain([format!("ft report {run}")]).collect();
        if serves {
            next.push(format!("ft serve {run}"));
        }
        tell(&format!("next: {}", next.join(", ")));
    }
}

/// Refuses `log.mlflow` in a program that cannot send.
pub fn check(recipe: &Recipe) -> Result<(), Error> {
    if recipe.log.mlflow.is_none() || cfg!(feature = "hub") {
        return Ok(());
    }
    let why = "log.mlflow: this ft is built without its hub feature\n  hint: build it with --features hub";
    Err(Error::at(recipe, "log.mlflow", why))
}

/// The run for the server of `log.mlflow`.
#[cfg(feature = "hub")]
fn tracked(dir: &Path, recipe: &Recipe, resumes: bool) -> Option<MlFlowRun> {
    let url = recipe.log.mlflow.clone()?;
    let named = || std::env::var("MLFLOW_EXPERIMENT_NAME").ok().filter(|name| !name.is_empty());
    let experiment = recipe.log.mlflow_experiment.clone().or_else(named);
    Some(MlFlowRun {
        url,
        experiment: experiment.unwrap_or_else(|| "ft".into()),
        name: recipe.name.clone(),
        params: recipe.keys(),
        file: dir.join("mlflow.json"),
        resumes,
    })
}

/// Base folders of the recipe's relative paths: the working directory, and the folder of the recipe.
fn folders(recipe: &Recipe) -> Option<Value> {
    let working = std::env::current_dir().ok()?;
    let beside = working.join(&recipe.folder);
    Some(json!({"working": working.to_string_lossy(), "recipe": beside.to_string_lossy()}))
}

/// Adds metrics of a task to an event.
fn add_metrics(event: &mut Value, metrics: &Map<String, Value>) {
    metrics.iter().for_each(|(name, value)| event[name] = value.clone());
}

/// Metrics of a task for the screen.
fn metrics_line(metrics: &Map<String, Value>) -> String {
    let shown = [
        ("accuracy", "accuracy"),
        ("f1", "F1"),
        ("margins", "margin"),
        ("kl", "kl"),
        ("kd", "kd"),
        ("ce", "ce"),
    ];
    let of = |(key, name): (&str, &str)| Some(format!(", {name} {:.4}", metrics.get(key)?.as_f64()?));
    shown.into_iter().filter_map(of).collect()
}

/// Number of steps per `experts` event, because a line with thousands of experts is long.
const LOAD_EVERY: u64 = 10;

/// Load of the experts. `entropy` is 1 for an even load and 0 if one expert gets all tokens; `peak` is the
/// load of the busiest expert relative to an even load; `dead` counts experts without tokens.
fn load_event(step: u64, steps: u64, load: &Load) -> Value {
    let layers: Vec<Value> = load
        .layers
        .iter()
        .map(|(layer, counts)| {
            json!({
                "layer": layer, "entropy": walk::entropy(counts), "peak": walk::peak(counts),
                "dead": walk::dead(counts), "tokens": counts,
            })
        })
        .collect();
    json!({
        "event": "experts", "step": step, "steps": steps, "entropy": load.entropy(), "peak": load.peak(),
        "dead": load.dead(), "layers": layers,
    })
}

fn millions(n: u64) -> String {
    if n < 1_000_000 { format!("{:.1} k", n as f64 / 1e3) } else { format!("{:.1} M", n as f64 / 1e6) }
}
