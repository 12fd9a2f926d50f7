//! All sources of a recipe as one dataset.

use super::cache::{Entry, Key, ModelKey, Strict, not_kept};
use super::encode::{Encoder, Example};
use super::epoch::{Epoch, Space};
use super::error::Error;
use super::files::{files, files_and_rest};
use super::format::Shape;
use super::order::Order;
use super::pass::{Pass, Stopped};
use super::samples::{Samples, Store, Writer};
use super::stats::{Found, Stats};
use super::{Rows, Tokenizer};
use ft_base::terminal::rows_bar;
use ft_recipe::{Format, OnBadRow, Part, Recipe};
use ft_base::rng::{Purpose, Stream};
use ft_base::store::{self, hash::Written};
use indicatif::ProgressBar;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tokenized samples, and the rows that they make.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// Samples, in the order of sources and files.
    pub samples: Samples,
    /// Rows of an epoch: which samples each holds; one each when nothing is packed. A sample whose source has a
    /// weight above 1 is in more than one.
    pub rows: Rows,
    /// What was read and left out.
    pub stats: Stats,
    /// BLAKE3, in hexadecimal, of the samples' tokens and of what all rows hold, in order.
    pub hash: String,
}

/// What [`Dataset::check`] found.
#[derive(Debug)]
pub struct Checked {
    /// Problems, in order, as many as asked for.
    pub problems: Vec<Error>,
    /// How many more there are.
    pub more: usize,
    /// The dataset without the rows that have problems; `None` when nothing is left of it.
    pub dataset: Option<Dataset>,
}

/// What a load needs beside its sources.
pub(super) struct Loader<'a> {
    data: &'a ft_recipe::Data,
    resolve: &'a dyn Fn(&str) -> PathBuf,
    tokenizer: Option<&'a Tokenizer>,
    vocab_size: usize,
    /// Where tokens are kept.
    cache: Option<PathBuf>,
    /// How many problems are collected; `None` stops at the first.
    collect: Option<usize>,
    problems: Vec<Error>,
    more: usize,
    samples: Samples,
    stats: Stats,
    bar: ProgressBar,
    space: Space,
    /// What it kept.
    written: Vec<Written>,
}

impl Dataset {
    /// Of samples in memory, and rows of them by their numbers; with nothing counted.
    ///
    /// # Errors
    /// None, of memory.
    pub fn of(examples: &[Example], rows: &[Vec<usize>]) -> Result<Dataset, Error> {
        let samples = Samples::of(examples)?;
        let rows = Rows::of(rows, &samples)?;
        Ok(Dataset { samples, rows, stats: Stats::default(), hash: String::new() })
    }

    /// Reads, tokenizes, mixes and packs a part of a recipe's data; what is evaluated on stays in file order.
    ///
    /// `resolve` gives the path of a source's file or folder. `vocab_size` is the number of rows of the model's
    /// embedding. A source's `weight` is how often an epoch holds each of its samples; of a fraction, a part that
    /// `seed` chooses. Tokens that an earlier command kept are taken (`data.cache`).
    ///
    /// # Errors
    /// The first row that cannot be used (unless `on_bad_row = "skip"`), a file without rows, a source that leaves
    /// no sample, and sources that cannot be read.
    pub fn load(
        part: Part,
        cfg: &ft_recipe::Data,
        resolve: &dyn Fn(&str) -> PathBuf,
        tokenizer: Option<&Tokenizer>,
        vocab_size: usize,
        seed: u64,
    ) -> Result<Dataset, Error> {
        Loader::new(cfg, resolve, tokenizer, vocab_size).load(part, seed)
    }

    /// Both parts of a recipe's data, as [`Dataset::load`] gives them; each row is read once.
    ///
    /// # Errors
    /// As [`Dataset::load`].
    pub fn load_both(
        cfg: &ft_recipe::Data,
        resolve: &dyn Fn(&str) -> PathBuf,
        tokenizer: Option<&Tokenizer>,
        vocab_size: usize,
        seed: u64,
    ) -> Result<(Dataset, Option<Dataset>), Error> {
        if cfg.eval_share == 0.0 {
            let load = |part| Self::load(part, cfg, resolve, tokenizer, vocab_size, seed);
            let train = load(Part::Train)?;
            return Ok((train, if cfg.eval.is_empty() { None } else { Some(load(Part::Eval)?) }));
        }
        let mut loader = Loader::new(cfg, resolve, tokenizer, vocab_size);
        loader.sources(&cfg.train)?;
        let Loader { samples, stats, space, written, .. } = loader;
        let (train, held_out) = split(samples, cfg.eval_share, seed, &space)?;
        let eval = dataset(held_out, Part::Eval, cfg, stats.clone(), seed, &space)?;
        let train = dataset(train, Part::Train, cfg, stats, seed, &space)?;
        written.iter().for_each(Written::keep);
        Ok((train, Some(eval)))
    }

    /// What a run goes on with and its author should know, a sentence each: what texts lost or changed, what of folders and
    /// rows is not read, and documents that are longer than the model's `positions`.
    ///
    /// # Errors
    /// A file of tokens that cannot be read any more.
    pub fn warnings(&self, positions: usize) -> Result<Vec<String>, Error> {
        let mut out = self.stats.not_read.clone();
        out.extend(self.stats.notes.told());
        let (mut count, mut longest, mut reader) = (0, 0, self.samples.reader());
        for i in 0..self.samples.len() {
            let n = reader.item(i)?.tokens as usize;
            if n > positions {
                (count, longest) = (count + 1, longest.max(n));
            }
        }
        if count > 0 {
            let documents =
                if count == 1 { "1 document is".into() } else { format!("{count} documents are") };
            out.push(format!(
                "{documents} longer than the {positions} positions that the model is made for; the longest has \
                 {longest} tokens\n  hint: data.max_length = {positions}, or rope_scaling in model.override"
            ));
        }
        Ok(out)
    }

    /// How many samples of another dataset are in this one too.
    ///
    /// # Errors
    /// A file of tokens that cannot be read any more.
    pub fn shared_with(&self, other: &Dataset) -> Result<usize, Error> {
        self.samples.shared_with(&other.samples)
    }

    /// All problems of a part of the data instead of the first: every bad row counts, whatever `on_bad_row` says. At
    /// most `limit` are kept.
    pub fn check(
        part: Part,
        cfg: &ft_recipe::Data,
        resolve: &dyn Fn(&str) -> PathBuf,
        tokenizer: Option<&Tokenizer>,
        vocab_size: usize,
        seed: u64,
        limit: usize,
    ) -> Checked {
        let mut loader = Loader::new(cfg, resolve, tokenizer, vocab_size);
        loader.listing(limit);
        loader.check(part, seed)
    }
}

/// What an earlier command kept of a part of a recipe's data: its samples, and the rows of an epoch. Neither data nor
/// tokens are read, and no tokenizer is loaded; `dir` is the model's folder, if it is here. `None` where not all of it is
/// kept, or the data are others now.
pub fn kept(r: &Recipe, dir: Option<&Path>, vocab: usize, part: Part) -> Option<(Samples, Rows)> {
    kept_in(&store::cache_folder()?, r, dir, vocab, part)
}

pub(super) fn kept_in(
    cache: &Path,
    r: &Recipe,
    dir: Option<&Path>,
    vocab: usize,
    part: Part,
) -> Option<(Samples, Rows)> {
    let data = &r.data;
    if !data.cache || data.sources(part).is_empty() {
        return None;
    }
    let template = data.chat_template.as_ref().map(|p| r.resolve(&p.display().to_string()));
    let model = dir.and_then(|d| ModelKey::of(d, template.as_deref()));
    let mut samples = Samples::default();
    for source in data.sources(part) {
        let files = files(source, &|s| r.resolve(s)).ok()?;
        let shape = Shape::new(source, data.mask).ok()?;
        let key =
            Key { shape: &shape, source, data, model: model.as_ref(), vocab_size: vocab, files: &files };
        let strict = Strict(data.on_bad_row == OnBadRow::Error);
        samples.push(Arc::new(Entry::of(cache, key)?.find(strict, false)?.0), None);
    }
    let space = Space::new(Some(cache));
    let samples = of_part(samples, part, data, r.run.seed, &space).ok()?;
    let rows = Epoch::new(part, &samples, data, r.run.seed, &space).ok()?.rows;
    Some((samples, rows))
}

impl<'a> Loader<'a> {
    pub fn new(
        data: &'a ft_recipe::Data,
        resolve: &'a dyn Fn(&str) -> PathBuf,
        tokenizer: Option<&'a Tokenizer>,
        vocab_size: usize,
    ) -> Self {
        let cache = store::cache_folder().filter(|_| data.cache);
        Self {
            data,
            resolve,
            tokenizer,
            vocab_size,
            collect: None,
            problems: Vec::new(),
            more: 0,
            samples: Samples::default(),
            stats: Stats::default(),
            bar: rows_bar(),
            space: Space::new(cache.as_deref()),
            written: Vec::new(),
            cache,
        }
    }

    /// With tokens kept in another folder than the user's.
    #[cfg(test)]
    pub fn keeping(self, cache: &Path) -> Self {
        let cache = Some(cache.to_path_buf()).filter(|_| self.data.cache);
        Self { space: Space::new(cache.as_deref()), cache, ..self }
    }

    /// With lists on disk from so many bytes on, and so many samples in an order at a time.
    #[cfg(test)]
    pub fn holding(mut self, few: usize, held: usize) -> Self {
        self.space.holding(few, held);
        self
    }

    /// With all problems, at most so many of them kept, instead of the first.
    pub fn listing(&mut self, limit: usize) {
        self.collect = Some(limit);
    }

    pub fn load(mut self, part: Part, seed: u64) -> Result<Dataset, Error> {
        self.sources(self.data.sources(part))?;
        let samples = of_part(self.samples, part, self.data, seed, &self.space)?;
        let dataset = dataset(samples, part, self.data, self.stats, seed, &self.space)?;
        self.written.iter().for_each(Written::keep);
        Ok(dataset)
    }

    pub fn check(mut self, part: Part, seed: u64) -> Checked {
        for (i, source) in self.data.sources(part).iter().enumerate() {
            if let Err(e) = self.source(i, source) {
                self.collected(e);
                self.samples.push(Arc::new(Store::default()), None);
            }
        }
        let (mut problems, more, space) = (self.problems, self.more, self.space);
        let dataset = match self.samples.is_empty() {
            true => None,
            false => of_part(self.samples, part, self.data, seed, &space)
                .and_then(|samples| dataset(samples, part, self.data, self.stats, seed, &space))
                // what follows from other problems is none of its own
                .map_err(|e| problems.is_empty().then(|| problems.push(e)))
                .ok(),
        };
        Checked { problems, more, dataset }
    }

    fn sources(&mut self, sources: &[ft_recipe::Source]) -> Result<(), Error> {
        sources.iter().enumerate().try_for_each(|(i, s)| self.source(i, s))
    }

    fn collected(&mut self, problem: Error) {
        if self.problems.len() < self.collect.unwrap_or(0) {
            self.problems.push(problem);
        } else {
            self.more += 1;
        }
    }

    /// Takes one source's samples from where they are kept, or reads it.
    fn source(&mut self, index: usize, source: &ft_recipe::Source) -> Result<(), Error> {
        let shape = Shape::new(source, self.data.mask)?;
        if !(source.weight.is_finite() && source.weight > 0.0) {
            let message = format!("weight = {} is not a number above 0", source.weight);
            return Err(Error::Recipe { place: source.place.clone(), message });
        }
        self.needs(shape.format)?;
        let (files, rest) = files_and_rest(source, self.resolve)?;
        self.stats.not_read.extend(rest);
        let (data, vocab_size) = (self.data, self.vocab_size);
        let model = self.tokenizer.and_then(Tokenizer::key);
        let key = Key { shape: &shape, source, data, model, vocab_size, files: &files };
        let entry = self.cache.as_ref().and_then(|cache| Entry::of(cache, key));
        let encoder = Encoder { shape: &shape, data, tokenizer: self.tokenizer, vocab_size, source: index };
        let (store, found) = match &entry {
            Some(entry) => self.kept(entry, &encoder, (&files, source))?,
            None => self.read(&encoder, (&files, source))?,
        };
        self.stats.add(&found);
        self.samples.push(Arc::new(store), None);
        Ok(())
    }

    /// What is kept of a source; else reads it and keeps that.
    fn kept(
        &mut self,
        entry: &Entry<'_>,
        encoder: &Encoder<'_>,
        what: (&[PathBuf], &ft_recipe::Source),
    ) -> Result<(Store, Found), Error> {
        let strict = Strict(self.collect.is_some() || self.data.on_bad_row == OnBadRow::Error);
        if let Some(kept) = entry.find(strict, true) {
            return Ok(kept);
        }
        let _turn = entry.turn();
        if let Some(kept) = entry.find(strict, true) {
            return Ok(kept);
        }
        let why = match entry.writer().map_err(Stopped::Write).and_then(|w| self.pass(w, encoder, what)) {
            Ok(Passed { writer, found, clean }) if clean && entry.holds() => match entry.keep(writer, &found)
            {
                Ok(written) => match entry.find(strict, false) {
                    Some(kept) => {
                        self.written.push(written);
                        return Ok(kept);
                    }
                    None => None,
                },
                Err(e) => Some(e),
            },
            // a command that stops at bad rows would not stop at these
            Ok(Passed { writer, found, .. }) => return Ok((writer.finish()?, found)),
            Err(Stopped::Write(e)) => Some(e),
            Err(Stopped::Data(e)) => return Err(e),
        };
        why.iter().for_each(not_kept);
        self.read(encoder, what)
    }

    /// Reads a source into memory.
    fn read(
        &mut self,
        encoder: &Encoder<'_>,
        what: (&[PathBuf], &ft_recipe::Source),
    ) -> Result<(Store, Found), Error> {
        match self.pass(Writer::memory(), encoder, what) {
            Ok(Passed { writer, found, .. }) => Ok((writer.finish()?, found)),
            Err(Stopped::Data(e)) => Err(e),
            Err(Stopped::Write(e)) => Err(e.into()),
        }
    }

    fn pass(
        &mut self,
        mut writer: Writer,
        encoder: &Encoder<'_>,
        (files, source): (&[PathBuf], &ft_recipe::Source),
    ) -> Result<Passed, Stopped> {
        let mut pass = Pass::new(encoder, self.collect, &self.bar, &mut writer);
        pass.over(files, &source.source)?;
        let Pass { found, problems, more, .. } = pass;
        let clean = problems.len() + more == 0;
        problems.into_iter().for_each(|p| self.collected(p));
        self.more += more;
        Ok(Passed { writer, found, clean })
    }

    /// What a format asks of the model's folder.
    fn needs(&self, format: Format) -> Result<(), Error> {
        let name = format!("{format:?}").to_lowercase();
        let Some(tokenizer) = self.tokenizer else {
            return match format {
                Format::Tokens => Ok(()),
                _ => Err(Error::ModelLacks(format!(
                    "the model has no tokenizer.json, which format = {name:?} needs (format = \"tokens\" does not)"
                ))),
            };
        };
        match format {
            Format::Messages if !tokenizer.has_template() => Err(Error::ModelLacks(
                "the model has no chat template, which format = \"messages\" needs; \
                 give one as data.chat_template = \"FILE.jinja\""
                    .into(),
            )),
            Format::Alpaca | Format::Completion | Format::Text if tokenizer.text_end().is_none() => {
                Err(Error::ModelLacks(format!(
                    "the model names no end-of-sequence token (eos_token in tokenizer_config.json, or eos_token_id \
                     in generation_config.json), which format = {name:?} needs"
                )))
            }
            _ => Ok(()),
        }
    }
}

/// What a pass made.
struct Passed {
    writer: Writer,
    found: Found,
    /// Whether there were no problems.
    clean: bool,
}

/// What of the samples of a part's sources is the part's.
fn of_part(
    samples: Samples,
    part: Part,
    data: &ft_recipe::Data,
    seed: u64,
    space: &Space,
) -> Result<Samples, Error> {
    if data.eval_share == 0.0 {
        return Ok(samples);
    }
    let (train, held_out) = split(samples, data.eval_share, seed, space)?;
    Ok(if part == Part::Train { train } else { held_out })
}

/// Takes a share of each source's samples out, rounded, but all of none: what is left, and what was taken.
fn split(samples: Samples, share: f64, seed: u64, space: &Space) -> Result<(Samples, Samples), Error> {
    samples.split(&space.scratch, &|source, n| {
        let count = ((share * n as f64).round() as usize).max(1).min(n.saturating_sub(1));
        Order::new(Stream::new(seed, Purpose::Split, 0, source as u64), n, space.held).choose(count)
    })
}

/// Mixes and packs.
fn dataset(
    samples: Samples,
    part: Part,
    data: &ft_recipe::Data,
    mut stats: Stats,
    seed: u64,
    space: &Space,
) -> Result<Dataset, Error> {
    let Epoch { rows, lengths, hash } = Epoch::new(part, &samples, data, seed, space)?;
    stats.count(samples.len(), &rows, &lengths, data.max_length, data.pack);
    Ok(Dataset { samples, rows, stats, hash })
}
