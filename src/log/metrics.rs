//! `metrics.jsonl`: one JSON object per line.
//!
//! Users and other programs may edit the file. Unreadable lines are dropped with a warning, and a file
//! removed or replaced during the run is detected at the next event.

use super::logger::Logger;
use super::observer::Observer;
use super::table::Table;
use ft_base::store;
use ft_base::terminal::warn;
use serde_json::Value;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Size limit of a metrics file in bytes: a few hundred bytes for each of millions of steps.
const LONGEST: u64 = 1 << 30;

/// The open metrics file of a run.
pub struct Metrics {
    path: PathBuf,
    file: File,
    /// Expected length of the file in bytes.
    len: u64,
    /// Kinds of the events at the step the run resumes from.
    kept: Vec<String>,
    /// Receivers of the same events.
    loggers: Vec<Box<dyn Logger>>,
    observer: Option<Observer>,
    /// True once the observer has ended the run.
    ended: bool,
}

impl Metrics {
    /// Opens the file for appending.
    ///
    /// With `resume_from`, first removes events of later steps, since the run repeats these steps. Also
    /// removes evaluations at `resume_from` without a finite loss, `end` events, and unreadable lines.
    pub fn open(path: &Path, resume_from: Option<u64>) -> Result<Self, store::Error> {
        let (mut text, mut kept) = (Vec::new(), Vec::new());
        if let Some(step) = resume_from {
            let (lines, damaged) = match lines(path) {
                Ok(read) => read,
                Err(e) if e.kind() == ErrorKind::NotFound => Default::default(),
                Err(e) => return Err(store::Error::run(path, e)),
            };
            if damaged > 0 {
                let (path, lines) = (path.display(), if damaged == 1 { "line" } else { "lines" });
                warn(&format!("{path}: {damaged} {lines} in it cannot be read, and are left out"));
            }
            for (line, event) in lines.iter().filter(|(_, event)| keep(event, step)) {
                text.extend(line);
                text.push(b'\n');
                if event["step"].as_u64() == Some(step) {
                    kept.extend(event["event"].as_str().map(String::from));
                }
            }
        }
        store::write_atomic(path, &text)?;
        let (path, file) = (path.to_path_buf(), store::append(path)?);
        let mut metrics =
            Self { path, file, len: 0, kept, loggers: Vec::new(), observer: None, ended: false };
        metrics.len = metrics.size()?;
        Ok(metrics)
    }

    /// Number of events of this kind at the step the run resumes from.
    pub fn count(&self, kind: &str) -> usize {
        self.kept.iter().filter(|k| *k == kind).count()
    }

    /// Sends later events to another place too.
    pub fn add(&mut self, logger: impl Logger + 'static) {
        self.loggers.push(Box::new(logger));
    }

    /// Shows later events to an observer.
    pub fn observe(&mut self, observer: Observer) {
        self.observer = Some(observer);
    }

    /// Whether the observer has ended the run.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// Maintains `metrics.csv` next to the file, with all past and later events.
    pub fn tabulate(&mut self) -> Result<(), store::Error> {
        self.add(Table::open(&self.path.with_extension("csv"), &read(&self.path)?)?);
        Ok(())
    }

    /// Appends one event.
    pub fn write(&mut self, event: &Value) -> Result<(), store::Error> {
        let line = format!("{event}\n");
        self.follow_changes()?;
        self.file
            .write_all(line.as_bytes())
            .map_err(|e| store::Error::write_sized("append to", &self.path, Some(line.len() as u64), e))?;
        self.len += line.len() as u64;
        self.loggers.iter_mut().try_for_each(|logger| logger.write(event))?;
        self.ended |= self.observer.as_ref().is_some_and(|o| o.see(event).is_break());
        Ok(())
    }

    fn size(&self) -> Result<u64, store::Error> {
        self.file.metadata().map(|m| m.len()).map_err(|e| store::Error::run(&self.path, e))
    }

    /// Detects changes made by other programs. Restores the file if it was removed.
    fn follow_changes(&mut self) -> Result<(), store::Error> {
        let fail = |what, e| store::Error::write(what, &self.path, e);
        let shown = self.path.display();
        let ours = self.file.metadata().map_err(|e| fail("look at", e))?;
        match std::fs::metadata(&self.path) {
            Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => {
                if ours.len() < self.len {
                    warn(&format!("{shown}: another program took lines out of it"));
                    self.len = ours.len();
                }
                return Ok(());
            }
            Ok(_) => warn(&format!(
                "{shown}: another program replaced it; the run goes on writing to the new file"
            )),
            Err(e)
                if e.kind() == ErrorKind::NotFound
                    && self.path.parent().is_none_or(|d| d.as_os_str().is_empty() || d.is_dir()) =>
            {
                warn(&format!("{shown}: another program removed it; it is written again"));
                // The contents stay readable through the open file descriptor.
                let mut text = Vec::new();
                self.file
                    .rewind()
                    .and_then(|()| self.file.read_to_end(&mut text))
                    .map_err(|e| store::Error::run(&self.path, e))?;
                store::write_atomic(&self.path, &text)?;
            }
            Err(e) => return Err(fail("append to", e)),
        }
        self.file = store::append(&self.path)?;
        self.len = self.size()?;
        Ok(())
    }
}

/// The bytes of a line, and the parsed event.
type Line = (Vec<u8>, Value);

/// Reads the JSON lines, and counts the invalid ones. A truncated last line does not count.
fn lines(path: &Path) -> io::Result<(Vec<Line>, usize)> {
    let bytes = store::read_plain(path, LONGEST)?;
    let (mut good, mut damaged) = (Vec::new(), 0);
    for line in bytes.split_inclusive(|b| *b == b'\n') {
        let text = line.strip_suffix(b"\n").unwrap_or(line);
        match serde_json::from_slice(text) {
            Ok(event) => good.push((text.to_vec(), event)),
            Err(_) => damaged += usize::from(line.ends_with(b"\n") && !text.trim_ascii().is_empty()),
        }
    }
    Ok((good, damaged))
}

/// Whether an event belongs to the run up to and including `step`.
fn keep(event: &Value, step: u64) -> bool {
    let at = event["step"].as_u64();
    match event["event"].as_str() {
        Some("end") | None => false,
        Some("eval") if at == Some(step) => event["loss"].is_number(),
        _ => at.is_none_or(|s| s <= step),
    }
}

/// The current time in seconds since 1970.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Reads all events of a metrics file, skipping invalid lines.
pub fn read(path: &Path) -> Result<Vec<Value>, store::Error> {
    let (lines, _) = lines(path).map_err(|e| store::Error::run(path, e))?;
    Ok(lines.into_iter().map(|(_, event)| event).collect())
}

/// Number of bytes at the end of a file searched for the last event; an `end` event takes a few kilobytes.
const LAST: u64 = 64 << 10;

/// The last complete event of a metrics file. `None` if the file is missing, the line is invalid, or the
/// event is longer than `LAST` bytes (as with the counts of very many experts).
pub fn last(path: &Path) -> Option<Value> {
    let mut file = store::open_plain(path).ok()?;
    let from = file.metadata().ok()?.len().saturating_sub(LAST);
    let mut bytes = Vec::new();
    file.seek(io::SeekFrom::Start(from)).ok()?;
    file.take(LAST).read_to_end(&mut bytes).ok()?;
    let end = bytes.iter().rposition(|b| *b == b'\n')?;
    let line = bytes[..end].rsplit(|b| *b == b'\n').next()?;
    serde_json::from_slice(line).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ft_base::error::Failure;
    use serde_json::json;

    #[test]
    fn resuming_removes_later_steps_from_the_metrics() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("metrics.jsonl");
        let mut m = Metrics::open(&path, None)?;
        for e in [
            json!({"event": "start"}),
            json!({"event": "step", "step": 1, "loss": 2.5}),
            json!({"event": "step", "step": 2, "loss": 2.25}),
            json!({"event": "eval", "step": 2, "loss": 2.0}),
            json!({"event": "step", "step": 3}),
        ] {
            m.write(&e)?;
        }
        std::fs::OpenOptions::new().append(true).open(&path)?.write_all(b"{\"event\": \"st")?;
        drop(Metrics::open(&path, Some(2))?);
        let steps: Vec<_> = read(&path)?.iter().map(|e| e["step"].as_u64()).collect();
        assert_eq!(steps, [None, Some(1), Some(2), Some(2)]);
        Ok(())
    }

    #[test]
    fn unreadable_lines_of_metrics_are_left_out() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("metrics.jsonl");
        let good = b"{\"event\":\"step\",\"step\":1,\"loss\":2.5000}\n".to_vec();
        let nan = b"{\"event\":\"eval\",\"step\":2,\"loss\":null}\n".to_vec();
        let bad = b"{\"event\":\"step\",\"name\":\"\xff\",\"step\":2}\n\0\n[".to_vec();
        std::fs::write(&path, [good.clone(), nan, bad].concat())?;
        assert_eq!(last(&path), None, "the last whole line is no event");
        let m = Metrics::open(&path, Some(2))?;
        assert_eq!(m.count("eval"), 0, "an evaluation without a number is done again");
        assert_eq!(std::fs::read(&path)?, good);
        std::fs::write(&path, [b"[]\n".to_vec(), good, b"{\"event\": \"e".to_vec()].concat())?;
        assert_eq!(
            last(&path).map(|e| e["step"].clone()),
            Some(json!(1)),
            "one that is being written does not count"
        );
        assert_eq!(last(&dir.path().join("none")), None);
        Ok(())
    }

    /// Events survive the removal of the file by another program.
    #[test]
    fn a_file_that_was_removed_or_replaced_is_noticed() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("metrics.jsonl");
        let mut m = Metrics::open(&path, None)?;
        let mut write = |n: u64| m.write(&json!({"event": "step", "step": n}));
        let steps = || -> anyhow::Result<Vec<_>> {
            Ok(read(&path)?.iter().filter_map(|e| e["step"].as_u64()).collect())
        };
        write(1)?;
        std::fs::remove_file(&path)?;
        write(2)?;
        assert_eq!(steps()?, [1, 2]);
        std::fs::rename(&path, dir.path().join("old"))?;
        std::fs::write(&path, "{\"step\":7}\n")?;
        write(3)?;
        assert_eq!(steps()?, [7, 3]);
        std::fs::write(&path, "")?;
        write(4)?;
        assert_eq!(steps()?, [4]);
        std::fs::remove_dir_all(dir.path())?;
        assert!(write(5).is_err_and(|e| e.exit_code() == ft_base::ExitCode::Storage));
        Ok(())
    }
}
