//! A plan as JSON.

use super::place;
use crate::plan::{Hint, Plan};
use crate::time::rates::{Range, Source};
use serde_json::{Map, Value, json};

impl Hint {
    /// For `ft plan --json`; `ft run` supports (`built`) every change.
    fn json(&self) -> Value {
        json!({"set": self.set, "text": self.text, "total": self.total, "built": true})
    }
}

impl Plan {
    /// Output of `ft plan --json`; `range` is the predicted time of a step, if a rate is known.
    pub fn json(&self, range: Option<Range>) -> Value {
        let mut device: Map<String, Value> =
            self.peak.bytes.iter().map(|(c, b)| (c.key().to_string(), json!(b))).collect();
        device.insert("total".into(), json!(self.total()));
        device.insert("budget".into(), json!(self.budget));
        let (total, trainable) = self.parameters;
        let over_run = |low: f64, high: f64| self.workload.steps.map(|n| [low * n as f64, high * n as f64]);
        let tokens = self.tokens_per_step() as f64;
        let sheet = |s| if let Source::Datasheet(card) = s { Some(card) } else { None };
        let probe = |s| if let Source::Probe(probe) = s { Some(probe) } else { None };
        let time = range.map(|r| {
            json!({"step_seconds": [r.low, r.high], "total_seconds": over_run(r.low, r.high),
                   "tokens_per_second": [tokens / r.high, tokens / r.low], "data_sheet": sheet(r.source),
                   "probe": probe(r.source), "other_family": matches!(r.source, Source::OtherFamily(_))})
        });
        let c = self.execution.recompute;
        let mut out = json!({
            "ranks": self.ranks,
            "wire_bytes_a_step": self.wire,
            "wire_bytes_exchanged": self.exchanged,
            "parameters": {"total": total, "trainable": trainable},
            "device": device,
            "learning_rates": self.learning_rates,
            "fits": self.fits(),
            "kept_back": self.kept_back().map(|(wanted, left)| json!({"wanted": wanted, "left": left})),
            "hints": self.hints.iter().map(|h| &h.text).collect::<Vec<_>>(),
            "changes": self.hints.iter().filter(|h| !h.set.is_empty()).map(Hint::json).collect::<Vec<_>>(),
            "theory": self.theory,
            "peak": {"phase": self.peak.phase.word(), "where": place(&self.peak, self.layers)},
            "recompute": {"layers": c.all, "feed_forward": c.feed_forward, "norms": c.norms, "of": self.walked,
                          "reason": self.reasons.recompute},
            "choices": self.choices_json(),
            "micro_batch": {"tokens": self.workload.train.tokens, "targets": self.workload.train.targets,
                            "longest": self.workload.train.longest, "from_data": self.workload.measured()},
            "epoch": self.workload.epoch.map(|e| json!({"samples": e.samples, "rows": e.rows, "tokens": e.tokens,
                                                        "targets": e.targets, "longest": e.longest})),
            "tokens_per_step": self.tokens_per_step(),
            "steps": self.workload.steps,
            "flops_per_step": self.work.flops() * self.micro_batches as f64,
            "work_per_step": self.step_work(),
            "time": time,
            "device_kind": if self.machine.cuda { "cuda" } else { "cpu" },
        });
        if let Some((of, all)) = self.fp8 {
            out["fp8"] = json!({"matrices": of, "of": all});
        }
        if let Some(reference) = &self.reference {
            out["reference"] = reference.json(self.reference_time(range).map(|r| [r.low, r.high]));
        }
        if let Some(p) = &self.pipeline {
            out["pipeline"] = json!(p);
        }
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
            "recompute": {"value": c.recompute.all, "feed_forward": c.recompute.feed_forward,
                "norms": c.recompute.norms,
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
}
