//! Reports of finished, killed and resumed runs, and of hostile metrics.

mod charts;
mod live;
mod runs;

use super::error::Error;
use super::render;
use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use std::path::Path;

/// A run folder with the given metrics lines.
fn folder(lines: &[Value]) -> Result<tempfile::TempDir> {
    let dir = tempfile::tempdir()?;
    let text: String = lines.iter().map(|l| format!("{l}\n")).collect();
    std::fs::write(dir.path().join("metrics.jsonl"), text)?;
    std::fs::write(dir.path().join("recipe.toml"), "[model]\nsource = \"small\"\n")?;
    Ok(dir)
}

fn start(steps: u64) -> Value {
    json!({
        "event": "start", "name": "pirate", "time": 1_700_000_000, "command": ["ft", "run", "pirate.toml"],
        "versions": {"ft": "0.1.0"}, "hashes": {"data": "abc123"}, "device": "cpu", "steps": steps,
        "plan": {
            "recompute_layers": 1, "recompute_of": 3, "reason": "it fits", "peak_device_bytes": 4000,
            "device": {"weights_mlp": 1000, "adapters": 500, "gradients": 500, "activations": 2000},
            "where": "backward of layer 2", "budget": 8192, "host_bytes_before_loading": 4096,
            "host": {"process": 9000},
        },
    })
}

fn step(step: u64, loss: f64) -> Value {
    json!({
        "event": "step", "step": step, "loss": loss, "grad_norm": 0.5, "lr": 1e-3, "tokens": 100,
        "target_tokens": 60, "seconds": 2.0, "tokens_per_second": 50.0, "peak_device_bytes": 4100,
        "peak_host_bytes": 8192,
    })
}

fn eval(step: u64, loss: f64) -> Value {
    json!({"event": "eval", "step": step, "loss": loss, "target_tokens": 10})
}

fn sample(step: u64, prompt: &str, reply: &str) -> Value {
    json!({"event": "sample", "step": step, "prompt": prompt, "reply": reply})
}

fn end(steps: u64) -> Value {
    json!({
        "event": "end", "step": steps, "peak_device_bytes": 4200, "planned_peak_bytes": 4000,
        "time": 1_700_000_060,
        "memory": {
            "planned": {"frozen_weights": 1500, "gradients": 500, "moments": 0, "activations_and_temporaries": 2000},
            "measured": {"frozen_weights": 1600, "gradients": 500, "moments": 0, "activations_and_temporaries": 2100},
            "planned_phases": {"forward": 3000}, "measured_phases": {"forward": 3300, "saving": 10},
        },
    })
}

/// The page of a folder.
fn page(dir: &Path) -> Result<String, Error> {
    render::page(&[dir.to_path_buf()], false)
}

/// The page of a folder, checked for closed tags and no external requests.
#[track_caller]
fn whole(dir: &tempfile::TempDir) -> Result<String> {
    let html = page(dir.path())?;
    balanced(&html)?;
    for wanted in
        ["<script", "<link", "<img", "src=", "href=", "url(", "@import", "http:", "https:", "NaN", "inf "]
    {
        ensure!(!html.contains(wanted), "{wanted:?} is in the page");
    }
    Ok(html)
}

/// Checks that tags are properly nested and attributes quoted.
fn balanced(html: &str) -> Result<()> {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = html;
    while let Some(at) = rest.find('<') {
        rest = &rest[at..];
        let tag = &rest[1..rest.find('>').context("a tag without an end")?];
        rest = &rest[tag.len() + 2..];
        ensure!(tag.matches('"').count().is_multiple_of(2) && !tag.contains('<'), "<{tag}>");
        let name = tag.split([' ', '/']).find(|n| !n.is_empty()).context("a tag without a name")?;
        if tag.starts_with('/') {
            let last = open.pop();
            ensure!(last == Some(name), "</{name}> closes {last:?}");
        } else if !(tag.ends_with('/') || ["!DOCTYPE", "meta", "br"].contains(&name)) {
            open.push(name);
        }
        if tag == "style" {
            rest = &rest[rest.find("</style").context("style has no end")?..];
        }
    }
    ensure!(open.is_empty(), "not closed: {open:?}");
    Ok(())
}

#[track_caller]
fn says(html: &str, what: &[&str]) {
    for w in what {
        assert!(html.contains(w), "{w:?} is not in the page");
    }
}
