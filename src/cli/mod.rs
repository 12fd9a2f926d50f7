//! Command line: one file per subcommand, in folders by purpose.
//!
//! ```text
//! recipe/   verbs that read a recipe without weights: check, data, init, plan, recipes, schema
//! train/    verbs that compute with a recipe, and their results: run, bench, eval, logits, report, routes
//! model/    verbs on a model or an adapter: export, merge, push, quantize
//! chat/     conversation on the terminal
//! serve/    HTTP server
//! doctor    this machine
//! args      options of several verbs
//! console   results and errors
//! ```

mod aliases;
mod args;
mod chat;
mod completions;
mod console;
mod doctor;
mod model;
mod quickstart;
mod recipe;
#[cfg(feature = "serve")]
mod serve;
mod train;
mod version;

use crate::infer::usage;
use clap::{CommandFactory, Parser, Subcommand};
use console::{color_headings, exit};
use ft_base::memory;
use ft_base::terminal::{
    color_on_stderr, color_on_stdout, escape, panics, print_escaped, tell, tell_wrapped,
};
use ft_kernels::gemm::pairs;
use model::{export, merge, push, quantize};
use recipe::{check, data, import, init, plan, recipes, schema};
use rustix::process::{Resource, getrlimit};
use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;
use train::{bench, eval, logits, report, routes, run};

#[derive(Debug, Parser)]
#[command(name = "ft", version = version::VERSION, long_version = version::long(), about)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

/// In order of use: recipe, data, plan, run, results; then tools.
#[derive(Debug, Subcommand)]
enum Verb {
    /// Ask what a recipe needs, and write one
    Init(init::Args),
    /// Write a recipe from a configuration of axolotl, LLaMA-Factory, torchtune or TRL
    ///
    /// Lists each key of the file: taken, converted, without effect here, or not supported.
    Import(import::Args),
    /// Show rows as text with what is supervised in them, and their statistics
    Data(data::Args),
    /// Report every problem of a recipe, its model and its data, without loading weights
    Check(check::Args),
    /// Estimate a recipe's memory, and say whether it fits
    Plan(plan::Args),
    /// Train as a recipe says
    Run(run::Args),
    /// Write a run as one HTML file: curves, memory, samples, recipe
    Report(report::Args),
    /// Talk to a model
    Chat(chat::Args),
    /// Loss and perplexity on the evaluation data
    Eval(eval::Args),
    /// Serve a model by the API that OpenAI's clients speak
    #[cfg(feature = "serve")]
    Serve(serve::Args),
    /// Write base and adapter as one model
    Merge(merge::Args),
    /// Write an adapter, or a model, in the layout of another program
    Export(export::Args),
    /// Upload an adapter or a model to the hub, with a card
    Push(push::Args),
    /// Write rows with a teacher's log-probabilities, for task = "distill"
    ///
    /// The rows are those of the recipe, with the tokens of its model. The teacher has the same tokenizer; it runs
    /// forward only, and is not in memory when the student trains. Prints the [data] lines that read the files.
    Logits(logits::Args),
    /// Write a model in 4 bits (NF4), as bitsandbytes stores it
    Quantize(quantize::Args),
    /// Show the devices, memory and libraries of this machine, and the choices of ft
    Doctor,
    /// Measure speed and memory on synthetic rows
    ///
    /// Prints tokens a second, the time of each part of a step, arithmetic as a share of the machine's fastest
    /// matrix product, and memory beside the plan. A part that nothing does is shown as "-" (0 in JSON):
    /// recompute, where no layer is recomputed.
    Bench(bench::Args),
    /// Mixture models: how often each expert is chosen on the training data
    Routes(routes::Args),
    /// List the recipes built into the binary, or print one
    Recipes {
        /// Its name
        name: Option<String>,
    },
    /// Print the JSON schema of recipes, for editors; or a reference of all keys
    Schema(schema::Args),
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

/// Runs the command line of this process and returns the exit code. After a failure the process ends without exit
/// handlers, since other threads may still be in a collective.
///
/// With a small `ulimit -s` or any `ulimit -v` the command line runs on a thread with a stack of fixed
/// size: the main thread's stack grows on demand, and the kernel kills the process if the limit leaves no
/// memory for it. Without limits it runs on the main thread, and only subcommands with computations get a separate
/// thread, one of the compute pool.
pub fn main() -> ExitCode {
    let work = || call(std::env::args_os());
    let code = if is_limited() { on_thread(work) } else { work() };
    if code != 0 {
        let _ = std::io::stdout().flush();
        ft_base::ExitCode::of(code).end_process();
    }
    ExitCode::SUCCESS
}

fn on_thread(work: impl FnOnce() -> u8 + Send + 'static) -> u8 {
    let thread = memory::room_for_thread(STACK)
        .and_then(|()| std::thread::Builder::new().stack_size(STACK).spawn(work));
    match thread {
        // the panic hook has reported it
        Ok(thread) => thread.join().unwrap_or(ft_base::ExitCode::Internal as u8),
        Err(e) => {
            tell(&format!("error: out of memory: no thread to work on: {e}"));
            ft_base::ExitCode::DoesNotFit as u8
        }
    }
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
    crate::train::memory::tell_failures();
    panics::told(|| verb(words)).unwrap_or_else(|code| code as u8)
}

/// Names of the subcommands.
#[cfg(test)]
fn subcommands() -> Vec<String> {
    Cli::command().get_subcommands().map(|c| c.get_name().to_string()).collect()
}

fn verb<W: Into<OsString> + Clone>(words: impl IntoIterator<Item = W>) -> u8 {
    let cli = match Cli::try_parse_from(words) {
        Ok(cli) => cli,
        Err(e) => {
            // help and version go to stdout and are no errors
            let code = if e.use_stderr() { ft_base::ExitCode::Usage as u8 } else { 0 };
            if let Some(advice) = aliases::advice(&e) {
                tell_wrapped(&advice);
                return code;
            }
            let color = if e.use_stderr() { color_on_stderr() } else { color_on_stdout() };
            let plain = e.render().to_string();
            let text = escape(&plain);
            let text = if color { color_headings(&text).into() } else { text };
            match e.use_stderr() {
                true => tell_wrapped(text.trim_end()),
                // a closed pipe is no error
                false => drop(print_escaped(&text)),
            }
            return code;
        }
    };
    if let Err(e) = crate::train::memory::start_threads() {
        return exit(&[e]);
    }
    // reject an invalid environment variable before any work
    if let Err(e) = pairs::path() {
        return exit(&[usage(e.to_string())]);
    }
    let outcome = match cli.verb {
        Verb::Run(args) => match computing(|| run::run(&args)) {
            Ok(code) => return code,
            Err(e) => Err(e),
        },
        Verb::Check(args) => return exit(&check::run(&args)),
        Verb::Data(args) => return exit(&data::run(&args)),
        Verb::Eval(args) => computing(|| eval::run(&args)),
        Verb::Logits(args) => computing(|| logits::run(&args)),
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
        Verb::Import(args) => return exit(&import::run(&args)),
        Verb::Schema(args) => schema::run(&args),
        Verb::Push(args) => push::run(&args),
        Verb::Doctor => doctor::run(),
        Verb::Completions { shell } => completions::completions(shell, &mut Cli::command()),
        Verb::Man(args) => completions::man(&args, Cli::command()),
    };
    exit(outcome.err().as_slice())
}

/// Runs a subcommand on a thread of the compute pool: parallel work then starts without waking another thread. Under
/// limits it runs on the caller's thread, because each thread reserves address space.
fn computing<T: Send>(verb: impl FnOnce() -> ft_base::Result<T> + Send) -> ft_base::Result<T> {
    if is_limited() {
        return verb();
    }
    let done = memory::on_stack(STACK, || {
        let _threads = crate::train::memory::start_threads_beside(1)?;
        verb()
    });
    let no_thread = |e| ft_plan::Error::DoesNotFit(format!("threads cannot start: {e}"));
    done.map_err(no_thread)?.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ft_base::terminal::wrap;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Pages keep their words, and their lines fit, at two widths.
    #[test]
    fn help_pages_break_between_words() {
        let mut cli = Cli::command();
        cli.build();
        let mut pages = vec![cli.render_help().to_string(), cli.render_long_help().to_string()];
        for verb in cli.get_subcommands_mut() {
            pages.extend([verb.render_help().to_string(), verb.render_long_help().to_string()]);
        }
        let words = |s: &str| s.split_whitespace().map(String::from).collect::<Vec<_>>();
        for (page, width) in pages.iter().flat_map(|p| [(p, 80), (p, 60)]) {
            let wrapped = wrap(page, width);
            assert_eq!(words(&wrapped), words(page));
            for line in wrapped.lines() {
                assert!(line.chars().count() <= width || words(line).len() == 1, "{width}: {line}");
            }
        }
    }
}
