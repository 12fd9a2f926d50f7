//! Ranks with copies of a buffer: they sum the gradient, and split the states.

use super::piece::{Piece, is_cut};
use super::shard::Shard;
use crate::adapters::{Part, Trained};
use crate::model::Units;
use crate::model::modules::Module;
use crate::ranks::{Axis, Comm, Group, Mesh};
use std::ops::Range;

/// Kind of a flat buffer, by the ranks with copies of its tensors. A buffer is split exactly over these: a sum of
/// squares over the parts of all ranks counts every value once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum FlatKind {
    /// Whole tensors: all ranks of a stage hold copies.
    #[default]
    Whole,
    /// Tensors of experts that ranks split: the replicas of an expert hold copies.
    Expert,
    /// Rows or columns of cut matrices: ranks with the same index along the tensor axis hold copies.
    Cut,
    /// The table shared by embedding and head on different stages: the ranks of both hold copies. It is never gathered
    /// in a pass; only the states are split.
    Ends,
}

/// Place of a rank on the mesh, and the ZeRO stage. One rank by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    pub mesh: Mesh,
    /// This rank.
    pub rank: usize,
    /// ZeRO stage.
    pub zero: u8,
    /// Experts of a mixture layer; 0 without.
    pub experts: usize,
    /// Units of this rank's stage; `None` for all.
    pub units: Option<Units>,
    /// Whether embedding and head share a table.
    pub tied: bool,
}

impl Default for Split {
    fn default() -> Self {
        Self { mesh: Mesh::ONE, rank: 0, zero: 0, experts: 0, units: None, tied: false }
    }
}

impl FlatKind {
    fn axis(self) -> Axis {
        match self {
            FlatKind::Whole => Axis::Stage,
            FlatKind::Expert => Axis::ExpertReplica,
            FlatKind::Cut => Axis::Replica,
            FlatKind::Ends => Axis::Ends,
        }
    }
}

impl Split {
    /// Flat buffer of a trained tensor, of `units` units: whole ones by unit, then pieces by unit, then tensors of
    /// experts by owner and unit.
    pub fn flat(&self, t: &Trained, units: usize) -> usize {
        let kind = match t.expert.filter(|_| self.mesh.expert > 1) {
            Some(e) => self.first_owner() + e / self.own_experts().max(1),
            None => usize::from(self.piece_of(t).dim().is_some()),
        };
        kind * units + t.unit
    }

    /// Number of kinds of buffers before those of the owners of experts.
    fn first_owner(&self) -> usize {
        if self.mesh.tensor > 1 { 2 } else { 1 }
    }

    /// Index along the tensor axis, and number of ranks.
    pub fn place(&self) -> (usize, usize) {
        (self.mesh.coordinates(self.rank).tensor, self.mesh.tensor)
    }

    /// This rank's piece of a trained tensor.
    pub fn piece_of(&self, t: &Trained) -> Piece {
        Piece::of_part(t.shape.clone(), t.cut, t.part, self.place())
    }

    /// This rank's piece of a part of a module.
    pub fn piece(&self, m: &Module, part: Part) -> Piece {
        let whole = if part == Part::Bias { vec![m.bias().unwrap_or(0)] } else { m.weight_shape() };
        Piece::of_part(whole, m.cut, part, self.place())
    }

    /// Whether this rank adds the bias of a module: of a product over cut columns, one rank does.
    pub fn adds_bias(&self, m: &Module) -> bool {
        self.piece(m, Part::Weight).dim() != Some(1) || self.place().0 == 0
    }

    /// Number of flat buffers of all ranks, of `units` units.
    pub fn flats(&self, units: usize) -> usize {
        let owners = if self.mesh.expert > 1 { self.mesh.expert } else { 0 };
        (self.first_owner() + owners) * units
    }

    /// Unit and kind of a flat buffer; `None` if another rank holds it.
    pub fn held(&self, number: usize, units: usize) -> Option<(usize, FlatKind)> {
        let unit = number % units.max(1);
        let kind = match number / units.max(1) {
            _ if !self.has(unit) => return None,
            // Embedding and head share a table on different stages.
            0 if unit == 0 && self.tied && self.mesh.pipeline > 1 => FlatKind::Ends,
            0 => FlatKind::Whole,
            1 if self.mesh.tensor > 1 => FlatKind::Cut,
            n if n == self.first_owner() + self.member() => FlatKind::Expert,
            _ => return None,
        };
        Some((unit, kind))
    }

    /// Whether this rank holds the tensors of a unit. A rank with a tied head also holds the embedding.
    pub fn has(&self, unit: usize) -> bool {
        let shares = |u: Units| self.tied && unit == 0 && u.has_head();
        self.units.is_none_or(|u| u.has(unit) || shares(u))
    }

    /// Experts of a layer on each rank.
    fn own_experts(&self) -> usize {
        self.experts / self.mesh.expert.max(1)
    }

    /// Coordinate of this rank on the expert axis.
    fn member(&self) -> usize {
        self.mesh.coordinates(self.rank).expert
    }

    /// This rank's experts of a layer; `None` for all.
    pub fn own(&self) -> Option<Range<usize>> {
        let (n, at) = (self.own_experts(), self.member());
        (self.mesh.expert > 1).then(|| at * n..(at + 1) * n)
    }

    /// Kind of the buffers of a frozen part of a module.
    pub fn kind_of(&self, m: &Module, part: Part) -> FlatKind {
        match m.expert {
            Some(_) if self.mesh.expert > 1 => FlatKind::Expert,
            _ if self.mesh.tensor > 1 && is_cut(m, part) => FlatKind::Cut,
            _ => FlatKind::Whole,
        }
    }

    /// Whether this rank is the first of those with copies of a module of a model of `layers` layers.
    pub fn is_first(&self, m: &Module, layers: usize) -> bool {
        let is_owner = m.expert.is_none_or(|e| self.own().is_none_or(|own| own.contains(&e)));
        let all = self.mesh.members(self.kind_of(m, Part::Weight).axis(), self.rank);
        self.units.is_none_or(|u| u.has(m.unit(layers))) && is_owner && all.first() == Some(&self.rank)
    }

    /// Sharding of the buffers of a kind, and this rank's share.
    pub fn shard(&self, kind: FlatKind) -> Shard {
        let all = self.mesh.members(kind.axis(), self.rank);
        let rank = all.iter().position(|r| *r == self.rank).unwrap_or(0);
        let most = if kind == FlatKind::Ends { 1 } else { 3 };
        Shard { rank, ranks: all.len(), stage: if all.len() > 1 { self.zero.min(most) } else { 0 } }
    }

    /// Expert-parallel ranks, this one included, if any. `comm` are all ranks.
    pub fn experts_group<'a>(&self, comm: &'a dyn Comm) -> Option<Group<'a>> {
        (self.mesh.expert > 1).then(|| Group::new(comm, &self.mesh, Axis::Expert))
    }

    /// Whether this rank holds a part of the model alone: of the experts, the layers or the matrices.
    pub fn is_of_part(&self) -> bool {
        self.own().is_some() || self.units.is_some() || self.mesh.tensor > 1
    }

    /// Ranks with copies of the buffers of a kind. `comm` are all ranks.
    pub fn group<'a>(&self, comm: &'a dyn Comm, kind: FlatKind) -> Group<'a> {
        Group::new(comm, &self.mesh, kind.axis())
    }
}
