//! `ft run`: trains as a recipe says.

use super::processes;
use crate::cli::args::RecipeArgs;
use crate::cli::console::print;
use crate::infer::{check_moved, usage};
use crate::train::{self, Options, Outcome, layout};
use ft_base::terminal::{hush, tell, to_terminal};
use ft_recipe::Launch;

/// Arguments of `ft run`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Go on from the newest whole checkpoint of the run folder
    #[arg(long, conflicts_with = "overwrite")]
    resume: bool,
    /// With --resume: go on from the checkpoint of this step; later checkpoints are removed, and their steps done again
    #[arg(long, value_name = "N", requires = "resume")]
    step: Option<u64>,
    /// Replace what an earlier run left in the run folder: checkpoints when this one starts, the result when the new
    /// one is whole
    #[arg(long)]
    overwrite: bool,
    /// With --resume: a recipe key, or hash.data, hash.model, .., that may differ from the checkpoint's
    #[arg(long, value_name = "KEY", requires = "resume")]
    accept_change: Vec<String>,
}

/// Trains, and prints the folder of the result; or starts the processes that do. Returns the exit code.
pub fn run(args: &Args) -> ft_base::Result<u8> {
    processes::follow_parent()?;
    Launch::check().map_err(usage)?;
    let launch = Launch::of_env();
    if launch.as_ref().is_some_and(|l| l.rank > 0) {
        // rank 0 prints the same messages
        hush();
    }
    let recipe = args.recipe.load().inspect_err(|_| {
        // another machine may lack the recipe, or have another one; without local ranks, any process may be its first
        if launch.is_some_and(|l| l.local.is_none_or(|n| n == 0)) {
            to_terminal();
        }
    })?;
    if args.resume {
        check_moved(&args.recipe.recipe, &recipe)?;
    }
    if let Some(start) = processes::wanted(&recipe)? {
        return processes::start(&start);
    }
    let options = Options {
        resume: args.resume,
        overwrite: args.overwrite,
        accept_change: args.accept_change.clone(),
        step: args.step,
        program: std::env::current_exe().ok(),
        observer: None,
    };
    match train::run(recipe, &options)? {
        Outcome::Done { result } => print(&format!("{}\n", result.display()))?,
        Outcome::Followed => {}
        Outcome::Already { result } => {
            let end = result.parent().and_then(layout::end_of);
            let step = end.and_then(|e| e["step"].as_u64());
            let after = step.map_or(String::new(), |n| format!(", after step {n}"));
            tell(&format!("this run is finished already{after}"));
            print(&format!("{}\n", result.display()))?;
        }
    }
    Ok(0)
}
