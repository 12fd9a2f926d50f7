//! Units of the walk on a rank.

use super::config::Config;
use super::config::modules::{Kind, modules};
use std::ops::Range;

/// Consecutive units of the walk: 0 is the embedding, then the layers, then the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Units {
    /// First unit.
    pub first: usize,
    /// One past the last unit.
    pub end: usize,
    /// Number of layers of the model.
    pub layers: usize,
}

impl Units {
    /// All units of a model of `layers` layers.
    pub fn all(layers: usize) -> Self {
        Self { first: 0, end: layers + 2, layers }
    }

    /// Whether a unit is one of these.
    pub fn has(self, unit: usize) -> bool {
        (self.first..self.end).contains(&unit)
    }

    /// Whether the embedding is one of these.
    pub fn has_embedding(self) -> bool {
        self.first == 0
    }

    /// Whether the head is one of these.
    pub fn has_head(self) -> bool {
        self.end == self.layers + 2
    }

    /// Numbers of the layers among these, from 0.
    pub fn own_layers(self) -> Range<usize> {
        self.first.max(1) - 1..self.end.min(self.layers + 1).max(1) - 1
    }
}

/// Cuts a model into `stages` of consecutive units, with `given` layers, or if empty, with the least possible work in
/// the largest stage. Work is counted in values of active matrices; the last stage has the head's. `None` if
/// impossible.
pub fn partition(config: &Config, stages: usize, given: &[usize]) -> Option<Vec<Units>> {
    let layers = config.layers;
    if stages == 1 && given.is_empty() {
        return Some(vec![Units::all(layers)]);
    }
    let counts = match given {
        [] => even(&work(config), stages)?,
        given => given.to_vec(),
    };
    if counts.len() != stages || counts.contains(&0) || counts.iter().sum::<usize>() != layers {
        return None;
    }
    let mut first = 0;
    let last = counts.len() - 1;
    let unit = |(s, n): (usize, usize)| {
        let end = first + n + usize::from(s == 0) + usize::from(s == last);
        let units = Units { first, end, layers };
        first = end;
        units
    };
    Some(counts.into_iter().enumerate().map(unit).collect())
}

/// Values of the matrices active for a token, by layer; the last layer includes the head.
fn work(config: &Config) -> Vec<u64> {
    let mut work = vec![0; config.layers];
    for m in modules(config).iter().filter(|m| matches!(m.kind, Kind::Linear { .. })) {
        let values = m.weight_values() as u64;
        let active = config.moe.as_ref().filter(|_| m.expert.is_some());
        let values = active.map_or(values, |moe| values * moe.top_k as u64 / moe.experts.max(1) as u64);
        if let Some(layer) = work.get_mut(m.layer.unwrap_or(config.layers.saturating_sub(1))) {
            *layer += values;
        }
    }
    work
}

/// Numbers of consecutive layers of `stages` stages with the least largest sum of `work`; `None` for more stages than
/// layers.
fn even(work: &[u64], stages: usize) -> Option<Vec<usize>> {
    if stages == 0 || stages > work.len() {
        return None;
    }
    // best[s][n]: the least largest sum of s + 1 stages over the first n layers, and the layers of the last stage
    let sum = |r: Range<usize>| work[r].iter().sum::<u64>();
    let mut best = vec![(0..=work.len()).map(|n| (sum(0..n), n)).collect::<Vec<_>>()];
    for s in 1..stages {
        let row = (0..=work.len()).map(|n| {
            let own = (1..=n.saturating_sub(s)).map(|k| (best[s - 1][n - k].0.max(sum(n - k..n)), k));
            own.min().unwrap_or((u64::MAX, 0))
        });
        let row = row.collect();
        best.push(row);
    }
    let (mut counts, mut n) = (Vec::new(), work.len());
    for s in (0..stages).rev() {
        let k = best[s][n].1;
        counts.push(k);
        n -= k;
    }
    counts.reverse();
    Some(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_have_work_as_even_as_layers_permit() {
        for (work, stages, counts) in [
            (&[1, 1, 1, 1][..], 2, Some(vec![2, 2])),
            (&[1, 1, 1, 4], 2, Some(vec![3, 1])),
            (&[4, 1, 1, 1, 1], 3, Some(vec![1, 3, 1])),
            (&[1, 1, 1], 3, Some(vec![1, 1, 1])),
            (&[5], 1, Some(vec![1])),
            (&[1, 1], 3, None),
        ] {
            assert_eq!(even(work, stages), counts, "{work:?} {stages}");
        }
    }

    #[test]
    fn the_first_stage_has_the_embedding_and_the_last_the_head() {
        let units = |first, end| Units { first, end, layers: 4 };
        assert_eq!(Units::all(4).own_layers(), 0..4);
        assert_eq!([units(0, 3), units(3, 6)].map(Units::own_layers), [0..2, 2..4]);
        assert!(units(0, 3).has_embedding() && units(3, 6).has_head() && !units(0, 3).has_head());
    }
}
