//! Memory section: planned bytes by component, and measured bytes.

use super::metrics::{Metrics, Step, count, text};
use ft_engine::walk::Recomputed;
use ft_plan::Component;
use ft_plan::report::bytes;
use serde::Serialize;
use serde_json::Value;

/// One table row: name, bytes in words, bar lengths in percent.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    name: String,
    planned: String,
    measured: String,
    /// Deviation of measured from planned.
    apart: String,
    planned_bar: Option<f64>,
    measured_bar: Option<f64>,
}

/// The memory section of a report.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Memory {
    /// Components at the planned peak.
    planned: Vec<Row>,
    /// Plan and measurement of each component the engine can measure.
    compared: Vec<Row>,
    /// Plan and measurement by phase, if measured.
    phases: Vec<Row>,
    /// Host memory.
    host: Vec<Row>,
    /// Place of the peak, recomputed layers, device.
    facts: Vec<String>,
    /// Text summary, for accessibility.
    about: String,
}

struct Bar {
    name: String,
    planned: Option<u64>,
    measured: Option<u64>,
}

/// Converts to rows; the longest bar is 100%.
fn rows(bars: Vec<Bar>) -> Vec<Row> {
    let most = bars.iter().flat_map(|b| [b.planned, b.measured]).flatten().max().unwrap_or(0).max(1);
    let bar = |n: Option<u64>| n.map(|n| (n as f64 / most as f64 * 1000.0).round() / 10.0);
    let words = |n: Option<u64>| n.map_or(String::new(), bytes);
    bars.into_iter()
        .map(|b| Row {
            planned: words(b.planned),
            measured: words(b.measured),
            apart: match (b.planned, b.measured) {
                (Some(p), Some(m)) if p > 0 => format!("{:+.1}%", 100.0 * (m as f64 / p as f64 - 1.0)),
                _ => String::new(),
            },
            planned_bar: bar(b.planned),
            measured_bar: bar(b.measured),
            name: b.name,
        })
        .collect()
}

/// Pairs planned and measured bytes by name, dropping names with zero in both.
fn pair(planned: &Value, measured: &Value) -> Vec<Bar> {
    let (planned, measured) = (parts(planned), parts(measured));
    let of = |list: &[(&str, u64)], key: &str| list.iter().find(|(k, _)| *k == key).map(|(_, b)| *b);
    let mut keys: Vec<&str> = planned.iter().chain(&measured).map(|(k, _)| *k).collect();
    let mut seen = std::collections::HashSet::new();
    keys.retain(|k| seen.insert(*k));
    keys.into_iter()
        .map(|k| Bar { name: name(k), planned: of(&planned, k), measured: of(&measured, k) })
        .filter(|b| b.planned.unwrap_or(0) > 0 || b.measured.unwrap_or(0) > 0)
        .collect()
}

/// Label of a component; unknown keys are shown with spaces for underscores.
fn name(key: &str) -> String {
    let component = Component::ALL.into_iter().find(|c| c.key() == key);
    component.map_or_else(|| key.replace('_', " "), |c| c.label().to_string())
}

/// Reads a JSON object of byte counts, at most 64 entries.
fn parts(v: &Value) -> Vec<(&str, u64)> {
    let map = v.as_object();
    map.into_iter().flatten().filter_map(|(k, b)| Some((k.as_str(), b.as_u64()?))).take(64).collect()
}

impl Memory {
    /// From a run's metrics; `None` if nothing was planned or measured.
    pub fn new(m: &Metrics) -> Option<Self> {
        let plan = &m.start["plan"];
        let planned = plan["peak_device_bytes"].as_u64();
        let measured = measured(m, "peak_device_bytes", |s| s.device_bytes);
        let about = match (planned, measured) {
            (Some(p), Some(m)) => format!("Planned {}, measured {}.", bytes(p), bytes(m)),
            (Some(p), None) => format!("Planned {}; nothing was measured yet.", bytes(p)),
            (None, Some(m)) => format!("Measured {}; no plan is recorded.", bytes(m)),
            (None, None) => return None,
        };
        // as recorded at the end or stop of the run
        let recorded = &m.last_event()["memory"];
        let mut compared = pair(&recorded["planned"], &recorded["measured"]);
        compared.push(Bar { name: "peak".into(), planned, measured });
        let on_cpu = text(&m.start, "device") == "cpu";
        Some(Self {
            planned: rows(planned_bars(&plan["device"])),
            compared: rows(compared),
            phases: rows(pair(&recorded["planned_phases"], &recorded["measured_phases"])),
            host: rows(host(m, on_cpu)),
            facts: facts(plan, on_cpu),
            about,
        })
    }
}

/// Peak over the steps, and of the end by its key; `None` if not measured.
fn measured(m: &Metrics, key: &str, of_step: fn(&Step) -> u64) -> Option<u64> {
    let of_end = m.end.as_ref().map_or(0, |e| count(e, key));
    Some(m.peak(of_step).max(of_end)).filter(|b| *b > 0)
}

/// Planned bytes by component.
fn planned_bars(planned: &Value) -> Vec<Bar> {
    let bar = |(key, b): (&str, u64)| Bar { name: name(key), planned: Some(b), measured: None };
    parts(planned).into_iter().map(bar).collect()
}

/// Planned host memory by component, and the measured resident size.
fn host(m: &Metrics, on_cpu: bool) -> Vec<Bar> {
    let measured = measured(m, "peak_host_bytes", |s| s.host_bytes);
    let mut host = planned_bars(&m.start["plan"]["host"]);
    if !host.is_empty() && !on_cpu {
        let sum = host.iter().filter_map(|b| b.planned).sum();
        host.push(Bar { name: "all of the host".into(), planned: Some(sum), measured });
    } else if measured.is_some() {
        let name = "resident size of the process, at the most".into();
        host.push(Bar { name, planned: None, measured });
    }
    host
}

/// Place of the peak, recomputed layers, budget, device.
fn facts(plan: &Value, on_cpu: bool) -> Vec<String> {
    let mut facts = Vec::new();
    let place = text(plan, "where");
    if !place.is_empty() {
        facts.push(format!("The plan's peak: {place}."));
    }
    if let (Some(n), Some(of)) = (plan["recompute_layers"].as_u64(), plan["recompute_of"].as_u64()) {
        let part = |key: &str| count(&plan["choices"]["recompute"], key) as usize;
        let recomputed =
            Recomputed { all: n as usize, feed_forward: part("feed_forward"), norms: part("norms") };
        facts.push(format!("Recomputed: {} ({}).", recomputed.words(of as usize), text(plan, "reason")));
        let inputs = &plan["choices"]["inputs"];
        if recomputed.layers() > 0 && inputs["value"] == "host" {
            facts.push(format!("Inputs of those layers wait on the host ({}).", text(inputs, "reason")));
        }
    }
    if let Some(budget) = plan["budget"].as_u64() {
        facts.push(format!("Budget: {}.", bytes(budget)));
    }
    if on_cpu {
        facts.push(format!(
            "The device is the CPU: measured are the engine's own allocations, a part of the resident size; the \
             process had {} before the model was loaded.",
            bytes(count(plan, "host_bytes_before_loading"))
        ));
    }
    facts
}
