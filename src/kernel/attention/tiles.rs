//! What CUDA's attention kernels are told of documents: tiles of tokens, made once a micro-batch for all of its layers.
//!
//! A block of threads takes a tile of one head. It has up to [`ROWS`] tokens of one document; those with the most
//! partners come first, so that what ends last is small.

use super::Sequences;
use crate::kernel::ledger::Ledger;
use crate::kernel::tensor::Ghost;
use crate::kernel::Tensor;
use candle_core::{DType, Device, Result};

/// Tokens of a tile, as in attention.cuh.
const ROWS: usize = 64;
/// Numbers of a tile: its first token, its tokens, its document's first and end.
const WIDTH: usize = 4;

/// The two lists of tiles on the device, u32.
#[derive(Clone, Debug)]
pub struct Tiles {
    /// Of queries, [tiles, 4].
    pub queries: Tensor,
    /// Of keys, [tiles, 4].
    pub keys: Tensor,
}

/// Of documents of these lengths: tiles of queries, then those of keys.
fn lists(docs: &[usize], first_query: usize) -> [Vec<[u32; WIDTH]>; 2] {
    let (mut queries, mut keys, mut begin) = (Vec::new(), Vec::new(), 0);
    for &n in docs {
        let end = begin + n;
        for (list, from) in [(&mut queries, begin.max(first_query)), (&mut keys, begin)] {
            for first in (from..end).step_by(ROWS) {
                let rows = ROWS.min(end - first);
                list.push([first, rows, begin, end].map(|n| n as u32));
            }
        }
        begin = end;
    }
    queries.sort_by_key(|[first, rows, begin, _]| std::cmp::Reverse(first + rows - begin));
    keys.sort_by_key(|[first, _, _, end]| std::cmp::Reverse(end - first));
    [queries, keys]
}

impl Tiles {
    /// Copies them to a device.
    pub fn new(docs: &[usize], first_query: usize, device: &Device) -> Result<Self> {
        let [queries, keys] = lists(docs, first_query);
        let (n, m) = (queries.len(), keys.len());
        let numbers: Vec<u32> = queries.into_iter().chain(keys).flatten().collect();
        if n == 0 {
            let none = Tensor::zeros((0, WIDTH), DType::U32, device)?;
            return Ok(Self { queries: none.clone(), keys: none });
        }
        let all = Tensor::from_vec(numbers, (n + m, WIDTH), device)?;
        Ok(Self { queries: all.narrow(0, 0, n)?, keys: all.narrow(0, n, m)? })
    }

    /// Those of a plan.
    pub fn ghost(ledger: &Ledger, keys: usize) -> Self {
        let list = || Tensor::from(Ghost::weight(ledger, (keys.div_ceil(ROWS), WIDTH), DType::U32));
        Self { queries: list(), keys: list() }
    }
}
