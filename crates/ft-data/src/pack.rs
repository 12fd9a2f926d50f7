//! Which samples share a row.

use super::error::Error;
use super::record::small;
use super::rows::Item;
use ft_base::rng::Stream;
use std::collections::BTreeMap;

/// What takes a row when it is made.
pub(super) type Each<'a> = &'a mut dyn FnMut(&[Item]) -> Result<(), Error>;

/// Puts samples into rows of at most `max` tokens, in order: a row is closed when the next does not fit (next-fit).
///
/// # Errors
/// Those of the samples, and those of `each`.
pub(super) fn in_order(
    samples: impl Iterator<Item = Result<Item, Error>>,
    max: usize,
    each: Each<'_>,
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

/// Puts samples into rows of at most `max` tokens: in the random order of a stream, each into the row that it fills
/// best (best-fit).
///
/// A random order instead of the longest first, which would pack a little denser, so that long and short samples
/// meet in all rows alike. Rows with equal space are taken last in, first out; n log n in all.
///
/// # Errors
/// Those of `each`.
pub(super) fn best_fit(items: &[Item], max: usize, stream: Stream, each: Each<'_>) -> Result<(), Error> {
    let permutation = stream.permutation(small(items.len()));
    // the row of each sample in that order, and how many each row has
    let (mut row_of, mut ends): (Vec<u32>, Vec<u32>) = (Vec::with_capacity(items.len()), Vec::new());
    let mut by_space: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    for at in &permutation {
        let n = items[*at as usize].tokens as usize;
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
