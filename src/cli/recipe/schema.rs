//! `ft schema`: the JSON schema of recipes, or a Markdown reference of all keys, on stdout.

use crate::cli::console::print;

/// Arguments of `ft schema`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print the reference of all keys as Markdown instead
    #[arg(long)]
    markdown: bool,
}

/// Prints to stdout.
///
/// # Errors
/// A write error on stdout, except a closed pipe (`ft schema | head`).
pub fn run(args: &Args) -> ft_base::Result<()> {
    print(&if args.markdown { ft_recipe::page() } else { format!("{:#}\n", ft_recipe::schema()) })
}
