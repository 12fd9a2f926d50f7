//! `ft data`: rows as text with supervision marks, and statistics.

use super::RecipeArgs;
use crate::train::{job, rows, sources};
use ft_base::terminal::{color_on_stdout, escape};
use ft_data::hub::{Settings, Want};
use ft_data::{Dataset, Lengths, Stats, Tokenizer, UNSUPERVISED};
use ft_recipe::{OverLength, Part, Recipe};
use serde_json::json;
use std::io::{self, Write};

/// Arguments of `ft data`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Rows to show
    #[arg(long, default_value_t = 3)]
    rows: usize,
    /// Show the evaluation data
    #[arg(long)]
    eval: bool,
    /// Print the statistics as one JSON object
    #[arg(long)]
    json: bool,
}

/// Reads the data as a run does, and prints it. Needs only config and tokenizer of the model.
///
/// # Errors
/// Any data error a run would report before loading weights.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let mut recipe = Recipe::load(&args.recipe.recipe, &args.recipe.set)?;
    let settings = Settings::from_env();
    if let Some(e) = sources::settle(&settings, &mut recipe, true).into_iter().next() {
        return Err(e);
    }
    let model = job::model(&settings, &recipe, Want::Tokenizer, true)?;
    let config = job::config(&model.dir, &recipe.model.overrides)?;
    let tokenizer = job::tokenizer(&recipe, &model.dir, None)?;
    let (seed, vocab, t) = (recipe.run.seed, config.vocab, tokenizer.as_ref());
    let resolve = |s: &str| recipe.resolve(s);
    if args.eval && !recipe.data.evaluates() {
        return Err(super::usage(format!("{}: data.eval names nothing", recipe.place("data.eval"))));
    }
    let part = if args.eval { Part::Eval } else { Part::Train };
    let (train, eval) = Dataset::load_both(&recipe.data, &resolve, t, vocab, seed)?;
    let shared = eval.as_ref().map(|eval| rows::tell_shared(&train, eval)).transpose()?;
    let dataset = match eval {
        Some(eval) if args.eval => eval,
        _ => train,
    };
    if part == Part::Train {
        rows::batches(&recipe, &dataset)?;
    }
    rows::tell_data(part.key(&recipe.data), &dataset, &config)?;
    if args.json {
        let value = json(&dataset, &recipe, shared);
        return super::print(&format!("{value:#}\n"));
    }
    // all data text is escaped
    let mut out = io::BufWriter::new(io::stdout().lock());
    let (rows, color) = (args.rows, color_on_stdout());
    let limit = (recipe.data.max_length, recipe.data.over_length);
    let outcome = show(&dataset, t, rows, limit, color, &mut out).and_then(|()| out.flush());
    Ok(ft_recipe::Error::of_print(outcome)?)
}

/// Prints the first `rows` rows of a dataset, and the statistics.
///
/// Supervised lines start with `>`, other lines with `.`, readable without color; with `color`,
/// supervised text is green. Without a tokenizer, token ids are printed. `limit` is `data.max_length`
/// with `data.over_length`.
///
/// # Errors
/// Write errors of `out`, and read errors of the dataset.
pub fn show(
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
        let supervised = labels[start] != UNSUPERVISED;
        let same = labels[start..].iter().take_while(|l| (**l != UNSUPERVISED) == supervised).count();
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
    for (count, why) in [
        (s.drops.bad, "not what the format asks for"),
        (s.drops.empty_mask, "nothing supervised"),
        (s.drops.empty_after_truncation, "empty mask after truncation"),
        (s.drops.too_long, "longer than data.max_length"),
    ] {
        if count > 0 {
            writeln!(out, "  {count:>10} {why}")?;
        }
    }
    for line in &s.left_out {
        writeln!(out, "             {}", visible(line))?;
    }
    if s.drops.total() > s.left_out.len() {
        writeln!(out, "             ... and {} more", s.drops.total() - s.left_out.len())?;
    }
    writeln!(out, "examples     {}, {} cut to data.max_length", s.examples, s.truncated)?;
    let l = &s.lengths;
    writeln!(out, "lengths      min {}, median {}, p95 {}, max {}", l.min, l.median, l.p95, l.max)?;
    let whole = s.whole.lengths();
    if whole != *l {
        writeln!(
            out,
            "  before     min {}, median {}, p95 {}, max {}",
            whole.min, whole.median, whole.p95, whole.max
        )?;
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
    writeln!(out, "batch rows   {} an epoch, {:.1} % full", s.rows, 100.0 * s.fill)?;
    writeln!(out, "hash         {}", dataset.hash)
}

/// Effect of some values of `data.max_length`, as (value, tokens lost, samples affected); empty if no
/// value loses tokens.
fn cuts(s: &Stats, (max_length, over): (usize, OverLength)) -> Vec<(usize, usize, usize)> {
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

/// The statistics as JSON; `shared` counts evaluation samples also present in the training data.
fn json(dataset: &Dataset, recipe: &Recipe, shared: Option<usize>) -> serde_json::Value {
    let s = &dataset.stats;
    let lengths = |l: &Lengths| json!({"min": l.min, "median": l.median, "p95": l.p95, "max": l.max});
    let cuts: Vec<_> = cuts(s, (recipe.data.max_length, recipe.data.over_length))
        .into_iter()
        .map(|(max, tokens, samples)| json!({"max_length": max, "tokens": tokens, "samples": samples}))
        .collect();
    json!({
        "rows_read": s.rows_read, "samples": s.examples, "truncated": s.truncated,
        "left_out": {
            "bad": s.drops.bad, "empty_mask": s.drops.empty_mask,
            "empty_after_truncation": s.drops.empty_after_truncation, "too_long": s.drops.too_long,
        },
        "lengths": lengths(&s.lengths),
        "whole_lengths": lengths(&s.whole.lengths()),
        "lost": cuts, "tokens": s.tokens, "target_tokens": s.targets, "batch_rows": s.rows, "fill": s.fill,
        "in_both": shared, "hash": dataset.hash,
    })
}

fn plural(n: usize, thing: &str) -> String {
    if n == 1 { format!("1 {thing}") } else { format!("{n} {thing}s") }
}
