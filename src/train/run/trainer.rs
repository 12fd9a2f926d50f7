//! The loop over steps, with evaluation, checkpoints, signals, and the result at the end.

use super::folder::clear;
use super::log::{RunLog, received};
use super::options::Outcome;
use super::prepare::PreparedRun;
use super::server::Server;
use crate::log::read_metrics;
use crate::train::Error;
use crate::train::checkpoint::state::{self, State};
use crate::train::eval::{DivergenceCheck, EvalHistory, evaluate, score};
use crate::train::job;
use crate::train::layout::CHECKPOINTS;
use crate::train::memory::MemoryMonitor;
use crate::train::output;
use crate::train::ranks;
use crate::train::step::command::{self, Command};
use crate::train::step::{Gather, StepInput, StepOutput, TrainContext, TrainedModel, finite};
use candle_core::Device;
use ft_base::error::ExitCode;
use ft_base::memory::place;
use ft_base::store;
use ft_base::store::checkpoint::Checkpoints;
use ft_base::terminal::{plural, warn};
use ft_data::Micro;
use ft_engine::params::build::unreached;
use ft_engine::walk::{Times, generate};
use ft_recipe::Part;
use serde_json::Value;
use std::path::PathBuf;
use std::time::Instant;

/// Number of first steps of a process to be replanned after running out of memory.
const REPLANNED_STEPS: usize = 3;

/// Trains a loaded model on the first rank.
pub struct Trainer<'a> {
    cx: TrainContext<'a>,
    run: &'a PreparedRun,
    log: RunLog,
    monitor: MemoryMonitor,
    history: EvalHistory,
    divergence: DivergenceCheck,
    /// Number of completed steps.
    done: u64,
    /// Step of the newest checkpoint.
    saved: Option<u64>,
    /// Step of the newest samples.
    sampled: Option<u64>,
    /// Whether the evaluations before a resumption were of other data.
    is_other_eval: bool,
    /// True once a backward pass has reached all trained tensors.
    reached: bool,
    /// Server of `serve.devices`.
    server: Option<Server>,
}

impl<'a> Trainer<'a> {
    /// Opens the metrics of the run folder, after the removal of an earlier run if requested. From here on,
    /// signals are deferred until a checkpoint is saved.
    pub fn new(run: &'a PreparedRun, cx: TrainContext<'a>, monitor: MemoryMonitor) -> ft_base::Result<Self> {
        let (job, dir) = (cx.job, &run.dir);
        if run.options.overwrite {
            // Deletes old files only after all checks have passed.
            clear(job, dir)?;
            Checkpoints::open(&dir.join(CHECKPOINTS))?;
        }
        store::write_atomic(&dir.join("recipe.toml"), job.recipe.to_toml().as_bytes())?;
        let resumed = run.resume.as_ref().map(|_| run.done());
        if run.options.step.is_some() {
            // Checkpoints go before metrics: a crash in between leaves no checkpoint newer than the metrics.
            run.checkpoints.keep_to(run.done(), usize::MAX, None)?;
        }
        let rates = cx.model.params.learning_rates(&job.recipe.optimizer);
        let mut log = RunLog::open(dir, &job.recipe, resumed, run.total(), (rates, run.inputs.schedule))?;
        run.options.observer.iter().for_each(|observer| log.metrics.observe(observer.clone()));
        let mut events = read_metrics(&dir.join("metrics.jsonl"))?;
        let last =
            |events: &[Value]| events.iter().rfind(|e| e["event"] == "eval").map(|e| e["step"].as_u64());
        let newest = last(&events);
        let hash = run.inputs.eval.as_deref().map(|e| e.hash.as_str());
        let others = EvalHistory::only_of(&mut events, hash);
        let is_other_eval = newest != last(&events);
        if others > 0 && (job.recipe.run.keep_best || job.recipe.run.patience > 0) {
            warn(&format!(
                "data.eval: {} of other data: not compared with those to come (run.keep_best, run.patience)",
                plural(others, "evaluation")
            ));
        }
        let history = if job.recipe.run.keep_best {
            EvalHistory::with_checkpoints(job.recipe.run.best, events, &run.checkpoints, run.done())
        } else {
            EvalHistory::of(job.recipe.run.best, &events)
        };
        let server = Server::start(run.options.program.as_deref(), job, dir);
        run.signals.hold();
        let divergence = DivergenceCheck::default();
        let done = run.done();
        let (saved, sampled, reached) = (resumed, None, false);
        Ok(Self {
            cx,
            run,
            log,
            monitor,
            history,
            divergence,
            done,
            saved,
            sampled,
            is_other_eval,
            reached,
            server,
        })
    }

    /// Trains, and writes the result.
    pub fn run(mut self) -> ft_base::Result<Outcome> {
        let outcome = self.train().and_then(|()| self.finish());
        outcome.map_err(|e| {
            let e = self.monitor.planned().explain(e);
            self.log.stopped(self.done, &e, &self.monitor);
            e
        })
    }

    /// Runs the steps; a checkpoint and an evaluation follow a step when due.
    fn train(&mut self) -> ft_base::Result<()> {
        let (first, total) = (self.run.done() as usize, self.run.total());
        let batches = &self.run.inputs.batches;
        self.begin()?;
        if first > 0 && batches.is_due(self.cx.job.recipe.run.eval_every, first) {
            // Repeats work interrupted after the checkpoint.
            if self.log.metrics.count("eval") == 0 || self.is_other_eval {
                self.evaluate()?;
            }
            self.sample()?;
        }
        for step in first..total {
            if step > first && self.log.metrics.is_ended() {
                self.log.line(&format!("ended by the observer after step {}", self.done));
                break;
            }
            let patience = self.cx.job.recipe.run.patience;
            if self.history.is_exhausted(patience) {
                let best = self.history.best_of_all().map_or(0, |(step, _)| step);
                self.log.line(&format!(
                    "stopped after step {}: {patience} evaluations in a row were no better than step \
                        {best}'s (run.patience)",
                    self.done
                ));
                break;
            }
            self.check_signal()?;
            self.step(step)?;
            let run = &self.cx.job.recipe.run;
            if batches.is_due(run.save_every, step + 1) {
                self.save()?;
            }
            if batches.is_due(run.eval_every, step + 1) {
                self.evaluate().and_then(|()| self.sample()).map_err(|e| self.after_intact(e))?;
            }
        }
        self.check_signal()
    }

    /// Logs the begin of the run. At step 0, also evaluates and samples if configured.
    fn begin(&mut self) -> ft_base::Result<()> {
        let (run, job) = (self.run, self.cx.job);
        self.log.start(
            &self.cx,
            (&run.inputs.data, run.inputs.eval.as_deref()),
            (self.done, run.total()),
            run.identity.get()?,
            &self.monitor,
        )?;
        if self.done > 0 {
            return Ok(());
        }
        if job.recipe.run.eval_at_start {
            match self.evaluation_loss() {
                Err(e) if matches!(e.of(), Some(Error::Abandoned(_))) => return Ok(()),
                outcome => drop(outcome?),
            }
        }
        self.sample()
    }

    /// Runs step `step`, numbered from 0, logs it, and checks the model for divergence.
    fn step(&mut self, step: usize) -> ft_base::Result<()> {
        let (run, started) = (self.run, Instant::now());
        let rows = run.inputs.batches.rows(step);
        command::announce(self.cx.comm, &Command::Step(step as u64))?;
        let before = received(self.cx.comm);
        let output = self.update(&rows, step).map_err(|e| self.after_abandoned(e))?;
        if !self.reached && output.targets > 0 {
            self.check_reached(&output)?;
            self.reached = true;
        }
        self.done = step as u64 + 1;
        let last = step + 1 == run.total();
        let seconds = started.elapsed().as_secs_f64();
        self.monitor.measure();
        self.log.step(&self.cx, &output, step, (seconds, before), self.monitor.peak())?;
        while let Some(news) = self.server.as_mut().and_then(Server::poll) {
            self.log.server(self.done, news)?;
        }
        self.log.experts(self.done, &output.load, last)?;
        let row = || Ok(Micro::collate(&run.inputs.data, &rows[..rows.len().min(1)])?.probe());
        self.divergence.check(&self.cx, &output, row, (self.done, last))
    }

    /// Updates the weights unless a signal arrives. If memory runs out before any update in one of the
    /// first steps, replans with more recomputation, for this step and all later ones, and repeats the
    /// step. Not possible with several ranks or with `optimizer.in_backward`.
    fn update(&mut self, rows: &[usize], step: usize) -> ft_base::Result<StepOutput> {
        let (run, times) = (self.run, &mut Times::off());
        let lr = |peak: f64| run.inputs.schedule.at(step, peak);
        let input = StepInput { data: &run.inputs.data, rows, step: step as u64, lr: &lr };
        // Other ranks follow the original plan.
        let young = step - (run.done() as usize) < REPLANNED_STEPS;
        let again = young && self.cx.comm.world() == 1 && !self.cx.model.params.in_backward;
        let scale = self.cx.loss_scale.get();
        let (e, intact) = loop {
            match self.cx.accumulate(&input, times, &|| run.signals.asked()) {
                Ok(output) => match self.cx.update(&input, &output, times) {
                    Ok(()) => return Ok(output),
                    Err(e) => {
                        let intact = matches!(e.of(), Some(Error::NonFinite { .. }));
                        break (e, intact);
                    }
                },
                Err(e) if again && e.exit_code() == ExitCode::DoesNotFit => {
                    self.recompute_more(step as u64, e)?;
                }
                Err(e) => break (e, true),
            }
        };
        if !intact {
            return Err(e);
        }
        self.cx.loss_scale.set(scale);
        Err(self.after_intact(e))
    }

    /// Before an error with intact weights of the last step, saves a checkpoint of the step, in addition to `run.keep`
    /// older ones: the error may have begun in the steps before. Not with several ranks, as any can have failed too,
    /// nor with updates in the backward pass.
    fn after_intact(&mut self, e: ft_base::Error) -> ft_base::Error {
        let is_saved = self.done == 0 || self.saved == Some(self.done);
        let is_alone = self.cx.comm.world() == 1 && !self.cx.model.params.in_backward;
        if is_saved || !is_alone || matches!(e.of(), Some(Error::Abandoned(_))) {
            return e;
        }
        // the error's place, before the saving changes it
        let e = self.monitor.planned().explain(e);
        match self.save_keeping(self.cx.job.recipe.run.keep.saturating_add(1)) {
            Ok(()) => self.log.line(&format!(
                "a checkpoint of step {} is written before the error: --resume goes on from it, --resume --step N from \
                 an earlier one; --accept-change optimizer.lr takes another learning rate",
                self.done
            )),
            Err(other) => warn(&format!("no checkpoint of step {} is written: {other}", self.done)),
        }
        e
    }

    /// Switches to an execution with less memory and the same bits, with a warning. Returns the error if
    /// none exists.
    fn recompute_more(&mut self, step: u64, e: ft_base::Error) -> ft_base::Result<()> {
        let Some(plan) = self.cx.job.smaller(self.monitor.plan()) else { return Err(e) };
        let was = std::mem::replace(&mut self.cx.execution, plan.execution);
        self.monitor.replan(plan, self.cx.job);
        self.log.replanned(step, &was, &e, &self.monitor)
    }

    fn check_reached(&self, output: &StepOutput) -> Result<(), Error> {
        let missing = unreached(&self.cx.model.params.tensors, &output.reached);
        if missing.is_empty() {
            return Ok(());
        }
        let names = missing.iter().take(5).copied().collect::<Vec<_>>().join(", ");
        Err(Error::Unreached { count: missing.len(), names })
    }

    /// Evaluates. Saves a checkpoint of a new best model, or before the error of a non-finite loss.
    fn evaluate(&mut self) -> ft_base::Result<()> {
        let run = &self.cx.job.recipe.run;
        match self.evaluation_loss() {
            Ok(true) if run.keep_best => {
                self.save()?;
                // The previous best checkpoint is no longer needed.
                Ok(self.run.checkpoints.keep_to(self.done, run.keep, Some(self.done))?)
            }
            Err(e) if matches!(e.of(), Some(Error::EvaluationOf { .. })) => self.save().and(Err(e)),
            outcome => outcome.map(drop).map_err(|e| self.after_abandoned(e)),
        }
    }

    /// Computes and logs the evaluation loss, unless data is missing or a signal arrives. Returns true for a new best
    /// loss.
    fn evaluation_loss(&mut self) -> ft_base::Result<bool> {
        let (run, step) = (self.run, self.done);
        let Some(data) = run.inputs.eval.as_deref() else { return Ok(false) };
        place::enter(place::Phase::Evaluate, 0);
        let stop = || run.signals.asked();
        let TrainContext { job, comm, .. } = self.cx;
        let TrainedModel { decoder, params, .. } = self.cx.model;
        command::announce(comm, &Command::Evaluate)?;
        let gather = Gather::new(decoder, params, comm);
        let of = evaluate(&self.cx.scorer(&gather), data, self.cx.objective(Part::Eval), &stop)?;
        let loss = of.loss;
        let scored = if loss.is_finite() {
            score(job, decoder, &Gather::leading(decoder, params, comm), data, &stop)?
        } else {
            None
        };
        self.log.evaluation(step, &of, scored.as_ref())?;
        if loss.is_finite() {
            return Ok(self.history.record(step, self.history.value_of(&of)));
        }
        let kept = if step == 0 {
            "nothing was trained yet"
        } else {
            "the checkpoint of that step is written, and no adapter or model"
        };
        Err(Error::EvaluationOf { step, kept }.into())
    }

    /// Generates replies to `log.samples`, once a step.
    fn sample(&mut self) -> ft_base::Result<()> {
        let job = self.cx.job;
        let prompts = &job.recipe.log.samples;
        let resumed = self.done == self.run.done() && self.log.metrics.count("sample") >= prompts.len();
        let (Some(tokenizer), false) = (&job.tokenizer, resumed || self.sampled == Some(self.done)) else {
            return Ok(());
        };
        place::enter(place::Phase::Evaluate, 0);
        let TrainedModel { decoder, params, .. } = self.cx.model;
        let gather = Gather::leading(decoder, params, self.cx.comm);
        let limit = generate::SAMPLE_TOKENS;
        for (i, (prompt, ids)) in prompts.iter().zip(job::samples(&job.recipe, Some(tokenizer))?).enumerate()
        {
            let mut reader =
                generate::Reader::new(decoder, &job.device).within(ids.len() + limit).hooks(&gather);
            let mut go = |_: &str| self.run.signals.asked() == 0;
            let mut sampler = generate::greedy();
            let reply = generate::answer(&mut reader, tokenizer, &ids, limit, &mut sampler, &mut go)?.text;
            self.check_signal()?;
            self.log.sample(self.done, (i + 1, prompt), &reply, job.trained().form)?;
        }
        self.sampled = Some(self.done);
        Ok(())
    }

    /// Converts the error of an abandoned operation to the error of the signal, after saving a checkpoint.
    fn after_abandoned(&mut self, e: ft_base::Error) -> ft_base::Error {
        match e.of() {
            Some(Error::Abandoned(asked)) => {
                self.run.signals.hear(*asked);
                self.check_signal().err().unwrap_or(e)
            }
            _ => e,
        }
    }

    /// After a signal, saves a checkpoint and returns the signal as an error.
    fn check_signal(&mut self) -> ft_base::Result<()> {
        let Some((name, code)) = self.run.signals.seen() else { return Ok(()) };
        let step = self.done;
        let saved = if step == 0 {
            "before the first step was done: there is nothing to save\n  hint: the same command starts again"
                .into()
        } else {
            self.save()?;
            format!(
                "after step {step}; a checkpoint is written\n  hint: the same command with --resume goes on"
            )
        };
        self.log.progress.finish();
        Err(Error::Signal { name, saved, code }.into())
    }

    /// Saves a checkpoint of the completed steps, unless it exists.
    fn save(&mut self) -> ft_base::Result<()> {
        self.save_keeping(self.cx.job.recipe.run.keep)
    }

    /// As [`Self::save`], and keeps the newest `keep` checkpoints.
    fn save_keeping(&mut self, keep: usize) -> ft_base::Result<()> {
        let (step, params) = (self.done, &self.cx.model.params);
        if self.saved == Some(step) {
            return Ok(());
        }
        place::enter(place::Phase::Save, 0);
        let draft = self.run.checkpoints.begin(step)?;
        let identity = self.run.identity.get()?.clone();
        let loss_scale = self.cx.loss_scale.get();
        let state = State { version: 1, ft: env!("CARGO_PKG_VERSION").into(), step, identity, loss_scale };
        state::begin(draft.path(), &state, params)?;
        command::announce(self.cx.comm, &Command::Save(step, draft.path().into()))?;
        finite::check_weights(params, self.cx.comm, step)?;
        ranks::save(&self.cx, draft.path())?;
        let run = &self.cx.job.recipe.run;
        let best = self.history.best().filter(|_| run.keep_best).map(|(step, _)| step);
        draft.commit(keep, best)?;
        self.saved = Some(step);
        self.log.checkpoint(step, &self.run.checkpoints.folder(step))
    }

    /// Writes the result after the last step.
    fn finish(&mut self) -> ft_base::Result<Outcome> {
        let run = self.run;
        // Early stopping may end between two evaluations.
        self.sample()?;
        self.check_signal()?;
        // Early stopping leaves the last step unsaved.
        self.save()?;
        // From here on, a signal loses nothing: the result appears whole or not at all.
        run.signals.release();
        let step = self.load_best()?;
        self.log.progress.finish();
        let result = self.write_result(step)?;
        command::announce(self.cx.comm, &Command::End)?;
        self.monitor.measure();
        self.log.end(self.done, step, &result, &self.monitor)?;
        self.log.summary(
            self.cx.job,
            self.done,
            &result,
            (&self.history, self.server.is_some()),
            self.monitor.peak(),
        );
        Ok(Outcome::Done { result })
    }

    /// With `run.keep_best`, loads the checkpoint of the best step. Returns the step of the loaded weights.
    fn load_best(&mut self) -> ft_base::Result<u64> {
        let keep_best = self.cx.job.recipe.run.keep_best;
        let best = self.history.best().filter(|(step, _)| keep_best && *step != self.done);
        let Some((step, value)) = best else { return Ok(self.done) };
        let folder = self.run.checkpoints.whole(step)?.path;
        command::announce(self.cx.comm, &Command::Load(folder.as_os_str().into()))?;
        ranks::load_checkpoint(&self.cx.model.params, &folder, self.cx.comm)?;
        let told = self.history.told(value);
        self.log.line(&format!("the result is that of step {step}: evaluation {told}"));
        Ok(step)
    }

    /// Writes the result of a step. Returns the folder.
    fn write_result(&self, step: u64) -> ft_base::Result<PathBuf> {
        place::enter(place::Phase::Save, 0);
        let (run, params) = (self.run, &self.cx.model.params);
        let probe = Micro::collate(&run.inputs.data, &[0])?.probe();
        if params.has_masters() {
            let values = |i: usize| Ok(params.master(i)?.real()?.clone());
            return output::write(&self.cx, &values, &run.dir, &probe);
        }
        // Without master weights, ranks hold shards; the checkpoint of the step holds all values.
        let files = state::weights(&run.checkpoints.folder(step))?;
        let values = |i: usize| {
            let name = &params.tensors[i].name;
            Ok(files.tensor(name, params.stored(i)?, &Device::Cpu)?)
        };
        output::write(&self.cx, &values, &run.dir, &probe)
    }
}
