//! How many tokens a micro-batch has: by the recipe's bounds, or by the data where it was read.

use super::layer::Tokens;
use crate::data::{Batches, Dataset, Micro};
use crate::recipe::Recipe;

/// Steps whose micro-batches are looked at one by one; of longer runs, the longest rows count.
const LOOK: usize = 2048;
/// Query rows of a block in `kernel::attention`.
const BLOCK: usize = 64;

/// Tokens of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workload {
    /// The largest training micro-batch.
    pub train: Tokens,
    /// The largest evaluation micro-batch.
    pub eval: Option<Tokens>,
    /// Optimizer steps, where known.
    pub steps: Option<u64>,
    /// Whether the data was read; else rows are full and every token is supervised.
    pub measured: bool,
}

/// Most keys that a block of queries sees when these documents lie end to end.
fn reach(docs: &[usize]) -> u64 {
    let mut starts = Vec::with_capacity(docs.len());
    let mut end = 0;
    for n in docs {
        starts.push(end);
        end += n;
    }
    let mut doc = 0;
    let mut most = 0;
    for from in (0..end).step_by(BLOCK) {
        while doc + 1 < starts.len() && starts[doc + 1] <= from {
            doc += 1;
        }
        most = most.max((from + BLOCK).min(end) - starts[doc]);
    }
    most as u64
}

impl Tokens {
    /// Of documents laid end to end, with so many targets.
    pub fn of(docs: &[usize], targets: usize) -> Self {
        Self {
            tokens: docs.iter().sum::<usize>() as u64,
            targets: targets as u64,
            longest: docs.iter().copied().max().unwrap_or(0) as u64,
            reach: reach(docs),
        }
    }

    /// The larger of both in every respect.
    pub fn max(self, o: Self) -> Self {
        Self {
            tokens: self.tokens.max(o.tokens),
            targets: self.targets.max(o.targets),
            longest: self.longest.max(o.longest),
            reach: self.reach.max(o.reach),
        }
    }

    /// A context-parallel rank's part.
    pub fn split(self, ranks: u64) -> Self {
        let part = |n: u64| n.div_ceil(ranks.max(1));
        Self { tokens: part(self.tokens), targets: part(self.targets), ..self }
    }
}

impl Workload {
    /// By the recipe alone: full rows, every token supervised.
    pub fn of_recipe(r: &Recipe) -> Self {
        // bounded: the plan is the same for a million rows as for the rows that a step can have
        let rows = r.run.micro_rows.min(1 << 16);
        let length = r.data.max_length;
        let docs = vec![length; rows];
        let train = Tokens::of(&docs, rows.saturating_mul(length - 1));
        let steps = match r.run.length {
            crate::recipe::Length::Steps(n) => Some(n as u64),
            crate::recipe::Length::Epochs(_) => None,
        };
        Self { train, eval: (!r.data.eval.is_empty()).then_some(train), steps, measured: false }
    }

    /// By the data that a run has read.
    pub fn of_data(r: &Recipe, train: &Dataset, eval: Option<&Dataset>) -> Self {
        let micro = r.run.micro_rows.max(1);
        let batches = Batches::new(train.rows.len(), &r.run, r.data.shuffle);
        let mut largest = Tokens::default();
        if batches.steps() <= LOOK {
            for step in 0..batches.steps() {
                for rows in batches.rows(step).chunks(micro) {
                    largest = largest.max(tokens(train, rows));
                }
            }
        } else {
            largest = of_longest(train, micro);
        }
        let in_order = |d: &Dataset| {
            let rows: Vec<usize> = (0..d.rows.len()).collect();
            rows.chunks(micro).fold(Tokens::default(), |t, rows| t.max(tokens(d, rows)))
        };
        Self { train: largest, eval: eval.map(in_order), steps: Some(batches.steps() as u64), measured: true }
    }
}

fn tokens(d: &Dataset, rows: &[usize]) -> Tokens {
    let m = Micro::collate(d, rows);
    Tokens::of(&m.docs, m.targets.len())
}

/// The longest rows in one micro-batch: at least as large as any that comes.
fn of_longest(d: &Dataset, micro: usize) -> Tokens {
    let mut sizes: Vec<(u64, usize)> = (0..d.rows.len()).map(|r| (tokens(d, &[r]).tokens, r)).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let rows: Vec<usize> = sizes.iter().take(micro).map(|s| s.1).collect();
    let mut largest = tokens(d, &rows);
    largest.targets = largest.tokens;
    largest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_reaches_back_to_the_start_of_its_first_document() {
        assert_eq!(reach(&[128]), 128);
        assert_eq!(reach(&[100]), 100);
        // the block of tokens 64..128 begins in the first document and ends in the second
        assert_eq!(reach(&[100, 28]), 128);
        assert_eq!(reach(&[64, 64]), 64);
        assert_eq!(reach(&[]), 0);
    }
}
