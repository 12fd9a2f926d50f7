//! `ft data`: rows as text with supervision marks, and statistics.

use crate::cli::args::RecipeArgs;
use crate::cli::console::print;
use crate::infer::usage;
use crate::train::{self, job, rows, sources};
use ft_base::error::Error;
use ft_base::terminal::color_on_stdout;
use ft_data::{Checked, Dataset, Lengths, Tokenizer};
use ft_hub::{Settings, Want};
use ft_recipe::{Part, Recipe};
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

/// Reads the data as a run does, and prints it. Needs only config and tokenizer of the model. Returns the
/// problems in order: bad rows come last.
pub fn run(args: &Args) -> Vec<Error> {
    let mut problems = Vec::new();
    if let Err(e) = show(args, &mut problems) {
        problems.push(e);
    }
    problems
}

fn show(args: &Args, problems: &mut Vec<Error>) -> ft_base::Result<()> {
    let mut recipe = args.recipe.load()?;
    let settings = Settings::from_env();
    if let Some(e) = sources::resolve(&settings, &mut recipe, true).into_iter().next() {
        return Err(e);
    }
    let model = job::model(&settings, &recipe, Want::Tokenizer, true)?;
    let config = job::config(&model.dir, &recipe.model.overrides)?;
    job::check_override(&recipe, &config)?;
    let adapter = job::adapter(&settings, &recipe, true)?;
    let tokenizer = job::tokenizer(&recipe, &model.dir, adapter.as_ref())?;
    let template = tokenizer.as_ref().is_some_and(Tokenizer::has_template);
    sources::settle_forms(&mut recipe.data, template, true);
    let t = tokenizer.as_ref();
    if args.eval && !recipe.data.evaluates() {
        return Err(usage(format!("{}: data.eval names nothing", recipe.place("data.eval"))));
    }
    let part = if args.eval { Part::Eval } else { Part::Train };
    let Checked { problems: found, train, eval, .. } = rows::check(&recipe, &recipe.data, t, config.vocab);
    problems.extend(found.into_iter().map(Error::from));
    let shared = match (&train, &eval) {
        (Some(train), Some(eval)) => Some(rows::tell_shared(train, eval)?),
        _ => None,
    };
    let Some(dataset) = (if args.eval { eval } else { train }) else { return Ok(()) };
    if part == Part::Train && problems.is_empty() {
        rows::batches(&recipe, &dataset)?;
    }
    rows::tell_data(part.key(&recipe.data), &dataset, &config)?;
    if let Err(e) = train::check_taught(&recipe, t, (part, &dataset)) {
        problems.push(e);
    }
    if args.json {
        let value = json(&dataset, &recipe, shared);
        return print(&format!("{value:#}\n"));
    }
    // all data text is escaped
    let mut out = io::BufWriter::new(io::stdout().lock());
    let (rows, color) = (args.rows, color_on_stdout());
    let limit = (recipe.data.max_length, recipe.data.over_length);
    let outcome = ft_data::show::rows(&dataset, t, rows, limit, color, &mut out).and_then(|()| out.flush());
    Ok(ft_recipe::Error::of_print(outcome)?)
}

/// The statistics as JSON; `shared` counts evaluation samples also present in the training data.
fn json(dataset: &Dataset, recipe: &Recipe, shared: Option<usize>) -> serde_json::Value {
    let s = &dataset.stats;
    let lengths = |l: &Lengths| json!({"min": l.min, "median": l.median, "p95": l.p95, "max": l.max});
    let cuts: Vec<_> = ft_data::show::cuts(s, (recipe.data.max_length, recipe.data.over_length))
        .into_iter()
        .map(|(max, tokens, samples)| json!({"max_length": max, "tokens": tokens, "samples": samples}))
        .collect();
    json!({
        "rows_read": s.rows_read, "samples": s.examples, "truncated": s.truncated, "divided": s.divided,
        "left_out": s.drops,
        "lengths": lengths(&s.lengths),
        "whole_lengths": lengths(&s.whole.lengths()),
        "lost": cuts, "tokens": s.tokens, "target_tokens": s.targets, "batch_rows": s.rows, "fill": s.fill,
        "in_both": shared, "hash": dataset.hash,
    })
}
