//! Samples of an epoch, drawn from the sources by weight.

use super::bytes::{List, Scratch, Window};
use super::error::Error;
use super::order::Order;
use super::record::small;
use ft_base::rng::{Purpose, Stream};
use std::ops::Range;

/// The samples of an epoch: all sources in order, repeated by weight.
#[derive(Clone, Debug, Default)]
pub(super) struct Mix {
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug)]
struct Piece {
    /// Number of samples before this piece.
    before: usize,
    len: usize,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    /// A source in full, repeated.
    All(Range<usize>),
    /// A subset of a source.
    Part(List),
}

impl Mix {
    /// Appends the samples `range` of the next source.
    ///
    /// # Errors
    /// A weight that yields too many samples, and lists that can no longer be read.
    pub fn push(
        &mut self,
        range: Range<usize>,
        source: &ft_recipe::Source,
        stream: Stream,
        (scratch, held): (&Scratch, usize),
    ) -> Result<(), Error> {
        let n = range.len();
        // stochastic rounding, so the expectation over seeds equals the weight; permutations never use
        // number 0 of a stream
        let exact = source.weight * n as f64;
        let whole = exact.floor();
        let wanted = whole + f64::from(u8::from(f64::from(stream.uniform(0)) < exact - whole));
        if wanted > f64::from(u32::MAX) {
            let message =
                format!("weight = {} makes {wanted} samples of {n}; that is too many", source.weight);
            return Err(Error::Recipe { place: source.place.clone(), message });
        }
        if n == 0 {
            return Ok(());
        }
        let wanted = wanted as usize;
        let part = wanted % n;
        self.append(wanted - part, What::All(range.clone()));
        if part > 0 {
            let (chosen, mut list) = (Order::new(stream, n, held).choose(part), scratch.list());
            for i in (0..n).filter(|i| chosen(*i)) {
                list.push(small(range.start + i))?;
            }
            self.append(part, What::Part(list.finish()?));
        }
        Ok(())
    }

    fn append(&mut self, len: usize, what: What) {
        if len > 0 {
            self.pieces.push(Piece { before: self.len(), len, what });
        }
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.pieces.last().map_or(0, |p| p.before + p.len)
    }

    /// Memory in use, in bytes.
    pub fn resident(&self) -> u64 {
        let of = |p: &Piece| match &p.what {
            What::All(_) => 0,
            What::Part(list) => list.resident(),
        };
        self.pieces.iter().map(of).sum()
    }

    pub fn reader(&self) -> MixReader<'_> {
        MixReader { mix: self, windows: self.pieces.iter().map(|_| Window::default()).collect() }
    }
}

/// Reads the samples of an epoch by position.
pub(super) struct MixReader<'a> {
    mix: &'a Mix,
    windows: Vec<Window>,
}

impl MixReader<'_> {
    /// The sample at position `at < len`.
    ///
    /// # Errors
    /// A list that can no longer be read.
    pub fn at(&mut self, at: usize) -> Result<u32, Error> {
        let number = self.mix.pieces.partition_point(|p| p.before <= at).saturating_sub(1);
        let Some(piece) = self.mix.pieces.get(number) else { return Ok(u32::MAX) };
        let within = at - piece.before;
        match &piece.what {
            What::All(range) => Ok(small(range.start + within % range.len())),
            What::Part(list) => list.at(&mut self.windows[number], within),
        }
    }
}

/// The random stream for the subset of source `index`.
pub(super) fn stream(seed: u64, index: usize) -> Stream {
    Stream::new(seed, Purpose::Mix, 0, index as u64)
}
