//! `ft report`: one run, or a comparison of several, as one HTML file, or served while they go on.

use crate::cli::console::print;
use crate::infer::usage;
use crate::report::{self, Live};
use crate::train::signals::Signals;
use ft_base::store::folder_of;
use ft_base::terminal::tell;
use std::path::{Path, PathBuf};

/// Arguments of `ft report`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder of a run (run.output) or its metrics.jsonl, finished or not; of several runs, the report compares
    /// them
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Where to write; RUN/report.html unless told, for several runs comparison.html here
    #[arg(long, value_name = "FILE", conflicts_with = "live")]
    out: Option<PathBuf>,
    /// Serve the page to browsers of this machine, and renew it while the run goes on
    #[arg(long)]
    live: bool,
    /// With --live: port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8001, requires = "live")]
    port: u16,
}

/// Writes the report and prints the path, or serves it and prints the address.
///
/// # Errors
/// A folder without metrics; a file that cannot be written; a port in use.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let runs: Vec<PathBuf> = args.runs.iter().map(|run| folder(run).to_path_buf()).collect();
    if args.live {
        return live(runs, args.port);
    }
    let path = report::write(&runs, args.out.as_deref())?;
    print(&format!("{}\n", path.display()))
}

/// The folder of a run, also by its metrics.
fn folder(run: &Path) -> &Path {
    if run.ends_with("metrics.jsonl") && run.is_file() { folder_of(run) } else { run }
}

/// Serves the page until a signal, which ends the process at once.
fn live(runs: Vec<PathBuf>, port: u16) -> ft_base::Result<()> {
    let fail =
        |e: std::io::Error| usage(format!("--port {port}: {e}\n  hint: another port, or 0 for a free one"));
    let _signals = Signals::catch()?;
    let live = Live::bind(runs, port).map_err(fail)?;
    // A folder without metrics is said here, not in the browser.
    live.page()?;
    print(&format!("http://{}/\n", live.address().map_err(fail)?))?;
    tell("ctrl-c ends it");
    live.serve().map_err(fail)
}
