//! A mixture and its saved activations.

use super::expert_parallel::{self, LocalExperts};
use super::grouped::{self, GroupedExperts};
use super::mlp::{self, Mlp};
use super::shared::{Shared, SharedSaved};
use crate::model::delta::Parameter;
use crate::model::linear::{self, Linear};
use ft_kernels::Tensor;
use ft_kernels::dispatch::{Groups, Sorted};
use ft_kernels::route::cuda::Routed;
use std::sync::{Arc, Mutex};

/// Grouped experts, and the number of moved weights at which they were built.
pub(super) type GroupedCache = Arc<Mutex<Option<(u64, Arc<GroupedExperts>)>>>;

/// Router and experts of one layer.
#[derive(Clone, Debug)]
pub struct Mixture {
    /// `[d]` -> `[e]`.
    pub router: Linear,
    /// Experts. Fixed after construction: `grouped` caches pointers to their weights.
    pub(super) experts: Vec<Mlp>,
    /// Number of identical experts represented by each entry of `experts`; 1 except in a plan.
    pub(super) copies: Vec<usize>,
    pub shared: Option<Shared>,
    /// Factors on the gates `[e]`, if the family has them.
    pub factors: Option<Parameter>,
    /// Experts per token.
    pub top_k: usize,
    /// Whether a token's gates are normalized to sum to one.
    pub normalise: bool,
    /// Place of these experts among all, if split over ranks.
    pub owned: Option<LocalExperts>,
    /// Pointer tables for the grouped products, built on first use, with the value of
    /// [`moves`](ft_kernels::resizable::moves) they were built at: weights may move later.
    pub(super) grouped: GroupedCache,
}

/// Error for a bug in the walk.
pub(super) const OTHER: &str = "a mixture goes by the routing of another device, or of other adapters";

/// Gates of the chosen experts `[t, k]`, f32.
#[derive(Debug)]
pub(super) struct Gates {
    /// As routed.
    pub(super) plain: Tensor,
    /// Times the factors, if the family has them: weights of the experts' outputs.
    pub(super) factored: Tensor,
}

/// Groups, router probabilities, logsumexp, gates.
pub(super) type Routing = (Arc<Groups>, Tensor, Tensor, Gates);

/// Saved activations, including the inputs of the router losses.
#[derive(Debug)]
pub struct Saved {
    /// Routing decisions.
    pub groups: Arc<Groups>,
    /// Router probabilities `[t, e]`, f32.
    pub probs: Tensor,
    /// logsumexp of the router's logits `[t]`, f32.
    pub lse: Tensor,
    pub(super) gates: Gates,
    pub(super) router: linear::Saved,
    pub(super) experts: SavedExperts,
    pub(super) shared: Option<SharedSaved>,
}

/// Saved activations of the experts.
#[derive(Debug)]
pub(super) enum SavedExperts {
    /// One entry per expert with tokens, and expert outputs `[rows, d]` before the gates: of dispatched rows, none.
    PerExpert(Vec<mlp::Saved>, Vec<Tensor>),
    /// Of all experts, computed together.
    Grouped(Box<grouped::Saved>),
    /// Of ranks that split them.
    Dispatched(Box<expert_parallel::Saved>),
}

impl SavedExperts {
    /// Drops the inputs; [`Mixture::restore_experts`] restores them.
    pub(super) fn drop_inputs(&mut self) {
        match self {
            SavedExperts::PerExpert(saved, _) => saved.iter_mut().for_each(mlp::Saved::drop_inputs),
            SavedExperts::Grouped(saved) => saved.x = None,
            SavedExperts::Dispatched(dispatched) => dispatched.drop_inputs(),
        }
    }
}

impl Saved {
    /// Drops the inputs; [`Mixture::restore`] restores them.
    pub fn drop_inputs(&mut self) {
        self.router.x = None;
        self.experts.drop_inputs();
        if let Some(shared) = &mut self.shared {
            shared.mlp.drop_inputs();
            shared.gate.x = None;
        }
    }

    /// Routing results on the device; `None` if routing is on the host.
    pub fn routed(&self) -> Option<(&Sorted, Routed)> {
        let sorted = self.groups.sorted()?;
        let (chosen, probs) = (sorted.chosen.clone(), self.probs.clone());
        Some((sorted, Routed { chosen, probs, lse: self.lse.clone(), gates: self.gates.plain.clone() }))
    }
}
