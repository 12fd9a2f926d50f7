//! `metrics.csv`: training steps and evaluations as a table, for spreadsheets and data frames.

use super::logger::Logger;
use ft_base::store;
use serde_json::Value;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The columns, as the first line has them; fields missing from an event stay empty.
const COLUMNS: &str = "event,step,loss,aux_loss,z_loss,grad_norm,lr,tokens,target_tokens,seconds,tokens_per_second,\
    peak_device_bytes,peak_host_bytes,exact_match,rouge_l,regex_match,rewards_chosen,rewards_rejected,margins,\
    accuracy,logps_chosen,logps_rejected,nll,kl,pairs,rows,desirable,target_weight,kd,ce,f1";

/// The open table of a run.
#[derive(Debug)]
pub struct Table {
    path: PathBuf,
    file: File,
}

impl Table {
    /// Writes a table of `events`, replacing any existing file, and keeps it open for appending.
    pub fn open(path: &Path, events: &[Value]) -> Result<Self, store::Error> {
        let mut text = format!("{COLUMNS}\n");
        events.iter().filter_map(row).for_each(|row| text.push_str(&row));
        store::write_atomic(path, text.as_bytes())?;
        Ok(Self { path: path.to_path_buf(), file: store::append(path)? })
    }
}

impl Logger for Table {
    /// Appends a step or an evaluation, and no other event.
    fn write(&mut self, event: &Value) -> Result<(), store::Error> {
        let Some(row) = row(event) else { return Ok(()) };
        let written = self.file.write_all(row.as_bytes());
        written.map_err(|e| store::Error::write_sized("append to", &self.path, Some(row.len() as u64), e))
    }
}

/// Formats an event as a line; `None` except for steps and evaluations. Cells are numbers or one word
/// and need no quotes.
fn row(event: &Value) -> Option<String> {
    if !matches!(event["event"].as_str(), Some("step" | "eval")) {
        return None;
    }
    let cell = |column: &str| match &event[column] {
        Value::Number(n) => n.to_string(),
        Value::String(word) => word.clone(),
        _ => String::new(),
    };
    Some(COLUMNS.split(',').map(cell).collect::<Vec<_>>().join(",") + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn steps_and_evaluations_are_rows() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("metrics.csv");
        let before = [
            json!({"event": "start", "step": 0}),
            json!({"event": "step", "step": 1, "loss": 2.5, "lr": 1e-3, "tokens": 7, "grad_norm": null}),
        ];
        let mut t = Table::open(&path, &before)?;
        t.write(&json!({"event": "sample", "step": 1, "prompt": "a,b"}))?;
        t.write(
            &json!({"event": "eval", "step": 1, "loss": 2.0, "target_tokens": 3, "margins": 0.5, "kd": 0.25}),
        )?;
        let mut read = csv::Reader::from_path(&path)?;
        let columns: Vec<&str> = COLUMNS.split(',').collect();
        assert_eq!(read.headers()?.iter().collect::<Vec<_>>(), columns);
        let rows = read.records().collect::<Result<Vec<_>, _>>()?;
        let column = |name: &str| columns.iter().position(|c| *c == name).expect("a column");
        assert_eq!((&rows[1][column("margins")], &rows[1][column("kd")]), ("0.5", "0.25"));
        let shown: Vec<Vec<&str>> = rows.iter().map(|r| r.iter().take(9).collect()).collect();
        assert_eq!(
            shown,
            [
                ["step", "1", "2.5", "", "", "", "0.001", "7", ""],
                ["eval", "1", "2.0", "", "", "", "", "", "3"],
            ]
        );
        Ok(())
    }
}
