//! `ft run`: chooses between one process and a process per rank.

use super::lead::run_first;
use super::options::{Options, Outcome};
use super::processes;
use crate::train::{Error, auto_layout, ranks};
use ft_recipe::{Launch, Recipe, Rendezvous};

/// Trains as the recipe says.
///
/// # Errors
/// Before the first step: errors of recipe, model or data. Later: full disk, non-finite loss, signal.
/// Checkpoints written before the error remain valid.
pub fn run(mut recipe: Recipe, options: &Options) -> ft_base::Result<Outcome> {
    let launch = Launch::of_env();
    // An explicit device allows this check before other processes are contacted.
    if recipe.run.device != ft_recipe::Device::Auto {
        ranks::check_comm(&recipe, recipe.run.device == ft_recipe::Device::Cuda)?;
    }
    if recipe.parallel.local.is_some() && launch.is_none() && recipe.parallel.ranks() > 1 {
        let why = "parallel.local: only `ft run` starts processes, and this is another program\n  hint: leave it \
                   out: ranks are then threads; or `ft run`";
        return Err(Error::at(&recipe, "parallel.local", why).into());
    }
    let refused = match (recipe.parallel.comm, &launch) {
        (ft_recipe::Comm::Threads, Some(Launch { world, .. })) => Some(format!(
            "{world} processes were started, and parallel.comm = \"threads\" is for the ranks of one\n  hint: leave \
             parallel.comm out, and parallel.data={world}; or no launcher"
        )),
        (ft_recipe::Comm::Mpi, Some(Launch { rendezvous: Rendezvous::At(..), .. })) => {
            let why = "parallel.comm = \"mpi\", and the launcher has set RANK, WORLD_SIZE and MASTER_ADDR\n  hint: \
                       leave parallel.comm out, or start the processes with mpirun";
            Some(why.into())
        }
        _ => None,
    };
    if let Some(why) = refused {
        return Err(Error::at(&recipe, "parallel.comm", why).into());
    }
    if launch.is_some() || recipe.parallel.comm == ft_recipe::Comm::Mpi {
        return processes::run(recipe, options, launch.as_ref());
    }
    auto_layout::choose(&mut recipe, options.resume)?;
    run_first(recipe, options, None)
}
