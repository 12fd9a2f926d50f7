//! Log-probabilities under the reference: computed in one pass before training, kept in the cache folder.
//!
//! The pass takes the model as loaded, before a checkpoint replaces its weights: without adapters, or as the run
//! starts. No second model is in memory, and a resumed run sees the same reference. Another model as reference is
//! loaded before the trained one, and dropped after the pass.

use super::reference_model;
use super::sequences::{DocumentScore, Scorer, crossed, samples_of};
use crate::train::job::Job;
use crate::train::step::{Gather, Ranks};
use ft_base::store;
use ft_base::terminal::{rows_bar, tell, warn};
use ft_data::{Batches, Dataset, Micro};
use ft_engine::model::Decoder;
use ft_engine::params::Params;
use ft_engine::params::buffers::Split;
use ft_engine::ranks::{self, CollectiveId, Comm};
use ft_engine::walk::{Execution, Hooks, NoHooks};
use ft_recipe::{Part, Reference, Task};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Files kept in the cache.
const KEPT: usize = 64;

/// Log-probabilities under the reference.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReferenceScores {
    /// Chosen and rejected, or the completion, of each sample: training, evaluation. As bits of f64.
    samples: [Vec<[u64; 2]>; 2],
    /// KTO: of each row of all steps, and of the evaluation, the completion of the row before.
    crossed: [Vec<u64>; 2],
}

fn index(part: Part) -> usize {
    usize::from(part == Part::Eval)
}

impl ReferenceScores {
    /// Sums of a sample; 0 without a reference, NaN of a sample without a computed reference.
    pub fn of(&self, part: Part, sample: u32) -> [f64; 2] {
        let sums = self.samples[index(part)].get(sample as usize).map(|bits| bits.map(f64::from_bits));
        sums.unwrap_or([self.other(); 2])
    }

    /// Sum of the completion of the row before; as in [`Self::of`].
    pub fn of_crossed(&self, part: Part, place: usize) -> f64 {
        self.crossed[index(part)].get(place).map_or(self.other(), |bits| f64::from_bits(*bits))
    }

    /// Sum of a sample without a value.
    fn other(&self) -> f64 {
        if self.samples.iter().all(Vec::is_empty) { 0.0 } else { f64::NAN }
    }
}

/// Inputs of the pass.
#[derive(Clone, Copy)]
pub struct ReferenceInputs<'a> {
    pub job: &'a Job,
    /// Training data, and the rows of the steps.
    pub train: Option<(&'a Dataset, &'a Batches)>,
    pub eval: Option<&'a Dataset>,
    pub execution: &'a Execution,
    pub comm: &'a dyn Comm,
    /// Identity of the run, on the first rank. It has the hash of another model.
    pub identity: Option<&'a BTreeMap<String, String>>,
}

impl ReferenceInputs<'_> {
    /// Computes the log-probabilities under the model as loaded, or reads them from the cache, unless they are `known`
    /// from another model. All ranks call it together.
    pub fn scores(
        &self,
        known: Option<ReferenceScores>,
        decoder: &Decoder,
        params: &Params,
    ) -> ft_base::Result<ReferenceScores> {
        if let Some(known) = known {
            return Ok(known);
        }
        let recipe = &self.job.recipe;
        if !recipe.task.has_reference() {
            return Ok(ReferenceScores::default());
        }
        let keeps = recipe.preference.reference == Reference::Start
            || recipe.lora.init.decomposition().is_some_and(|d| d.changes_base());
        let base;
        let decoder = if keeps {
            decoder
        } else {
            base = decoder.without_adapters();
            &base
        };
        let gather = Gather::new(decoder, params, self.comm);
        self.cached(&mut || self.compute(decoder, &gather))
    }

    /// The log-probabilities under another model, loaded for the pass alone; `None` if the reference is the trained
    /// model. All ranks call it together, before they load the trained model.
    pub fn of_other(&self) -> ft_base::Result<Option<ReferenceScores>> {
        let Some(other) = reference_model::job(self.job)? else { return Ok(None) };
        let scores = self.cached(&mut || {
            let (base, alone) = (other.base()?, ranks::alone());
            let (decoder, _) = other.load_shard(&base, false, Split::default(), &alone)?;
            self.compute(&decoder, &NoHooks)
        });
        scores.map(Some)
    }

    /// The values of a file in the cache, or computed and kept there. The first rank reads the cache for all.
    fn cached(
        &self,
        compute: &mut dyn FnMut() -> ft_base::Result<ReferenceScores>,
    ) -> ft_base::Result<ReferenceScores> {
        let path = self.path();
        let found = path.as_ref().and_then(|path| read(path));
        if let Some(path) = path.as_ref().filter(|_| found.is_some()) {
            tell(&format!("reference: log-probabilities of an earlier run, from {}", path.display()));
        }
        if let Some(scores) = self.shared(found)? {
            return Ok(scores);
        }
        let scores = compute()?;
        if let Some(path) = path {
            keep(&path, &scores);
        }
        Ok(scores)
    }

    /// Sends the first rank's values from the cache to all ranks.
    fn shared(&self, found: Option<ReferenceScores>) -> ft_base::Result<Option<ReferenceScores>> {
        const AT: CollectiveId = CollectiveId::all("the log-probabilities of the reference");
        if self.comm.rank() == 0 {
            self.comm.broadcast_object(AT, &found)?;
            return Ok(found);
        }
        Ok(self.comm.receive_object::<Option<ReferenceScores>>(AT)?.flatten())
    }

    fn compute(&self, decoder: &Decoder, hooks: &dyn Hooks) -> ft_base::Result<ReferenceScores> {
        let ranks = Ranks::of(self.comm, &self.job.recipe.parallel);
        let (execution, device) = (self.execution, &self.job.device);
        let scorer = &Scorer { decoder, ranks, hooks, execution, device, distillation: None };
        let mut out = ReferenceScores::default();
        let used = self.used()?;
        let held_out = (0..self.eval.map_or(0, |e| e.samples.len() as u32)).collect();
        let parts = [(self.train.map(|(data, _)| data), used), (self.eval, held_out)];
        for (i, (data, samples)) in parts.into_iter().enumerate() {
            let Some(data) = data else { continue };
            out.samples[i] = self.of_samples(scorer, data, &samples)?;
        }
        if self.job.recipe.task == Task::Kto {
            out.crossed = [self.of_steps(scorer)?, self.of_eval(scorer)?];
        }
        Ok(out)
    }

    /// Samples of the training data in the steps of the run.
    fn used(&self) -> Result<Vec<u32>, ft_data::Error> {
        let Some((train, batches)) = self.train else { return Ok(Vec::new()) };
        let (mut rows, all) = (BTreeSet::new(), train.rows.len());
        for step in 0..batches.steps() {
            rows.extend(batches.rows(step));
            if rows.len() == all {
                break;
            }
        }
        let mut samples = samples_of(train, rows)?;
        samples.sort_unstable();
        samples.dedup();
        Ok(samples)
    }

    fn of_samples(
        &self,
        scorer: &Scorer<'_>,
        data: &Dataset,
        samples: &[u32],
    ) -> ft_base::Result<Vec<[u64; 2]>> {
        let bar = rows_bar();
        if self.comm.rank() == 0 {
            tell(&format!(
                "reference: log-probabilities of {} samples, once, before training",
                samples.len()
            ));
        }
        let each = |done: usize| {
            if self.comm.rank() == 0 {
                bar.inc(done as u64);
            }
        };
        let scores = scorer.scores(samples, &|chunk| Micro::of_samples(data, chunk), &|| 0, &each);
        bar.finish_and_clear();
        let scores = scores?;
        let mut scores = scores.iter().map(|(sum, _)| sum.to_bits());
        let mut out = vec![[f64::NAN.to_bits(); 2]; samples.last().map_or(0, |last| *last as usize + 1)];
        let pairs = self.job.recipe.task != Task::Kto;
        for sample in samples {
            let first = scores.next().unwrap_or(f64::NAN.to_bits());
            let second = if pairs { scores.next() } else { None };
            out[*sample as usize] = [first, second.unwrap_or(0)];
        }
        Ok(out)
    }

    fn of_steps(&self, scorer: &Scorer<'_>) -> ft_base::Result<Vec<u64>> {
        let mut out = Vec::new();
        let Some((train, batches)) = self.train else { return Ok(out) };
        for step in 0..batches.steps() {
            let samples = samples_of(train, batches.rows(step))?;
            out.extend(self.crossed(scorer, train, &samples)?);
        }
        Ok(out)
    }

    fn of_eval(&self, scorer: &Scorer<'_>) -> ft_base::Result<Vec<u64>> {
        let Some(eval) = self.eval else { return Ok(Vec::new()) };
        let samples = samples_of(eval, 0..eval.rows.len())?;
        self.crossed(scorer, eval, &samples)
    }

    fn crossed(&self, scorer: &Scorer<'_>, data: &Dataset, samples: &[u32]) -> ft_base::Result<Vec<u64>> {
        let scores = crossed(scorer, data, samples, self.job.recipe.data.max_length, &|| 0)?;
        Ok(scores.iter().map(|(sum, _): &DocumentScore| sum.to_bits()).collect())
    }

    /// File in the cache folder, by all inputs of the values and their rounding.
    fn path(&self) -> Option<PathBuf> {
        let (job, identity) = (self.job, self.identity?);
        let folder = store::cache_folder().filter(|_| job.recipe.data.cache)?;
        let kto = job.recipe.task == Task::Kto;
        let keys: BTreeMap<&String, &String> = identity.iter().filter(|(k, _)| is_determining(k)).collect();
        let key = json!({
            "version": 1, "ft": env!("CARGO_PKG_VERSION"), "keys": keys, "kto": kto,
            "eval": self.eval.map(|e| &e.hash), "start": job.recipe.preference.reference == Reference::Start,
            "max_length": job.recipe.data.max_length, "micro_rows": self.execution.micro_rows,
            "head_rows": self.execution.head_rows, "ranks": self.comm.world(), "cuda": job.device.is_cuda(),
        });
        let name = blake3::hash(key.to_string().as_bytes()).to_hex();
        Some(folder.join("reference").join(format!("{}.json", &name[..32])))
    }
}

/// Whether a key of the identity of a run changes the values or their rounding.
fn is_determining(key: &str) -> bool {
    let model = ["model.", "hash.", "compute.", "train.", "lora.", "parallel.", "memory."];
    let rows = ["run.seed", "run.batch_rows", "run.steps", "run.epochs", "data.shuffle"];
    model.iter().any(|p| key.starts_with(p)) || rows.contains(&key)
}

/// Largest file.
const LARGEST: u64 = 1 << 34;

/// Contents of a file: the values and their hash.
#[derive(Serialize, Deserialize)]
struct Kept {
    hash: String,
    scores: ReferenceScores,
}

fn hash(scores: &ReferenceScores) -> String {
    let mut h = blake3::Hasher::new();
    let pairs = scores.samples.iter().map(|list| list.as_flattened());
    for list in pairs.chain(scores.crossed.iter().map(Vec::as_slice)) {
        h.update(&(list.len() as u64).to_le_bytes());
        list.iter().for_each(|bits| {
            h.update(&bits.to_le_bytes());
        });
    }
    h.finalize().to_hex().to_string()
}

fn read(path: &std::path::Path) -> Option<ReferenceScores> {
    let text = store::read_plain_text(path, LARGEST).ok()?;
    let kept = serde_json::from_str::<Kept>(&text).ok().filter(|k| hash(&k.scores) == k.hash);
    if kept.is_none() {
        warn(&format!("{}: damaged; the log-probabilities are computed again", path.display()));
    }
    kept.map(|k| k.scores)
}

/// Writes the cache, best effort.
fn keep(path: &std::path::Path, scores: &ReferenceScores) {
    let kept = Kept { hash: hash(scores), scores: scores.clone() };
    match store::write_atomic(path, serde_json::to_string(&kept).unwrap_or_default().as_bytes()) {
        Ok(()) => store::sweep_oldest(store::folder_of(path), KEPT),
        Err(e) => warn(&format!("the log-probabilities of the reference are not kept: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Products of 8-bit floats change the log-probabilities; the loss does not.
    #[test]
    fn products_in_8_bits_determine_kept_log_probabilities() {
        assert!(is_determining("memory.products") && is_determining("hash.reference"));
        assert!(!is_determining("preference.beta") && !is_determining("run.keep"));
    }
}
