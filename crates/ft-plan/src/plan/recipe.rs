//! Plans from a recipe alone.

use super::plan::Plan;
use crate::host::Capacity;
use crate::model::{Target, machine, source};
use crate::resolve::{self, Resolved};
use crate::search::{self, Inputs, KnownModels};
use crate::time::actions::Actions;
use crate::workload::{Known, Workload, Workloads, check_steps};
use ft_recipe::Recipe;

/// Plans a recipe from the model's config alone, as `ft plan` does.
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
    let model = Model::find(recipe)?;
    let plan = model.advised(recipe, target.into(), room)?;
    Ok((plan, model.found))
}

/// The model of a recipe, as far as known without weights.
pub(crate) struct Model {
    pub found: source::Found,
    pub resolved: Resolved,
    /// Lengths of samples, if data were measured.
    known: Option<Known>,
    models: KnownModels,
}

impl Model {
    pub fn find(recipe: &Recipe) -> ft_base::Result<Self> {
        let mut found = source::find(recipe)?;
        let resolved = Resolved::new(recipe, found.config.clone(), |config| {
            resolve::selection_without_weights(recipe, config)
        })?;
        found.notes.extend_from_slice(&resolved.selection.notes);
        let known = Known::find(recipe, found.dir.as_deref(), &found.config);
        Ok(Self { found, resolved, known, models: KnownModels::default() })
    }

    fn workloads(&self) -> Workloads<'_> {
        match &self.known {
            Some(known) => Workloads::new(|r| known.workload(r)),
            None => Workloads::new(Workload::of_recipe),
        }
    }

    /// Calls `f` with the inputs of a plan.
    #[cfg(test)]
    pub fn with_inputs<R>(
        &self,
        recipe: &Recipe,
        target: Target,
        room: &Capacity<'_>,
        f: impl FnOnce(&Inputs<'_>) -> ft_base::Result<R>,
    ) -> ft_base::Result<R> {
        let workloads = self.workloads();
        f(&self.inputs(recipe, target, &workloads, room)?)
    }

    fn inputs<'a>(
        &'a self,
        recipe: &'a Recipe,
        target: Target,
        workloads: &'a Workloads<'a>,
        room: &Capacity<'_>,
    ) -> ft_base::Result<Inputs<'a>> {
        let (config, selection) = (&self.resolved.config, &self.resolved.selection);
        Resolved::inputs(
            recipe,
            (config, selection),
            (target, self.found.dir.as_deref()),
            workloads,
            room.host,
        )
    }

    /// The whole plan of the recipe behind this model.
    fn advised(&self, recipe: &Recipe, target: Target, room: &Capacity<'_>) -> ft_base::Result<Plan> {
        let workloads = self.workloads();
        let steps = workloads.of(recipe, recipe.run.micro_rows.count()).steps;
        steps.map_or(Ok(()), |steps| check_steps(recipe, steps))?;
        let inputs = self.inputs(recipe, target, &workloads, room)?;
        let mut plan = Plan::new(&inputs)?;
        plan.advise(&inputs, room);
        plan.space.model(recipe, inputs.config, inputs.selection, self.found.weights);
        if self.known.is_none() {
            plan.space.tokens(recipe);
        }
        plan.look(recipe, room);
        Ok(plan)
    }

    /// The plan of a recipe with the same selection of the same model, against the memory of device and host, and the
    /// lists of actions if it fits. Recipes differ in `parallel` and `run.micro_rows` alone.
    pub fn plan(
        &self,
        recipe: &Recipe,
        target: Target,
        room: &Capacity<'_>,
    ) -> ft_base::Result<(Plan, Option<Actions>)> {
        let workloads = self.workloads();
        let inputs = self.inputs(recipe, target, &workloads, room)?;
        let inputs = Inputs { known: Some(&self.models), ..inputs };
        let (mut plan, actions) = Plan::with_actions(&inputs)?;
        plan.space.look(recipe, inputs.machine, plan.total(), room);
        let fits = plan.space.host_fits();
        Ok((plan, actions.filter(|_| fits)))
    }

    /// Work of a row of the largest micro-batch with nothing recomputed, and the micro-batch's rows.
    pub fn least_work(
        &self,
        recipe: &Recipe,
        target: Target,
        room: &Capacity<'_>,
    ) -> ft_base::Result<(f64, usize)> {
        let workloads = self.workloads();
        search::least_work(&self.inputs(recipe, target, &workloads, room)?)
    }
}
