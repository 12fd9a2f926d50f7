//! The pass of the reference before training, in preference tasks with a reference.

use super::workload::Workload;
use crate::time::Work;
use ft_recipe::{Recipe, Reference, Task};
use serde_json::{Value, json};

/// Bytes of a sample in the file of log-probabilities: two numbers of up to 20 digits; and of a completion of KTO's
/// estimate.
const BYTES: [u64; 2] = [44, 21];

/// The pass of the reference.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferencePass {
    /// Another model or adapter, by name.
    pub other: Option<String>,
    /// Samples of training and evaluation, if known; each is scored once.
    pub samples: Option<u64>,
    /// Work of a rank in the pass, as that of steps.
    pub work: Option<f64>,
}

impl ReferencePass {
    /// The pass of a recipe; `None` for tasks without a reference. `work` is a training micro-batch's.
    pub fn of(r: &Recipe, w: &Workload, work: Work, micro_rows: usize) -> Option<Self> {
        if !r.task.has_reference() {
            return None;
        }
        let other = match &r.preference.reference {
            Reference::Other(other) => Some(other.clone()),
            Reference::Base | Reference::Start => None,
        };
        let counted = counts(r, w);
        let forward = work.total() * work.forward / work.flops().max(1.0);
        let unit = (micro_rows * r.parallel.data).max(1) as u64;
        let passes = |[samples, _, crossed]: [u64; 3]| samples.div_ceil(unit) + crossed.div_ceil(unit);
        let work = counted.map(|n| forward * passes(n) as f64);
        Some(Self { other, samples: counted.map(|[samples, ..]| samples), work })
    }

    /// For `ft plan --json`; `seconds` is the predicted range of the pass.
    pub fn json(&self, seconds: Option<[f64; 2]>) -> Value {
        json!({"other": self.other, "samples": self.samples, "work": self.work, "seconds": seconds})
    }
}

/// Numbers of scored samples, of samples with an entry in the file, and of completions for KTO's estimate.
fn counts(r: &Recipe, w: &Workload) -> Option<[u64; 3]> {
    let (epoch, steps) = (w.epoch?, w.steps?);
    let rows = steps.saturating_mul(r.run.batch_rows as u64);
    let crossed = if r.task == Task::Kto { rows + epoch.held_out } else { 0 };
    // by their weights, sources may have fewer rows than samples
    let scored = epoch.samples.min(epoch.rows).min(rows);
    Some([scored + epoch.held_out, epoch.samples + epoch.held_out, crossed])
}

/// Bytes of the file of log-probabilities; 0 for tasks without a reference, or if the samples are not known.
pub fn reference_bytes(r: &Recipe, w: &Workload) -> u64 {
    let counted = counts(r, w).filter(|_| r.task.has_reference());
    counted.map_or(0, |[_, entries, crossed]| BYTES[0] * entries + BYTES[1] * crossed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::workload::Epoch;

    /// 80 of 100 samples in 10 steps of 8 rows, or the 50 in an epoch by their weight, and 3 of evaluation, in forward
    /// passes of 4 rows on 2 ranks; KTO also scores as many other completions.
    #[test]
    fn the_reference_scores_each_sample_of_the_run_once() -> anyhow::Result<()> {
        // a forward pass with a third of the time beside arithmetic
        let work = Work { forward: 30.0, backward: 60.0, moved: 45.0, ..Work::default() };
        for (task, format, rows, samples, passes) in [
            ("dpo", "preference", 100, 83, 11.0),
            ("kto", "unpaired", 100, 83, 22.0),
            ("dpo", "preference", 50, 53, 7.0),
        ] {
            let epoch = Some(Epoch { samples: 100, held_out: 3, rows, ..Epoch::default() });
            let w = Workload { steps: Some(10), epoch, ..Workload::default() };
            let text = format!(
                "task = \"{task}\"\n[model]\nsource = \"m\"\n[[data.train]]\nsource = \"d.jsonl\"\nformat = \
                 \"{format}\"\n[[train]]\nmodules = [\"attention\"]\n"
            );
            let set = ["run.batch_rows=8".into(), "parallel.data=2".into()];
            let pass = ReferencePass::of(&Recipe::parse(&text, "r.toml", &set)?, &w, work, 4);
            let want = ReferencePass { other: None, samples: Some(samples), work: Some(45.0 * passes) };
            assert_eq!(pass, Some(want), "{task} of {rows} rows");
        }
        Ok(())
    }
}
