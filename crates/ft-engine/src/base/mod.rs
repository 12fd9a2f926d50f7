//! The base: the model that a recipe or an adapter starts from, its config and its tensors.
//!
//! Whoever wants a base asks [`Base::open`] (or [`Base::random`]), says with [`Base::in_nf4`] and [`Base::with_copy`]
//! which of its linears are 4-bit, and reads one tensor after the other; [`crate::adapt::build`] makes a model of it.

mod check;
pub mod initial;
pub mod layout;

pub use check::check_tensors;
pub use initial::{Factors, Initials};

use ft_base::error::{ExitCode, Failure};
use ft_kernels::gemm;
use ft_kernels::quantized::QuantizedMatrix;
use ft_kernels::tensor::Real;
use crate::model::Config;
use crate::model::modules::{Kind, Module};
use crate::quant::{self, CodeBooks, UnreadMatrix};
use ft_base::rng::{Purpose, Stream};
use ft_base::store::{self};
use crate::files::TensorFiles;
use candle_core::{DType, Device};
use rayon::prelude::*;
use safetensors::Dtype;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Problems of a base.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its tensors do not fit its config.
    #[error("{dir}: {why}")]
    Tensors {
        /// The folder.
        dir: String,
        /// Missing, unexpected or mis-shaped tensors, one a line.
        why: String,
    },
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        ExitCode::Model
    }
}

/// Where a 4-bit weight comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FourBit {
    /// The checkpoint has it so.
    Stored,
    /// It is quantized while it is read.
    Made,
}

/// A base that is there: nothing of it is in memory but its config and the headers of its files. A clone opens nothing
/// anew.
#[derive(Clone, Debug)]
pub struct Base {
    /// Its config, overrides applied.
    pub config: Config,
    tensors: Tensors,
    nf4: bool,
    initials: Option<Arc<Initials>>,
}

/// Where a base's tensors come from.
#[derive(Clone, Debug)]
enum Tensors {
    /// A checkpoint.
    Files(Arc<TensorFiles>),
    /// A checkpoint and its 4-bit copy (`model.cache`), in which every linear of the decoder is 4-bit: weights that
    /// train in full are read from the first, so that the copy is the same whatever trains.
    Copied { original: Arc<TensorFiles>, copy: Arc<TensorFiles> },
    /// Seeded random numbers of the config's shape.
    Random(u64),
}

impl Base {
    /// The base in a folder.
    ///
    /// # Errors
    /// Weights that are missing, that are pickle files, or whose headers or index do not hold together. Whether they fit
    /// the config is what [`Base::check`] says.
    pub fn open(config: Config, dir: &Path) -> Result<Self, store::Error> {
        let files = layout::open(&config, dir)?;
        Ok(Self::of_files(config, files))
    }

    /// A base whose files are open.
    pub fn of_files(config: Config, files: TensorFiles) -> Self {
        Self { config, tensors: Tensors::Files(Arc::new(files)), nf4: false, initials: None }
    }

    /// A base of random weights: norms are one, biases zero, matrices normal with the config's `initializer_range`.
    pub fn random(config: Config, seed: u64) -> Self {
        Self { config, tensors: Tensors::Random(seed), nf4: false, initials: None }
    }

    /// The same, whose linears of the decoder become NF4 while they are read, if `nf4`, but for those that train in full
    /// (what the checkpoint has in 4 bits stays as it is).
    pub fn in_nf4(self, nf4: bool) -> Self {
        Self { nf4, ..self }
    }

    /// The same with a 4-bit copy of its checkpoint, of which frozen weights are read.
    pub fn with_copy(self, config: Config, copy: TensorFiles) -> Self {
        let tensors = match self.tensors {
            Tensors::Files(original) | Tensors::Copied { original, .. } => {
                Tensors::Copied { original, copy: Arc::new(copy) }
            }
            random => random,
        };
        Self { config, tensors, nf4: self.nf4, initials: self.initials }
    }

    /// The files of the checkpoint; `None` for random weights.
    pub fn files(&self) -> Option<&TensorFiles> {
        self.read_for(true)
    }

    /// The files that a module's weights are read from; `full` says whether it trains in full.
    fn read_for(&self, full: bool) -> Option<&TensorFiles> {
        match &self.tensors {
            Tensors::Files(files) => Some(files),
            Tensors::Copied { original, copy } => Some(if full { original } else { copy }),
            Tensors::Random(_) => None,
        }
    }

    /// Bytes of a value of a model's matrices as they are stored: by the first of its files, where these are in `dir`; else by
    /// its config.
    pub fn stored_width(config: &Config, dir: Option<&Path>) -> u64 {
        dir.and_then(TensorFiles::matrix_width).unwrap_or_else(|| config.stored_width())
    }

    /// Bytes of the checkpoint's tensors; 0 for random weights.
    pub fn bytes(&self) -> u64 {
        self.files().map_or(0, TensorFiles::total_bytes)
    }

    /// Whether linears become NF4 while they are read.
    pub fn makes_nf4(&self) -> bool {
        self.nf4 && !self.config.four_bit
    }

    /// Whether linears of the decoder are 4-bit, of the checkpoint or made so.
    pub fn is_4bit(&self) -> bool {
        self.nf4 || self.config.four_bit
    }

    /// How a module's weight is 4-bit where it does not train in full, if it is.
    pub fn four_bit(&self, m: &Module) -> Option<FourBit> {
        if self.has_4bit(m, false) {
            return Some(FourBit::Stored);
        }
        (self.makes_nf4() && quant::takes(m)).then_some(FourBit::Made)
    }

    /// Whether a module's weight is there in 4 bits only, so that it cannot train in full.
    pub fn only_4bit(&self, m: &Module) -> bool {
        self.has_4bit(m, true)
    }

    fn has_4bit(&self, m: &Module, full: bool) -> bool {
        let stored = |files| quant::find(files, &weight_name(m)).is_some();
        self.config.four_bit && self.read_for(full).is_some_and(stored)
    }

    /// Some values of the weight of a module, or of its bias, as a vector in `dtype` on `device`: nothing else is read. Of
    /// a 4-bit weight that is not read by [`Base::codes`], what it was; of a weight that lacks its update's first values
    /// ([`Base::beginning`]), what is left. `number` is the module's place in the model, from 1, of which random values depend.
    ///
    /// # Errors
    /// Files that cannot be read any more; random values that would be infinite.
    pub fn part(
        &self,
        (m, number): (&Module, u64),
        bias: bool,
        full: bool,
        elements: Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> ft_base::Result<Real> {
        if bias || !self.lacks(m) {
            return self.original((m, number), bias, full, elements, dtype, device);
        }
        let values = self.original((m, number), bias, true, elements.clone(), DType::F32, &Device::Cpu)?;
        Ok(self.lessen((m, number), elements, values)?.to_dtype(dtype)?.to_device(device)?)
    }

    /// As [`Base::part`], with nothing taken off.
    fn original(
        &self,
        (m, number): (&Module, u64),
        bias: bool,
        full: bool,
        elements: Range<usize>,
        dtype: DType,
        device: &Device,
    ) -> ft_base::Result<Real> {
        match (self.read_for(full), &self.tensors) {
            (Some(files), _) => {
                let part = if bias { "bias" } else { "weight" };
                Ok(files.part(&format!("{}.{part}", m.name), elements, dtype, device)?)
            }
            (None, Tensors::Random(seed)) => {
                let stream = Stream::new(*seed, Purpose::Weights, u64::from(bias), number);
                Ok(random(m, bias, elements, stream, &self.config)?.to_dtype(dtype)?.to_device(device)?)
            }
            (None, _) => Err(candle_core::Error::Msg(format!("{}: no files", m.name)).into()),
        }
    }

    /// As [`Base::codes`], to be read by parts. `scales` gives the scales of all blocks, where they are made: it is given
    /// the number of values, and what makes the scales of some of them from the start of a block on.
    ///
    /// # Errors
    /// As [`Base::codes`].
    pub fn unread_codes(
        &self,
        (m, number): (&Module, u64),
        how: FourBit,
        dtype: DType,
        scales: &dyn Fn(usize, Scales<'_>) -> ft_base::Result<Vec<f32>>,
    ) -> ft_base::Result<UnreadMatrix<'_>> {
        let (name, dims) = (weight_name(m), matrix(m)?);
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
            // rounded first, as a checkpoint of this dtype would be
            let t = self.part((&module, number), false, false, r, source, &Device::Cpu)?;
            Ok(t.to_dtype(DType::F32)?.to_vec1()?)
        };
        let scales = scales(dims.0 * dims.1, &|r| Ok(quant::scales_of(&name, &values(r)?)?))?;
        Ok(quant::unread(&name, dims, source, &scales, Box::new(values)))
    }

    /// The weight of a linear in 4 bits, dequantized to `dtype` where it is used. `number` as in [`Base::part`].
    ///
    /// # Errors
    /// A weight that is no matrix; files that cannot be read any more; values that are not finite.
    pub fn codes(
        &self,
        (m, number): (&Module, u64),
        how: FourBit,
        dtype: DType,
        books: &mut CodeBooks,
    ) -> ft_base::Result<QuantizedMatrix> {
        let (name, dims) = (weight_name(m), matrix(m)?);
        match (how, self.read_for(false)) {
            (FourBit::Stored, Some(files)) => Ok(quant::read(files, &name, dims, dtype, books)?),
            (_, Some(files)) if !self.lacks(m) => {
                Ok(quant::from_files(files, &name)?.into_matrix(true, dtype, books)?)
            }
            (_, files) => {
                // rounded first, as a checkpoint of this dtype would be
                let source = files.map_or(Ok(dtype), |f| quant::dtype_of(f, &name))?;
                let t = self.part((m, number), false, false, 0..dims.0 * dims.1, source, &Device::Cpu)?;
                let values = t.to_dtype(DType::F32)?.to_vec1()?;
                Ok(quant::Encoded::new(&name, &values, dims, source)?.into_matrix(true, dtype, books)?)
            }
        }
    }

    /// The type in which the frozen weight of a module is kept by a model that computes in `compute` on `device`.
    pub fn kept(&self, m: &Module, compute: DType, device: &Device) -> DType {
        let matrix = m.weight_shape().len() == 2 && !self.lacks(m);
        let info = self.read_for(false).filter(|_| matrix).and_then(|files| files.info(&weight_name(m)));
        let stored = match info.map(|i| i.dtype) {
            Some(Dtype::BF16) => DType::BF16,
            Some(Dtype::F16) => DType::F16,
            _ => return compute,
        };
        gemm::kept(stored, compute, device.is_cuda())
    }

    /// Bytes in the checkpoint of what [`Base::part`] or [`Base::codes`] reads of a module.
    pub fn bytes_of(&self, m: &Module, bias: bool, full: bool) -> u64 {
        let Some(files) = self.read_for(full) else { return 0 };
        let name = if bias { format!("{}.bias", m.name) } else { weight_name(m) };
        let parts = if self.config.four_bit && !bias { quant::find(files, &name) } else { None };
        let names = parts.unwrap_or_default();
        std::iter::once(&name).chain(&names).filter_map(|n| files.info(n)).map(|i| i.bytes()).sum()
    }
}

/// Makes the scales of some values.
pub type Scales<'a> = &'a dyn Fn(Range<usize>) -> ft_base::Result<Vec<f32>>;

/// The sizes of a weight that is to be 4-bit.
fn matrix(m: &Module) -> Result<(usize, usize), Error> {
    match m.weight_shape().as_slice() {
        &[o, i] => Ok((o, i)),
        other => {
            let why = format!("not built yet: a 4-bit weight of shape {other:?}");
            Err(Error::Tensors { dir: weight_name(m), why })
        }
    }
}

fn weight_name(m: &Module) -> String {
    format!("{}.weight", m.name)
}

/// Some random values of a tensor, f32 on the CPU.
fn random(m: &Module, bias: bool, elements: Range<usize>, s: Stream, config: &Config) -> ft_base::Result<Real> {
    let n = elements.len();
    let values: Vec<f32> = match (bias, m.kind) {
        (true, _) => vec![0.0; n],
        (_, Kind::Norm { .. }) => vec![1.0; n],
        _ => {
            let std = config.initializer_range as f32;
            // eight standard deviations are farther than any value will be
            if !(8.0 * std).is_finite() {
                let why = format!("initializer_range: {std:e} makes weights that are infinite");
                return Err(Error::Tensors { dir: "config.json".into(), why }.into());
            }
            (elements.start as u64..elements.end as u64).into_par_iter().map(|i| s.normal(i) * std).collect()
        }
    };
    Ok(Real::from_vec(values, n, &Device::Cpu)?)
}
