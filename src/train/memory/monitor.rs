//! Compares the memory of a run with the plan: measures peaks, and reports differences at the end.

use super::out_of_memory::{self, Planned};
use crate::train::job::Job;
use candle_core::Device;
use ft_base::memory;
use ft_base::memory::place;
use ft_engine::params::Params;
use ft_engine::params::buffers::LocalShard;
use ft_engine::params::buffers::moments::Moments;
use ft_kernels::{cuda, gemm};
use ft_plan::{Component, Phase, Plan, report};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Relative difference between planned and measured peak above which a warning is printed.
const APART: f64 = 0.05;
/// Smaller differences in bytes cause no warning. Small models consist mostly of unplanned overhead.
const SMALL: u64 = 64 << 20;

/// Bytes of weights, gradients and optimizer states, as measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct StateBytes {
    frozen: u64,
    trained: u64,
    gradients: u64,
    master: u64,
    moments: u64,
}

impl StateBytes {
    fn sum(self) -> u64 {
        self.frozen + self.trained + self.gradients + self.master + self.moments
    }

    /// The same figures from a plan.
    fn planned(plan: &Plan) -> Self {
        use Component::*;
        let of = |list: &[Component]| list.iter().map(|c| plan.peak.bytes.get(*c)).sum();
        Self {
            frozen: of(&[Embedding, Attention, Mlp, Experts, Router, Norms, Head, QuantConstants]),
            trained: of(&[Trained, Adapters]),
            // With updates in the backward pass, gradients are temporary.
            gradients: if plan.keeps_gradients { of(&[Gradients]) } else { 0 },
            master: of(&[Master]),
            moments: of(&[Moments]),
        }
    }

    /// Named figures, and the remainder of `peak`: activations, temporaries, the micro-batch.
    fn parts(self, peak: u64) -> [(&'static str, u64); 6] {
        [
            ("frozen weights", self.frozen),
            ("weights that train", self.trained),
            ("gradients", self.gradients),
            ("master weights", self.master),
            ("moments", self.moments),
            ("activations and temporaries", peak.saturating_sub(self.sum())),
        ]
    }
}

/// Measures a run, for comparison with the plan.
#[derive(Debug)]
pub struct MemoryMonitor {
    planned: Arc<Planned>,
    device: Device,
    /// Counted and resident bytes before the model was loaded.
    before: (Option<u64>, u64),
    /// Bytes of the packing buffers of matrix products.
    slabs: u64,
    states: StateBytes,
    /// Peak of loading.
    loading: u64,
    peak: u64,
}

impl MemoryMonitor {
    /// Begins the measurement. Must be called before the model is loaded.
    pub fn begin(plan: &Plan, job: &Job) -> Self {
        let planned = out_of_memory::remember(plan.clone(), job.allocations(plan));
        place::enter(Phase::Load, 0);
        reset_peaks(&job.device);
        if job.device.is_cpu() {
            memory::keep_within(plan.reused_within().saturating_mul(plan.local));
        }
        let before = (memory::live_bytes(), cuda::device_bytes(&job.device));
        memory::reset_ranks();
        if job.device.is_cpu() && plan.local == 1 {
            gemm::make_slabs();
        }
        let slabs = memory::live_bytes().zip(before.0).map_or(0, |(now, before)| now.saturating_sub(before));
        let (device, states) = (job.device.clone(), StateBytes::default());
        Self { planned, device, before, slabs, states, loading: 0, peak: 0 }
    }

    /// The current plan.
    pub fn plan(&self) -> &Plan {
        &self.planned.plan
    }

    /// Replaces the plan during a run, and measures the peak of the steps anew.
    pub fn replan(&mut self, plan: Plan, job: &Job) {
        let listed = job.allocations(&plan);
        self.planned = out_of_memory::remember(plan, listed);
        reset_peaks(&self.device);
        self.peak = self.loading;
    }

    /// The plan with a list of allocations, for out-of-memory reports.
    pub fn planned(&self) -> Arc<Planned> {
        Arc::clone(&self.planned)
    }

    /// Measures weights and states after all ranks have loaded the model. With ranks in threads, takes the
    /// largest rank, or the mean if the allocator does not count.
    pub fn loaded(&mut self, params: &Params) {
        let now = match (self.device.is_cpu(), self.before.0, memory::live_bytes()) {
            (true, Some(_), _) if self.plan().local > 1 => {
                memory::largest_rank().0.saturating_sub(self.plan().peak.bytes.get(Component::Context))
            }
            (true, Some(before), Some(live)) => live.saturating_sub(before + self.slabs),
            (true, ..) => memory::host_bytes().saturating_sub(self.before.1) / self.plan().local,
            _ => {
                // the values of a tensor in f32, from which others are made, are free once the device is done
                let done = self.device.synchronize().ok();
                let used = done.and_then(|()| cuda::pool_bytes(&self.device));
                used.map_or_else(|| cuda::device_bytes(&self.device), |(now, _)| now)
            }
        };
        let mut k = StateBytes::default();
        // On the CPU, offloaded states live in the same memory.
        let here = self.device.is_cpu() || !params.offloaded;
        let weights_here = self.device.is_cpu() || !params.weights_offloaded;
        for u in params.flats.iter().flatten() {
            let held = |h: &LocalShard| 4 * h.at.len() as u64;
            k.trained += if weights_here { u.compute.bytes() } else { 0 };
            k.master += if !u.is_master() && here { held(&u.master) } else { 0 };
            k.gradients += u.grads.as_ref().map_or(0, held);
            let projected: u64 =
                u.projected.iter().map(|p| p.moments.bytes() + 4 * p.basis.elem_count() as u64).sum();
            let moments = u.moments.as_ref().map_or(0, Moments::bytes) + projected;
            k.moments += if here { moments } else { 0 };
        }
        if self.device.is_cpu() {
            k.trained += params.initials.as_ref().map_or(0, |i| i.bytes());
        }
        k.frozen = now.saturating_sub(k.sum());
        self.states = k;
        self.measure();
        self.loading = self.peak;
    }

    /// Measures the current peak.
    ///
    /// On the CPU, allocations are counted, so peaks between two calls are not missed. Other devices report
    /// current usage only. With ranks in threads, takes the largest rank, or the mean if the allocator does
    /// not count.
    pub fn measure(&mut self) {
        let now = match (self.device.is_cpu(), self.before.0, memory::peak_bytes()) {
            (true, Some(_), _) if self.plan().local > 1 => memory::largest_rank().1,
            (true, Some(before), Some(peak)) => peak.saturating_sub(before),
            (true, ..) => memory::host_bytes().saturating_sub(self.before.1) / self.plan().local,
            _ => cuda::device_bytes(&self.device),
        };
        self.peak = self.peak.max(now);
    }

    /// Highest measured usage in bytes. On the CPU, usage before loading is subtracted.
    pub fn peak(&self) -> u64 {
        self.peak
    }

    /// Most bytes held by the memory pool of the device, in use or for reuse; `None` on the CPU.
    pub fn reserved(&self) -> Option<u64> {
        cuda::reserved_bytes(&self.device)
    }

    /// Formats the plan for `metrics.jsonl`.
    pub fn json(&self) -> Value {
        let p = self.plan();
        let device: serde_json::Map<String, Value> =
            p.peak.bytes.iter().map(|(c, b)| (c.key().to_string(), json!(b))).collect();
        json!({
            "recompute_layers": p.execution.recompute.all, "recompute_of": p.walked, "reason": p.reasons.recompute,
            "choices": p.choices_json(),
            "peak_device_bytes": p.total(), "device": device, "where": report::place(&p.peak, p.layers),
            "host": p.space.host.iter().map(|(k, b)| (k.to_string(), json!(b))).collect::<Map<_, _>>(),
            "ranks": p.ranks, "wire_bytes_a_step": p.wire, "wire_bytes_exchanged": p.exchanged, "budget": p.budget,
            "host_bytes_before_loading": self.before.1,
        })
    }

    /// Formats the plan for the terminal.
    pub fn line(&self) -> String {
        let p = self.plan();
        let budget = p.budget.map_or(String::new(), |b| format!(" of {}", report::bytes(b)));
        format!(
            "plan: {}{budget} at its peak, recomputing {} ({})",
            report::bytes(p.total()),
            p.execution.words(p.walked),
            p.reasons.recompute
        )
    }

    /// Returns a warning if plan and measurement differ too much.
    pub fn verdict(&self) -> Option<String> {
        // The memory pool of the device does not include the driver context.
        let unseen = if self.device.is_cpu() { 0 } else { self.plan().peak.bytes.get(Component::Context) };
        warning(self.plan(), self.states, unseen, self.peak)
    }

    /// Planned and measured bytes by purpose and by phase, for `metrics.jsonl`.
    ///
    /// Phases are measured on the CPU only, by counting allocations.
    pub fn compared(&self) -> Value {
        let table = |parts: [(&'static str, u64); 6]| -> Map<String, Value> {
            parts.iter().map(|(k, b)| (k.replace(' ', "_"), json!(b))).collect()
        };
        let phases = |of: [u64; Phase::ALL.len()]| -> Map<String, Value> {
            let each = Phase::ALL.iter().zip(of).filter(|(_, b)| *b > 0);
            each.map(|(p, b)| (p.word().replace(' ', "_"), json!(b))).collect()
        };
        let process = memory::peak_host_bytes().saturating_sub(self.before.1) / self.plan().local;
        let mut out = json!({
            "planned_process_bytes": self.plan().process(), "process_bytes": self.device.is_cpu().then_some(process),
            "planned": table(StateBytes::planned(self.plan()).parts(self.plan().engine())),
            "measured": table(self.states.parts(self.peak)),
            "planned_phases": phases(self.plan().peak.phases),
        });
        if let (true, Some(before)) = (self.device.is_cpu(), self.before.0) {
            let measured = memory::phase_peaks().map(|b| b.saturating_sub(before) / self.plan().local);
            out["measured_phases"] = Value::Object(phases(measured));
        }
        out
    }
}

/// Restarts the peaks of host and device at the bytes in use now.
fn reset_peaks(device: &Device) {
    memory::reset_peak();
    cuda::reset_peak(device);
}

/// Compares the measured peak with the plan. `unseen` planned bytes are not measurable. The reserve for
/// uneven routing may be used in full or not at all.
fn warning(plan: &Plan, kept: StateBytes, unseen: u64, measured: u64) -> Option<String> {
    let planned = plan.engine() - unseen;
    let most = planned + plan.peak.bytes.get(Component::Routing);
    let apart = planned.saturating_sub(measured).max(measured.saturating_sub(most));
    if measured == 0 || apart <= SMALL || apart as f64 <= APART * planned as f64 {
        return None;
    }
    let ours = StateBytes::planned(plan).parts(planned);
    let most = ours.iter().zip(kept.parts(measured)).max_by_key(|((_, a), (_, b))| a.abs_diff(*b));
    let most = most.map_or(String::new(), |((name, a), (_, b))| {
        format!(", most apart in {name} ({} and {})", report::bytes(*a), report::bytes(b))
    });
    Some(format!(
        "warning: the plan said {} at its peak, measured were {}{most}: this is a bug in ft, please report it \
         with the recipe",
        report::bytes(planned),
        report::bytes(measured)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ft_recipe::Recipe;

    #[test]
    fn a_plan_that_is_wrong_asks_for_a_report() -> anyhow::Result<()> {
        let text = "[model]\nsource = \"Qwen/Qwen3-1.7B\"\n[[train]]\nmodules = [\"mlp\"]\n\
                    [[data.train]]\nsource = \"d.jsonl\"\nformat = \"text\"\n";
        let set = ["memory.recompute=none".to_string(), "memory.budget=1TiB".into()];
        let (plan, _) = ft_plan::of_recipe(&Recipe::parse(text, "r.toml", &set)?, false)?;
        let kept = StateBytes::planned(&plan);
        let at =
            |share: f64, kept: StateBytes| warning(&plan, kept, 0, (share * plan.engine() as f64) as u64);
        for share in [0.951, 1.0, 1.049] {
            assert_eq!(at(share, kept), None, "{share}");
        }
        for share in [0.94, 1.06] {
            let said = at(share, kept).unwrap_or_default();
            assert!(said.contains("please report") && said.contains("activations"), "{share}: {said}");
        }
        let twice = StateBytes { gradients: kept.gradients + plan.engine() / 10, ..kept };
        assert!(at(1.1, twice).is_some_and(|s| s.contains("most apart in gradients")));
        // In a small model, unplanned overhead exceeds 5%.
        let less = StateBytes::default();
        assert_eq!(warning(&plan, less, plan.engine() - (100 << 20), 150 << 20), None);
        assert!(warning(&plan, less, plan.engine() - (100 << 20), 180 << 20).is_some());
        assert_eq!(at(0.0, kept), None, "nothing was measured");
        Ok(())
    }
}
