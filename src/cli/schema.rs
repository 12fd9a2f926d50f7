//! `ft schema`: the JSON schema of recipes, or a Markdown reference of all keys, on stdout.

use crate::recipe;
use std::io::{self, Write};

/// Arguments of `ft schema`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print the reference of all keys as Markdown instead
    #[arg(long)]
    markdown: bool,
}

/// Writes the JSON schema of recipes to `out`.
///
/// # Errors
/// Write errors of `out`.
pub fn show(out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, &recipe::schema())?;
    writeln!(out)
}

/// Prints to stdout.
///
/// # Errors
/// A write error on stdout, except a closed pipe (`ft schema | head`).
pub fn run(args: &Args) -> Result<(), crate::Error> {
    if args.markdown {
        return super::print(&recipe::page());
    }
    Ok(recipe::Error::of_print(show(&mut io::stdout().lock()))?)
}
