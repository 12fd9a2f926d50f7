//! The `ft` binary: parse, run, print the error, exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    ft::cli::main()
}
