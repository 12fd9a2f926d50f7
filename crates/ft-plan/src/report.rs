//! A plan as text and as JSON.

use super::ledger::{Component, Peak, Phase};
use super::rates::Range;
use super::{Hint, Plan, Theory};
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Width of the longest bar, in characters.
const BAR: usize = 36;

/// Formats bytes in binary units.
pub fn bytes(n: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|(_, size)| n >= *size) {
        Some((unit, size)) => format!("{:.2} {unit}", n as f64 / *size as f64),
        None => format!("{n} B"),
    }
}

/// Formats a count with K, M or B for thousands, millions, billions.
pub fn count(n: u64) -> String {
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

/// Describes the place of a peak.
pub fn place(peak: &Peak, layers: usize) -> String {
    spot(peak.phase, peak.unit, layers)
}

/// Describes a phase and a unit of the walk.
pub fn spot(phase: Phase, unit: usize, layers: usize) -> String {
    let unit = match (phase, unit) {
        (Phase::Load | Phase::Step | Phase::Save, _) => return phase.word().into(),
        (_, 0) => "the embedding".to_string(),
        (_, u) if u > layers => "the head".to_string(),
        (_, u) => format!("layer {}", u - 1),
    };
    format!("{} of {unit}", phase.word())
}

impl Plan {
    /// Output of `ft plan --json`; `range` is the predicted time of a step, if a rate was measured.
    pub fn json(&self, data_ranks: u64, range: Option<Range>) -> Value {
        let mut device: Map<String, Value> =
            self.peak.bytes.iter().map(|(c, b)| (c.key().to_string(), json!(b))).collect();
        device.insert("total".into(), json!(self.total()));
        device.insert("budget".into(), json!(self.budget));
        let (total, trainable) = self.parameters;
        let time = range.map(|r| json!({"step_seconds": [r.low, r.high], "total_seconds": self.workload.steps.map(|n| [r.low * n as f64, r.high * n as f64])}));
        let c = self.execution.recompute;
        let mut out = json!({
            "ranks": self.ranks,
            "wire_bytes_a_step": self.wire,
            "parameters": {"total": total, "trainable": trainable},
            "device": device,
            "learning_rates": self.learning_rates,
            "fits": self.fits(),
            "kept_back": self.kept_back().map(|(wanted, left)| json!({"wanted": wanted, "left": left})),
            "hints": self.hints.iter().map(|h| &h.text).collect::<Vec<_>>(),
            "changes": self.hints.iter().filter(|h| !h.set.is_empty()).collect::<Vec<&Hint>>(),
            "theory": self.theory,
            "peak": {"phase": self.peak.phase.word(), "where": place(&self.peak, self.layers)},
            "recompute": {"layers": c.all, "feed_forward": c.feed_forward, "norms": c.norms, "of": self.walked,
                          "reason": self.reasons.recompute},
            "choices": self.choices_json(),
            "micro_batch": {"tokens": self.workload.train.tokens, "targets": self.workload.train.targets,
                            "longest": self.workload.train.longest, "from_data": self.workload.measured()},
            "epoch": self.workload.epoch.map(|e| json!({"samples": e.samples, "rows": e.rows, "tokens": e.tokens,
                                                        "targets": e.targets, "longest": e.longest})),
            "tokens_per_step": self.tokens_per_step(data_ranks),
            "steps": self.workload.steps,
            "flops_per_step": self.work.flops() * self.micro_batches as f64,
            "work_per_step": self.step_work(),
            "time": time,
            "device_kind": if self.machine.cuda { "cuda" } else { "cpu" },
        });
        if let Some(server) = &self.server {
            let devices: Vec<String> = server.devices.iter().map(|d| d.word()).collect();
            out["server"] =
                json!({"devices": devices, "device_bytes": server.on_device, "host_bytes": server.on_host});
        }
        for (name, table) in self.space.json() {
            out[name] = table;
        }
        out
    }

    /// Chosen settings with reasons, for `ft plan --json` and `metrics.jsonl`.
    pub fn choices_json(&self) -> Value {
        let (c, why) = (&self.execution, &self.reasons);
        let mut all = json!({
            "micro_rows": {"value": c.micro_rows, "reason": why.micro_rows},
            "recompute": {"value": c.recompute.all, "feed_forward": c.recompute.feed_forward, "norms": c.recompute.norms,
                          "of": self.walked, "reason": why.recompute},
            "inputs": {"value": c.inputs.word(), "reason": why.inputs},
            "dequantize": {"value": c.dequantize.word(), "reason": why.dequantize},
            "head_rows": {"value": c.head_rows, "reason": why.head_rows},
        });
        if let Some(why) = self.no_master {
            all["master"] = json!({"value": "none", "reason": why});
        }
        all
    }

    /// The plan as text, for a terminal.
    pub fn text(&self, data_ranks: u64, range: Option<Range>, notes: &[String]) -> String {
        let mut s = String::new();
        let (total, trainable) = self.parameters;
        let share = 100.0 * trainable as f64 / total.max(1) as f64;
        let _ = writeln!(s, "parameters  {} train of {} ({share:.2}%)", count(trainable), count(total));
        let rates = ft_engine::adapt::learning_rates::line(&self.learning_rates);
        let _ = writeln!(s, "lr          {rates}");
        let w = &self.workload;
        let sure = if w.measured() { "as the data has it" } else { "assuming rows full to data.max_length" };
        let steps = w.steps.map_or("steps by run.epochs".into(), |n| format!("{n} steps"));
        let _ = writeln!(
            s,
            "tokens      {} a step in {} micro-batches of {} ({sure}), {steps}",
            count(self.tokens_per_step(data_ranks)),
            self.micro_batches * data_ranks,
            count(w.train.tokens)
        );
        match w.epoch {
            Some(e) => {
                let _ = writeln!(
                    s,
                    "data        {} samples in {} rows, {} tokens an epoch, {} supervised, the longest sample {}",
                    e.samples,
                    e.rows,
                    count(e.tokens),
                    count(e.targets),
                    e.longest
                );
            }
            None => {
                s.push_str("data        lengths of samples are not known yet: ft data, ft check and ft run measure them\n")
            }
        }
        let (c, why) = (&self.execution, &self.reasons);
        let rows = if c.micro_rows == 1 { "row" } else { "rows" };
        let _ = writeln!(s, "micro-batch {} {rows} ({})", c.micro_rows, why.micro_rows);
        let _ = writeln!(s, "recompute   {} ({})", c.recompute.words(self.walked), why.recompute);
        if c.recompute.layers() > 0 && (self.machine.cuda || c.inputs.on_host) {
            let _ = writeln!(s, "inputs      of those layers on the {} ({})", c.inputs.word(), why.inputs);
        }
        if let Some(why) = self.no_master {
            let _ = writeln!(
                s,
                "master      none of what trains in full, which is rounded by random numbers ({why})"
            );
        }
        let _ = writeln!(s, "dequantize  {} ({})", c.dequantize.word(), why.dequantize);
        let _ = writeln!(s, "logit chunk {} targets ({})", c.head_rows, why.head_rows);
        if let Some(r) = range {
            let whole = w.steps.map_or(String::new(), |n| {
                format!(", {} to {} in all", seconds(r.low * n as f64), seconds(r.high * n as f64))
            });
            let _ = writeln!(s, "time        {} to {} a step{whole}", seconds(r.low), seconds(r.high));
        }
        let device = if self.machine.cuda { "CUDA" } else { "CPU" };
        let ranks = if self.ranks > 1 { format!(", each of {} ranks", self.ranks) } else { String::new() };
        let _ = writeln!(s, "\n{device} peak memory, in {}{ranks}", place(&self.peak, self.layers));
        let most = self.peak.bytes.iter().map(|(_, b)| b).max().unwrap_or(1).max(1);
        for (c, b) in self.peak.bytes.iter() {
            let bar = "#".repeat(((b as f64 / most as f64) * BAR as f64).round() as usize);
            let _ = writeln!(s, "  {:<24} {:>11}  {bar}", c.label(), bytes(b));
        }
        let verdict = match self.budget {
            None => "no budget known: set memory.budget".to_string(),
            Some(b) if self.fits_device() => format!("fits {}{}", bytes(b), self.left()),
            Some(b) => format!("DOES NOT FIT {}", bytes(b)),
        };
        let _ = writeln!(s, "  {:<24} {:>11}  {verdict}", "total", bytes(self.total()));
        match (self.mixture, self.peak.bytes.get(Component::Routing)) {
            (false, _) => {}
            (true, 0) => s.push_str(
                "routing     planned both for tokens spread evenly over the experts and for all tokens at the same ones, \
                 which takes no more\n",
            ),
            (true, reserve) => {
                let _ = writeln!(
                    s,
                    "routing     the table has tokens spread evenly over the experts; up to {} more (the routing reserve) \
                     where all choose the same ones, less where experts stay idle",
                    bytes(reserve)
                );
            }
        }
        if self.ranks > 1 {
            let _ = writeln!(s, "ranks       {} come to each from the others in a step", bytes(self.wire));
        }
        if let Some(server) = &self.server {
            let _ = writeln!(s, "server      {}", server.text());
        }
        s.push_str(&self.space.text());
        if self.machine.cuda {
            let _ = writeln!(
                s,
                "            cuda libraries: {} of host memory, by what PyTorch's processes were seen to take \
                 (pytorch issue 12873); ft's were not measured",
                bytes(super::statics::CUDA_HOST)
            );
        }
        let Theory { weights, gradients, master, moments, total, frozen } = self.theory;
        let gb = |n: u64| format!("{:.2}", n as f64 / 1e9);
        let _ = writeln!(
            s,
            "theory      weights {} + gradients {} + master {} + moments {} = {} GB that train, {} GB frozen",
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

    /// Describes the free part of the budget if a reserve applies.
    fn left(&self) -> String {
        match self.kept_back() {
            Some((wanted, left)) if wanted > left => {
                format!(", leaving {}: less than the {} that a run should", bytes(left), bytes(wanted))
            }
            Some((wanted, left)) if wanted > 0 => format!(", leaving {}", bytes(left)),
            _ => String::new(),
        }
    }

    /// Error for a run that does not fit, with hints.
    pub fn refusal(&self) -> super::Error {
        let mut s = self.lacks();
        for h in &self.hints {
            let _ = write!(s, "\n  hint: {}", h.text);
        }
        super::Error::DoesNotFit(s)
    }

    /// Error for a run that does not fit, without hints.
    pub fn verdict(&self) -> super::Error {
        super::Error::DoesNotFit(self.lacks())
    }

    /// Shortages, one per line.
    fn lacks(&self) -> String {
        let mut lines = Vec::new();
        if !self.fits_device() {
            lines.push(format!(
                "this run needs {} at its peak (in {}), and {} is available",
                bytes(self.total()),
                place(&self.peak, self.layers),
                bytes(self.budget.unwrap_or(0))
            ));
        }
        if let Some(server) = self.server.as_ref().filter(|s| !s.fits()) {
            lines.push(format!(
                "the server beside it needs {}, and memory.budget is {}; to change: serve.devices",
                server.text(),
                bytes(server.budget.unwrap_or(0))
            ));
        }
        lines.extend(self.space.shortages(self.machine.cuda || self.fits_device()));
        lines.join("\n")
    }
}
