//! Ranks and their collectives.
//!
//! Every rank runs the same collectives in the same order. If a rank fails, panics or times out, all other
//! ranks return an error with the number of the lost rank. A group of one rank is a valid group;
//! collectives return at once.
//!
//! Sums are taken in rank order and give the same bits for every way of sharding.

#[cfg(feature = "cuda")]
mod devices;
pub mod processes;
mod threads;

pub use threads::{Threads, group};

use candle_core::Device;
use ft_base::error::{ExitCode, Failure};
use ft_kernels::Tensor;
use ft_kernels::crossing::Arrival;
use ft_recipe::Parallel;
use std::fmt;
use std::ops::Range;
use std::time::Duration;

/// Upper bound on values (4 bytes) that a rank on the process backend sends to all peers, and receives, at
/// once.
pub const ROUND: usize = 512 * 1024;

/// Device mesh: number of ranks along each axis. Ranks of the last axis are adjacent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Data parallelism: ranks split the rows.
    pub data: usize,
    /// Pipeline parallelism: number of stages.
    pub pipeline: usize,
    /// Context parallelism: ranks split the tokens of a row.
    pub context: usize,
    /// Expert parallelism: ranks split the experts.
    pub expert: usize,
    /// Tensor parallelism: ranks split matrices.
    pub tensor: usize,
}

impl Mesh {
    /// Reads the mesh of a recipe.
    pub fn of(p: &Parallel) -> Self {
        Self { data: p.data, pipeline: p.pipeline, context: p.context, expert: p.expert, tensor: p.tensor }
    }

    /// Ranks that hold one copy of the model together and process the same rows.
    fn inner(&self) -> usize {
        [self.pipeline, self.context, self.expert, self.tensor].iter().product::<usize>().max(1)
    }

    /// Total number of ranks.
    pub fn ranks(&self) -> usize {
        self.data.max(1) * self.inner()
    }

    /// Index along the data axis.
    pub fn data_rank(&self, rank: usize) -> usize {
        rank / self.inner()
    }
}

/// Name of a collective and the unit of the walk it belongs to, for error messages and consistency checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// Purpose, as error messages print it.
    pub what: &'static str,
    /// Unit of the walk, if the collective belongs to one.
    pub unit: Option<usize>,
}

impl At {
    /// A collective over all units.
    pub fn all(what: &'static str) -> Self {
        Self { what, unit: None }
    }

    /// A collective of one unit.
    pub fn unit(what: &'static str, unit: usize) -> Self {
        Self { what, unit: Some(unit) }
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.unit {
            Some(unit) => write!(f, "{} of unit {unit}", self.what),
            None => f.write_str(self.what),
        }
    }
}

/// One rank of a group.
pub trait Comm: Send + Sync {
    /// Index of this rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world(&self) -> usize;

    /// All-gathers a few 64-bit words; returns them in rank order.
    ///
    /// # Errors
    /// A lost rank.
    fn share(&self, at: At, mine: &[u64]) -> ft_base::Result<Vec<Vec<u64>>>;

    /// Like [`Comm::share`] without a timeout, for steps of unknown length such as
    /// disk access or loading a model.
    ///
    /// # Errors
    /// A lost rank.
    fn wait(&self, at: At, mine: &[u64]) -> ft_base::Result<Vec<Vec<u64>>>;

    /// Reduce-scatter: starts `to += part[range]` over the parts of all ranks, in rank order. `to` is f32
    /// and has the length of `range`; each rank chooses a range. Ranks without a part pass `None`.
    /// Completes when the returned [`Arrival`] is waited on.
    ///
    /// # Errors
    /// A lost rank; a tensor operation that fails.
    fn add(&self, at: At, part: Option<Tensor>, range: Range<usize>, to: &Tensor)
    -> ft_base::Result<Arrival>;

    /// All-gather: starts `to[ranges[r]] = mine` of rank `r`, for every `r`. `mine` must not be a view of
    /// `to`. Completes when the returned [`Arrival`] is waited on.
    ///
    /// # Errors
    /// A lost rank; a tensor operation that fails.
    fn gather(&self, at: At, mine: Tensor, ranges: &[Range<usize>], to: &Tensor) -> ft_base::Result<Arrival>;

    /// Bytes of tensors received from other ranks so far, counted as the minimum for each collective: a sum
    /// receives one part of the range per peer.
    fn received(&self) -> u64;

    /// Aborts the group because of an error on this rank.
    fn fail(&self, e: &ft_base::Error);

    /// Cause of the abort, if any.
    fn lost(&self) -> Option<Error>;

    /// Registers `f`, called on a separate thread when the group aborts, to release ranks
    /// blocked outside of collectives.
    fn when_lost(&self, f: Box<dyn Fn() + Send + Sync>);
}

/// Runs `f` with collectives suited to tensors on `device`. CUDA tensors go through NCCL; words and
/// liveness checks stay on `comm`. If the group has aborted, returns the cause of the abort.
///
/// # Errors
/// Errors of `f` or NCCL; a lost rank.
pub fn on_device<R>(
    comm: &dyn Comm,
    device: &Device,
    timeout: Duration,
    f: impl FnOnce(&dyn Comm) -> ft_base::Result<R>,
) -> ft_base::Result<R> {
    #[cfg(feature = "cuda")]
    if comm.world() > 1 && device.is_cuda() {
        return devices::with(comm, device, timeout, f);
    }
    let _ = (device, timeout);
    f(comm)
}

/// A group of one.
pub fn alone() -> Threads {
    threads::one()
}

/// A lost rank.
#[derive(Clone, Debug, thiserror::Error)]
#[error("rank {rank} of {world} on {host}: {why}\n  its last collective: {at}")]
pub struct Error {
    /// Number of the rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Host name.
    pub host: String,
    /// Last collective of the rank.
    pub at: At,
    /// Reason.
    pub why: String,
    /// Exit code of the rank's own error; [`ExitCode::LostRank`] if unknown.
    pub code: ExitCode,
    /// The rank hangs and must not be joined.
    pub hangs: bool,
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        self.code
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_share_their_rows() {
        let m = Mesh { data: 3, pipeline: 1, context: 1, expert: 1, tensor: 1 };
        assert_eq!((m.ranks(), (0..3).map(|r| m.data_rank(r)).collect()), (3, vec![0, 1, 2]));
        let m = Mesh { data: 2, pipeline: 1, context: 1, expert: 1, tensor: 2 };
        assert_eq!((m.ranks(), (0..4).map(|r| m.data_rank(r)).collect()), (4, vec![0, 0, 1, 1]));
    }
}
