//! Options for the allocation of trained parameters.

use super::split::Split;

/// Options for allocations besides the compute weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocate {
    /// Gradients and moments.
    pub train: bool,
    /// No persistent gradients: a unit's gradients exist during its backward visit
    /// (`optimizer.in_backward`).
    pub in_backward: bool,
    /// Master weights and moments on the host (`memory.offload = ["optimizer"]`).
    pub offload: bool,
    /// Compute weights on the host, frozen ones included (`memory.offload = ["params"]`).
    pub offload_weights: bool,
    /// Page-locked host memory for transfers (`memory.pin`).
    pub pin: bool,
    /// 8-bit moments for large tensors (`optimizer.name = "adamw8bit"`).
    pub eight_bit: bool,
    /// Seed of stochastic rounding for fully trained 16-bit weights without f32 master weights
    /// (`optimizer.master = "none"`).
    pub rounding: Option<u64>,
    /// Rank of gradient projection (`optimizer.name = "galore"`); 0 disables it.
    pub project: usize,
    /// Place of this rank on the mesh.
    pub split: Split,
}
