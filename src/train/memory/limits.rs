//! Refuses runs without enough memory.

use crate::train::job::{Job, device};
use ft_base::memory;
use ft_base::terminal::warn;
use ft_hub::{Settings, Want};
use ft_plan::{Plan, report};
use ft_recipe::{Recipe, Weights};

/// Refuses a run without enough memory before the model is downloaded.
///
/// # Errors
/// [`ft_plan::Error::DoesNotFit`]. Other errors are left to later checks.
pub fn before_download(recipe: &Recipe) -> ft_base::Result<()> {
    let (source, revision) = (&recipe.model.source, &recipe.model.revision);
    if recipe.resolve(source).exists() || recipe.model.weights == Weights::Random {
        return Ok(());
    }
    let offline = Settings { offline: true, ..Settings::from_env() };
    if ft_hub::fetch_model_with(&offline, source, revision, Want::Weights, false).is_ok() {
        return Ok(());
    }
    let cuda = device(recipe.run.device)?.is_cuda();
    match ft_plan::of_recipe(recipe, cuda) {
        Ok((plan, _)) if refused(recipe, &plan) => Err(plan.refusal().into()),
        _ => Ok(()),
    }
}

/// Returns true if the plan exceeds a limit that must hold: `memory.budget`, free memory on the CPU (where
/// plans are exact), host memory, disk space, or the devices of the server.
fn refused(recipe: &Recipe, plan: &Plan) -> bool {
    let device = !plan.fits_device() && (recipe.memory.budget.is_some() || !plan.machine.cuda);
    device || !plan.space.fits() || !plan.fits_server()
}

/// Refuses a run without enough memory. Only warns if the plan is an estimate.
///
/// # Errors
/// [`ft_plan::Error::DoesNotFit`].
pub fn check(job: &Job, plan: &Plan) -> ft_base::Result<()> {
    if refused(&job.recipe, plan) {
        return Err(plan.refusal().into());
    }
    if !plan.fits() {
        warn(&plan.refusal().to_string());
    }
    let there = memory::available_bytes().filter(|_| job.device.is_cpu());
    if let (Some(budget), Some(there)) = (job.recipe.memory.budget, there)
        && plan.total() > there
    {
        let (budget, needed, there) =
            (report::bytes(budget), report::bytes(plan.total()), report::bytes(there));
        warn(&format!(
            "the run needs {needed} and keeps within memory.budget = {budget}, but only {there} are available here"
        ));
    }
    Ok(())
}
