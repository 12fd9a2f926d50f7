//! Byte transport between processes: MPI or TCP.
//!
//! A transport thread owns the send and receive buffers during a round. A rank that abandons a collective
//! leaves them to that thread, so memory with pending writes is never freed.

use super::tcp;
use std::time::{Duration, Instant};

/// Byte buffers of one exchange. An empty buffer means no message.
#[derive(Debug, Default)]
pub struct Round {
    /// Bytes to send to each rank.
    pub out: Vec<Vec<u8>>,
    /// Bytes to send to every peer, after `out`.
    pub all: Vec<u8>,
    /// Bytes received from each rank; the caller sets the expected length.
    pub into: Vec<Vec<u8>>,
}

impl Round {
    /// An exchange without messages.
    pub fn new(world: usize) -> Self {
        Self { out: vec![Vec::new(); world], all: Vec::new(), into: vec![Vec::new(); world] }
    }

    /// Clears the buffers and keeps the allocations.
    pub fn clear(&mut self) {
        self.out.iter_mut().chain(&mut self.into).chain([&mut self.all]).for_each(Vec::clear);
    }
}

/// The transport of a process.
pub enum Wire {
    /// MPI.
    #[cfg(feature = "mpi")]
    Mpi(super::mpi::Wire),
    /// TCP connections between all pairs.
    Tcp(tcp::Wire),
}

impl Wire {
    /// Starts a round.
    pub fn go(&self, round: Round) {
        match self {
            #[cfg(feature = "mpi")]
            Wire::Mpi(wire) => wire.go(round),
            Wire::Tcp(wire) => wire.go(round),
        }
    }

    /// Shuts the transport down after the last round. Every rank must call it.
    pub fn end(self) {
        match self {
            #[cfg(feature = "mpi")]
            Wire::Mpi(wire) => wire.end(),
            Wire::Tcp(wire) => wire.end(),
        }
    }
}

/// Time of busy polling before the first sleep.
const EAGER: Duration = Duration::from_micros(200);
/// Longest sleep between polls afterwards.
const PAUSE: Duration = Duration::from_micros(100);

/// Backoff between polls of a pending operation.
pub struct Pauses {
    began: Instant,
    pause: Duration,
}

impl Pauses {
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
