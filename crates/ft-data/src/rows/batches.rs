//! Rows of every step.

use super::order::{MAX_IN_MEMORY, Permutation};
use ft_base::rng::{Purpose, Stream};
use ft_recipe::{Interval, Length, Run};
use std::sync::{Mutex, PoisonError};

/// The rows of every step of a run: a pure function of the step number, so a resumed run needs no other
/// state.
///
/// Step `s` takes rows `s * batch_rows ..` of an endless sequence of epochs. An epoch contains every row
/// once, in file order or, if shuffled, in a new random order.
pub struct Batches {
    rows: usize,
    batch: usize,
    steps: usize,
    /// Rows of all steps.
    total: u128,
    shuffle: bool,
    seed: u64,
    /// Cached permutations of the last two epochs, since a batch may cross an epoch boundary.
    orders: Mutex<Vec<(u64, Permutation)>>,
}

impl Batches {
    /// Batches for a dataset of `rows` rows, with `run.batch_rows` rows per step and the length set by
    /// `run`.
    ///
    /// With `epochs`, the last batch may be smaller. A fractional number of epochs is rounded to the
    /// nearest row, at least one. Without rows, the run has no steps.
    pub fn new(rows: usize, run: &Run, shuffle: bool) -> Self {
        let batch = run.batch_rows.max(1);
        let (steps, total) = match run.length() {
            _ if rows == 0 => (0, 0),
            Length::Steps(steps) => (steps, steps as u128 * batch as u128),
            Length::Epochs(epochs) => {
                // the cast saturates: NaN and negative numbers to 0, infinity to the maximum
                let total = ((epochs * rows as f64).round() as u64).max(1) as u128;
                (usize::try_from(total.div_ceil(batch as u128)).unwrap_or(usize::MAX), total)
            }
        };
        Self { rows, batch, steps, total, shuffle, seed: run.seed, orders: Mutex::new(Vec::new()) }
    }

    /// Optimizer steps of the run.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// Whether an event of this interval follows after `done` steps: at the end of each interval and of the run.
    pub fn is_due(&self, every: Interval, done: usize) -> bool {
        done == self.steps || self.completed(every, done) > self.completed(every, done.saturating_sub(1))
    }

    /// Whether an event of this interval follows before the end of the run.
    pub fn recurs(&self, every: Interval) -> bool {
        self.completed(every, self.steps.saturating_sub(1)) > 0
    }

    fn completed(&self, every: Interval, done: usize) -> u128 {
        let taken = (done as u128 * self.batch as u128).min(self.total);
        every.completed((done, self.steps), (taken, self.rows))
    }

    /// The rows of `step`, counted from 0; empty after the last step.
    pub fn rows(&self, step: usize) -> Vec<usize> {
        let first = step as u128 * self.batch as u128;
        let last = (first + self.batch as u128).min(self.total);
        (first..last).map(|at| self.row(at)).collect()
    }

    fn row(&self, at: u128) -> usize {
        let within = (at % self.rows as u128) as usize;
        if !self.shuffle {
            return within;
        }
        let epoch = (at / self.rows as u128) as u64;
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, order)) = orders.iter().find(|o| o.0 == epoch) {
            return order.at(within);
        }
        let order =
            Permutation::new(Stream::new(self.seed, Purpose::Shuffle, epoch, 0), self.rows, MAX_IN_MEMORY);
        let row = order.at(within);
        if orders.len() == 2 {
            orders.remove(0);
        }
        orders.push((epoch, order));
        row
    }

    /// Memory of the permutations of `rows` rows, in bytes, for a run of `all` rows in total.
    pub fn resident(rows: u64, all: u64) -> u64 {
        Permutation::bytes(rows) * all.div_ceil(rows.max(1)).min(2)
    }
}
