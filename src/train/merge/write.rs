//! Merges an adapter into the base, and verifies the model on disk.
//!
//! Two checks, for two kinds of mistakes. Arithmetic: the merged weights in f32 must give the logits of base and
//! adapter, up to the order of sums. A model that amplifies rounding errors has another tolerance, measured by
//! perturbations of the merged weights. File: every weight on disk must equal the merged f32 weight rounded once to the
//! dtype of the file, bit for bit. The effect of rounding on the logits is inherent to the dtype: measured and
//! reported, without a tolerance.

use super::compare::{self, BAR, tolerance};
use super::exact::ExactWeights;
use super::weights::Merge;
use crate::train::Error;
use crate::train::job;
use crate::train::layout::is_of_model;
use crate::train::output::logits_apart;
use candle_core::{DType, Device};
use ft_base::rng::{Purpose, Stream};
use ft_base::store::{self, AtomicFolder};
use ft_data::{PromptConfig, Tokenizer};
use ft_engine::adapters::{Adapter, Selection};
use ft_engine::files::TOKENIZER;
use ft_engine::load::{Base, layout};
use ft_engine::model::Config;
use ft_engine::model::decoder::Decoder;
use ft_engine::quant::MergeCost;
use ft_engine::walk;
use serde_json::Map;
use std::path::Path;

/// Number of tokens in the comparison.
const PROBE: usize = 32;
/// Hint if base and adapter give non-finite logits.
const DIVERGED: &str =
    "hint: the adapter has diverged, or it is of another base; do not use what is in --out";
/// Inputs of a merge.
pub struct Merging<'a> {
    /// Folder of the base.
    pub dir: &'a Path,
    pub base: &'a Base,
    pub adapter: &'a Adapter,
    /// Selection of the adapter.
    pub selection: &'a Selection,
    /// Base of the training run if it differs from `base`: the same model in 4 bits.
    pub trained: Option<&'a Base>,
}

/// Result of a merge. Distances are relative L2 distances of logits, unless noted.
#[derive(Clone, Copy, Debug)]
pub struct Merged {
    /// Merged weights in f32 vs. base and adapter; differs by the order of sums.
    pub exact: f64,
    /// Tolerance for `exact`: [`tolerance`].
    pub bar: f64,
    /// Weights on disk vs. weights in f32: relative L2 distance over all weights.
    pub rounding: f64,
    /// Model on disk vs. base and adapter.
    pub apart: f64,
    /// Base alone vs. base and adapter.
    pub effect: f64,
    /// True if head and embedding were tied and became separate tensors.
    pub untied: bool,
    /// For a 4-bit base: precision lost in bf16, and in NF4.
    pub cost: Option<MergeCost>,
    /// For a 4-bit base: model on disk, quantized again, vs. base and adapter.
    pub again: Option<f64>,
    /// Model on disk vs. the trained model, if the adapter was trained on another base.
    pub trained: Option<f64>,
}

/// Tolerance for logits apart only by the order of sums: [`BAR`] for up to 8 layers, then proportional to depth.
fn bar(layers: usize) -> f64 {
    BAR * (layers as f64 / 8.0).max(1.0)
}

impl Merging<'_> {
    /// Writes the merged model to a new folder, compares it with base and adapter on seeded random tokens,
    /// then moves it into place over an older model. Memory holds at most one layer at a time. Calls
    /// `progress` with the bytes of every tensor written.
    ///
    /// # Errors
    /// Adapter that does not fit; full disk; [`Error::Merged`]; [`Error::Unequal`].
    pub fn write(
        &self,
        new: AtomicFolder,
        dtype: Option<DType>,
        progress: &dyn Fn(u64),
    ) -> ft_base::Result<Merged> {
        let (out, target) = (new.path(), new.named());
        let Self { base, adapter, selection, .. } = self;
        let merge = Merge::new(base, adapter, selection, dtype)?;
        let mut get = |name: &str| {
            let tensor = merge.tensor(name)?;
            progress((tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64);
            Ok(tensor)
        };
        let folders = (self.dir, out.as_path());
        let of_base = (&base.config, base.files());
        layout::write(of_base, folders, merge.config(), merge.dtype(), merge.entries(), &mut get)?;
        let tokenizer = job::tokenizer_of((self.dir, Some(adapter)), None, [])?;
        if let Some((file, _)) = tokenizer.as_ref().and_then(Tokenizer::with_added) {
            store::write_atomic(&out.join(TOKENIZER), file)?;
        }
        PromptConfig::copy(&adapter.dir, &out)?;
        let merged = self.compare(&merge, &out, target)?;
        new.replace(&is_of_model)?;
        Ok(merged)
    }

    /// Compares the model in `out` with base and adapter on seeded random tokens.
    fn compare(&self, merge: &Merge<'_>, out: &Path, target: &Path) -> ft_base::Result<Merged> {
        let Self { base, adapter, selection, .. } = self;
        let ids = probe_tokens(base.config.vocab as u32);
        let frozen = Selection::frozen(&base.config);
        let want = compare::logits(base, selection, Some(adapter), &ids)?;
        walk::finite(&want, "base and adapter", DIVERGED)?;
        let effect = logits_apart(&compare::logits(base, &frozen, None, &ids)?, &want)?;

        let config = Config::load(out, &Map::new())?;
        let files = layout::open(&config, out)?;
        let logits =
            |weights: &mut ExactWeights<'_>| Decoder::logits_by_layer(&config, weights, &ids, &Device::Cpu);
        let mut weights = ExactWeights::new(merge, &files, target);
        let got = logits(&mut weights)?;
        let (rounding, exact) = (weights.rounding(), logits_apart(&got, &want)?);
        let bar = tolerance(exact, bar(config.layers), &|seed| {
            let mut weights = ExactWeights::new(merge, &files, target).perturbed(seed);
            Ok(logits_apart(&logits(&mut weights)?, &got)?)
        })?;
        if exact > bar {
            return Err(Error::Merged { path: target.display().to_string(), apart: exact, bar }.into());
        }
        let made = Base::of_files(config, files);
        let frozen = Selection::frozen(&made.config);
        // Without rounding, both models are equal.
        let got = if rounding > 0.0 { compare::logits(&made, &frozen, None, &ids)? } else { got };
        let again = if base.is_4bit() {
            let again = compare::logits(&made.in_nf4(true), &frozen, None, &ids)?;
            Some(logits_apart(&again, &want)?)
        } else {
            None
        };
        let trained = match &self.trained {
            Some(base) => {
                let trained = compare::logits(base, &adapter.selection(&base.config)?, Some(adapter), &ids)?;
                Some(logits_apart(&got, &trained)?)
            }
            None => None,
        };
        Ok(Merged {
            exact,
            bar,
            rounding,
            apart: logits_apart(&got, &want)?,
            effect,
            untied: merge.unties(),
            cost: merge.cost(),
            again,
            trained,
        })
    }
}

/// Seeded random tokens of the comparison.
fn probe_tokens(vocab: u32) -> Vec<u32> {
    let stream = Stream::new(0, Purpose::Sample, 0, 0);
    (0..PROBE as u64).map(|i| stream.word(i) % vocab).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::tests::ROOT;
    use anyhow::Context as _;
    use candle_core::Tensor;
    use ft_base::store::SINGLE;
    use ft_engine::adapters::Part;
    use ft_engine::files::{TensorFiles, write_file};
    use std::collections::HashMap;

    /// A base whose attention is so sharp that rounding errors move the logits by more than [`BAR`]. A merge with
    /// another scale of one module moves them by more than these.
    #[test]
    fn a_module_of_another_scale_is_found_where_rounding_errors_are_not() -> anyhow::Result<()> {
        let case = Path::new(ROOT).join("tests/fixtures/reference/qwen3-dense");
        let dir = tempfile::tempdir()?;
        let [model, good, bad] = ["model", "good", "bad"].map(|name| dir.path().join(name));
        std::fs::create_dir(&model)?;
        std::fs::copy(case.join("model/config.json"), model.join("config.json"))?;
        let files = TensorFiles::open_model(&case.join("model"))?;
        let sharp = |name: &str| -> anyhow::Result<(String, Tensor)> {
            let tensor = files.tensor(name, DType::F32, &Device::Cpu)?;
            let factor = if name.ends_with("q_norm.weight") { 1000.0 } else { 1.0 };
            Ok((name.to_string(), (tensor * factor)?))
        };
        let tensors = files.names().map(sharp).collect::<anyhow::Result<Vec<_>>>()?;
        write_file(&model.join(SINGLE), &tensors, &[])?;
        let base = Base::open(Config::load(&model, &Map::new())?, &model)?;
        let adapter = Adapter::open(&case.join("adapter_final"))?;
        let selection = adapter.selection(&base.config)?;
        let merging =
            Merging { dir: &model, base: &base, adapter: &adapter, selection: &selection, trained: None };
        let merged = merging.write(AtomicFolder::begin_named(&good)?, None, &|_| ())?;
        assert!(merged.exact <= merged.bar && merged.bar < 0.1 * merged.effect, "{merged:?}");

        let mut values = HashMap::new();
        for t in selection.trained() {
            let value = adapter.get(&t)?.context("a value")?;
            let is_wrong = t.module == "model.layers.0.self_attn.v_proj" && t.part == Part::B;
            values.insert(t.name, if is_wrong { (value * 1.5)? } else { value });
        }
        let wrong = adapter.with_values(values);
        let merge = Merge::new(&base, &wrong, &selection, None)?;
        std::fs::create_dir(&bad)?;
        let mut get = |name: &str| merge.tensor(name);
        let of_base = (&base.config, base.files());
        layout::write(of_base, (&model, &bad), merge.config(), merge.dtype(), merge.entries(), &mut get)?;
        let e = merging.compare(&merge, &bad, &bad).err().context("it is as good")?;
        assert!(e.to_string().contains("other logits than base and adapter"), "{e}");
        Ok(())
    }
}
