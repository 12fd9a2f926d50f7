//! Byte transport between processes, over MPI or TCP.
//!
//! A transport thread owns the send and receive buffers during a round. A rank abandoning a collective leaves them to
//! the thread, so memory with pending writes is never freed.

use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Byte buffers of one exchange. An empty buffer means no message.
#[derive(Debug, Default)]
pub struct Round {
    /// Bytes to send to each rank.
    pub out: Vec<Vec<u8>>,
    /// Bytes to send to every rank in `to`, after `out`.
    pub all: Vec<u8>,
    /// Ranks that get `all`.
    pub to: Vec<usize>,
    /// Bytes received from each rank; the caller sets the expected length.
    pub into: Vec<Vec<u8>>,
}

impl Round {
    /// An exchange without messages, in a world of this size; `to` get what goes to all.
    pub fn new(world: usize, to: Vec<usize>) -> Self {
        Self { out: vec![Vec::new(); world], all: Vec::new(), to, into: vec![Vec::new(); world] }
    }

    /// An exchange of `all` with every rank in `to`; `len` gives the number of bytes from each.
    pub fn all_to_all(world: usize, to: Vec<usize>, all: Vec<u8>, len: impl Fn(usize) -> usize) -> Self {
        let mut round = Self { all, ..Self::new(world, to) };
        round.to.iter().for_each(|r| round.into[*r].resize(len(*r), 0));
        round
    }

    /// Clears the buffers and keeps the allocations.
    pub fn clear(&mut self) {
        self.out.iter_mut().chain(&mut self.into).chain([&mut self.all]).for_each(Vec::clear);
    }
}

/// Handle of the transport thread.
pub struct Transport {
    rounds: Sender<Round>,
    thread: JoinHandle<()>,
}

impl Transport {
    /// Starts the thread; `work` exchanges the rounds received.
    pub fn spawn(name: &str, work: impl FnOnce(Receiver<Round>) + Send + 'static) -> std::io::Result<Self> {
        let (rounds, requests) = mpsc::channel();
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || work(requests))?;
        Ok(Self { rounds, thread })
    }

    /// Starts a round.
    pub fn exchange(&self, round: Round) {
        // The thread exits when this value drops or a peer disconnects; `tcp::start` reports the latter.
        let _ = self.rounds.send(round);
    }

    /// Shuts the transport down after the last round. Every rank must call it: MPI blocks until then.
    pub fn end(self) {
        drop(self.rounds);
        let _ = self.thread.join();
    }
}

/// Time of busy polling before the first sleep.
const EAGER: Duration = Duration::from_micros(200);
/// Longest sleep between polls afterwards.
const PAUSE: Duration = Duration::from_micros(100);

/// Backoff between polls of a pending operation.
pub struct Backoff {
    began: Instant,
    pause: Duration,
}

impl Backoff {
    /// Starts a sequence of polls.
    pub fn new() -> Self {
        Self { began: Instant::now(), pause: Duration::from_micros(10) }
    }

    /// Yields or sleeps before the next poll.
    pub fn pause(&mut self) {
        if self.began.elapsed() < EAGER {
            std::thread::yield_now();
        } else {
            std::thread::sleep(self.pause);
            self.pause = (2 * self.pause).min(PAUSE);
        }
    }
}
