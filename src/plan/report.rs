//! A plan for eyes, and as JSON.

use super::ledger::{Peak, Phase};
use super::rates::Range;
use super::{Hint, Plan, Theory};
use crate::log::memory;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Width of the longest bar.
const BAR: usize = 36;

/// Bytes in words, in binary units.
pub fn bytes(n: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|(_, size)| n >= *size) {
        Some((unit, size)) => format!("{:.2} {unit}", n as f64 / *size as f64),
        None => format!("{n} B"),
    }
}

/// A count in words, with thousands as K, M, B.
fn count(n: u64) -> String {
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.1} K", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", n as f64 / 1e6),
        _ => format!("{:.2} B", n as f64 / 1e9),
    }
}

fn seconds(s: f64) -> String {
    match s {
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// Where a peak is, in words.
pub fn place(peak: &Peak, layers: usize) -> String {
    let unit = match (peak.phase, peak.unit) {
        (Phase::Load | Phase::Step | Phase::Save, _) => return peak.phase.word().into(),
        (_, 0) => "the embedding".to_string(),
        (_, u) if u > layers => "the head".to_string(),
        (_, u) => format!("layer {}", u - 1),
    };
    format!("{} of {unit}", peak.phase.word())
}

/// Bytes by name with their sum.
fn table(parts: &[(&'static str, u64)]) -> Value {
    let mut out: Map<String, Value> = parts.iter().map(|(k, b)| (k.to_string(), json!(b))).collect();
    out.insert("total".into(), json!(parts.iter().map(|(_, b)| b).sum::<u64>()));
    Value::Object(out)
}

impl Plan {
    /// What `ft plan --json` prints; `range` is the time of a step, where a rate was measured.
    pub fn json(&self, data_ranks: u64, range: Option<Range>) -> Value {
        let mut device: Map<String, Value> =
            self.peak.bytes.iter().map(|(c, b)| (c.key().to_string(), json!(b))).collect();
        device.insert("total".into(), json!(self.total()));
        device.insert("budget".into(), json!(self.budget));
        let (total, trainable) = self.parameters;
        let time = range.map(|r| json!({"step_seconds": [r.low, r.high], "total_seconds": self.workload.steps.map(|n| [r.low * n as f64, r.high * n as f64])}));
        json!({
            "ranks": self.ranks,
            "parameters": {"total": total, "trainable": trainable},
            "device": device,
            "host": table(&self.host),
            "disk": table(&self.disk),
            "fits": self.fits(),
            "hints": self.hints.iter().map(|h| &h.text).collect::<Vec<_>>(),
            "changes": self.hints.iter().filter(|h| !h.set.is_empty()).collect::<Vec<&Hint>>(),
            "theory": self.theory,
            "peak": {"phase": self.peak.phase.word(), "where": place(&self.peak, self.layers)},
            "recompute": {"layers": self.choices.recompute, "of": self.walked, "reason": self.reasons.recompute},
            "choices": self.choices_json(),
            "micro_batch": {"tokens": self.workload.train.tokens, "targets": self.workload.train.targets,
                            "longest": self.workload.train.longest, "from_data": self.workload.measured},
            "tokens_per_step": self.tokens_per_step(data_ranks),
            "steps": self.workload.steps,
            "flops_per_step": self.work.flops() * self.micro_batches as f64,
            "work_per_step": self.step_work(),
            "time": time,
            "device_kind": if self.machine.cuda { "cuda" } else { "cpu" },
        })
    }

    /// What was chosen, with reasons: for `ft plan --json` and `metrics.jsonl`.
    pub fn choices_json(&self) -> Value {
        let (c, why) = (&self.choices, &self.reasons);
        json!({
            "micro_rows": {"value": c.micro_rows, "reason": why.micro_rows},
            "recompute": {"value": c.recompute, "of": self.walked, "reason": why.recompute},
            "decoded": {"value": c.decoded.word(), "reason": why.decoded},
            "head_rows": {"value": c.head_rows, "reason": why.head_rows},
        })
    }

    /// The plan as text, for a terminal.
    pub fn text(&self, data_ranks: u64, range: Option<Range>, notes: &[String]) -> String {
        let mut s = String::new();
        let (total, trainable) = self.parameters;
        let share = 100.0 * trainable as f64 / total.max(1) as f64;
        let _ = writeln!(s, "parameters  {} train of {} ({share:.2}%)", count(trainable), count(total));
        let w = &self.workload;
        let sure = if w.measured { "as the data has it" } else { "full rows, every token supervised" };
        let steps = w.steps.map_or("steps by epochs".into(), |n| format!("{n} steps"));
        let _ = writeln!(
            s,
            "tokens      {} a step in {} micro-batches of {} ({sure}), {steps}",
            count(self.tokens_per_step(data_ranks)),
            self.micro_batches * data_ranks,
            count(w.train.tokens)
        );
        let (c, why) = (&self.choices, &self.reasons);
        let _ = writeln!(s, "micro-batch {} rows ({})", c.micro_rows, why.micro_rows);
        let _ = writeln!(s, "recompute   {} of {} layers ({})", c.recompute, self.walked, why.recompute);
        let _ = writeln!(s, "decoded     by {} ({})", c.decoded.word(), why.decoded);
        let _ = writeln!(s, "logits      of {} targets at once ({})", c.head_rows, why.head_rows);
        if let Some(r) = range {
            let whole = w.steps.map_or(String::new(), |n| {
                format!(", {} to {} in all", seconds(r.low * n as f64), seconds(r.high * n as f64))
            });
            let _ = writeln!(s, "time        {} to {} a step{whole}", seconds(r.low), seconds(r.high));
        }
        let device = if self.machine.cuda { "CUDA" } else { "CPU" };
        let ranks = if self.ranks > 1 { format!(", each of {} ranks", self.ranks) } else { String::new() };
        let _ = writeln!(s, "\n{device} memory at its fullest, in {}{ranks}", place(&self.peak, self.layers));
        let most = self.peak.bytes.iter().map(|(_, b)| b).max().unwrap_or(1).max(1);
        for (c, b) in self.peak.bytes.iter() {
            let bar = "#".repeat(((b as f64 / most as f64) * BAR as f64).round() as usize);
            let _ = writeln!(s, "  {:<24} {:>11}  {bar}", c.label(), bytes(b));
        }
        let verdict = match self.budget {
            None => "no budget is known: memory.budget says what there is".to_string(),
            Some(b) if self.fits() => format!("fits {}", bytes(b)),
            Some(b) => format!("DOES NOT FIT {}", bytes(b)),
        };
        let _ = writeln!(s, "  {:<24} {:>11}  {verdict}", "total", bytes(self.total()));
        for (name, parts) in [("host", &self.host), ("disk", &self.disk)] {
            let list: Vec<String> = parts
                .iter()
                .filter(|(_, b)| *b > 0)
                .map(|(k, b)| format!("{} {}", k.replace('_', " "), bytes(*b)))
                .collect();
            let _ = writeln!(s, "{name}        {}", list.join(", "));
        }
        let Theory { weights, gradients, master, moments, total, frozen } = self.theory;
        let gb = |n: u64| format!("{:.2}", n as f64 / 1e9);
        let _ = writeln!(
            s,
            "textbook    weights {} + gradients {} + master {} + moments {} = {} GB that train, {} GB frozen",
            gb(weights),
            gb(gradients),
            gb(master),
            gb(moments),
            gb(total),
            gb(frozen)
        );
        for n in notes {
            let _ = writeln!(s, "note: {n}");
        }
        for h in &self.hints {
            let _ = writeln!(s, "hint: {}", h.text);
        }
        s
    }

    /// Says so when a run on another device would take more of this machine's memory than is free.
    pub fn host_note(&self) -> Option<String> {
        let needed: u64 = self.host.iter().map(|(_, b)| b).sum();
        let free = memory::available_bytes()?;
        (self.machine.cuda && needed > free).then(|| {
            format!(
                "the run takes {} of this machine's own memory and {} are free",
                bytes(needed),
                bytes(free)
            )
        })
    }

    /// Why a run that does not fit stops before it starts.
    pub fn refusal(&self) -> super::Error {
        let mut s = format!(
            "this run needs {} at its fullest (in {}), and there is {}",
            bytes(self.total()),
            place(&self.peak, self.layers),
            bytes(self.budget.unwrap_or(0))
        );
        for h in &self.hints {
            let _ = write!(s, "\n  hint: {}", h.text);
        }
        super::Error::DoesNotFit(s)
    }

    /// What to say when memory ran out all the same: what the plan had said, and which keys to change.
    pub fn out_of_memory(&self, free: Option<u64>) -> super::Error {
        let bytes_of = &self.peak.bytes;
        let mut parts: Vec<_> = bytes_of.iter().collect();
        parts.sort_by_key(|(_, b)| std::cmp::Reverse(*b));
        let mut s = format!(
            "out of memory; the plan had said {} at the fullest, in {}",
            bytes(self.total()),
            place(&self.peak, self.layers)
        );
        if let Some(free) = free {
            let _ = write!(s, "; {} are free now", bytes(free));
        }
        for (c, b) in parts.iter().take(4) {
            let _ = write!(s, "\n  {}: {} (to change it: {})", c.label(), bytes(*b), c.keys_to_change());
        }
        super::Error::DoesNotFit(s)
    }
}
