//! The `ft` binary: parse, run, print the error, exit code.

#![forbid(unsafe_code)]

use std::process::ExitCode;

/// Counts the engine's allocations, for comparison with the plan.
#[global_allocator]
static ALLOCATOR: ft_base::memory::CountingAllocator = ft_base::memory::CountingAllocator;

fn main() -> ExitCode {
    if cfg!(target_feature = "crt-static") {
        ft_base::names::without_modules();
    }
    ft::cli::main()
}
