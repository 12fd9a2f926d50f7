//! `ft report`: one run, or a comparison of several, as one HTML file, or served while they go on.

use crate::cli::console::print;
use crate::infer::usage;
use crate::report::{self, Live};
use crate::train::signals::Signals;
use ft_base::terminal::tell;
use std::path::PathBuf;

/// Arguments of `ft report`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder of a run (run.output), finished or not; of several runs, the report compares them
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
    if args.live {
        return live(args);
    }
    let path = report::write(&args.runs, args.out.as_deref())?;
    print(&format!("{}\n", path.display()))
}

/// Serves the page until a signal, which ends the process at once.
fn live(args: &Args) -> ft_base::Result<()> {
    let fail = |e: std::io::Error| {
        usage(format!("--port {}: {e}\n  hint: another port, or 0 for a free one", args.port))
    };
    let _signals = Signals::catch()?;
    let live = Live::bind(args.runs.clone(), args.port).map_err(fail)?;
    // A folder without metrics is said here, not in the browser.
    live.page()?;
    print(&format!("http://{}/\n", live.address().map_err(fail)?))?;
    tell("ctrl-c ends it");
    live.serve().map_err(fail)
}
