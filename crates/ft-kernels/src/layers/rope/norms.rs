//! Norms of the heads before the rotation.

use crate::norm::Scale;

/// Head norms of queries and keys, with weights `[c]` and a common addition to them.
#[derive(Clone, Copy, Debug)]
pub struct Norms<'a> {
    /// Query norm.
    pub q: Scale<'a>,
    /// Key norm.
    pub k: Scale<'a>,
}
