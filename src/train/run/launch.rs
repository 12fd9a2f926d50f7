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
        let hint = "leave it out: ranks are then threads; or `ft run`";
        let why = "parallel.local: only `ft run` starts processes, and this is another program";
        return Err(Error::Usage(format!("{}: {why}\n  hint: {hint}", recipe.place("parallel.local"))).into());
    }
    match (recipe.parallel.comm, &launch) {
        (ft_recipe::Comm::Threads, Some(Launch { world, .. })) => {
            let hint = format!("leave parallel.comm out, and parallel.data={world}; or no launcher");
            Err(Error::Usage(format!(
                "{}: {world} processes were started, and parallel.comm = \"threads\" is for the ranks \
                    of one\n  hint: {hint}",
                recipe.place("parallel.comm")
            ))
            .into())
        }
        (ft_recipe::Comm::Mpi, Some(Launch { rendezvous: Rendezvous::At(..), .. })) => {
            let what = "parallel.comm = \"mpi\", and the launcher has set RANK, WORLD_SIZE and MASTER_ADDR";
            let hint = "leave parallel.comm out, or start the processes with mpirun";
            Err(Error::Usage(format!("{}: {what}\n  hint: {hint}", recipe.place("parallel.comm"))).into())
        }
        (ft_recipe::Comm::Mpi, _) | (_, Some(_)) => processes::run(recipe, options, launch.as_ref()),
        _ => {
            auto_layout::choose(&mut recipe, None)?;
            run_first(recipe, options, None)
        }
    }
}
