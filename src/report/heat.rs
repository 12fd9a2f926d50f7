//! Expert load as a heat map: a row per layer, a column per expert, darker for more tokens.

use super::chart::Table;
use super::read::Layer;
use super::series::short;
use serde::Serialize;
use std::fmt::Write;

/// Most columns; adjacent experts share one if there are more.
const COLUMNS: usize = 128;
/// Most rows.
const ROWS: usize = 160;
/// Upper bounds of the shades, in multiples of the even load; the last shade is unbounded.
const SHADES: [f64; 6] = [0.25, 0.5, 0.8, 1.25, 2.0, 4.0];
const LEFT: f64 = 70.0;
const TOP: f64 = 8.0;
const WIDTH: f64 = 674.0;

/// A shade, with all its cells in one SVG path.
#[derive(Clone, Debug, Serialize)]
pub struct Shade {
    /// From 0, the palest.
    number: usize,
    /// Legend text.
    label: String,
    path: String,
}

/// Label of a row.
#[derive(Clone, Debug, Serialize)]
struct Name {
    at: f64,
    text: String,
}

/// A heat map in SVG coordinates.
#[derive(Clone, Debug, Serialize)]
pub struct Heat {
    /// Range of steps.
    pub title: String,
    /// Text summary of the map.
    about: String,
    height: f64,
    right: f64,
    bottom: f64,
    left: f64,
    shades: Vec<Shade>,
    /// SVG path of crosses on experts without tokens.
    dead: String,
    names: Vec<Name>,
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
fn columns(l: &Layer, columns: usize) -> Vec<f64> {
    let even = l.tokens.iter().sum::<u64>() as f64 / l.tokens.len() as f64;
    let load = |n: u64| if even > 0.0 { n as f64 / even } else { 0.0 };
    let n = l.tokens.len();
    let of = |c: usize| &l.tokens[c * n / columns..((c + 1) * n / columns).max(c * n / columns + 1)];
    (0..columns).map(|c| load(of(c).iter().copied().max().unwrap_or(0))).collect()
}

/// Busiest expert of a layer, and all experts without tokens.
fn extremes(l: &Layer) -> (usize, Vec<u64>) {
    let busiest = (0..l.tokens.len()).rev().max_by_key(|e| l.tokens[*e]).unwrap_or(0);
    let dead = l.tokens.iter().enumerate().filter(|(_, n)| **n == 0).map(|(e, _)| e as u64).collect();
    (busiest, dead)
}

fn row(l: &Layer) -> Vec<String> {
    let (busiest, dead) = extremes(l);
    let dead = match dead.len() {
        0 => "none".to_string(),
        n => format!("{n}: {}", super::chart::some(&dead)),
    };
    let tokens = super::series::grouped(l.tokens.iter().sum());
    vec![l.layer.to_string(), tokens, short(l.entropy()), format!("{busiest}, {}", short(l.peak())), dead]
}

impl Heat {
    /// Lays out a heat map; `None` without layers.
    pub fn new(title: String, layers: &[Layer]) -> Option<Self> {
        let experts = layers.iter().map(|l| l.tokens.len()).max()?;
        let shown = &layers[..layers.len().min(ROWS)];
        let count = experts.min(COLUMNS);
        let width = (WIDTH / count as f64 * 10.0).floor() / 10.0;
        let height = if shown.len() <= 12 { 22.0 } else { 12.0 };
        let mut shades: Vec<Shade> = (0..=SHADES.len())
            .map(|number| Shade { number, label: label(number), path: String::new() })
            .collect();
        let mut dead = String::new();
        let mut names = Vec::new();
        let each = shown.len().div_ceil(40);
        for (i, l) in shown.iter().enumerate() {
            let y = TOP + i as f64 * height;
            if i % each == 0 {
                names.push(Name { at: y + height / 2.0, text: format!("layer {}", l.layer) });
            }
            let loads = columns(l, l.tokens.len().min(count));
            let mut c = 0;
            while c < loads.len() {
                // adjacent cells of one shade form one rectangle
                let (number, from) = (shade(loads[c]), c);
                let is_dead = |c: usize| loads[c] == 0.0;
                while c < loads.len() && shade(loads[c]) == number {
                    if is_dead(c) {
                        let (x, y, r) =
                            (LEFT + (c as f64 + 0.5) * width, y + height / 2.0, width.min(8.0) / 3.0);
                        let _ = write!(
                            dead,
                            "M{:.1} {:.1}l{:.1} {:.1}m0 {:.1}l{:.1} {:.1}",
                            x - r,
                            y - r,
                            2.0 * r,
                            2.0 * r,
                            -2.0 * r,
                            -2.0 * r,
                            2.0 * r
                        );
                    }
                    c += 1;
                }
                let x = LEFT + from as f64 * width;
                let w = (c - from) as f64 * width;
                let _ = write!(shades[number].path, "M{x:.1} {y}h{w:.1}v{height}h-{w:.1}z");
            }
        }
        let worst = layers.iter().max_by(|a, b| a.peak().total_cmp(&b.peak()))?;
        let none: usize = layers.iter().map(|l| extremes(l).1.len()).sum();
        let about = format!(
            "{} layers with up to {experts} experts. The busiest is expert {} of layer {}, with {} times the even load; {none} experts got none.",
            layers.len(),
            extremes(worst).0,
            worst.layer,
            short(worst.peak()),
        );
        let mut notes = Vec::new();
        if experts > COLUMNS {
            notes.push(format!(
                "{experts} experts in {COLUMNS} columns: neighbours share one, the highest load counts."
            ));
        }
        if layers.len() > ROWS {
            notes.push(format!("The first {ROWS} of {} layers.", layers.len()));
        }
        let head = [
            "layer",
            "choices",
            "entropy (1 is even)",
            "busiest expert, times the even load",
            "without a token",
        ];
        let bottom = TOP + shown.len() as f64 * height;
        Some(Self {
            title,
            about,
            height: bottom + 26.0,
            right: LEFT + width * count as f64,
            bottom,
            left: LEFT,
            shades,
            dead,
            names,
            notes,
            table: Table {
                head: head.map(String::from).to_vec(),
                rows: shown.iter().map(row).collect(),
                note: String::new(),
            },
        })
    }
}
