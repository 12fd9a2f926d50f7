//! Merged weights of base and adapter, tensor by tensor.
//!
//! Notation: scale s of the adapter, A `[r, i]`, B `[o, r]`, magnitude m `[o]`.
//!
//! * LoRA: `W + s B A`;
//! * DoRA: `(m / |W + s B A|) (W + s B A)`, with norms of rows;
//! * LoRA on the embedding, A `[r, v]`, B `[d, r]`: `table + s (B A)^T`;
//! * trained token rows replace rows of the base;
//! * whole tensors in the adapter (`modules_to_save`) replace tensors of the base.
//!
//! If head and embedding are tied but updated differently, or only one is updated, the merged model has separate
//! tensors.

use candle_core::{DType, Device, Tensor};
use ft_engine::adapters::Tokens;
use ft_engine::adapters::{Adapter, Error, peft};
use ft_engine::adapters::{Choice, Part, Selection, Trained, tensor_name};
use ft_engine::files::TensorFiles;
use ft_engine::load::Base;
use ft_engine::model::Config;
use ft_engine::model::modules::{Group, Kind, Module, constants};
use ft_engine::quant::MergeCost;
use ft_engine::quant::{self, CodeTables};
use ft_kernels::gemm::matmul_acc;
use safetensors::Dtype;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::HashMap;

/// Source of one tensor in the merged model.
struct Source {
    module: Module,
    choice: Choice,
    part: Part,
    /// Name of the tensor in the base.
    base: String,
    dtype: DType,
}

/// A checked merge. Tensors are read and merged on request.
pub struct Merge<'a> {
    base: &'a Base,
    files: &'a TensorFiles,
    adapter: &'a Adapter,
    trained: HashMap<(String, Part), Trained>,
    tokens: Tokens,
    /// Tensor names in the order of the forward pass.
    order: Vec<String>,
    sources: HashMap<String, Source>,
    unties: bool,
    /// Precision lost by the tensors merged so far, for a 4-bit base.
    cost: RefCell<MergeCost>,
}

impl<'a> Merge<'a> {
    /// Checks that base and adapter fit. For a 4-bit base, including [`Base::in_nf4`], the adapter is
    /// merged into the dequantized weights. `dtype` applies to all merged tensors; `None` keeps the dtypes
    /// of the base.
    ///
    /// # Errors
    /// Missing, unexpected or misshaped tensors in base or adapter; adapter for another base.
    pub fn new(
        base: &'a Base,
        adapter: &'a Adapter,
        selection: &Selection,
        dtype: Option<DType>,
    ) -> ft_base::Result<Self> {
        base.check()?;
        let config = &base.config;
        let Some(files) = base.files() else {
            let why = "a model of random weights has no files to merge into".into();
            return Err(Error::Peft { file: config.family.model_type.into(), why }.into());
        };
        let trained = selection.trained();
        adapter.check_against(selection, &trained)?;
        adapter.check_base(files, config)?;
        let table = format!("{}.weight", config.embedding_name());
        let is_end = |m: &Module| matches!(m.group, Group::Head | Group::Embedding);
        let unties = config.tied && selection.loras().any(|(m, _)| is_end(m));
        let trained = trained.into_iter().map(|t| ((t.module.clone(), t.part), t)).collect();
        let (order, sources, cost) = (Vec::new(), HashMap::new(), RefCell::default());
        let mut merge = Self {
            base,
            files,
            adapter,
            trained,
            tokens: selection.tokens.clone(),
            order,
            sources,
            unties,
            cost,
        };
        for (m, choice) in &selection.modules {
            if config.tied && !unties && m.group == Group::Head {
                continue;
            }
            for part in [Some(Part::Weight), m.bias().map(|_| Part::Bias)].into_iter().flatten() {
                let name = tensor_name(m, part);
                let tied_head = config.tied && m.group == Group::Head;
                let base = if tied_head { table.clone() } else { name.clone() };
                let like = if merge.base.lacks(m) { &table } else { &base };
                let dtype = dtype.map_or_else(|| merge.dtype_of(like), Ok)?;
                let source = Source { module: m.clone(), choice: *choice, part, base, dtype };
                merge.order.push(name.clone());
                merge.sources.insert(name, source);
            }
        }
        // Read for the comparison; the file has them as they are.
        for m in constants(config) {
            let name = m.weight_name();
            let dtype = merge.dtype_of(if merge.base.lacks(&m) { &table } else { &name })?;
            let (choice, base) = (Choice::Freeze, name.clone());
            merge.sources.insert(name, Source { module: m, choice, part: Part::Weight, base, dtype });
        }
        Ok(merge)
    }

    fn dtype_of(&self, base: &str) -> Result<DType, Error> {
        if let Some(dtype) =
            self.base.config.holds_4bit().then(|| quant::source_dtype(self.files, base)).flatten()
        {
            return Ok(dtype);
        }
        match self.files.info(base).map(|i| i.dtype) {
            Some(Dtype::F32) => Ok(DType::F32),
            Some(Dtype::BF16) => Ok(DType::BF16),
            Some(Dtype::F16) => Ok(DType::F16),
            Some(Dtype::F8_E4M3) if self.files.is_scaled(base) => {
                Ok(match ["dtype", "torch_dtype"].iter().find_map(|k| self.base.config.key(k)?.as_str()) {
                    Some("float32") => DType::F32,
                    Some("float16") => DType::F16,
                    _ => DType::BF16,
                })
            }
            other => Err(Error::Peft {
                file: self.files.paths().next().map_or(String::new(), |p| p.display().to_string()),
                why: format!("{base}: {other:?} is no dtype that a merge can keep\n  hint: --dtype bf16"),
            }),
        }
    }

    /// Dtype of the merged embedding, as named in the config.
    pub fn dtype(&self) -> DType {
        let table = format!("{}.weight", self.base.config.embedding_name());
        self.sources.get(&table).map_or(DType::F32, |s| s.dtype)
    }

    /// Returns true if tied head and embedding become separate tensors.
    pub fn unties(&self) -> bool {
        self.unties
    }

    /// Name, dtype and shape of every tensor in the merged model.
    pub fn entries(&self) -> Vec<(String, DType, Vec<usize>)> {
        let entry = |n: &String| {
            let s = self.sources.get(n)?;
            let shape = match s.part {
                Part::Bias => vec![s.module.bias().unwrap_or(0)],
                _ => s.module.weight_shape(),
            };
            Some((n.clone(), s.dtype, shape))
        };
        self.order.iter().filter_map(entry).collect()
    }

    /// Contents of `config.json` for the merged model.
    pub fn config(&self) -> Map<String, Value> {
        let mut raw = self.base.config.raw.clone();
        if self.unties {
            Config::untie(&mut raw);
        }
        raw
    }

    /// Computes one tensor of the merged model, in the dtype of the file, on the CPU. Memory holds this
    /// tensor and the update.
    pub fn tensor(&self, name: &str) -> ft_base::Result<Tensor> {
        let s = self.source(name)?;
        let (value, before) = self.merged(s, s.dtype)?;
        if let Some(before) = before {
            let cost = MergeCost::of(&s.base, &value, &before)?;
            self.cost.replace_with(|c| c.plus(cost));
        }
        Ok(value.to_dtype(s.dtype)?)
    }

    /// Computes one tensor of the merged model in f32, before rounding to the dtype of the file.
    pub fn in_f32(&self, name: &str) -> ft_base::Result<Tensor> {
        Ok(self.merged(self.source(name)?, DType::F32)?.0.to_dtype(DType::F32)?)
    }

    fn source(&self, name: &str) -> ft_base::Result<&Source> {
        let missing = || candle_core::Error::Msg(format!("{name} is not in the merged model"));
        Ok(self.sources.get(name).ok_or_else(missing)?)
    }

    /// Returns the merged value, in f32, or in `dtype` if there is no update. For a 4-bit tensor with an
    /// update, also returns the dequantized base value.
    fn merged(&self, s: &Source, dtype: DType) -> ft_base::Result<(Tensor, Option<Tensor>)> {
        match &s.choice {
            Choice::Full { .. } => {
                let before = self.four_bit(s).then(|| self.base(s, DType::F32)).transpose()?;
                Ok((self.held(&s.module, s.part)?, before))
            }
            Choice::Lora { spec, .. } if s.part == Part::Weight => self.updated(s, peft::scale(spec)),
            Choice::Rows { .. } if s.part == Part::Weight => Ok((self.with_rows(s)?, None)),
            _ => {
                // Via f32: f64 is rounded in the same two steps for the file and for the check.
                let f64 = self.files.info(&s.base).is_some_and(|i| i.dtype == Dtype::F64);
                Ok((self.base(s, if f64 { DType::F32 } else { dtype })?, None))
            }
        }
    }

    /// Returns true for tensors in 4 bits, on disk or by [`Base::in_nf4`].
    fn four_bit(&self, s: &Source) -> bool {
        s.part == Part::Weight && self.base.four_bit(&s.module).is_some()
    }

    /// Reads a tensor of the base, dequantized if necessary.
    fn base(&self, s: &Source, dtype: DType) -> ft_base::Result<Tensor> {
        let cpu = &Device::Cpu;
        match self.base.four_bit(&s.module).filter(|_| s.part == Part::Weight) {
            Some(how) => {
                // The position of the module matters for random weights only.
                let codes = self.base.codes((&s.module, 0), how, DType::F32, &mut CodeTables::new(cpu)?)?;
                Ok(codes.dequantize()?.to_dtype(dtype)?.real()?.clone())
            }
            None if s.module.is_constant() && self.base.lacks(&s.module) => Ok(Tensor::ones(1, dtype, cpu)?),
            None => Ok(self.files.tensor(&s.base, dtype, cpu)?),
        }
    }

    /// Precision lost in bf16 and in NF4 by the tensors merged so far; `None` unless the base is 4-bit.
    pub fn cost(&self) -> Option<MergeCost> {
        self.base.is_4bit().then(|| *self.cost.borrow())
    }

    /// Reads a tensor of the adapter.
    fn held(&self, m: &Module, part: Part) -> ft_base::Result<Tensor> {
        // A tied head trained in full shares the tensor of the embedding, and is not listed as a source.
        let name = if part == Part::A { m.a_of() } else { &m.name };
        let t = self.trained.get(&(name.to_string(), part));
        match t.map(|t| self.adapter.get(t)).transpose()?.flatten() {
            Some(value) => Ok(value),
            None => Err(Error::Peft {
                file: self.adapter.dir.display().to_string(),
                why: format!("{} is missing", tensor_name(m, part)),
            }
            .into()),
        }
    }

    /// Base weight with trained token rows, in f32.
    fn with_rows(&self, s: &Source) -> ft_base::Result<Tensor> {
        let (weight, rows) = (self.base(s, DType::F32)?, self.held(&s.module, Part::Rows)?);
        for (row, id) in self.tokens.of(&s.module.name).iter().enumerate() {
            weight.slice_set(&rows.narrow(0, row, 1)?, 0, *id as usize)?;
        }
        Ok(weight)
    }

    /// Base weight plus low-rank update in f32, and the base weight alone if in 4 bits.
    fn updated(&self, s: &Source, scale: f64) -> ft_base::Result<(Tensor, Option<Tensor>)> {
        let m = &s.module;
        let w = self.base(s, DType::F32)?;
        let before = self.four_bit(s).then(|| w.copy()).transpose()?;
        let (a, b) = (self.held(m, Part::A)?, self.held(m, Part::B)?);
        let (onto, a, b) = (w.clone().into(), a.into(), b.into());
        match m.kind {
            Kind::Embedding { .. } => matmul_acc(&onto, &a, true, &b, true, scale)?,
            _ => matmul_acc(&onto, &b, false, &a, false, scale)?,
        }
        let merged = if self.trained.contains_key(&(m.name.clone(), Part::Magnitude)) {
            let norms = w.sqr()?.sum(1)?.sqrt()?;
            let factor = (self.held(m, Part::Magnitude)?.flatten_all()? / norms)?.unsqueeze(1)?;
            w.broadcast_mul(&factor)?
        } else {
            w
        };
        Ok((merged, before))
    }
}
