//! Plans from a recipe alone.

use super::plan::Plan;
use crate::host::Capacity;
use crate::model::{Target, machine, source};
use crate::resolve::{self, Resolved};
use crate::workload::{Known, Workload, Workloads, check_steps};
use ft_recipe::Recipe;

/// Plans a recipe from its model's config alone, as `ft plan` does.
///
/// # Errors
/// An unknown or unsupported model, a rule without matches, an unreadable adapter.
pub fn of_recipe(recipe: &Recipe, target: impl Into<Target>) -> ft_base::Result<(Plan, source::Found)> {
    let target = target.into();
    of_recipe_in(recipe, target, &Capacity::of(machine(recipe, target)))
}

/// Like [`of_recipe`], with explicit free memory and disk space.
///
/// # Errors
/// As [`of_recipe`].
pub fn of_recipe_in(
    recipe: &Recipe,
    target: impl Into<Target>,
    room: &Capacity<'_>,
) -> ft_base::Result<(Plan, source::Found)> {
    let mut found = source::find(recipe)?;
    let resolved = Resolved::new(recipe, found.config.clone(), |config| {
        resolve::selection_without_weights(recipe, config)
    })?;
    let (config, selection) = (&resolved.config, &resolved.selection);
    found.notes.extend_from_slice(&selection.notes);
    let known = Known::find(recipe, found.dir.as_deref(), &found.config);
    let workloads = &match &known {
        Some(known) => Workloads::new(|r| known.workload(r)),
        None => Workloads::new(Workload::of_recipe),
    };
    let steps = workloads.of(recipe, recipe.run.micro_rows.count()).steps;
    steps.map_or(Ok(()), |steps| check_steps(recipe, steps))?;
    let place = (target.into(), found.dir.as_deref());
    let inputs = Resolved::inputs(recipe, (config, selection), place, workloads, room.host)?;
    let mut plan = Plan::new(&inputs)?;
    plan.advise(&inputs, room);
    plan.space.model(recipe, config, selection, found.weights);
    if known.is_none() {
        plan.space.tokens(recipe);
    }
    plan.look(recipe, room);
    Ok((plan, found))
}
