//! Ranks as processes started by a launcher. Values go through MPI or TCP; a separate TCP connection
//! monitors liveness.
//!
//! A collective exchanges messages between all pairs of ranks, in rounds of bounded size. Sums are taken on
//! the receiver in rank order and match the bits of the thread backend.

mod group;
mod join;
mod key;
mod link;
mod listener;
mod monitor;
#[cfg(feature = "mpi")]
mod mpi;
mod rendezvous;
mod tcp;
mod transport;

pub use group::{Processes, ROUND};
pub use join::{Neighbors, join};
pub use key::{VARIABLE as KEY_VARIABLE, random_text as random_key};
