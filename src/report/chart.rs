//! Layout of line charts: data to SVG coordinates. The template draws the result and computes nothing.
//!
//! A chart is 760 x 260 units with SVG paths as lines. Color is never the only carrier of information:
//! line style, a text summary and a table repeat it.

use super::series::{POINTS, ROWS, Series, evenly, grouped, short};
use serde::{Serialize, Serializer};
use std::fmt::{self, Write};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 260.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 40.0;
/// Ratio of largest to smallest value for a logarithmic axis.
const LOGARITHMIC: f64 = 100.0;

/// Line style; its [`Display`](fmt::Display) text is the CSS class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// Thin and pale.
    Raw,
    /// Thick.
    Main,
    /// Dashed, with a circle at each point.
    Dots,
    /// Color of the n-th of several runs.
    Run(usize),
    /// Like [`Look::Run`], with a circle at each point.
    RunDots(usize),
}

impl fmt::Display for Look {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Look::Raw => f.write_str("raw"),
            Look::Main => f.write_str("main"),
            Look::Dots => f.write_str("dots"),
            Look::Run(n) | Look::RunDots(n) => write!(f, "run{n}"),
        }
    }
}

impl Serialize for Look {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl Look {
    fn dotted(self) -> bool {
        matches!(self, Look::Dots | Look::RunDots(_))
    }
}

/// One line of a chart.
#[derive(Clone, Debug)]
pub struct Curve<'a> {
    pub label: &'a str,
    pub look: Look,
    pub points: Series,
}

/// Settings common to all charts of a run.
#[derive(Clone, Debug)]
pub struct Frame<'a> {
    /// First and last step of the run, so that all charts have the same x axis.
    pub span: (u64, u64),
    /// Steps the run resumed from.
    pub resumed: &'a [u64],
}

/// A tick mark with a label.
#[derive(Clone, Debug, Serialize)]
pub struct Tick {
    at: f64,
    text: String,
}

/// A line in SVG coordinates.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    label: String,
    look: Look,
    dotted: bool,
    path: String,
    dots: Vec<(f64, f64)>,
}

/// The numbers of a chart as a table, for accessibility.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Table {
    pub head: Vec<String>,
    pub rows: Vec<Vec<String>>,
    /// Notice about omitted rows.
    pub note: String,
}

/// A chart in SVG coordinates.
#[derive(Clone, Debug, Serialize)]
pub struct Chart {
    /// Anchor for links inside the page.
    pub id: &'static str,
    pub title: &'static str,
    /// Text summary of the chart.
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

/// About five round numbers from `low` to `high`.
fn round_numbers(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    if !(rough.is_finite() && rough > 0.0) {
        return vec![low];
    }
    let unit = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|f| f * unit).into_iter().find(|s| *s >= rough * 0.999);
    let step = step.unwrap_or(rough);
    let first = (low / step).ceil() as i64;
    let last = ((high / step) * (1.0 + 1e-12)).floor() as i64;
    (first..=last.min(first.saturating_add(20))).map(|i| i as f64 * step).collect()
}

/// 1, 2 and 5 times powers of ten between `low` and `high`; powers of ten alone if the range is wide.
fn powers(low: f64, high: f64) -> Vec<f64> {
    let exponents = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let few = high / low < 1e4;
    let each = (high / low).log10() as i32 / 6 + 1;
    exponents
        .filter(|e| few || e % each == 0)
        .flat_map(|e| {
            let factors: &[f64] = if few { &[1.0, 2.0, 5.0] } else { &[1.0] };
            factors.iter().map(move |f| f * 10f64.powi(e))
        })
        .filter(|y| (low * 0.999..=high * 1.001).contains(y))
        .collect()
}

/// Maps values to coordinates.
#[derive(Clone, Copy, Debug)]
struct Axis {
    low: f64,
    high: f64,
    logarithmic: bool,
    from: f64,
    to: f64,
}

impl Axis {
    fn place(&self, v: f64) -> f64 {
        let share = match self.logarithmic {
            true => (v / self.low).ln() / (self.high / self.low).ln(),
            false => (v - self.low) / (self.high - self.low),
        };
        // finer than a screen pixel
        ((self.from + share * (self.to - self.from)) * 10.0).round() / 10.0
    }

    fn y(low: f64, high: f64, linear: bool) -> Self {
        let (from, to) = (HEIGHT - BOTTOM, TOP);
        if !linear && low > 0.0 && high / low > LOGARITHMIC {
            return Self { low: low / 1.1, high: high * 1.1, logarithmic: true, from, to };
        }
        if low == high && low >= 0.0 {
            let high = if high == 0.0 { 1.0 } else { 1.25 * high };
            return Self { low: 0.0, high, logarithmic: false, from, to };
        }
        // start at 0 unless this wastes half of the height
        let base = if low >= 0.0 && low < 0.5 * high { 0.0 } else { low };
        let room = 0.05 * (high - base);
        let (low, high) = match room > 0.0 {
            true => (if base == 0.0 { 0.0 } else { base - room }, high + room),
            false => (high - 0.1 * high.abs(), high + 0.1 * high.abs()),
        };
        Self { low, high, logarithmic: false, from, to }
    }

    fn x(low: u64, high: u64) -> Self {
        let (low, high) = (low as f64, high.max(low.saturating_add(1)) as f64);
        Self { low, high, logarithmic: false, from: LEFT, to: WIDTH - RIGHT }
    }

    fn ticks(&self) -> Vec<Tick> {
        let values = match self.logarithmic {
            true => powers(self.low, self.high),
            false => round_numbers(self.low, self.high),
        };
        // enough decimals to distinguish adjacent ticks
        let step = values.windows(2).map(|w| w[1] - w[0]).fold(f64::INFINITY, f64::min);
        let whole = |d: &usize| {
            let unit = step * 10f64.powi(*d as i32);
            (unit - unit.round()).abs() < 1e-6 * unit
        };
        let decimals = (0..9).find(whole).unwrap_or(if step.is_finite() { 9 } else { 3 });
        let tick = |v: f64| {
            let size = v.abs();
            let text = if v == 0.0 {
                "0".into()
            } else if !(1e-3..1e6).contains(&size) {
                format!("{v:.1e}").replace(".0e", "e")
            } else if v.fract() == 0.0 && size >= 1000.0 {
                grouped(size as u64)
            } else if self.logarithmic {
                format!("{v}")
            } else {
                format!("{v:.decimals$}")
            };
            Tick { at: self.place(v), text }
        };
        values.into_iter().map(tick).collect()
    }
}

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

/// Formats up to six steps, e.g. "a, b, c, d, e, f and 4 more".
pub fn some(steps: &[u64]) -> String {
    let shown: Vec<String> = steps.iter().take(6).map(u64::to_string).collect();
    match steps.len() {
        n if n > 6 => format!("{} and {} more", shown.join(", "), n - 6),
        _ => shown.join(", "),
    }
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |c| c.to_uppercase().chain(chars).collect())
}

fn in_words(c: &Curve<'_>) -> Option<String> {
    let (first, last) = (c.points.finite().next()?, c.points.finite().next_back()?);
    let (low, high) = (c.points.lowest()?, c.points.highest()?);
    if first.0 == last.0 {
        return Some(format!("{}: {} at step {}.", c.label, short(first.1), first.0));
    }
    Some(format!(
        "{}: from {} at step {} to {} at step {}; lowest {} at step {}, highest {} at step {}.",
        c.label,
        short(first.1),
        first.0,
        short(last.1),
        last.0,
        short(low.1),
        low.0,
        short(high.1),
        high.0
    ))
}

fn table(curves: &[Curve<'_>]) -> Table {
    let mut steps: Vec<u64> = curves.iter().flat_map(|c| c.points.0.iter().map(|p| p.0)).collect();
    steps.sort_unstable();
    steps.dedup();
    let shown = evenly(steps.len(), ROWS);
    let note = match shown.len() < steps.len() {
        true => format!("{} of {} steps, evenly spaced.", shown.len(), grouped(steps.len() as u64)),
        false => String::new(),
    };
    let cell = |c: &Curve<'_>, step: u64| {
        let at = c.points.0.binary_search_by_key(&step, |p| p.0);
        at.map_or(String::new(), |i| short(c.points.0[i].1))
    };
    let rows = shown
        .into_iter()
        .map(|i| {
            let step = steps[i];
            std::iter::once(step.to_string()).chain(curves.iter().map(|c| cell(c, step))).collect()
        })
        .collect();
    let head = std::iter::once("step".to_string()).chain(curves.iter().map(|c| c.label.to_string()));
    Table { head: head.collect(), rows, note }
}

impl Chart {
    /// Lays out a chart; `None` if no curve has a finite value.
    pub fn new(
        id: &'static str,
        title: &'static str,
        curves: &[Curve<'_>],
        frame: &Frame<'_>,
        notes: &[&str],
    ) -> Option<Self> {
        let all = || curves.iter().flat_map(|c| c.points.finite());
        let low = all().map(|p| p.1).reduce(f64::min)?;
        let high = all().map(|p| p.1).reduce(f64::max)?;
        let (first, last) = frame.span;
        // the shape of a schedule needs a linear scale
        let (x, y) = (Axis::x(first, last), Axis::y(low, high, id == "lr"));
        let mut notes: Vec<String> = notes.iter().map(|n| n.to_string()).collect();
        if y.logarithmic {
            notes.push("The scale is logarithmic.".into());
        }
        let mut gaps: Vec<u64> = curves.iter().take(1).flat_map(|c| c.points.gaps()).collect();
        gaps.retain(|s| (first..=last).contains(s));
        if !gaps.is_empty() {
            let are = if gaps.len() == 1 { "step has" } else { "steps have" };
            notes.push(format!(
                "{} {are} no finite number (crosses at the top): {}.",
                gaps.len(),
                some(&gaps)
            ));
        }
        let about: Vec<String> = curves.iter().filter_map(in_words).map(|s| capital(&s)).collect();
        let lines = curves
            .iter()
            .map(|c| {
                let points = c.points.thin(POINTS);
                let place = |p: (u64, f64)| (x.place(p.0 as f64), y.place(p.1));
                let dots = match c.look.dotted() {
                    true if points.finite().count() <= 60 => points.finite().map(place).collect(),
                    _ => Vec::new(),
                };
                let (label, look, dotted) = (c.label.to_string(), c.look, c.look.dotted());
                Line { label, look, dotted, path: path(&points, &x, &y), dots }
            })
            .collect();
        let mark = |s: &u64| Tick { at: x.place(*s as f64), text: format!("resumed from step {s}") };
        Some(Self {
            id,
            title,
            about: about.join(" "),
            notes,
            width: WIDTH,
            height: HEIGHT,
            left: LEFT,
            right: WIDTH - RIGHT,
            top: TOP,
            bottom: HEIGHT - BOTTOM,
            x_ticks: x.ticks().into_iter().filter(|t| !t.text.contains('.')).collect(),
            y_ticks: y.ticks(),
            lines,
            resumed: frame.resumed.iter().filter(|s| (first..=last).contains(s)).take(50).map(mark).collect(),
            gaps: gaps.iter().take(200).map(|s| x.place(*s as f64)).collect(),
            table: table(curves),
        })
    }
}
