//! Fuzzing: for any input file, a command ends with an expected exit code and an explanation.
//!
//! Inputs are mutations of good files, derived from a seed. A worker process runs the command on an
//! input, with little stack and at most 1.5 GiB of memory. A case fails if the command panics, crashes,
//! exceeds a minute of processor time or 1 GiB, has an exit code not expected for this input, reports
//! a bug in ft, prints control characters, leaves partial output, or resumes to a different result.
//!
//! ```text
//! cargo test --release --test fuzz                                            all inputs, about a minute
//! FT_FUZZ_CASES=10000 cargo test --release --test fuzz                        more cases per input
//! FT_FUZZ_CASES=10000 FT_FUZZ_SEED=50000 cargo test --release --test fuzz rows    other cases, of one input
//! FT_FUZZ_CASES=1 FT_FUZZ_SEED=123 cargo test --release --test fuzz rows      only case 123 of rows
//! ```
//!
//! With `-- --nocapture`, findings are printed immediately, followed by statistics on exit codes.
//!
//! Failing cases are written to `target/tmp/fuzz/INPUT-SEED/`. Once fixed, a case is moved to
//! `tests/fixtures/corpus/INPUT/NAME/` with the expected exit code (`corpus.rs`). Every test starts with
//! the corpus of its input.
//!
//! These tests judge how a process ends (exit code, memory, stack, files), by seed. `coverage/` is a
//! crate of targets for `cargo fuzz`, which search for inputs that reach new code, and build on a stable
//! compiler without sanitizers; usage is described in its `Cargo.toml`. `.ci/run` does not run them,
//! because they take a quarter of an hour to build.
//!
//! | file | contents |
//! |---|---|
//! | `inputs` | the table of inputs: good files, mutations, commands, allowed exit codes |
//! | `mutate`, `template`, `tokenizer` | mutations of bytes, lines and JSON; chat templates from a grammar; all components of tokenizers |
//! | `world` | the good files |
//! | `worker` | the process that runs the commands; limits |
//! | `judge` | criteria for failure |
//! | `corpus` | cases as files |
//! | `rendezvous` | ranks that meet beside strangers; no files |
//! | `serve` | requests to `ft serve`, over TCP |
//! | `coverage/` | targets for `cargo fuzz` |

#![allow(clippy::disallowed_methods, clippy::too_many_lines, reason = "tests write files, and list cases")]

mod corpus;
mod dice;
mod inputs;
mod judge;
mod mutate;
mod rendezvous;
#[cfg(feature = "serve")]
mod serve;
mod template;
mod tokenizer;
mod worker;
mod world;

use dice::Dice;
use inputs::{Case, INPUTS};
use std::collections::BTreeMap;
use std::fmt::Write;
use worker::{End, Worker};
use world::Base;

/// The allocator of the binary, for the same out-of-memory behavior.
#[global_allocator]
static ALLOCATOR: ft_base::memory::CountingAllocator = ft_base::memory::CountingAllocator;

/// Maximum number of findings listed in full.
const SHOWN: usize = 30;
/// Number of findings after which an input is abandoned.
const MOST: usize = 100;

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|e| panic!("{variable} = {text:?}: {e}")))
}

/// Runs the corpus of an input and `cases` mutations.
fn fuzz(name: &str, cases: u64) {
    let input = INPUTS.iter().find(|i| i.name == name).expect("an input");
    let (first, cases) = (number("FT_FUZZ_SEED").unwrap_or(0), number("FT_FUZZ_CASES").unwrap_or(cases));
    let base = Base::get();
    let home = home();
    let mut worker = Worker::new(home.path());
    let mut found = Findings::default();
    let mut ends: BTreeMap<String, usize> = BTreeMap::new();
    for (path, case) in corpus::of(name) {
        if let Some(wrong) = judge::run(&case, home.path(), &mut worker, u64::MAX).wrong {
            found.add(&wrong, || path);
        }
    }
    for seed in first..first + cases {
        let case = (input.make)(base, &mut Dice::new(name, seed));
        let judged = judge::run(&case, home.path(), &mut worker, seed);
        judged.ends.iter().for_each(|end| *ends.entry(format!("{end:?}")).or_default() += 1);
        let Some(wrong) = judged.wrong else { continue };
        let wrong = match judged.ends.contains(&End::Hang) {
            true => wrong,
            false => {
                // Run again in a fresh process.
                worker.stop();
                let alone = judge::run(&case, home.path(), &mut worker, seed).wrong;
                alone.unwrap_or_else(|| format!("not when it runs alone: {wrong}"))
            }
        };
        worker.stop();
        found.add(&wrong, || {
            let kept = corpus::keep(&case, name, seed, &wrong);
            let again =
                format!("FT_FUZZ_CASES=1 FT_FUZZ_SEED={seed} cargo test --release --test fuzz {name}");
            println!("{name} {seed}: {wrong}");
            format!("{again}    {}", kept.display())
        });
        if found.total() == MOST {
            println!("{name}: stopped at case {seed}");
            break;
        }
    }
    println!("{name}, {cases} cases from {first}: {ends:?}");
    assert!(found.kinds.is_empty(), "{name}, {cases} cases from {first}:\n{}", found.text());
}

/// Parent folder of cases: in memory if there is enough, since many cases write and sync.
fn home() -> tempfile::TempDir {
    let shared = std::path::Path::new("/dev/shm");
    // That of a container may be of 64 MiB.
    let roomy = shared.is_dir() && ft_base::store::free_bytes(shared).is_some_and(|free| free > 1 << 30);
    let made = if roomy { tempfile::tempdir_in(shared) } else { tempfile::tempdir() };
    made.expect("a folder")
}

/// Findings grouped by kind: equal messages apart from numbers.
#[derive(Default)]
struct Findings {
    kinds: BTreeMap<String, (usize, String, String)>,
}

impl Findings {
    /// Adds a finding. Only the first of a kind is printed in full.
    fn add(&mut self, wrong: &str, again: impl FnOnce() -> String) {
        let line = wrong.lines().next().unwrap_or_default();
        let mut kind: String =
            line.chars().map(|c| if c.is_ascii_digit() { '#' } else { c }).take(70).collect();
        while kind.contains("##") {
            kind = kind.replace("##", "#");
        }
        self.kinds.entry(kind).or_insert_with(|| (0, wrong.to_string(), again())).0 += 1;
    }

    fn total(&self) -> usize {
        self.kinds.values().map(|(n, ..)| n).sum()
    }

    fn text(&self) -> String {
        let mut out = String::new();
        for (count, wrong, again) in self.kinds.values().take(SHOWN) {
            let _ = writeln!(out, "  {count:>5}  {wrong}\n         {again}");
        }
        if self.kinds.len() > SHOWN {
            let _ = writeln!(out, "  and {} kinds more", self.kinds.len() - SHOWN);
        }
        out
    }
}

/// Defines a test per input, with its number of cases.
macro_rules! tests {
    ($($name:ident: $cases:literal;)*) => {
        $(#[test]
        fn $name() {
            fuzz(stringify!($name), $cases);
        })*

        #[test]
        fn every_input_has_a_test() {
            let tests = [$(stringify!($name)),*];
            assert!(INPUTS.iter().map(|i| i.name).eq(tests));
        }
    };
}

tests! {
    recipe: 100;
    config: 100;
    tokenizer: 75;
    template: 75;
    safetensors: 75;
    index: 75;
    adapter: 75;
    rows: 125;
    tables: 125;
    checkpoint: 37;
    metrics: 75;
    limits: 20;
}

/// Strangers and damaged bytes at the rendezvous of ranks.
#[test]
fn rendezvous() {
    const ALONE: &str = "FT_FUZZ_ALONE";
    if std::env::var_os(ALONE).is_none() {
        // Threads and descriptors are counted, and other tests of this process have theirs.
        let mut alone = std::process::Command::new(std::env::current_exe().expect("this binary"));
        alone.args(["rendezvous", "--exact", "--nocapture"]).env(ALONE, "1");
        let said = alone.output().expect("started");
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        return;
    }
    let (first, cases) = (number("FT_FUZZ_SEED").unwrap_or(0), number("FT_FUZZ_CASES").unwrap_or(60));
    let wrong = rendezvous::run(first, cases);
    assert!(wrong.is_empty(), "{} of {cases} from {first}:\n{}", wrong.len(), wrong.join("\n"));
}

/// The program starts under the lowest limits of the input `limits`. Above them, death by a signal is a
/// failure of `ft`.
#[test]
fn limits_that_the_program_starts_under() {
    let home = home();
    for limit in [
        format!("ulimit -v {}", inputs::least_memory()),
        format!("ulimit -n {}", inputs::LEAST_FILES),
        format!("ulimit -s {}", inputs::LEAST_STACK),
    ] {
        let o = worker::limited(home.path(), home.path(), &limit, &["--version".to_string()]);
        let err = String::from_utf8_lossy(&o.err);
        assert!(o.end == End::Code(0) && o.out.starts_with(b"ft "), "{limit}: {:?} {err}", o.end);
    }
}

/// A case is a function of the seed alone.
#[test]
fn the_same_seed_makes_the_same_case() {
    let make =
        |input: &inputs::Input, seed| -> Case { (input.make)(Base::get(), &mut Dice::new(input.name, seed)) };
    for input in INPUTS {
        for seed in 0..20 {
            let (a, b) = (make(input, seed), make(input, seed));
            assert_eq!(format!("{:?}", a.commands), format!("{:?}", b.commands), "{} {seed}", input.name);
            assert!(a.files == b.files, "{} {seed}", input.name);
        }
        assert_ne!(format!("{:?}", make(input, 1)), format!("{:?}", make(input, 2)), "{}", input.name);
    }
}
