//! Checks of the axes of `[parallel]` against keys that need a whole model on one rank.

use super::context::Cross;
use crate::keys::Recipe;

impl Cross<'_, '_> {
    /// Refuses keys that are not built for experts, layers or matrices over ranks, and stages of another number.
    pub(super) fn axes(&mut self, recipe: &Recipe) {
        let p = &recipe.parallel;
        if p.expert > 1 && self.all_good(&["parallel", "parallel.expert"]) {
            let generates = "answers are generated on one rank, and its experts are on several";
            let galore = "matrices are projected whole, and an expert's is on one rank";
            self.not_built_in_parts(recipe, ("parallel.expert", generates), galore);
        }
        if self.all_good(&["parallel", "parallel.pipeline", "parallel.stages"]) {
            self.stages(recipe);
        }
        if p.tensor > 1 && self.all_good(&["parallel", "parallel.tensor"]) {
            let generates = "answers are generated on one rank, and its matrices are cut";
            self.not_built_in_parts(recipe, ("parallel.tensor", generates), "projected matrices are whole");
        }
    }

    fn stages(&mut self, recipe: &Recipe) {
        let p = &recipe.parallel;
        if !p.stages.is_empty() && p.stages.len() != p.pipeline {
            let (given, stages) = (p.stages.len(), p.pipeline);
            let message = format!("stages has {given} entries for pipeline = {stages}");
            return self.report("parallel.stages", message, "the layers of each stage, from the bottom");
        }
        if p.pipeline == 1 {
            return;
        }
        let (projects, init) = (recipe.optimizer.name.projects(), recipe.lora.init.decomposition().is_some());
        let (galore, factors) = ("projected matrices of other stages", "factors of a stage's layers alone");
        let losses = "losses of whole documents are on the last stage alone";
        let refused = [
            ("optimizer.name", projects, galore, "optimizer.name = \"adamw\""),
            ("lora.init", init, factors, "lora.init = \"default\""),
            ("task", recipe.task.has_objective(), losses, "parallel.data or parallel.context instead"),
        ];
        let generates = "answers are generated on one rank, and its layers are on several";
        self.not_built(recipe, ("parallel.pipeline", generates), &refused);
    }
}
