//! Checks of `parallel.pipeline` against keys that need a whole model on one rank.

use super::context::Cross;
use crate::keys::Recipe;

impl Cross<'_, '_> {
    /// Refuses keys that are not built for layers over ranks, and stages of another number.
    pub(super) fn pipeline(&mut self, recipe: &Recipe) {
        let p = &recipe.parallel;
        if !self.all_good(&["parallel", "parallel.pipeline", "parallel.stages"]) {
            return;
        }
        if !p.stages.is_empty() && p.stages.len() != p.pipeline {
            let (given, stages) = (p.stages.len(), p.pipeline);
            let message = format!("stages has {given} entries for pipeline = {stages}");
            self.report("parallel.stages", message, "the layers of each stage, from the bottom");
            return;
        }
        if p.pipeline > 1 {
            self.not_built_for_stages(recipe);
        }
    }

    fn not_built_for_stages(&mut self, recipe: &Recipe) {
        let generates = "answers are generated on one rank, and its layers are on several";
        let refused = [
            (
                "generate.samples",
                recipe.generate.samples > 0,
                generates,
                "generate.samples = 0, and ft eval or chat afterwards",
            ),
            (
                "log.samples",
                !recipe.log.samples.is_empty(),
                generates,
                "leave log.samples out, and ft chat afterwards",
            ),
            (
                "optimizer.name",
                recipe.optimizer.name.projects(),
                "projected matrices of other stages",
                "optimizer.name = \"adamw\"",
            ),
            (
                "lora.init",
                recipe.lora.init.decomposition().is_some(),
                "factors of a stage's layers alone",
                "lora.init = \"default\"",
            ),
            (
                "task",
                recipe.task.has_objective(),
                "losses of whole documents are on the last stage alone",
                "parallel.data or parallel.context instead",
            ),
        ];
        self.not_built("parallel.pipeline", &refused);
    }
}
