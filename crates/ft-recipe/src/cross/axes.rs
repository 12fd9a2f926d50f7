//! Checks of the axes of `[parallel]` against keys that need a whole model on one rank.

use super::context::{Cross, Refused};
use crate::keys::{Recipe, Reference};

impl Cross<'_, '_> {
    /// Refuses keys not built for experts, layers or matrices over ranks, and stages of another number.
    pub(super) fn axes(&mut self, recipe: &Recipe) {
        let p = &recipe.parallel;
        let other = matches!(recipe.preference.reference, Reference::Other(_));
        let split = "another model would be split like this one";
        let other = ("preference.reference", other, split, "preference.reference = \"base\"");
        if p.expert > 1 && self.all_good(&["parallel", "parallel.expert"]) {
            let generates = "answers are generated on one rank, and its experts are on several";
            self.no_answers(recipe, "parallel.expert", generates);
            self.not_built("parallel.expert", &[other]);
        }
        if self.all_good(&["parallel", "parallel.pipeline", "parallel.stages"]) {
            self.stages(recipe, other);
        }
        if p.tensor > 1 && self.all_good(&["parallel", "parallel.tensor"]) {
            let generates = "answers are generated on one rank, and its matrices are cut";
            let projects = recipe.optimizer.name.projects();
            let galore =
                ("optimizer.name", projects, "projected matrices are whole", "optimizer.name = \"adamw\"");
            self.no_answers(recipe, "parallel.tensor", generates);
            self.not_built("parallel.tensor", &[galore, other]);
        }
    }

    fn stages(&mut self, recipe: &Recipe, other: Refused<'_>) {
        let p = &recipe.parallel;
        if !p.stages.is_empty() && p.stages.len() != p.pipeline {
            let (given, stages) = (p.stages.len(), p.pipeline);
            let message = format!("stages has {given} entries for pipeline = {stages}");
            return self.report("parallel.stages", message, "the layers of each stage, from the bottom");
        }
        if p.pipeline == 1 {
            return;
        }
        self.not_built("parallel.pipeline", &[other]);
    }
}
