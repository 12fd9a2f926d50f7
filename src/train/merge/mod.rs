//! A merged model on disk, compared with base and adapter before success is told.
//!
//! Two things could be wrong with it, and each has its own check. The arithmetic: the merged weights, before they are
//! rounded, must give the logits of base and adapter but for the order of sums in f32. And the file: every weight in
//! it must be that value rounded once to its dtype, to the bit. What rounding then does to the logits has no bar (it
//! is what the dtype costs): it is measured and told.

pub mod cost;
pub mod weights;

use super::Error;
use super::compare;
use super::job;
use super::output::{TOKENIZER, is_of_model, logits_apart, write_folder};
use ft_engine::adapt::{Adapter, Selection};
use ft_engine::base::{Base, layout};
use ft_data::{Tokenizer, Trained};
use ft_engine::model::Config;
use ft_engine::model::decoder::{Decoder, Weights};
use ft_engine::model::embedding::EmbeddingLora;
use ft_engine::model::linear::{Lora, Weight};
use ft_engine::model::modules::Module;
use ft_engine::model::sink::Slot;
use ft_base::rng::{Purpose, Stream};
use ft_base::store::{self, NewFolder};
use ft_engine::files::TensorFiles;
use ft_engine::walk;
use candle_core::{DType, Device, Tensor};
use cost::MergeCost;
use rayon::prelude::*;
use serde_json::Map;
use std::ops::Range;
use std::path::Path;
use weights::Merge;

/// Tokens of the text on which the models are compared.
const PROBE: usize = 32;
/// What to do where base and adapter compute no numbers.
const DIVERGED: &str =
    "hint: the adapter has diverged, or it is of another base; do not use what is in --out";
/// Rows of a tensor that are compared at a time hold about so many values.
const PIECE: usize = 1 << 20;

/// A base with an adapter to merge into it.
pub struct Merging<'a> {
    /// The base's folder.
    pub dir: &'a Path,
    /// The base.
    pub base: &'a Base,
    /// The adapter.
    pub adapter: &'a Adapter,
    /// What the adapter holds.
    pub selection: &'a Selection,
    /// The base that the adapter was trained on, where that is another than is merged onto: the same in 4 bits.
    pub trained: Option<&'a Base>,
}

/// What a merge gave. Distances are of logits and relative, but where it says otherwise.
#[derive(Clone, Copy, Debug)]
pub struct Merged {
    /// Of the merged weights in f32 from base and adapter: the order of sums.
    pub exact: f64,
    /// What `exact` may be.
    pub bar: f64,
    /// Of the weights that were written from those in f32 (relative L2, over all of them).
    pub rounding: f64,
    /// Of the model that was written from base and adapter.
    pub apart: f64,
    /// Of the base alone from base and adapter.
    pub effect: f64,
    /// Whether head and embedding became two tensors.
    pub untied: bool,
    /// Onto a 4-bit base, what the merged weights lose in bf16 and if they are quantized again.
    pub cost: Option<MergeCost>,
    /// Onto a 4-bit base, of the model that was written, quantized again, from base and adapter.
    pub again: Option<f64>,
    /// Of the model that was written from what was trained, where that had another base.
    pub trained: Option<f64>,
}

/// How far the logits of two models that differ in the order of sums may be, relative: 1e-5 for a few layers, and
/// more for many, through which differences grow.
fn bar(layers: usize) -> f64 {
    1e-5 * (layers as f64 / 8.0).max(1.0)
}

impl Merging<'_> {
    /// Writes the merged model into a new folder and compares it with base and adapter on a probe of seeded tokens;
    /// then it gets its name, in the place of a model that is there. At no time more than one layer is in memory.
    /// `progress` hears the bytes of each tensor that is written.
    ///
    /// # Errors
    /// An adapter that does not fit; a disk that is full; [`Error::Merged`], [`Error::Unequal`].
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
        // without rounding the two are one model
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

/// The merged weights in f32, each held against what was written of it.
struct Exact<'a> {
    merge: &'a Merge<'a>,
    out: &'a Path,
    written: &'a TensorFiles,
    /// Square of the distance of what was written, and of the norm.
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

    /// Rows of a tensor rounded as the file's dtype rounds, and those in the file; both in f32.
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

/// The sum of the squares of `a - b` (nothing of `b`: of `a`), in f64.
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
