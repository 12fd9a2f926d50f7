//! Report of a benchmark: times of the parts of a step, relative to limits of the machine.

use super::matmul::MatmulRate;
use crate::train::memory::MemoryMonitor;
use ft_engine::params::buffers::moments::Moments;
use ft_engine::params::{FlatParam, Params};
use ft_engine::walk::{Part, Times};
use ft_plan::{Plan, report};
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Floating-point operations of a step.
fn flops(plan: &Plan) -> f64 {
    plan.work.flops() * plan.micro_batches as f64
}

/// Amount of work in a part of a step, for comparison with a limit of the machine.
pub enum Limit {
    /// Floating-point operations of matrix products.
    Products(f64),
    /// Bytes read and written.
    Bytes(f64),
}

impl Limit {
    /// Work of a part of a step; `None` if only the time is known.
    pub fn of(part: Part, plan: &Plan, params: &Params) -> Option<Self> {
        let (w, n) = (plan.work, plan.micro_batches as f64);
        let [up, down] = w.head;
        match part {
            Part::Forward => Some(Limit::Products(n * (w.forward - up))),
            Part::Head => Some(Limit::Products(n * (up + down))),
            Part::Recompute => Some(Limit::Products(n * w.recompute)),
            Part::Backward => Some(Limit::Products(n * (w.backward - down))),
            Part::Step if !params.offloaded && !params.weights_offloaded => {
                // AdamW reads and writes weights and moments, reads gradients, and writes the copy of master
                // weights in the compute dtype.
                let bytes = |u: &FlatParam| {
                    let compute = u.compute.whole.dtype().size_in_bytes();
                    let moments = u.moments.as_ref().map_or(0, Moments::bytes);
                    let copy = if compute < 4 { compute } else { 0 };
                    // Values without master weights are read and written in the compute dtype.
                    let (masters, others) = (u.kept.len(), u.len - u.kept.len());
                    (4 * u.len + masters * (8 + copy) + others * 2 * compute) as f64 + (2 * moments) as f64
                };
                Some(Limit::Bytes(params.flats.iter().flatten().map(bytes).sum()))
            }
            Part::Data | Part::Step => None,
        }
    }

    /// Lower bound of the time, in seconds.
    fn seconds(&self, products: &MatmulRate) -> f64 {
        match self {
            Limit::Products(flops) => flops / products.rate,
            Limit::Bytes(bytes) => bytes / products.copy,
        }
    }
}

/// Times of the measured steps.
pub struct StepTimes {
    pub times: Vec<Times>,
    pub tokens: usize,
    /// Indexed by [`Part`].
    pub limits: [Option<Limit>; Part::ALL.len()],
}

impl StepTimes {
    /// Seconds of all steps.
    fn total(&self) -> f64 {
        self.times.iter().map(Times::total).sum()
    }

    /// Mean seconds per step.
    pub fn mean(&self) -> f64 {
        self.total() / self.times.len() as f64
    }

    /// Seconds of the fastest step, for comparison with the fastest product and for rates: other programs may use the
    /// machine too.
    pub fn fastest(&self) -> f64 {
        self.times.iter().map(Times::total).fold(f64::INFINITY, f64::min)
    }

    /// Mean seconds per step in a part.
    fn part(&self, p: Part) -> f64 {
        self.times.iter().map(|t| t.seconds(p)).sum::<f64>() / self.times.len() as f64
    }

    /// Fraction of the machine limit reached in a part; `None` for parts without time or without a limit.
    fn share(&self, p: Part, products: &MatmulRate) -> Option<f64> {
        let least = self.limits[p as usize].as_ref()?.seconds(products);
        (self.part(p) > 0.0).then(|| least / self.part(p))
    }

    fn speed(&self) -> f64 {
        self.tokens as f64 / self.total()
    }

    pub fn json(&self, plan: &Plan, monitor: &MemoryMonitor, products: &MatmulRate) -> Value {
        let parts: Map<String, Value> =
            Part::ALL.iter().map(|p| (p.word().to_string(), json!(self.part(*p)))).collect();
        let shares: Map<String, Value> =
            Part::ALL.iter().map(|p| (p.word().to_string(), json!(self.share(*p, products)))).collect();
        let best = flops(plan) / self.fastest();
        json!({
            "tokens_per_second": self.speed(), "step_seconds": self.mean(),
            "fastest_step_seconds": self.fastest(), "parts": parts, "shares": shares,
            "flops_per_step": flops(plan), "step_flops": flops(plan) / self.mean(),
            "matmul_flops": products.rate, "matmul_shape": products.fastest,
            "share_of_matmul": best / products.rate, "copy_bytes_per_second": products.copy,
            "peak_device_bytes": monitor.peak(), "planned_peak_bytes": plan.engine(), "memory": monitor.compared(),
            "plan": monitor.json(),
        })
    }

    pub fn text(&self, plan: &Plan, monitor: &MemoryMonitor, products: &MatmulRate) -> String {
        let mut text =
            format!("{}\n{:.0} tokens/s, {:.2} s a step\n", monitor.line(), self.speed(), self.mean());
        for p in Part::ALL {
            // Parts without work show a dash.
            let _ = match self.part(p) {
                s if s > 0.0 => {
                    let limit = match (&self.limits[p as usize], self.share(p, products)) {
                        (Some(Limit::Products(_)), Some(x)) => format!("  {:>5.1}% of products", 100.0 * x),
                        (Some(Limit::Bytes(_)), Some(x)) => format!("  {:>5.1}% of a copy", 100.0 * x),
                        _ => String::new(),
                    };
                    let of_step = 100.0 * s / self.mean();
                    writeln!(text, "  {:<10} {s:>8.3} s  {of_step:>5.1}%{limit}", p.word())
                }
                _ => writeln!(text, "  {:<10} {:>8}", p.word(), "-"),
            };
        }
        let best = flops(plan) / self.fastest();
        let _ = writeln!(
            text,
            "arithmetic {:.1} GFLOP/s in the fastest step: {:.0}% of the {:.1} of the fastest product ({}); \
             copies {:.1} GB/s",
            best / 1e9,
            100.0 * best / products.rate,
            products.rate / 1e9,
            products.fastest,
            products.copy / 1e9
        );
        let apart = |planned: u64, measured: u64| match planned {
            0 => String::new(),
            _ => format!("{:+.2}%", 100.0 * (measured as f64 / planned as f64 - 1.0)),
        };
        let _ = writeln!(text, "memory                            planned    measured");
        let compared = monitor.compared();
        let of = |side: &str, key: &str| compared[side][key].as_u64().unwrap_or(0);
        let keys: Vec<&String> = compared["planned"].as_object().into_iter().flat_map(Map::keys).collect();
        let parts = keys.iter().map(|k| (k.replace('_', " "), of("planned", k), of("measured", k)));
        for (name, planned, measured) in parts.chain([("at its peak".into(), plan.engine(), monitor.peak())])
        {
            if planned > 0 || measured > 0 {
                let (p, m) = (report::bytes(planned), report::bytes(measured));
                let _ = writeln!(text, "  {name:<27} {p:>11} {m:>11}  {}", apart(planned, measured));
            }
        }
        text.extend(monitor.verdict().map(|w| w + "\n"));
        text
    }
}
