//! Strips and panels of a product.

use crate::matmul::packing::{inner_block, packing};
use std::ops::Range;

/// Maximum columns per strip: with the crate's blocks, a panel takes a quarter of a megabyte.
const WIDEST: usize = 128;
/// Granularity of strips: the crate's vector length.
const LANES: usize = 16;
/// Up to this many result values, the crate uses dot products if the inner values of both operands are
/// contiguous.
const FEW: usize = 256;

/// Partition of a product among threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Partition {
    pub(super) k: usize,
    pub(super) n: usize,
    /// Number of strips.
    pub(super) strips: usize,
    /// Columns per strip, except the last; balanced if a panel spans the inner dimension.
    pub(super) width: usize,
    /// Inner values per panel; `None` if one panel in stored order spans the inner dimension.
    pub(super) block: Option<usize>,
}

impl Partition {
    pub(super) fn new((m, k, n): (usize, usize, usize), transposed: bool, threads: usize) -> Self {
        // the crate treats a single row separately from very few values, so strips of a single row must
        // exceed `FEW` values
        let by_dots = transposed && (m == 1 || m * n <= FEW);
        if by_dots || n == 1 || k <= 2 {
            let strips = if m == 1 && transposed { (n / (2 * FEW)).max(1) } else { 1 };
            return Self { k, n, strips, width: n.div_ceil(strips), block: None };
        }
        let width = WIDEST.min(n / (3 * threads) / LANES * LANES).max(2 * LANES);
        // a small remainder joins the last strip: the crate sums single columns differently
        let strips = (n / width + usize::from(n % width >= LANES)).max(1);
        Self { k, n, strips, width, block: Some(inner_block((m, k, n))) }
    }

    pub(super) fn strip(&self, i: usize) -> Range<usize> {
        let at = |i: usize| match self.block {
            Some(_) if i < self.strips => i * self.width,
            Some(_) => self.n,
            None => self.n * i / self.strips,
        };
        at(i)..at(i + 1)
    }

    pub(super) fn depth(&self) -> usize {
        self.block.unwrap_or(self.k)
    }

    /// Maximum values per panel.
    pub(super) fn panel(&self) -> usize {
        self.depth() * self.widest()
    }

    pub(super) fn widest(&self) -> usize {
        match self.block {
            Some(_) => self.strip(self.strips - 1).len().max(self.width).min(self.n),
            None => self.width,
        }
    }

    pub(super) fn workers(&self, threads: usize) -> usize {
        threads.min(self.strips).max(1)
    }

    /// Scratch bytes of a product with `m` rows.
    pub(super) fn bytes(&self, m: usize, threads: usize) -> u64 {
        let of = (m, self.depth(), self.widest());
        let transposed = self.block.is_none();
        self.workers(threads) as u64 * (4 * self.panel() as u64 + packing(of, false, transposed))
    }
}
