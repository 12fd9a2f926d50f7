//! The MPI thread: makes every MPI call, none of them blocking.

use super::wire::{Pauses, Round};
use mpi::environment::Threading;
use mpi::traits::{Communicator, Destination, Source};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

/// Handle of the MPI thread.
pub struct Wire {
    rounds: Sender<Round>,
    thread: JoinHandle<()>,
}

impl Wire {
    /// Initializes MPI; returns the handle, the rank and the number of ranks. `done` is called with each
    /// completed round.
    ///
    /// # Errors
    /// MPI was initialized before, or no thread is available. MPI itself aborts the process on other errors.
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

    /// Starts a round.
    pub fn go(&self, round: Round) {
        // the thread exits when this value drops
        let _ = self.rounds.send(round);
    }

    /// Finalizes MPI, which blocks until every rank does the same.
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

/// Sends and receives until the round is complete.
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
        let mut pauses = Pauses::new();
        loop {
            open = open.into_iter().filter_map(|r| r.test().err()).collect();
            if open.is_empty() {
                break;
            }
            pauses.pause();
        }
    });
}
