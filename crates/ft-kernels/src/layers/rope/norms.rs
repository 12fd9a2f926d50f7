//! Norms of the heads before the rotation.

use crate::Tensor;

/// Head norms of queries and keys: weight `[c]` and eps.
#[derive(Clone, Copy, Debug)]
pub struct Norms<'a> {
    /// Query norm.
    pub q: (&'a Tensor, f64),
    /// Key norm.
    pub k: (&'a Tensor, f64),
}
