//! All sources of a recipe as one dataset.

use super::encode::{Encoder, Example, Read};
use super::error::{Error, Problem};
use super::files::files;
use super::format::Shape;
use super::reader::{RawRow, Rows};
use super::stats::Stats;
use super::{Tokenizer, pack};
use crate::error::Place;
use crate::log::rows_bar;
use crate::recipe::{self, Format, OnBadRow, OverLength, Part};
use crate::rng::{Purpose, Stream};
use indicatif::ProgressBar;
use rayon::prelude::*;
use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Rows that are tokenized together, and bytes that they may have.
const CHUNK: (usize, usize) = (4096, 16 << 20);
/// Rows that are left out and shown.
const SHOWN: usize = 5;

/// Tokenized samples, and the rows that they make.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// Samples, in the order of sources and files.
    pub examples: Vec<Example>,
    /// Rows of an epoch: which samples each holds; one each when nothing is packed. A sample whose source has a
    /// weight above 1 is in more than one.
    pub rows: Vec<Vec<usize>>,
    /// What was read and left out.
    pub stats: Stats,
    /// BLAKE3, in hexadecimal, of all rows: their samples' ids and labels, in order.
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
struct Loader<'a> {
    data: &'a recipe::Data,
    resolve: &'a dyn Fn(&str) -> PathBuf,
    tokenizer: Option<&'a Tokenizer>,
    vocab_size: usize,
    /// How many problems are collected; `None` stops at the first.
    collect: Option<usize>,
    problems: Vec<Error>,
    more: usize,
    examples: Vec<Example>,
    stats: Stats,
    bar: ProgressBar,
}

impl Dataset {
    /// Reads, tokenizes, mixes and packs a part of a recipe's data; what is evaluated on stays in file order.
    ///
    /// `resolve` gives the path of a source's file or folder. `vocab_size` is the number of rows of the model's
    /// embedding. A source's `weight` is how often an epoch holds each of its samples; of a fraction, a part that
    /// `seed` chooses.
    ///
    /// # Errors
    /// The first row that cannot be used (unless `on_bad_row = "skip"`), a file without rows, a source that leaves
    /// no sample, and sources that cannot be read.
    pub fn load(
        part: Part,
        cfg: &recipe::Data,
        resolve: &dyn Fn(&str) -> PathBuf,
        tokenizer: Option<&Tokenizer>,
        vocab_size: usize,
        seed: u64,
    ) -> Result<Dataset, Error> {
        let mut loader = Loader::new(cfg, resolve, tokenizer, vocab_size, None);
        let ranges = loader.sources(cfg.sources(part))?;
        let samples = Samples { examples: std::mem::take(&mut loader.examples), ranges };
        let (train, held_out) = samples.split(cfg.eval_share, seed);
        let samples = if part == Part::Train || cfg.eval_share == 0.0 { train } else { held_out };
        samples.dataset(part, cfg, loader.stats, seed)
    }

    /// Both parts of a recipe's data, as [`Dataset::load`] gives them; each row is read once.
    ///
    /// # Errors
    /// As [`Dataset::load`].
    pub fn load_both(
        cfg: &recipe::Data,
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
        let mut loader = Loader::new(cfg, resolve, tokenizer, vocab_size, None);
        let ranges = loader.sources(&cfg.train)?;
        let samples = Samples { examples: std::mem::take(&mut loader.examples), ranges };
        let (train, held_out) = samples.split(cfg.eval_share, seed);
        let eval = held_out.dataset(Part::Eval, cfg, loader.stats.clone(), seed)?;
        Ok((train.dataset(Part::Train, cfg, loader.stats, seed)?, Some(eval)))
    }

    /// What a run goes on with and its author should know, a sentence each: what texts lost or changed, what of the rows
    /// is not read, and documents that are longer than the model's `positions`.
    pub fn warnings(&self, positions: usize) -> Vec<String> {
        let mut out = self.stats.notes.told();
        let long = self.examples.iter().map(|e| e.ids.len()).filter(|n| *n > positions);
        let (count, longest) = long.fold((0, 0), |(count, longest), n| (count + 1, longest.max(n)));
        if count > 0 {
            let documents =
                if count == 1 { "1 document is".into() } else { format!("{count} documents are") };
            out.push(format!(
                "{documents} longer than the {positions} positions that the model is made for; the longest has \
                 {longest} tokens\n  hint: data.max_length = {positions}, or rope_scaling in model.override"
            ));
        }
        out
    }

    /// How many samples of another dataset are in this one too.
    pub fn shared_with(&self, other: &Dataset) -> usize {
        let ours: HashSet<&[u32]> = self.examples.iter().map(|e| e.ids.as_slice()).collect();
        other.examples.iter().filter(|e| ours.contains(e.ids.as_slice())).count()
    }

    /// All problems of a part of the data instead of the first: every bad row counts, whatever `on_bad_row` says. At
    /// most `limit` are kept.
    pub fn check(
        part: Part,
        cfg: &recipe::Data,
        resolve: &dyn Fn(&str) -> PathBuf,
        tokenizer: Option<&Tokenizer>,
        vocab_size: usize,
        seed: u64,
        limit: usize,
    ) -> Checked {
        let mut loader = Loader::new(cfg, resolve, tokenizer, vocab_size, Some(limit));
        let mut ranges = Vec::new();
        for (i, source) in cfg.sources(part).iter().enumerate() {
            match loader.source(i, source) {
                Ok(range) => ranges.push(range),
                Err(e) => {
                    loader.keep(e);
                    ranges.push(loader.examples.len()..loader.examples.len());
                }
            }
        }
        let problems = std::mem::take(&mut loader.problems);
        let more = loader.more;
        let samples = Samples { examples: std::mem::take(&mut loader.examples), ranges };
        let dataset = match samples.examples.is_empty() {
            true => None,
            false => {
                let (train, held_out) = samples.split(cfg.eval_share, seed);
                let samples = if part == Part::Train || cfg.eval_share == 0.0 { train } else { held_out };
                samples.dataset(part, cfg, loader.stats, seed).ok()
            }
        };
        Checked { problems, more, dataset }
    }
}

impl<'a> Loader<'a> {
    fn new(
        data: &'a recipe::Data,
        resolve: &'a dyn Fn(&str) -> PathBuf,
        tokenizer: Option<&'a Tokenizer>,
        vocab_size: usize,
        collect: Option<usize>,
    ) -> Self {
        Self {
            data,
            resolve,
            tokenizer,
            vocab_size,
            collect,
            problems: Vec::new(),
            more: 0,
            examples: Vec::new(),
            stats: Stats::default(),
            bar: rows_bar(),
        }
    }

    fn sources(&mut self, sources: &[recipe::Source]) -> Result<Vec<Range<usize>>, Error> {
        sources.iter().enumerate().map(|(i, s)| self.source(i, s)).collect()
    }

    fn keep(&mut self, problem: Error) {
        if self.problems.len() < self.collect.unwrap_or(0) {
            self.problems.push(problem);
        } else {
            self.more += 1;
        }
    }

    /// Reads one source; gives the range of its examples.
    fn source(&mut self, index: usize, source: &recipe::Source) -> Result<Range<usize>, Error> {
        let shape = Shape::new(source, self.data.mask)?;
        if !(source.weight.is_finite() && source.weight > 0.0) {
            let message = format!("weight = {} is not a number above 0", source.weight);
            return Err(Error::Recipe { place: source.place.clone(), message });
        }
        self.needs(shape.format)?;
        let files = files(source, self.resolve)?;
        let start = self.examples.len();
        let encoder = Encoder {
            shape: &shape,
            data: self.data,
            tokenizer: self.tokenizer,
            vocab_size: self.vocab_size,
            source: index,
        };
        let (read, problems) = (self.stats.rows_read, self.problems.len() + self.more);
        let bar = self.bar.clone();
        let _cleared = Cleared(&bar);
        for file in &files {
            if let Err(e) = self.file(file, &encoder) {
                if self.collect.is_none() {
                    return Err(e);
                }
                self.keep(e);
            }
        }
        if self.examples.len() == start && self.problems.len() + self.more == problems {
            let first = self.stats.left_out.last().map(|l| format!("; the last: {l}")).unwrap_or_default();
            let message =
                format!("none of its {} rows can be trained on{first}", self.stats.rows_read - read);
            return Err(Error::Empty { file: source.source.clone(), message });
        }
        Ok(start..self.examples.len())
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

    fn file(&mut self, path: &Path, encoder: &Encoder<'_>) -> Result<(), Error> {
        let name = path.display().to_string();
        let at = |(line, column)| Place { file: name.clone(), line, column };
        let mut rows = Rows::open(path, encoder.shape)?;
        let mut any = false;
        loop {
            let mut chunk: Vec<RawRow> = Vec::new();
            let mut bytes = 0;
            while chunk.len() < CHUNK.0 && bytes < CHUNK.1 {
                let Some(row) = rows.next() else { break };
                let row = row?;
                bytes += row.bytes.as_ref().map_or(0, Vec::len);
                chunk.push(row);
            }
            if chunk.is_empty() {
                break;
            }
            any = true;
            let done: Vec<_> = chunk.par_iter().map(|row| one(row, encoder)).collect();
            self.bar.inc(done.len() as u64);
            for (place, result) in done {
                self.stats.rows_read += 1;
                match result {
                    Ok(read) => {
                        self.stats.truncated += usize::from(read.whole > read.example.ids.len());
                        self.stats.whole.push(small(read.whole));
                        if !read.notes.is_empty() {
                            self.stats.notes.add(&at(place), read.notes);
                        }
                        self.examples.push(read.example);
                    }
                    Err(problem) => self.left_out(at(place), problem)?,
                }
            }
        }
        if any {
            Ok(())
        } else {
            Err(Error::Empty { file: name.clone(), message: "the file holds no rows".into() })
        }
    }

    /// Counts a row that is left out, or makes it an error.
    fn left_out(&mut self, place: Place, problem: Problem) -> Result<(), Error> {
        // What the recipe asked to be left out is no error; nor is a mask that truncation emptied, but it is shown.
        let (count, asked) = match &problem {
            Problem::Bad(_) | Problem::Tokenizer(_) => (&mut self.stats.drops.bad, false),
            Problem::EmptyMask(_) => (&mut self.stats.drops.empty_mask, false),
            Problem::EmptyAfterTruncation { .. } => (&mut self.stats.drops.empty_after_truncation, true),
            Problem::TooLong { .. } => {
                (&mut self.stats.drops.too_long, self.data.over_length == OverLength::Drop)
            }
        };
        *count += 1;
        if let Problem::TooLong { tokens, .. } | Problem::EmptyAfterTruncation { tokens, .. } = &problem {
            self.stats.whole.push(small(*tokens));
        }
        let too_long = matches!(problem, Problem::TooLong { .. });
        if self.stats.left_out.len() < SHOWN {
            let what = format!("{place}: {problem}");
            self.stats.left_out.push(what.lines().next().unwrap_or_default().to_string());
        }
        let error = Error::Row { place, problem };
        match self.collect {
            _ if asked => Ok(()),
            Some(_) => {
                self.keep(error);
                Ok(())
            }
            // over_length = "error" stops whatever on_bad_row says
            None if self.data.on_bad_row == OnBadRow::Error || too_long => Err(error),
            None => Ok(()),
        }
    }
}

/// Samples, and which of them each source has.
struct Samples {
    examples: Vec<Example>,
    ranges: Vec<Range<usize>>,
}

impl Samples {
    /// Takes a share of each source's samples out, rounded, but all of none: what is left, and what was taken.
    fn split(self, share: f64, seed: u64) -> (Self, Self) {
        let none = || Self { examples: Vec::new(), ranges: Vec::new() };
        if share == 0.0 {
            return (self, none());
        }
        let (mut kept, mut taken) = (none(), none());
        let mut examples = self.examples.into_iter();
        for (source, range) in self.ranges.into_iter().enumerate() {
            let n = range.len();
            let count = ((share * n as f64).round() as usize).max(1).min(n.saturating_sub(1));
            let mut out = vec![false; n];
            for i in
                Stream::new(seed, Purpose::Split, 0, source as u64).permutation(n).into_iter().take(count)
            {
                out[i] = true;
            }
            let starts = [kept.examples.len(), taken.examples.len()];
            for (out, example) in out.into_iter().zip(examples.by_ref().take(n)) {
                if out { taken.examples.push(example) } else { kept.examples.push(example) }
            }
            kept.ranges.push(starts[0]..kept.examples.len());
            taken.ranges.push(starts[1]..taken.examples.len());
        }
        (kept, taken)
    }

    /// Mixes and packs.
    fn dataset(self, part: Part, data: &recipe::Data, mut stats: Stats, seed: u64) -> Result<Dataset, Error> {
        let Self { examples, ranges } = self;
        let rows = rows(part, &ranges, &|i| examples[i].ids.len(), data, seed)?;
        stats.count(&examples, &rows, data.max_length, data.pack);
        let hash = hash(&examples, &rows);
        Ok(Dataset { examples, rows, stats, hash })
    }
}

/// Mixes and packs samples of these lengths: the rows of an epoch. `ranges` are the samples of each source.
pub(super) fn rows(
    part: Part,
    ranges: &[Range<usize>],
    length: &dyn Fn(usize) -> usize,
    data: &recipe::Data,
    seed: u64,
) -> Result<Vec<Vec<usize>>, Error> {
    let mut order = Vec::new();
    for (i, (source, range)) in data.sources(part).iter().zip(ranges).enumerate() {
        mix(&mut order, range.clone(), source, seed, i)?;
    }
    if order.is_empty() && ranges.iter().any(|r| !r.is_empty()) {
        let place = data.sources(part).first().map(|s| s.place.clone()).unwrap_or_default();
        let message = format!("{}: by their weights no sample of the sources is in an epoch", part.key(data));
        return Err(Error::Recipe { place, message });
    }
    Ok(match (data.pack, data.shuffle && part == Part::Train) {
        (false, _) => order.into_iter().map(|i| vec![i]).collect(),
        (true, false) => pack::in_order(&order, length, data.max_length),
        (true, true) => pack::best_fit(&order, length, data.max_length, seed),
    })
}

/// A bar that is gone when its rows are read, or nothing more is.
struct Cleared<'a>(&'a ProgressBar);

impl Drop for Cleared<'_> {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// A row's example; the place of its problem otherwise.
type One = ((usize, usize), Result<Read, Problem>);

fn one(row: &RawRow, encoder: &Encoder<'_>) -> One {
    match row.parse() {
        Ok(value) => ((row.line, 0), encoder.encode(value, row.line)),
        Err(e) => ((e.line, e.column), Err(Problem::Bad(e.message))),
    }
}

fn small(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Appends the samples of a source as often as its weight says.
fn mix(
    order: &mut Vec<usize>,
    range: Range<usize>,
    source: &recipe::Source,
    seed: u64,
    index: usize,
) -> Result<(), Error> {
    let n = range.len();
    let stream = Stream::new(seed, Purpose::Mix, 0, index as u64);
    // a part of a sample is one or none, so that over the seeds it is the weight; no permutation takes the first number
    let exact = source.weight * n as f64;
    let whole = exact.floor();
    let wanted = whole + f64::from(u8::from(f64::from(stream.uniform(0)) < exact - whole));
    if wanted > f64::from(u32::MAX) {
        let message = format!("weight = {} makes {wanted} samples of {n}; that is too many", source.weight);
        return Err(Error::Recipe { place: source.place.clone(), message });
    }
    if n == 0 {
        return Ok(());
    }
    let wanted = wanted as usize;
    for _ in 0..wanted / n {
        order.extend(range.clone());
    }
    let mut part = stream.permutation(n);
    part.truncate(wanted % n);
    part.sort_unstable();
    order.extend(part.into_iter().map(|i| range.start + i));
    Ok(())
}

fn hash(examples: &[Example], rows: &[Vec<usize>]) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut bytes = Vec::new();
    for row in rows {
        bytes.clear();
        bytes.extend((row.len() as u64).to_le_bytes());
        for example in row.iter().map(|i| &examples[*i]) {
            bytes.extend((example.ids.len() as u64).to_le_bytes());
            bytes.extend(example.ids.iter().flat_map(|i| i.to_le_bytes()));
            bytes.extend(example.labels.iter().flat_map(|l| l.to_le_bytes()));
        }
        hasher.update(&bytes);
    }
    hasher.finalize().to_hex().to_string()
}
