//! Status of a run.

use super::metrics::{Metrics, count, text};
use super::plot::{cut, first_few, plural};
use crate::log::is_of_signal;
use serde::Serialize;

/// Status of a run.
#[derive(Clone, Debug, Serialize)]
pub struct State {
    /// `finished`, `stopped` or `open`.
    kind: &'static str,
    /// Symbol before the headline.
    pub sign: &'static str,
    /// Headline.
    pub words: String,
    more: Vec<String>,
}

impl State {
    /// `result` is the folder of the result.
    pub fn new(m: &Metrics, result: Option<&str>) -> Self {
        let (last, total) = (m.last_step(), m.total_steps());
        let of = if total > 0 { format!("{last} of {total}") } else { last.to_string() };
        let mut more = Vec::new();
        let (kind, sign, words) = match (&m.end, &m.stopped) {
            (Some(_), _) => ("finished", "✓", format!("finished: {}", plural(last, "step"))),
            (None, Some(s)) => {
                let why = match count(s, "code") {
                    code if is_of_signal(code) => "interrupted by a signal",
                    6 => "stopped by the guard against numbers that are not finite",
                    8 => "stopped: out of memory",
                    5 => "stopped by the disk",
                    _ => "stopped by an error",
                };
                let lines = text(s, "why").lines().map(str::trim).filter(|l| !l.starts_with("hint:"));
                more.extend(lines.take(12).map(|l| cut(l, 400)));
                ("stopped", "■", format!("{why} after step {of}"))
            }
            (None, None) => {
                ("open", "…", format!("not finished: step {of} is the last; still going, or killed"))
            }
        };
        if let Some(result) = result {
            more.push(format!("Result: {result}"));
        }
        if !m.resumed.is_empty() {
            let steps = if m.resumed.len() == 1 { "step" } else { "steps" };
            let times = plural(m.resumed.len() as u64, "time");
            more.push(format!("Resumed {times}, from {steps} {}.", first_few(&m.resumed)));
        }
        if m.cut_short {
            more.push("The last line of metrics.jsonl is cut short, and left out.".into());
        }
        if !m.damaged.is_empty() {
            let lines = plural(m.damaged.len() as u64, "line");
            more.push(format!(
                "{lines} of metrics.jsonl cannot be read, and are left out: {}.",
                first_few(&m.damaged)
            ));
        }
        State { kind, sign, words, more }
    }
}
