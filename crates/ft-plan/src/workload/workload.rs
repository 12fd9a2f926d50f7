//! Tokens of a micro-batch: upper bounds from the recipe, or measured if sample lengths are known.

use super::tokens::Tokens;
use crate::error::Error;
use ft_data::{Batches, Dataset, Rows, RowsReader, Samples};
use ft_engine::model::Config;
use ft_recipe::{COUNT, Format, Length, Part, Recipe, TOP_K, Task};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::path::Path;

/// Most steps to examine micro-batch by micro-batch; longer runs use the longest rows instead.
const LOOK: usize = 2048;

/// Token counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workload {
    /// The largest training micro-batch.
    pub train: Tokens,
    /// The largest evaluation micro-batch.
    pub eval: Option<Tokens>,
    /// Rows of a micro-batch; 0 until the plan knows them.
    pub micro_rows: usize,
    /// Optimizer steps, if known.
    pub steps: Option<u64>,
    /// Measured training data. Without it, rows are assumed full and all tokens supervised.
    pub epoch: Option<Epoch>,
}

/// One epoch of training data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Epoch {
    /// Samples read.
    pub samples: u64,
    /// Samples of the evaluation data.
    pub held_out: u64,
    /// Rows after packing.
    pub rows: u64,
    pub tokens: u64,
    /// Supervised targets.
    pub targets: u64,
    /// Tokens of the longest sample.
    pub longest: u64,
    /// Bytes of all samples in memory, evaluation included.
    pub resident: u64,
    /// Whether weights of sources repeat samples or leave some out.
    pub mixed: bool,
}

impl Epoch {
    /// Samples and rows in words.
    pub fn words(&self) -> String {
        let read = if self.mixed { " read," } else { " in" };
        format!("{} samples{read} {} rows", self.samples, self.rows)
    }
}

/// Rows and sample lengths of a dataset.
struct Sizes<'a> {
    rows: &'a Rows,
    samples: &'a Samples,
}

impl<'a> Sizes<'a> {
    fn of(d: &'a Dataset) -> Self {
        Self { rows: &d.rows, samples: &d.samples }
    }

    fn of_both((samples, rows): &'a (Samples, Rows)) -> Self {
        Self { rows, samples }
    }

    fn reader(&self) -> RowsReader<'a> {
        self.rows.reader(self.samples)
    }

    /// The longest rows combined into one micro-batch: an upper bound on any real one.
    fn of_longest(&self, micro: usize) -> Result<Tokens, ft_data::Error> {
        let (mut reader, mut longest) = (self.reader(), BinaryHeap::new());
        for row in 0..self.rows.len() {
            longest.push(Reverse((reader.tokens(row)?, row)));
            if longest.len() > micro {
                longest.pop();
            }
        }
        let rows = longest.into_sorted_vec().into_iter().map(|Reverse((_, row))| row);
        let mut largest = tokens(&mut reader, rows)?;
        largest.targets = largest.tokens;
        Ok(largest)
    }

    /// The largest micro-batch with rows in order.
    fn in_order(&self, micro: usize) -> Result<Tokens, ft_data::Error> {
        let (mut reader, rows) = (self.reader(), self.rows.len());
        let mut all = (0..rows).step_by(micro).map(|at| tokens(&mut reader, at..(at + micro).min(rows)));
        all.try_fold(Tokens::default(), |t, next| Ok(t.max(next?)))
    }

    fn epoch(&self) -> Epoch {
        let Rows { tokens, targets, longest, .. } = *self.rows;
        let (samples, rows) = (self.samples.len() as u64, self.rows.len() as u64);
        Epoch { samples, rows, tokens, targets, longest: u64::from(longest), ..Epoch::default() }
    }

    /// Bytes of samples and rows in memory.
    fn resident(&self) -> u64 {
        self.samples.resident() + self.rows.resident()
    }
}

/// The micro-batch of these rows, as made by `Micro::collate`.
fn tokens(
    reader: &mut RowsReader<'_>,
    rows: impl IntoIterator<Item = usize>,
) -> Result<Tokens, ft_data::Error> {
    let (mut docs, mut targets, mut weighted, mut kept) = (Vec::new(), 0, false, 0);
    for row in rows {
        for item in reader.items(row)? {
            docs.extend(item.documents());
            targets += item.targets as usize;
            weighted |= item.weighted;
            kept = kept.max(u64::from(item.kept));
        }
    }
    Ok(Tokens { weighted, kept, ..Tokens::of(&docs, targets) })
}

/// Samples and rows of a recipe's data, cached by an earlier command.
#[derive(Debug)]
pub struct Known {
    train: (Samples, Rows),
    eval: Option<(Samples, Rows)>,
}

impl Known {
    /// Loads the still valid cached samples; `dir` is the model's folder, if local.
    pub fn find(r: &Recipe, dir: Option<&Path>, config: &Config) -> Option<Self> {
        let find = |part| ft_data::cached_rows(r, dir, config.vocab, part);
        Some(Self { train: find(Part::Train)?, eval: find(Part::Eval) })
    }

    /// Workload of `r`; it may differ from the original recipe in micro-batch settings only.
    pub fn workload(&self, r: &Recipe) -> Workload {
        let eval = self.eval.as_ref().map(Sizes::of_both);
        let workload = Workload::of_sizes(r, &Sizes::of_both(&self.train), eval.as_ref());
        // unknown evaluation data is assumed full
        Workload { eval: workload.eval.or(Workload::of_recipe(r).eval), ..workload }
    }
}

/// Refuses epochs of more steps than allowed by `run.steps`.
///
/// # Errors
/// More than `COUNT` steps.
pub fn check_steps(r: &Recipe, steps: u64) -> Result<(), Error> {
    if steps <= COUNT {
        return Ok(());
    }
    let (place, epochs, batch) = (r.place("run.epochs"), r.run.epochs, r.run.batch_rows);
    Err(Error::Ignored(format!(
        "{place}: run.epochs = {epochs:?} comes to more than {COUNT} steps of run.batch_rows = {batch}\n  \
         hint: fewer epochs, or run.steps"
    )))
}

impl Workload {
    /// From the recipe alone: full rows, every token supervised, teachers as `ft logits` writes them by default.
    pub fn of_recipe(r: &Recipe) -> Self {
        let (rows, length) = (r.run.micro_rows.count(), r.data.max_length);
        let documents = if r.task.format() == Some(Format::Preference) { 2 * rows } else { rows };
        let docs = vec![length; documents];
        let targets = if r.task.has_scores() { 1 } else { length - 1 };
        let kept = if r.task == Task::Distill { TOP_K as u64 } else { 0 };
        let train = Tokens { kept, ..Tokens::of(&docs, documents.saturating_mul(targets)) };
        let steps = match r.run.length() {
            Length::Steps(n) => Some(n as u64),
            Length::Epochs(_) => None,
        };
        Self {
            micro_rows: 0,
            train,
            eval: (r.data.evaluates() || r.task.has_reference()).then_some(train),
            steps,
            epoch: None,
        }
    }

    /// From the tokenized data.
    pub fn of_data(r: &Recipe, train: &Dataset, eval: Option<&Dataset>) -> Self {
        let eval = eval.map(Sizes::of);
        Self::of_sizes(r, &Sizes::of(train), eval.as_ref())
    }

    /// Unreadable data is assumed full; the error is reported when the tokens are read. Other tasks than distillation
    /// leave teachers out.
    fn of_sizes(r: &Recipe, sizes: &Sizes<'_>, eval: Option<&Sizes<'_>>) -> Self {
        let mut w = Self::counted(r, sizes, eval).unwrap_or_else(|_| Self::of_recipe(r));
        if r.task != Task::Distill {
            w.eval.iter_mut().chain([&mut w.train]).for_each(|t| t.kept = 0);
        }
        w
    }

    fn counted(r: &Recipe, sizes: &Sizes<'_>, eval: Option<&Sizes<'_>>) -> Result<Self, ft_data::Error> {
        let resident = sizes.resident() + eval.map_or(0, Sizes::resident);
        let held_out = eval.map_or(0, |e| e.samples.len() as u64);
        let micro = r.run.micro_rows.count();
        let mut eval = eval.map(|e| e.in_order(micro)).transpose()?;
        if r.task.has_reference() {
            // the pass over all samples before training
            eval = Some(eval.unwrap_or_default().max(sizes.in_order(micro)?));
        }
        let batches = Batches::new(sizes.rows.len(), &r.run, r.data.shuffle);
        let mut train = Tokens::default();
        if batches.steps() <= LOOK {
            let mut reader = sizes.reader();
            for step in 0..batches.steps() {
                for rows in batches.rows(step).chunks(micro) {
                    train = train.max(tokens(&mut reader, rows.iter().copied())?);
                }
            }
        } else {
            train = sizes.of_longest(micro)?;
        }
        let mixed = r.data.train.iter().any(|source| source.weight != 1.0);
        let epoch = Some(Epoch { resident, held_out, mixed, ..sizes.epoch() });
        Ok(Self { train, eval, micro_rows: 0, steps: Some(batches.steps() as u64), epoch })
    }

    /// Whether sample lengths are known.
    pub fn measured(&self) -> bool {
        self.epoch.is_some()
    }

    /// The mean training micro-batch, at `micros` for `rows` rows; the largest one without measured data.
    pub fn mean(&self, rows: u64, micros: u64) -> Tokens {
        let (Some(epoch), largest) = (self.epoch, self.train) else { return self.train };
        let all = epoch.rows.saturating_mul(micros).max(1);
        let part = |n: u64, most: u64| n.saturating_mul(rows).div_ceil(all).min(most);
        let tokens = part(epoch.tokens, largest.tokens);
        Tokens {
            tokens,
            targets: part(epoch.targets, largest.targets),
            longest: largest.longest.min(tokens),
            reach: largest.reach.min(tokens),
            ..largest
        }
    }

    /// Bytes of the tokenized data in memory, if known.
    pub fn resident(&self) -> Option<u64> {
        self.epoch.map(|e| e.resident)
    }

    /// Bytes of the shuffled row orders; two epochs are held at a time (`rows/batches.rs` of `ft-data`).
    pub fn orders(&self, r: &Recipe) -> u64 {
        let (Some(epoch), true) = (self.epoch, r.data.shuffle) else { return 0 };
        let all = self.steps.unwrap_or(0).saturating_mul(r.run.batch_rows as u64);
        Batches::resident(epoch.rows, all)
    }

    /// The same data under tighter bounds: the elementwise minimum.
    pub fn under(self, r: &Recipe) -> Self {
        let bound = Self::of_recipe(r);
        let min = |a: Tokens, b: Tokens| Tokens {
            weighted: a.weighted,
            kept: a.kept,
            tokens: a.tokens.min(b.tokens),
            targets: a.targets.min(b.targets),
            longest: a.longest.min(b.longest),
            reach: a.reach.min(b.reach),
        };
        let eval = self.eval.zip(bound.eval).map(|(a, b)| min(a, b));
        Self { train: min(self.train, bound.train), eval, ..self }
    }
}
