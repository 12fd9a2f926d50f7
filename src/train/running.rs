//! What a run tells while it goes: events in `metrics.jsonl`, progress, evaluations, samples.

use super::step::{Setup, accumulate, evaluate, update};
use super::watch::Watch;
use super::{Job, Stepped};
use crate::data::Dataset;
use crate::log::{Metrics, Progress, Told, memory, place};
use crate::model::modules;
use crate::plan::report;
use crate::walk::{self, Load, Times, generate};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// What the loop carries along.
pub struct Running<'a> {
    pub setup: Setup<'a>,
    pub job: &'a Job,
    pub eval: Option<&'a Dataset>,
    pub metrics: Metrics,
    pub progress: Progress,
    pub watch: Watch,
    /// Load of the experts since it was last written, and over how many steps.
    pub load: (u64, Load),
}

impl Running<'_> {
    /// Writes how the run begins, or goes on from `done` steps.
    pub fn start(
        &mut self,
        data: &Dataset,
        total: usize,
        done: u64,
        identity: &BTreeMap<String, String>,
    ) -> crate::Result<()> {
        let job = self.job;
        let all = modules::parameters(&job.config);
        let trained = self.setup.params.count();
        let hashes: serde_json::Map<_, _> = identity
            .iter()
            .filter_map(|(k, v)| Some((k.strip_prefix("hash.")?.to_string(), json!(v))))
            .collect();
        let event = if done > 0 { "resume" } else { "start" };
        let mut line = json!({
            "event": event, "name": job.recipe.name, "time": now(),
            "command": std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect::<Vec<_>>(),
            "versions": {"ft": env!("CARGO_PKG_VERSION"), "candle": "0.11.1"},
            "model": {"source": job.model.source, "revision": job.model.revision, "family": job.config.family.model_type},
            "hashes": hashes,
            "parameters": {"total": all, "trainable": trained},
            "device": if job.device.is_cpu() { "cpu" } else { "cuda" },
            "threads": rayon::current_num_threads(),
            "system": format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            "dtype": format!("{:?}", job.dtype).to_lowercase(),
            "rows": data.rows.len(), "samples": data.examples.len(), "steps": total,
            "plan": self.watch.json(),
        });
        if done > 0 {
            line["step"] = json!(done);
        }
        self.metrics.write(&line)?;
        let share = 100.0 * trained as f64 / all as f64;
        self.progress.line(&format!(
            "{}: {} of {:.1} M parameters train ({share:.2}%), {} rows, {total} steps, {} {}",
            job.recipe.name,
            millions(trained as u64),
            all as f64 / 1e6,
            data.rows.len(),
            if job.device.is_cpu() { "CPU" } else { "CUDA" },
            format!("{:?}", job.dtype).to_lowercase(),
        ));
        self.progress.line(&self.watch.line());
        if done == 0 {
            if job.recipe.run.eval_at_start {
                self.evaluate(0)?;
            }
            self.sample(0)?;
        }
        Ok(())
    }

    /// One step. Where memory runs out before anything was updated, and `again` says that it may begin anew, it does so
    /// with more layers recomputed, and so does the run from then on.
    pub fn step(
        &mut self,
        data: &Dataset,
        rows: &[usize],
        step: u64,
        lr: f64,
        again: bool,
    ) -> crate::Result<Stepped> {
        let times = &mut Times::start(false);
        let summed = loop {
            match accumulate(&self.setup, data, rows, step, times) {
                Ok(summed) => break summed,
                Err(e) if again && e.is_out_of_memory() => self.recompute_more(step, e)?,
                Err(e) => return Err(e),
            }
        };
        update(&self.setup, summed, data, rows, step, lr, times)
    }

    /// Goes over to choices that take less memory, with the same bits, and says so; the error where there are none.
    fn recompute_more(&mut self, step: u64, e: crate::Error) -> crate::Result<()> {
        let Some(plan) = self.job.smaller(self.watch.plan()) else { return Err(e) };
        let (was, choices) = (self.setup.choices, plan.choices);
        let (less, of) = (report::bytes(plan.total()), plan.walked);
        self.progress.line(&format!(
            "warning: out of memory in step {}: it begins anew with {} of {of} layers recomputed, not {}, which takes \
             {less} by the plan",
            step + 1,
            choices.recompute,
            was.recompute
        ));
        self.setup.choices = choices;
        self.watch.replan(plan, self.job);
        let event = json!({
            "event": "replanned", "step": step, "why": e.to_string(), "time": now(), "plan": self.watch.json(),
        });
        Ok(self.metrics.write(&event)?)
    }

    /// Writes a step, and shows it.
    pub fn stepped(&mut self, step: u64, lr: f64, s: &Stepped, seconds: f64) -> crate::Result<()> {
        self.watch.look();
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
        self.metrics.write(&line)?;
        self.progress.step(step, Told { loss: s.loss, grad_norm: s.grad_norm, lr, rate });
        Ok(())
    }

    /// Adds a step's load of the experts; every [`LOAD_EVERY`] steps and at the end it is written.
    pub fn loaded(&mut self, step: u64, load: &Load, last: bool) -> crate::Result<()> {
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

    /// Takes down why the run stops after `step` steps, and gives the error on.
    pub fn stopped(&mut self, step: u64, e: crate::Error) -> crate::Error {
        let event = json!({
            "event": "stopped", "step": step, "code": e.exit_code() as u8, "why": e.to_string(), "time": now(),
            "memory": self.watch.compared(),
        });
        // on a full disk this fails too; the error that is told is the one that stopped the run
        let _ = self.metrics.write(&event);
        e
    }

    /// Evaluates, where there is data for it.
    pub fn evaluate(&mut self, step: u64) -> crate::Result<()> {
        let Some(data) = self.eval else { return Ok(()) };
        place::enter(place::Phase::Evaluate, 0);
        let (loss, targets) = evaluate(self.setup.decoder, data, &self.setup.choices, &self.job.device)?;
        self.metrics
            .write(&json!({"event": "eval", "step": step, "loss": loss, "target_tokens": targets}))?;
        self.progress
            .line(&format!("evaluation after step {step}: loss {loss:.4}, perplexity {:.2}", loss.exp()));
        Ok(())
    }

    /// Answers the recipe's `log.sample`, so that a reader sees what the model says now.
    pub fn sample(&mut self, step: u64) -> crate::Result<()> {
        let job = self.job;
        let Some(tokenizer) = job.tokenizer.as_ref().filter(|t| t.has_template()) else { return Ok(()) };
        if let Some(prompt) = &job.recipe.log.sample {
            let messages = json!([{"role": "user", "content": prompt}]);
            let text = tokenizer.render(&messages, None, true, &job.recipe.data.template)?;
            let ids = tokenizer.encode(&text)?;
            place::enter(place::Phase::Evaluate, 0);
            let mut sampler = generate::greedy();
            let mut reader = generate::Reader::new(self.setup.decoder, &job.device);
            let reply = generate::reply(
                &mut reader,
                tokenizer,
                &ids,
                generate::SAMPLE_TOKENS,
                &mut sampler,
                &mut |_| true,
            )?;
            let event = json!({"event": "sample", "step": step, "prompt": prompt, "reply": reply});
            self.metrics.write(&event)?;
            self.progress.line(&format!("after step {step}, asked {prompt:?}: {reply:?}"));
        }
        Ok(())
    }
}

/// Steps between two lines that tell the load of all experts: with thousands of experts a line is long.
const LOAD_EVERY: u64 = 10;

/// How often each expert was chosen: `entropy` is 1 where all are chosen equally often and 0 where one is chosen
/// always, `peak` the busiest expert's load over the even load, `dead` counts experts that no token chose.
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

/// Seconds after 1970.
pub fn now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn millions(n: u64) -> String {
    if n < 1_000_000 { format!("{:.1} k", n as f64 / 1e3) } else { format!("{:.1} M", n as f64 / 1e6) }
}
