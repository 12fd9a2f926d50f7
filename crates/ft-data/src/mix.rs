//! What an epoch holds of each source, by its weight.

use super::bytes::{List, Scratch, Window};
use super::error::Error;
use super::order::Order;
use super::record::small;
use ft_base::rng::{Purpose, Stream};
use std::ops::Range;

/// The samples of an epoch: those of each source in order, as often as its weight says.
#[derive(Clone, Debug, Default)]
pub(super) struct Mix {
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug)]
struct Piece {
    /// How many samples the epoch has before these.
    before: usize,
    len: usize,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    /// All of a source, again and again.
    All(Range<usize>),
    /// A part of one.
    Part(List),
}

impl Mix {
    /// Appends the samples of the next source, which have these numbers.
    ///
    /// # Errors
    /// A weight that makes more samples than there are numbers for; a list that cannot be read any more.
    pub fn push(
        &mut self,
        range: Range<usize>,
        source: &ft_recipe::Source,
        stream: Stream,
        (scratch, held): (&Scratch, usize),
    ) -> Result<(), Error> {
        let n = range.len();
        // a part of a sample is one or none, so that over the seeds it is the weight; no order takes the first number
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

    /// How many samples there are.
    pub fn len(&self) -> usize {
        self.pieces.last().map_or(0, |p| p.before + p.len)
    }

    /// Bytes that it takes in memory.
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

/// Reads the samples of an epoch by their places.
pub(super) struct MixReader<'a> {
    mix: &'a Mix,
    windows: Vec<Window>,
}

impl MixReader<'_> {
    /// The sample at place `at`, which is below the number of them.
    ///
    /// # Errors
    /// A list that cannot be read any more.
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

/// The stream that chooses parts of source `index`.
pub(super) fn stream(seed: u64, index: usize) -> Stream {
    Stream::new(seed, Purpose::Mix, 0, index as u64)
}
