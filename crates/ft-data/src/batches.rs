//! Which rows a step takes.

use super::order::{HELD, Order};
use ft_recipe::{Length, Run};
use ft_base::rng::{Purpose, Stream};
use std::sync::{Mutex, PoisonError};

/// The rows of each step of a run: a pure function of the step, so that where a resumed run stands is its step
/// number and nothing else.
///
/// Step `s` takes the rows `s * batch_rows ..` of an endless sequence of epochs, each of which holds every row
/// once: in file order, or in an order of its own when shuffled.
pub struct Batches {
    rows: usize,
    batch: usize,
    steps: usize,
    /// Rows of all steps together.
    total: u128,
    shuffle: bool,
    seed: u64,
    /// The orders of the last two epochs asked for: a batch may reach over an edge. Holds no state, only time.
    orders: Mutex<Vec<(u64, Order)>>,
}

impl Batches {
    /// For a dataset of `rows` rows, `run.batch_rows` a step, as long as `run` says.
    ///
    /// With `epochs`, the last batch is smaller when the rows do not divide; a fraction of an epoch counts its rows
    /// to the nearest, and at least one. Without rows there are no steps.
    pub fn new(rows: usize, run: &Run, shuffle: bool) -> Self {
        let batch = run.batch_rows.max(1);
        let (steps, total) = match run.length() {
            _ if rows == 0 => (0, 0),
            Length::Steps(steps) => (steps, steps as u128 * batch as u128),
            Length::Epochs(epochs) => {
                // saturates: from NaN and below to 0, from infinity to the largest
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

    /// The rows of `step`, from 0; none behind the last step.
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
        let order = Order::new(Stream::new(self.seed, Purpose::Shuffle, epoch, 0), self.rows, HELD);
        let row = order.at(within);
        if orders.len() == 2 {
            orders.remove(0);
        }
        orders.push((epoch, order));
        row
    }

    /// Bytes of the orders of `rows` rows that stay in memory, of a run that takes `all` of them.
    pub fn resident(rows: u64, all: u64) -> u64 {
        Order::bytes(rows) * all.div_ceil(rows.max(1)).min(2)
    }
}
