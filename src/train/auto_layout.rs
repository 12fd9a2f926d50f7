//! `parallel = "auto"`: the fastest layout of `ft plan --devices` over the devices at hand.

use super::job::device;
use crate::train::Error;
use ft_base::terminal::tell;
use ft_engine::ranks::{CollectiveId, Comm};
use ft_kernels::cuda;
use ft_plan::links::Network;
use ft_plan::{Devices, Layout, Target};
use ft_recipe::{Launch, OneDevice, Recipe};

const CHOSEN: CollectiveId = CollectiveId::all("the choice of a layout");

/// Replaces `parallel = "auto"` by the fastest planned layout over the CUDA devices of this machine, and reports it; to
/// `resume`, by the run folder's layout. Leaves any other recipe unchanged.
///
/// # Errors
/// A missing device; a model that cannot be found or planned; no layout that fits.
pub fn choose(recipe: &mut Recipe, resume: bool) -> ft_base::Result<()> {
    if !recipe.auto_layout {
        return Ok(());
    }
    let set = settings(recipe, resume, None)?;
    Ok(recipe.adopt_layout(&set)?)
}

/// As [`choose`], in processes: rank 0 chooses for all.
pub fn agree(recipe: &mut Recipe, resume: bool, comm: &dyn Comm) -> ft_base::Result<()> {
    if !recipe.auto_layout {
        return Ok(());
    }
    let set = if comm.rank() == 0 {
        let set = settings(recipe, resume, Some(comm.world()))?;
        comm.broadcast_object(CHOSEN, &set)?;
        set
    } else {
        let absent = || Error::Usage("rank 0 has chosen no layout".into());
        comm.receive_object::<Vec<String>>(CHOSEN)?.ok_or_else(absent)?
    };
    Ok(recipe.adopt_layout(&set)?)
}

/// The settings of the fastest layout, in command-line form.
fn settings(recipe: &Recipe, resume: bool, ranks: Option<usize>) -> ft_base::Result<Vec<String>> {
    let target = Target::of(&device(recipe.run.device)?);
    let here = if target.cuda { unserved(&recipe.serve.devices, cuda::count()) } else { 1 };
    let count = ranks.unwrap_or(here);
    let place = recipe.place("parallel");
    if resume && let Some(set) = earlier(recipe, count) {
        tell(&format!("{place}: parallel = \"auto\" is the layout of {}", recipe.run.output.display()));
        return Ok(set);
    }
    let of_machine = ranks.and_then(|_| Launch::of_machine());
    let devices = Devices { count, network: Network::find(target, None, None, of_machine) };
    let found = ft_plan::layouts_of_recipe(recipe, target, devices)?;
    let best = found.first()?;
    tell(&format!("{place}: parallel = \"auto\" is {}: {}", best.words(), found.devices.words()));
    Ok(best.settings())
}

/// Number of devices before the first one of the server, since ranks take the first ones; at least one.
fn unserved(server: &[OneDevice], count: usize) -> usize {
    let on = server.iter().filter_map(|d| match d {
        OneDevice::Cuda(n) => Some(*n),
        OneDevice::Cpu => None,
    });
    on.min().unwrap_or(count).min(count).max(1)
}

/// The layout of the resolved recipe in the run folder, if it has as many ranks. Another one would change the order of
/// sums, and so the bits of the result.
fn earlier(recipe: &Recipe, ranks: usize) -> Option<Vec<String>> {
    let p = Recipe::load(&recipe.run.output.join("recipe.toml"), &[]).ok()?.parallel;
    let set = Layout::of(&p).settings();
    // the plan chose the micro-batches if the recipe's do not divide
    let planned = [&set[..], &["run.micro_rows=auto".to_string()]].concat();
    let legal = [set, planned].into_iter().find(|set| recipe.with(set).is_ok());
    legal.filter(|_| p.ranks() == ranks as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_leave_the_devices_of_the_server() {
        let cuda = OneDevice::Cuda;
        for (server, ranks) in [
            (&[][..], 4),
            (&[OneDevice::Cpu], 4),
            (&[cuda(3)], 3),
            (&[cuda(3), cuda(2)], 2),
            (&[cuda(0)], 1),
            (&[cuda(9)], 4),
        ] {
            assert_eq!(unserved(server, 4), ranks, "{server:?}");
        }
    }
}
