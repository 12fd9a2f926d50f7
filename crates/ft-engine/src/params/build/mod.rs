//! Construction of a model from a base: frozen tensors, trained tensors in their buffers.

#[expect(clippy::module_inception, reason = "the type of the folder's name")]
mod build;
mod check;
mod frozen;
pub mod ghost;
mod loader;

pub use build::Build;
pub use check::{check_full, unreached};

use crate::adapters::Choice;
use crate::model::feed_forward::LocalExperts;
use crate::model::modules::{MlpTree, Module};
use std::ops::Range;

/// The part `own` of a rank in the experts of a layer. `ranks`: how many ranks split the experts.
fn owned(
    experts: &[MlpTree],
    unit: usize,
    (own, ranks): (Range<usize>, usize),
    choice: impl Fn(&Module) -> Choice,
) -> (Range<usize>, LocalExperts) {
    let mut linears = experts.iter().flat_map(|e| [Some(&e.gate), e.up.as_ref(), Some(&e.down)]).flatten();
    let drops = linears.any(|m| matches!(choice(m), Choice::Lora { spec, .. } if spec.dropout > 0.0));
    let owned = LocalExperts { ranks, experts: experts.len(), first: own.start, drops, unit };
    (own, owned)
}
