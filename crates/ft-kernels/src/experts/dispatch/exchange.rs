//! Exchange of a mixture's rows between ranks that own equal numbers of neighboring experts.
//!
//! Rows sorted by expert are sorted by owner too. A rank sends a run of rows to every owner, and sorts incoming rows by
//! (expert, source, token).

use super::{Groups, Sorted};
use crate::Tensor;
use candle_core::{DType, Device, Result};
use std::ops::Range;

/// Counts that a rank sends before the rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DispatchCounts {
    /// Rows for each expert.
    pub counts: Vec<u32>,
    /// Token of each row within the step, if experts drop out by token; otherwise empty.
    pub tokens: Vec<u32>,
    /// Whether the backward pass of the rank's experts needs incoming rows.
    pub needs_input: bool,
}

/// Rows of one layer and micro-batch between the ranks of a group. Recompute and backward pass use it again.
#[derive(Debug)]
pub struct RowExchange {
    /// Index of this rank in the group.
    pub me: usize,
    /// Number of rows to each rank, and from it.
    pub sent: Vec<usize>,
    pub received: Vec<usize>,
    /// By rank, whether the backward pass needs rows.
    pub needs: Vec<bool>,
    /// Received rows by own expert: each row is a token with one expert.
    pub here: Groups,
    /// Token of each received row within the step; empty without dropout.
    pub tokens: Vec<u32>,
}

impl RowExchange {
    /// The exchange by the counts of the group, in rank order.
    ///
    /// # Errors
    /// Counts of different models; device errors.
    pub fn new(all: &[DispatchCounts], me: usize, on: (&Device, Option<DType>)) -> Result<Self> {
        let experts = all.first().map_or(0, |d| d.counts.len());
        let own = experts / all.len().max(1);
        if own * all.len() != experts || me >= all.len() || all.iter().any(|d| d.counts.len() != experts) {
            candle_core::bail!(
                "routing: {experts} experts over {} ranks, or other numbers of them",
                all.len()
            );
        }
        let of = |rank: usize| rank * own..(rank + 1) * own;
        let sum = |counts: &[u32]| counts.iter().map(|n| *n as usize).sum::<usize>();
        let sent = (0..all.len()).map(|rank| sum(&all[me].counts[of(rank)])).collect();
        let received: Vec<usize> = all.iter().map(|d| sum(&d.counts[of(me)])).collect();
        let (mut expert, mut tokens) = (Vec::new(), Vec::new());
        for d in all {
            for (e, n) in d.counts[of(me)].iter().enumerate() {
                expert.extend(std::iter::repeat_n(e as u32, *n as usize));
            }
            if !d.tokens.is_empty() {
                let first = sum(&d.counts[..of(me).start]);
                let rows = first..first + sum(&d.counts[of(me)]);
                match d.tokens.get(rows) {
                    Some(rows) => tokens.extend(rows),
                    None => candle_core::bail!("routing: fewer tokens than rows"),
                }
            }
        }
        let here = match on {
            (device, Some(dtype)) if !expert.is_empty() => {
                let chosen = Tensor::from_slice(&expert, (expert.len(), 1), device)?;
                Groups::on_device(Sorted::new(&chosen, own, dtype)?)
            }
            // A device has no address for empty lists.
            _ if expert.is_empty() => Groups::new(expert, 1, own, &Device::Cpu)?,
            (device, _) => Groups::new(expert, 1, own, device)?,
        };
        let needs = all.iter().map(|d| d.needs_input).collect();
        Ok(Self { me, sent, received, needs, here, tokens })
    }

    /// In a plan: rows leave evenly to `ranks`, and come for `here`.
    pub fn planned(here: Groups, rows: usize, ranks: usize) -> Self {
        let lens = |rows: usize| {
            let each = rows / ranks.max(1);
            let rest = rows - each * ranks.saturating_sub(1);
            std::iter::once(rest).chain(std::iter::repeat_n(each, ranks.saturating_sub(1))).collect()
        };
        let (sent, received) = (lens(rows), lens(here.tokens));
        Self { me: 0, sent, received, needs: vec![true; ranks], here, tokens: Vec::new() }
    }

    /// Number of received rows.
    pub fn rows(&self) -> usize {
        self.received.iter().sum()
    }

    /// Tokens of the sorted rows of a run.
    pub fn tokens_of(&self, rows: &[u32]) -> Vec<u32> {
        rows.iter().filter_map(|row| self.tokens.get(*row as usize).copied()).collect()
    }
}

/// Ranges of consecutive lengths.
pub fn ranges(lens: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    lens.iter()
        .map(|n| {
            end += n;
            end - n..end
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(counts: &[u32], tokens: &[u32], needs_input: bool) -> DispatchCounts {
        DispatchCounts { counts: counts.into(), tokens: tokens.into(), needs_input }
    }

    /// Rank 0 owns experts 0 and 1, rank 1 owns 2 and 3.
    #[test]
    fn rows_are_sorted_by_expert_then_source() -> Result<()> {
        let all = [of(&[1, 0, 2, 1], &[10, 11, 12, 13], true), of(&[0, 3, 1, 0], &[20, 21, 22, 23], false)];
        let on = (&Device::Cpu, None);
        let [a, b] = [RowExchange::new(&all, 0, on)?, RowExchange::new(&all, 1, on)?];
        assert_eq!((&a.sent, &a.received), (&vec![1, 3], &vec![1, 3]));
        assert_eq!((&b.sent, &b.received), (&vec![3, 1], &vec![3, 1]));
        assert_eq!(a.needs, [true, false]);
        assert_eq!(b.here.counts().collect::<Vec<_>>(), [3, 1]);
        // expert 2: rows 0 and 1 of rank 0, row 3 of rank 1; expert 3: row 2 of rank 0
        assert_eq!(b.here.token, [0, 1, 3, 2]);
        assert_eq!(b.tokens, [11, 12, 13, 23]);
        assert_eq!(b.tokens_of(&b.here.token), [11, 12, 23, 13]);
        assert_eq!(ranges(&b.received), [0..3, 3..4]);
        Ok(())
    }

    #[test]
    fn ranks_without_rows_and_experts_without_rows_are_exchanged() -> Result<()> {
        let all = [of(&[0, 0], &[], false), of(&[2, 0], &[], false)];
        let a = RowExchange::new(&all, 0, (&Device::Cpu, None))?;
        assert_eq!((a.rows(), &a.sent), (2, &vec![0, 0]));
        let b = RowExchange::new(&all, 1, (&Device::Cpu, None))?;
        assert_eq!((b.rows(), b.here.runs().len(), &b.sent), (0, 0, &vec![2, 0]));
        Ok(())
    }

    #[test]
    fn counts_of_other_models_are_refused() {
        for all in [vec![of(&[1, 2, 3], &[], false); 2], vec![of(&[1, 2], &[], false), of(&[1], &[], false)]]
        {
            assert!(RowExchange::new(&all, 0, (&Device::Cpu, None)).is_err());
        }
        let short = [of(&[1, 1], &[], false), of(&[2, 1], &[5], false)];
        assert!(RowExchange::new(&short, 0, (&Device::Cpu, None)).is_err());
    }
}
