//! Runs on several ranks, as threads or processes: the first rank decides, all other ranks follow.

mod check;
mod follow;
mod inputs;
mod remote;
mod shard;
mod threads;

pub use check::{carries_nothing, check, check_comm};
#[cfg(test)]
pub use follow::broken;
pub use follow::{follow, on_device};
pub use inputs::RunInputs;
pub use remote::{BEGUN, OPENED, RemoteRanks, StartMessage, agree};
pub use shard::{load, load_checkpoint, ready, save};
pub use threads::{RankThreads, group};
