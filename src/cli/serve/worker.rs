//! Replicas of the model: each answers one request at a time from a shared queue.

use super::job::{Event, FinishReason, Generation, Job, ReplicaStatus};
use super::stop::StopStrings;
use crate::infer::{Follower, Replica};
use candle_core::Device;
use crossbeam_channel::{Receiver, RecvTimeoutError};
use ft_base::error::ExitCode;
use ft_base::terminal::{panics, warn};
use ft_data::Tokenizer;
use ft_engine::model::Decoder;
use ft_engine::walk::generate::{self, Reader};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, TryLockError};
use std::time::Duration;

/// Interval of checkpoint checks while idle.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// A source of answers.
pub(super) trait Backend {
    /// Step of the loaded weights, if serving a run.
    fn step(&self) -> Option<u64>;
    /// Loads newer weights if available.
    fn poll(&mut self);
    /// Generates a reply; `send` receives the text in pieces and returns whether to continue.
    fn reply(
        &mut self,
        generation: Generation,
        send: &mut dyn FnMut(String) -> bool,
    ) -> ft_base::Result<(FinishReason, usize)>;
    /// Computes a little, to test the device after a failed answer.
    fn probe(&mut self) -> ft_base::Result<()>;
}

/// Shared queue of the replicas.
pub(super) struct Queue<'a> {
    jobs: Receiver<Job>,
    /// Whether to stop answering.
    stop: &'a AtomicBool,
    /// Held while a replica loads a checkpoint, so that the rest keep answering.
    loading: Mutex<()>,
}

impl<'a> Queue<'a> {
    pub fn new(jobs: Receiver<Job>, stop: &'a AtomicBool) -> Self {
        Self { jobs, stop, loading: Mutex::new(()) }
    }

    /// Answers with one replica until the queue closes or the replica fails. When serving a run, checks for
    /// a newer checkpoint before each answer, unless another replica is loading one.
    ///
    /// # Errors
    /// A device failure.
    pub fn work(&self, replica: &mut impl Backend, status: &ReplicaStatus) -> ft_base::Result<()> {
        let of_run = status.step().is_some();
        loop {
            let next = if of_run {
                self.jobs.recv_timeout(POLL_INTERVAL)
            } else {
                self.jobs.recv().map_err(RecvTimeoutError::from)
            };
            if matches!(next, Err(RecvTimeoutError::Disconnected)) {
                return Ok(());
            }
            if of_run {
                let loading = self.loading.try_lock();
                if !matches!(loading, Err(TryLockError::WouldBlock)) {
                    replica.poll();
                    status.set_step(replica.step());
                }
            }
            let Ok(Job { generation, events }) = next else { continue };
            // the client may have disconnected in the meantime
            if events.is_closed() || self.stop.load(Relaxed) {
                continue;
            }
            let _ = events.send(Event::Begin(replica.step()));
            let mut send = |text: String| {
                let sent = text.is_empty() || events.send(Event::Text(text)).is_ok();
                sent && !events.is_closed() && !self.stop.load(Relaxed)
            };
            match replica.reply(generation, &mut send) {
                Ok((finish, tokens)) => {
                    let _ = events.send(Event::End(finish, tokens));
                }
                Err(e) => {
                    let _ = events.send(Event::Failed(e.to_string()));
                    replica.probe()?;
                }
            }
        }
    }
}

/// Runs all replicas in parallel, the last on this thread. A failing replica is only a warning while another
/// remains.
///
/// # Errors
/// The error of the last remaining replica.
pub(super) fn run_all<W>(mut replicas: Vec<(&ReplicaStatus, W)>) -> ft_base::Result<()>
where
    W: FnOnce() -> ft_base::Result<()> + Send,
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
pub(super) struct Generator<'a> {
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
        mut g: Generation,
        send: &mut dyn FnMut(String) -> bool,
    ) -> ft_base::Result<(FinishReason, usize)> {
        let mut stops = StopStrings::new(g.stop);
        let mut on_text = |piece: &str| {
            let (text, go_on) = stops.push(piece);
            send(text) && go_on
        };
        let (tokenizer, sampler) = (self.tokenizer, &mut g.sampler);
        let reply =
            generate::answer(&mut self.cache, tokenizer, &g.prompt, g.max_tokens, sampler, &mut on_text)?;
        send(stops.rest());
        let stopped = reply.ended || stops.hit;
        let finish = if stopped { FinishReason::Stop } else { FinishReason::Length };
        Ok((finish, reply.tokens))
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
