//! Axes and tick marks.

use super::format::grouped;
use serde::Serialize;

/// Width of a plot.
pub const WIDTH: f64 = 480.0;
/// Width of the labels on the left.
pub const LEFT: f64 = 64.0;
/// Ratio of largest to smallest value for a logarithmic axis.
const LOGARITHMIC: f64 = 100.0;

/// A tick mark with a label.
#[derive(Clone, Debug, Serialize)]
pub struct Tick {
    pub at: f64,
    pub text: String,
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
    let decades = high.log10() - low.log10();
    let few = decades < 4.0;
    let each = decades as i32 / 6 + 1;
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
pub struct Axis {
    low: f64,
    high: f64,
    pub logarithmic: bool,
    from: f64,
    to: f64,
}

impl Axis {
    pub fn place(&self, v: f64) -> f64 {
        // Differences of logarithms, since a ratio may overflow.
        let of = |v: f64| if self.logarithmic { v.ln() } else { v };
        let share = (of(v) - of(self.low)) / (of(self.high) - of(self.low));
        // finer than a screen pixel
        ((self.from + share * (self.to - self.from)) * 10.0).round() / 10.0
    }

    /// A y axis from coordinate `from` to `to`, logarithmic if values span two decades and not `linear`.
    pub fn y(low: f64, high: f64, linear: bool, (from, to): (f64, f64)) -> Self {
        if !linear && low > 0.0 && high / low > LOGARITHMIC {
            return Self { low: low / 1.1, high: high * 1.1, logarithmic: true, from, to };
        }
        if low == high && low >= 0.0 {
            let high = if high == 0.0 { 1.0 } else { 1.25 * high };
            return Self { low: 0.0, high, logarithmic: false, from, to };
        }
        // start at 0 unless this wastes half of the height
        let base = if low >= 0.0 && low < 0.5 * high { 0.0 } else { low };
        let margin = 0.05 * (high - base);
        let (low, high) = if margin > 0.0 {
            (if base == 0.0 { 0.0 } else { base - margin }, high + margin)
        } else {
            (high - 0.1 * high.abs(), high + 0.1 * high.abs())
        };
        Self::linear(low, high, f64::MIN_POSITIVE, (from, to))
    }

    /// An x axis of steps from coordinate `from` to `to`.
    pub fn x(low: u64, high: u64, (from, to): (f64, f64)) -> Self {
        Self::linear(low as f64, high as f64, 1.0, (from, to))
    }

    /// A linear axis of at least `span`, and of two numbers that differ.
    fn linear(low: f64, high: f64, span: f64, (from, to): (f64, f64)) -> Self {
        let high = if high > low { high } else { low + span.max(1e-9 * low.abs()) };
        Self { low, high, logarithmic: false, from, to }
    }

    pub fn ticks(&self) -> Vec<Tick> {
        let Self { low, high, .. } = *self;
        let values = if self.logarithmic { powers(low, high) } else { round_numbers(low, high) };
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
                format!("{}{}", if v < 0.0 { "-" } else { "" }, grouped(size as u64))
            } else if self.logarithmic {
                format!("{v}")
            } else {
                format!("{v:.decimals$}")
            };
            Tick { at: self.place(v), text }
        };
        let mut ticks: Vec<Tick> = values.into_iter().map(tick).collect();
        // Numbers too close for their labels.
        ticks.dedup_by(|a, b| a.text == b.text);
        ticks
    }
}
