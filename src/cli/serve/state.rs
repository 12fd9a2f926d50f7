//! State shared by all requests.

use super::generate::{Queue, ReplicaStatus};
use super::limits::Limits;
use crate::infer::sampling::GenerationConfig;
use crate::infer::{ContextLimit, Prompter};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::Semaphore;

/// The served model, and the queue to its replicas.
pub(super) struct ServerState {
    /// Model name in the API.
    pub name: String,
    /// Unix time of loading.
    pub created: u64,
    /// Key that clients must send.
    pub key: Option<String>,
    pub prompt: Prompter,
    /// The model's own sampling settings.
    pub generation: GenerationConfig,
    /// Limit of tokens per reply, if one was given.
    pub max_tokens: Option<usize>,
    /// Most tokens of prompt and reply.
    pub context: ContextLimit,
    /// Embedding rows.
    pub vocab: usize,
    pub replicas: Vec<ReplicaStatus>,
    pub queue: Queue,
    pub limits: Limits,
    /// Bytes left for request bodies.
    pub room: Arc<Semaphore>,
}

impl ServerState {
    fn running(&self) -> impl Iterator<Item = &ReplicaStatus> {
        self.replicas.iter().filter(|r| !r.is_stopped())
    }

    /// Newest step among the replicas, if serving a run.
    pub fn step(&self) -> Option<u64> {
        self.running().filter_map(ReplicaStatus::step).max()
    }

    /// The step in a name of the form `NAME:step-100`, if serving a run.
    pub fn step_in(&self, name: &str) -> Option<u64> {
        let step = name.strip_prefix(self.name.as_str())?.strip_prefix(":step-")?;
        self.step().and_then(|_| step.parse().ok())
    }

    /// The model object of the API.
    pub fn describe(&self) -> Value {
        let mut model =
            json!({"id": self.name, "object": "model", "created": self.created, "owned_by": "ft"});
        if let Some(step) = self.step() {
            model["step"] = json!(step);
        }
        if self.replicas.len() > 1 {
            let describe = |r: &ReplicaStatus| match r.step() {
                Some(step) => json!({"device": r.device, "step": step}),
                None => json!({"device": r.device}),
            };
            model["copies"] = self.running().map(describe).collect();
        }
        model
    }
}
