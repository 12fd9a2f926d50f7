//! Which ranks hold copies of a buffer, sum its gradient, and split its states.

use super::shard::Shard;
use crate::adapters::Trained;
use crate::ranks::{Axis, Comm, Group, Mesh};

/// FlatKind of a flat buffer, by the ranks that hold copies of its tensors. Each buffer is split exactly over these, so
/// that the sum over the world of the squares of each rank's part counts every value once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum FlatKind {
    /// Whole tensors: all ranks of a stage hold copies.
    #[default]
    Whole,
    /// Tensors of experts that ranks split: the replicas of an expert hold copies.
    Expert,
}

/// Place of a rank on the mesh, and the ZeRO stage. One rank by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    pub mesh: Mesh,
    /// This rank.
    pub rank: usize,
    /// ZeRO stage.
    pub zero: u8,
}

impl Default for Split {
    fn default() -> Self {
        Self { mesh: Mesh::ONE, rank: 0, zero: 0 }
    }
}

impl FlatKind {
    fn axis(self) -> Axis {
        match self {
            FlatKind::Whole => Axis::Stage,
            FlatKind::Expert => Axis::ExpertReplica,
        }
    }
}

impl Split {
    /// FlatKind of a trained tensor. Kinds whose groups are equal are one.
    pub fn kind(&self, t: &Trained) -> FlatKind {
        if t.expert.is_some() && self.mesh.expert > 1 { FlatKind::Expert } else { FlatKind::Whole }
    }

    /// Kinds of buffers on this mesh, in order.
    pub fn kinds(&self) -> &'static [FlatKind] {
        if self.mesh.expert > 1 { &[FlatKind::Whole, FlatKind::Expert] } else { &[FlatKind::Whole] }
    }

    /// Sharding of the buffers of a kind, and this rank's share.
    pub fn shard(&self, kind: FlatKind) -> Shard {
        let all = self.mesh.members(kind.axis(), self.rank);
        let rank = all.iter().position(|r| *r == self.rank).unwrap_or(0);
        Shard { rank, ranks: all.len(), stage: if all.len() > 1 { self.zero } else { 0 } }
    }

    /// Ranks that hold copies of the buffers of a kind. `comm` are all ranks.
    pub fn group<'a>(&self, comm: &'a dyn Comm, kind: FlatKind) -> Group<'a> {
        Group::new(comm, &self.mesh, kind.axis())
    }
}
