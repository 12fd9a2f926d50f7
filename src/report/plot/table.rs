//! Tables beside plots.

use super::format::grouped;
use serde::Serialize;

/// Most rows of the table of a plot.
const ROWS: usize = 40;

/// The numbers of a plot as a table, for accessibility.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Table {
    pub head: Vec<String>,
    pub rows: Vec<Vec<String>>,
    /// Notice about omitted rows.
    pub note: String,
}

impl Table {
    /// A table of all `rows`.
    pub fn new<'a>(head: impl IntoIterator<Item = &'a str>, rows: Vec<Vec<String>>) -> Self {
        Self { head: head.into_iter().map(String::from).collect(), rows, note: String::new() }
    }

    /// A table of up to 40 of `items`, called `what`.
    pub fn thinned<'a, T>(
        head: impl IntoIterator<Item = &'a str>,
        items: Vec<T>,
        what: &str,
        row: impl FnMut(T) -> Vec<String>,
    ) -> Self {
        let (items, note) = thin_evenly(items, ROWS, what);
        Self { note, ..Self::new(head, items.into_iter().map(row).collect()) }
    }
}

/// Indices of `rows` out of `count` items: first, last, and evenly spaced between.
pub fn evenly(count: usize, rows: usize) -> Vec<usize> {
    if count <= rows || rows < 2 {
        return (0..count.min(rows.max(1))).collect();
    }
    (0..rows).map(|r| r * (count - 1) / (rows - 1)).collect()
}

/// At most `most` of `items`, evenly spaced, and a notice about the omitted ones.
pub fn thin_evenly<T>(items: Vec<T>, most: usize, what: &str) -> (Vec<T>, String) {
    let all = items.len();
    if all <= most {
        return (items, String::new());
    }
    let shown = evenly(all, most);
    let note = format!("{} of {} {what}, evenly spaced.", shown.len(), grouped(all as u64));
    let items = items.into_iter().enumerate().filter(|(i, _)| shown.binary_search(i).is_ok());
    (items.map(|(_, item)| item).collect(), note)
}
