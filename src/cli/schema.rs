//! `ft schema`: the JSON schema of recipes, or a reference of their keys, on stdout.
use std::io::{self, Write};

/// Arguments of `ft schema`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print the reference of all keys as Markdown instead
    #[arg(long)]
    markdown: bool,
}

/// Prints the JSON schema of recipes to `out`.
///
/// # Errors
/// Those of writing to `out`.
pub fn show(out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, &ft_recipe::schema())?;
    writeln!(out)
}

/// The verb: prints to stdout.
///
/// # Errors
/// A stdout that takes no more; a reader that goes away (`ft schema | head`) is no error.
pub fn run(args: &Args) -> Result<(), ft_base::Error> {
    if args.markdown {
        return super::print(&ft_recipe::page());
    }
    Ok(ft_recipe::Error::of_print(show(&mut io::stdout().lock()))?)
}
