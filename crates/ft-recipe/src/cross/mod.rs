//! Checks across keys, for values valid alone but not together.

mod axes;
mod context;
mod data;
mod idle;
mod optimizer;
mod preference;
mod rules;
mod run;
mod scores;

use crate::check::Checker;
use crate::keys::Recipe;
use crate::syntax::Table;
use context::Cross;
pub use idle::Facts;
pub(crate) use idle::changed;

/// Runs all checks. A check is skipped if a key it depends on already has a problem.
pub(crate) fn check(checker: &mut Checker<'_>, root: &Table, recipe: &Recipe) {
    let mut x = Cross { checker, root };
    x.rules(recipe);
    x.init(recipe);
    x.sources(recipe);
    x.preference(recipe);
    x.scores(recipe);
    x.lengths(recipe);
    x.optimizer(recipe);
    x.in_backward(recipe);
    x.galore(recipe);
    x.axes(recipe);
    x.log(recipe);
    x.idle(recipe);
}
