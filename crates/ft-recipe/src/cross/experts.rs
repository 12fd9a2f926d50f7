//! Checks of `parallel.expert` against keys that need a whole model on one rank.

use super::context::Cross;
use crate::keys::{Recipe, Reference};

impl Cross<'_, '_> {
    /// Refuses keys that are not built for experts over ranks.
    pub(super) fn experts(&mut self, recipe: &Recipe) {
        if recipe.parallel.expert <= 1 || !self.all_good(&["parallel", "parallel.expert"]) {
            return;
        }
        let generates = "answers are generated on one rank, and its experts are on several";
        let galore = "matrices are projected whole, and an expert's is on one rank";
        let other = "another model would be split like this one";
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
            ("optimizer.name", recipe.optimizer.name.projects(), galore, "optimizer.name = \"adamw\""),
            (
                "preference.reference",
                matches!(recipe.preference.reference, Reference::Other(_)),
                other,
                "preference.reference = \"base\"",
            ),
        ];
        self.not_built("parallel.expert", &refused);
    }
}
