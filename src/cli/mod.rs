//! The command line: one file a verb.

pub mod data;
pub mod recipes;
pub mod schema;

use std::process::ExitCode;

/// Parses the command line, runs the verb, prints the error, and gives the exit code.
pub fn main() -> ExitCode {
    ExitCode::SUCCESS
}
