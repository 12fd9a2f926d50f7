//! Hostile input: whatever a file holds, a command ends, with an exit code of its kind, and says why.
//!
//! An input is made from a good one by mutations that follow from a seed. A worker process runs the command that reads it,
//! with little stack and at most 1.5 GiB of memory. A case fails when the command panics, ends the process, takes more than ten
//! seconds of processor time or 1 GiB, has an exit code that the input does not explain, calls it a bug in ft, prints control
//! characters, leaves half of what it was to write, or resumes to another result.
//!
//! ```text
//! cargo test --release --test fuzz                                            all inputs, about a minute
//! FT_FUZZ_CASES=10000 cargo test --release --test fuzz                        more cases of each
//! FT_FUZZ_CASES=10000 FT_FUZZ_SEED=50000 cargo test --release --test fuzz rows    others, of one input
//! FT_FUZZ_CASES=1 FT_FUZZ_SEED=123 cargo test --release --test fuzz rows      case 123 of rows alone
//! ```
//!
//! With `-- --nocapture` each finding is told when it is met, and at the end how the commands ended.
//!
//! What fails is written to `target/tmp/fuzz/INPUT-SEED/`. Once it is repaired it goes to `tests/fixtures/corpus/INPUT/NAME/`,
//! with the exit code that it must have (`corpus.rs`); each test begins with those of its input.
//!
//! What is judged here is how a process ends (exit code, memory, stack, files), by seed. `coverage/` is a crate of targets
//! for `cargo fuzz`, which build on a stable compiler (without sanitizers) and look for inputs that reach new code; its
//! `Cargo.toml` says how to run them. `.ci/run` does not: they take a quarter of an hour to build.
//!
//! | file | what is in it |
//! |---|---|
//! | `inputs` | the table of inputs: what each is made from, how, what reads it, and the exit codes it may have |
//! | `mutate`, `template`, `tokenizer` | mutations of bytes, lines and JSON; chat templates by a grammar; every component of tokenizers |
//! | `world` | the good files |
//! | `worker` | the process that runs the commands; limits |
//! | `judge` | what counts as wrong |
//! | `corpus` | cases in files |
//! | `coverage/` | the targets for `cargo fuzz` |

mod corpus;
mod dice;
mod inputs;
mod judge;
mod mutate;
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

/// As the binary has it: what is refused is told.
#[global_allocator]
static ALLOCATOR: ft::log::memory::Counting = ft::log::memory::Counting;

/// Findings that are listed in full.
const SHOWN: usize = 30;
/// Findings after which an input is left.
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
                // alone, in a process of its own
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

/// Where cases run: in memory, where the system has such a place, since many write and sync.
fn home() -> tempfile::TempDir {
    let shared = std::path::Path::new("/dev/shm");
    let made = if shared.is_dir() { tempfile::tempdir_in(shared) } else { tempfile::tempdir() };
    made.expect("a folder")
}

/// What was found, by kind: the same words but for numbers.
#[derive(Default)]
struct Findings {
    kinds: BTreeMap<String, (usize, String, String)>,
}

impl Findings {
    /// Adds one; of each kind the first is told in full.
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

/// A test an input, with as many cases as take about ten seconds.
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
    recipe: 400;
    config: 400;
    tokenizer: 300;
    template: 300;
    safetensors: 300;
    index: 300;
    adapter: 300;
    rows: 500;
    tables: 500;
    checkpoint: 150;
    metrics: 300;
    limits: 60;
}

/// The input `limits` begins where the program starts: what ends it by a signal from there on is its own fault.
#[test]
fn limits_that_the_program_starts_under() {
    let home = home();
    for limit in [
        format!("ulimit -v {}", inputs::LEAST_MEMORY),
        format!("ulimit -n {}", inputs::LEAST_FILES),
        format!("ulimit -s {}", inputs::LEAST_STACK),
    ] {
        let o = worker::limited(home.path(), home.path(), &limit, &["--version".to_string()]);
        let err = String::from_utf8_lossy(&o.err);
        assert!(o.end == End::Code(0) && o.out.starts_with(b"ft "), "{limit}: {:?} {err}", o.end);
    }
}

/// A case follows from its seed, and from nothing else.
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
