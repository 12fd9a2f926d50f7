//! What carries bytes between processes: MPI, or lines of TCP.
//!
//! What goes and what comes are buffers that a thread of the wire owns meanwhile. So a rank that gives a collective up, for a
//! peer is lost, leaves it behind with that thread, and no memory that may still be written to is ever given back.

use super::tcp;
use std::time::{Duration, Instant};

/// Bytes for each rank, and bytes from each: nothing goes or comes where they are empty.
#[derive(Debug, Default)]
pub struct Round {
    /// What goes to each rank.
    pub out: Vec<Vec<u8>>,
    /// What goes to all others alike.
    pub all: Vec<u8>,
    /// What comes from each, as long as it is to be.
    pub into: Vec<Vec<u8>>,
}

impl Round {
    /// One in which nothing goes.
    pub fn new(world: usize) -> Self {
        Self { out: vec![Vec::new(); world], all: Vec::new(), into: vec![Vec::new(); world] }
    }

    /// Forgets what went and came, and keeps the room.
    pub fn clear(&mut self) {
        self.out.iter_mut().chain(&mut self.into).chain([&mut self.all]).for_each(Vec::clear);
    }
}

/// What carries bytes.
pub enum Wire {
    /// MPI.
    #[cfg(feature = "mpi")]
    Mpi(super::mpi::Wire),
    /// Lines of TCP between all.
    Tcp(tcp::Wire),
}

impl Wire {
    /// Begins a round.
    pub fn go(&self, round: Round) {
        match self {
            #[cfg(feature = "mpi")]
            Wire::Mpi(wire) => wire.go(round),
            Wire::Tcp(wire) => wire.go(round),
        }
    }

    /// Ends, with everything done: all ranks do.
    pub fn end(self) {
        match self {
            #[cfg(feature = "mpi")]
            Wire::Mpi(wire) => wire.end(),
            Wire::Tcp(wire) => wire.end(),
        }
    }
}

/// How long a round that others have not come to is asked for without a pause.
const EAGER: Duration = Duration::from_micros(200);
/// The pause between two questions after that, at the most.
const PAUSE: Duration = Duration::from_micros(100);

/// Pauses between questions to what does not say when it is done.
pub struct Pauses {
    began: Instant,
    pause: Duration,
}

impl Pauses {
    /// Begins to ask.
    pub fn new() -> Self {
        Self { began: Instant::now(), pause: Duration::from_micros(10) }
    }

    /// Before the next question.
    pub fn pause(&mut self) {
        if self.began.elapsed() < EAGER {
            std::thread::yield_now();
        } else {
            std::thread::sleep(self.pause);
            self.pause = (2 * self.pause).min(PAUSE);
        }
    }
}
