//! What passes between requests and replicas.

use super::scores::Token;
use candle_transformers::generation::Sampling;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

/// The prompts of one request, and how to continue each.
pub struct Generation {
    pub prompts: Vec<Prompt>,
    /// Most tokens of a reply.
    pub max_tokens: usize,
    /// Most tokens of a prompt and its reply.
    pub context: usize,
    /// Stop strings.
    pub stop: Vec<String>,
    pub sampling: Sampling,
    /// Without one, each reply is drawn by a random seed.
    pub seed: Option<u64>,
    /// As in `SamplingOptions`; 1 for none.
    pub repetition_penalty: f32,
    /// Alternatives per token; `None` without log-probabilities.
    pub logprobs: Option<usize>,
    /// Whether the reply begins with the prompt.
    pub echo: bool,
    /// Whether the reply continues the text of the prompt, and is no new message.
    pub continues: bool,
    /// The step named by the request, of a run; weights of another step do not answer.
    pub step: Option<u64>,
}

/// A prompt.
pub struct Prompt {
    pub ids: Vec<u32>,
    /// Text, if given as text.
    pub text: Option<String>,
}

/// A generation to run, and the channel for the answer.
pub struct Job {
    pub generation: Generation,
    pub events: mpsc::UnboundedSender<Event>,
    /// Share of the memory for request bodies.
    pub _held: Option<OwnedSemaphorePermit>,
}

/// Finish reason of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// End-of-text token or a stop string.
    Stop,
    /// Token limit.
    Length,
}

/// Part of an answer.
pub enum Event {
    /// First event: the step of the weights, if serving a run. No other follows if the request names another step.
    Begin(Option<u64>),
    /// Text of the current reply, with its tokens if log-probabilities are wanted.
    Text(String, Vec<Token>),
    /// End of the current reply: finish reason, and generated tokens. The reply to the next prompt follows.
    End(FinishReason, usize),
    /// Last event: error message.
    Failed(String),
}

/// Public state of a replica.
pub struct ReplicaStatus {
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
pub fn random() -> u64 {
    RandomState::new().hash_one(SystemTime::now())
}
