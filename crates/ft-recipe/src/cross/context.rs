//! What every check across keys needs: the recipe as written, and the problems so far.

use crate::check::Checker;
use crate::keys::{Recipe, Reference};
use crate::syntax::{Span, Table};

pub(super) struct Cross<'a, 'b> {
    pub checker: &'a mut Checker<'b>,
    pub root: &'a Table,
}

impl Cross<'_, '_> {
    /// Refuses keys without support for `axis`, a key of `[parallel]`, by (key, whether it is set, reason, hint). The
    /// reason for keys that generate text is `generates`.
    pub(super) fn not_built(
        &mut self,
        recipe: &Recipe,
        (axis, generates): (&str, &str),
        refused: &[(&str, bool, &str, &str)],
    ) {
        let (samples, logged) = (recipe.generate.samples > 0, !recipe.log.samples.is_empty());
        let generating = [
            ("generate.samples", samples, generates, "generate.samples = 0, and ft eval or chat afterwards"),
            ("log.samples", logged, generates, "leave log.samples out, and ft chat afterwards"),
        ];
        for (key, _, why, hint) in generating.iter().chain(refused).filter(|(_, set, ..)| *set) {
            if self.all_good(&[key]) {
                self.report(key, format!("not built yet: {key} with {axis}: {why}"), *hint);
            }
        }
    }

    /// The same, also for projected matrices, refused for the reason `galore`, and for another model as reference.
    pub(super) fn not_built_in_parts(&mut self, recipe: &Recipe, axis: (&str, &str), galore: &str) {
        let (projects, other) =
            (recipe.optimizer.name.projects(), matches!(recipe.preference.reference, Reference::Other(_)));
        let split = "another model would be split like this one";
        let refused = [
            ("optimizer.name", projects, galore, "optimizer.name = \"adamw\""),
            ("preference.reference", other, split, "preference.reference = \"base\""),
        ];
        self.not_built(recipe, axis, &refused);
    }

    /// Position of `path`, or of the nearest enclosing table in the recipe.
    pub(super) fn at(&self, path: &str) -> Span {
        let mut path = path;
        loop {
            if let Some(node) = self.root.find(path) {
                return node.at.clone();
            }
            match path.rsplit_once('.') {
                Some((above, _)) => path = above,
                None => return Span { text: 0, bytes: 0..0 },
            }
        }
    }

    pub(super) fn given(&self, path: &str) -> bool {
        self.root.find(path).is_some()
    }

    pub(super) fn report(&mut self, path: &str, message: String, hint: impl Into<String>) {
        self.checker.report(&self.at(path), path, message, &[hint.into()]);
    }

    pub(super) fn all_good(&self, paths: &[&str]) -> bool {
        paths.iter().all(|p| !self.checker.bad.contains(*p))
    }

    /// Whether no `[[train]]` rule has a problem.
    pub(super) fn rules_are_good(&self) -> bool {
        !self.checker.bad.iter().any(|p| p.starts_with("train"))
    }
}
