//! `ft bench`

use super::RecipeArgs;
use crate::recipe::{Error as RecipeError, Recipe};
use crate::train::bench;
use std::io::Write;

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

/// Measures, and prints what was measured.
pub fn run(args: &Args) -> crate::Result<()> {
    let recipe = Recipe::load(&args.recipe.recipe, &args.recipe.set)?;
    let measured = bench::run(recipe, args.steps as usize)?;
    if let Some(path) = &measured.kept {
        eprintln!("the rate is kept in {} for plans", path.display());
    }
    let mut out = std::io::stdout().lock();
    let printed = match args.json {
        true => writeln!(out, "{:#}", measured.json),
        false => out.write_all(measured.text.as_bytes()),
    };
    Ok(RecipeError::of_print(printed)?)
}
