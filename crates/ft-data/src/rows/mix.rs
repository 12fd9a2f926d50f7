//! Samples of an epoch, drawn from the sources by weight.

use super::order::Permutation;
use super::storage::WorkingStorage;
use crate::error::Error;
use crate::token_cache::{
    bytes::{List, Window},
    record::saturating_u32,
};
use ft_base::rng::{Purpose, Stream};
use std::ops::Range;

/// A weight above the first is refused if it makes more samples than the second: rows are made sample by sample, and no
/// mixture needs as many.
const MOST_REPEATED: (f64, f64) = (100.0, (1u64 << 26) as f64);

/// The samples of an epoch: all sources in order, repeated by weight.
#[derive(Clone, Debug, Default)]
pub(super) struct Mixture {
    ranges: Vec<SampleRange>,
}

#[derive(Clone, Debug)]
struct SampleRange {
    /// Number of samples before this range.
    before: usize,
    len: usize,
    selection: Selection,
}

#[derive(Clone, Debug)]
enum Selection {
    /// A source in full, repeated.
    All(Range<usize>),
    /// A subset of a source.
    Subset(List),
}

impl Mixture {
    /// Appends the samples `range` of the next source, repeated by `weight`.
    ///
    /// # Errors
    /// A weight that yields too many samples, and lists that can no longer be read.
    pub fn push(
        &mut self,
        range: Range<usize>,
        (source, weight): (&ft_recipe::Source, f64),
        stream: Stream,
        storage: &WorkingStorage,
    ) -> Result<(), Error> {
        let n = range.len();
        // stochastic rounding, so the expectation over seeds equals the weight; permutations never use
        // number 0 of a stream
        let exact = weight * n as f64;
        let whole = exact.floor();
        let wanted = whole + f64::from(u8::from(f64::from(stream.uniform(0)) < exact - whole));
        let (repetitions, most) = MOST_REPEATED;
        if wanted > f64::from(u32::MAX) || (weight > repetitions && wanted > most) {
            let message = format!(
                "weight = {weight} makes {wanted} samples of {n}; that is too many\n  hint: a weight is relative \
                 to the other sources; run.epochs or run.steps repeat all"
            );
            return Err(Error::recipe(source, message));
        }
        if n == 0 {
            return Ok(());
        }
        let wanted = wanted as usize;
        let part = wanted % n;
        self.append(wanted - part, Selection::All(range.clone()));
        if part > 0 {
            let (chosen, mut list) =
                (Permutation::new(stream, n, storage.held).choose(part), storage.scratch.list());
            for i in (0..n).filter(|i| chosen(*i)) {
                list.push(saturating_u32(range.start + i))?;
            }
            self.append(part, Selection::Subset(list.finish()?));
        }
        Ok(())
    }

    fn append(&mut self, len: usize, selection: Selection) {
        if len > 0 {
            self.ranges.push(SampleRange { before: self.len(), len, selection });
        }
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.ranges.last().map_or(0, |p| p.before + p.len)
    }

    /// Memory in use, in bytes.
    pub fn resident(&self) -> u64 {
        let of = |p: &SampleRange| match &p.selection {
            Selection::All(_) => 0,
            Selection::Subset(list) => list.resident(),
        };
        self.ranges.iter().map(of).sum()
    }

    pub fn reader(&self) -> MixtureReader<'_> {
        MixtureReader { mix: self, windows: self.ranges.iter().map(|_| Window::default()).collect() }
    }
}

/// Reads the samples of an epoch by position.
pub(super) struct MixtureReader<'a> {
    mix: &'a Mixture,
    windows: Vec<Window>,
}

impl MixtureReader<'_> {
    /// The sample at position `at < len`.
    pub fn at(&mut self, at: usize) -> Result<u32, Error> {
        let number = self.mix.ranges.partition_point(|p| p.before <= at).saturating_sub(1);
        let Some(range) = self.mix.ranges.get(number) else { return Ok(u32::MAX) };
        let within = at - range.before;
        match &range.selection {
            Selection::All(range) => Ok(saturating_u32(range.start + within % range.len())),
            Selection::Subset(list) => list.at(&mut self.windows[number], within),
        }
    }
}

/// The random stream for the subset of source `index`.
pub(crate) fn stream(seed: u64, index: usize) -> Stream {
    Stream::new(seed, Purpose::Mix, 0, index as u64)
}
