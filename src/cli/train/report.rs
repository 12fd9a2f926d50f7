//! `ft report`: one run, or a comparison of several, as one HTML file.

use crate::cli::console::print;
use crate::report;
use std::path::{Path, PathBuf};

/// Arguments of `ft report`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder of a run (run.output), finished or not; of several runs, the report compares them
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Where to write; RUN/report.html unless told, for several runs comparison.html here
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Writes the report and prints the path.
///
/// # Errors
/// A folder without metrics; a file that cannot be written.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let path = match args.runs.as_slice() {
        [run] => report::write(run, args.out.as_deref())?,
        runs => report::write_comparison(runs, args.out.as_deref().unwrap_or(Path::new("comparison.html")))?,
    };
    print(&format!("{}\n", path.display()))
}
