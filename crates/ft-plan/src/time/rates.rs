//! Throughput measured by `ft bench` and stored for later plans, or estimated from a card's data sheet.

use super::kept::Kept;
use crate::host::{Sheet, sheet_of};
use ft_base::store;
use ft_kernels::Machine;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

const RATES: Kept = Kept("rates.json");

/// Relative uncertainty of a step time predicted from a measured rate; plans print a range of ±30%.
const SPREAD: f64 = 0.3;

/// The same from a data sheet. No figure of a card has confirmed it.
const SHEET_SPREAD: f64 = 0.4;

/// Share of a data sheet's products that cuBLAS reaches at the sizes of a layer. Published for H100 (0.66), A6000
/// (0.74) and L40S (0.54); assumed for the others.
const PRODUCTS_SHARE: f64 = 0.65;
/// The same of cards with products of warp groups: products of a layer of an 8B model, 4,096 tokens, on an H200.
const HOPPER_SHARE: f64 = 0.78;

/// Share of a data sheet's memory rate that a large copy reaches.
pub const MEMORY_SHARE: f64 = 0.8;

/// Throughput of one kind of device and dtype.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// Floating-point operations per second of a large matrix product.
    pub matmul: f64,
    /// Work (`super::Work`) per second of a whole training step.
    pub step: f64,
    /// Bytes read plus written per second by a large copy.
    #[serde(default)]
    pub copy: f64,
}

/// A time range in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    pub low: f64,
    pub high: f64,
    /// The card whose data sheet it comes from; `None` if a rate was measured.
    pub sheet: Option<&'static str>,
}

fn key(m: Machine) -> String {
    let width = match (m.computes_in_f32(), m.fp8) {
        (true, _) => "f32",
        (false, true) => "fp8",
        (false, false) => "half",
    };
    match (m.cuda, m.card) {
        (true, Some(card)) => format!("cuda-{width}-{card}"),
        (true, None) => format!("cuda-{width}"),
        (false, _) => format!("cpu-{width}-{}-threads", m.threads),
    }
}

/// Rate measured on a machine of this kind, if any.
pub fn find(m: Machine) -> Option<Rate> {
    RATES.find(&key(m))
}

/// Stores a measured rate and returns the file, or `None` without a cache folder.
///
/// # Errors
/// A cache folder or file that cannot be written.
pub fn save(m: Machine, rate: Rate) -> Result<Option<PathBuf>, store::Error> {
    RATES.save(key(m), rate)
}

/// FLOPs per second of large bf16 products on a card.
pub fn of_products(sheet: Sheet) -> f64 {
    sheet.products * 1e12 * if sheet.warp_groups { HOPPER_SHARE } else { PRODUCTS_SHARE }
}

/// Seconds for `work` on a machine: by its measured rate, else by the data sheet of its card when it computes in a
/// half precision. `None` without both.
pub fn predict(m: Machine, work: f64) -> Option<Range> {
    let measured = find(m).map(|rate| (rate.step, SPREAD, None));
    let estimated = || {
        let name = m.card.filter(|_| m.cuda && !m.computes_in_f32())?;
        Some((of_products(sheet_of(name)?), SHEET_SPREAD, Some(name)))
    };
    let (rate, spread, sheet) = measured.or_else(estimated)?;
    let middle = work / rate;
    let range = Range { low: middle * (1.0 - spread), high: middle * (1.0 + spread), sheet };
    (rate > 0.0 && middle.is_finite()).then_some(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A card of this name, which no test has measured.
    fn on(card: Option<&'static str>, width: u64) -> Machine {
        Machine { cuda: true, width, stored: width, threads: 1, card, fp8: false }
    }

    #[test]
    fn data_sheets_stand_in_for_rates_that_were_not_measured() {
        let of = |card| predict(on(Some(card), 2), 1e15).map(|r| (r.low, r.high, r.sheet));
        let (low, high, sheet) = of("L40S").unwrap_or_default();
        assert!(0.0 < low && low < high && high < 60.0, "{low} to {high} seconds");
        assert_eq!(sheet, Some("L40S"));
        // a higher product rate is a shorter time
        assert!(of("B200").is_some_and(|b| b.1 < low));
        // cards without bf16, unknown ones, f32
        assert_eq!(of("T4"), None);
        assert_eq!(predict(on(None, 2), 1e15).and_then(|r| r.sheet), None);
        assert_eq!(predict(on(Some("L40S"), 4), 1e15).and_then(|r| r.sheet), None);
    }
}
