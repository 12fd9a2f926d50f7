//! Segments: the tokens of a micro-batch over the ranks of a context group.
//!
//! Documents stay whole in attention: a segment may begin and end inside of one.

use super::Micro;
use crate::shape::example::Teacher;
use std::ops::Range;

/// Segments begin at multiples of this many tokens of a micro-batch, so a block of queries belongs to one rank.
pub const CUT: usize = 128;

/// Token ranges of each of `ranks` ranks, in order, for documents of these lengths.
///
/// If every document has at most tokens / ranks tokens, each rank gets one range, all about equally long. Otherwise
/// rank r gets the r-th range from the front and the r-th from the back, which balances causal attention. With fewer
/// blocks than ranks, some ranks get none; rank 0 gets the first.
pub fn segments(docs: &[usize], ranks: usize) -> Vec<Vec<Range<usize>>> {
    let (tokens, ranks) = (docs.iter().sum::<usize>(), ranks.max(1));
    let blocks = tokens.div_ceil(CUT);
    let chunk = |i: usize, of: usize| {
        let cut = |i: usize| ((blocks * i).div_ceil(of) * CUT).min(tokens);
        cut(i)..cut(i + 1)
    };
    let is_long = docs.iter().any(|n| n * ranks > tokens);
    let own = |rank: usize| match is_long && ranks > 1 {
        true => vec![chunk(rank, 2 * ranks), chunk(2 * ranks - 1 - rank, 2 * ranks)],
        false => vec![chunk(rank, ranks)],
    };
    (0..ranks).map(|rank| joined(own(rank))).collect()
}

/// Joins adjacent ranges, and drops empty ones.
fn joined(all: Vec<Range<usize>>) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::with_capacity(all.len());
    for range in all.into_iter().filter(|r| !r.is_empty()) {
        match out.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => out.push(range),
        }
    }
    out
}

/// The segments of one rank in a micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Segments {
    /// Tokens and targets of the segments, with positions in their documents. Documents and samples are of the whole.
    pub micro: Micro,
    /// Index of each token in the micro-batch.
    pub tokens: Vec<u32>,
    /// Index of each target in the micro-batch.
    pub targets: Vec<u32>,
}

impl Segments {
    /// The part of a range of these tokens.
    pub fn part(&self, range: Range<usize>) -> Self {
        let part = self.micro.part(std::slice::from_ref(&range));
        let [tokens, targets] = [(&part.tokens, &self.tokens), (&part.targets, &self.targets)]
            .map(|(of, all)| of.iter().map(|i| all[*i as usize]).collect());
        Self { micro: part.micro, tokens, targets }
    }

    /// The same tokens, without targets.
    pub fn without_targets(self) -> Self {
        let (targets, weights) = (Vec::new(), Vec::new());
        let micro = Micro { targets, weights, teacher: Teacher::default(), ..self.micro };
        Self { micro, targets: Vec::new(), ..self }
    }
}

impl Micro {
    /// The part of these token ranges.
    pub fn part(&self, ranges: &[Range<usize>]) -> Segments {
        let mut out = Segments::default();
        (out.micro.docs, out.micro.samples) = (self.docs.clone(), self.samples.clone());
        out.micro.teacher = Teacher { kept: self.teacher.kept, ..Teacher::default() };
        for range in ranges {
            let first = out.micro.ids.len();
            out.micro.ids.extend(&self.ids[range.clone()]);
            out.micro.positions.extend(&self.positions[range.clone()]);
            out.tokens.extend(range.start as u32..range.end as u32);
            let before = |end: usize| self.targets.partition_point(|(query, _)| (*query as usize) < end);
            let targets = before(range.start)..before(range.end);
            let local = |(query, id): &(u32, u32)| (query - range.start as u32 + first as u32, *id);
            out.micro.targets.extend(self.targets[targets.clone()].iter().map(local));
            out.micro.weights.extend(self.weights.get(targets.clone()).unwrap_or_default());
            let kept = self.teacher.kept * targets.start..self.teacher.kept * targets.end;
            out.micro.teacher.ids.extend(&self.teacher.ids[kept.clone()]);
            out.micro.teacher.logits.extend(&self.teacher.logits[kept]);
            out.targets.extend(targets.start as u32..targets.end as u32);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranges cover every token once, are cut at multiples of [`CUT`], and are even in tokens; of a single document,
    /// even in visible pairs too.
    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "a rank may have one segment")]
    fn segments_cover_a_micro_batch() {
        let long: Vec<usize> = vec![7000];
        for docs in
            [vec![], vec![1], vec![127, 2], vec![300, 300, 300], vec![90; 100], vec![5000, 3, 200], long]
        {
            let tokens: usize = docs.iter().sum();
            for ranks in [1, 2, 3, 4, 8] {
                let all = segments(&docs, ranks);
                let mut ranges: Vec<Range<usize>> = all.concat();
                ranges.sort_by_key(|r| r.start);
                assert_eq!(all.len(), ranks);
                assert_eq!(ranges.iter().map(|r| r.len()).sum::<usize>(), tokens, "{docs:?} {ranks}");
                assert!(ranges.windows(2).all(|w| w[0].end == w[1].start), "{docs:?} {ranks}: {ranges:?}");
                assert!(ranges.iter().all(|r| r.start % CUT == 0 && (r.end % CUT == 0 || r.end == tokens)));
                let sizes = all.iter().map(|own| own.iter().map(|r| r.len()).sum::<usize>());
                assert!(sizes.clone().all(|n| n <= tokens / ranks + 2 * CUT), "{docs:?} {ranks}: {all:?}");
            }
        }
        let pairs =
            |own: &[Range<usize>]| own.iter().map(|r| (r.end * r.end - r.start * r.start) / 2).sum::<usize>();
        let work: Vec<usize> = segments(&[128 * 64], 4).iter().map(|own| pairs(own)).collect();
        assert!(work.iter().all(|w| *w == work[0]), "{work:?}");
        assert_eq!(segments(&[200], 4), [vec![0..128], vec![], vec![], vec![128..200]]);
        assert_eq!(segments(&[256, 256], 2), [vec![0..256], vec![256..512]]);
    }

    /// Every target is in one part, with its weight and its teacher, whatever the cut.
    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "a rank may have one segment")]
    fn no_target_is_lost_or_doubled_at_a_cut() {
        let n = 300;
        let micro = Micro {
            ids: (0..n).collect(),
            positions: (0..n).map(|i| i % 100).collect(),
            docs: vec![100; 3],
            targets: (0..n).filter(|i| i % 100 != 99 && i % 7 != 0).map(|i| (i, i + 1)).collect(),
            ..Micro::default()
        };
        let count = micro.targets.len();
        let micro = Micro {
            weights: (0..count).map(|i| i as f32).collect(),
            teacher: Teacher { kept: 2, ids: (0..2 * count as u32).collect(), logits: vec![0.5; 2 * count] },
            ..micro
        };
        for cut in 0..=n as usize {
            let parts = [micro.part(&[cut..n as usize]), micro.part(&[0..cut])];
            let again = |part: &Segments| {
                [0..part.tokens.len() / 2, part.tokens.len() / 2..part.tokens.len()]
                    .map(|range| part.part(range))
            };
            let parts = if cut % 2 == 0 { parts.to_vec() } else { parts.iter().flat_map(again).collect() };
            let mut seen = vec![0; count];
            for part in &parts {
                assert_eq!(part.micro.ids, part.tokens);
                assert!(part.tokens.iter().zip(&part.micro.positions).all(|(t, p)| t % 100 == *p));
                for (i, number) in part.targets.iter().enumerate() {
                    seen[*number as usize] += 1;
                    let (query, id) = part.micro.targets[i];
                    assert_eq!((part.tokens[query as usize], id), micro.targets[*number as usize]);
                    assert_eq!(part.micro.weights[i], *number as f32);
                    assert_eq!(part.micro.teacher.ids[2 * i..2 * i + 2], [2 * number, 2 * number + 1]);
                }
            }
            assert!(seen.iter().all(|n| *n == 1), "{cut}");
        }
    }
}
