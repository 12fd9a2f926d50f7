//! Runs a recipe from a program, like `ft run`.
//!
//!     cargo run --release --example run_a_recipe

use ft::{Outcome, Run};

fn main() -> ft::Result<()> {
    let run = Run::with_keys("recipes/quickstart.toml", &["run.output=runs/example"])?;
    if let Outcome::Done { result } = run.overwrite().train()? {
        println!("{}", result.display());
    }
    Ok(())
}
