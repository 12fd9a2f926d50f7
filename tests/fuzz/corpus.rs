//! Cases as files: the regression corpus, and new findings.
//!
//! `tests/fixtures/corpus/INPUT/NAME/` contains the files that differ from the good ones, and
//! `case.txt`: one command per line, with allowed exit codes and arguments. Lines starting with `#` are
//! comments.

use super::inputs::{Case, command};
use super::judge;
use super::world::{Base, Content, Files, repository, write};
use std::path::{Path, PathBuf};

const CASE: &str = "case.txt";

/// All corpus cases of an input, by name.
pub fn of(input: &str) -> Vec<(String, Case)> {
    let folder = repository().join("tests/fixtures/corpus").join(input);
    let mut dirs: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().map(|e| e.expect("an entry").path()).collect();
    dirs.sort();
    dirs.iter().map(|dir| (dir.display().to_string(), open(dir))).collect()
}

fn open(dir: &Path) -> Case {
    let mut files: Files = Base::get().all().clone();
    let mut open = vec![dir.to_path_buf()];
    while let Some(d) = open.pop() {
        for e in std::fs::read_dir(&d).expect("a folder") {
            let path = e.expect("an entry").path();
            if path.is_dir() {
                open.push(path);
                continue;
            }
            let name = path.strip_prefix(dir).expect("inside").display().to_string();
            files.insert(name, Content::bytes(std::fs::read(&path).expect("a file")));
        }
    }
    let Some(Content::Bytes(text)) = files.remove(CASE) else { panic!("{}: no {CASE}", dir.display()) };
    let text = String::from_utf8(text.to_vec()).expect(CASE);
    let commands = text.lines().filter(|l| !l.starts_with('#')).map(|line| {
        let (codes, words) = line.split_once(' ').expect("exit codes and words");
        let codes: Vec<u8> = codes.split(',').map(|c| c.parse().expect("an exit code")).collect();
        command(words, &codes)
    });
    let commands: Vec<_> = commands.collect();
    assert!(!commands.is_empty(), "{}: no command", dir.display());
    Case { files, commands, after: judge::nothing }
}

/// Writes a case to a folder, for inspection and for later addition to the corpus.
pub fn keep(case: &Case, input: &str, seed: u64, wrong: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz").join(format!("{input}-{seed}"));
    // Left over from an earlier run.
    let _ = std::fs::remove_dir_all(&dir);
    let base = Base::get().all();
    for (name, content) in case.files.iter().filter(|(name, content)| base.get(*name) != Some(content)) {
        write(&dir, name, content);
    }
    let mut text: String = wrong.lines().map(|l| format!("# {l}\n")).collect();
    for c in &case.commands {
        let codes: Vec<String> = c.codes.iter().map(u8::to_string).collect();
        text += &format!("{} {}\n", codes.join(","), c.args.join(" "));
    }
    write(&dir, CASE, &Content::bytes(text));
    dir
}
