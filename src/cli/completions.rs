//! `ft completions` and `ft man`: shell completions and manual pages.

use crate::cli::console::print;
use clap_complete::Shell;
use std::path::{Path, PathBuf};

/// Arguments of `ft man`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder to write the pages into, such as ~/.local/share/man/man1
    dir: PathBuf,
}

/// Prints a completion script for a shell.
///
/// # Errors
/// A write error on stdout.
pub fn completions(shell: Shell, command: &mut clap::Command) -> ft_base::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, command, "ft", &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// Writes a manual page for `ft` and one per subcommand.
///
/// # Errors
/// A write error.
pub fn man(args: &Args, command: clap::Command) -> ft_base::Result<()> {
    let at = |path: &Path, e| ft_base::store::Error::write("write", path, e);
    std::fs::create_dir_all(&args.dir).map_err(|e| at(&args.dir, e))?;
    clap_mangen::generate_to(command, &args.dir).map_err(|e| at(&args.dir, e))?;
    print(&format!("{}\n", args.dir.join("ft.1").display()))
}
