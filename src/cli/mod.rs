//! The command line: one file a verb.

pub mod data;
pub mod quantize;
pub mod recipes;
pub mod run;
pub mod schema;

use crate::error::Error;
use crate::recipe::color_on_stderr;
use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// Fine-tune large language models from a recipe file.
#[derive(Debug, Parser)]
#[command(name = "ft", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

/// A recipe and what is set over it.
#[derive(Clone, Debug, clap::Args)]
pub struct RecipeArgs {
    /// The recipe, a TOML file
    pub recipe: PathBuf,
    /// Any recipe key by its dotted path: run.steps=10, train.0.rank=8
    #[arg(value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Train as a recipe says
    Run(run::Args),
    /// Write a model in 4 bits (NF4), as bitsandbytes stores it
    Quantize(quantize::Args),
    /// List the recipes built into the binary, or print one
    Recipes {
        /// Its name
        name: Option<String>,
    },
    /// Print the JSON schema of recipes, for editors
    Schema,
}

/// Parses the command line, runs the verb, prints the error, and gives the exit code.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            // help and version go to stdout and are no error
            let code = if e.use_stderr() { crate::ExitCode::Usage as u8 } else { 0 };
            let _ = e.print();
            return ExitCode::from(code);
        }
    };
    let result = match cli.verb {
        Verb::Run(args) => run::run(&args),
        Verb::Quantize(args) => quantize::run(&args),
        Verb::Recipes { name } => recipes::run(name.as_deref()),
        Verb::Schema => schema::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            match &e {
                Error::Recipe(r) => eprintln!("{}", r.render(color_on_stderr())),
                e => eprintln!("error: {e}"),
            }
            ExitCode::from(e.exit_code() as u8)
        }
    }
}
