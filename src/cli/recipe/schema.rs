//! `ft schema`: the JSON schema of recipes, or a Markdown reference of all keys, on stdout.

use crate::cli::console::print;
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
    serde_json::to_writer_pretty(&mut *out, &ft_recipe::schema())?;
    writeln!(out)
}

/// Prints to stdout.
///
/// # Errors
/// A write error on stdout, except a closed pipe (`ft schema | head`).
pub fn run(args: &Args) -> Result<(), ft_base::Error> {
    if args.markdown {
        return print(&ft_recipe::page());
    }
    Ok(ft_recipe::Error::of_print(show(&mut io::stdout().lock()))?)
}
