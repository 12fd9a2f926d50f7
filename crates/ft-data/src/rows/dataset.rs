//! All sources of a recipe, as one dataset.

use super::epoch::Epoch;
use super::order::Permutation;
use super::packed::Rows;
use super::storage::WorkingStorage;
use crate::error::{Error, Problems};
use crate::read::files::{Kind, files, files_and_ignored, kind};
use crate::shape::{example::Example, schema::Schema};
use crate::token_cache::{
    cache::{CacheEntry, CacheKey, Strict, warn_uncached},
    pass::{PassError, SourcePass},
    samples::{Samples, StoreWriter, TokenStore},
    stats::{SourceStats, Stats},
};
use crate::tokenize::{encode::Encoder, model_files::template_of, model_key::ModelKey, tokenizer::Tokenizer};
use ft_base::rng::{Purpose, Stream};
use ft_base::store::{self, hash::KnownHash};
use ft_base::terminal::rows_bar;
use ft_recipe::{Format, OnBadRow, OverLength, Part, Recipe, ScoreTargets};
use indicatif::ProgressBar;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tokenized samples, packed into rows.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// Samples, in the order of sources and files.
    pub samples: Samples,
    /// Rows of an epoch. Without packing, one sample per row. Samples of sources with a weight above 1
    /// occur several times.
    pub rows: Rows,
    /// Targets of a score head.
    pub scores: ScoreTargets,
    /// Counts of rows read and dropped.
    pub stats: Stats,
    /// BLAKE3 hash of the sample tokens and the row contents in order, in hexadecimal.
    pub hash: String,
}

/// Result of [`Dataset::check`].
#[derive(Debug)]
pub struct Checked {
    /// The first problems, in order, up to the limit.
    pub problems: Vec<Error>,
    /// Number of further problems.
    pub more: usize,
    /// The training data without bad rows; `None` if empty.
    pub train: Option<Dataset>,
    /// The evaluation data without bad rows; `None` if empty.
    pub eval: Option<Dataset>,
}

/// State of loading a list of sources.
pub(crate) struct Loader<'a> {
    data: &'a ft_recipe::Data,
    resolve: &'a dyn Fn(&str) -> PathBuf,
    tokenizer: Option<&'a Tokenizer>,
    vocab_size: usize,
    /// The token cache, if enabled.
    cache: Option<PathBuf>,
    problems: Problems,
    samples: Samples,
    stats: Stats,
    bar: ProgressBar,
    storage: WorkingStorage,
    /// Cache files written by this load.
    written: Vec<KnownHash>,
}

impl Dataset {
    /// Builds a dataset from samples in memory, with rows as lists of sample numbers. Leaves the counts
    /// empty.
    ///
    /// # Errors
    /// None in practice, for samples in memory.
    pub fn of(examples: &[Example], rows: &[Vec<usize>]) -> Result<Dataset, Error> {
        let samples = Samples::of(examples)?;
        let rows = Rows::of(rows, &samples)?;
        Ok(Dataset {
            samples,
            rows,
            scores: ScoreTargets::None,
            stats: Stats::default(),
            hash: String::new(),
        })
    }

    /// Reads, tokenizes, mixes and packs a part of a recipe's data. Evaluation data stays in file order.
    ///
    /// `resolve` returns the path of a source's file or folder. `vocab_size` is the number of rows of the
    /// model's embedding. A source's `weight` is the number of repetitions per epoch; a fractional weight
    /// selects a random subset by `seed`. Cached tokens are reused (`data.cache`).
    ///
    /// # Errors
    /// The first bad row (unless `on_bad_row = "skip"`), files without rows, sources without usable rows,
    /// and unreadable sources.
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

    /// Loads both parts of a recipe's data, as by [`Dataset::load`]; reads every row once.
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
        let Loader { samples, stats, storage, written, .. } = loader;
        let (train, held_out) = split(samples, cfg.eval_share, seed, &storage)?;
        let eval = dataset(held_out, Part::Eval, cfg, stats.clone(), seed, &storage)?;
        let train = dataset(train, Part::Train, cfg, stats, seed, &storage)?;
        written.iter().for_each(KnownHash::keep);
        Ok((train, Some(eval)))
    }

    /// Loads both parts as far as possible, and collects all problems, at most `limit` of them.
    pub fn check(
        cfg: &ft_recipe::Data,
        resolve: &dyn Fn(&str) -> PathBuf,
        tokenizer: Option<&Tokenizer>,
        vocab_size: usize,
        seed: u64,
        limit: usize,
    ) -> Checked {
        Loader::new(cfg, resolve, tokenizer, vocab_size).collecting(limit).check(seed)
    }
}

/// Cached samples and rows of a part of a recipe's data, without reading data or loading a tokenizer. `dir`
/// is the model folder, if local. `None` if the cache is incomplete or out of date.
pub fn cached_rows(r: &Recipe, dir: Option<&Path>, vocab: usize, part: Part) -> Option<(Samples, Rows)> {
    cached_rows_in(&store::cache_folder()?, r, dir, vocab, part)
}

pub(crate) fn cached_rows_in(
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
    let tokenizes = dir.filter(|d| d.join("tokenizer.json").is_file());
    let model = tokenizes.and_then(|d| ModelKey::of(d, template.as_deref()));
    let own = || dir.is_some_and(|d| template_of(d).is_ok_and(|t| t.is_some()));
    let has_template = template.is_some() || own();
    let mut samples = Samples::default();
    for source in data.sources(part) {
        let files = files(source, &|s| r.resolve(s)).ok()?;
        let schema = Schema::new(source, data.mask, has_template).ok()?;
        let key = CacheKey {
            schema: &schema,
            source,
            data,
            has_tokenizer: tokenizes.is_some(),
            model: model.as_ref(),
            vocab_size: vocab,
            files: &files,
        };
        let strict = Strict(data.on_bad_row == OnBadRow::Error);
        samples.push(Arc::new(CacheEntry::of(cache, key)?.find(strict, false)?.0), None);
    }
    let storage = WorkingStorage::new(Some(cache));
    let samples = of_part(samples, part, data, r.run.seed, &storage).ok()?;
    let rows = Epoch::new(part, &samples, data, r.run.seed, &storage).ok()?.rows;
    Some((samples, rows))
}

impl<'a> Loader<'a> {
    pub fn new(
        data: &'a ft_recipe::Data,
        resolve: &'a dyn Fn(&str) -> PathBuf,
        tokenizer: Option<&'a Tokenizer>,
        vocab_size: usize,
    ) -> Self {
        // Entries of an earlier build would hide a change of the code from unit tests.
        let cache = store::cache_folder().filter(|_| data.cache && !cfg!(test));
        Self {
            data,
            resolve,
            tokenizer,
            vocab_size,
            problems: Problems::default(),
            samples: Samples::default(),
            stats: Stats::default(),
            bar: rows_bar(),
            storage: WorkingStorage::new(cache.as_deref()),
            written: Vec::new(),
            cache,
        }
    }

    /// Uses another cache folder.
    #[cfg(test)]
    pub fn with_cache(self, cache: &Path) -> Self {
        let cache = Some(cache.to_path_buf()).filter(|_| self.data.cache);
        Self { storage: WorkingStorage::new(cache.as_deref()), cache, ..self }
    }

    /// Spills lists above `few` bytes, and limits in-memory permutations to `held` samples.
    #[cfg(test)]
    pub fn with_limits(mut self, few: usize, held: usize) -> Self {
        self.storage.with_limits(few, held);
        self
    }

    /// Collects up to `limit` problems instead of stopping at the first.
    pub fn collecting(mut self, limit: usize) -> Self {
        self.problems.limit = Some(limit);
        self
    }

    pub fn load(mut self, part: Part, seed: u64) -> Result<Dataset, Error> {
        self.sources(self.data.sources(part))?;
        let samples = of_part(self.samples, part, self.data, seed, &self.storage)?;
        let dataset = dataset(samples, part, self.data, self.stats, seed, &self.storage)?;
        self.written.iter().for_each(KnownHash::keep);
        Ok(dataset)
    }

    pub fn check(mut self, seed: u64) -> Checked {
        let data = self.data;
        let (samples, stats) = self.checked_sources(&data.train);
        let (train, eval) = if data.eval_share > 0.0 {
            let parts = split(samples, data.eval_share, seed, &self.storage);
            let (train, eval) = parts.map_err(|e| self.problems.add(e)).unwrap_or_default();
            (Some((train, stats.clone())), Some((eval, stats)))
        } else {
            let eval = (!data.eval.is_empty()).then(|| self.checked_sources(&data.eval));
            (Some((samples, stats)), eval)
        };
        let [train, eval] = [(Part::Train, train), (Part::Eval, eval)].map(|(part, read)| {
            let held_out = part == Part::Eval && data.eval_share > 0.0;
            let (samples, stats) = read.filter(|(samples, _)| held_out || !samples.is_empty())?;
            let made = dataset(samples, part, data, stats, seed, &self.storage);
            // a consequence of earlier problems is not reported
            made.map_err(|e| self.problems.is_empty().then(|| self.problems.add(e))).ok()
        });
        let Problems { first: problems, more, .. } = self.problems;
        Checked { problems, more, train, eval }
    }

    /// Loads sources as far as possible.
    fn checked_sources(&mut self, sources: &[ft_recipe::Source]) -> (Samples, Stats) {
        for (i, source) in sources.iter().enumerate() {
            if let Err(e) = self.source(i, source) {
                self.problems.add(e);
                self.samples.push(Arc::new(TokenStore::default()), None);
            }
        }
        self.stats.reported = !self.problems.is_empty();
        (std::mem::take(&mut self.samples), std::mem::take(&mut self.stats))
    }

    fn sources(&mut self, sources: &[ft_recipe::Source]) -> Result<(), Error> {
        sources.iter().enumerate().try_for_each(|(i, s)| self.source(i, s))
    }

    /// Loads one source, from the cache if possible.
    fn source(&mut self, index: usize, source: &ft_recipe::Source) -> Result<(), Error> {
        let template = self.tokenizer.is_some_and(Tokenizer::has_template);
        let schema = Schema::new(source, self.data.mask, template)?;
        if !(source.weight.is_finite() && source.weight > 0.0) {
            let message = format!("weight = {} is not a number above 0", source.weight);
            return Err(Error::recipe(source, message));
        }
        self.needs(&schema)?;
        let (files, ignored) = files_and_ignored(source, self.resolve)?;
        if source.encoding.is_some()
            && files.iter().all(|f| matches!(kind(f), Some((Kind::Parquet | Kind::Arrow, _))))
        {
            return Err(Error::recipe(
                source,
                "encoding does nothing: Parquet and Arrow are always UTF-8".into(),
            ));
        }
        self.stats.not_read.extend(ignored);
        let (data, vocab_size) = (self.data, self.vocab_size);
        let (has_tokenizer, model) = (self.tokenizer.is_some(), self.tokenizer.and_then(Tokenizer::key));
        let key = CacheKey { schema: &schema, source, data, has_tokenizer, model, vocab_size, files: &files };
        let entry = self.cache.as_ref().and_then(|cache| CacheEntry::of(cache, key));
        let encoder = Encoder { schema: &schema, data, tokenizer: self.tokenizer, vocab_size, source: index };
        let (store, found) = match &entry {
            Some(entry) => self.load_cached(entry, &encoder, &files, source)?,
            None => self.read_files(&encoder, &files, source)?,
        };
        self.stats.add(&found);
        self.samples.push(Arc::new(store), None);
        match self.check_drops(&found, source) {
            Err(e) if self.problems.limit.is_some() => self.problems.add(e),
            other => other?,
        }
        Ok(())
    }

    /// Refuses a source with more than `data.drop_share` of the rows lost.
    fn check_drops(&self, found: &SourceStats, source: &ft_recipe::Source) -> Result<(), Error> {
        let (drops, rows, most) = (found.drops, found.rows_read, self.data.drop_share);
        let lost = drops.total() as f64 > most * rows as f64;
        // rows that stop the command are told themselves
        let Some(told) = drops.told(rows).filter(|_| lost && self.problems.is_empty()) else { return Ok(()) };
        let first = found.left_out.first().map(|(place, why)| format!(" (the first: {place}: {why})"));
        Err(Error::LeftOut {
            name: source.source.clone(),
            message: format!(
                "{told}{}, more than data.drop_share = {most}\n  hint: {}; or raise data.drop_share",
                first.unwrap_or_default(),
                drops.hint()
            ),
        })
    }

    /// Loads a source from the cache; on a miss, reads the source and writes the cache.
    fn load_cached(
        &mut self,
        entry: &CacheEntry<'_>,
        encoder: &Encoder<'_>,
        files: &[PathBuf],
        source: &ft_recipe::Source,
    ) -> Result<(TokenStore, SourceStats), Error> {
        let strict = Strict(self.data.on_bad_row == OnBadRow::Error);
        if let Some(hit) = entry.find(strict, true) {
            return Ok(hit);
        }
        let _lock = entry.lock();
        if let Some(hit) = entry.find(strict, true) {
            return Ok(hit);
        }
        let writer = entry.writer().map_err(PassError::Write);
        match writer.and_then(|writer| self.pass(writer, encoder, files, source)) {
            Ok((writer, found, true)) if entry.is_current() => match entry.commit(writer, &found) {
                Ok(written) => {
                    if let Some(hit) = entry.find(strict, false) {
                        self.written.push(written);
                        return Ok(hit);
                    }
                }
                Err(e) => warn_uncached(&e),
            },
            // not cached: a command that stops at bad rows would miss these
            Ok((writer, found, _)) => return Ok((writer.finish()?, found)),
            Err(PassError::Write(e)) => warn_uncached(&e),
            Err(PassError::Data(e)) => return Err(e),
        }
        self.read_files(encoder, files, source)
    }

    /// Reads a source into memory.
    fn read_files(
        &mut self,
        encoder: &Encoder<'_>,
        files: &[PathBuf],
        source: &ft_recipe::Source,
    ) -> Result<(TokenStore, SourceStats), Error> {
        match self.pass(StoreWriter::memory(), encoder, files, source) {
            Ok((writer, found, _)) => Ok((writer.finish()?, found)),
            Err(PassError::Data(e)) => Err(e),
            Err(PassError::Write(e)) => Err(e.into()),
        }
    }

    /// Reads a source. Also returns whether the pass had no problems.
    fn pass(
        &mut self,
        mut writer: StoreWriter,
        encoder: &Encoder<'_>,
        files: &[PathBuf],
        source: &ft_recipe::Source,
    ) -> Result<(StoreWriter, SourceStats, bool), PassError> {
        let mut pass = SourcePass::new(encoder, &mut self.problems, &self.bar, &mut writer);
        pass.over(files, source)?;
        let SourcePass { found, clean, .. } = pass;
        Ok((writer, found, clean))
    }

    /// Checks the model folder for files required by a format.
    fn needs(&self, schema: &Schema) -> Result<(), Error> {
        let (format, name) = (schema.format, schema.format.word());
        let Some(tokenizer) = self.tokenizer else {
            return match format {
                // rows of ids need none, and other rows are refused by place
                Format::Tokens | Format::Preference | Format::Unpaired | Format::Labeled => Ok(()),
                _ => Err(Error::ModelLacks(format!(
                    "the model has no tokenizer.json, which format = {name:?} needs (format = \"tokens\" does not)"
                ))),
            };
        };
        match format {
            _ if schema.chat && !tokenizer.has_template() => {
                let what = if format.has_forms() { "form = \"chat\"" } else { "format = \"messages\"" };
                Err(Error::ModelLacks(format!(
                    "the model has no chat template, which {what} needs; give one as data.chat_template = \
                     \"FILE.jinja\""
                )))
            }
            _ if !schema.chat
                && !matches!(format, Format::Tokens | Format::Labeled)
                && tokenizer.text_end().is_none() =>
            {
                Err(Error::ModelLacks(format!(
                    "the model names no end-of-sequence token (eos_token in tokenizer_config.json, or eos_token_id \
                     in generation_config.json, within the vocabulary), which format = {name:?} needs"
                )))
            }
            _ => Ok(()),
        }
    }
}

/// Selects the samples of `part`, if an `eval_share` is set.
fn of_part(
    samples: Samples,
    part: Part,
    data: &ft_recipe::Data,
    seed: u64,
    storage: &WorkingStorage,
) -> Result<Samples, Error> {
    if data.eval_share == 0.0 {
        return Ok(samples);
    }
    let (train, held_out) = split(samples, data.eval_share, seed, storage)?;
    Ok(if part == Part::Train { train } else { held_out })
}

/// Holds out a rounded share of every source, at least one document but never all. Returns kept and held-out
/// samples; pieces of a document stay together.
fn split(
    samples: Samples,
    share: f64,
    seed: u64,
    storage: &WorkingStorage,
) -> Result<(Samples, Samples), Error> {
    samples.split(&storage.scratch, &|source, n| {
        let count = ((share * n as f64).round() as usize).max(1).min(n.saturating_sub(1));
        Permutation::new(Stream::new(seed, Purpose::Split, 0, source as u64), n, storage.held).choose(count)
    })
}

/// Mixes and packs the samples of a part.
fn dataset(
    samples: Samples,
    part: Part,
    data: &ft_recipe::Data,
    mut stats: Stats,
    seed: u64,
    storage: &WorkingStorage,
) -> Result<Dataset, Error> {
    let Epoch { rows, lengths, hash } = Epoch::new(part, &samples, data, seed, storage)?;
    stats.examples = samples.len();
    let cut = if data.over_length == OverLength::Split { &mut stats.divided } else { &mut stats.truncated };
    if data.eval_share > 0.0 && *cut > 0 {
        // counted over both parts
        let mut reader = samples.reader();
        let is_cut = |i| reader.item(i).map(|item| usize::from(item.cut));
        *cut = (0..samples.len()).map(is_cut).sum::<Result<usize, Error>>()?;
    }
    stats.rows = rows.len();
    stats.tokens = rows.tokens as usize;
    stats.targets = rows.targets as usize;
    stats.lengths = lengths.lengths();
    let capacity = rows.len() as f64 * data.max_length as f64;
    stats.fill = if data.packs() && capacity > 0.0 { stats.tokens as f64 / capacity } else { 1.0 };
    Ok(Dataset { samples, rows, scores: data.scores.clone(), stats, hash })
}
