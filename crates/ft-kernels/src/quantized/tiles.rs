//! How a product on a GPU cuts a 4-bit matrix into tiles that are dequantized one after the other, and what the kernels
//! that do it are launched with: all of it that needs no GPU.
//!
//! A tile is written by the dequantize kernel and read by the product right after: if it is half of the second-level
//! cache, both happen there, with the other half for what it is multiplied with. Smaller tiles would give
//! products too small to fill the device. (The share is by reasoning; it has not been measured.) With many tokens the cache
//! gives nothing, for what is multiplied with the matrix is larger than it and is read again for each tile: then the whole
//! matrix is one tile, and a product two launches whatever its size.

use candle_core::DType;
use std::ops::Range;

/// Threads of a block of dequantize.cu: eight warps.
pub const THREADS: u32 = 256;
/// Values that a warp dequantizes.
const CHUNK: usize = 1024;
/// Most tokens that are multiplied straight from the codes, by rows.cu and on the CPU.
pub const FEW: usize = 8;
/// Its kernels: tokens up to, and rows of W that a block of threads takes.
pub const ROWS: [(usize, usize); 2] = [(1, 4), (FEW, 2)];
/// Threads of a block of rows.cu.
pub const ROWS_THREADS: u32 = 128;

/// Rows (or columns) of a tile come in multiples of this: whole tiles of a product, whole blocks of codes.
const UNIT: usize = 64;
/// Fewest bytes of a tile, for devices with a small cache or that do not say.
const LEAST: usize = 4 << 20;
/// Most bytes of a tile for the cache.
pub const MOST: usize = 32 << 20;
/// Tokens from which on a tile need not fit the cache, and its most bytes then: any matrix of a model of 32 billion
/// parameters in bf16.
const MANY: usize = 1024;
const WHOLE: usize = 512 << 20;

/// Most bytes of a tile in a product with `tokens` tokens, on a device with `cache` bytes of second-level cache; a plan,
/// which knows no device, counts with the most that it can be.
pub fn bytes(tokens: usize, cache: Option<usize>) -> usize {
    match cache {
        _ if tokens >= MANY => WHOLE,
        Some(cache) => (cache / 2).clamp(LEAST, MOST),
        None => MOST,
    }
}

/// Cuts `count` rows (or columns) of `size` bytes each into tiles of about one size and of `most` bytes at the
/// most, or of 64 rows where these are more.
pub fn split(count: usize, size: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let widest = (most / size.max(1) / UNIT * UNIT).max(UNIT);
    let tiles = count.div_ceil(widest).max(1);
    let width = count.div_ceil(tiles).next_multiple_of(UNIT);
    (0..count).step_by(width.max(1)).map(move |start| start..(start + width).min(count))
}

/// Values of a matrix that make a tile: `runs` runs of `width`, `stride` apart from value `first` on.
#[derive(Clone, Copy, Debug)]
pub struct Tile {
    /// The first value.
    pub first: usize,
    /// Values from the beginning of a run to that of the next.
    pub stride: usize,
    /// Values of a run.
    pub width: usize,
    /// Runs.
    pub runs: usize,
}

impl Tile {
    /// Whole rows of a matrix [rows, cols]: one run.
    pub fn rows((_, cols): (usize, usize), rows: Range<usize>) -> Self {
        let width = rows.len() * cols;
        Self { first: rows.start * cols, stride: width, width, runs: 1 }
    }

    /// The same, a run a row.
    pub fn rows_apart((_, cols): (usize, usize), rows: Range<usize>) -> Self {
        Self { first: rows.start * cols, stride: cols, width: cols, runs: rows.len() }
    }

    /// Columns of a matrix [rows, cols], a run a row.
    pub fn columns_apart((rows, cols): (usize, usize), columns: Range<usize>) -> Self {
        Self { first: columns.start, stride: cols, width: columns.len(), runs: rows }
    }

    /// Columns of a matrix [rows, cols]: a run a row, or one run of all.
    pub fn columns((rows, cols): (usize, usize), columns: Range<usize>) -> Self {
        if columns == (0..cols) {
            return Self::rows((rows, cols), 0..rows);
        }
        Self::columns_apart((rows, cols), columns)
    }

    /// Values of the tile.
    pub fn len(&self) -> usize {
        self.width * self.runs
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// One more than the last value's number in the matrix.
    pub fn end(&self) -> usize {
        self.first + self.runs.saturating_sub(1) * self.stride + self.width
    }

    /// Chunks that cover any of the runs: chunks begin at multiples of 32.
    pub fn chunks(&self) -> usize {
        let whole = self.first.is_multiple_of(32) && (self.runs == 1 || self.stride.is_multiple_of(32));
        (self.width + if whole { 0 } else { 31 }).div_ceil(CHUNK)
    }

    /// Blocks of [`THREADS`] threads, with a warp for each chunk, and for so many of `more` values.
    pub fn blocks(&self, more: usize) -> usize {
        (self.chunks() * self.runs + more.div_ceil(CHUNK)).div_ceil(THREADS as usize / 32)
    }
}

/// The name of a kernel: by what values are rounded to first, if that is not what they end in anyway, and what they
/// end in.
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
                // no more than it takes
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
