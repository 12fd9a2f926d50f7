//! Rows of the steps, and warnings about the data.

use crate::train::Error;
use ft_base::terminal::{plural, warn};
use ft_data::{Batches, Checked, Dataset, Tokenizer};
use ft_engine::model::Config;
use ft_recipe::{Data, Part, Recipe, Run};

/// Divides the rows into steps.
///
/// # Errors
/// No full step, or too many steps.
pub fn batches(recipe: &Recipe, data: &Dataset) -> ft_base::Result<Batches> {
    let batches = Batches::new(data.rows.len(), &recipe.run, recipe.data.shuffle);
    if batches.steps() > 0 {
        ft_plan::check_steps(recipe, batches.steps() as u64)?;
        return Ok(batches);
    }
    let why = format!(
        "{} rows make no step of {} rows\n  hint: a smaller run.batch_rows, or more data",
        data.rows.len(),
        recipe.run.batch_rows
    );
    Err(Error::at(recipe, "run.batch_rows", why).into())
}

/// Most kinds of data problems shown.
const MAX_PROBLEMS: usize = 20;

/// Checks `data`, the recipe's with its forms settled; warns about problems not shown.
pub fn check(recipe: &Recipe, data: &Data, tokenizer: Option<&Tokenizer>, vocab: usize) -> Checked {
    let resolve = |s: &str| recipe.resolve(s);
    let checked = Dataset::check(data, &resolve, tokenizer, vocab, recipe.run.seed, MAX_PROBLEMS);
    if checked.more > 0 {
        warn(&format!("{} more problems in the data are not shown", checked.more));
    }
    checked
}

/// Prints the warnings about a dataset.
pub fn tell_data(key: &str, data: &Dataset, config: &Config) -> ft_base::Result<()> {
    for warning in data.warnings(config.reach())? {
        warn(&format!("{key}: {warning}"));
    }
    Ok(())
}

/// Below this number of steps, a run by epochs prints a warning.
const FEW: usize = 10;

/// Warns about a run by epochs with very few steps.
pub fn tell_few(recipe: &Recipe, data: &Dataset) {
    let (run, rows) = (&recipe.run, data.rows.len());
    let steps = Batches::new(rows, run, recipe.data.shuffle).steps();
    if run.steps.is_some() || !(1..FEW).contains(&steps) {
        return;
    }
    let (packed, shorter) = if recipe.data.packs() {
        let packed = format!(", of {} packed", plural(data.samples.len(), "sample"));
        (packed, ", data.pack = false or a smaller data.max_length")
    } else {
        (String::new(), "")
    };
    warn(&format!(
        "{} by run.epochs = {}: {}{packed}, {} a step (run.batch_rows)\n  hint: a smaller \
            run.batch_rows, more run.epochs{shorter}",
        plural(steps, "optimizer step"),
        run.epochs,
        plural(rows, "row"),
        run.batch_rows,
    ));
}

/// Above this number of steps, a run without checkpoints before its end prints a warning.
const MANY: usize = 100;

/// Warns about keys unsuited to the number of steps.
pub fn tell_steps(recipe: &Recipe, batches: &Batches) {
    tell_unsaved(&recipe.run, batches);
    tell_beyond(recipe, batches);
}

/// Warns about a run of many steps with its only checkpoint at the end.
fn tell_unsaved(run: &Run, batches: &Batches) {
    let steps = batches.steps();
    if !batches.recurs(run.save_every) && !run.keep_best && steps > MANY {
        warn(&format!(
            "no checkpoint before the end of {steps} steps, so a killed run begins anew; to change: \
             run.save_every={MANY}"
        ));
    }
}

/// Warns about a warm-up longer than the run, and about keys for several evaluations in a run with one.
fn tell_beyond(recipe: &Recipe, batches: &Batches) {
    let (run, steps) = (&recipe.run, batches.steps());
    let warmup = recipe.optimizer.warmup(steps);
    if warmup > steps {
        warn(&format!(
            "{}: optimizer.warmup_steps = {warmup} is more than the run's {}: the learning rate ends below \
             optimizer.lr, and schedule and min_lr do nothing",
            recipe.place("optimizer.warmup_steps"),
            plural(steps, "step")
        ));
    }
    if (run.keep_best || run.patience > 0) && !batches.recurs(run.eval_every) {
        let key = if run.keep_best { "run.keep_best" } else { "run.patience" };
        warn(&format!(
            "{}: {key} does nothing: run.eval_every has no evaluation before the last of {}\n  hint: a smaller \
             run.eval_every",
            recipe.place(key),
            plural(steps, "step")
        ));
    }
}

/// Warns about an evaluation with fewer rows than a step of the task has.
pub fn tell_single(recipe: &Recipe, eval: &Dataset) {
    let rows = eval.rows.len();
    if rows < recipe.task.least_rows() {
        warn(&format!(
            "{}: task = \"{}\" estimates the KL of an evaluation from other rows; with {} it is the row's own \
             reward\n  hint: more rows to evaluate on",
            Part::Eval.key(&recipe.data),
            recipe.task.word(),
            plural(rows, "row")
        ));
    }
}

/// Warns about samples in both training and evaluation data. Returns the number of such samples.
pub fn tell_shared(train: &Dataset, eval: &Dataset) -> ft_base::Result<usize> {
    let (shared, all) = (train.samples.shared_with(&eval.samples)?, eval.samples.len());
    if shared > 0 {
        warn(&format!("{shared} of the {all} samples of the evaluation are in the training data too"));
    }
    Ok(shared)
}
