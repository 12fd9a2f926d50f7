//! One page for several runs: overlaid curves, and recipe differences.

use super::files::Files;
use super::metrics::Metrics;
use super::page::flatten;
use super::plot::{Chart, Curve, LineStyle, Range, Series, Table, cut, duration, grouped, short};
use super::state::State;
use ft_plan::report::bytes;
use minijinja::context;
use minijinja::value::Serde;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Most runs on a page, limited by distinguishable line styles.
pub const MAX_RUNS: usize = 8;
/// Most characters of a value.
const MAX_TEXT: usize = 300;
/// Keys of the "start" event that are not inputs of the run.
const NOT_INPUTS: &[&str] =
    &["event", "name", "time", "command", "folders", "plan", "step", "steps", "given"];

/// A run and its label on the page.
pub struct Run {
    pub name: String,
    pub metrics: Metrics,
    pub files: Files,
}

/// Values of the template, for the page of several runs.
pub fn comparison_view(runs: &[Run]) -> minijinja::Value {
    let names: Vec<&str> = runs.iter().map(|r| r.name.as_str()).collect();
    let recipes = runs.iter().map(|r| r.files.recipe.as_deref().map(keys).unwrap_or_default());
    let inputs = runs.iter().map(|r| inputs(&r.metrics.start));
    let different =
        vec![different(&names, &recipes.collect::<Vec<_>>()), different(&names, &inputs.collect::<Vec<_>>())];
    context! {
        title => cut(&names.join(", "), 200),
        summary => Serde(Table::new(COLUMNS, runs.iter().map(row).collect())),
        charts => Serde(charts(runs)),
        different => Serde(different),
        captions => Serde(["In the recipes", "In what the runs found when they began"]),
    }
}

const COLUMNS: [&str; 10] = [
    "run",
    "state",
    "training loss, smoothed",
    "evaluation loss",
    "best evaluation",
    "steps",
    "tokens",
    "time",
    "tokens a second",
    "peak of the device",
];

/// Summary row of a run.
fn row(run: &Run) -> Vec<String> {
    let m = &run.metrics;
    let last = |s: &Series| s.finite().next_back().map(|(_, y)| short(y)).unwrap_or_default();
    let state = State::new(m, None);
    let (evals, peak) = (m.eval_losses(), m.peak(|s| s.device_bytes));
    vec![
        run.name.clone(),
        format!("{} {}", state.sign, state.words),
        last(&m.smoothed(|s| s.loss)),
        last(&evals),
        evals.lowest().map(|(step, y)| format!("{} after step {step}", short(y))).unwrap_or_default(),
        grouped(m.last_step()),
        grouped(m.sum(|s| s.tokens) as u64),
        duration(m.sum(|s| s.seconds)),
        m.series(|s| s.rate).median().map(short).unwrap_or_default(),
        if peak > 0 { bytes(peak) } else { String::new() },
    ]
}

fn charts(runs: &[Run]) -> Vec<Chart> {
    let span = runs.iter().filter_map(|r| r.metrics.span());
    let span = span.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
    let range = Range { steps: span.unwrap_or((0, 1)), resumed: &[] };
    let chart = |id, title, style: fn(usize) -> LineStyle, of: fn(&Metrics) -> Series, notes: &[&str]| {
        let curves = runs.iter().enumerate().map(|(i, run)| Curve {
            label: &run.name,
            style: style(i),
            points: of(&run.metrics),
        });
        let curves: Vec<Curve<'_>> = curves.filter(|c| c.points.finite().next().is_some()).collect();
        Chart::new(id, title, &curves, &range, notes)
    };
    let nats =
        "Mean cross-entropy of a supervised token, in nats; that of runs on other data is another measure.";
    let smoothed = "Each is an exponential mean over a fiftieth of its run.";
    let (line, dots) = (LineStyle::Run, LineStyle::RunDots);
    let norm = &["Before clipping.", smoothed];
    let charts = [
        chart("loss", "Training loss", line, |m| m.smoothed(|s| s.loss), &[smoothed, nats]),
        chart("evaluation", "Evaluation loss", dots, Metrics::eval_losses, &[nats]),
        chart("norm", "Gradient norm", line, |m| m.smoothed(|s| s.grad_norm), norm),
        chart("lr", "Learning rate", line, |m| m.series(|s| s.lr), &[]),
        chart("speed", "Tokens a second", line, |m| m.series(|s| s.rate), &[]),
    ];
    charts.into_iter().flatten().collect()
}

type Keys = BTreeMap<String, String>;

/// Keys of a resolved recipe, without name and output folder.
fn keys(recipe: &str) -> Keys {
    let table = toml::from_str(recipe).unwrap_or(Value::Null);
    flat_keys(&table, |name| name != "name" && name != "run.output")
}

/// Inputs recorded at the start: versions, hashes, device.
fn inputs(start: &Value) -> Keys {
    flat_keys(start, |name| !name.split('.').next().is_some_and(|key| NOT_INPUTS.contains(&key)))
}

fn flat_keys(v: &Value, keep: impl Fn(&str) -> bool) -> Keys {
    let mut out = Vec::new();
    flatten("", v, &mut out);
    out.into_iter().filter(|f| keep(&f.name)).map(|f| (f.name, f.value)).collect()
}

/// Table of the keys with differing values.
fn different(names: &[&str], all: &[Keys]) -> Table {
    let keys: BTreeSet<&String> = all.iter().flat_map(BTreeMap::keys).collect();
    let count = keys.len();
    let rows: Vec<Vec<String>> = keys
        .into_iter()
        .filter(|k| all.iter().any(|m| m.get(*k) != all[0].get(*k)))
        .map(|k| {
            let cell = |m: &Keys| m.get(k).map_or("–".into(), |v| cut(v, MAX_TEXT));
            std::iter::once(k.clone()).chain(all.iter().map(cell)).collect()
        })
        .collect();
    let note = format!("{} more are alike.", count - rows.len());
    Table { note, ..Table::new(std::iter::once("key").chain(names.iter().copied()), rows) }
}
