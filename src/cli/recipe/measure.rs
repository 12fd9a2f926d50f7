//! Properties of data in a recipe, for `ft init`: format, form, and the number of steps.

use crate::train::{job, rows, sources};
use ft_base::terminal::{plural, tell};
use ft_data::{Checked, Dataset, Tokenizer};
use ft_hub::{Settings, Want};
use ft_plan::source::Found;
use ft_recipe::{Data, Recipe, Source, Task};
use std::path::PathBuf;

/// Largest data measured, in unpacked bytes; larger data makes enough steps.
const LARGEST: u64 = 256 << 20;
/// Fewest steps of an epoch, if the data has as many samples.
const STEPS: usize = 30;
/// Most epochs over few samples.
const EPOCHS: usize = 10;

/// Length of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Length {
    pub pack: bool,
    pub batch_rows: usize,
    pub epochs: usize,
    pub steps: usize,
    /// Whether there are samples to hold out.
    pub evaluates: bool,
}

impl Default for Length {
    fn default() -> Self {
        Self { pack: true, batch_rows: 16, epochs: 1, steps: 500, evaluates: true }
    }
}

impl Length {
    /// The largest batches with enough steps, of `least` rows or more; without packing if packed rows are too few.
    fn of(packed: usize, samples: usize, least: usize) -> Self {
        let batches = [16, 8, 4, 2, 1];
        let enough = [(true, packed), (false, samples)].into_iter().find_map(|(pack, rows)| {
            let batch_rows = batches.into_iter().find(|b| *b >= least && rows / b >= STEPS)?;
            Some(Self { pack, batch_rows, steps: rows.div_ceil(batch_rows), ..Self::default() })
        });
        enough.unwrap_or_else(|| {
            let epochs = (STEPS * least).div_ceil(samples.max(1)).min(EPOCHS);
            let steps = (epochs * samples).div_ceil(least);
            Self { pack: false, batch_rows: least, epochs, steps, evaluates: true }
        })
    }
}

/// What sources are to a recipe.
#[derive(Debug, Default)]
pub(super) struct Measured {
    /// Recipe keys of each source.
    keys: Vec<String>,
    /// Length of the run; `None` if the data or the tokenizer is not at hand, or the data is large.
    pub length: Option<Length>,
}

/// The task of the recipe's first source, by the first row, and the names of classes; supervised fine-tuning if unknown
/// or not at hand. Texts with few labels, in all sources, are to be classified.
pub(super) fn task_of(recipe: &Recipe) -> (Task, Vec<String>) {
    let resolve = |s: &str| recipe.folder.join(s);
    let task = |source: &Source| ft_data::task_of(source, &resolve).ok();
    let sources = &recipe.data.train;
    let task = sources.first().and_then(task).unwrap_or(Task::Sft);
    let is_small = |source: &Source| {
        let is_here = ft_data::is_hub_id(&source.source).is_none() || resolve(&source.source).exists();
        is_here && ft_data::find(source, &resolve).is_ok_and(|files| bytes(&files) <= LARGEST)
    };
    let classes = |source: &Source| ft_data::classes_of(source, &resolve).ok().flatten();
    if task != Task::Sft || !sources.iter().all(is_small) {
        return (task, Vec::new());
    }
    let Some(all) = sources.iter().map(classes).collect::<Option<Vec<_>>>() else {
        return (task, Vec::new());
    };
    let mut names: Vec<String> = Vec::new();
    for name in all.into_iter().flatten() {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    (Task::Classify, names)
}

/// Unpacked bytes of data files.
fn bytes(files: &[PathBuf]) -> u64 {
    let size = |f: &PathBuf| f.metadata().map_or(0, |m| m.len().saturating_mul(ft_data::unpacks_to(f)));
    files.iter().map(size).fold(0, u64::saturating_add)
}

/// Whether the only problem is a single sample per source, too few to hold one out.
fn is_alone(checked: &Checked, sources: usize) -> bool {
    let is_one = checked.train.as_ref().is_some_and(|data| data.samples.len() == sources);
    is_one && checked.eval.is_none() && checked.problems.len() == 1 && checked.more == 0
}

impl Measured {
    /// The sources at these places as tables of a recipe.
    pub fn sources(&self, places: &[String]) -> String {
        let source = |(i, place): (usize, &String)| {
            let keys = self.keys.get(i).filter(|k| !k.is_empty()).map_or(String::new(), |k| format!(", {k}"));
            format!("{{ source = {}{keys} }}", toml::Value::from(place.as_str()))
        };
        places.iter().enumerate().map(source).collect::<Vec<_>>().join(",\n         ")
    }

    /// Reads the recipe's sources, as far as data and tokenizer are at hand, and warns about them. After an error, the
    /// keys found before it are there.
    ///
    /// # Errors
    /// Data missing, of unknown form, or unusable to train the model.
    pub fn read(&mut self, recipe: &Recipe, found: Option<&Found>) -> ft_base::Result<()> {
        let mut recipe = recipe.clone();
        let folder = recipe.folder.clone();
        let resolve = |s: &str| folder.join(s);
        let (mut all_here, mut total) = (true, 0_u64);
        for source in &mut recipe.data.train {
            if ft_data::is_hub_id(&source.source).is_some() && !resolve(&source.source).exists() {
                all_here = false;
                self.keys.push(String::new());
                continue;
            }
            total = total.saturating_add(bytes(&ft_data::find(source, &resolve)?));
            let shape = match recipe.task.format() {
                Some(format) => ft_data::shape_in(format, source, &resolve)?,
                None => ft_data::detect(source, &resolve)?,
            };
            self.keys.push(shape.keys());
            (source.format, source.fields) = (Some(shape.format), shape.fields);
        }
        let Some(found) = found.filter(|_| all_here) else { return Ok(()) };
        let tokenizer = match job::model(&Settings::from_env(), &recipe, Want::Tokenizer, true) {
            Ok(model) => job::tokenizer(&recipe, &model.dir, None)?,
            Err(e) if e.of::<ft_hub::Error>().is_some() => return Ok(()),
            Err(e) => return Err(e),
        };
        sources::settle_forms(
            &mut recipe.data,
            tokenizer.as_ref().is_some_and(Tokenizer::has_template),
            false,
        );
        let form = |s: &Source| s.form.map(|f| format!(", form = {:?}", f.word()));
        for (keys, source) in self.keys.iter_mut().zip(&recipe.data.train) {
            *keys += &form(source).unwrap_or_default();
        }
        if total > LARGEST {
            return Ok(());
        }
        let (seed, vocab) = (recipe.run.seed, found.config.vocab);
        let check = |data: &Data| Dataset::check(data, &resolve, tokenizer.as_ref(), vocab, seed, 1);
        let mut checked = check(&recipe.data);
        let evaluates = !is_alone(&checked, recipe.data.train.len());
        if !evaluates {
            checked = check(&Data { eval_share: 0.0, ..recipe.data.clone() });
        }
        if let Some(e) = checked.problems.into_iter().next() {
            return Err(e.into());
        }
        let Some(data) = checked.train else { return Ok(()) };
        rows::tell_data("data.train", &data, &found.config)?;
        let length = Length::of(data.rows.len(), data.samples.len(), recipe.task.least_rows());
        let length = Length { evaluates, ..length };
        let batch = plural(length.batch_rows, "row");
        let packed = if length.pack { "packed" } else { "not packed" };
        let sources: Vec<&str> = recipe.data.train.iter().map(|s| s.source.as_str()).collect();
        tell(&format!("{}: {} steps of {batch}, {packed}", sources.join(", "), length.steps));
        self.length = Some(length);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_leave_enough_steps() {
        for (packed, samples, least, pack, batch_rows, epochs, steps) in [
            (10_000, 90_000, 1, true, 16, 1, 625),
            (100, 5000, 1, true, 2, 1, 50),
            (12, 300, 1, false, 8, 1, 38),
            (3, 40, 1, false, 1, 1, 40),
            (1, 10, 1, false, 1, 3, 30),
            (1, 2, 1, false, 1, 10, 20),
            (70, 70, 2, true, 2, 1, 35),
            (40, 40, 2, false, 2, 2, 40),
            (3, 3, 2, false, 2, 10, 15),
            (1, 1, 2, false, 2, 10, 5),
        ] {
            let of = Length { pack, batch_rows, epochs, steps, evaluates: true };
            assert_eq!(Length::of(packed, samples, least), of, "{packed} rows of {samples} samples");
        }
    }
}
