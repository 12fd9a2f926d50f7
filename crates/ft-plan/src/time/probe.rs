//! Rates of a CUDA card, measured on it by `ft bench --probe`, or by a run at its first start on the card.
//!
//! They are in `probes.json` of the cache folder, by the name of the card in plans. Plans take them in place of the
//! data sheet, in the cost model (`CostModel`) and for the time of a step.

use super::bench_cache::{BenchCache, entries};
use ft_base::store;
use ft_base::terminal::warn;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

const PROBES: BenchCache = BenchCache("probes.json");

/// Rates of a card, in bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CardRates {
    /// Floating-point operations per second of a large product.
    pub products: f64,
    /// The same of attention, forward and backward, as counted by the plan.
    pub attention: [f64; 2],
    /// The same of grouped products with experts in 4 bits, without dequantization.
    pub grouped: f64,
    /// Dequantized values of a 4-bit matrix per second.
    pub dequantize: f64,
    /// Time of a product of 8-bit floats with casts, as a share of the time in bf16; `None` on cards without.
    pub fp8: Option<f64>,
    /// Bytes read plus written per second by a large copy.
    pub copy: f64,
    /// Bytes per second from the host: page-locked, and pageable.
    pub crossing: [f64; 2],
    /// Seconds of a nearly empty operation.
    pub launch: f64,
}

impl CardRates {
    /// Whether all rates are positive numbers.
    fn are_sound(&self) -> bool {
        let [[a, b], [c, d]] = [self.attention, self.crossing];
        let all = [self.products, a, b, self.grouped, self.dequantize, self.copy, c, d, self.launch];
        all.into_iter().chain(self.fp8).all(|x| x.is_finite() && x > 0.0)
    }
}

/// Rates with their circumstances. A run measures anew after a change of any but the date.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Probe {
    /// Name of the device, from the driver.
    pub device: String,
    /// CUDA version of the driver, such as 13000.
    pub driver: i32,
    /// Version of ft.
    pub ft: String,
    /// Time of the measurement, UTC, as in RFC 3339.
    pub date: String,
    pub rates: CardRates,
}

impl Probe {
    /// The day of the measurement.
    pub fn day(&self) -> &str {
        day(&self.date)
    }

    /// The device, and the day of the measurement.
    pub fn words(&self) -> String {
        format!("measured on {} on {}", self.device, self.day())
    }
}

/// The day of a time as in RFC 3339.
pub fn day(date: &str) -> &str {
    date.split('T').next().unwrap_or_default()
}

/// Probes looked up or measured by this process. A plan asks again for every candidate, and must get the same answer.
static KNOWN: Mutex<BTreeMap<&'static str, Option<&'static Probe>>> = Mutex::new(BTreeMap::new());

fn known() -> MutexGuard<'static, BTreeMap<&'static str, Option<&'static Probe>>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The probe of a card, by name in [`ft_kernels::Machine`], if any. Warns of an unreadable file.
pub fn find(card: &'static str) -> Option<&'static Probe> {
    *known().entry(card).or_insert_with(|| {
        let path = PROBES.path()?;
        let found = read(&path, card).unwrap_or_else(|why| {
            warn(&format!(
                "{}: no measured rates of {card}: {why}\n  hint: ft bench --probe, or the next run on the card, \
                 measures them anew",
                path.display()
            ));
            None
        });
        found.map(|probe| &*Box::leak(Box::new(probe)))
    })
}

/// Takes a probe for the plans of this process.
pub fn take(card: &'static str, probe: Probe) {
    known().insert(card, Some(Box::leak(Box::new(probe))));
}

/// Stores a probe for later plans and returns the file, or `None` without a cache folder. An unreadable file is
/// replaced.
///
/// # Errors
/// An unwritable cache folder or file.
pub fn save(card: &str, probe: &Probe) -> Result<Option<PathBuf>, store::Error> {
    PROBES.save(card, probe)
}

fn read(path: &Path, card: &str) -> Result<Option<Probe>, String> {
    let Some(entry) = entries(path)?.remove(card) else { return Ok(None) };
    let probe: Probe = serde_json::from_value(entry).map_err(|e| e.to_string())?;
    if probe.rates.are_sound() { Ok(Some(probe)) } else { Err("a rate is not a positive number".into()) }
}

/// Keeps a text for the life of the process: a day, or a driver's name of a card in no table, for
/// [`ft_kernels::Machine`]. There are few.
pub fn named(name: &str) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.get(name) {
        return known;
    }
    let new: &'static str = Box::leak(name.into());
    names.insert(new);
    new
}

/// A probe with round numbers, for tests.
#[cfg(test)]
pub fn example() -> Probe {
    let rates = CardRates {
        products: 100e12,
        attention: [50e12, 25e12],
        grouped: 20e12,
        dequantize: 1e12,
        fp8: None,
        copy: 1e12,
        crossing: [20e9, 10e9],
        launch: 5e-6,
    };
    Probe {
        device: "a card".into(),
        driver: 13_000,
        ft: "0.1.0".into(),
        date: "2026-11-26T10:00:00Z".into(),
        rates,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::bench_cache::insert;

    #[test]
    fn probes_are_kept_by_card() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("new/probes.json");
        assert_eq!(read(&path, "A"), Ok(None));
        let (a, b) = (example(), Probe { device: "another".into(), ..example() });
        insert(&path, "A", &b)?;
        insert(&path, "B", &b)?;
        insert(&path, "A", &a)?;
        assert_eq!(
            [read(&path, "A"), read(&path, "B"), read(&path, "C")],
            [Ok(Some(a)), Ok(Some(b)), Ok(None)]
        );
        Ok(())
    }

    #[test]
    fn invalid_probe_files_are_named_and_replaced() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("probes.json");
        let probe = example();
        let mut broken = serde_json::to_value(&probe)?;
        broken["rates"]["copy"] = 0.into();
        for (text, why) in [
            ("{\"A\": {", "EOF"),
            ("[1]", "expected a map"),
            ("{\"A\": {\"device\": \"x\"}}", "missing field"),
            (&format!("{{\"A\": {broken}}}"), "a rate is not a positive number"),
        ] {
            std::fs::write(&path, text)?;
            let said = read(&path, "A").expect_err(text);
            assert!(said.contains(why), "{text}: {said}");
            insert(&path, "A", &probe)?;
            assert_eq!(read(&path, "A"), Ok(Some(probe.clone())), "{text}");
        }
        // Entries of other versions of ft stay.
        std::fs::write(&path, "{\"B\": {\"device\": \"x\"}}")?;
        insert(&path, "A", &probe)?;
        assert!(entries(&path).is_ok_and(|all| all["B"]["device"] == "x"));
        Ok(())
    }

    #[test]
    fn names_of_cards_are_interned() {
        assert!(std::ptr::eq(named("a card"), named("a card")));
        assert_eq!(example().words(), "measured on a card on 2026-11-26");
    }
}
