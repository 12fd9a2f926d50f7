//! A merged model on disk, compared with base and adapter before success is told.

use super::Error;
use super::output::{logits_apart, write_folder};
use crate::adapt::Selection;
use crate::adapt::adapter::Adapter;
use crate::adapt::build::{Base, Build};
use crate::adapt::merge::Merge;
use crate::adapt::merge_cost::MergeCost;
use crate::adapt::params::Allocate;
use crate::model::Config;
use crate::rng::{Purpose, Stream};
use crate::store::TensorFiles;
use candle_core::{DType, Device};
use serde_json::Map;
use std::path::Path;

/// Tokens of the text on which the models are compared.
const PROBE: usize = 32;

/// A base with an adapter to merge into it.
pub struct Merging<'a> {
    /// The base's folder.
    pub base: &'a Path,
    /// Its config.
    pub config: &'a Config,
    /// Its weights.
    pub files: &'a TensorFiles,
    /// The adapter.
    pub adapter: &'a Adapter,
    /// What the adapter holds.
    pub selection: &'a Selection,
}

/// What a merge gave.
#[derive(Clone, Copy, Debug)]
pub struct Merged {
    /// Distance of the merged model's logits from those of base and adapter, relative.
    pub apart: f64,
    /// What rounding explains.
    pub bar: f64,
    /// Distance of the base's logits from those of base and adapter.
    pub effect: f64,
    /// Whether head and embedding became two tensors.
    pub untied: bool,
    /// Onto a 4-bit base, what the merged weights lose in bf16 and if they are quantized again.
    pub cost: Option<MergeCost>,
}

/// Distance of logits that rounding of the weights to a dtype explains, relative.
///
/// A weight in bf16 is off by 1e-3 (root mean square of 2^-9 / sqrt 3), and some hundred of them stand behind one
/// another in a deep model, so that a few percent are possible; f16 has three more bits.
fn bar(dtype: DType) -> (f64, &'static str) {
    match dtype {
        DType::BF16 => (5e-2, "bf16"),
        DType::F16 => (6e-3, "f16"),
        _ => (1e-5, "f32"),
    }
}

impl Merging<'_> {
    /// Writes the merged model into `out` and compares it with base and adapter on a probe of seeded tokens.
    /// At no time more than one layer is in memory. `progress` hears the bytes of each tensor that is written.
    ///
    /// # Errors
    /// An adapter that does not fit; a disk that is full; [`Error::Merged`].
    pub fn write(&self, out: &Path, dtype: Option<DType>, progress: &dyn Fn(u64)) -> crate::Result<Merged> {
        let merge = Merge::new(self.config, self.files, self.adapter, self.selection, dtype)?;
        let mut get = |name: &str| {
            let tensor = merge.tensor(name)?;
            progress((tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64);
            Ok(tensor)
        };
        write_folder(self.base, out, merge.config(), merge.dtype(), &merge.entries(), &mut get)?;

        let stream = Stream::new(0, Purpose::Sample, 0, 0);
        let ids: Vec<u32> = (0..PROBE as u64).map(|i| stream.word(i) % self.config.vocab as u32).collect();
        let frozen = Selection::frozen(self.config);
        let want = logits(self.config, self.selection, self.files, Some(self.adapter), &ids)?;
        let base = logits(self.config, &frozen, self.files, None, &ids)?;
        let config = Config::load(out, &Map::new())?;
        let files = TensorFiles::open_model(out)?;
        let got = logits(&config, &Selection::frozen(&config), &files, None, &ids)?;
        let (bar, dtype) = bar(merge.coarsest());
        let apart = logits_apart(&got, &want)?;
        if apart > bar {
            return Err(Error::Merged { path: out.display().to_string(), apart, bar, dtype }.into());
        }
        let effect = logits_apart(&base, &want)?;
        Ok(Merged { apart, bar, effect, untied: merge.unties(), cost: merge.cost() })
    }
}

/// Logits in f32 on the CPU, where rounding is smallest.
fn logits(
    config: &Config,
    selection: &Selection,
    files: &TensorFiles,
    adapter: Option<&Adapter>,
    ids: &[u32],
) -> crate::Result<candle_core::Tensor> {
    let (base, device, dtype) = (Base::Files(files), &Device::Cpu, DType::F32);
    let quantize = false;
    Build {
        config,
        selection,
        base,
        adapter,
        quantize,
        dtype,
        device,
        seed: 0,
        allocate: Allocate::default(),
        progress: &|_| {},
    }
    .logits(ids)
}
