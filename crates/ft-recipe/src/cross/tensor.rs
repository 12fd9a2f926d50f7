//! Checks of `parallel.tensor` against keys that need whole matrices, or a whole model on one rank.

use super::context::Cross;
use crate::keys::{Recipe, Reference};

impl Cross<'_, '_> {
    /// Refuses keys that are not built for matrices cut over ranks.
    pub(super) fn tensor(&mut self, recipe: &Recipe) {
        if recipe.parallel.tensor <= 1 || !self.all_good(&["parallel", "parallel.tensor"]) {
            return;
        }
        let generates = "answers are generated on one rank, and its matrices are cut";
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
            (
                "optimizer.name",
                recipe.optimizer.name.projects(),
                "projected matrices are whole",
                "optimizer.name = \"adamw\"",
            ),
            (
                "preference.reference",
                matches!(recipe.preference.reference, Reference::Other(_)),
                other,
                "preference.reference = \"base\"",
            ),
        ];
        self.not_built("parallel.tensor", &refused);
    }
}
