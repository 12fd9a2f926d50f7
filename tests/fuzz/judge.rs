//! Judges the outcome of commands.

use super::inputs::{Case, Command};
use super::worker::{End, MEMORY, Outcome, Worker, limited};
use super::world::{self, Base};
use std::path::Path;

/// A check of a case's folder after all commands, in addition to the exit codes.
pub type After = fn(&Path, &[Outcome]) -> Option<String>;

/// The verdict on a case.
#[derive(Debug, Default)]
pub struct Judged {
    /// Description of the failure, if any.
    pub wrong: Option<String>,
    /// How the commands ended.
    pub ends: Vec<End>,
}

/// Writes the files of a case to a new folder below `home`, runs the commands, and judges the outcome.
pub fn run(case: &Case, home: &Path, worker: &mut Worker, number: u64) -> Judged {
    let dir = home.join(format!("case-{number}"));
    std::fs::create_dir_all(&dir).expect("a folder");
    for (name, content) in &case.files {
        world::write(&dir, name, content);
    }
    let mut outcomes = Vec::new();
    let mut wrong = None;
    for c in &case.commands {
        let outcome = match &c.limits {
            None => worker.run(&dir, &c.args),
            Some(limits) => limited(home, &dir, limits, &c.args),
        };
        wrong = wrong.or_else(|| {
            let what = fault(c, &outcome)?;
            let limits = c.limits.as_ref().map_or(String::new(), |l| format!("{l}; "));
            Some(format!("{what}\n      {limits}ft {}", c.args.join(" ")))
        });
        outcomes.push(outcome);
    }
    let wrong = wrong.or_else(|| (case.after)(&dir, &outcomes));
    std::fs::remove_dir_all(&dir).expect("removed");
    Judged { wrong, ends: outcomes.iter().map(|o| o.end).collect() }
}

/// Judges the outcome of one command.
fn fault(command: &Command, o: &Outcome) -> Option<String> {
    let err = String::from_utf8_lossy(&o.err);
    let first = |word: &str| err.lines().find(|l| l.contains(word)).unwrap_or_default().to_string();
    let panic = first("panicked at");
    let last = || err.lines().rev().find(|l| !l.is_empty()).unwrap_or_default().to_string();
    Some(match o.end {
        _ if !panic.is_empty() => panic,
        End::Hang => "it does not end".into(),
        End::Signal(n) => format!("killed by signal {n}: {}", last()),
        End::Exit(n) if err.contains("out of memory") => format!("memory (exit code {n}): {}", last()),
        End::Exit(n) => format!("it ended the process with exit code {n}: {}", last()),
        End::Code(c) if !command.codes.contains(&c) => format!("exit code {c}: {}", first("error")),
        End::Code(_) if o.memory > MEMORY => format!("memory: {} MiB", o.memory >> 20),
        End::Code(c) if c != 0 && !err.contains("error") => format!("exit code {c} without a word"),
        End::Code(_) if err.contains("bug in ft") => format!("it blames itself: {}", first("error")),
        End::Code(_) => return raw(&o.out).or_else(|| raw(&o.err)),
    })
}

/// Finds control characters sent to the terminal.
fn raw(printed: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(printed);
    let steers = |c: char| {
        c.is_control() && !matches!(c, '\n' | '\t')
            || matches!(c, '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
    };
    let line = text.lines().find(|l| l.contains(steers))?;
    let at = line.find(steers)?;
    let near: String = line[at..].chars().take(20).collect();
    let before: String = line.chars().take(60).collect();
    Some(format!("it prints a control character: {} .. {}", before.escape_debug(), near.escape_debug()))
}

/// No further check.
pub fn nothing(_: &Path, _: &[Outcome]) -> Option<String> {
    None
}

/// The output `o` is complete or absent.
pub fn whole_or_absent(dir: &Path, outcomes: &[Outcome]) -> Option<String> {
    let names = |path: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect()
    };
    let done = outcomes.iter().all(|o| o.end == End::Code(0));
    let there = names(&dir.join("o"));
    let tensors = there.iter().any(|n| n.ends_with(".safetensors"));
    if done && !tensors {
        return Some("it says that it is done, and wrote nothing".into());
    }
    if !done && !there.is_empty() {
        return Some(format!("it failed and left {there:?}"));
    }
    let left = names(dir).into_iter().find(|n| n.starts_with(".ft") || n.ends_with(".tmp"));
    left.map(|n| format!("it left {n}"))
}

/// A run resumed from damaged state ends with the same result as an uninterrupted one.
pub fn same_result(dir: &Path, outcomes: &[Outcome]) -> Option<String> {
    let done = outcomes.iter().all(|o| o.end == End::Code(0));
    let result = std::fs::read(dir.join("runs/r/adapter/adapter_model.safetensors")).ok();
    match result {
        Some(bytes) if done && bytes[..] != Base::get().result[..] => {
            Some("another result, and exit code 0".into())
        }
        None if done => Some("no result, and exit code 0".into()),
        _ => None,
    }
}

/// The report contains no script, and no markup from its data.
pub fn no_script(dir: &Path, outcomes: &[Outcome]) -> Option<String> {
    let done = outcomes.iter().all(|o| o.end == End::Code(0));
    let page = std::fs::read_to_string(dir.join("runs/r/report.html"));
    match page {
        Err(e) => done.then(|| format!("no page: {e}")),
        Ok(text) => text.contains("<script").then(|| "the report has a script".into()),
    }
}
