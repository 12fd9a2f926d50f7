//! Plans from a recipe alone.

use super::plan::Plan;
use crate::host::{Capacity, beside_device, budget};
use crate::inference::Server;
use crate::model::{machine, source, stored};
use crate::search::Inputs;
use crate::workload::{Known, Workload, Workloads, check_steps};
use ft_engine::adapters::{self, Selection};
use ft_engine::model::Config;
use ft_recipe::Recipe;

/// Plans a recipe from its model's config alone, as `ft plan` does, for CUDA if `cuda` is set.
///
/// # Errors
/// An unknown or unsupported model, a rule without matches, an unreadable adapter.
pub fn of_recipe(recipe: &Recipe, cuda: bool) -> ft_base::Result<(Plan, source::Found)> {
    of_recipe_in(recipe, cuda, &Capacity::of(machine(recipe, cuda)))
}

/// Like [`of_recipe`], with explicit free memory and disk space.
///
/// # Errors
/// As [`of_recipe`].
pub fn of_recipe_in(
    recipe: &Recipe,
    cuda: bool,
    room: &Capacity<'_>,
) -> ft_base::Result<(Plan, source::Found)> {
    let mut found = source::find(recipe)?;
    let selection = select(recipe, &found.config)?;
    found.notes.clone_from(&selection.notes);
    let machine = stored(machine(recipe, cuda), recipe, &found.config, found.dir.as_deref());
    let known = Known::find(recipe, found.dir.as_deref(), &found.config);
    let workloads = &match &known {
        Some(known) => Workloads::new(|r| known.workload(r)),
        None => Workloads::new(Workload::of_recipe),
    };
    let server = Server::of(recipe, &found.config, &selection, machine.stored)?.map_or(0, |s| s.on_host);
    let workload = workloads.of(recipe, recipe.run.micro_rows.count());
    workload.steps.map_or(Ok(()), |steps| check_steps(recipe, steps))?;
    let inputs = Inputs {
        recipe,
        config: &found.config,
        selection: &selection,
        machine,
        workloads,
        budget: budget(recipe, machine, &workload, (room.host, server)),
        host: beside_device(recipe, machine, (room.host, server)),
    };
    let mut plan = Plan::new(&inputs)?;
    plan.space.model(recipe, &found.config, &selection, found.weights);
    if known.is_none() {
        plan.space.tokens(recipe);
    }
    plan.look(recipe, room);
    Ok((plan, found))
}

pub(crate) fn select(recipe: &Recipe, config: &Config) -> ft_base::Result<Selection> {
    let selection = match (recipe.lora.init.adapter(), recipe.train.is_empty()) {
        (Some(source), true) => {
            let path = recipe.resolve(source);
            let source = if path.exists() { path.display().to_string() } else { source.into() };
            let dir = ft_data::hub::fetch_adapter(&source, "main", false)?;
            Selection::from_peft(config, &adapters::PeftConfig::load(&dir)?)?
        }
        _ => Selection::from_rules(config, &recipe.train)?,
    };
    if selection.parts().is_empty() {
        return Err(adapters::Error::Nothing { place: recipe.place("train").to_string() }.into());
    }
    selection.check_learning_rates(recipe)?;
    Ok(selection)
}
