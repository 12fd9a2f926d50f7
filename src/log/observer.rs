//! Events of a run for a program that watches it.

use serde_json::Value;
use std::fmt;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// An event of a run: a line of `metrics.jsonl`. A missing or non-finite number is NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The run begins, or resumes.
    Start {
        /// Name of the run.
        name: &'a str,
        /// Completed steps: 0, or those of the checkpoint.
        step: u64,
        /// Steps of the whole run.
        steps: u64,
    },
    /// A step is complete.
    Step {
        /// Its number, from 1.
        step: u64,
        /// Mean loss over the targets of the step.
        loss: f64,
        /// Gradient norm before clipping.
        grad_norm: f64,
        /// The highest learning rate.
        lr: f64,
        /// Tokens in the rows of the step.
        tokens: u64,
        /// Duration.
        seconds: f64,
    },
    /// An evaluation is complete.
    Evaluation {
        /// Completed steps.
        step: u64,
        /// Mean loss over the targets of the evaluation data.
        loss: f64,
        /// Share of exact answers, with `generate.samples`.
        exact_match: f64,
        /// Mean ROUGE-L of the answers, with `generate.samples`.
        rouge_l: f64,
    },
    /// The model has answered a prompt of `log.samples`.
    Sample {
        /// Completed steps.
        step: u64,
        /// The prompt.
        prompt: &'a str,
        /// The reply.
        reply: &'a str,
    },
    /// A checkpoint is on disk, whole.
    Checkpoint {
        /// Completed steps.
        step: u64,
        /// Its folder.
        path: &'a Path,
    },
    /// The result is on disk.
    End {
        /// Completed steps.
        step: u64,
        /// Folder of the adapter or model.
        result: &'a Path,
    },
    /// An error or a signal ended the run.
    Stopped {
        /// Completed steps.
        step: u64,
        /// The error.
        why: &'a str,
    },
}

impl<'a> Event<'a> {
    /// The event of a line of `metrics.jsonl`; `None` for lines of other kinds.
    pub(crate) fn of(line: &'a Value) -> Option<Self> {
        let text = |key: &str| line[key].as_str().unwrap_or_default();
        let count = |key: &str| line[key].as_u64().unwrap_or_default();
        let number = |key: &str| line[key].as_f64().unwrap_or(f64::NAN);
        let step = count("step");
        Some(match text("event") {
            "start" | "resume" => Event::Start { name: text("name"), step, steps: count("steps") },
            "step" => Event::Step {
                step,
                loss: number("loss"),
                grad_norm: number("grad_norm"),
                lr: number("lr"),
                tokens: count("tokens"),
                seconds: number("seconds"),
            },
            "eval" => Event::Evaluation {
                step,
                loss: number("loss"),
                exact_match: number("exact_match"),
                rouge_l: number("rouge_l"),
            },
            "sample" => Event::Sample { step, prompt: text("prompt"), reply: text("reply") },
            "checkpoint" => Event::Checkpoint { step, path: Path::new(text("path")) },
            "end" => Event::End { step, result: Path::new(text("result")) },
            "stopped" => Event::Stopped { step, why: text("why") },
            _ => return None,
        })
    }
}

/// The function of an observer.
type Watch = dyn FnMut(&Event<'_>) -> ControlFlow<()> + Send;

/// A function called with each event of a run. [`ControlFlow::Break`] ends the run after the step.
#[derive(Clone)]
pub struct Observer(Arc<Mutex<Watch>>);

impl Observer {
    /// Wraps a function.
    pub fn new(watch: impl FnMut(&Event<'_>) -> ControlFlow<()> + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(watch)))
    }

    /// Calls the function with the event of a line of `metrics.jsonl`.
    pub(crate) fn see(&self, line: &Value) -> ControlFlow<()> {
        let Some(event) = Event::of(line) else { return ControlFlow::Continue(()) };
        let mut watch = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watch(&event)
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observer")
    }
}
