//! `ft report`: a run as one HTML file.

use crate::report;
use std::path::PathBuf;

/// Arguments of `ft report`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder of a run (run.output), finished or not
    run: PathBuf,
    /// Where to write; RUN/report.html unless told
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Writes the report and prints its path.
///
/// # Errors
/// A folder without metrics; a file that cannot be written.
pub fn run(args: &Args) -> crate::Result<()> {
    let path = report::write(&args.run, args.out.as_deref())?;
    super::print(&format!("{}\n", path.display()))
}
