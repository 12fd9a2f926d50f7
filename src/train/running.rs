//! State of a running loop, and all output of a run: events in `metrics.jsonl`, progress, evaluations,
//! samples.

use super::answers;
use super::best::Best;
use super::gather::{Alone, Gather};
use super::ranks::{self, Next};
use super::server::{News, Server};
use super::signals::Signals;
use super::step::{Setup, StepRows, accumulate, evaluate_until, update};
use super::watch::Watch;
use super::{Error, Job, Stepped, job};
use crate::log::{Metrics, unix_time};
use ft_base::error::ExitCode;
use ft_base::memory;
use ft_base::memory::place;
use ft_base::terminal::{Progress, Told, shell_word, tell, warn};
use ft_data::{Dataset, Form};
use ft_engine::adapters::initial;
use ft_engine::model::modules;
use ft_engine::optim::Schedule;
use ft_engine::params::{LearningRate, learning_rates};
use ft_engine::walk::{self, Load, Times, generate};
use ft_kernels::gemm::pairs;
use ft_plan::report;
use ft_recipe::Quantize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// State of the loop.
pub struct Running<'a> {
    pub setup: Setup<'a>,
    pub job: &'a Job,
    pub eval: Option<&'a Dataset>,
    pub metrics: Metrics,
    pub progress: Progress,
    pub watch: Watch,
    /// Number of steps and expert load since the last `experts` event.
    pub load: (u64, Load),
    pub schedule: Schedule,
    /// Learning rates by parameter group, highest first.
    pub rates: Vec<LearningRate>,
    pub signals: &'a Signals,
    /// Number of completed steps.
    pub done: u64,
    /// Step of the newest checkpoint.
    pub saved: Option<u64>,
    /// Bytes received from other ranks before the current step.
    pub received: u64,
    pub best: Best,
    /// Seconds and tokens of all steps in this process.
    pub seconds: f64,
    pub tokens: u64,
    /// Server of `serve.devices`.
    pub server: Option<Server>,
}

impl Running<'_> {
    /// Reports events of the server. Errors of the server do not stop the run.
    ///
    /// # Errors
    /// The metrics cannot be written.
    pub fn look_at_server(&mut self) -> ft_base::Result<()> {
        while let Some(news) = self.server.as_mut().and_then(Server::look) {
            let step = self.done;
            let (event, line) = match news {
                News::Listens(address, process) => (
                    json!({"event": "serving", "step": step, "address": address, "process": process}),
                    format!("the newest checkpoint answers at {address}"),
                ),
                News::Ended(how) => (
                    json!({"event": "serving_ended", "step": step, "why": how}),
                    format!("warning: the server ended, and training goes on without it: {how}"),
                ),
            };
            self.metrics.write(&event)?;
            self.progress.line(&line);
        }
        Ok(())
    }

    /// Writes the `start` or `resume` event. At step 0, also evaluates and samples if configured.
    pub fn start(
        &mut self,
        data: &Dataset,
        total: usize,
        identity: &BTreeMap<String, String>,
    ) -> ft_base::Result<()> {
        let (job, done) = (self.job, self.done);
        let all = modules::parameters(&job.config);
        let trained = self.setup.params.count();
        let hashes: serde_json::Map<_, _> = identity
            .iter()
            .filter_map(|(k, v)| Some((k.strip_prefix("hash.")?.to_string(), json!(v))))
            .collect();
        let event = if done > 0 { "resume" } else { "start" };
        let mut line = json!({
            "event": event, "name": job.recipe.name, "time": unix_time(),
            "command": std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect::<Vec<_>>(),
            "versions": {"ft": env!("CARGO_PKG_VERSION"), "candle": "0.11.1"},
            "model": {"source": job.model.source, "revision": job.model.revision, "family": job.config.family.model_type},
            "hashes": hashes,
            "parameters": {"total": all, "trainable": trained},
            "learning_rates": self.rates,
            "device": if job.device.is_cpu() { "cpu" } else { "cuda" },
            "products": job.products()?.map(pairs::Path::word),
            "ranks": self.setup.comm.world(), "zero": self.job.recipe.parallel.zero,
            "threads": rayon::current_num_threads(),
            "system": format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            "dtype": format!("{:?}", job.dtype).to_lowercase(),
            "rows": data.rows.len(), "samples": data.samples.len(), "steps": total,
            "plan": self.watch.json(),
        });
        if done > 0 {
            line["step"] = json!(done);
        }
        self.metrics.write(&line)?;
        let share = 100.0 * trained as f64 / all as f64;
        self.progress.line(&format!(
            "{}: {} of {:.1} M parameters train ({share:.2}%), {} rows, {total} steps, {}",
            job.recipe.name,
            millions(trained as u64),
            all as f64 / 1e6,
            data.rows.len(),
            job.computes()?,
        ));
        self.progress.line(&format!("learning rate {}", learning_rates::line(&self.rates)));
        if let Some(how) = job.recipe.lora.init.decomposition() {
            self.progress.line(&initial::line(how, job.recipe.model.quantize == Quantize::Nf4));
        }
        self.progress.line(&self.watch.line());
        if done == 0 {
            if job.recipe.run.eval_at_start {
                match self.evaluate() {
                    Err(e) if matches!(e.of(), Some(Error::Abandoned(_))) => return Ok(()),
                    outcome => drop(outcome?),
                }
            }
            self.sample()?;
        }
        Ok(())
    }

    /// Runs step `step`, numbered from 0, unless a signal arrives. If memory runs out before any update and
    /// `again` is set, replans with more recomputation, for this step and all later ones, and repeats the
    /// step. Not possible with several ranks or with `optimizer.in_backward`.
    pub fn step(
        &mut self,
        data: &Dataset,
        rows: &[usize],
        step: usize,
        again: bool,
    ) -> ft_base::Result<Stepped> {
        let (at, times) = (StepRows { data, rows, step: step as u64 }, &mut Times::off());
        let stop = || self.signals.asked();
        // Other ranks follow the original plan.
        let again = again && self.setup.comm.world() == 1 && !self.setup.params.in_backward;
        let schedule = self.schedule;
        let lr = |peak: f64| schedule.at(step, peak);
        ranks::tell_next(self.setup.comm, &Next::Step(step as u64))?;
        self.received = self.setup.comm.received();
        let summed = loop {
            match accumulate(&self.setup, at, &lr, times, &stop) {
                Ok(summed) => break summed,
                Err(e) if again && e.exit_code() == ExitCode::DoesNotFit => {
                    self.recompute_more(step as u64, e)?
                }
                Err(e) => return Err(e),
            }
        };
        update(&self.setup, summed, &lr, times)
    }

    /// Switches to an execution with less memory and the same bits, with a warning. Returns the error if
    /// none exists.
    fn recompute_more(&mut self, step: u64, e: ft_base::Error) -> ft_base::Result<()> {
        let Some(plan) = self.job.smaller(self.watch.plan()) else { return Err(e) };
        let (was, execution) = (self.setup.execution, plan.execution);
        let (less, of) = (report::bytes(plan.total()), plan.walked);
        self.progress.line(&format!(
            "warning: out of memory in step {}: it begins anew recomputing {}, not {}, which takes {less} by the plan",
            step + 1,
            execution.words(of),
            was.words(of)
        ));
        self.setup.execution = execution;
        self.watch.replan(plan, self.job);
        let event = json!({
            "event": "replanned", "step": step, "why": e.to_string(), "time": unix_time(), "plan": self.watch.json(),
        });
        Ok(self.metrics.write(&event)?)
    }

    /// Writes the `step` event of the completed step `step`, numbered from 0, and updates the progress
    /// line.
    ///
    /// `lr` in the event is the highest learning rate. With more than one, `learning_rates` lists all, in
    /// the order of the `start` event.
    pub fn stepped(&mut self, s: &Stepped, step: usize, seconds: f64) -> ft_base::Result<()> {
        self.watch.look();
        self.seconds += seconds;
        self.tokens += s.tokens as u64;
        let optimizer = &self.job.recipe.optimizer;
        let of = |r: &LearningRate| self.schedule.at(step, r.base(optimizer)) * r.lr_scale;
        let rates: Vec<f64> = self.rates.iter().map(of).collect();
        let lr = rates.iter().copied().fold(0.0, f64::max);
        let step = self.done;
        let rate = s.tokens as f64 / seconds;
        let mut line = json!({
            "event": "step", "step": step, "loss": s.loss, "grad_norm": s.grad_norm, "lr": lr,
            "tokens": s.tokens, "target_tokens": s.targets, "seconds": seconds, "tokens_per_second": rate,
            "peak_device_bytes": self.watch.peak(), "peak_host_bytes": memory::peak_host_bytes(),
        });
        let (aux, z) = s.router_losses;
        for (key, coefficient, value) in
            [("aux_loss", self.setup.router.aux, aux), ("z_loss", self.setup.router.z, z)]
        {
            if coefficient != 0.0 {
                line[key] = json!(value);
            }
        }
        if self.setup.comm.world() > 1 {
            line["wire_bytes"] = json!(self.setup.comm.received() - self.received);
        }
        if let Some(scale) = self.setup.loss_scale.get() {
            line["loss_scale"] = json!(scale.factor());
        }
        if rates.len() > 1 {
            line["learning_rates"] = json!(rates);
        }
        self.metrics.write(&line)?;
        self.progress.step(step, Told { loss: s.loss, grad_norm: s.grad_norm, lr, rate });
        Ok(())
    }

    /// Accumulates the expert load of a step; writes an `experts` event every [`LOAD_EVERY`] steps and
    /// after the last.
    pub fn loaded(&mut self, load: &Load, last: bool) -> ft_base::Result<()> {
        let step = self.done;
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

    /// Prints the summary of a run, and commands to use the result.
    pub fn told(&self, result: &Path) {
        let memory = report::bytes(self.watch.peak());
        let mut line = format!("step {}", self.done);
        if let Some((step, loss)) = self.best.get() {
            line += &format!(", best evaluation loss {loss:.4} (step {step})");
        }
        if self.seconds > 0.0 {
            let rate = self.tokens as f64 / self.seconds;
            line += &format!(", {} tokens in {:.0} s ({rate:.0} a second)", self.tokens, self.seconds);
        }
        tell(&format!("done: {line}, at most {memory} of memory"));
        if let Some((0, loss)) = self.best.lowest().filter(|_| self.best.get().is_some()) {
            warn(&format!("no evaluation was better than that before the first step: loss {loss:.4}"));
        }
        let word = |path: &Path| shell_word(&path.to_string_lossy()).into_owned();
        let (run, result) = (word(result.parent().unwrap_or(result)), word(result));
        let mut next = vec![format!("ft chat {result}"), format!("ft report {run}")];
        if !self.job.selection.everything_full() {
            next.insert(1, format!("ft merge {result} --out DIR"));
        }
        if self.server.is_some() {
            next.push(format!("ft serve {run}"));
        }
        tell(&format!("next: {}", next.join(", ")));
    }

    /// Writes a `stopped` event with the error, and returns the error.
    pub fn stopped(&mut self, e: ft_base::Error) -> ft_base::Error {
        let e = self.watch.planned().explain(e);
        self.progress.finish();
        let event = json!({
            "event": "stopped", "step": self.done, "code": e.exit_code() as u8, "why": e.to_string(), "time": unix_time(),
            "memory": self.watch.compared(),
        });
        // On a full disk this fails too; the first error is returned.
        let _ = self.metrics.write(&event);
        e
    }

    /// Evaluates, unless there is no data or a signal arrives. Returns true for a new best loss.
    pub fn evaluate(&mut self) -> ft_base::Result<bool> {
        let (Some(data), step) = (self.eval, self.done) else { return Ok(false) };
        place::enter(place::Phase::Evaluate, 0);
        let stop = || self.signals.asked();
        let Setup { decoder, params, execution, comm, .. } = self.setup;
        ranks::tell_next(comm, &Next::Evaluate)?;
        let gather = Gather::new(decoder, params, comm);
        let (loss, targets) =
            evaluate_until(decoder, (comm, &gather), data, &execution, &self.job.device, &stop)?;
        let mut event = json!({"event": "eval", "step": step, "loss": loss, "target_tokens": targets});
        let mut line = format!("evaluation after step {step}: loss {loss:.4}, perplexity {:.2}", loss.exp());
        if loss.is_finite()
            && let Some(scores) =
                answers::score(self.job, decoder, &Alone::new(decoder, params, comm), data, &stop)?
        {
            answers::add_to(&mut event, &scores);
            line += &format!(", {}", answers::line(&scores));
        }
        self.metrics.write(&event)?;
        self.progress.line(&line);
        match loss.is_finite() {
            true => Ok(self.best.seen(step, loss)),
            false => {
                let kept = match step {
                    0 => "nothing was trained yet",
                    _ => "the checkpoint of that step is written, and no adapter or model",
                };
                Err(Error::EvaluationOf { step, kept }.into())
            }
        }
    }

    /// Generates a reply to `log.sample`, as a sample of the current model.
    pub fn sample(&mut self) -> ft_base::Result<()> {
        let (job, step) = (self.job, self.done);
        let (Some(prompt), Some(tokenizer)) = (&job.recipe.log.sample, &job.tokenizer) else { return Ok(()) };
        if let Some(ids) = job::sample(&job.recipe, Some(tokenizer))? {
            place::enter(place::Phase::Evaluate, 0);
            let mut sampler = generate::greedy();
            let Setup { decoder, params, comm, .. } = self.setup;
            let alone = Alone::new(decoder, params, comm);
            let mut reader = generate::Reader::new(decoder, &job.device)
                .within(ids.len() + generate::SAMPLE_TOKENS)
                .around(&alone);
            let reply = generate::answer(
                &mut reader,
                tokenizer,
                &ids,
                generate::SAMPLE_TOKENS,
                &mut sampler,
                &mut |_| true,
            )?
            .text;
            let form = job.trained().form;
            let event = json!({
                "event": "sample", "step": step, "prompt": prompt, "reply": reply, "form": form.word(),
            });
            self.metrics.write(&event)?;
            let how = if form == Form::Text { "continuing" } else { "asked" };
            self.progress.line(&format!("after step {step}, {how} {prompt:?}: {reply:?}"));
        }
        Ok(())
    }
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
