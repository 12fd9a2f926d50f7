//! Interface of the collectives.

use super::callbacks::Callback;
use ft_base::Result;
use ft_base::error::{ExitCode, Failure};
use ft_kernels::Tensor;
use ft_kernels::crossing::Arrival;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::ops::Range;

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

    /// All-gathers a few bytes; returns them in rank order. Without `timed` there is no timeout, for steps of
    /// unknown length such as disk access or loading a model.
    ///
    /// # Errors
    /// A lost rank.
    fn all_gather_bytes(&self, at: At, mine: &[u8], timed: bool) -> Result<Vec<Vec<u8>>>;

    /// Reduce-scatter: starts `to += part[range]` over the parts of all ranks, in rank order. `to` is f32
    /// and has the length of `range`; each rank chooses a range. Ranks without a part pass `None`.
    /// Completes when the returned [`Arrival`] is waited on.
    ///
    /// # Errors
    /// A lost rank; a tensor operation that fails.
    fn reduce_scatter(
        &self,
        at: At,
        part: Option<Tensor>,
        range: Range<usize>,
        to: &Tensor,
    ) -> Result<Arrival>;

    /// All-gather: starts `to[ranges[r]] = mine` of rank `r`, for every `r`. `mine` must not be a view of
    /// `to`. Completes when the returned [`Arrival`] is waited on.
    ///
    /// # Errors
    /// A lost rank; a tensor operation that fails.
    fn all_gather(&self, at: At, mine: Tensor, ranges: &[Range<usize>], to: &Tensor) -> Result<Arrival>;

    /// Bytes of tensors received from other ranks so far, counted as the minimum for each collective: a sum
    /// receives one part of the range per peer.
    fn received(&self) -> u64;

    /// Aborts the group because of an error on this rank.
    fn fail(&self, e: &ft_base::Error);

    /// Cause of the abort, if any.
    fn lost(&self) -> Option<Error>;

    /// Registers `f`, called on a separate thread when the group aborts, to release ranks
    /// blocked outside of collectives.
    fn when_lost(&self, f: Callback);
}

/// Collectives on serializable objects, sent as JSON.
impl dyn Comm + '_ {
    /// All-gathers an object; returns the objects in rank order.
    ///
    /// # Errors
    /// A lost rank.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, at: At, mine: &T) -> Result<Vec<T>> {
        let all = self.all_gather_bytes(at, &to_json(at, mine)?, true)?;
        Ok(all.iter().map(|bytes| from_json(at, bytes)).collect::<Result<_, _>>()?)
    }

    /// Sends an object of rank 0 to all other ranks, which call `receive_object`.
    /// There is no timeout.
    ///
    /// # Errors
    /// A lost rank.
    pub fn broadcast_object<T: Serialize>(&self, at: At, object: &T) -> Result<()> {
        self.all_gather_bytes(at, &to_json(at, object)?, false).map(drop)
    }

    /// Receives the object that rank 0 broadcasts; `None` if rank 0 is at a `barrier`.
    ///
    /// # Errors
    /// A lost rank.
    pub fn receive_object<T: DeserializeOwned>(&self, at: At) -> Result<Option<T>> {
        let all = self.all_gather_bytes(at, &[], false)?;
        let first = all.first().filter(|bytes| !bytes.is_empty());
        Ok(first.map(|bytes| from_json(at, bytes)).transpose()?)
    }

    /// Waits until all ranks have come, without a timeout.
    ///
    /// # Errors
    /// A lost rank.
    pub fn barrier(&self, at: At) -> Result<()> {
        self.all_gather_bytes(at, &[], false).map(drop)
    }
}

fn to_json(at: At, object: &impl Serialize) -> Result<Vec<u8>, NotJson> {
    serde_json::to_vec(object).map_err(|source| NotJson { at, source })
}

fn from_json<T: DeserializeOwned>(at: At, bytes: &[u8]) -> Result<T, NotJson> {
    serde_json::from_slice(bytes).map_err(|source| NotJson { at, source })
}

/// An object that cannot be serialized or deserialized.
#[derive(Debug, thiserror::Error)]
#[error("{at}: {source}: a bug in ft")]
struct NotJson {
    at: At,
    source: serde_json::Error,
}

impl Failure for NotJson {
    fn exit_code(&self) -> ExitCode {
        ExitCode::Internal
    }
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
