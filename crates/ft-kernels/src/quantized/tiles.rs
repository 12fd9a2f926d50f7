//! Tiling of 4-bit matrices for products on a GPU, and launch parameters of the kernels. Needs no GPU.
//!
//! The dequantization kernel writes a tile, and the product reads it right after. If a tile takes half of
//! the L2 cache, both happen in cache, with the other half for the remaining operands. Smaller tiles
//! would make products too small to fill the device. (This share is an estimate, not measured.) With many
//! tokens the cache does not help, since the other operand exceeds it and is read again for each tile:
//! then the whole matrix is one tile, and a product takes two launches.

use candle_core::DType;
use std::ops::Range;

/// Threads per block of dequantize.cu: eight warps.
pub const THREADS: u32 = 256;
/// Values dequantized per warp.
const CHUNK: usize = 1024;
/// Maximum tokens multiplied directly from the codes, by rows.cu and on the CPU.
pub const FEW: usize = 8;
/// Variants of rows.cu: maximum tokens, and rows of W per block.
pub const ROWS: [(usize, usize); 2] = [(1, 4), (FEW, 2)];
/// Threads per block of rows.cu.
pub const ROWS_THREADS: u32 = 128;

/// Granularity of tiles in rows (or columns): whole GEMM tiles, whole quantization blocks.
const UNIT: usize = 64;
/// Minimum bytes of a tile, for devices with a small or unknown cache.
const LEAST: usize = 4 << 20;
/// Maximum bytes of a cache-sized tile.
pub const MOST: usize = 32 << 20;
/// Number of tokens at which tiles may exceed the cache, and their maximum bytes then: enough for any
/// matrix of a 32B-parameter model in bf16.
const MANY: usize = 1024;
const WHOLE: usize = 512 << 20;

/// Maximum bytes of a tile in a product with `tokens` tokens, for a device with `cache` bytes of L2
/// cache. A plan, without a device, assumes the largest.
pub fn bytes(tokens: usize, cache: Option<usize>) -> usize {
    match cache {
        _ if tokens >= MANY => WHOLE,
        Some(cache) => (cache / 2).clamp(LEAST, MOST),
        None => MOST,
    }
}

/// Splits `count` rows (or columns) of `size` bytes into tiles of similar size, at most `most` bytes each
/// (but at least 64 rows).
pub fn split(count: usize, size: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let widest = (most / size.max(1) / UNIT * UNIT).max(UNIT);
    let tiles = count.div_ceil(widest).max(1);
    let width = count.div_ceil(tiles).next_multiple_of(UNIT);
    (0..count).step_by(width.max(1)).map(move |start| start..(start + width).min(count))
}

/// A tile of a matrix: `runs` runs of `width` values with stride `stride`, starting at value `first`.
#[derive(Clone, Copy, Debug)]
pub struct Tile {
    /// First value.
    pub first: usize,
    /// Values from the start of a run to the start of the next.
    pub stride: usize,
    /// Values per run.
    pub width: usize,
    /// Number of runs.
    pub runs: usize,
}

impl Tile {
    /// Whole rows of a matrix [rows, cols], as a single run.
    pub fn rows((_, cols): (usize, usize), rows: Range<usize>) -> Self {
        let width = rows.len() * cols;
        Self { first: rows.start * cols, stride: width, width, runs: 1 }
    }

    /// Whole rows, one run per row.
    pub fn rows_apart((_, cols): (usize, usize), rows: Range<usize>) -> Self {
        Self { first: rows.start * cols, stride: cols, width: cols, runs: rows.len() }
    }

    /// Columns of a matrix [rows, cols], one run per row.
    pub fn columns_apart((rows, cols): (usize, usize), columns: Range<usize>) -> Self {
        Self { first: columns.start, stride: cols, width: columns.len(), runs: rows }
    }

    /// Columns of a matrix [rows, cols]: one run per row, or a single run if all columns are included.
    pub fn columns((rows, cols): (usize, usize), columns: Range<usize>) -> Self {
        if columns == (0..cols) {
            return Self::rows((rows, cols), 0..rows);
        }
        Self::columns_apart((rows, cols), columns)
    }

    /// Number of values in the tile.
    pub fn len(&self) -> usize {
        self.width * self.runs
    }

    /// Whether the tile has no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One past the index of the last value in the matrix.
    pub fn end(&self) -> usize {
        self.first + self.runs.saturating_sub(1) * self.stride + self.width
    }

    /// Chunks needed to cover any of the runs. Chunks start at multiples of 32.
    pub fn chunks(&self) -> usize {
        let whole = self.first.is_multiple_of(32) && (self.runs == 1 || self.stride.is_multiple_of(32));
        (self.width + if whole { 0 } else { 31 }).div_ceil(CHUNK)
    }

    /// Number of blocks of [`THREADS`] threads, with one warp per chunk of the tile and of `more`
    /// additional values.
    pub fn blocks(&self, more: usize) -> usize {
        (self.chunks() * self.runs + more.div_ceil(CHUNK)).div_ceil(THREADS as usize / 32)
    }
}

/// Kernel name from the dtype of the first rounding (f32 if it equals the second) and of the output.
pub fn name(kernel: &str, source: DType, compute: DType) -> String {
    let source = match source {
        DType::BF16 | DType::F16 if source != compute => source,
        _ => DType::F32,
    };
    format!("{kernel}_{}_{}", source.as_str(), compute.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_all_and_stay_small() {
        for count in [1, 63, 64, 65, 700, 4096, 14336, 151_936] {
            for size in [2, 96, 8192, 28_672, 1 << 20] {
                let most = bytes(1, Some(50 << 20));
                let all: Vec<_> = split(count, size, most).collect();
                assert_eq!(all.first().map(|p| p.start), Some(0));
                assert_eq!(all.last().map(|p| p.end), Some(count));
                assert!(all.windows(2).all(|w| w[0].end == w[1].start && w[0].len() >= w[1].len()));
                let widest = all[0].len();
                assert!(widest * size <= most || widest <= UNIT, "{count} of {size}: {widest}");
                assert!(all.iter().all(|p| p.start % UNIT == 0));
                // no more than necessary
                let least = (count * size).div_ceil(most);
                assert!(all.len() <= 2 * least || widest <= UNIT, "{count} of {size}: {} tiles", all.len());
            }
        }
        assert_eq!(split(0, 8, MOST).count(), 0);
        let of = |cache| bytes(1, Some(cache));
        assert_eq!((of(0), of(50 << 20), of(1 << 30), bytes(1, None)), (LEAST, 25 << 20, MOST, MOST));
        assert_eq!((bytes(MANY, Some(0)), bytes(MANY, None)), (WHOLE, WHOLE));
    }
}
