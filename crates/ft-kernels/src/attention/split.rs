//! Single-query attention on CUDA ("Flash-Decoding"): blocks process separate ranges of keys, and a
//! second launch combines the partial sums (attention_split.cu).
//!
//! When decoding, each head has one query. One block per head would occupy 32 of 132 SMs and read the
//! whole cache, so caches of at least [`LEAST`] keys are split across blocks.

use super::sequences::{Causal, Shape};
use super::tiles::THREADS;
use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use candle_core::{DType, Result};

/// Smallest number of keys worth splitting, minimum and maximum keys per block, and maximum number of
/// blocks. `PARTS` must match attention_split.cu.
const LEAST: usize = 128;
const EACH: (usize, usize) = (64, 256);
const PARTS: usize = 1024;
/// Target number of blocks; more bring no gain.
const BLOCKS: usize = 64;
/// Lanes per key, and shared memory per block available without opting in.
const LANES: usize = 8;
const SHARED: usize = 48 << 10;

/// Split of a query's keys into `count` ranges of `each` keys, starting at key `first`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeySplit {
    first: usize,
    each: usize,
    count: usize,
    shared: usize,
}

impl KeySplit {
    /// The split for a call with vector-aligned tensors. `None` if splitting does not pay off, or if
    /// there is more than one document or query.
    pub fn of(shape: Shape, how: &Causal<'_>, dtype: DType) -> Option<Self> {
        let vector = match dtype {
            DType::F32 => 4,
            DType::BF16 | DType::F16 => 8,
            _ => return None,
        };
        if shape.t != 1 || how.seqs.docs.len() != 1 || !shape.c.is_multiple_of(vector) {
            return None;
        }
        let keys = how.seqs.keys();
        let first = keys.saturating_sub(how.window.unwrap_or(keys));
        let seen = keys - first;
        let each = (seen / BLOCKS).clamp(EACH.0, EACH.1).next_multiple_of(32);
        let (count, line) = (seen.div_ceil(each), LANES * vector);
        let shared = 4 * (shape.h / shape.g.max(1)) * (shape.c.next_multiple_of(line) + each + 4);
        (seen >= LEAST && count <= PARTS && shared <= SHARED).then_some(Self { first, each, count, shared })
    }
}

/// Shared memory of the kernel `kernel`, with 8 query heads of 128 channels per key head.
#[cfg(test)]
pub fn shared_memory(kernel: &str) -> Option<usize> {
    match kernel.strip_prefix("attention_")?.split('_').next()? {
        "split" => Some(4 * 8 * (128 + EACH.0 + 4)),
        "join" => Some(0),
        _ => None,
    }
}

/// Computes the output and log-sum-exp of one query `q` [1, h, c] over the cache blocks in `table`. All
/// tensors are contiguous.
pub fn forward(
    q: &Tensor,
    table: &Tensor,
    shape: Shape,
    how: &Causal<'_>,
    parts: KeySplit,
    o: &Tensor,
    lse: &Tensor,
) -> Result<()> {
    let name = |role: &str| format!("attention_{role}_{}", q.dtype().as_str());
    let sums = empty(q, (shape.h, parts.count, shape.c), DType::F32)?;
    let stats = empty(q, (shape.h, parts.count, 2), DType::F32)?;
    let launch = Launch::named(q, compiled!(ATTENTION_SPLIT), name("split"))?;
    let launch = launch.with(args![q, table, shape.h, shape.g, shape.c, parts.first, how.seqs.keys()])?;
    let launch = launch.with(args![parts.each, how.scale as f32, &sums, &stats])?;
    // SAFETY: `forward_cached` checked the cache against g heads; the launch has `count` blocks per key
    // head, `sums` and `stats` have one entry per block and head, and the last range ends at `keys`.
    unsafe { launch.run(Grid::new(parts.count, THREADS).by(shape.g).shared(parts.shared)) }?;
    let launch = Launch::named(q, compiled!(ATTENTION_SPLIT), name("join"))?;
    let launch = launch.with(args![&sums, &stats, parts.count, shape.c, o, lse])?;
    // SAFETY: one block per head reads the `count` parts written above; o holds one row of h c values,
    // lse one value per head.
    unsafe { launch.run(Grid::new(shape.h, THREADS)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::Sequences;
    use candle_core::Device;

    #[test]
    fn keys_are_split_into_parts_that_cover_each_once() -> Result<()> {
        for (keys, window, want) in [
            (127, None, None),
            (128, None, Some((0, 64, 2))),
            (2048, None, Some((0, 64, 32))),
            (8192, None, Some((0, 128, 64))),
            (40_000, None, Some((0, 256, 157))),
            (8192, Some(1000), Some((7192, 64, 16))),
            (300_000, None, None),
        ] {
            let seqs = Sequences::new(&[keys], keys - 1, &Device::Cpu)?;
            let how = Causal { seqs: &seqs, window, scale: 1.0 };
            let shape = Shape { t: 1, h: 32, g: 4, c: 128 };
            let parts = KeySplit::of(shape, &how, DType::BF16);
            assert_eq!(parts.map(|p| (p.first, p.each, p.count)), want, "{keys} keys");
            assert!(
                parts.is_none_or(|p| p.first + p.each * p.count >= keys && p.each * (p.count - 1) < keys)
            );
            assert_eq!(KeySplit::of(Shape { t: 2, ..shape }, &how, DType::BF16), None);
            assert_eq!(KeySplit::of(Shape { c: 20, ..shape }, &how, DType::BF16), None);
        }
        Ok(())
    }
}
