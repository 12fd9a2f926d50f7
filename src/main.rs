//! The `ft` binary: parse, run, print the error, exit code.

use std::process::ExitCode;

/// Counts the engine's allocations, so that a run can compare them with its plan.
#[global_allocator]
static ALLOCATOR: ft_base::memory::Counting = ft_base::memory::Counting;

fn main() -> ExitCode {
    ft::cli::main()
}
