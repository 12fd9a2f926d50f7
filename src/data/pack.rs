//! Which samples share a row.

use crate::rng::{Purpose, Stream};
use std::collections::BTreeMap;

/// Puts samples of `lengths` into rows of at most `max` tokens, in order: a row is closed when the next does not
/// fit (next-fit).
pub(super) fn in_order(order: &[usize], lengths: &dyn Fn(usize) -> usize, max: usize) -> Vec<Vec<usize>> {
    let mut rows: Vec<Vec<usize>> = Vec::new();
    let mut free = 0;
    for &i in order {
        let n = lengths(i);
        if n <= free
            && let Some(row) = rows.last_mut()
        {
            row.push(i);
            free -= n;
        } else {
            rows.push(vec![i]);
            free = max.saturating_sub(n);
        }
    }
    rows
}

/// Puts samples into rows of at most `max` tokens: in a random order that `seed` decides, each into the row that it
/// fills best (best-fit).
///
/// A random order instead of the longest first, which would pack a little denser, so that long and short samples
/// meet in all rows alike. Rows with equal space are taken last in, first out; n log n in all.
pub(super) fn best_fit(
    order: &[usize],
    lengths: &dyn Fn(usize) -> usize,
    max: usize,
    seed: u64,
) -> Vec<Vec<usize>> {
    let mut rows: Vec<Vec<usize>> = Vec::new();
    let mut by_space: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for at in Stream::new(seed, Purpose::Pack, 0, 0).permutation(order.len()) {
        let i = order[at];
        let n = lengths(i);
        let best = by_space.range(n.max(1)..).next().map(|(space, _)| *space);
        let (row, space) = match best.and_then(|space| Some((take(&mut by_space, space)?, space))) {
            Some(found) => found,
            None => {
                rows.push(Vec::new());
                (rows.len() - 1, max)
            }
        };
        rows[row].push(i);
        let left = space.saturating_sub(n);
        if left > 0 {
            by_space.entry(left).or_default().push(row);
        }
    }
    rows
}

fn take(by_space: &mut BTreeMap<usize, Vec<usize>>, space: usize) -> Option<usize> {
    let rows = by_space.get_mut(&space)?;
    let row = rows.pop();
    if rows.is_empty() {
        by_space.remove(&space);
    }
    row
}
