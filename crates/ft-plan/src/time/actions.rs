//! A step as lists of actions: arithmetic and transfers by stage and visit.

use ft_engine::ranks::{Axis, Mesh};
use std::sync::Arc;

/// Kind of a transfer among the members of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Weights or sums of all members.
    Gather,
    /// Gradients of all members, to be added.
    Sum,
    /// Activations within a layer.
    Exchange,
}

/// A transfer among the members of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transfer {
    pub kind: Kind,
    pub axis: Axis,
    /// Bytes received by one member.
    pub bytes: f64,
    /// Number of collectives.
    pub calls: f64,
}

/// A visit to a unit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VisitActions {
    /// Work in FLOPs of a large product.
    pub work: f64,
    /// Weights gathered for it, during the visit before.
    pub gathers: Vec<Transfer>,
    /// Exchanges in its middle.
    pub exchanges: Vec<Transfer>,
    /// Gradients summed after it, during the next visit: parts, then the sums of all ranks.
    pub sums: [Vec<Transfer>; 2],
}

/// A step of a rank of one stage.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageActions {
    /// Forward pass of a micro-batch; on the last stage with the head.
    pub up: Vec<VisitActions>,
    /// Backward pass of a micro-batch.
    pub down: Vec<VisitActions>,
    /// Bytes from the stage below and from the one above, for a micro-batch.
    pub passed: [f64; 2],
    /// Work of the update, and transfers after the last micro-batch.
    pub update: (f64, Vec<Transfer>),
}

impl StageActions {
    /// Visits of a micro-batch.
    pub fn visits(&self) -> impl Iterator<Item = &VisitActions> {
        self.up.iter().chain(&self.down)
    }

    /// Transfers of a micro-batch within and around visits.
    pub fn transfers(&self) -> impl Iterator<Item = &Transfer> {
        self.visits().flat_map(|v| v.gathers.iter().chain(&v.exchanges).chain(v.sums.iter().flatten()))
    }
}

/// A step of all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Actions {
    pub mesh: Mesh,
    /// Micro-batches of a rank.
    pub micros: usize,
    /// Lowest stage with a backward pass.
    pub lowest: usize,
    /// By stage; ranks of a stage do the same.
    pub stages: Vec<Arc<StageActions>>,
}
