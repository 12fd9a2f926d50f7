//! Command line: one file per subcommand.

mod base;
pub mod bench;
pub mod chat;
pub mod check;
pub mod completions;
pub mod data;
pub mod eval;
pub mod export;
mod gguf;
mod given;
pub mod init;
mod lines;
pub mod merge;
pub mod plan;
pub mod push;
pub mod quantize;
pub mod recipes;
pub mod report;
pub mod routes;
pub mod run;
pub mod schema;
#[cfg(feature = "serve")]
pub mod serve;

use crate::train;
use clap::builder::PossibleValuesParser;
use clap::{CommandFactory, Parser, Subcommand};
use ft_base::error::Error;
use ft_base::memory;
use ft_base::terminal::{color_on_stderr, escape, panics, tell, tell_escaped};
use ft_kernels::gemm::pairs;
use rustix::process::{Resource, getrlimit};
use std::borrow::Cow;
use std::ffi::OsString;
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
    /// The recipe: a TOML file, or the name of a shipped one
    pub recipe: PathBuf,
    /// Any recipe key by its dotted path: run.steps=10, train.0.rank=8
    #[arg(value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Train as a recipe says
    Run(run::Args),
    /// Report every problem of a recipe, its model and its data, without loading weights
    Check(check::Args),
    /// Show rows as text with what is supervised in them, and their statistics
    Data(data::Args),
    /// Loss and perplexity on the evaluation data
    Eval(eval::Args),
    /// Talk to a model
    Chat(chat::Args),
    /// Write base and adapter as one model
    Merge(merge::Args),
    /// Mixture models: how often each expert is chosen on the training data
    Routes(routes::Args),
    /// Write an adapter, or a model, in the layout of another program
    Export(export::Args),
    /// Measure speed and memory on synthetic rows
    ///
    /// Prints tokens a second, the time of each part of a step, arithmetic as a share of the machine's fastest
    /// matrix product, and memory beside the plan. A part that nothing does is shown as "-" (0 in JSON):
    /// recompute, where no layer is recomputed.
    Bench(bench::Args),
    /// Estimate a recipe's memory, and say whether it fits
    Plan(plan::Args),
    /// Write a model in 4 bits (NF4), as bitsandbytes stores it
    Quantize(quantize::Args),
    /// Write a run as one HTML file: curves, memory, samples, recipe
    Report(report::Args),
    /// Serve a model by the API that OpenAI's clients speak
    #[cfg(feature = "serve")]
    Serve(serve::Args),
    /// List the recipes built into the binary, or print one
    Recipes {
        /// Its name
        name: Option<String>,
    },
    /// Ask what a recipe needs, and write one
    Init(init::Args),
    /// Print the JSON schema of recipes, for editors; or a reference of all keys
    Schema(schema::Args),
    /// Upload an adapter or a model to the hub, with a card
    Push(push::Args),
    /// Print a script that completes commands in a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write manual pages
    Man(completions::Args),
}

/// Minimum stack of a subcommand in bytes: the default of Linux for the main thread.
const STACK: usize = 8 << 20;

/// Runs the command line of this process and returns the exit code.
///
/// With a small `ulimit -s` or any `ulimit -v` the subcommand runs on a thread with a stack of fixed
/// size: the main thread's stack grows on demand, and the kernel kills the process if the limit leaves no
/// memory for it. Without limits the subcommand runs on the main thread, since a second thread costs
/// allocator memory.
pub fn main() -> ExitCode {
    let work = || call(std::env::args_os());
    if !is_limited() {
        return ExitCode::from(work());
    }
    let thread = memory::room_for_thread(STACK)
        .and_then(|()| std::thread::Builder::new().stack_size(STACK).spawn(work));
    let code = match thread {
        // the panic hook has reported it
        Ok(thread) => thread.join().unwrap_or(ft_base::ExitCode::Internal as u8),
        Err(e) => {
            tell(&format!("error: out of memory: no thread to work on: {e}"));
            ft_base::ExitCode::DoesNotFit as u8
        }
    };
    ExitCode::from(code)
}

/// Whether the shell limits the stack below [`STACK`], or the address space.
fn is_limited() -> bool {
    let limit = |what| getrlimit(what).current;
    limit(Resource::Stack).is_some_and(|b| b < STACK as u64) || limit(Resource::As).is_some()
}

/// Parses a command line (the first word is the program name), runs the subcommand, prints the error if
/// any, and returns the exit code. A panic is reported in one line, as an internal or an out-of-memory
/// error.
pub fn call<W: Into<OsString> + Clone>(words: impl IntoIterator<Item = W>) -> u8 {
    panics::install();
    train::memory::tell_failures();
    panics::told(|| verb(words)).unwrap_or_else(|code| code as u8)
}

fn verb<W: Into<OsString> + Clone>(words: impl IntoIterator<Item = W>) -> u8 {
    let cli = match Cli::try_parse_from(words) {
        Ok(cli) => cli,
        Err(e) => {
            // help and version go to stdout and are no errors
            let code = if e.use_stderr() { ft_base::ExitCode::Usage as u8 } else { 0 };
            let plain = e.render().to_string();
            match escape(&plain) {
                Cow::Borrowed(_) => {
                    let _ = e.print();
                }
                // the arguments contain control characters
                Cow::Owned(text) => tell_escaped(text.trim_end()),
            }
            return code;
        }
    };
    if let Err(e) = train::memory::start_threads() {
        return exit(&[e.into()]);
    }
    // reject an invalid environment variable before any work
    if let Err(e) = pairs::path() {
        return exit(&[usage(e.to_string())]);
    }
    let outcome = match cli.verb {
        Verb::Run(args) => computing(|| run::run(&args)),
        Verb::Check(args) => return exit(&check::run(&args)),
        Verb::Data(args) => data::run(&args),
        Verb::Eval(args) => computing(|| eval::run(&args)),
        Verb::Chat(args) => computing(|| chat::run(&args)),
        Verb::Merge(args) => merge::run(&args),
        Verb::Routes(args) => computing(|| routes::run(&args)),
        Verb::Export(args) => export::run(&args),
        Verb::Bench(args) => computing(|| bench::run(&args)),
        Verb::Plan(args) => plan::run(&args),
        Verb::Quantize(args) => quantize::run(&args),
        Verb::Report(args) => report::run(&args),
        #[cfg(feature = "serve")]
        Verb::Serve(args) => serve::run(&args),
        Verb::Recipes { name } => recipes::run(name.as_deref()),
        Verb::Init(args) => init::run(&args),
        Verb::Schema(args) => schema::run(&args),
        Verb::Push(args) => push::run(&args),
        Verb::Completions { shell } => completions::completions(shell, &mut Cli::command()),
        Verb::Man(args) => completions::man(&args, Cli::command()),
    };
    exit(outcome.err().as_slice())
}

/// Runs a subcommand on a thread of the compute pool, so that parallel work starts without waking another
/// thread. Under limits it runs on the caller's thread, because each thread reserves address space.
fn computing(verb: impl FnOnce() -> ft_base::Result<()> + Send) -> ft_base::Result<()> {
    if is_limited() {
        return verb();
    }
    std::thread::scope(|s| {
        let work = || {
            let _threads = train::memory::start_threads_beside(1)?;
            verb()
        };
        let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(s, work);
        let no_thread = |e| ft_plan::Error::DoesNotFit(format!("threads cannot start: {e}"));
        thread.map_err(no_thread)?.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// An invalid command.
fn usage(message: impl Into<String>) -> Error {
    train::Error::Usage(message.into()).into()
}

/// Prints errors; the first determines the exit code.
fn exit(errors: &[Error]) -> u8 {
    for e in errors {
        tell_escaped(&render(e, color_on_stderr()));
    }
    errors.first().map_or(0, |e| e.exit_code() as u8)
}

/// Formats `error: ...` with each hint on a line starting with `hint:`; the text is escaped before
/// coloring.
fn render(error: &Error, color: bool) -> String {
    let (red, cyan, reset) = if color { ("\x1b[1;31m", "\x1b[1;36m", "\x1b[0m") } else { ("", "", "") };
    if let Some(e) = error.of::<ft_recipe::Error>()
        && !e.problems().is_empty()
    {
        return e.render(color);
    }
    let mut out = format!("{red}error{reset}: ");
    for (i, line) in escape(&error.to_string()).lines().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        match line.trim_start().strip_prefix("hint:") {
            Some(hint) => out.push_str(&format!("{cyan}hint{reset}:{hint}")),
            None => out.push_str(line),
        }
    }
    out
}

/// Prints a result on stdout. A closed pipe (`| head`) is no error.
fn print(text: &str) -> ft_base::Result<()> {
    Ok(ft_recipe::Error::of_print(ft_base::terminal::print(text))?)
}

/// The values of a recipe key as possible values of an option.
fn words(words: &'static [(&'static str, &'static str)]) -> PossibleValuesParser {
    PossibleValuesParser::new(words.iter().map(|(w, _)| *w))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_stand_at_the_beginning_of_a_line() {
        let e = usage("a\n  hint: b\n  more\nhint: c");
        assert_eq!(render(&e, false), "error: a\nhint: b\n  more\nhint: c");
        assert!(render(&e, true).contains("\x1b[1;36mhint\x1b[0m: b"));
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
