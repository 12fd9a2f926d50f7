//! Merges an adapter into the base, and verifies the model on disk.
//!
//! Two checks, for two kinds of mistakes. Arithmetic: the merged weights in f32 must give the logits of
//! base and adapter, up to the order of sums. File: every weight on disk must equal the merged f32 weight
//! rounded once to the dtype of the file, bit for bit. The effect of rounding on the logits has no
//! tolerance, because it is inherent to the dtype; it is measured and reported.

pub mod weights;

use super::Error;
use super::compare;
use super::job;
use super::output::{is_of_model, logits_apart};
use candle_core::{DType, Device, Tensor};
use ft_base::rng::{Purpose, Stream};
use ft_base::store::{self, NewFolder};
use ft_data::{Tokenizer, Trained};
use ft_engine::adapters::{Adapter, Selection};
use ft_engine::base::{Base, layout};
use ft_engine::files::{TOKENIZER, TensorFiles, write_folder};
use ft_engine::model::Config;
use ft_engine::model::decoder::{Decoder, Weights};
use ft_engine::model::embedding::EmbeddingLora;
use ft_engine::model::linear::{Lora, Weight};
use ft_engine::model::modules::Module;
use ft_engine::model::sink::Slot;
use ft_engine::quant::MergeCost;
use ft_engine::walk;
use rayon::prelude::*;
use serde_json::Map;
use std::ops::Range;
use std::path::Path;
use weights::Merge;

/// Number of tokens in the comparison.
const PROBE: usize = 32;
/// Hint if base and adapter give non-finite logits.
const DIVERGED: &str =
    "hint: the adapter has diverged, or it is of another base; do not use what is in --out";
/// Approximate number of values compared at a time.
const PIECE: usize = 1 << 20;

/// Inputs of a merge.
pub struct Merging<'a> {
    /// Folder of the base.
    pub dir: &'a Path,
    /// The base.
    pub base: &'a Base,
    /// The adapter.
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
    /// Tolerance for `exact`.
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

/// Tolerance for logits that differ only by the order of sums: 1e-5 for up to 8 layers, then proportional
/// to depth.
fn bar(layers: usize) -> f64 {
    1e-5 * (layers as f64 / 8.0).max(1.0)
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
        new: NewFolder,
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
        write_folder(self.dir, &out, merge.config(), merge.dtype(), &merge.entries(), &mut get)?;
        if !adapter.config.tokens().is_empty() {
            let tokenizer = Tokenizer::load_with(self.dir, None, &job::added(Some(adapter))?)?;
            if let Some((file, _)) = tokenizer.as_ref().and_then(Tokenizer::with_added) {
                store::write_atomic(&out.join(TOKENIZER), file)?;
            }
        }
        Trained::copy(&adapter.dir, &out)?;

        let stream = Stream::new(0, Purpose::Sample, 0, 0);
        let vocab = base.config.vocab as u32;
        let ids: Vec<u32> = (0..PROBE as u64).map(|i| stream.word(i) % vocab).collect();
        let frozen = Selection::frozen(&base.config);
        let want = compare::logits(base, selection, Some(adapter), &ids)?;
        walk::finite(&want, "base and adapter", DIVERGED)?;
        let effect = logits_apart(&compare::logits(base, &frozen, None, &ids)?, &want)?;

        let config = Config::load(&out, &Map::new())?;
        let files = layout::open(&config, &out)?;
        let mut exact = Exact { merge: &merge, out: target, written: &files, error: 0.0, norm: 0.0 };
        let got = Decoder::logits_by_layer(&config, &mut exact, &ids, &Device::Cpu)?;
        let rounding = (exact.error / exact.norm).sqrt();
        let (exact, bar) = (logits_apart(&got, &want)?, bar(config.layers));
        if exact > bar {
            return Err(Error::Merged { path: target.display().to_string(), apart: exact, bar }.into());
        }
        let made = Base::of_files(config, files);
        let frozen = Selection::frozen(&made.config);
        // Without rounding, both models are equal.
        let got = if rounding > 0.0 { compare::logits(&made, &frozen, None, &ids)? } else { got };
        let again = match base.is_4bit() {
            true => {
                let again = compare::logits(&made.in_nf4(true), &frozen, None, &ids)?;
                Some(logits_apart(&again, &want)?)
            }
            false => None,
        };
        let trained = match &self.trained {
            Some(base) => {
                let selection = adapter.selection(&base.config)?;
                let trained = compare::logits(base, &selection, Some(adapter), &ids)?;
                Some(logits_apart(&got, &trained)?)
            }
            None => None,
        };
        let (apart, untied, cost) = (logits_apart(&got, &want)?, merge.unties(), merge.cost());
        new.replace(&is_of_model)?;
        Ok(Merged { exact, bar, rounding, apart, effect, untied, cost, again, trained })
    }
}

/// Merged weights in f32, compared with the weights on disk while they are read.
struct Exact<'a> {
    merge: &'a Merge<'a>,
    out: &'a Path,
    written: &'a TensorFiles,
    /// Sums of squares: of the rounding error, and of the weights.
    error: f64,
    norm: f64,
}

impl Exact<'_> {
    fn get(&mut self, m: &Module, part: &str) -> ft_base::Result<Tensor> {
        let name = format!("{}.{part}", m.name);
        let value = self.merge.in_f32(&name)?;
        let (rows, row) = (value.dim(0)?, value.elem_count() / value.dim(0)?.max(1));
        let step = (PIECE / row.max(1)).max(1);
        for first in (0..rows).step_by(step) {
            let n = step.min(rows - first);
            let piece = value.narrow(0, first, n)?.flatten_all()?;
            let [rounded, written] = self.rounded(&name, &piece, first..first + n)?;
            if rounded != written {
                let (path, name) = (self.out.display().to_string(), name);
                return Err(Error::Unequal { path, name }.into());
            }
            let piece = piece.to_vec1::<f32>()?;
            self.error += squares(&written, &piece);
            self.norm += squares(&piece, &[]);
        }
        Ok(value)
    }

    /// Returns rows of a tensor rounded to the dtype of the file, and the same rows on disk, both as f32.
    fn rounded(&self, name: &str, piece: &Tensor, rows: Range<usize>) -> ft_base::Result<[Vec<f32>; 2]> {
        let dtype = match self.written.get(name)?.dtype {
            safetensors::Dtype::BF16 => DType::BF16,
            safetensors::Dtype::F16 => DType::F16,
            _ => DType::F32,
        };
        let bytes = self.written.read_rows(name, rows)?;
        let written = Tensor::from_raw_buffer(&bytes, dtype, &[piece.elem_count()], &Device::Cpu)?;
        let rounded = piece.to_dtype(dtype)?;
        Ok([rounded.to_dtype(DType::F32)?.to_vec1()?, written.to_dtype(DType::F32)?.to_vec1()?])
    }
}

/// Sum of squares of `a - b`, or of `a` if `b` is empty, in f64.
fn squares(a: &[f32], b: &[f32]) -> f64 {
    const CHUNK: usize = 1 << 14;
    let square = |x: f32| f64::from(x) * f64::from(x);
    let parts: Vec<f64> = match b.is_empty() {
        true => a.par_chunks(CHUNK).map(|a| a.iter().map(|x| square(*x)).sum()).collect(),
        false => {
            let both = a.par_chunks(CHUNK).zip(b.par_chunks(CHUNK));
            both.map(|(a, b)| a.iter().zip(b).map(|(a, b)| square(a - b)).sum()).collect()
        }
    };
    parts.iter().sum()
}

impl Weights for Exact<'_> {
    fn dtype(&self) -> DType {
        DType::F32
    }

    fn weight(&mut self, m: &Module) -> ft_base::Result<(ft_kernels::Tensor, Option<Slot>)> {
        Ok((self.get(m, "weight")?.into(), None))
    }

    fn bias(&mut self, m: &Module) -> ft_base::Result<(ft_kernels::Tensor, Option<Slot>)> {
        Ok((self.get(m, "bias")?.into(), None))
    }

    fn lora(&mut self, _: &Module, _: &Weight) -> ft_base::Result<Option<Lora>> {
        Ok(None)
    }

    fn embedding_lora(&mut self, _: &Module) -> ft_base::Result<Option<EmbeddingLora>> {
        Ok(None)
    }
}
