//! Answers to `log.samples` as an artifact of the run: a table for MLflow's pages and for `mlflow.load_table`.

use super::client::{Client, Failure};
use serde_json::{Value, json};

/// Name of the artifact.
const FILE: &str = "samples.json";
const COLUMNS: [&str; 3] = ["step", "prompt", "reply"];

/// The table of a run.
pub struct Samples {
    /// Path of the artifact on the server.
    path: String,
    rows: Vec<Value>,
}

impl Samples {
    /// Finds the place for the table of run `id`, and the rows of its earlier part.
    ///
    /// # Errors
    /// A failed call, or artifacts that the server does not take itself.
    pub fn open(client: &Client, id: &str) -> Result<Self, Failure> {
        let path = format!("{}/{FILE}", client.artifacts(id)?);
        let known = client.list(id)?.iter().any(|name| name == FILE);
        let rows = if known { client.artifact(&path)?["data"].as_array().cloned() } else { None };
        let list = json!([{"path": FILE, "type": "table"}]).to_string();
        client.tag(id, "mlflow.loggedArtifacts", &list)?;
        Ok(Self { path, rows: rows.unwrap_or_default() })
    }

    /// Adds sample events. An answer to the same prompt after the same step replaces the earlier one.
    pub fn add(&mut self, client: &Client, events: &[&Value]) -> Result<(), Failure> {
        for event in events {
            let row: Vec<&Value> = COLUMNS.iter().map(|key| &event[key]).collect();
            self.rows.retain(|old| (&old[0], &old[1]) != (row[0], row[1]));
            self.rows.push(json!(row));
        }
        client.write_artifact(&self.path, &json!({"columns": COLUMNS, "data": self.rows}))
    }
}
