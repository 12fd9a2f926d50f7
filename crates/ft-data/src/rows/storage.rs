//! Storage of lists, and bounds on memory.

use super::order::MAX_IN_MEMORY;
use crate::token_cache::{bytes::Scratch, cache::tokens_folder};
use std::path::Path;

/// Storage for lists, and the largest number of samples permuted in memory.
pub(super) struct WorkingStorage {
    pub scratch: Scratch,
    pub held: usize,
}

impl WorkingStorage {
    /// Stores lists next to the cached tokens, or in memory without a cache.
    pub fn new(cache: Option<&Path>) -> Self {
        Self { scratch: Scratch::new(cache.map(tokens_folder)), held: MAX_IN_MEMORY }
    }

    #[cfg(test)]
    pub fn with_limits(&mut self, few: usize, held: usize) {
        self.scratch.few = few;
        self.held = held;
    }
}
