//! Which samples share a row.

use super::Rows;
use super::record::small;
use crate::rng::{Purpose, Stream};
use std::collections::BTreeMap;

/// Puts samples of `lengths` into rows of at most `max` tokens, in order: a row is closed when the next does not
/// fit (next-fit).
pub(super) fn in_order(order: Vec<u32>, lengths: &dyn Fn(usize) -> usize, max: usize) -> Rows {
    let mut ends: Vec<u32> = Vec::new();
    let mut free = 0;
    for (at, &i) in order.iter().enumerate() {
        let n = lengths(i as usize);
        let end = small(at + 1);
        match ends.last_mut() {
            Some(last) if n <= free => {
                *last = end;
                free -= n;
            }
            _ => {
                ends.push(end);
                free = max.saturating_sub(n);
            }
        }
    }
    Rows::packed(order, ends)
}

/// Puts samples into rows of at most `max` tokens: in a random order that `seed` decides, each into the row that it
/// fills best (best-fit).
///
/// A random order instead of the longest first, which would pack a little denser, so that long and short samples
/// meet in all rows alike. Rows with equal space are taken last in, first out; n log n in all.
pub(super) fn best_fit(order: &[u32], lengths: &dyn Fn(usize) -> usize, max: usize, seed: u64) -> Rows {
    let permutation = Stream::new(seed, Purpose::Pack, 0, 0).permutation(order.len());
    // the row of each sample in that order, and how many each row has
    let (mut row_of, mut ends): (Vec<u32>, Vec<u32>) = (Vec::with_capacity(order.len()), Vec::new());
    let mut by_space: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    for at in &permutation {
        let n = lengths(order[*at] as usize);
        let best = by_space.range(n.max(1)..).next().map(|(space, _)| *space);
        let (row, space) = match best.and_then(|space| Some((take(&mut by_space, space)?, space))) {
            Some(found) => found,
            None => {
                ends.push(0);
                (small(ends.len() - 1), max)
            }
        };
        row_of.push(row);
        ends[row as usize] += 1;
        let left = space.saturating_sub(n);
        if left > 0 {
            by_space.entry(left).or_default().push(row);
        }
    }
    drop(by_space);
    // where each row begins, and in the end where it ends
    let mut first = 0;
    for end in &mut ends {
        first += std::mem::replace(end, first);
    }
    let mut samples = vec![0; order.len()];
    for (at, row) in permutation.into_iter().zip(row_of) {
        let next = &mut ends[row as usize];
        samples[*next as usize] = order[at];
        *next += 1;
    }
    Rows::packed(samples, ends)
}

fn take(by_space: &mut BTreeMap<usize, Vec<u32>>, space: usize) -> Option<u32> {
    let rows = by_space.get_mut(&space)?;
    let row = rows.pop();
    if rows.is_empty() {
        by_space.remove(&space);
    }
    row
}
