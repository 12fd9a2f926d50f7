//! A run beside its plan: refused when it cannot fit, measured while it goes, compared at the end.

use super::Job;
use crate::adapt::Params;
use crate::error::Error;
use crate::hub;
use crate::log::{memory, warn};
use crate::plan::{self, Component, Plan, report};
use crate::recipe::{Recipe, Weights};
use candle_core::Device;
use serde_json::{Map, Value, json};

/// Share of the plan by which a measured peak may differ before a warning.
const APART: f64 = 0.05;
/// Bytes below which a difference is no warning: small models are mostly what is not planned.
const SMALL: u64 = 64 << 20;

/// Refuses a run that cannot fit before its model is downloaded.
///
/// # Errors
/// [`plan::Error::DoesNotFit`]. What else is wrong is left to be found where it belongs.
pub fn before_download(recipe: &Recipe) -> crate::Result<()> {
    let path = recipe.resolve(&recipe.model.source);
    if path.exists() || recipe.model.weights == Weights::Random {
        return Ok(());
    }
    let offline = hub::Settings { offline: true, ..hub::Settings::from_env() };
    let (source, revision) = (&recipe.model.source, &recipe.model.revision);
    if hub::fetch_model_with(&offline, source, revision, hub::Want::Weights, false).is_ok() {
        return Ok(());
    }
    let cuda = super::job::device(recipe.run.device)?.is_cuda();
    match plan::of_recipe(recipe, cuda) {
        Ok((plan, _)) if refused(recipe, &plan) => Err(plan.refusal().into()),
        _ => Ok(()),
    }
}

/// A budget that the recipe names is obeyed; one that is only what is free is, where the plan is exact.
fn refused(recipe: &Recipe, plan: &Plan) -> bool {
    !plan.fits() && (recipe.memory.budget.is_some() || !plan.machine.cuda)
}

/// Refuses a run that does not fit; warns where the plan is an estimate.
///
/// # Errors
/// [`plan::Error::DoesNotFit`].
pub fn check(job: &Job, plan: &Plan) -> crate::Result<()> {
    if refused(&job.recipe, plan) {
        return Err(plan.refusal().into());
    }
    if !plan.fits() {
        warn(&plan.refusal().to_string());
    }
    if let Some(note) = plan.host_note() {
        warn(&note);
    }
    Ok(())
}

/// Bytes of what stays for the whole run, by what it is for, as they were measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Kept {
    frozen: u64,
    trained: u64,
    gradients: u64,
    master: u64,
    moments: u64,
}

impl Kept {
    fn sum(self) -> u64 {
        self.frozen + self.trained + self.gradients + self.master + self.moments
    }

    /// What the plan says of the same.
    fn planned(plan: &Plan) -> Self {
        use Component::*;
        let of = |list: &[Component]| list.iter().map(|c| plan.peak.bytes.get(*c)).sum();
        Self {
            frozen: of(&[Embedding, Attention, Mlp, Experts, Router, Norms, Head, QuantConstants]),
            trained: of(&[Trained, Adapters]),
            gradients: of(&[Gradients]),
            master: of(&[Master]),
            moments: of(&[Moments]),
        }
    }

    /// Its parts, and what is left of `peak`: activations, temporaries, the batch.
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

/// Measures a run against its plan.
#[derive(Debug)]
pub struct Watch<'a> {
    plan: &'a Plan,
    device: Device,
    /// Counted bytes, and resident ones, before the model was loaded.
    before: (Option<u64>, u64),
    kept: Kept,
    peak: u64,
}

impl<'a> Watch<'a> {
    /// Begins; call it before the model is loaded.
    pub fn begin(plan: &'a Plan, device: &Device) -> Self {
        memory::reset_peak();
        let before = (memory::live_bytes(), memory::device_bytes(device));
        Self { plan, device: device.clone(), before, kept: Kept::default(), peak: 0 }
    }

    /// Takes down what stays, now that the model is loaded.
    pub fn loaded(&mut self, params: &Params) {
        let now = match (self.device.is_cpu(), self.before.0, memory::live_bytes()) {
            (true, Some(before), Some(live)) => live.saturating_sub(before),
            (true, ..) => memory::host_bytes().saturating_sub(self.before.1),
            _ => memory::device_bytes(&self.device),
        };
        let mut k = Kept::default();
        for u in params.units.iter().flatten() {
            let (n, width) = (u.len as u64, u.compute.dtype().size_in_bytes() as u64);
            k.trained += width * n;
            k.master += if width == 4 { 0 } else { 4 * n };
            k.gradients += if u.grads.is_some() { 4 * n } else { 0 };
            k.moments += if u.moments.is_some() { 8 * n } else { 0 };
        }
        k.frozen = now.saturating_sub(k.sum());
        self.kept = k;
        self.look();
    }

    /// Planned and measured bytes by what they are for, for `metrics.jsonl`.
    pub fn compared(&self) -> Value {
        let table = |parts: [(&'static str, u64); 6]| -> Map<String, Value> {
            parts.iter().map(|(k, b)| (k.replace(' ', "_"), json!(b))).collect()
        };
        json!({
            "planned": table(Kept::planned(self.plan).parts(self.plan.total())),
            "measured": table(self.kept.parts(self.peak)),
        })
    }

    /// Takes a look at what is used.
    ///
    /// On the CPU the engine's own allocations are counted, and the peak between two looks is not missed; on
    /// another device it is what the device says now.
    pub fn look(&mut self) {
        let now = match (self.device.is_cpu(), self.before.0, memory::peak_bytes()) {
            (true, Some(before), Some(peak)) => peak.saturating_sub(before),
            (true, ..) => memory::host_bytes().saturating_sub(self.before.1),
            _ => memory::device_bytes(&self.device),
        };
        self.peak = self.peak.max(now);
    }

    /// The highest that was seen, in bytes: on the CPU beyond what was there before the model was loaded.
    pub fn peak(&self) -> u64 {
        self.peak
    }

    /// For `metrics.jsonl`.
    pub fn json(&self) -> Value {
        let p = self.plan;
        let device: serde_json::Map<String, Value> =
            p.peak.bytes.iter().map(|(c, b)| (c.key().to_string(), json!(b))).collect();
        json!({
            "recompute_layers": p.choices.recompute, "recompute_of": p.walked, "reason": p.reasons.recompute,
            "choices": p.choices_json(),
            "peak_device_bytes": p.total(), "device": device, "where": report::place(&p.peak, p.layers),
            "host": p.host.iter().map(|(k, b)| (k.to_string(), json!(b))).collect::<Map<_, _>>(),
            "budget": p.budget, "host_bytes_before_loading": self.before.1,
        })
    }

    /// For the terminal.
    pub fn line(&self) -> String {
        let p = self.plan;
        let budget = p.budget.map_or(String::new(), |b| format!(" of {}", report::bytes(b)));
        format!(
            "plan: {}{budget} at the fullest, recomputing {} of {} layers ({})",
            report::bytes(p.total()),
            p.choices.recompute,
            p.walked,
            p.reasons.recompute
        )
    }

    /// A warning when plan and measurement are too far apart.
    pub fn verdict(&self) -> Option<String> {
        // a device's pool does not hold the driver's context, and its slack is what is measured
        let unseen = match self.device.is_cpu() {
            true => 0,
            false => [Component::Context, Component::Slack].map(|c| self.plan.peak.bytes.get(c)).iter().sum(),
        };
        let (planned, measured) = (self.plan.total() - unseen, self.peak);
        let apart = planned.abs_diff(measured);
        (measured > 0 && apart > SMALL && apart as f64 > APART * planned as f64).then(|| {
            format!(
                "warning: the plan said {} at the fullest, measured were {}: please report this with the recipe",
                report::bytes(planned),
                report::bytes(measured)
            )
        })
    }

    /// Adds what the plan had said to an error that is out of memory.
    pub fn explain(&self, e: Error) -> Error {
        if e.is_out_of_memory() {
            let mut said = self.plan.out_of_memory(memory::cuda_memory().map(|(free, _)| free));
            let plan::Error::DoesNotFit(text) = &mut said;
            text.insert_str(0, &format!("{e}\n"));
            return said.into();
        }
        e
    }
}
