//! The base model of a recipe or an adapter: config and tensors.
//!
//! [`Base::open`] or [`Base::random`] creates a base; [`Base::in_nf4`] and [`Base::with_copy`] select 4-bit
//! linears. Tensors are read one by one; [`crate::params::build`] builds a model from them.

use super::check::{check_quantized, check_tensors};
use super::error::Error;
use super::initial::{Factors, Initials};
use super::layout;
use crate::files::TensorFiles;
use crate::model::modules::{Group, Kind, Module, norm_offset};
use crate::model::{Config, WeightFormat};
use crate::quant::{self, CodeTables, LazyMatrix};
use candle_core::{DType, Device};
use ft_base::rng::{Purpose, Stream};
use ft_base::store;
use ft_kernels::quantized::QuantizedMatrix;
use ft_kernels::tensor::Real;
use ft_kernels::{cpu, gemm};
use ft_recipe::Decomposition;
use rayon::prelude::*;
use safetensors::Dtype;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Origin of a 4-bit weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FourBit {
    /// 4-bit in the checkpoint.
    Stored,
    /// Quantized while loading.
    Quantized,
}

/// An opened base. Only the config and the headers of the files are in memory; clones share open files.
#[derive(Clone, Debug)]
pub struct Base {
    /// Config, with overrides applied.
    pub config: Config,
    /// `None` for random numbers, shaped by the config.
    files: Option<Arc<TensorFiles>>,
    /// 4-bit copy of the files (`model.cache`) with all decoder linears in 4 bits. Weights trained in full are
    /// read from the original, so the copy does not depend on the selection of trained modules.
    copy: Option<Arc<TensorFiles>>,
    nf4: bool,
    /// Seed of random weights, and of a score head absent from the checkpoint.
    seed: u64,
    initials: Option<Arc<Initials>>,
}

impl Base {
    /// Opens the base in a folder.
    ///
    /// # Errors
    /// Missing weights, pickle files, or inconsistent headers or index. [`Base::check`] compares the
    /// tensors with the config.
    pub fn open(config: Config, dir: &Path) -> Result<Self, store::Error> {
        let files = layout::open(&config, dir)?;
        Ok(Self::of_files(config, files))
    }

    /// Base on top of opened files.
    pub fn of_files(config: Config, files: TensorFiles) -> Self {
        Self { files: Some(Arc::new(files)), ..Self::random(config, 0) }
    }

    /// Base with random weights, as in transformers: norms are one; biases zero; matrices, sinks and the bias of a
    /// router normal with the config's `initializer_range`; tables zero in the row of the padding token; decay rates
    /// of linear attention uniform.
    pub fn random(config: Config, seed: u64) -> Self {
        Self { config, files: None, copy: None, nf4: false, seed, initials: None }
    }

    /// Seed of random weights, and of a score head absent from the checkpoint; 0 by default for files.
    pub fn seeded(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Whether a module is a score head or a constant absent from the checkpoint.
    pub fn lacks(&self, m: &Module) -> bool {
        (m.is_score() || m.is_constant())
            && self.files().is_some_and(|files| files.info(&m.weight_name()).is_none())
    }

    /// With `nf4`, decoder linears are quantized to NF4 while loading, except those trained in full.
    /// Weights already 4-bit in the checkpoint stay unchanged.
    pub fn in_nf4(self, nf4: bool) -> Self {
        Self { nf4, ..self }
    }

    /// Attaches a 4-bit copy of the checkpoint; frozen weights are read from the copy.
    pub fn with_copy(self, mut config: Config, copy: TensorFiles) -> Self {
        if let (Some(moe), Some(own)) = (&mut config.moe, &self.config.moe) {
            moe.fused = own.fused;
        }
        let copy = self.files.is_some().then(|| Arc::new(copy));
        Self { config, copy, ..self }
    }

    /// Compares the tensors of the checkpoint, and of the 4-bit copy if any, with the config.
    ///
    /// # Errors
    /// [`Error`] listing missing, unexpected and misshapen tensors; a config of 4 bits over other tensors.
    pub fn check(&self) -> Result<(), Error> {
        self.files.iter().chain(&self.copy).try_for_each(|files| check_tensors(&self.config, files))?;
        // a quantized copy has replaced the config
        let read = self.copy.as_ref().or(self.files.as_ref());
        read.map_or(Ok(()), |files| check_quantized(&self.config, files))
    }

    /// Files of the original checkpoint; `None` for random weights.
    pub fn files(&self) -> Option<&TensorFiles> {
        self.files.as_deref()
    }

    /// Files to read a module's weights from; `full` says whether the module trains in full.
    fn read_for(&self, full: bool) -> Option<&TensorFiles> {
        self.copy.as_deref().filter(|_| !full).or(self.files())
    }

    /// Bytes per stored matrix value: from the first file in `dir` if given, otherwise from the config.
    pub fn stored_width(config: &Config, dir: Option<&Path>) -> u64 {
        if matches!(config.format, WeightFormat::Fp8(_)) {
            // Scaled while loading, to the compute dtype.
            return 4;
        }
        dir.and_then(TensorFiles::matrix_width).unwrap_or_else(|| config.stored_width())
    }

    /// Bytes of the checkpoint's tensors; 0 for random weights.
    pub fn bytes(&self) -> u64 {
        self.files().map_or(0, TensorFiles::total_bytes)
    }

    /// Whether linears are quantized to NF4 while loading.
    pub fn quantizes(&self) -> bool {
        self.nf4 && !self.config.is_bitsandbytes()
    }

    /// Whether decoder linears are 4-bit, by checkpoint or by quantization.
    pub fn is_4bit(&self) -> bool {
        self.nf4 || self.config.holds_4bit()
    }

    /// Origin of a module's 4-bit weight, assuming the module does not train in full; `None` if not 4-bit.
    pub fn four_bit(&self, m: &Module) -> Option<FourBit> {
        if self.has_4bit(m, false) {
            return Some(FourBit::Stored);
        }
        (self.quantizes() && quant::applies_to(m)).then_some(FourBit::Quantized)
    }

    /// Whether a module's weight exists in 4 bits only and so cannot train in full.
    pub fn only_4bit(&self, m: &Module) -> bool {
        self.has_4bit(m, true)
    }

    fn has_4bit(&self, m: &Module, full: bool) -> bool {
        let stored = |files| quant::find(files, &m.weight_name()).is_some();
        m.is_mxfp4() || self.config.is_bitsandbytes() && self.read_for(full).is_some_and(stored)
    }

    /// Reads a range of a module's weight or bias, as a vector in `dtype` on `device`. For weights
    /// quantized while loading, returns the values before quantization; for PiSSA and OLoRA
    /// ([`Base::with_initials`]), the residual weight. `number` is the module's index in the model, from 1, and
    /// seeds random values.
    ///
    /// # Errors
    /// Unreadable files; random values that would be infinite.
    pub fn part(
        &self,
        (m, number): (&Module, u64),
        bias: bool,
        full: bool,
        elements: Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> ft_base::Result<Real> {
        if bias || !self.is_residual(m) {
            return self.original((m, number), bias, full, elements, dtype, device);
        }
        let values = self.original((m, number), bias, true, elements.clone(), DType::F32, &Device::Cpu)?;
        let (Some(factors), Some(initials)) = (self.factors((m, number))?, &self.initials) else {
            return Ok(values.to_dtype(dtype)?.to_device(device)?);
        };
        let mut values = values.to_vec1()?;
        factors.subtract(initials.scale(&m.name) as f32, elements, &mut values)?;
        Ok(Real::new(values, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
    }

    /// As [`Base::part`], without subtracting the initial LoRA update.
    fn original(
        &self,
        (m, number): (&Module, u64),
        bias: bool,
        full: bool,
        elements: Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> ft_base::Result<Real> {
        if let Some(files) = self.read_for(full).filter(|_| !self.lacks(m)) {
            let name = if bias { m.bias_name() } else { m.weight_name() };
            return Ok(files.part(&name, elements, dtype, device)?);
        }
        let stream = Stream::new(self.seed, Purpose::Weights, u64::from(bias), number);
        Ok(random(m, bias, elements, stream, &self.config)?.to_dtype(dtype)?.to_device(device)?)
    }

    /// Sets the LoRA initializations; PiSSA and OLoRA subtract them from the base weights.
    pub fn with_initials(self, initials: Option<Initials>) -> Self {
        Self { initials: initials.map(Arc::new), ..self }
    }

    /// LoRA initializations from this base, if any.
    pub fn initials(&self) -> Option<&Arc<Initials>> {
        self.initials.as_ref()
    }

    /// Initial factors of a module, if initialized from the base. `number` as in [`Base::part`].
    ///
    /// # Errors
    /// Unreadable files; a failed decomposition.
    pub fn factors(&self, (m, number): (&Module, u64)) -> ft_base::Result<Option<Arc<Factors>>> {
        let Some(initials) = self.initials.as_ref().filter(|i| i.has(&m.name)) else { return Ok(None) };
        let dims = matrix(m)?;
        initials.factors(&m.name, dims, number, || {
            let all = 0..dims.0 * dims.1;
            let whole = self.original((m, number), false, true, all, DType::F32, &Device::Cpu)?;
            let mut values: Vec<f32> = whole.to_vec1()?;
            if initials.how() == Decomposition::Loftq {
                let why = || Error { place: m.weight_name(), why: "is not 4-bit".into() };
                let (how, cpu) = (self.four_bit(m).ok_or_else(why)?, Device::Cpu);
                let codes = self.codes((m, number), how, DType::F32, &mut CodeTables::new(&cpu)?)?;
                let quantized = codes.dequantize()?.to_dtype(DType::F32)?.real()?.flatten_all()?;
                values.par_iter_mut().zip(&quantized.to_vec1()?).for_each(|(w, q)| *w -= q);
            }
            Ok(values)
        })
    }

    /// Whether the initial LoRA update is subtracted from a module's weight.
    fn is_residual(&self, m: &Module) -> bool {
        self.initials.as_ref().is_some_and(|i| i.how().changes_base() && i.has(&m.name))
    }

    /// As [`Base::codes`], for reading by parts. For weights quantized while loading, `scales` must return
    /// the scales of all blocks; it receives the number of values and a function computing the scales of a
    /// block-aligned range.
    pub fn lazy_codes(
        &self,
        (m, number): (&Module, u64),
        how: FourBit,
        dtype: DType,
        scales: &dyn Fn(usize, Scales<'_>) -> ft_base::Result<Vec<f32>>,
    ) -> ft_base::Result<LazyMatrix<'_>> {
        let (name, dims) = (m.weight_name(), matrix(m)?);
        let files = self.read_for(false);
        if let (FourBit::Stored, Some(files)) = (how, files) {
            return quant::open(files, &name, dims);
        }
        let source = match files {
            Some(files) => quant::dtype_of(files, &name)?,
            None => dtype,
        };
        let module = m.clone();
        let values = move |r: Range<usize>| -> ft_base::Result<Vec<f32>> {
            // Rounded to the checkpoint's dtype before quantization, as if read from a checkpoint.
            let t = self.part((&module, number), false, false, r, source, &Device::Cpu)?;
            Ok(t.to_dtype(DType::F32)?.to_vec1()?)
        };
        let scales = scales(dims.0 * dims.1, &|r| Ok(quant::scales_of(&name, &values(r)?)?))?;
        Ok(quant::lazy_nf4(&name, dims, source, &scales, values))
    }

    /// Weight of a linear in 4 bits, dequantized to `dtype` in use. `number` as in [`Base::part`].
    ///
    /// # Errors
    /// A weight that is not a matrix; unreadable files; non-finite values.
    pub fn codes(
        &self,
        (m, number): (&Module, u64),
        how: FourBit,
        dtype: DType,
        books: &mut CodeTables,
    ) -> ft_base::Result<QuantizedMatrix> {
        let (name, dims) = (m.weight_name(), matrix(m)?);
        match (how, self.read_for(false)) {
            (FourBit::Stored, Some(files)) => Ok(quant::read(files, &name, dims, dtype, books)?),
            (_, Some(files)) if !self.is_residual(m) => {
                Ok(quant::from_files(files, &name)?.into_matrix(true, dtype, books)?)
            }
            (_, files) => {
                // Rounded to the checkpoint's dtype before quantization, as if read from a checkpoint.
                let source = files.map_or(Ok(dtype), |f| quant::dtype_of(f, &name))?;
                let t = self.part((m, number), false, false, 0..dims.0 * dims.1, source, &Device::Cpu)?;
                let values = t.to_dtype(DType::F32)?.to_vec1()?;
                Ok(quant::Encoded::new(&name, &values, dims, source)?.into_matrix(true, dtype, books)?)
            }
        }
    }

    /// Dtype of a module's frozen weight in a model computing in `compute` on `device`.
    pub fn frozen_dtype(&self, m: &Module, compute: DType, device: &Device) -> DType {
        if m.is_bare() {
            return DType::F32;
        }
        let matrix = m.weight_shape().len() == 2 && !self.is_residual(m);
        let info = self.read_for(false).filter(|_| matrix).and_then(|files| files.info(&m.weight_name()));
        let stored = match info.map(|i| i.dtype) {
            Some(Dtype::BF16) => DType::BF16,
            Some(Dtype::F16) => DType::F16,
            _ => return compute,
        };
        gemm::kept(stored, compute, device.is_cuda())
    }

    /// Checkpoint bytes read by [`Base::part`] or [`Base::codes`] for a module.
    pub fn bytes_of(&self, m: &Module, bias: bool, full: bool) -> u64 {
        let Some(files) = self.read_for(full) else { return 0 };
        let name = if bias { m.bias_name() } else { m.weight_name() };
        let parts = if self.config.holds_4bit() && !bias { quant::find(files, &name) } else { None };
        let names = parts.unwrap_or_default();
        std::iter::once(&name).chain(&names).filter_map(|n| files.info(n)).map(|i| i.bytes()).sum()
    }
}

/// Computes the block scales of a range of values.
pub type Scales<'a> = &'a dyn Fn(Range<usize>) -> ft_base::Result<Vec<f32>>;

/// Dimensions of a weight to be stored in 4 bits.
fn matrix(m: &Module) -> Result<(usize, usize), Error> {
    match m.weight_shape().as_slice() {
        &[o, i] => Ok((o, i)),
        other => {
            let why = format!("not built yet: a 4-bit weight of shape {other:?}");
            Err(Error { place: m.weight_name(), why })
        }
    }
}

/// Random values drawn by a thread at a time.
const DRAWN: usize = 4096;

/// Bounds of the decay rates of linear attention in transformers.
const DECAY_RATES: [f32; 2] = [0.01, 16.0];

/// Initial value of all elements of a weight or bias; `None` for random ones.
fn constant(m: &Module, bias: bool, config: &Config) -> Option<f32> {
    match (m.kind, m.group) {
        (_, Group::Router) if bias => None,
        _ if bias => Some(0.0),
        (Kind::Norm { .. }, _) => Some(1.0 - norm_offset(config, m) as f32),
        (Kind::Vector { .. }, Group::Sinks) => None,
        (Kind::Vector { .. } | Kind::Constant { .. }, _) => (!m.is_decay()).then_some(1.0),
        _ => None,
    }
}

/// A range of an initialized tensor, f32 on the CPU.
fn random(
    m: &Module,
    bias: bool,
    elements: Range<usize>,
    s: Stream,
    config: &Config,
) -> ft_base::Result<Real> {
    let n = elements.len();
    let values: Vec<f32> = match constant(m, bias, config) {
        Some(value) => vec![value; n],
        None if m.is_decay() => {
            let mut values = vec![0.0; n];
            let [low, high] = DECAY_RATES;
            let log = |share: f32| (low + (high - low) * share).ln();
            s.uniforms(elements.start as u64, n, |i, share| values[i] = log(share));
            values
        }
        None => {
            let std = config.initializer_range as f32;
            // Normal samples stay within eight standard deviations.
            if !(8.0 * std).is_finite() {
                let why = format!("initializer_range: {std:e} makes weights that are infinite");
                return Err(Error { place: "config.json".into(), why }.into());
            }
            let mut values = vec![0.0; n];
            cpu::each(values.chunks_mut(DRAWN).enumerate(), |(k, part)| {
                let start = (elements.start + k * DRAWN) as u64;
                s.normals(start, part);
                part.iter_mut().for_each(|x| *x *= std);
            });
            if let (Kind::Embedding { dim, .. }, Some(pad)) = (m.kind, config.pad) {
                let within = |at: usize| at.clamp(elements.start, elements.end) - elements.start;
                let start = pad as usize * dim;
                values[within(start)..within(start + dim)].fill(0.0);
            }
            values
        }
    };
    Ok(Real::from_vec(values, n, &Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::modules::{Tree, modules};

    fn config_of(family: &str) -> anyhow::Result<Config> {
        let case = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/families").join(family);
        Ok(Config::load(&case.join("model"), &serde_json::Map::new())?)
    }

    /// The config of a merged model may be that of its base in 4 bits.
    #[test]
    fn a_config_of_4_bits_over_other_tensors_is_refused() -> anyhow::Result<()> {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/families/gemma3/model");
        let config = config_of("gemma3")?;
        Base::open(config.clone(), &model)?.check()?;
        let config = Config { format: WeightFormat::Bitsandbytes, ..config };
        let told = Base::open(config, &model)?.check().expect_err("a refusal").to_string();
        assert!(told.contains("quantization_config: bitsandbytes, and no tensor is in 4 bits"), "{told}");
        Ok(())
    }

    /// `init.zeros_(module.weight[module.padding_idx])` in transformers, for both tables of Gemma 4.
    #[test]
    fn random_tables_are_zero_in_the_row_of_the_padding_token() -> anyhow::Result<()> {
        let config = Config { pad: Some(3), ..config_of("gemma4")? };
        let tree = Tree::of(&config);
        let base = Base::random(config.clone(), 7);
        let values = |m: &Module, range| -> ft_base::Result<Vec<f32>> {
            Ok(base.part((m, 1), false, false, range, DType::F32, &Device::Cpu)?.to_vec1()?)
        };
        for m in [&tree.embedding, &tree.per_layer.as_ref().expect("per-layer inputs")[0]] {
            let (all, d) = (values(m, 0..m.weight_values())?, m.cols());
            for (id, row) in all.chunks(d).enumerate() {
                assert_eq!(row.iter().all(|x| *x == 0.0), id == 3, "{}: row {id}", m.name);
            }
            // Ranks may split the row.
            for part in [0..3 * d + 1, 3 * d + 1..4 * d - 1, 4 * d - 1..all.len(), 0..d, 5 * d..6 * d] {
                assert_eq!(values(m, part.clone())?, all[part]);
            }
        }
        let head = values(&tree.head, 3 * config.hidden..4 * config.hidden)?;
        assert!(head.iter().all(|x| *x != 0.0));
        Ok(())
    }

    /// `_init_weights` of transformers' classes. Norms less one are 0, and that of linear attention, as it is stored, 1.
    #[test]
    fn random_vectors_have_the_values_of_transformers() -> anyhow::Result<()> {
        for (family, name, bias, want) in [
            ("qwen35-dense", ".input_layernorm", false, Some(0.0)),
            ("qwen35-dense", ".linear_attn.norm", false, Some(1.0)),
            ("qwen35-dense", ".dt_bias", false, Some(1.0)),
            ("qwen35-dense", ".A_log", false, None),
            ("qwen3-next", ".linear_attn.norm", false, Some(1.0)),
            ("gemma3", ".q_norm", false, Some(0.0)),
            ("gemma4-moe", ".per_expert_scale", false, Some(1.0)),
            ("gpt-oss", ".q_proj", true, Some(0.0)),
            ("gpt-oss", ".mlp.router", true, None),
            ("gpt-oss", ".sinks", false, None),
        ] {
            let config = config_of(family)?;
            let base = Base::random(config.clone(), 7);
            let all = modules(&config);
            let m = all.iter().find(|m| m.name.ends_with(name)).expect("a module");
            let n = m.bias().filter(|_| bias).unwrap_or(m.weight_values());
            let values = |range| -> ft_base::Result<Vec<f32>> {
                Ok(base.part((m, 1), bias, false, range, DType::F32, &Device::Cpu)?.to_vec1()?)
            };
            let drawn = values(0..n)?;
            let same = drawn.iter().all(|x| *x == drawn[0]).then_some(drawn[0]);
            assert_eq!(same, want, "{family}: {name}");
            assert_eq!(values(1..n)?, drawn[1..], "{family}: {name}");
            let [low, high] = DECAY_RATES.map(f32::ln);
            assert!(!m.is_decay() || drawn.iter().all(|x| (low..=high).contains(x)), "{drawn:?}");
        }
        Ok(())
    }
}
