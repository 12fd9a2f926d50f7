//! Groups of ranks along an axis of the mesh.

use super::callbacks::Callback;
use super::comm::{Among, CollectiveId, Comm, Error, PeerTensor, Received};
use super::mesh::{Axis, Mesh};
use ft_base::Result;
use ft_kernels::Tensor;
use ft_kernels::crossing::PendingTransfer;
use std::ops::Range;
use std::sync::Arc;

/// One rank of a group along an axis. Ranks of the group are counted from 0, in the order of the world.
#[derive(Clone)]
pub struct Group<'a> {
    comm: &'a dyn Comm,
    axis: Axis,
    members: Arc<[usize]>,
    me: usize,
}

impl<'a> Group<'a> {
    /// The group of this rank along an axis. `comm` are all ranks of the mesh.
    pub fn new(comm: &'a dyn Comm, mesh: &Mesh, axis: Axis) -> Self {
        let (rank, members) = (comm.rank(), mesh.members(axis, comm.rank()));
        // All ranks hold copies: messages name no group.
        let copies = matches!(axis, Axis::Stage | Axis::Replica | Axis::ExpertReplica | Axis::Ends);
        let axis = if copies && members.len() == comm.world() { Axis::World } else { axis };
        Self { comm, axis, me: members.iter().position(|r| *r == rank).unwrap_or(0), members: members.into() }
    }

    /// Kind of the group.
    pub fn axis(&self) -> Axis {
        self.axis
    }

    /// Ranks of the members in the world.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    fn ranks(&self, members: &[usize]) -> Vec<usize> {
        members.iter().map(|m| self.rank_of(*m)).collect()
    }

    fn rank_of(&self, member: usize) -> usize {
        self.members.get(member).copied().unwrap_or(usize::MAX)
    }

    fn at(&self, at: CollectiveId) -> CollectiveId {
        if self.axis == Axis::World { at } else { at.among(self.axis, &self.members) }
    }
}

impl Comm for Group<'_> {
    fn rank(&self) -> usize {
        self.me
    }

    fn world(&self) -> usize {
        self.members.len()
    }

    fn all_gather_bytes_among(&self, (members, at): Among, mine: &[u8], timed: bool) -> Result<Vec<Vec<u8>>> {
        self.comm.all_gather_bytes_among((&self.ranks(members), self.at(at)), mine, timed)
    }

    fn reduce_scatter_among(
        &self,
        (members, at): Among,
        part: Option<Tensor>,
        range: Range<usize>,
        to: &Tensor,
    ) -> Result<PendingTransfer> {
        self.comm.reduce_scatter_among((&self.ranks(members), self.at(at)), part, range, to)
    }

    fn all_gather_among(
        &self,
        (members, at): Among,
        mine: Tensor,
        ranges: &[Range<usize>],
        to: &Tensor,
    ) -> Result<PendingTransfer> {
        self.comm.all_gather_among((&self.ranks(members), self.at(at)), mine, ranges, to)
    }

    fn exchange_among(&self, at: Among, out: &[PeerTensor], into: &[PeerTensor]) -> Result<PendingTransfer> {
        let (members, at) = at;
        let peers = |all: &[PeerTensor]| -> Vec<PeerTensor> {
            all.iter().map(|(member, t)| (self.rank_of(*member), t.clone())).collect()
        };
        self.comm.exchange_among((&self.ranks(members), self.at(at)), &peers(out), &peers(into))
    }

    fn received(&self) -> &Received {
        self.comm.received()
    }

    fn fail(&self, e: &ft_base::Error) {
        self.comm.fail(e);
    }

    fn lost(&self) -> Option<Error> {
        self.comm.lost()
    }

    fn when_lost(&self, f: Callback) {
        self.comm.when_lost(f);
    }
}
