//! `ft plan`: a recipe's memory plan.

use super::RecipeArgs;
use crate::train::{self, job, sources};
use ft_base::terminal::warn;
use ft_data::hub::Settings;
use ft_kernels::gemm;
use ft_plan::{Plan, rates};
use ft_recipe::{Device, Recipe};

/// Arguments of `ft plan`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Prints the plan of a recipe; returns an error if it does not fit.
pub fn run(args: &Args) -> ft_base::Result<()> {
    gemm::read_caches_ahead();
    let mut recipe = Recipe::load_for_plan(&args.recipe.recipe, &args.recipe.set)?;
    // a plan needs no data: missing sources are ignored
    sources::resolve(&Settings { offline: true, ..Settings::from_env() }, &mut recipe, false);
    let mut notes: Vec<String> = recipe.not_built.iter().map(|d| format!("ft run: {}", d.message)).collect();
    // device presence affects free memory only, not the plan
    let cuda = match recipe.run.device {
        Device::Cpu => false,
        Device::Cuda => true,
        Device::Auto => job::device(Device::Auto).is_ok_and(|d| d.is_cuda()),
    };
    notes.extend(train::carries_nothing(&recipe, cuda).map(|(what, _)| format!("ft run: {what}")));
    let (plan, found) = ft_plan::of_recipe(&recipe, cuda)?;
    found.notes.iter().for_each(|n| warn(n));
    let range = time(&plan);
    let ranks = recipe.parallel.data as u64;
    super::print(&if args.json {
        format!("{:#}\n", plan.json(ranks, range))
    } else {
        let text = plan.text(ranks, range, &notes);
        format!("{}: {} ({})\n{text}", recipe.name, recipe.model.source, found.from)
    })?;
    if plan.fits() { Ok(()) } else { Err(plan.verdict().into()) }
}

/// Predicted time of a step, if `ft bench` has measured this kind of machine.
pub fn time(plan: &Plan) -> Option<rates::Range> {
    rates::range(rates::find(plan.machine)?, plan.step_work())
}
