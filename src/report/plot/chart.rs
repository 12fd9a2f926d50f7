//! Line charts.

use super::axis::{Axis, LEFT, Tick, WIDTH};
use super::format::{first_few, short};
use super::series::Series;
use super::table::Table;
use serde::{Serialize, Serializer};
use std::fmt::Write;

/// Most points of a drawn line; longer series are thinned.
const POINTS: usize = 1000;
const HEIGHT: f64 = 240.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 44.0;

/// Line style; serialized as the CSS class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineStyle {
    /// Thin and pale.
    Raw,
    /// Thick.
    Main,
    /// Dashed, with a circle at each point.
    Dots,
    /// Color of the n-th of several runs.
    Run(usize),
    /// Like [`LineStyle::Run`], with a circle at each point.
    RunDots(usize),
}

impl Serialize for LineStyle {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            LineStyle::Raw => s.serialize_str("raw"),
            LineStyle::Main => s.serialize_str("main"),
            LineStyle::Dots => s.serialize_str("dots"),
            LineStyle::Run(n) | LineStyle::RunDots(n) => s.collect_str(&format_args!("run{n}")),
        }
    }
}

impl LineStyle {
    fn dotted(self) -> bool {
        matches!(self, LineStyle::Dots | LineStyle::RunDots(_))
    }
}

/// One line of a chart.
#[derive(Clone, Debug)]
pub struct Curve<'a> {
    pub label: &'a str,
    pub style: LineStyle,
    pub points: Series,
}

/// What all charts of a page have in common.
#[derive(Clone, Debug)]
pub struct Range<'a> {
    /// First and last step, so that all charts have the same x axis.
    pub steps: (u64, u64),
    /// Steps the run resumed from.
    pub resumed: &'a [u64],
}

/// A line in SVG coordinates.
#[derive(Clone, Debug, Serialize)]
struct Line {
    label: String,
    style: LineStyle,
    dotted: bool,
    path: String,
    dots: Vec<(f64, f64)>,
}

/// A chart in SVG coordinates.
#[derive(Clone, Debug, Serialize)]
pub struct Chart {
    /// Anchor for links inside the page.
    pub id: &'static str,
    pub title: &'static str,
    /// Text summary of the chart, for readers who do not see it.
    pub about: String,
    notes: Vec<String>,
    width: f64,
    height: f64,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
    x_ticks: Vec<Tick>,
    y_ticks: Vec<Tick>,
    lines: Vec<Line>,
    /// Steps the run resumed from.
    resumed: Vec<Tick>,
    /// Positions of steps without a finite value.
    gaps: Vec<f64>,
    table: Table,
}

/// SVG path of a line; gaps interrupt it.
fn path(points: &Series, x: &Axis, y: &Axis) -> String {
    let mut out = String::new();
    let mut down = false;
    for (i, (step, value)) in points.0.iter().enumerate() {
        if !value.is_finite() {
            down = false;
            continue;
        }
        let _ = write!(out, "{}{} {}", if down { 'L' } else { 'M' }, x.place(*step as f64), y.place(*value));
        // an isolated point becomes a dot
        if !down && points.0.get(i + 1).is_none_or(|next| !next.1.is_finite()) {
            out.push_str("h0");
        }
        down = true;
    }
    out
}

/// Text summary of a curve; `None` without finite values.
fn in_words(c: &Curve<'_>) -> Option<String> {
    let (first, last) = (c.points.finite().next()?, c.points.finite().next_back()?);
    let (low, high) = (c.points.lowest()?, c.points.highest()?);
    let mut chars = c.label.chars();
    let label: String = chars.next().into_iter().flat_map(char::to_uppercase).chain(chars).collect();
    let point = |(step, value): (u64, f64)| format!("{} at step {step}", short(value));
    if first.0 == last.0 {
        return Some(format!("{label}: {}.", point(first)));
    }
    let ends = format!("from {} to {}", point(first), point(last));
    Some(format!("{label}: {ends}; lowest {}, highest {}.", point(low), point(high)))
}

fn table(curves: &[Curve<'_>]) -> Table {
    let mut steps: Vec<u64> = curves.iter().flat_map(|c| c.points.0.iter().map(|p| p.0)).collect();
    steps.sort_unstable();
    steps.dedup();
    let cell = |c: &Curve<'_>, step: u64| {
        let at = c.points.0.binary_search_by_key(&step, |p| p.0);
        at.map_or(String::new(), |i| short(c.points.0[i].1))
    };
    let head = std::iter::once("step").chain(curves.iter().map(|c| c.label));
    Table::thinned(head, steps, "steps", |step| {
        std::iter::once(step.to_string()).chain(curves.iter().map(|c| cell(c, step))).collect()
    })
}

/// A line in SVG coordinates.
fn line(c: &Curve<'_>, x: &Axis, y: &Axis) -> Line {
    let points = c.points.thin(POINTS);
    let dotted = c.style.dotted();
    let dots = if dotted && points.finite().count() <= 60 {
        points.finite().map(|(step, value)| (x.place(step as f64), y.place(value))).collect()
    } else {
        Vec::new()
    };
    Line { label: c.label.to_string(), style: c.style, dotted, path: path(&points, x, y), dots }
}

impl Chart {
    /// Lays out a chart; `None` if no curve has a finite value.
    pub fn new(
        id: &'static str,
        title: &'static str,
        curves: &[Curve<'_>],
        range: &Range<'_>,
        notes: &[&str],
    ) -> Option<Self> {
        let values = || curves.iter().flat_map(|c| c.points.finite()).map(|p| p.1);
        let (low, high) = (values().reduce(f64::min)?, values().reduce(f64::max)?);
        let (first, last) = range.steps;
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let x = Axis::x(first, last, (LEFT, right));
        // the shape of a schedule needs a linear scale
        let y = Axis::y(low, high, id == "lr", (bottom, TOP));
        let mut notes: Vec<String> = notes.iter().map(|n| n.to_string()).collect();
        if y.logarithmic {
            notes.push("The scale is logarithmic.".into());
        }
        let mut gaps: Vec<u64> = curves.iter().take(1).flat_map(|c| c.points.gaps()).collect();
        gaps.retain(|s| (first..=last).contains(s));
        if !gaps.is_empty() {
            let (n, steps) = (gaps.len(), first_few(&gaps));
            let are = if n == 1 { "step has" } else { "steps have" };
            notes.push(format!("{n} {are} no finite number (crosses at the top): {steps}."));
        }
        let about: Vec<String> = curves.iter().filter_map(in_words).collect();
        let resumed = range.resumed.iter().filter(|s| (first..=last).contains(s)).take(50);
        let resumed =
            resumed.map(|s| Tick { at: x.place(*s as f64), text: format!("resumed from step {s}") });
        Some(Self {
            id,
            title,
            about: about.join(" "),
            notes,
            width: WIDTH,
            height: HEIGHT,
            left: LEFT,
            right,
            top: TOP,
            bottom,
            x_ticks: x.ticks().into_iter().filter(|t| !t.text.contains('.')).collect(),
            y_ticks: y.ticks(),
            lines: curves.iter().map(|c| line(c, &x, &y)).collect(),
            resumed: resumed.collect(),
            gaps: gaps.iter().take(200).map(|s| x.place(*s as f64)).collect(),
            table: table(curves),
        })
    }
}
