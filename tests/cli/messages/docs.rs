//! The commands in README.md and `docs/*.md` run.
//!
//! Fenced blocks of a page, by info string:
//!
//! | info string | the test |
//! |---|---|
//! | `sh` | runs each line: `ft ...`, or `cargo run --release -- ...` with the built binary. `cargo test`, `cargo build` are not run |
//! | `sh no-test: REASON` | runs nothing; the reason must not be empty |
//! | `text output` | each line, except `...`, is a line of the output of the command before |
//! | `LANGUAGE file=NAME` | writes the block to a file |
//! | others | nothing, but a line must not begin with `ft ` or `cargo run ` |
//!
//! All pages share one copy of `recipes/` and `data/`, in the order README.md, then `docs/` by name, so that later pages can use
//! the run of the quickstart. Without network access to the hub.

use crate::tasks::learned::by_the_pages;
use crate::world::{FT, Ran, World, ran, repository};
use std::path::Path;
use std::process::Command;

/// A fenced block.
struct Block {
    /// Page and line of the fence.
    place: String,
    info: String,
    lines: Vec<String>,
}

impl Block {
    /// The reason for `no-test`, if the block has that mark.
    fn skipped(&self) -> Option<&str> {
        self.info.split_once("no-test").map(|(_, rest)| rest.trim_start_matches(':').trim())
    }

    /// The commands: lines with continuations joined, without comments.
    fn commands(&self) -> Vec<String> {
        let text = self.lines.join("\n").replace("\\\n", " ");
        let lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
        lines.map(String::from).collect()
    }
}

/// README.md and the pages directly in `docs/`: text and name.
fn pages() -> Vec<(String, String)> {
    let root = repository();
    let mut names = vec!["README.md".to_string()];
    let entries = std::fs::read_dir(root.join("docs")).expect("a folder").flatten();
    let mut docs: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    docs.retain(|n| n.ends_with(".md"));
    docs.sort();
    names.extend(docs.iter().map(|n| format!("docs/{n}")));
    let read = |name: String| (std::fs::read_to_string(root.join(&name)).expect("text"), name);
    names.into_iter().map(read).collect()
}

fn blocks(name: &str, text: &str) -> Vec<Block> {
    let mut found = Vec::new();
    let mut open: Option<Block> = None;
    for (i, line) in text.lines().enumerate() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(info), None) => {
                let place = format!("{name}:{}", i + 1);
                open = Some(Block { place, info: info.trim().into(), lines: Vec::new() });
            }
            (Some(_), Some(_)) => found.extend(open.take()),
            (None, Some(block)) => block.lines.push(line.into()),
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "{name}: a fence is not closed");
    found
}

/// Arguments of `ft`, or `None` for a command of cargo that is not run.
///
/// # Panics
/// A command of another program, or syntax of a shell other than quotes: such a block needs `no-test`.
fn arguments(command: &str, place: &str) -> Option<Vec<String>> {
    if command.starts_with("cargo test") || command.starts_with("cargo build") {
        return None;
    }
    let rest = command.strip_prefix("cargo run --release -- ").or_else(|| command.strip_prefix("ft "));
    let rest =
        rest.unwrap_or_else(|| panic!("{place}: not a command of ft, and not marked no-test: {command}"));
    let (mut words, mut word, mut quote) = (Vec::new(), String::new(), None);
    for c in rest.chars() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (Some(_), c) => word.push(c),
            (None, '"' | '\'') => quote = Some(c),
            (None, ' ') => words.push(std::mem::take(&mut word)),
            (None, '|' | '>' | '<' | '&' | ';' | '$' | '`') => {
                panic!("{place}: {c:?} is for a shell: {command}")
            }
            (None, c) => word.push(c),
        }
    }
    assert!(quote.is_none(), "{place}: a quote is not closed: {command}");
    words.push(word);
    words.retain(|w| !w.is_empty());
    Some(words)
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("a folder").flatten() {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy(&path, &to);
        } else {
            std::fs::copy(&path, &to).expect("copied");
        }
    }
}

/// Each command runs, prints what the page says, and what trains learns.
#[test]
fn commands_of_the_pages_run() {
    let w = World::new();
    for folder in ["recipes", "data"] {
        copy(&repository().join(folder), &w.path(folder));
    }
    let mut commands = 0;
    for (text, name) in pages() {
        let mut last: Option<Ran> = None;
        for block in blocks(&name, &text) {
            let place = &block.place;
            if let Some(reason) = block.skipped() {
                assert!(reason.len() > 5, "{place}: no-test needs a reason: ```sh no-test: REASON");
            } else if let Some((_, file)) = block.info.split_once("file=") {
                w.write(file, block.lines.join("\n") + "\n");
            } else if block.info == "text output" {
                let ran = last.as_ref().unwrap_or_else(|| panic!("{place}: no command before this output"));
                for line in block.lines.iter().filter(|l| *l != "...") {
                    let is = |out: &str| out.lines().any(|l| l.trim_end() == line.trim_end());
                    assert!(
                        is(&ran.out) || is(&ran.err),
                        "{place}: no longer printed: {line}\n{}{}",
                        ran.out,
                        ran.err
                    );
                }
            } else if block.info.split(' ').next() == Some("sh") {
                for command in block.commands() {
                    let Some(words) = arguments(&command, place) else { continue };
                    let words: Vec<&str> = words.iter().map(String::as_str).collect();
                    let ran = w.ft(&words);
                    assert_eq!(ran.code, 0, "{place}: {command}\n{}{}", ran.out, ran.err);
                    last = Some(ran);
                    commands += 1;
                }
            } else {
                let shell = block.lines.iter().find(|l| l.starts_with("ft ") || l.starts_with("cargo run "));
                assert!(shell.is_none(), "{place}: a command in a block without sh: {shell:?}");
            }
        }
    }
    assert!(commands >= 20, "only {commands} commands were found");
    by_the_pages(&w);
}

/// Commands in running text name existing subcommands.
#[test]
fn verbs_in_the_pages_exist() {
    let help = ran(Command::new(FT).arg("--help").output().expect("started")).out;
    let verbs: Vec<&str> = help
        .lines()
        .filter_map(|l| l.strip_prefix("  ")?.split(' ').next())
        .filter(|v| !v.is_empty())
        .collect();
    assert!(verbs.contains(&"run"), "{help}");
    for (text, name) in pages() {
        for code in text.split('`').skip(1).step_by(2) {
            let Some(verb) = code.strip_prefix("ft ").and_then(|c| c.split_whitespace().next()) else {
                continue;
            };
            let is_word = verb.bytes().all(|b| b.is_ascii_lowercase());
            let is_left_out = verb == "serve" && !cfg!(feature = "serve");
            assert!(!is_word || is_left_out || verbs.contains(&verb), "{name}: there is no ft {verb}");
        }
    }
}

/// CONTRIBUTING.md: `unsafe` is in two crates; all others forbid it.
#[test]
fn all_crates_but_two_forbid_unsafe_code() {
    let root = repository();
    let crates = std::fs::read_dir(root.join("crates")).expect("a folder").flatten().map(|e| e.path());
    let others = crates.filter(|c| !c.ends_with("ft-base") && !c.ends_with("ft-kernels"));
    let files =
        others.map(|c| c.join("src/lib.rs")).chain(["src/lib.rs", "src/main.rs"].map(|f| root.join(f)));
    for file in files {
        let text = std::fs::read_to_string(&file).expect("text");
        assert!(text.contains("#![forbid(unsafe_code)]"), "{}", file.display());
    }
}

/// Installations take the dependencies of Cargo.lock, as `.ci/install` does.
#[test]
fn pages_install_the_locked_dependencies() {
    for (text, name) in pages() {
        let mut installs = text.split("cargo install ").skip(1);
        assert!(installs.all(|rest| rest.starts_with("--locked ")), "{name}: cargo install without --locked");
    }
}

/// Links between the pages lead to files.
#[test]
fn links_of_the_pages_lead_to_files() {
    for (text, name) in pages() {
        let folder = repository().join(&name).parent().expect("a parent").to_path_buf();
        for link in text.split("](").skip(1).filter_map(|l| l.split(')').next()) {
            let file = link.split('#').next().unwrap_or_default();
            if !link.starts_with("http") && !file.is_empty() {
                assert!(folder.join(file).exists(), "{name}: {link} is not there");
            }
        }
    }
}
