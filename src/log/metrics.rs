//! `metrics.jsonl`: one JSON object a line.

use crate::store;
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Bytes of a metrics file: some hundreds a step, of millions of steps.
const LONGEST: u64 = 1 << 30;

/// The metrics file of a run.
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    file: File,
}

impl Metrics {
    /// Opens the file for appending.
    ///
    /// With `resume_from`, events of later steps are taken out first: the run goes through those steps again.
    pub fn open(path: &Path, resume_from: Option<u64>) -> Result<Self, store::Error> {
        let kept = match resume_from {
            None => String::new(),
            Some(step) => {
                let text = match store::read_plain_text(path, LONGEST) {
                    Ok(t) => t,
                    Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
                    Err(e) => return Err(store::Error::read(path, e)),
                };
                text.lines().filter(|l| keep(l, step)).map(|l| format!("{l}\n")).collect()
            }
        };
        store::write_atomic(path, kept.as_bytes())?;
        let file = OpenOptions::new()
            .append(true)
            .open(path)
            .map_err(|e| store::Error::write("open", path, None, e))?;
        Ok(Self { path: path.to_path_buf(), file })
    }

    /// Appends one event.
    pub fn write(&mut self, event: &Value) -> Result<(), store::Error> {
        let line = format!("{event}\n");
        self.file
            .write_all(line.as_bytes())
            .map_err(|e| store::Error::write("append to", &self.path, Some(line.len() as u64), e))
    }
}

/// Whether a line belongs to the part of the run up to `step`.
fn keep(line: &str, step: u64) -> bool {
    let Ok(v) = serde_json::from_str::<Value>(line) else { return false };
    match v.get("event").and_then(Value::as_str) {
        Some("end") | None => false,
        _ => v.get("step").and_then(Value::as_u64).is_none_or(|s| s <= step),
    }
}

/// All events of a metrics file; lines that are cut short are left out.
pub fn read(path: &Path) -> Result<Vec<Value>, store::Error> {
    let text = store::read_plain_text(path, LONGEST).map_err(|e| store::Error::read(path, e))?;
    Ok(text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn resuming_takes_out_what_will_be_done_again() -> anyhow::Result<()> {
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
}
