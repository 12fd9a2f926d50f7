//! Partition of a product among threads, and scratch memory.

use std::ops::Range;

/// Bytes of scratch memory for a product [m, k] x [k, n] on `threads` threads, depending on whether the
/// left operand is `transposed`, the right one generated (`made`), and the result rounded (`to_half`).
pub fn packing(
    sizes: (usize, usize, usize),
    threads: usize,
    (transposed, made): (bool, bool),
    to_half: bool,
) -> u64 {
    Partition::new(sizes, threads, (transposed, made)).bytes(to_half)
}

/// Rows and columns of the register tile; the last panel may be half as wide.
pub(super) const ROWS: usize = 12;
pub(super) const COLUMNS: usize = 32;
/// Values of the inner dimension per block: if the dimension fits two blocks, and if it is longer.
pub(super) const BLOCK: usize = 2048;
pub(super) const SHORT_BLOCK: usize = BLOCK / 2;

/// Block length for an inner dimension of `k`.
///
/// Short blocks allow wider strips. A row-major right operand with many rows, as in the head's backward
/// pass, is read strip by strip over all its rows, so wider strips mean longer reads.
pub(super) fn block(k: usize) -> usize {
    if k > 2 * BLOCK { SHORT_BLOCK } else { BLOCK }
}

/// Values of the right operand packed per thread at a time: half a megabyte, about half of a core's L2
/// cache.
pub(super) const STRIP: usize = 1 << 18;
/// Maximum columns per strip.
pub(super) const WIDEST: usize = 256;
/// Panels of rows per task, if the right operand is packed whole.
pub(super) const PANELS: usize = 4;

/// Partition of a product among threads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Partition {
    pub(super) m: usize,
    pub(super) k: usize,
    pub(super) n: usize,
    pub(super) threads: usize,
    /// Whether the left operand is packed.
    pub(super) packed: bool,
    /// Whether the right operand is generated.
    pub(super) made: bool,
    /// Columns per strip; `None` if threads split rows.
    pub(super) strip: Option<usize>,
}

impl Partition {
    pub(super) fn new(
        (m, k, n): (usize, usize, usize),
        threads: usize,
        (transposed, made): (bool, bool),
    ) -> Self {
        let down = |x: usize| (x / COLUMNS * COLUMNS).clamp(COLUMNS, WIDEST);
        // as wide as possible with about three strips per thread
        let width = down(STRIP / k.clamp(1, block(k))).min(down(n / (3 * threads)));
        let more_rows = m.div_ceil(PANELS * ROWS) > n.div_ceil(width);
        let strip = (made || threads == 1 || n.div_ceil(width) >= 2 * threads || !more_rows).then_some(width);
        // pairs are read as 32-bit words
        let packed = transposed || !k.is_multiple_of(2);
        Self { m, k, n, threads, packed, made, strip }
    }

    /// Blocks of the inner dimension.
    pub(super) fn blocks(&self) -> impl Iterator<Item = Range<usize>> + Clone + use<> {
        let (k, block) = (self.k, block(self.k));
        (0..k).step_by(block).map(move |from| from..(from + block).min(k))
    }

    /// Number of tasks, and rows and columns of the largest.
    pub(super) fn tasks(&self) -> (usize, [usize; 2]) {
        match self.strip {
            Some(width) => (self.n.div_ceil(width), [self.m, width.min(self.n)]),
            None => (self.m.div_ceil(PANELS * ROWS), [self.m.min(PANELS * ROWS), self.n]),
        }
    }

    /// Threads with work.
    pub(super) fn workers(&self) -> usize {
        self.threads.min(self.tasks().0).max(1)
    }

    pub(super) fn sizes(&self, to_half: bool) -> Sizes {
        let (_, [rows, columns]) = self.tasks();
        let deepest = self.k.min(block(self.k));
        let padded = columns.next_multiple_of(COLUMNS / 2);
        let only = |is: bool, size: usize| if is { size } else { 0 };
        Sizes {
            left: only(self.packed, self.m * self.k.div_ceil(2)),
            right: only(self.strip.is_none(), self.k.div_ceil(2) * padded),
            strip: only(self.strip.is_some(), deepest.div_ceil(2) * padded),
            tile: only(self.made, deepest * columns),
            sums: only(to_half && self.k > block(self.k), rows * columns),
        }
    }

    pub(super) fn bytes(&self, to_half: bool) -> u64 {
        if self.m == 0 || self.k == 0 || self.n == 0 {
            return 0;
        }
        let Sizes { left, right, strip, tile, sums } = self.sizes(to_half);
        (4 * (left + right) + self.workers() * (4 * (strip + sums) + 2 * tile)) as u64
    }
}

/// Scratch sizes of a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Words of the left operand's panels.
    pub(super) left: usize,
    /// Words of the right operand's panels, if packed whole.
    pub(super) right: usize,
    /// Words of a strip's panels, per thread.
    pub(super) strip: usize,
    /// Generated values, per thread.
    pub(super) tile: usize,
    /// Incomplete sums, per thread.
    pub(super) sums: usize,
}
