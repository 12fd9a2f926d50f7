//! Refuses runs without enough memory.

use crate::train::job::Job;
use candle_core::Device;
use ft_base::error::ExitCode;
use ft_base::memory;
use ft_base::terminal::warn;
use ft_hub::{Settings, Want};
use ft_kernels::cuda;
use ft_plan::{Plan, Target, report};
use ft_recipe::{Recipe, Weights};

/// Refuses a run without enough memory, or with settings not allowed by the model, before the model is downloaded.
/// `device` is open: the memory of a closed one is unknown.
///
/// # Errors
/// [`ft_plan::Error::DoesNotFit`]; errors of the recipe. Others are left to later checks.
pub fn before_download(recipe: &Recipe, device: &Device) -> ft_base::Result<()> {
    let (source, revision) = (&recipe.model.source, &recipe.model.revision);
    if recipe.resolve(source).exists() || recipe.model.weights == Weights::Random {
        return Ok(());
    }
    let offline = Settings { offline: true, ..Settings::from_env() };
    if ft_hub::fetch_model_with(&offline, source, revision, Want::Weights, false).is_ok() {
        return Ok(());
    }
    match ft_plan::of_recipe(recipe, Target::of(device)) {
        Ok((plan, _)) if refused(recipe, &plan) => Err(plan.refusal().into()),
        Err(e) if e.exit_code() == ExitCode::Usage => Err(e),
        _ => Ok(()),
    }
}

/// Returns true if the plan exceeds a hard limit: `memory.budget`, free memory on the CPU (plans are exact), all memory
/// of a CUDA device (plans are estimates), host memory, disk space, or the devices of the server.
fn refused(recipe: &Recipe, plan: &Plan) -> bool {
    let estimated = plan.machine.cuda && recipe.memory.budget.is_none();
    let device = match estimated {
        true => cuda::cuda_memory().is_some_and(|(_, all)| plan.engine() > all),
        false => !plan.fits_device(),
    };
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
    let there = match job.device.is_cpu() {
        true => memory::available_bytes(),
        false => cuda::cuda_memory().map(|(free, _)| free),
    };
    if let (Some(budget), Some(there)) = (job.recipe.memory.budget, there)
        && plan.total() > there
    {
        let (budget, needed, there) =
            (report::bytes(budget), report::bytes(plan.total()), report::bytes(there));
        warn(&format!(
            "the run needs {needed} and keeps within memory.budget = {budget}, but only {there} are available here\n  \
             hint: a smaller memory.budget, or none: a plan then keeps within the free memory"
        ));
    }
    Ok(())
}
