//! The thread that speaks MPI: every call of MPI is made there, and none of them blocks.
//!
//! What goes and what comes are buffers that it owns meanwhile. So a rank that gives a collective up, for a peer is lost,
//! leaves it behind with this thread, and no memory that MPI may still write to is ever given back.

use mpi::environment::Threading;
use mpi::traits::{Communicator, Destination, Source};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
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

/// The thread that speaks MPI.
pub struct Wire {
    rounds: Sender<Round>,
    thread: JoinHandle<()>,
}

/// How long a round that others have not come to is asked for without a pause.
const EAGER: Duration = Duration::from_micros(200);
/// The pause between two questions after that, at the most.
const PAUSE: Duration = Duration::from_micros(100);

impl Wire {
    /// Starts MPI, and gives this process's rank and how many there are; `done` is called with each round that is over.
    ///
    /// # Errors
    /// What is wrong, in words. What MPI itself finds wrong ends the process with its words.
    pub fn start(done: impl Fn(Round) + Send + 'static) -> Result<(Self, usize, usize), String> {
        let (rounds, ask) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let work = move || speak(&ask, &tell, done);
        let thread = std::thread::Builder::new().name("MPI".into()).spawn(work).map_err(|e| e.to_string())?;
        match told.recv() {
            Ok(Some((rank, world))) => Ok((Self { rounds, thread }, rank, world)),
            _ => Err("MPI was started in this process before".into()),
        }
    }

    /// Begins a round.
    pub fn go(&self, round: Round) {
        // that thread ends with this value
        let _ = self.rounds.send(round);
    }

    /// Ends MPI: all ranks do, and wait for one another.
    pub fn end(self) {
        drop(self.rounds);
        let _ = self.thread.join();
    }
}

fn speak(ask: &Receiver<Round>, tell: &Sender<Option<(usize, usize)>>, done: impl Fn(Round)) {
    let Some((universe, _)) = mpi::initialize_with_threading(Threading::Funneled) else {
        let _ = tell.send(None);
        return;
    };
    let world = universe.world();
    let _ = tell.send(Some((world.rank() as usize, world.size() as usize)));
    while let Ok(mut round) = ask.recv() {
        exchange(&world, &mut round);
        done(round);
    }
}

/// Sends and receives, and comes back when all of it is done.
fn exchange(world: &impl Communicator, round: &mut Round) {
    mpi::request::scope(|scope| {
        let mut open = Vec::with_capacity(round.out.len() + round.into.len());
        for (rank, bytes) in round.into.iter_mut().enumerate().filter(|(_, b)| !b.is_empty()) {
            open.push(world.process_at_rank(rank as i32).immediate_receive_into(scope, &mut bytes[..]));
        }
        for (rank, bytes) in round.out.iter().enumerate().filter(|(_, b)| !b.is_empty()) {
            open.push(world.process_at_rank(rank as i32).immediate_send(scope, &bytes[..]));
        }
        if !round.all.is_empty() {
            for rank in (0..world.size()).filter(|r| *r != world.rank()) {
                open.push(world.process_at_rank(rank).immediate_send(scope, &round.all[..]));
            }
        }
        let (began, mut pause) = (Instant::now(), Duration::from_micros(10));
        loop {
            open = open.into_iter().filter_map(|r| r.test().err()).collect();
            if open.is_empty() {
                break;
            }
            if began.elapsed() < EAGER {
                std::thread::yield_now();
            } else {
                std::thread::sleep(pause);
                pause = (2 * pause).min(PAUSE);
            }
        }
    });
}
