//! Throughput measured by `ft bench`, stored for later plans.

use ft_base::store;
use ft_kernels::Machine;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Relative uncertainty of a predicted step time; plans print a range of ±30%.
const SPREAD: f64 = 0.3;

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
}

/// File of measured rates in the cache folder of `ft`.
pub fn path() -> Option<PathBuf> {
    Some(store::cache_folder()?.join("rates.json"))
}

fn key(m: Machine) -> String {
    let width = if m.computes_in_f32() { "f32" } else { "half" };
    if m.cuda { format!("cuda-{width}") } else { format!("cpu-{width}-{}-threads", m.threads) }
}

fn read(path: &std::path::Path) -> BTreeMap<String, Rate> {
    ft_base::store::read_plain_text(path, ft_base::store::LARGEST)
        .ok()
        .and_then(|t| serde_json::from_str(&t).ok())
        .unwrap_or_default()
}

/// Rate measured on a machine of this kind, if any.
pub fn find(m: Machine) -> Option<Rate> {
    read(&path()?).remove(&key(m))
}

/// Stores a measured rate and returns the file, or `None` without a cache folder.
///
/// # Errors
/// A cache folder or file that cannot be written.
pub fn save(m: Machine, rate: Rate) -> Result<Option<PathBuf>, store::Error> {
    let Some(path) = path() else { return Ok(None) };
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(|e| store::Error::write("make the folder", dir, None, e))?;
    }
    let mut all = read(&path);
    all.insert(key(m), rate);
    let text = serde_json::to_string_pretty(&all).unwrap_or_default() + "\n";
    store::write_atomic(&path, text.as_bytes())?;
    Ok(Some(path))
}

/// Seconds for `work` at a measured rate.
pub fn range(rate: Rate, work: f64) -> Option<Range> {
    if !(rate.step.is_finite() && rate.step > 0.0) {
        return None;
    }
    let middle = work / rate.step;
    Some(Range { low: middle * (1.0 - SPREAD), high: middle * (1.0 + SPREAD) })
}
