//! What passes between requests and replicas.

use candle_transformers::generation::LogitsProcessor;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;
use tokio::sync::mpsc;

/// Settings of one answer.
pub(super) struct Generation {
    pub prompt: Vec<u32>,
    pub max_tokens: usize,
    /// Stop strings.
    pub stop: Vec<String>,
    pub sampler: LogitsProcessor,
}

/// A generation to run, and the channel for the answer.
pub(super) struct Job {
    pub generation: Generation,
    pub events: mpsc::UnboundedSender<Event>,
}

/// Finish reason of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum FinishReason {
    /// End-of-text token or a stop string.
    Stop,
    /// Token limit.
    Length,
}

/// Part of an answer.
pub(super) enum Event {
    /// First event: the step of the weights, if serving a run.
    Begin(Option<u64>),
    Text(String),
    /// Last event: finish reason, and tokens of the reply.
    End(FinishReason, usize),
    /// Last event: error message.
    Failed(String),
}

/// Public state of a replica.
pub(super) struct ReplicaStatus {
    pub device: String,
    /// Step of the loaded weights, if serving a run.
    step: Option<AtomicU64>,
    stopped: AtomicBool,
}

impl ReplicaStatus {
    pub fn new(device: String, step: Option<u64>) -> Self {
        Self { device, step: step.map(AtomicU64::new), stopped: AtomicBool::new(false) }
    }

    pub fn step(&self) -> Option<u64> {
        self.step.as_ref().map(|s| s.load(Relaxed))
    }

    /// Records the step of the loaded weights, if serving a run.
    pub fn set_step(&self, new: Option<u64>) {
        if let Some(step) = &self.step {
            step.store(new.unwrap_or(0), Relaxed);
        }
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Relaxed)
    }

    pub fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }
}

/// An unpredictable number, as a seed or a response id.
pub(super) fn random() -> u64 {
    RandomState::new().hash_one(SystemTime::now())
}
