//! `ft bench`: throughput and memory on synthetic rows; rates of links and of a card.

use crate::cli::args::RecipeArgs;
use crate::cli::console::print;
use crate::train::bench;
use ft_base::terminal::tell;
use serde_json::{Value, json};
use std::path::PathBuf;

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
    if let Some(recipe) = &args.recipe {
        let program = std::env::current_exe().ok();
        let measured = bench::run(recipe.load()?, args.steps as usize, program.as_deref())?;
        return show(args, measured.kept, &measured.json, measured.text);
    }
    if args.probe {
        let measured = bench::run_probe()?;
        return show(args, measured.keep(), &json!(measured.probe), measured.text());
    }
    // the parser asks for a recipe without it
    let Some(ranks) = args.ranks else { return Ok(()) };
    let link = bench::run_links(ranks as usize)?;
    link.text.map_or(Ok(()), |text| show(args, link.kept, &link.json, text))
}

fn show(args: &Args, kept: Option<PathBuf>, json: &Value, text: String) -> ft_base::Result<()> {
    if let Some(path) = kept {
        let rates = if args.probe { "rates are" } else { "rate is" };
        tell(&format!("the {rates} kept in {} for plans", path.display()));
    }
    print(&if args.json { format!("{json:#}\n") } else { text })
}
