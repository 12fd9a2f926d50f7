//! Replicas of the model: each answers one request at a time from a shared queue.

use super::job::{Event, FinishReason, Generation, Job, Prompt, ReplicaStatus};
use super::queue::{Next, Queue};
use super::reply_stream::{self, Send};
use crate::infer::{Follower, Replica};
use candle_core::Device;
use ft_base::error::ExitCode;
use ft_base::terminal::{panics, warn};
use ft_data::Tokenizer;
use ft_engine::model::Decoder;
use ft_engine::walk::generate::Reader;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

/// Interval of checkpoint checks while idle.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A source of answers.
pub trait Backend {
    /// Step of the loaded weights, if serving a run.
    fn step(&self) -> Option<u64>;
    /// Loads newer weights if available.
    fn poll(&mut self);
    /// Generates the reply to one prompt.
    fn reply(
        &mut self,
        generation: &Generation,
        prompt: &Prompt,
        send: Send<'_>,
    ) -> ft_base::Result<(FinishReason, usize)>;
    /// Computes a little, to test the device after a failed answer.
    fn probe(&mut self) -> ft_base::Result<()>;
}

/// Answers with one replica until the queue closes or the replica fails. When serving a run, checks for a
/// newer checkpoint before each answer, unless another replica is loading one. A request with a step in the model name
/// waits for the end of the loading.
///
/// # Errors
/// A device failure.
pub fn work(queue: &Queue, replica: &mut impl Backend, status: &ReplicaStatus) -> ft_base::Result<()> {
    let limit = status.step().map(|_| POLL_INTERVAL);
    loop {
        let next = queue.next(limit);
        if matches!(next, Next::Closed) {
            return Ok(());
        }
        if limit.is_some() {
            let waits = matches!(&next, Next::Job(job) if job.generation.step.is_some());
            let loading = match waits {
                true => Ok(queue.loading.lock().unwrap_or_else(PoisonError::into_inner)),
                false => queue.loading.try_lock(),
            };
            if !matches!(loading, Err(TryLockError::WouldBlock)) {
                replica.poll();
                status.set_step(replica.step());
            }
        }
        match next {
            // the client may have disconnected in the meantime
            Next::Job(job) if !job.events.is_closed() => answer(queue, replica, &job)?,
            _ => {}
        }
    }
}

/// Answers one request. If the queue closes meanwhile, the answer breaks off.
fn answer(queue: &Queue, replica: &mut impl Backend, job: &Job) -> ft_base::Result<()> {
    let Job { generation, events, .. } = job;
    let step = replica.step();
    let _ = events.send(Event::Begin(step));
    if generation.step.is_some_and(|named| step != Some(named)) {
        return Ok(());
    }
    let go_on = || !events.is_closed() && !queue.is_closed();
    let mut send = |text: String, tokens: Vec<_>| {
        let empty = text.is_empty() && tokens.is_empty();
        (empty || events.send(Event::Text(text, tokens)).is_ok()) && go_on()
    };
    for prompt in &generation.prompts {
        match replica.reply(generation, prompt, &mut send) {
            Ok(_) if !go_on() => break,
            Ok((finish, tokens)) => drop(events.send(Event::End(finish, tokens))),
            // a test of the device, also if the client has gone
            Err(e) => {
                let _ = events.send(Event::Failed(e.to_string()));
                return replica.probe();
            }
        }
    }
    Ok(())
}

/// Runs all replicas in parallel, the last on this thread. A failing replica is only a warning while another
/// remains.
///
/// # Errors
/// The error of the last remaining replica.
pub fn run_all<W>(mut replicas: Vec<(&ReplicaStatus, W)>) -> ft_base::Result<()>
where
    W: FnOnce() -> ft_base::Result<()> + std::marker::Send,
{
    let left = AtomicUsize::new(replicas.len());
    let ended = |status: &ReplicaStatus, outcome: ft_base::Result<()>| {
        status.stop();
        let others = left.fetch_sub(1, Relaxed) - 1;
        if others == 0 {
            return outcome;
        }
        outcome.or_else(|e| {
            warn(&format!("{} answers no more: {e}", status.device));
            Ok(())
        })
    };
    let run = &|status: &ReplicaStatus, work: W| {
        let bug = |why| candle_core::Error::Msg(format!("{why}; this is a bug in ft")).into();
        ended(status, panics::caught(work).unwrap_or_else(|why| Err(bug(why))))
    };
    let here = replicas.pop();
    std::thread::scope(|s| {
        let mut threads = Vec::new();
        for (status, work) in replicas {
            let thread = std::thread::Builder::new().name(status.device.clone());
            match thread.spawn_scoped(s, move || run(status, work)) {
                Ok(thread) => threads.push(thread),
                Err(e) => ended(status, Err(candle_core::Error::from(e).into()))?,
            }
        }
        let here = here.map_or(Ok(()), |(status, work)| run(status, work));
        threads.into_iter().map(|t| t.join().unwrap_or(Ok(()))).fold(here, Result::and)
    })
}

/// A replica with a real model.
pub struct Generator<'a> {
    decoder: &'a Decoder,
    device: &'a Device,
    /// KV cache; a continued conversation reuses the shared prefix.
    cache: Reader<'a>,
    tokenizer: &'a Tokenizer,
    run: &'a mut Option<Follower>,
}

impl<'a> Generator<'a> {
    pub fn new(replica: &'a mut Replica, tokenizer: &'a Tokenizer) -> Self {
        let Replica { decoder, device, run } = replica;
        Self { decoder, device, cache: Reader::new(decoder, device), tokenizer, run }
    }

    fn clear_cache(&mut self) {
        self.cache = Reader::new(self.decoder, self.device);
    }
}

impl Backend for Generator<'_> {
    fn step(&self) -> Option<u64> {
        self.run.as_ref().map(Follower::step)
    }

    fn poll(&mut self) {
        if self.run.as_mut().is_some_and(Follower::poll) {
            // cached with the old weights
            self.clear_cache();
        }
    }

    fn reply(
        &mut self,
        generation: &Generation,
        prompt: &Prompt,
        send: Send<'_>,
    ) -> ft_base::Result<(FinishReason, usize)> {
        reply_stream::reply(&mut self.cache, self.tokenizer, generation, prompt, send)
    }

    fn probe(&mut self) -> ft_base::Result<()> {
        // the cache is in an unknown state
        self.clear_cache();
        let read = self.cache.read(&[0]);
        self.clear_cache();
        match read {
            // caused by the weights; newer ones may work
            Err(e) if e.exit_code() != ExitCode::NonFinite => Err(e),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
