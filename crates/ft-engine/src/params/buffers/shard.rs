//! Ranges of flat buffers on each rank.

use ft_kernels::optimizer;
use std::ops::Range;

/// Alignment of tensor offsets, in elements: no block of 8-bit moments spans two tensors or two ranks.
pub const ALIGN: usize = optimizer::BLOCK;

/// Sharding by ZeRO stage (Rajbhandari et al., 2020).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// ZeRO stage. 0: everything replicated; 1 and up: master weights and moments sharded; 2 and up:
    /// gradients too; 3: compute weights too, frozen ones included.
    pub stage: u8,
}

impl Default for Shard {
    /// One rank without sharding.
    fn default() -> Self {
        Self { rank: 0, ranks: 1, stage: 0 }
    }
}

impl Shard {
    /// Ranges of all ranks in a buffer of `len` elements, as even as blocks of [`ALIGN`] permit.
    pub fn parts(self, len: usize) -> Vec<Range<usize>> {
        let blocks = len.div_ceil(ALIGN);
        let at = |rank: usize| (blocks * rank / self.ranks * ALIGN).min(len);
        (0..self.ranks).map(|r| at(r)..at(r + 1)).collect()
    }

    /// This rank's range.
    pub fn part(self, len: usize) -> Range<usize> {
        self.parts(len).swap_remove(self.rank)
    }

    /// Whether compute weights are sharded.
    pub fn is_split(self) -> bool {
        self.ranks > 1 && self.stage >= 3
    }

    /// This rank's range of anything sharded from `stage` on.
    pub fn held(self, len: usize, stage: u8) -> Range<usize> {
        if self.stage >= stage { self.part(len) } else { 0..len }
    }
}

/// Intersection of two ranges; empty if disjoint.
pub fn common(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts cover every element once and are even.
    #[test]
    fn parts_cover_a_buffer() {
        for len in [0, 1, 64, 65, 640, 64 * 7, 64 * 1001] {
            for ranks in [1, 2, 3, 4, 8, 100] {
                let shard = Shard { rank: ranks - 1, ranks, stage: 1 };
                let parts = shard.parts(len);
                assert_eq!((parts.len(), parts[0].start, parts[ranks - 1].end), (ranks, 0, len));
                assert!(parts.windows(2).all(|w| w[0].end == w[1].start), "{parts:?}");
                let even = len / ranks;
                assert!(parts.iter().all(|p| p.len().abs_diff(even) <= ALIGN), "{len} {parts:?}");
                assert_eq!((shard.part(len), shard.held(len, 2)), (parts[ranks - 1].clone(), 0..len));
            }
        }
        assert_eq!((common(&(2..5), &(4..9)), common(&(2..5), &(7..9)).len()), (4..5, 0));
    }
}
