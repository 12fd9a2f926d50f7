//! Checks of the task against `[preference]`, formats and evaluation.

use super::context::Cross;
use crate::keys::{Best, Format, PreferenceLoss, Recipe, Reference, Task};

impl Cross<'_, '_> {
    pub(super) fn preference(&mut self, recipe: &Recipe) {
        let (task, of) = (recipe.task, &recipe.preference);
        if !self.all_good(&["task"]) {
            return;
        }
        self.formats(recipe);
        let word = task.word();
        let told = task.has_objective() && task != Task::Kto;
        if recipe.run.best == Best::Accuracy && !told && self.all_good(&["run.best"]) {
            let message = format!("evaluations of task = \"{word}\" have no accuracy");
            self.report("run.best", message, "\"loss\", or leave it out");
        }
        let (rows, least) = (recipe.run.batch_rows, task.least_rows());
        if rows < least && self.all_good(&["run.batch_rows"]) {
            let message = format!(
                "task = \"{word}\" estimates its KL from other rows of the step; with batch_rows = {rows} it is the \
                 row's own reward"
            );
            let hint = format!("run.batch_rows = {least} or more; run.micro_rows = 1 is possible");
            self.report("run.batch_rows", message, hint);
        }
        if let Some(loss) = of.loss.filter(|_| task.prefers() && self.all_good(&["preference.loss"])) {
            let fits = match task {
                Task::Dpo => matches!(loss, PreferenceLoss::Sigmoid | PreferenceLoss::Ipo),
                _ => loss.word() == word,
            };
            if !fits {
                let (loss, own) = (loss.word(), if task == Task::Dpo { "sigmoid\" or \"ipo" } else { word });
                let message = format!("loss = \"{loss}\" is not of task = \"{word}\"");
                self.report("preference.loss", message, format!("\"{word}\" has loss = \"{own}\""));
                return;
            }
        }
        if task.prefers() && recipe.generate.samples > 0 {
            let message = format!("not built yet: generate.samples with task = \"{word}\"");
            self.report("generate.samples", message, "leave it out: the accuracy on pairs is told");
        }
    }

    /// Refuses sources with a format of another task.
    fn formats(&mut self, recipe: &Recipe) {
        let task = recipe.task;
        for (list, sources) in [("train", &recipe.data.train), ("eval", &recipe.data.eval)] {
            for (i, source) in sources.iter().enumerate() {
                let key = format!("data.{list}.{i}.format");
                let Some(format) = source.format.filter(|f| !task.takes(*f) && self.all_good(&[&key])) else {
                    continue;
                };
                let message =
                    format!("task = \"{}\" does not read format = \"{}\"", task.word(), format.word());
                let hint = match task.format() {
                    Some(Format::Tokens) => {
                        "ft logits MODEL RECIPE writes a teacher's values beside such rows".into()
                    }
                    Some(only) => format!("\"{}\" is the format of its rows", only.word()),
                    None => {
                        "task = \"dpo\" compares chosen and rejected; task = \"kto\" has rated completions; \
                         task = \"classify\" has labels"
                            .into()
                    }
                };
                self.report(&key, message, hint);
            }
        }
    }
}

impl Recipe {
    /// A warning about a continued adapter compared with the base by default.
    pub(super) fn reference_below_adapter(&self) -> Option<String> {
        const KEY: &str = "preference.reference";
        let adapter = self.lora.init.adapter()?;
        let by_default = self.preference.reference == Reference::Base && !self.places.contains_key(KEY);
        (self.task.has_reference() && by_default).then(|| {
            format!(
                "{}: the reference is the base model, without the adapter {adapter} that the run begins with\n  hint: \
                 {KEY} = \"start\" compares with that adapter, as TRL does; \"base\", written out, with the base",
                self.place("lora.init")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::{Facts, Recipe};

    #[test]
    fn kto_has_no_steps_of_one_row() {
        let parsed = |task: &str, format: &str, rows: usize| {
            let text = format!(
                "task = \"{task}\"\n[model]\nsource = \"m\"\n[[data.train]]\nsource = \"p\"\nformat = \
                 \"{format}\"\n[[train]]\nmodules = [\"mlp\"]\n[run]\nmicro_rows = 1\nbatch_rows = {rows}\n"
            );
            Recipe::parse(&text, "r.toml", &[]).map(|r| r.run.batch_rows).map_err(|e| e.to_string())
        };
        let error = parsed("kto", "unpaired", 1).expect_err("one row");
        assert!(error.contains("r.toml:11:") && error.contains("the row's own reward"), "{error}");
        assert!(error.contains("run.batch_rows = 2 or more"), "{error}");
        assert_eq!(parsed("kto", "unpaired", 2), Ok(2));
        assert_eq!(parsed("dpo", "preference", 1), Ok(1));
    }

    #[test]
    fn a_default_reference_below_an_adapter_is_told() {
        let told = |more: &str| {
            let text = format!(
                "task = \"dpo\"\n{more}\n[model]\nsource = \"m\"\n[[data.train]]\nsource = \"p\"\nformat = \
                 \"preference\"\n[[train]]\nmodules = [\"mlp\"]\n"
            );
            let recipe = Recipe::parse(&text, "r.toml", &[]).unwrap_or_else(|e| panic!("{e}\n{text}"));
            recipe.warnings(Facts::default()).iter().any(|w| w.contains("preference.reference = \"start\""))
        };
        assert!(told("lora.init = \"first/adapter\""));
        assert!(!told("lora.init = \"pissa\""));
        assert!(!told("lora.init = \"first/adapter\"\npreference.reference = \"start\""));
        assert!(!told("lora.init = \"first/adapter\"\npreference.reference = \"base\""), "as written");
    }
}
