//! Parser of a run's `metrics.jsonl`: each step once, in order.
//!
//! A run may have been killed while writing a line, and a resumed run repeats steps. Unreadable lines are
//! skipped and counted. A repeated step overrides the earlier one. A "resume" event at step n discards
//! everything after n, as the engine does.

use super::error::Error;
use super::plot::{ExpertCounts, Series};
use crate::log;
use ft_base::store;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::Path;

/// One optimizer step. Missing or non-finite numbers are NaN, missing bytes 0.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Mean loss over the targets of the step.
    pub loss: f64,
    /// Load-balancing loss, before its coefficient.
    pub aux_loss: f64,
    /// Router z-loss, before its coefficient.
    pub z_loss: f64,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    pub lr: f64,
    /// Share of pairs with the higher reward for chosen, or of documents with the right class.
    pub accuracy: f64,
    /// Mean difference of the rewards of chosen and rejected.
    pub margin: f64,
    /// Mean rewards of chosen and rejected.
    pub rewards: [f64; 2],
    /// Mean log-probabilities of chosen and rejected.
    pub logps: [f64; 2],
    /// Divergence from the teacher, and cross-entropy of the labels.
    pub distilled: [f64; 2],
    /// Whether the loss is of whole documents.
    pub is_of_documents: bool,
    /// Tokens processed.
    pub tokens: f64,
    /// Supervised tokens.
    pub targets: f64,
    pub seconds: f64,
    /// Tokens per second.
    pub rate: f64,
    /// Peak of device bytes so far.
    pub device_bytes: u64,
    /// Peak resident size so far.
    pub host_bytes: u64,
}

impl Step {
    fn new(e: &Value) -> Self {
        let n = |key| number(e, key);
        Self {
            loss: n("loss"),
            aux_loss: n("aux_loss"),
            z_loss: n("z_loss"),
            grad_norm: n("grad_norm"),
            lr: n("lr"),
            accuracy: n("accuracy"),
            margin: n("margins"),
            rewards: ["rewards_chosen", "rewards_rejected"].map(n),
            logps: ["logps_chosen", "logps_rejected"].map(n),
            distilled: ["kd", "ce"].map(n),
            is_of_documents: log::is_of_documents(e),
            tokens: n("tokens"),
            targets: n("target_tokens"),
            seconds: n("seconds"),
            rate: n("tokens_per_second"),
            device_bytes: count(e, "peak_device_bytes"),
            host_bytes: count(e, "peak_host_bytes"),
        }
    }
}

/// Expert load over the steps before an "experts" event.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLoad {
    /// Mean over layers of the load's entropy, normalized to 1.
    pub entropy: f64,
    /// Load of the busiest expert over the even load.
    pub peak: f64,
    /// Experts without a token.
    pub dead: f64,
    /// Number of steps covered.
    steps: u64,
    /// Byte offset of the line; per-layer counts are read again when shown.
    at: u64,
}

impl ExpertLoad {
    /// The steps covered, up to `step`, in words.
    pub fn steps_until(&self, step: u64) -> String {
        let from = step.saturating_sub(self.steps.saturating_sub(1)).max(1);
        if from == step { format!("step {step}") } else { format!("steps {from} to {step}") }
    }
}

/// A reply of the model.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Completed steps.
    pub step: u64,
    pub prompt: String,
    pub reply: String,
    /// The wanted reply; empty if none is known.
    pub reference: String,
    /// ROUGE-L of the reply; NaN if not scored.
    pub rouge_l: f64,
}

impl Sample {
    fn new(e: &Value) -> Self {
        let [prompt, reply, reference] = ["prompt", "reply", "reference"].map(|key| text(e, key).to_string());
        Self { step: count(e, "step"), prompt, reply, reference, rouge_l: number(e, "rouge_l") }
    }

    /// Appends the reply to a list, or replaces that of the same step and prompt.
    fn add_to(self, list: &mut Vec<Self>) {
        let step = list.iter_mut().rev().take_while(|s| s.step == self.step);
        match step.into_iter().find(|s| s.prompt == self.prompt) {
            Some(earlier) => *earlier = self,
            None => list.push(self),
        }
    }
}

/// Names and keys of the scores of an evaluation, in the order of [`Eval::scores`]: of generated answers, then of
/// pairs and classified documents.
pub const SCORES: [(&str, &str); 5] = [
    ("exact match", "exact_match"),
    ("ROUGE-L", "rouge_l"),
    ("regex match", "regex_match"),
    ("accuracy", "accuracy"),
    ("F1", "f1"),
];

/// An evaluation. Missing or non-finite numbers are NaN.
#[derive(Clone, Copy, Debug)]
pub struct Eval {
    pub loss: f64,
    /// NaN if the loss is of whole documents.
    pub perplexity: f64,
    /// In the order of [`SCORES`].
    pub scores: [f64; SCORES.len()],
}

/// All metrics of a run.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// The "start" event; null if missing.
    pub start: Value,
    /// Steps by number, from 1.
    pub steps: BTreeMap<u64, Step>,
    /// Evaluations, by completed steps.
    pub evals: BTreeMap<u64, Eval>,
    /// Replies to `log.samples`, in the order of the file.
    pub samples: Vec<Sample>,
    /// Scored answers, in the order of the file.
    pub answers: Vec<Sample>,
    /// Expert load, by step.
    pub expert_load: BTreeMap<u64, ExpertLoad>,
    /// Steps the run resumed from.
    pub resumed: Vec<u64>,
    /// The "end" event.
    pub end: Option<Value>,
    /// The "stopped" event.
    pub stopped: Option<Value>,
    /// Numbers of unreadable lines, from 1, except a truncated last line.
    pub damaged: Vec<u64>,
    /// Whether the last line is truncated.
    pub cut_short: bool,
}

/// A number of an event; NaN if missing.
pub fn number(v: &Value, key: &str) -> f64 {
    // larger values would break the axes
    v.get(key).and_then(Value::as_f64).filter(|n| n.abs() < 1e300).unwrap_or(f64::NAN)
}

/// A count of an event; 0 if missing.
pub fn count(v: &Value, key: &str) -> u64 {
    v.get(key).and_then(Value::as_u64).unwrap_or(0)
}

/// A text of an event; empty if missing.
pub fn text<'a>(v: &'a Value, key: &str) -> &'a str {
    v.get(key).and_then(Value::as_str).unwrap_or("")
}

impl Metrics {
    /// Reads a metrics file.
    ///
    /// # Errors
    /// A read error, or a file without events.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let fail = |e| store::Error::run(path, e);
        let missing = |source| Error::NoMetrics { path: path.to_path_buf(), source };
        let mut file = BufReader::new(store::open_plain(path).map_err(missing)?);
        let mut this = Self::default();
        let (mut line, mut at, mut events) = (Vec::new(), 0u64, 0u64);
        for number in 1u64.. {
            line.clear();
            let length = file.read_until(b'\n', &mut line).map_err(fail)?;
            if length == 0 {
                break;
            }
            let event = serde_json::from_slice::<Value>(&line).ok().filter(|v| !text(v, "event").is_empty());
            match event {
                Some(event) => {
                    events += 1;
                    this.add(event, at);
                }
                None if line.iter().all(u8::is_ascii_whitespace) => {}
                None if line.ends_with(b"\n") => this.damaged.push(number),
                None => this.cut_short = true,
            }
            at += length as u64;
        }
        if events == 0 {
            return Err(Error::Nothing { path: path.to_path_buf() });
        }
        Ok(this)
    }

    fn add(&mut self, e: Value, at: u64) {
        let step = count(&e, "step");
        let n = |key| number(&e, key);
        match text(&e, "event") {
            "start" => {
                let (damaged, cut_short) = (std::mem::take(&mut self.damaged), self.cut_short);
                *self = Self { start: e, damaged, cut_short, ..Self::default() };
            }
            "resume" => self.resume(step, e),
            "step" => {
                self.steps.insert(step, Step::new(&e));
            }
            "eval" => {
                let perplexity = log::perplexity(&e).unwrap_or(f64::NAN);
                let eval = Eval { loss: n("loss"), perplexity, scores: SCORES.map(|(_, key)| n(key)) };
                self.evals.insert(step, eval);
            }
            "sample" => Sample::new(&e).add_to(&mut self.samples),
            "answer" => Sample::new(&e).add_to(&mut self.answers),
            "experts" => {
                let (entropy, peak, dead) = (n("entropy"), n("peak"), n("dead"));
                let load = ExpertLoad { entropy, peak, dead, steps: count(&e, "steps"), at };
                self.expert_load.insert(step, load);
            }
            "stopped" => self.stopped = Some(e),
            "end" => self.end = Some(e),
            _ => {}
        }
    }

    /// Goes back to `step`. A resumed run may have more steps, and has a new plan.
    fn resume(&mut self, step: u64, event: Value) {
        self.back_to(step);
        self.resumed.push(step);
        if self.start.is_null() {
            self.start = event;
            return;
        }
        for key in ["steps", "plan", "given"] {
            if let Some(v) = event.get(key) {
                self.start[key] = v.clone();
            }
        }
    }

    /// Discards everything after `step`, to be run again.
    fn back_to(&mut self, step: u64) {
        let after = step.saturating_add(1);
        self.steps.split_off(&after);
        self.evals.split_off(&after);
        self.expert_load.split_off(&after);
        [&mut self.samples, &mut self.answers].into_iter().for_each(|list| list.retain(|s| s.step <= step));
        self.resumed.retain(|s| *s <= step);
        (self.end, self.stopped) = (None, None);
    }

    /// The event of the end or the stop of the run; null while it goes on.
    pub fn last_event(&self) -> &Value {
        self.end.as_ref().or(self.stopped.as_ref()).unwrap_or(&Value::Null)
    }

    /// Last completed step.
    pub fn last_step(&self) -> u64 {
        self.steps.last_key_value().map_or(0, |(s, _)| *s)
    }

    /// Planned number of steps; 0 if unknown.
    pub fn total_steps(&self) -> u64 {
        count(&self.start, "steps")
    }

    /// First and last step with a measurement.
    pub fn span(&self) -> Option<(u64, u64)> {
        let steps = || self.steps.keys().chain(self.evals.keys()).copied();
        steps().min().zip(steps().max())
    }

    /// A number of each step.
    pub fn series(&self, f: impl Fn(&Step) -> f64) -> Series {
        Series(self.steps.iter().map(|(step, s)| (*step, f(s))).collect())
    }

    /// Smoothing window of the loss: a fiftieth of the run, in steps.
    pub fn window(&self) -> f64 {
        (self.steps.len() as f64 / 50.0).round().clamp(1.0, 500.0)
    }

    /// Whether smoothing changes anything.
    pub fn is_smoothed(&self) -> bool {
        self.window() > 1.0
    }

    /// A number of each step, smoothed.
    pub fn smoothed(&self, f: impl Fn(&Step) -> f64) -> Series {
        let series = self.series(f);
        if self.is_smoothed() { series.smooth(self.window()) } else { series }
    }

    /// Whether the loss is of whole documents.
    pub fn is_of_documents(&self) -> bool {
        self.steps.values().any(|s| s.is_of_documents)
    }

    /// Evaluation losses.
    pub fn eval_losses(&self) -> Series {
        Series(self.evals.iter().map(|(step, e)| (*step, e.loss)).collect())
    }

    /// Sum of a number over all steps.
    pub fn sum(&self, f: impl Fn(&Step) -> f64) -> f64 {
        self.steps.values().map(f).filter(|n| n.is_finite()).sum()
    }

    /// Largest bytes of any step; 0 if not measured.
    pub fn peak(&self, f: impl Fn(&Step) -> u64) -> u64 {
        self.steps.values().map(f).max().unwrap_or(0)
    }
}

/// The entries of a JSON list; empty if missing.
fn list<'a>(v: &'a Value, key: &str) -> &'a [Value] {
    v.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// Per-layer counts of one "experts" event.
///
/// # Errors
/// A file that changed since the first read.
pub fn expert_counts(path: &Path, load: &ExpertLoad) -> Result<Vec<ExpertCounts>, Error> {
    let fail = |e| store::Error::run(path, e);
    let mut file = BufReader::new(store::open_plain(path).map_err(fail)?);
    file.seek(SeekFrom::Start(load.at)).map_err(fail)?;
    let mut line = Vec::new();
    file.read_until(b'\n', &mut line).map_err(fail)?;
    let event: Value = serde_json::from_slice(&line).unwrap_or(Value::Null);
    let counts = |l: &Value| ExpertCounts {
        layer: count(l, "layer"),
        tokens: list(l, "tokens").iter().map(|n| n.as_u64().unwrap_or(0)).collect(),
    };
    Ok(list(&event, "layers").iter().map(counts).filter(|l| !l.tokens.is_empty()).collect())
}
