//! One page for several runs: overlaid curves, and recipe differences.

use super::chart::{Chart, Curve, Frame, Look, Table};
use super::files::Files;
use super::read::Metrics;
use super::series::{Series, duration, grouped, short};
use super::view::{Fact, cut, evals, flat, of_steps, over, state};
use ft_plan::report::bytes;
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Most runs on a page, limited by distinguishable line styles.
pub const MOST: usize = 8;
/// Most characters of a value.
const LONGEST: usize = 300;
/// Keys of the "start" event that are not inputs of the run.
const NOT_GIVEN: &[&str] = &["event", "name", "time", "command", "plan", "step", "steps"];

/// A run and its label on the page.
pub struct Run {
    pub name: String,
    pub metrics: Metrics,
    pub files: Files,
}

/// The page's contents.
#[derive(Clone, Debug, Serialize)]
pub struct Several {
    title: String,
    summary: Table,
    charts: Vec<Chart>,
    different: Vec<Table>,
    captions: [&'static str; 2],
}

impl Several {
    /// Builds the page of `runs`.
    pub fn new(runs: &[Run]) -> Self {
        let names: Vec<&str> = runs.iter().map(|r| r.name.as_str()).collect();
        let recipes = runs.iter().map(|r| r.files.recipe.as_deref().map(keys).unwrap_or_default());
        let given = runs.iter().map(|r| given(&r.metrics.start));
        Self {
            title: cut(&names.join(", "), 200),
            summary: Table {
                head: std::iter::once("run").chain(COLUMNS).map(String::from).collect(),
                rows: runs.iter().map(row).collect(),
                note: String::new(),
            },
            charts: charts(runs),
            different: vec![
                different(&names, &recipes.collect::<Vec<_>>()),
                different(&names, &given.collect::<Vec<_>>()),
            ],
            captions: ["In the recipes", "In what the runs found when they began"],
        }
    }
}

const COLUMNS: [&str; 9] = [
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
    let sum =
        |f: fn(&super::read::Step) -> f64| m.steps.values().map(f).filter(|n| n.is_finite()).sum::<f64>();
    let state = state(m, None);
    let peak = m.steps.values().map(|s| s.device_bytes).max().unwrap_or(0);
    vec![
        run.name.clone(),
        format!("{} {}", state.sign, state.words),
        last(&of_steps(m, |s| s.loss).smooth(over(m))),
        last(&evals(m)),
        evals(m).lowest().map(|(step, y)| format!("{} after step {step}", short(y))).unwrap_or_default(),
        grouped(m.last_step()),
        grouped(sum(|s| s.tokens) as u64),
        duration(sum(|s| s.seconds)),
        of_steps(m, |s| s.rate).median().map(short).unwrap_or_default(),
        if peak > 0 { bytes(peak) } else { String::new() },
    ]
}

fn charts(runs: &[Run]) -> Vec<Chart> {
    let ends = |m: &Metrics| {
        let steps = m.steps.keys().chain(m.evals.keys());
        steps.clone().min().copied().zip(steps.max().copied())
    };
    let span = runs.iter().filter_map(|r| ends(&r.metrics)).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
    let frame = Frame { span: span.unwrap_or((0, 1)), resumed: &[] };
    let chart = |id, title, look: fn(usize) -> Look, of: &dyn Fn(&Metrics) -> Series, notes: &[&str]| {
        let points: Vec<Series> = runs.iter().map(|r| of(&r.metrics)).collect();
        let drawn = runs.iter().zip(points).enumerate().filter(|(_, (_, p))| p.finite().next().is_some());
        let curves: Vec<Curve<'_>> =
            drawn.map(|(i, (r, points))| Curve { label: &r.name, look: look(i), points }).collect();
        Chart::new(id, title, &curves, &frame, notes)
    };
    let nats =
        "Mean cross-entropy of a supervised token, in nats; that of runs on other data is another measure.";
    let smoothed = "Each is an exponential mean over a fiftieth of its run.";
    let loss = |m: &Metrics| of_steps(m, |s| s.loss).smooth(over(m));
    [
        chart("loss", "Training loss", Look::Run, &loss, &[smoothed, nats]),
        chart("evaluation", "Evaluation loss", Look::RunDots, &evals, &[nats]),
        chart(
            "norm",
            "Gradient norm",
            Look::Run,
            &|m| of_steps(m, |s| s.grad_norm).smooth(over(m)),
            &["Before clipping.", smoothed],
        ),
        chart("lr", "Learning rate", Look::Run, &|m| of_steps(m, |s| s.lr), &[]),
        chart("speed", "Tokens a second", Look::Run, &|m| of_steps(m, |s| s.rate), &[]),
    ]
    .into_iter()
    .flatten()
    .collect()
}

type Keys = BTreeMap<String, String>;

/// Keys of a resolved recipe, without name and output folder.
fn keys(recipe: &str) -> Keys {
    let Ok(table) = recipe.parse::<toml::Table>() else { return Keys::new() };
    let Ok(value) = serde_json::to_value(table) else { return Keys::new() };
    let mut out = Vec::new();
    flat("", &value, &mut out);
    let named = |f: &Fact| f.name == "name" || f.name == "run.output";
    out.into_iter().filter(|f| !named(f)).map(|f| (f.name, f.value)).collect()
}

/// Inputs recorded at the start: versions, hashes, device.
fn given(start: &Value) -> Keys {
    let mut out = Vec::new();
    let map = start.as_object().into_iter().flatten();
    map.filter(|(k, _)| !NOT_GIVEN.contains(&k.as_str())).for_each(|(k, v)| flat(k, v, &mut out));
    out.into_iter().map(|f| (f.name, f.value)).collect()
}

/// Table of the keys with differing values.
fn different(names: &[&str], all: &[Keys]) -> Table {
    let keys: BTreeSet<&String> = all.iter().flat_map(BTreeMap::keys).collect();
    let count = keys.len();
    let rows: Vec<Vec<String>> = keys
        .into_iter()
        .filter(|k| all.iter().any(|m| m.get(*k) != all[0].get(*k)))
        .map(|k| {
            let cell = |m: &Keys| m.get(k).map_or("–".into(), |v| cut(v, LONGEST));
            std::iter::once(k.clone()).chain(all.iter().map(cell)).collect()
        })
        .collect();
    let note = format!("{} more are alike.", count - rows.len());
    let head = std::iter::once("key").chain(names.iter().copied()).map(String::from).collect();
    Table { head, rows, note }
}
