//! What every check across keys needs: the recipe as written, and the problems so far.

use crate::check::Checker;
use crate::keys::Recipe;
use crate::syntax::{Span, Table, enclosing};

pub(super) struct Cross<'a, 'b> {
    pub checker: &'a mut Checker<'b>,
    pub root: &'a Table,
}

/// A key not built with an axis of `[parallel]`: the key, whether it is set, reason, hint.
pub(super) type Refused<'a> = (&'a str, bool, &'a str, &'a str);

impl Cross<'_, '_> {
    /// Refuses keys without support for `axis`, a key of `[parallel]`.
    pub(super) fn not_built(&mut self, axis: &str, refused: &[Refused<'_>]) {
        for (key, _, why, hint) in refused.iter().filter(|(_, set, ..)| *set) {
            if self.all_good(&[key]) {
                self.report(key, format!("not built yet: {key} with {axis}: {why}"), *hint);
            }
        }
    }

    /// Refuses keys of text generation with `axis`, for a reason.
    pub(super) fn no_answers(&mut self, recipe: &Recipe, axis: &str, why: &str) {
        let (samples, logged) = (recipe.generate.samples > 0, !recipe.log.samples.is_empty());
        let refused = [
            ("generate.samples", samples, why, "generate.samples = 0, and ft eval or chat afterwards"),
            ("log.samples", logged, why, "leave log.samples out, and ft chat afterwards"),
        ];
        self.not_built(axis, &refused);
    }

    /// Position of `path`, or of the nearest enclosing table in the recipe.
    pub(super) fn at(&self, path: &str) -> Span {
        let node = enclosing(path).find_map(|path| self.root.find(path));
        node.map_or(Span { text: 0, bytes: 0..0 }, |node| node.at.clone())
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
