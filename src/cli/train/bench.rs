//! `ft bench`: throughput and memory on synthetic rows; rates of links and of a card.

use crate::cli::args::RecipeArgs;
use crate::cli::console::print;
use crate::train::bench::{self, Measured};
use ft_base::terminal::tell;

/// Arguments of `ft bench`.
#[derive(Debug, clap::Args)]
#[command(
    override_usage = "ft bench [OPTIONS] <RECIPE> [KEY=VALUE]...\n       ft bench [OPTIONS] --ranks <N>\n       \
                      ft bench [OPTIONS] --probe"
)]
pub struct Args {
    #[command(flatten)]
    recipe: Option<RecipeArgs>,
    /// Steps to measure, after one to warm up
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// In place of a recipe: measure the links between N ranks, with a CUDA device each, or threads; or the N processes
    /// of a launcher. ft plan --devices and parallel = "auto" then use the rates
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1024))]
    #[arg(conflicts_with_all = ["recipe", "steps"])]
    ranks: Option<u32>,
    /// In place of a recipe: measure the rates of the CUDA card for plans, in a few seconds (products, attention, 4-bit
    /// values, copies, launches). ft run does so at its first start on a card; FT_PROBE=0 leaves that out
    #[arg(long, conflicts_with_all = ["recipe", "steps", "ranks"])]
    probe: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the benchmark and prints the result.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let measured = if let Some(recipe) = &args.recipe {
        let program = std::env::current_exe().ok();
        Some(bench::run(recipe.load()?, args.steps as usize, program.as_deref())?)
    } else if args.probe {
        Some(bench::run_probe()?)
    } else {
        // the parser asks for a recipe without it
        args.ranks.map(|ranks| bench::run_links(ranks as usize)).transpose()?.flatten()
    };
    let Some(Measured { json, text, kept }) = measured else { return Ok(()) };
    if let Some(path) = kept {
        let rates = if args.probe { "rates are" } else { "rate is" };
        tell(&format!("the {rates} kept in {} for plans", path.display()));
    }
    print(&if args.json { format!("{json:#}\n") } else { text })
}
