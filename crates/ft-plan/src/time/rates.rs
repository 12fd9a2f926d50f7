//! Throughput measured by `ft bench` and stored for later plans, or estimated from a card's data sheet.

use super::bench_cache::BenchCache;
use super::probe::{self, Probe};
use crate::host::{Datasheet, datasheet_of};
use ft_base::store;
use ft_kernels::Machine;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

const RATES: BenchCache = BenchCache("rates.json");

/// Relative uncertainty of a step time predicted from measured rates, of steps or of a card's probe; plans print a
/// range of ±30%. Seven recipes on an H200 were within it by the card's probe (docs/lab/gpu.md).
const SPREAD: f64 = 0.3;

/// The same from a data sheet, or from steps of another family.
const SHEET_SPREAD: f64 = 0.4;

/// Share of a data sheet's products reached by cuBLAS at the sizes of a layer. Published for H100 (0.66), A6000 (0.74)
/// and L40S (0.54); assumed for the others.
const PRODUCTS_SHARE: f64 = 0.65;
/// The same of cards with products of warp groups: products of a layer of an 8B model, 4,096 tokens, on an H200.
const HOPPER_SHARE: f64 = 0.78;

/// Share of a data sheet's memory rate reached by a large copy.
pub const MEMORY_SHARE: f64 = 0.8;

/// Throughput of one kind of device and dtype with models of one family.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// Work (`super::Work`) per second of a whole training step.
    pub step: f64,
    /// Time of the measurement, UTC, as in RFC 3339; `None` in files of earlier versions.
    #[serde(default)]
    pub date: Option<String>,
    /// Date of the probe behind the units of `step`; `None` without one. Set by [`save`].
    #[serde(default)]
    pub probed: Option<String>,
}

impl Rate {
    /// The day of the measurement; empty if unknown.
    fn day(&self) -> &'static str {
        self.date.as_deref().map_or("", |date| probe::named(probe::day(date)))
    }
}

/// A time range in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    pub low: f64,
    pub high: f64,
    pub source: Source,
}

/// Origin of the rate of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// A step measured by `ft bench` on this day (empty if unknown) on such a machine, of a model of the same family.
    Measured(&'static str),
    /// The same of a model of another family.
    OtherFamily(&'static str),
    /// Rates of the card, measured by its probe.
    Probe(&'static Probe),
    /// The data sheet of this card.
    Datasheet(&'static str),
}

impl Source {
    /// The origin in words.
    pub fn words(self) -> String {
        let on = |day: &str| if day.is_empty() { String::new() } else { format!(" on {day}") };
        match self {
            Self::Measured(day) => format!("measured by ft bench{}", on(day)),
            Self::OtherFamily(day) => {
                format!("measured by ft bench, on a model of another family{}", on(day))
            }
            Self::Probe(probe) => format!("by rates {}", probe.words()),
            Self::Datasheet(card) => format!("by the data sheet of {card}"),
        }
    }
}

/// Name of a machine's rates, without the family.
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

/// The probe of the machine's card, if any, for arithmetic in a half precision.
pub fn probe_of(m: Machine) -> Option<&'static Probe> {
    m.card.filter(|_| m.cuda && !m.computes_in_f32()).and_then(probe::find)
}

/// Whether a rate is in the units of a cost model: by this probe, or by none.
fn in_units(rate: &Rate, probe: Option<&Probe>) -> bool {
    rate.probed.as_deref() == probe.map(|p| p.date.as_str())
}

fn key_of(m: Machine, family: &str) -> String {
    format!("{}/{family}", key(m))
}

/// Rate measured on a machine of this kind with a model of this family (`model_type`), if any, in the units of its cost
/// model.
pub fn find(m: Machine, family: &str) -> Option<Rate> {
    let (key, probe) = (key_of(m, family), probe_of(m));
    RATES.find(|name, rate| name == key && in_units(rate, probe))
}

/// The same with a model of any family.
fn find_other(m: Machine) -> Option<Rate> {
    let (prefix, probe) = (key_of(m, ""), probe_of(m));
    RATES.find(|name, rate| name.starts_with(&prefix) && in_units(rate, probe))
}

/// Stores a measured rate and returns the file, or `None` without a cache folder.
///
/// # Errors
/// An unwritable cache folder or file.
pub fn save(m: Machine, family: &str, rate: Rate) -> Result<Option<PathBuf>, store::Error> {
    let rate = Rate { probed: probe_of(m).map(|p| p.date.clone()), ..rate };
    RATES.save(&key_of(m, family), &rate)
}

/// FLOPs per second of large bf16 products on a card.
pub fn of_products(sheet: Datasheet) -> f64 {
    sheet.products * 1e12 * if sheet.warp_groups { HOPPER_SHARE } else { PRODUCTS_SHARE }
}

/// Seconds for `work` of a model of this family on a machine: by the measured rate, else, in a half precision, by the
/// probe or the data sheet of the card, else by a rate of another family. `None` without any.
pub fn predict(m: Machine, family: &str, work: f64) -> Option<Range> {
    let measured = find(m, family).map(|rate| (rate.step, SPREAD, Source::Measured(rate.day())));
    let other = || find_other(m).map(|rate| (rate.step, SHEET_SPREAD, Source::OtherFamily(rate.day())));
    let by_parts = || probe_of(m).map(|probe| (probe.rates.products, SPREAD, Source::Probe(probe)));
    let estimated = || {
        let name = m.card.filter(|_| m.cuda && !m.computes_in_f32())?;
        Some((of_products(datasheet_of(name)?), SHEET_SPREAD, Source::Datasheet(name)))
    };
    let (rate, spread, source) = measured.or_else(by_parts).or_else(estimated).or_else(other)?;
    let middle = work / rate;
    let range = Range { low: middle * (1.0 - spread), high: middle * (1.0 + spread), source };
    (rate > 0.0 && middle.is_finite()).then_some(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A card of this name, not measured by any test.
    fn on(card: Option<&'static str>, width: u64) -> Machine {
        Machine { cuda: true, width, stored: width, threads: 1, card, fp8: false }
    }

    #[test]
    fn data_sheets_stand_in_for_rates_that_were_not_measured() {
        let of = |card| predict(on(Some(card), 2), "qwen3", 1e15).map(|r| (r.low, r.high, r.source));
        let (low, high, source) = of("L40S").expect("a range");
        let middle = 1e15 / (362e12 * PRODUCTS_SHARE);
        assert_eq!((low, high), (0.6 * middle, 1.4 * middle));
        assert_eq!(source, Source::Datasheet("L40S"));
        // a higher product rate is a shorter time
        assert!(of("B200").is_some_and(|b| b.1 < low));
        // cards without bf16, unknown ones, f32
        assert_eq!(of("T4"), None);
        assert_eq!(predict(on(None, 2), "qwen3", 1e15).map(|r| r.source), None);
        assert_eq!(predict(on(Some("L40S"), 4), "qwen3", 1e15).map(|r| r.source), None);
    }

    /// A rate of an earlier version has no day.
    #[test]
    fn a_measured_rate_has_its_day() {
        let words = |date: Option<&str>| {
            let rate = Rate { step: 1.0, date: date.map(str::to_string), probed: None };
            [Source::Measured(rate.day()), Source::OtherFamily(rate.day())].map(Source::words)
        };
        let others = "measured by ft bench, on a model of another family";
        assert_eq!(words(None), ["measured by ft bench", others]);
        let dated = ["measured by ft bench on 2026-11-26".to_string(), format!("{others} on 2026-11-26")];
        assert_eq!(words(Some("2026-11-26T10:00:00Z")), dated);
    }

    /// A name of its own: other tests of this process plan for the cards of the table.
    #[test]
    fn measured_rates_come_before_data_sheets() {
        let card = probe::named("a card of this test");
        assert_eq!(predict(on(Some(card), 2), "qwen3", 1e15), None);
        probe::take(card, probe::example());
        let r = predict(on(Some(card), 2), "qwen3", 1e15).expect("a range");
        let Source::Probe(probe) = r.source else { panic!("{:?}", r.source) };
        assert_eq!((r.low, r.high), (0.7 * 10.0, 1.3 * 10.0));
        assert_eq!(r.source.words(), "by rates measured on a card on 2026-11-26");
        // rates in bf16 say nothing about f32
        assert_eq!(predict(on(Some(card), 4), "qwen3", 1e15), None);
        // rates of steps are in units of the probe at the time
        let rate = |probed: Option<&str>| Rate { step: 1.0, date: None, probed: probed.map(str::to_string) };
        assert!(in_units(&rate(Some(&probe.date)), Some(probe)) && in_units(&rate(None), None));
        assert!(!in_units(&rate(None), Some(probe)) && !in_units(&rate(Some("2026-11-25T")), Some(probe)));
    }
}
