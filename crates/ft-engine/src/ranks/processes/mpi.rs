//! The MPI thread: makes every MPI call, none of them blocking.

use super::transport::{Backoff, Round, Transport};
use mpi::environment::Threading;
use mpi::traits::{Communicator, Destination, Source};
use std::sync::mpsc;

/// Initializes MPI; returns the transport, the rank and the number of ranks. `done` is called with each
/// completed round.
///
/// # Errors
/// MPI was initialized before, or no thread is available. MPI itself aborts the process on other errors.
pub fn start(done: impl Fn(Round) + Send + 'static) -> Result<(Transport, usize, usize), String> {
    let (send, initialized) = mpsc::channel();
    let transport = Transport::spawn("MPI", move |rounds| {
        let universe = mpi::initialize_with_threading(Threading::Funneled);
        let world = universe.as_ref().map(|(universe, _)| universe.world());
        let _ = send.send(world.as_ref().map(|w| (w.rank() as usize, w.size() as usize)));
        let Some(world) = world else { return };
        for mut round in rounds {
            exchange(&world, &mut round);
            done(round);
        }
    });
    let transport = transport.map_err(|e| e.to_string())?;
    match initialized.recv() {
        Ok(Some((rank, world))) => Ok((transport, rank, world)),
        _ => Err("MPI was started in this process before".into()),
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
            for rank in &round.to {
                open.push(world.process_at_rank(*rank as i32).immediate_send(scope, &round.all[..]));
            }
        }
        let mut backoff = Backoff::new();
        loop {
            open = open.into_iter().filter_map(|r| r.test().err()).collect();
            if open.is_empty() {
                break;
            }
            backoff.pause();
        }
    });
}
