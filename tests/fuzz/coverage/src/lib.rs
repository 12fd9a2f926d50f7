//! Shared by all targets: a folder of good files, and a command that reads one file written by the fuzzer.
//!
//! A finding is a panic, a crash, memory above libFuzzer's limit, or an exit code not expected for this
//! file. Once fixed, a finding is added to `tests/fixtures/corpus`, like findings of the seeded mutations.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Writes `bytes` to `file` in the folder of good files and runs `ft COMMAND`, with `@` replaced by the
/// file. The command must end with one of these exit codes.
pub fn run(file: &str, bytes: &[u8], command: &str, codes: &[u8]) {
    let home = home();
    std::fs::write(home.join(file), bytes).expect("written");
    let words = std::iter::once("ft").chain(command.split(' '));
    let args: Vec<String> = words.map(|w| w.replace('@', &home.to_string_lossy())).collect();
    let code = ft::cli::call(args);
    assert!(codes.contains(&code), "ft {command}: exit code {code}");
}

/// The folder of good files of this process. Not the working directory, because libFuzzer finds the
/// corpus by relative paths.
fn home() -> &'static Path {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    HOME.get_or_init(|| {
        // In memory, if available.
        let shared = Path::new("/dev/shm");
        let parent = if shared.is_dir() { shared.to_path_buf() } else { std::env::temp_dir() };
        let home = tempfile::tempdir_in(parent).expect("a folder").keep();
        fill(&home).expect("copied");
        home
    })
}

fn fill(home: &Path) -> std::io::Result<()> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    let reference = repository.join("tests/fixtures/reference/qwen3-dense");
    for (from, to) in [
        (repository.join("data/model"), "chat"),
        (reference.join("model"), "model"),
        (reference.join("adapter_init"), "adapter"),
    ] {
        std::fs::create_dir(home.join(to))?;
        for entry in std::fs::read_dir(from)? {
            let entry = entry?;
            std::fs::copy(entry.path(), home.join(to).join(entry.file_name()))?;
        }
    }
    std::fs::create_dir(home.join("run"))?;
    let rows = [
        r#"{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello world"}]}"#,
        r#"{"input_ids": [1, 2, 3, 4, 5, 6]}"#,
    ];
    let at = home.display();
    for (model, format, row) in [("chat", "messages", rows[0]), ("model", "tokens", rows[1])] {
        let recipe = format!(
            "[model]\nsource = '{at}/{model}'\n[[train]]\nmodules = ['attention']\n[data]\ntrain = [{{ source = \
             '{at}/{model}.jsonl', format = '{format}' }}]\neval = [{{ source = '{at}/{model}.jsonl', format = '{format}' }}]\n\
             max_length = 64\n[run]\ndevice = 'cpu'\n"
        );
        std::fs::write(home.join(format!("{model}.toml")), recipe)?;
        std::fs::write(home.join(format!("{model}.jsonl")), format!("{row}\n"))?;
    }
    Ok(())
}
