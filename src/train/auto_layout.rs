//! `parallel = "auto"`: the fastest layout of `ft plan --devices` over the devices at hand.

use super::job::{device, model};
use crate::train::Error;
use ft_base::terminal::tell;
use ft_engine::ranks::{CollectiveId, Comm};
use ft_hub::{Settings, Want};
use ft_kernels::cuda;
use ft_plan::links::Network;
use ft_plan::{Devices, Target};
use ft_recipe::Recipe;

const CHOSEN: CollectiveId = CollectiveId::all("the choice of a layout");

/// Replaces `parallel = "auto"` by the fastest planned layout over `ranks` devices, or without a number over the CUDA
/// devices of this machine, and says which. Any other recipe stays as it is.
///
/// # Errors
/// A missing device; a model that cannot be found or planned; no layout that fits.
pub fn choose(recipe: &mut Recipe, ranks: Option<usize>) -> ft_base::Result<()> {
    if !recipe.auto_layout {
        return Ok(());
    }
    let set = settings(recipe, ranks)?;
    Ok(recipe.adopt_layout(&set)?)
}

/// As [`choose`], in processes: rank 0 chooses for all.
pub fn agree(recipe: &mut Recipe, comm: &dyn Comm) -> ft_base::Result<()> {
    if !recipe.auto_layout {
        return Ok(());
    }
    let set = if comm.rank() == 0 {
        let set = settings(recipe, Some(comm.world()))?;
        comm.broadcast_object(CHOSEN, &set)?;
        set
    } else {
        let absent = || Error::Usage("rank 0 has chosen no layout".into());
        comm.receive_object::<Vec<String>>(CHOSEN)?.ok_or_else(absent)?
    };
    Ok(recipe.adopt_layout(&set)?)
}

/// The settings of the fastest layout, in command-line form.
fn settings(recipe: &Recipe, ranks: Option<usize>) -> ft_base::Result<Vec<String>> {
    let target = Target::of(&device(recipe.run.device)?);
    let here = if target.cuda { cuda::count() } else { 1 };
    let devices = Devices { count: ranks.unwrap_or(here), network: Network::find(target, None, None, None) };
    // the plan reads the config on disk
    model(&Settings::from_env(), recipe, Want::Config, true)?;
    let found = ft_plan::layouts_of_recipe(recipe, target, devices)?;
    let best = found.first()?;
    let place = recipe.place("parallel");
    tell(&format!("{place}: parallel = \"auto\" is {}: {}", best.words(), found.devices.words()));
    Ok(best.settings())
}
