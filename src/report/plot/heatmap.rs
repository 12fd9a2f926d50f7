//! Expert load as a heat map: a row per layer, a column per expert, darker for more tokens.

use super::axis::{self, LEFT, Tick};
use super::format::{first_few, grouped, short};
use super::table::Table;
use ft_engine::walk::{entropy, peak};
use serde::Serialize;
use std::fmt::Write;

/// Most columns; adjacent experts share one if there are more.
const COLUMNS: usize = 128;
/// Most rows.
const ROWS: usize = 160;
/// Upper bounds of the shades, in multiples of the even load; the last shade is unbounded.
const SHADES: [f64; 6] = [0.25, 0.5, 0.8, 1.25, 2.0, 4.0];
const HEAD: [&str; 5] =
    ["layer", "choices", "entropy (1 is even)", "busiest expert, times the even load", "without a token"];
const TOP: f64 = 8.0;
const WIDTH: f64 = axis::WIDTH - LEFT - 14.0;

/// Tokens by expert of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertCounts {
    /// Index of the layer.
    pub layer: u64,
    pub tokens: Vec<u64>,
}

/// A shade, with all cells in one SVG path.
#[derive(Clone, Debug, Serialize)]
struct Shade {
    /// From 0, the palest.
    number: usize,
    /// Legend text.
    label: String,
    path: String,
}

/// A heat map in SVG coordinates.
#[derive(Clone, Debug, Serialize)]
pub struct HeatMap {
    /// Range of steps.
    pub title: String,
    /// Text summary of the map.
    about: String,
    width: f64,
    height: f64,
    right: f64,
    bottom: f64,
    left: f64,
    shades: Vec<Shade>,
    /// SVG path of crosses on experts without tokens.
    dead: String,
    names: Vec<Tick>,
    notes: Vec<String>,
    table: Table,
}

fn shade(load: f64) -> usize {
    SHADES.iter().position(|end| load < *end).unwrap_or(SHADES.len())
}

fn label(number: usize) -> String {
    match number {
        0 => format!("below {}", SHADES[0]),
        n if n == SHADES.len() => format!("{} and more", SHADES[n - 1]),
        n => format!("{} to {}", SHADES[n - 1], SHADES[n]),
    }
}

/// Loads by column in multiples of the even load; the highest if several experts share a column.
fn columns(l: &ExpertCounts, columns: usize) -> Vec<f64> {
    let even = l.tokens.iter().sum::<u64>() as f64 / l.tokens.len() as f64;
    let load = |n: u64| if even > 0.0 { n as f64 / even } else { 0.0 };
    let n = l.tokens.len();
    let of = |c: usize| &l.tokens[c * n / columns..((c + 1) * n / columns).max(c * n / columns + 1)];
    (0..columns).map(|c| load(of(c).iter().copied().max().unwrap_or(0))).collect()
}

/// Busiest expert of a layer, and all experts without tokens.
fn extremes(l: &ExpertCounts) -> (usize, Vec<u64>) {
    let busiest = (0..l.tokens.len()).rev().max_by_key(|e| l.tokens[*e]).unwrap_or(0);
    let dead = l.tokens.iter().enumerate().filter(|(_, n)| **n == 0).map(|(e, _)| e as u64).collect();
    (busiest, dead)
}

fn row(l: &ExpertCounts) -> Vec<String> {
    let (busiest, dead) = extremes(l);
    let dead = match dead.len() {
        0 => "none".to_string(),
        n => format!("{n}: {}", first_few(&dead)),
    };
    let tokens = grouped(l.tokens.iter().sum());
    let busiest = format!("{busiest}, {}", short(peak(&l.tokens)));
    vec![l.layer.to_string(), tokens, short(entropy(&l.tokens)), busiest, dead]
}

impl HeatMap {
    /// Lays out a heat map; `None` without layers.
    pub fn new(title: String, layers: &[ExpertCounts]) -> Option<Self> {
        let experts = layers.iter().map(|l| l.tokens.len()).max()?;
        let shown = &layers[..layers.len().min(ROWS)];
        let count = experts.min(COLUMNS);
        let width = (WIDTH / count as f64 * 10.0).floor() / 10.0;
        let height = if shown.len() <= 12 { 22.0 } else { 12.0 };
        let mut notes = Vec::new();
        if experts > COLUMNS {
            notes.push(format!(
                "{experts} experts in {COLUMNS} columns: neighbors share one, the highest load counts."
            ));
        }
        if layers.len() > ROWS {
            notes.push(format!("The first {ROWS} of {} layers.", layers.len()));
        }
        let bottom = TOP + shown.len() as f64 * height;
        let shade = |number| Shade { number, label: label(number), path: String::new() };
        let mut map = Self {
            title,
            width: axis::WIDTH,
            about: about(layers, experts)?,
            height: bottom + 26.0,
            right: LEFT + width * count as f64,
            bottom,
            left: LEFT,
            shades: (0..=SHADES.len()).map(shade).collect(),
            dead: String::new(),
            names: Vec::new(),
            notes,
            table: Table::new(HEAD, shown.iter().map(row).collect()),
        };
        let labelled = shown.len().div_ceil(40);
        for (i, l) in shown.iter().enumerate() {
            let y = TOP + i as f64 * height;
            if i % labelled == 0 {
                map.names.push(Tick { at: y + height / 2.0, text: format!("layer {}", l.layer) });
            }
            map.draw(&columns(l, l.tokens.len().min(count)), y, (width, height));
        }
        Some(map)
    }

    /// Draws a row at `y` of cells with this width and height. Adjacent cells of one shade form one rectangle.
    fn draw(&mut self, loads: &[f64], y: f64, (width, height): (f64, f64)) {
        let mut from = 0;
        for cells in loads.chunk_by(|a, b| shade(*a) == shade(*b)) {
            for c in (from..from + cells.len()).filter(|c| loads[*c] == 0.0) {
                let r = width.min(8.0) / 3.0;
                let (x, y) = (LEFT + (c as f64 + 0.5) * width - r, y + height / 2.0 - r);
                let d = 2.0 * r;
                let _ = write!(self.dead, "M{x:.1} {y:.1}l{d:.1} {d:.1}m0 -{d:.1}l-{d:.1} {d:.1}");
            }
            let (x, w) = (LEFT + from as f64 * width, cells.len() as f64 * width);
            let _ = write!(self.shades[shade(cells[0])].path, "M{x:.1} {y}h{w:.1}v{height}h-{w:.1}z");
            from += cells.len();
        }
    }
}

/// Text summary of a map.
fn about(layers: &[ExpertCounts], experts: usize) -> Option<String> {
    let worst = layers.iter().max_by(|a, b| peak(&a.tokens).total_cmp(&peak(&b.tokens)))?;
    let dead: usize = layers.iter().map(|l| extremes(l).1.len()).sum();
    Some(format!(
        "{} layers with up to {experts} experts. The busiest is expert {} of layer {}, with {} times the even load; \
         {dead} experts got none.",
        layers.len(),
        extremes(worst).0,
        worst.layer,
        short(peak(&worst.tokens)),
    ))
}
