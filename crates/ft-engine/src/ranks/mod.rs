//! Ranks and their collectives.
//!
//! Every rank runs the same collectives in the same order. If a rank fails, panics or times out, all other
//! ranks return an error with the number of the lost rank. A group of one rank is a valid group;
//! collectives return at once. A [`Group`] along an axis of the [`Mesh`] has collectives of its own, and two groups
//! never wait for one another.
//!
//! Sums are taken in rank order and give the same bits for every way of sharding.

mod callbacks;
mod comm;
mod device;
mod group;
mod mesh;
#[cfg(feature = "cuda")]
mod nccl;
pub mod processes;
pub mod schedule;
mod sum;
mod threads;

pub(crate) use comm::words_of;
pub use comm::{Among, CollectiveId, Comm, Error, PeerTensor, Received};
pub use device::on_device;
pub use group::Group;
pub use mesh::{Axis, Coordinates, Mesh};
pub use processes::{KEY_VARIABLE, ROUND, random_key};
pub use threads::{Threads, alone, group, group_of};
