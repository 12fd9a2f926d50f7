//! Replies: the queue of requests, and the replicas that answer them.

mod job;
mod queue;
mod reply_stream;
mod scores;
mod stop;
mod worker;

pub use job::{Event, FinishReason, Generation, Job, Prompt, ReplicaStatus, random};
pub use queue::{Queue, Refused};
pub use scores::{Spelled, Token};
pub use worker::{Generator, run_all, work};
