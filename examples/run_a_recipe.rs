//! Runs a recipe from a program, like `ft run`.
//!
//!     cargo run --release --example run_a_recipe

use ft::recipe::Recipe;
use ft::train::{self, Options, Outcome};
use std::path::Path;

fn main() -> ft::Result<()> {
    let recipe = Recipe::load(Path::new("recipes/quickstart.toml"), &["run.output=runs/example".into()])?;
    match train::run(recipe, &Options { overwrite: true, ..Options::default() })? {
        Outcome::Done { result } | Outcome::Already { result } => println!("{}", result.display()),
        Outcome::Followed => {}
    }
    Ok(())
}
