//! Builds the rows of an epoch: selects samples and packs them.

use super::mix::{self, Mixture};
use super::order::MAX_IN_MEMORY;
use super::pack;
use super::packed::{Rows, RowsWriter};
use super::storage::WorkingStorage;
use crate::error::Error;
use crate::token_cache::{
    record::{Item, saturating_u32},
    samples::{Reader, Samples},
    stats::Counts,
};
use ft_base::rng::{Purpose, Stream};
use ft_recipe::Part;

/// If samples exceed the in-memory limit, packing proceeds in parts of a fourth of the limit, to save
/// memory.
const PARTS: usize = 4;

/// The rows of an epoch.
pub(super) struct Epoch {
    pub rows: Rows,
    /// Sample lengths of the epoch.
    pub lengths: Counts,
    /// BLAKE3 hash of the sample tokens and the row contents in order.
    pub hash: String,
}

impl Epoch {
    /// Mixes and packs samples.
    ///
    /// # Errors
    /// Weights that leave too few or too many samples, or nothing to evaluate on, and lists that can no longer be read.
    pub fn new(
        part: Part,
        samples: &Samples,
        data: &ft_recipe::Data,
        seed: u64,
        storage: &WorkingStorage,
    ) -> Result<Self, Error> {
        let ranges = samples.ranges();
        let fail = |message: String| {
            let place = data.sources(part).first().map(|s| s.place.clone()).unwrap_or_default();
            Err(Error::Recipe { place, message: format!("{}: {message}", part.key(data)) })
        };
        let mut mix = Mixture::default();
        let held_out = part == Part::Eval && data.eval_share > 0.0;
        for (i, (source, range)) in data.sources(part).iter().zip(&ranges).enumerate() {
            // the weight of a training source does not apply to held-out samples
            let weight = if held_out { 1.0 } else { source.weight };
            mix.push(range.clone(), (source, weight), mix::stream(seed, i), storage)?;
        }
        let n = mix.len();
        if n == 0 && held_out {
            return fail(
                "no sample is held out: every source keeps one to train on\n  hint: more rows, or rows to evaluate on \
                 in data.eval"
                    .into(),
            );
        }
        if n == 0 && ranges.iter().any(|r| !r.is_empty()) {
            return fail("by their weights no sample of the sources is in an epoch".into());
        }
        if u32::try_from(n.max(samples.len())).is_err() {
            return fail(format!("{} samples an epoch are too many", n.max(samples.len())));
        }
        let mut reader = samples.reader();
        let mut places = mix.reader();
        let mut item = |at: usize| reader.item(places.at(at)? as usize);
        let rows = if data.packs() { RowsWriter::packed(&storage.scratch) } else { RowsWriter::default() };
        let mut builder = EpochBuilder::new(samples, rows);
        let shuffled = data.shuffle && part == Part::Train;
        match (data.packs(), shuffled) {
            (false, _) => (0..n).try_for_each(|at| builder.row(&[item(at)?]))?,
            (true, false) => {
                pack::in_order((0..n).map(item), data.max_length, &mut |row| builder.row(row))?;
            }
            (true, true) => {
                let parts = if n <= storage.held { 1 } else { n.div_ceil((storage.held / PARTS).max(1)) };
                let mut items = Vec::with_capacity(n.div_ceil(parts));
                // strided, so every part is a uniform draw from all data
                for part in 0..parts {
                    items.clear();
                    for at in (part..n).step_by(parts) {
                        items.push(item(at)?);
                    }
                    let stream = Stream::new(seed, Purpose::Pack, part as u64, 0);
                    pack::best_fit(&items, data.max_length, stream, &mut |row| builder.row(row))?;
                }
            }
        }
        if part == Part::Eval && n > 0 && !builder.weighs {
            let why = "all samples have a weight of 0, so nothing is evaluated";
            return fail(format!("{why}\n  hint: leave the weight out of some rows"));
        }
        builder.finish(mix, shuffled)
    }
}

/// Rows under construction.
struct EpochBuilder<'a> {
    rows: RowsWriter,
    lengths: Counts,
    hasher: blake3::Hasher,
    reader: Reader<'a>,
    bytes: Vec<u8>,
    /// Whether a target has a weight above 0.
    weighs: bool,
}

impl<'a> EpochBuilder<'a> {
    fn new(samples: &'a Samples, rows: RowsWriter) -> Self {
        let mut hasher = blake3::Hasher::new();
        samples.hashes().for_each(|h| {
            hasher.update(h.as_bytes());
        });
        let (lengths, reader) = (Counts::default(), samples.reader());
        Self { rows, lengths, hasher, reader, bytes: Vec::new(), weighs: false }
    }

    fn row(&mut self, items: &[Item]) -> Result<(), Error> {
        self.bytes.clear();
        self.bytes.extend(saturating_u32(items.len()).to_le_bytes());
        for item in items {
            let (source, number) = self.reader.place(item.sample as usize)?;
            self.bytes.extend(
                [saturating_u32(source), saturating_u32(number), item.tokens]
                    .into_iter()
                    .flat_map(u32::to_le_bytes),
            );
            item.documents().for_each(|tokens| self.lengths.add(tokens, 1));
            self.weighs |= item.weight > 0.0;
        }
        self.hasher.update(&self.bytes);
        self.rows.row(items)
    }

    fn finish(mut self, mix: Mixture, shuffled: bool) -> Result<Epoch, Error> {
        let rows = self.rows.finish(mix)?;
        if shuffled && rows.len() > MAX_IN_MEMORY {
            // earlier versions held permutations of any length, and so order these rows differently
            self.hasher.update(b"computed order");
        }
        let hash = self.hasher.finalize().to_hex().to_string();
        Ok(Epoch { rows, lengths: self.lengths, hash })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token_cache::bytes::Scratch;

    /// A run started with a held permutation is not resumed with a computed one; all other runs are.
    #[test]
    fn a_computed_order_has_a_hash_of_its_own() -> Result<(), Error> {
        let samples = Samples::default();
        let hash = |rows: usize, shuffled| {
            let mut builder = EpochBuilder::new(&samples, RowsWriter::packed(&Scratch::default()));
            (0..rows).try_for_each(|_| builder.row(&[]))?;
            Ok::<_, Error>(builder.finish(Mixture::default(), shuffled)?.hash)
        };
        assert_eq!(hash(MAX_IN_MEMORY, true)?, hash(MAX_IN_MEMORY, false)?);
        assert_ne!(hash(MAX_IN_MEMORY + 1, true)?, hash(MAX_IN_MEMORY + 1, false)?);
        Ok(())
    }
}
