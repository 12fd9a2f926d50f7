//! Packing of samples into rows.

use crate::error::Error;
use crate::token_cache::{record::Item, record::saturating_u32};
use ft_base::rng::Stream;
use std::collections::BTreeMap;

/// Callback for finished rows.
type EmitRow<'a> = &'a mut dyn FnMut(&[Item]) -> Result<(), Error>;

/// Packs samples into rows of at most `max` tokens, in order: closes a row if the next sample does not fit
/// (next-fit).
pub(crate) fn in_order(
    samples: impl Iterator<Item = Result<Item, Error>>,
    max: usize,
    each: EmitRow<'_>,
) -> Result<(), Error> {
    let (mut row, mut free) = (Vec::new(), 0);
    for item in samples {
        let item = item?;
        let n = item.tokens as usize;
        if !row.is_empty() && n > free {
            each(&row)?;
            row.clear();
        }
        free = if row.is_empty() { max } else { free }.saturating_sub(n);
        row.push(item);
    }
    if row.is_empty() { Ok(()) } else { each(&row) }
}

/// Packs samples into rows of at most `max` tokens, in random order: a sample goes into the row with the
/// least sufficient space (best-fit).
///
/// A random order mixes long and short samples in all rows; sorting by length would pack slightly denser.
/// Rows with equal space are used last in, first out. The cost is O(n log n).
pub(crate) fn best_fit(items: &[Item], max: usize, stream: Stream, each: EmitRow<'_>) -> Result<(), Error> {
    let permutation = stream.permutation(saturating_u32(items.len()));
    // the row of every sample, in permuted order, and the number of samples per row
    let (mut row_of, mut ends): (Vec<u32>, Vec<u32>) = (Vec::with_capacity(items.len()), Vec::new());
    let mut by_space: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    for at in &permutation {
        let n = items[*at as usize].tokens as usize;
        let best = by_space.range(n.max(1)..).next().map(|(space, _)| *space);
        let (row, space) = match best.and_then(|space| Some((take(&mut by_space, space)?, space))) {
            Some(found) => found,
            None => {
                ends.push(0);
                (saturating_u32(ends.len() - 1), max)
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
    // turns counts into row offsets; the next loop advances them to row ends
    let mut first = 0;
    for end in &mut ends {
        first += std::mem::replace(end, first);
    }
    let mut sorted = vec![0; items.len()];
    for (at, row) in permutation.into_iter().zip(row_of) {
        let next = &mut ends[row as usize];
        sorted[*next as usize] = at;
        *next += 1;
    }
    let (mut row, mut start) = (Vec::new(), 0);
    for end in ends {
        row.clear();
        row.extend(sorted[start..end as usize].iter().map(|at| items[*at as usize]));
        each(&row)?;
        start = end as usize;
    }
    Ok(())
}

fn take(by_space: &mut BTreeMap<usize, Vec<u32>>, space: usize) -> Option<u32> {
    let rows = by_space.get_mut(&space)?;
    let row = rows.pop();
    if rows.is_empty() {
        by_space.remove(&space);
    }
    row
}
