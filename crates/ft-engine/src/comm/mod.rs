//! Ranks, and what they tell one another.
//!
//! Every rank goes through the same collectives in the same order. A rank that fails, panics or does not come in time
//! releases all the others with an error that names it. One rank is a group like any other: its collectives are over at
//! once.
//!
//! Sums are taken in rank order, so that they have the same bits however they are split.

#[cfg(feature = "cuda")]
mod devices;
pub mod processes;
mod threads;

pub use threads::{Threads, group};

use ft_base::error::{ExitCode, Failure};
use ft_kernels::Tensor;
use ft_kernels::crossing::Arrival;
use ft_recipe::Parallel;
use candle_core::Device;
use std::fmt;
use std::ops::Range;
use std::time::Duration;

/// Values (of four bytes) that a rank that is a process gives to all others at once, and takes from them, at the most.
pub const ROUND: usize = 512 * 1024;

/// The device mesh: ranks along each axis. The last axis is the innermost one: its ranks are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Ranks that split the rows.
    pub data: usize,
    /// Pipeline stages.
    pub pipeline: usize,
    /// Ranks that split a row's tokens.
    pub context: usize,
    /// Ranks that split the experts.
    pub expert: usize,
    /// Ranks that split matrices.
    pub tensor: usize,
}

impl Mesh {
    /// That of a recipe.
    pub fn of(p: &Parallel) -> Self {
        Self { data: p.data, pipeline: p.pipeline, context: p.context, expert: p.expert, tensor: p.tensor }
    }

    /// Neighbours that hold parts of one copy of the model, and work on the same rows.
    fn inner(&self) -> usize {
        [self.pipeline, self.context, self.expert, self.tensor].iter().product::<usize>().max(1)
    }

    /// Ranks in all.
    pub fn ranks(&self) -> usize {
        self.data.max(1) * self.inner()
    }

    /// A rank's place along the data axis.
    pub fn data_rank(&self, rank: usize) -> usize {
        rank / self.inner()
    }
}

/// What a collective is for, and at which unit of the walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// What for.
    pub what: &'static str,
    /// The unit, where it is one's.
    pub unit: Option<usize>,
}

impl At {
    /// A collective of all units together.
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

/// A rank of a group that works together.
pub trait Comm: Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// How many there are.
    fn world(&self) -> usize;

    /// A few words of every rank, in rank order.
    ///
    /// # Errors
    /// A rank that is lost.
    fn share(&self, at: At, mine: &[u64]) -> ft_base::Result<Vec<Vec<u64>>>;

    /// As [`Comm::share`], for what may take as long as it likes: another rank's disk, or its reading of a model.
    ///
    /// # Errors
    /// A rank that is lost.
    fn wait(&self, at: At, mine: &[u64]) -> ft_base::Result<Vec<Vec<u64>>>;

    /// Begins `to += part[range]` of every rank that has one, in rank order; `to` is f32 and as long as the range. Ranks may
    /// ask for different ranges. It is done where what arrives was waited for.
    ///
    /// # Errors
    /// A rank that is lost; a tensor operation that fails.
    fn add(&self, at: At, part: Option<Tensor>, range: Range<usize>, to: &Tensor) -> ft_base::Result<Arrival>;

    /// Begins `to[ranges[r]] =` what rank `r` gives. `mine` must not be a view of `to`.
    ///
    /// # Errors
    /// A rank that is lost; a tensor operation that fails.
    fn gather(&self, at: At, mine: Tensor, ranges: &[Range<usize>], to: &Tensor) -> ft_base::Result<Arrival>;

    /// Bytes of tensors that came from other ranks so far, as the fewest that a collective needs: a sum takes in one
    /// part of its range a rank.
    fn received(&self) -> u64;

    /// Makes all other ranks give up, for an error of this one.
    fn fail(&self, e: &ft_base::Error);

    /// What has ended the group, if anything has.
    fn lost(&self) -> Option<Error>;

    /// Lets `f` be called, on a thread of its own, when something ends the group: what ranks wait for elsewhere is given up.
    fn when_lost(&self, f: Box<dyn Fn() + Send + Sync>);
}

/// Runs what a rank does with collectives that carry tensors of `device`: those of CUDA go by NCCL, and what is said, and
/// who lives, by `comm`. Where the group has ended meanwhile, that is the error.
///
/// # Errors
/// Those of `f`; a rank that is lost; NCCL's.
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

/// A rank that is lost.
#[derive(Clone, Debug, thiserror::Error)]
#[error("rank {rank} of {world} on {host}: {why}\n  its last collective: {at}")]
pub struct Error {
    /// Which.
    pub rank: usize,
    /// Of how many.
    pub world: usize,
    /// Its machine.
    pub host: String,
    /// What it was in, or had been in.
    pub at: At,
    /// What became of it.
    pub why: String,
    /// That of its own error; else [`ExitCode::LostRank`].
    pub code: ExitCode,
    /// Whether it hangs: it cannot be waited for.
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
