//! Parser of a run's `metrics.jsonl`: each step once, in order.
//!
//! A run may have been killed while writing a line, and a resumed run repeats steps. Unreadable lines are
//! skipped and counted. A repeated step overrides the earlier one. A "resume" event at step n discards
//! everything after n, as the engine does.

use super::Error;
use ft_base::store;
use ft_engine::walk;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
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

/// A generated sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Completed steps.
    pub step: u64,
    pub prompt: String,
    pub reply: String,
}

/// Expert load over the steps before an "experts" event.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    /// Mean over layers of the load's entropy, normalized to 1.
    pub entropy: f64,
    /// Load of the busiest expert over the even load.
    pub peak: f64,
    /// Experts without a token.
    pub dead: f64,
    /// Number of steps covered.
    pub steps: u64,
    /// Byte offset of the line; per-layer counts are read again when shown.
    at: u64,
}

/// Tokens by expert of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Index of the layer.
    pub layer: u64,
    pub tokens: Vec<u64>,
}

impl Layer {
    /// Entropy of the load, normalized: 1 is even.
    pub fn entropy(&self) -> f64 {
        walk::entropy(&self.tokens)
    }

    /// Load of the busiest expert over the even load.
    pub fn peak(&self) -> f64 {
        walk::peak(&self.tokens)
    }
}

/// Why a run stopped early.
#[derive(Clone, Debug, PartialEq)]
pub struct Stopped {
    /// Completed steps.
    pub step: u64,
    /// Exit code.
    pub code: u64,
    /// Error message.
    pub why: String,
    /// Unix time, if recorded.
    pub time: Option<u64>,
    /// Planned and measured memory; null if not recorded.
    pub memory: Value,
}

/// Score names, in the order of [`Metrics::scores`].
pub const SCORES: [&str; 3] = ["exact match", "ROUGE-L", "regex match"];

/// All metrics of a run.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// The "start" event; null if missing.
    pub start: Value,
    /// Steps by number, from 1.
    pub steps: BTreeMap<u64, Step>,
    /// Evaluation loss, by completed steps.
    pub evals: BTreeMap<u64, f64>,
    /// Scores of generated answers, by completed steps, in the order of [`SCORES`]; NaN if not requested.
    pub scores: BTreeMap<u64, [f64; 3]>,
    /// Samples by step and prompt.
    pub samples: BTreeMap<(u64, String), Sample>,
    /// Expert load, by step.
    pub spread: BTreeMap<u64, Spread>,
    /// Steps the run resumed from.
    pub resumed: Vec<u64>,
    /// The "end" event.
    pub end: Option<Value>,
    pub stopped: Option<Stopped>,
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
        let mut file =
            BufReader::new(ft_base::store::open_plain(path).map_err(|e| Error::no_metrics(path, e))?);
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
        match text(&e, "event") {
            "start" => {
                let (damaged, cut_short) = (std::mem::take(&mut self.damaged), self.cut_short);
                *self = Self { start: e, damaged, cut_short, ..Self::default() };
            }
            "resume" => {
                self.back_to(step);
                self.resumed.push(step);
                if self.start.is_null() {
                    self.start = e;
                } else {
                    // a resumed run may have more steps, and has a new plan
                    for key in ["steps", "plan"] {
                        if let Some(v) = e.get(key) {
                            self.start[key] = v.clone();
                        }
                    }
                }
            }
            "step" => {
                let bytes = |key| count(&e, key);
                let n = |key| number(&e, key);
                self.steps.insert(
                    step,
                    Step {
                        loss: n("loss"),
                        aux_loss: n("aux_loss"),
                        z_loss: n("z_loss"),
                        grad_norm: n("grad_norm"),
                        lr: n("lr"),
                        tokens: n("tokens"),
                        targets: n("target_tokens"),
                        seconds: n("seconds"),
                        rate: n("tokens_per_second"),
                        device_bytes: bytes("peak_device_bytes"),
                        host_bytes: bytes("peak_host_bytes"),
                    },
                );
            }
            "eval" => {
                let scores = ["exact_match", "rouge_l", "regex_match"].map(|key| number(&e, key));
                if scores.iter().any(|s| s.is_finite()) {
                    self.scores.insert(step, scores);
                }
                self.evals.insert(step, number(&e, "loss"));
            }
            "sample" => {
                let (prompt, reply) = (text(&e, "prompt").to_string(), text(&e, "reply").to_string());
                self.samples.insert((step, prompt.clone()), Sample { step, prompt, reply });
            }
            "experts" => {
                let n = |key| number(&e, key);
                let (entropy, peak, dead) = (n("entropy"), n("peak"), n("dead"));
                self.spread.insert(step, Spread { entropy, peak, dead, steps: count(&e, "steps"), at });
            }
            "stopped" => {
                self.stopped = Some(Stopped {
                    step,
                    code: count(&e, "code"),
                    why: text(&e, "why").to_string(),
                    time: e.get("time").and_then(Value::as_u64),
                    memory: e["memory"].clone(),
                });
            }
            "end" => self.end = Some(e),
            _ => {}
        }
    }

    /// Discards everything after `step`, to be run again.
    fn back_to(&mut self, step: u64) {
        let after = step.saturating_add(1);
        self.steps.split_off(&after);
        self.evals.split_off(&after);
        self.scores.split_off(&after);
        self.spread.split_off(&after);
        self.samples.retain(|(s, _), _| *s <= step);
        self.resumed.retain(|s| *s <= step);
        (self.end, self.stopped) = (None, None);
    }

    /// Planned and measured memory, as recorded at the end or stop of the run.
    pub fn recorded(&self) -> &Value {
        match (&self.end, &self.stopped) {
            (Some(end), _) => &end["memory"],
            (None, Some(s)) => &s.memory,
            (None, None) => &Value::Null,
        }
    }

    /// Last completed step.
    pub fn last_step(&self) -> u64 {
        self.steps.last_key_value().map_or(0, |(s, _)| *s)
    }

    /// Planned number of steps; 0 if unknown.
    pub fn total_steps(&self) -> u64 {
        count(&self.start, "steps")
    }
}

/// Per-layer counts of one "experts" event.
///
/// # Errors
/// A file that changed since the first read.
pub fn layers(path: &Path, spread: &Spread) -> Result<Vec<Layer>, Error> {
    let fail = |e| store::Error::run(path, e);
    let mut file = BufReader::new(ft_base::store::open_plain(path).map_err(fail)?);
    file.seek(SeekFrom::Start(spread.at)).map_err(fail)?;
    let mut line = Vec::new();
    file.by_ref().read_until(b'\n', &mut line).map_err(fail)?;
    let event: Value = serde_json::from_slice(&line).unwrap_or(Value::Null);
    let list = event.get("layers").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    Ok(list
        .iter()
        .map(|l| {
            let tokens = l.get("tokens").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
            let tokens = tokens.iter().map(|n| n.as_u64().unwrap_or(0)).collect();
            Layer { layer: count(l, "layer"), tokens }
        })
        .filter(|l: &Layer| !l.tokens.is_empty())
        .collect())
}
