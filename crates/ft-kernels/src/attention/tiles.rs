//! Work lists of the CUDA attention kernels: tiles of tokens, built once per micro-batch and shared by
//! all layers.
//!
//! A thread block processes one tile for one head. A tile has up to [`ROWS`] tokens of one document.
//! Tiles with the most visible keys (or queries) come first, so that short ones fill the tail of the
//! launch.

use crate::Tensor;
use crate::cuda::upload::{Lists, Place, Sent};
use candle_core::Result;

/// Tokens per tile; must match attention.cuh.
pub const ROWS: usize = 64;
/// Tokens per chunk of linear attention; must match delta_rule.cu.
pub const CHUNK: usize = 32;
/// Queries per block of the CPU kernels.
pub const BLOCK: usize = 64;
/// Threads per block of the CUDA kernels.
pub const THREADS: u32 = 128;
/// Values per tile: first token, number of tokens, start and end of the document.
const WIDTH: usize = 4;

/// Size of the attention problem, all a plan needs to know about documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Total tokens.
    pub keys: usize,
    /// Tokens of the longest document.
    pub longest: usize,
    /// Largest number of keys from the first key visible to a block of [`BLOCK`] queries up to the last.
    pub reach: usize,
}

impl Sizes {
    /// Sizes for concatenated documents of the given lengths, with queries from key `first_query` on.
    pub fn of_last(docs: &[usize], first_query: usize) -> Self {
        let (keys, longest) = (docs.iter().sum(), docs.iter().copied().max().unwrap_or(0));
        let (mut reach, mut start, mut rest) = (0, 0, docs.iter().peekable());
        for from in (first_query..keys).step_by(BLOCK) {
            while rest.peek().is_some_and(|n| start + **n <= from) {
                start += rest.next().copied().unwrap_or(0);
            }
            reach = reach.max((from + BLOCK).min(keys) - start);
        }
        Self { keys, longest, reach }
    }
}

/// The work lists on the device, u32.
#[derive(Clone, Debug)]
pub struct Tiles {
    /// Tiles of queries, [tiles, 4].
    pub queries: Tensor,
    /// Tiles of keys, [tiles, 4].
    pub keys: Tensor,
    /// Documents, [docs, 4]: begin, end, number of chunks before, 0.
    pub documents: Tensor,
}

/// Documents that have tokens, as in [`Tiles::documents`].
fn documents(docs: &[usize]) -> Vec<u32> {
    let (mut begin, mut chunks, mut list) = (0, 0, Vec::new());
    for &n in docs.iter().filter(|n| **n > 0) {
        list.extend([begin, begin + n, chunks, 0].map(|n| n as u32));
        (begin, chunks) = (begin + n, chunks + n.div_ceil(CHUNK));
    }
    list
}

/// Builds the query tiles and key tiles of documents with the given lengths.
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
    /// Appends the lists to a pending upload.
    pub fn list(docs: &[usize], first_query: usize, to: &mut Lists) -> [Place; 3] {
        let [queries, keys] = lists(docs, first_query).map(|list| to.ints(&list.concat()));
        [queries, keys, to.ints(&documents(docs))]
    }

    /// The lists after the upload.
    pub fn sent(places: [Place; 3], sent: &Sent) -> Result<Self> {
        let [queries, keys, documents] = places.map(|p| sent.ints(p)?.reshape(((), WIDTH)));
        Ok(Self { queries: queries?, keys: keys?, documents: documents? })
    }
}

/// Bytes of the lists, if all documents are as long as the longest.
pub fn bytes(sizes: Sizes) -> usize {
    let docs = sizes.keys.div_ceil(sizes.longest.max(1));
    4 * WIDTH * docs * (2 * sizes.longest.div_ceil(ROWS) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_token_once_and_stay_in_their_document() {
        for (docs, first_query) in [(&[200, 3, 0, 64, 65][..], 0), (&[130], 129), (&[130], 70), (&[], 0)] {
            let all: usize = docs.iter().sum();
            for (list, from) in lists(docs, first_query).into_iter().zip([first_query, 0]) {
                let mut seen = vec![0; all];
                for [first, rows, begin, end] in list {
                    assert!(rows > 0 && rows <= ROWS as u32 && begin <= first && first + rows <= end);
                    let whole: u32 = docs
                        .iter()
                        .map(|n| *n as u32)
                        .take_while({
                            let mut at = 0;
                            move |n| {
                                at += n;
                                at <= begin
                            }
                        })
                        .sum();
                    assert_eq!(whole, begin);
                    (first..first + rows).for_each(|t| seen[t as usize] += 1);
                }
                assert!(seen.iter().enumerate().all(|(t, n)| *n == usize::from(t >= from)), "{docs:?}");
            }
        }
    }

    #[test]
    fn the_heaviest_tiles_come_first() {
        let [queries, keys] = lists(&[70, 200], 0);
        assert_eq!(queries[0], [262, 8, 70, 270]);
        assert_eq!(keys[0], [70, 64, 70, 270]);
    }

    #[test]
    fn a_plan_counts_what_is_copied() {
        let docs = [100; 7];
        let [queries, keys] = lists(&docs, 0);
        assert_eq!(
            bytes(Sizes::of_last(&docs, 0)),
            16 * (queries.len() + keys.len()) + 4 * documents(&docs).len()
        );
        assert_eq!(documents(&[33, 0, 1]), [0, 33, 0, 0, 33, 34, 2, 0]);
    }
}
