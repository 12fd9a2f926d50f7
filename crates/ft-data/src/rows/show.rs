//! Rows and statistics of a dataset as text, for `ft data`.

use super::dataset::Dataset;
use crate::error::Error;
use crate::shape::example::IGNORE_INDEX;
use crate::token_cache::stats::{Lengths, Stats};
use crate::tokenize::tokenizer::Tokenizer;
use ft_base::terminal::{escape, plural};
use ft_recipe::{OverLength, ScoreTargets};
use std::io::{self, Write};

impl Dataset {
    /// Warnings for the user, one sentence per entry: rows left out, text lost or changed, unread files and
    /// keys, and documents longer than the model's `positions`.
    ///
    /// # Errors
    /// A token file that can no longer be read.
    pub fn warnings(&self, positions: usize) -> Result<Vec<String>, Error> {
        let mut out = self.stats.not_read.clone();
        if let Some(told) = self.stats.drops.told(self.stats.rows_read).filter(|_| !self.stats.reported) {
            let first = self.stats.left_out.first().map(|f| format!(" (the first: {f})")).unwrap_or_default();
            out.push(format!("{told}{first}\n  hint: {}", self.stats.drops.hint()));
        }
        if self.stats.truncated > 0 {
            out.push(format!(
                "{} of {} samples are cut to data.max_length\n  hint: ft data shows what each length loses; \
                 data.over_length = \"drop\" leaves long samples out, \"split\" divides those of sft and distill",
                self.stats.truncated, self.stats.examples
            ));
        }
        out.extend(self.stats.notes.told());
        let (mut count, mut longest, mut weightless, mut reader) = (0, 0, 0, self.samples.reader());
        for i in 0..self.samples.len() {
            let item = reader.item(i)?;
            weightless += usize::from(item.weight == 0.0);
            let n = item.documents().max().unwrap_or(0);
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
        if weightless > 0 {
            let all = self.samples.len();
            out.push(format!(
                "{weightless} of {all} samples have a weight of 0, and do not count in the loss"
            ));
        }
        Ok(out)
    }
}

/// Prints the first `rows` rows of a dataset, and the statistics.
///
/// Supervised lines start with `>`, other lines with `.`, readable without color; with `color`,
/// supervised text is green. Without a tokenizer, token ids are printed. `limit` is `data.max_length`
/// with `data.over_length`.
///
/// # Errors
/// Write errors of `out`, and read errors of the dataset.
pub fn rows(
    dataset: &Dataset,
    tokenizer: Option<&Tokenizer>,
    rows: usize,
    limit: (usize, OverLength),
    color: bool,
    out: &mut dyn Write,
) -> io::Result<()> {
    for i in 0..rows.min(dataset.rows.len()) {
        let row = dataset.rows.get(i).map_err(io::Error::other)?;
        let documents = row.iter().filter_map(|s| dataset.samples.get(*s as usize).transpose());
        let documents = documents.collect::<Result<Vec<_>, _>>().map_err(io::Error::other)?;
        let tokens: usize = documents.iter().map(|e| e.ids.len()).sum();
        let targets: usize = documents.iter().map(|e| e.targets()).sum();
        writeln!(
            out,
            "row {} of {}: {tokens} tokens, {targets} supervised, {}",
            i + 1,
            dataset.rows.len(),
            plural(documents.len(), "document")
        )?;
        for (d, example) in documents.iter().enumerate() {
            if documents.len() > 1 {
                writeln!(
                    out,
                    "  -- document {} (source {}, line {})",
                    d + 1,
                    example.source + 1,
                    example.line
                )?;
            }
            document(&example.ids, &example.labels, tokenizer, color, out)?;
            if let (ScoreTargets::Classes(names), Some(label)) = (&dataset.scores, example.labels.last()) {
                let name = usize::try_from(*label).ok().and_then(|class| names.get(class));
                writeln!(out, "  = {}", visible(name.map_or("", String::as_str)))?;
            }
        }
        writeln!(out)?;
    }
    if rows > 0 && !dataset.rows.is_empty() {
        writeln!(out, "(> supervised, . read only, ↵ end of line in the text)\n")?;
    }
    statistics(dataset, limit, out)
}

fn document(
    ids: &[u32],
    labels: &[i32],
    tokenizer: Option<&Tokenizer>,
    color: bool,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut start = 0;
    while start < ids.len() {
        let supervised = labels[start] != IGNORE_INDEX;
        let same = labels[start..].iter().take_while(|l| (**l != IGNORE_INDEX) == supervised).count();
        let run = &ids[start..start + same];
        start += same;
        let as_ids = || run.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
        let text = match tokenizer {
            Some(t) => t.decode(run).unwrap_or_else(|_| as_ids()),
            None => as_ids(),
        };
        let gutter = if supervised { '>' } else { '.' };
        let (green, plain) = if supervised && color { ("\x1b[32m", "\x1b[0m") } else { ("", "") };
        for line in text.split_inclusive('\n') {
            writeln!(out, "  {gutter} {green}{}{plain}", visible(line))?;
        }
    }
    Ok(())
}

/// A line with a visible end and escaped control characters, so that data cannot control the terminal.
fn visible(line: &str) -> String {
    escape(line).replace('\n', "↵")
}

fn statistics(dataset: &Dataset, limit: (usize, OverLength), out: &mut dyn Write) -> io::Result<()> {
    let s = &dataset.stats;
    let share = |part: usize, whole: usize| 100.0 * part as f64 / whole.max(1) as f64;
    writeln!(out, "rows read    {}", s.rows_read)?;
    writeln!(out, "left out     {}", s.drops.total())?;
    for (count, why) in s.drops.reasons() {
        writeln!(out, "  {count:>10} {why}")?;
    }
    for line in &s.left_out {
        writeln!(out, "             {}", visible(line))?;
    }
    if s.drops.total() > s.left_out.len() {
        writeln!(out, "             ... and {} more", s.drops.total() - s.left_out.len())?;
    }
    let (count, how) = match limit.1 {
        OverLength::Split => (s.divided, "documents divided at"),
        _ => (s.truncated, "cut to"),
    };
    writeln!(out, "examples     {}, {count} {how} data.max_length", s.examples)?;
    let words = |l: Lengths| format!("min {}, median {}, p95 {}, max {}", l.min, l.median, l.p95, l.max);
    writeln!(out, "lengths      {}", words(s.lengths))?;
    if s.whole.lengths() != s.lengths {
        writeln!(out, "  before     {}", words(s.whole.lengths()))?;
    }
    // with `data.over_length = "error"` nothing is cut
    let lost = if limit.1 == OverLength::Error { "beyond it" } else { "lost" };
    for (max, tokens, samples) in cuts(s, limit) {
        let all = s.whole.tokens() as usize;
        let here = if max == limit.0 { ", as it is" } else { "" };
        let samples = plural(samples, "sample");
        writeln!(out, "  at {max:<8}  {:.1} % of the tokens {lost}, of {samples}{here}", share(tokens, all))?;
    }
    writeln!(out, "tokens       {} an epoch", s.tokens)?;
    writeln!(out, "supervised   {} ({:.1} %)", s.targets, share(s.targets, s.tokens))?;
    for by in &s.teachers {
        writeln!(out, "teacher      {}", visible(by))?;
    }
    writeln!(out, "batch rows   {} an epoch, {:.1} % full", s.rows, 100.0 * s.fill)?;
    writeln!(out, "hash         {}", dataset.hash)
}

/// Effect of some values of `data.max_length`, as (value, tokens lost, samples affected); empty if no
/// value loses tokens.
pub fn cuts(s: &Stats, (max_length, over): (usize, OverLength)) -> Vec<(usize, usize, usize)> {
    let mut values: Vec<usize> = (8..18).map(|n| 1 << n).chain([max_length]).collect();
    values.sort_unstable();
    values.dedup();
    let all = values.into_iter().map(|max| (max, s.whole.over(max, over))).map(|(max, (t, n))| (max, t, n));
    // up to the first value without losses
    let mut out = Vec::new();
    for cut in all {
        out.push(cut);
        if cut.1 == 0 && cut.0 >= max_length {
            break;
        }
    }
    if out.iter().all(|c| c.1 == 0) { Vec::new() } else { out }
}
