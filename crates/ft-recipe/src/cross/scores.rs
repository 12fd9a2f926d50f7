//! Checks of tasks with a score head, and of `[classify]`.

use super::context::Cross;
use crate::keys::{MAX_LABELS, Recipe, Task};

impl Cross<'_, '_> {
    pub(super) fn scores(&mut self, recipe: &Recipe) {
        if !self.all_good(&["task"]) || !recipe.task.has_scores() {
            return;
        }
        if recipe.task == Task::Classify && !self.checker.bad.iter().any(|b| b.starts_with("classify")) {
            self.labels(recipe);
        }
        let task = recipe.task.word();
        let text = "a score head makes no text: leave it out";
        for (key, given, hint) in [
            ("generate.samples", recipe.generate.samples > 0, text),
            ("log.samples", !recipe.log.samples.is_empty(), text),
            ("serve.devices", !recipe.serve.devices.is_empty(), text),
            (
                "model.cache",
                recipe.model.cache.is_some(),
                "leave it out: the model is quantized at each start",
            ),
        ] {
            if given && self.all_good(&[key]) {
                self.report(key, format!("not built: {key} with task = \"{task}\""), hint);
            }
        }
    }

    /// Names and number of the classes.
    fn labels(&mut self, recipe: &Recipe) {
        let (labels, number) = (&recipe.classify.labels, recipe.classify.num_labels);
        if labels.is_empty() && number.is_none() {
            let message = "task = \"classify\" needs the names of its classes".into();
            let hint =
                "labels = [\"no\", \"yes\"] in [classify]; or num_labels = 2, for classes without names";
            return self.report("classify", message, hint);
        }
        if labels.is_empty() {
            return;
        }
        if labels.len() < 2 || labels.len() > MAX_LABELS {
            let message = format!("labels has {}, and 2 to {MAX_LABELS} names are wanted", labels.len());
            self.report("classify.labels", message, "labels = [\"no\", \"yes\"], for example");
        }
        if let Some(n) = number.filter(|n| *n != labels.len()) {
            let message = format!("num_labels = {n}, and labels has {}", labels.len());
            self.report("classify.num_labels", message, "leave one of them out");
        }
    }
}
