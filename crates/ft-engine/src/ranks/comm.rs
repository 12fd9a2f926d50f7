//! Interface of the collectives.

use super::callbacks::Callback;
use super::mesh::Axis;
use ft_base::Result;
use ft_base::error::{ExitCode, Failure};
use ft_kernels::Tensor;
use ft_kernels::crossing::PendingTransfer;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Name of a collective and the unit of the walk it belongs to, for error messages and consistency checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectiveId {
    /// Purpose, as error messages print it.
    pub what: &'static str,
    /// Unit of the walk, if the collective belongs to one.
    pub unit: Option<usize>,
    /// Axis of the group; [`Axis::World`] for all ranks.
    pub axis: Axis,
    /// First and last member of the group, and the distance between members. Not set for all ranks.
    ranks: (u32, u32, u32),
}

impl CollectiveId {
    /// A collective over all units.
    pub const fn all(what: &'static str) -> Self {
        Self { what, unit: None, axis: Axis::World, ranks: (0, 0, 0) }
    }

    /// A collective of one unit.
    pub const fn unit(what: &'static str, unit: usize) -> Self {
        Self { unit: Some(unit), ..Self::all(what) }
    }

    /// The same collective among the members of a group, at equal distances.
    pub(super) fn among(self, axis: Axis, members: &[usize]) -> Self {
        let number = |n: Option<&usize>| n.map_or(0, |n| u32::try_from(*n).unwrap_or(u32::MAX));
        let (first, last) = (number(members.first()), number(members.last()));
        Self { axis, ranks: (first, last, number(members.get(1)).saturating_sub(first)), ..self }
    }
}

/// Formats as `the sum of gradients of unit 3 (expert replica group 0-6 by 2)`.
impl fmt::Display for CollectiveId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.what)?;
        if let Some(unit) = self.unit {
            write!(f, " of unit {unit}")?;
        }
        match (self.axis, self.ranks) {
            (Axis::World, _) => Ok(()),
            (axis, (first, last, 0 | 1)) => write!(f, " ({} {first}-{last})", axis.word()),
            (axis, (first, last, step)) => write!(f, " ({} {first}-{last} by {step})", axis.word()),
        }
    }
}

/// Members of a collective, in order, and its name.
pub type Among<'a> = (&'a [usize], CollectiveId);

/// Bytes of tensors received from other ranks, by the axis of the group.
#[derive(Debug, Default)]
pub struct Received([AtomicU64; Axis::ALL.len()]);

impl Received {
    pub(super) fn count(&self, at: CollectiveId, bytes: usize) {
        self.0[at.axis as usize].fetch_add(bytes as u64, Relaxed);
    }

    /// Bytes of all groups.
    pub fn total(&self) -> u64 {
        self.0.iter().map(|n| n.load(Relaxed)).sum()
    }

    /// Bytes of the groups along an axis.
    pub fn along(&self, axis: Axis) -> u64 {
        self.0[axis as usize].load(Relaxed)
    }
}

/// One rank of a group. The collectives of a few members are called by these alone; two groups never wait for one
/// another.
///
/// # Errors
/// Of every collective: a lost rank; a tensor operation that fails.
pub trait Comm: Send + Sync {
    /// Index of this rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world(&self) -> usize;

    /// As [`Comm::all_gather_bytes`], among members.
    fn all_gather_bytes_among(&self, at: Among, mine: &[u8], timed: bool) -> Result<Vec<Vec<u8>>>;

    /// As [`Comm::reduce_scatter`], among members.
    fn reduce_scatter_among(
        &self,
        at: Among,
        part: Option<Tensor>,
        range: Range<usize>,
        to: &Tensor,
    ) -> Result<PendingTransfer>;

    /// As [`Comm::all_gather`], among members; `ranges` are by member.
    fn all_gather_among(
        &self,
        at: Among,
        mine: Tensor,
        ranges: &[Range<usize>],
        to: &Tensor,
    ) -> Result<PendingTransfer>;

    /// As [`Comm::exchange`], among members; peers are ranks of this group.
    fn exchange_among(&self, at: Among, out: &[PeerTensor], into: &[PeerTensor]) -> Result<PendingTransfer>;

    /// Bytes of tensors received from other ranks so far, counted as the minimum for each collective: a sum
    /// receives one part of the range per peer.
    fn received(&self) -> &Received;

    /// Aborts the group because of an error on this rank.
    fn fail(&self, e: &ft_base::Error);

    /// Cause of the abort, if any.
    fn lost(&self) -> Option<Error>;

    /// Registers `f`, called on a separate thread when the group aborts, to release ranks
    /// blocked outside of collectives.
    fn when_lost(&self, f: Callback);

    /// All ranks.
    fn everyone(&self) -> Vec<usize> {
        (0..self.world()).collect()
    }

    /// All-gathers a few bytes; returns them in rank order. Without `timed` there is no timeout, for steps of
    /// unknown length such as disk access or loading a model.
    fn all_gather_bytes(&self, at: CollectiveId, mine: &[u8], timed: bool) -> Result<Vec<Vec<u8>>> {
        self.all_gather_bytes_among((&self.everyone(), at), mine, timed)
    }

    /// Reduce-scatter: starts `to += part[range]` over the parts of all ranks, in rank order. `to` is f32
    /// and has the length of `range`; each rank chooses a range. Ranks without a part pass `None`.
    /// Completes when the returned [`PendingTransfer`] is waited on.
    fn reduce_scatter(
        &self,
        at: CollectiveId,
        part: Option<Tensor>,
        range: Range<usize>,
        to: &Tensor,
    ) -> Result<PendingTransfer> {
        self.reduce_scatter_among((&self.everyone(), at), part, range, to)
    }

    /// All-gather: starts `to[ranges[r]] = mine` of rank `r`, for every `r`. `mine` must not be a view of
    /// `to`. Completes when the returned [`PendingTransfer`] is waited on.
    fn all_gather(
        &self,
        at: CollectiveId,
        mine: Tensor,
        ranges: &[Range<usize>],
        to: &Tensor,
    ) -> Result<PendingTransfer> {
        self.all_gather_among((&self.everyone(), at), mine, ranges, to)
    }

    /// Pairwise exchange: starts the sends of `out` and the receives of `into`, with a peer for every tensor. Every
    /// rank calls it, with or without tensors. The tensors of an ordered pair of ranks have equal lengths and dtypes on
    /// both sides, in the same order; all are contiguous, none is of this rank itself. The tensors of `out` must not
    /// change, and those of `into` not be read, before the returned [`PendingTransfer`] has been waited on.
    fn exchange(&self, at: CollectiveId, out: &[PeerTensor], into: &[PeerTensor]) -> Result<PendingTransfer> {
        self.exchange_among((&self.everyone(), at), out, into)
    }
}

impl fmt::Debug for dyn Comm + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank(), self.world())
    }
}

/// The words of a message.
pub(crate) fn words_of(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.as_chunks().0.iter().map(|b| u64::from_ne_bytes(*b))
}

/// A peer and a tensor to send or to fill.
pub type PeerTensor = (usize, Tensor);

/// Header of a rank's reduce-scatter: whether it gives a part, and its range.
pub(super) struct ReduceScatterHeader {
    pub(super) gives: bool,
    pub(super) range: Range<usize>,
}

impl ReduceScatterHeader {
    /// The headers of all members, by member. Collective.
    pub(super) fn all_gather(&self, comm: &dyn Comm, at: Among) -> Result<Vec<Self>> {
        let words = [u64::from(self.gives), self.range.start as u64, self.range.end as u64];
        let all = comm.all_gather_bytes_among(at, bytemuck::cast_slice(&words), true)?;
        Ok(all.iter().map(|bytes| Self::of(bytes)).collect())
    }

    fn of(bytes: &[u8]) -> Self {
        let mut words = words_of(bytes);
        let mut next = || words.next().unwrap_or(0) as usize;
        Self { gives: next() != 0, range: next()..next() }
    }
}

/// Collectives on serializable objects, sent as JSON, and causes of errors.
impl dyn Comm + '_ {
    /// All-gathers an object; returns the objects in rank order.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(
        &self,
        at: CollectiveId,
        mine: &T,
    ) -> Result<Vec<T>> {
        let all = self.all_gather_bytes(at, &to_json(at, mine)?, true)?;
        Ok(all.iter().map(|bytes| from_json(at, bytes)).collect::<Result<_, _>>()?)
    }

    /// Sends an object of rank 0 to all other ranks; they call `receive_object`. There is no timeout.
    pub fn broadcast_object<T: Serialize>(&self, at: CollectiveId, object: &T) -> Result<()> {
        self.all_gather_bytes(at, &to_json(at, object)?, false).map(drop)
    }

    /// Receives the object broadcast by rank 0; `None` if rank 0 is at a `barrier`.
    pub fn receive_object<T: DeserializeOwned>(&self, at: CollectiveId) -> Result<Option<T>> {
        let all = self.all_gather_bytes(at, &[], false)?;
        let first = all.first().filter(|bytes| !bytes.is_empty());
        Ok(first.map(|bytes| from_json(at, bytes)).transpose()?)
    }

    /// Waits until all ranks have come, without a timeout.
    pub fn barrier(&self, at: CollectiveId) -> Result<()> {
        self.all_gather_bytes(at, &[], false).map(drop)
    }

    /// An error of this rank, or the loss of a rank that it follows from.
    pub fn cause(&self, e: ft_base::Error) -> ft_base::Error {
        match (e.of::<Error>(), self.lost()) {
            (None, Some(lost)) => lost.into(),
            _ => e,
        }
    }
}

fn to_json(at: CollectiveId, object: &impl Serialize) -> Result<Vec<u8>, NotJson> {
    serde_json::to_vec(object).map_err(|source| NotJson { at, source })
}

fn from_json<T: DeserializeOwned>(at: CollectiveId, bytes: &[u8]) -> Result<T, NotJson> {
    serde_json::from_slice(bytes).map_err(|source| NotJson { at, source })
}

/// A failure to serialize or deserialize an object.
#[derive(Debug, thiserror::Error)]
#[error("{at}: {source}: a bug in ft")]
struct NotJson {
    at: CollectiveId,
    source: serde_json::Error,
}

impl Failure for NotJson {
    fn exit_code(&self) -> ExitCode {
        ExitCode::Internal
    }
}

/// A lost rank.
#[derive(Clone, Debug, thiserror::Error)]
#[error("rank {rank} of {world} on {host}: {}{why}\n  its last collective: {at}", of_stage(*.stage))]
pub struct Error {
    /// Number of the rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Stage of the rank, in a pipeline of several.
    pub stage: Option<u16>,
    /// Host name.
    pub host: String,
    /// Last collective of the rank.
    pub at: CollectiveId,
    /// Reason.
    pub why: String,
    /// Exit code of the rank's own error; [`ExitCode::LostRank`] if unknown.
    pub code: ExitCode,
    /// The rank hangs and must not be joined.
    pub hangs: bool,
}

fn of_stage(stage: Option<u16>) -> String {
    stage.map_or(String::new(), |n| format!("stage {n}: "))
}

impl Error {
    /// The error of a rank of a world, which does not hang.
    pub(super) fn new(
        (rank, world): (usize, usize),
        host: String,
        at: CollectiveId,
        why: String,
        code: ExitCode,
    ) -> Self {
        Self { rank, world, stage: None, host, at, why, code, hangs: false }
    }

    /// The error of a rank, in a pipeline of `stages`.
    pub(crate) fn with_stage_of(self, stages: usize) -> Self {
        let stage = u16::try_from(self.rank * stages / self.world).ok().filter(|_| stages > 1);
        Self { stage, ..self }
    }
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        self.code
    }
}
