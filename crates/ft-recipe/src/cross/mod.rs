//! Checks across keys, for values valid alone but not together.

mod context;
mod data;
mod optimizer;
mod rules;
mod run;

use crate::check::Checker;
use crate::keys::Recipe;
use crate::syntax::Table;
use context::Cross;

/// Runs all checks. A check is skipped if a key it depends on already has a problem.
pub(crate) fn check(checker: &mut Checker<'_>, root: &Table, recipe: &Recipe) {
    let mut x = Cross { checker, root };
    x.model(recipe);
    x.rules(recipe);
    x.init(recipe);
    x.sources(recipe);
    x.lengths(recipe);
    x.optimizer(recipe);
    x.in_backward(recipe);
    x.galore(recipe);
    x.master(recipe);
    x.serve(recipe);
}
