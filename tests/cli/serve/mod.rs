//! `ft serve`, alone and beside a run.

mod checkpoints;
mod ends;
mod refuses;
mod requests;
mod scores;

use serde_json::Value;

/// Contents of the chunks in a stream. The last one signals the end.
fn chunks(body: &str) -> Vec<Value> {
    // In chunked transfer, only event lines matter.
    let data: Vec<&str> = body.lines().filter_map(|l| l.strip_prefix("data: ")).collect();
    let (last, parts) = data.split_last().expect("events");
    assert_eq!(*last, "[DONE]");
    parts.iter().map(|d| serde_json::from_str(d).expect("JSON")).collect()
}
