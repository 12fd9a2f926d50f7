//! `ft bench`: throughput and memory on synthetic rows.

use crate::cli::args::RecipeArgs;
use crate::cli::console::print;
use crate::train::bench;
use ft_base::terminal::tell;

/// Arguments of `ft bench`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Steps to measure, after one to warm up
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the benchmark and prints the result.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let recipe = args.recipe.load()?;
    let measured = bench::run(recipe, args.steps as usize)?;
    if let Some(path) = &measured.kept {
        tell(&format!("the rate is kept in {} for plans", path.display()));
    }
    print(&if args.json { format!("{:#}\n", measured.json) } else { measured.text })
}
