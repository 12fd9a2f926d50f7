//! Base and adapter as one model, tensor by tensor.
//!
//! With `s` the adapter's scale, A [r, i], B [o, r], m `[o]`:
//!
//! * LoRA: `W + s B A`;
//! * DoRA: `(m / |W + s B A|) (W + s B A)`, norms by row;
//! * LoRA on the embedding, A [r, v], B [d, r]: `table + s (B A)^T`;
//! * rows of tokens that trained replace the base's;
//! * what the adapter holds whole (`modules_to_save`) replaces the base's.
//!
//! Head and embedding of a tied model are one tensor: where only one of them has an update, or each its own, the
//! merged model has two.

use super::cost::MergeCost;
use ft_engine::adapt::selection::{Choice, Part, Selection, Trained, part_name};
use ft_engine::adapt::tokens::Tokens;
use ft_engine::adapt::{Adapter, Error, peft};
use ft_engine::base::Base;
use ft_kernels::gemm::matmul_acc;
use ft_engine::model::modules::{Group, Kind, Module};
use ft_engine::quant::{self, CodeBooks};
use ft_engine::files::TensorFiles;
use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::collections::HashMap;

const TABLE: &str = "model.embed_tokens.weight";

/// What a tensor of the merged model is made of.
struct Source {
    module: Module,
    choice: Choice,
    part: Part,
    /// The base's tensor.
    base: String,
    dtype: DType,
}

/// A merge that can be done: everything is checked, nothing is read yet.
pub struct Merge<'a> {
    base: &'a Base,
    files: &'a TensorFiles,
    adapter: &'a Adapter,
    trained: HashMap<(String, Part), Trained>,
    tokens: Tokens,
    /// Names in the order of the forward pass.
    order: Vec<String>,
    sources: HashMap<String, Source>,
    unties: bool,
    /// What the tensors merged so far lose, on a 4-bit base.
    cost: RefCell<MergeCost>,
}

impl<'a> Merge<'a> {
    /// Checks that base and adapter fit. The adapter is merged into what the base's 4-bit linears dequantize to, those too
    /// that are made so ([`Base::in_nf4`]). `dtype` is that of all merged tensors; by
    /// default each keeps the base's.
    ///
    /// # Errors
    /// Tensors of base or adapter that are missing, unexpected or of another shape; an adapter of another base.
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
            return Err(Error::Merge { dir: config.family.model_type.into(), why }.into());
        };
        let trained = selection.trained();
        adapter.check_against(selection, &trained)?;
        adapter.check_base(files, config.tied)?;
        let is_lora = |c: &Choice| matches!(c, Choice::Lora { .. });
        let is_end = |m: &Module| matches!(m.group, Group::Head | Group::Embedding);
        let unties = config.tied && selection.modules.iter().any(|(m, c)| is_end(m) && is_lora(c));
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
                let name = format!("{}.{}", m.name, part_name(m, part));
                let tied_head = config.tied && m.group == Group::Head;
                let base = if tied_head { TABLE.to_string() } else { name.clone() };
                let dtype = match dtype {
                    Some(dtype) => dtype,
                    None => merge.dtype_of(&base)?,
                };
                let source = Source { module: m.clone(), choice: *choice, part, base, dtype };
                merge.order.push(name.clone());
                merge.sources.insert(name, source);
            }
        }
        Ok(merge)
    }

    fn dtype_of(&self, base: &str) -> Result<DType, Error> {
        if let Some(dtype) =
            self.base.config.four_bit.then(|| quant::source_dtype(self.files, base)).flatten()
        {
            return Ok(dtype);
        }
        match self.files.info(base).map(|i| i.dtype) {
            Some(Dtype::F32) => Ok(DType::F32),
            Some(Dtype::BF16) => Ok(DType::BF16),
            Some(Dtype::F16) => Ok(DType::F16),
            other => Err(Error::Merge {
                dir: self.files.paths().next().map_or(String::new(), |p| p.display().to_string()),
                why: format!("{base}: {other:?} is no dtype that a merge can keep\n  hint: --dtype bf16"),
            }),
        }
    }

    /// The dtype of the merged model's embedding, which its config names.
    pub fn dtype(&self) -> DType {
        self.sources.get(TABLE).map_or(DType::F32, |s| s.dtype)
    }

    /// Whether a tied model's head and embedding become two tensors.
    pub fn unties(&self) -> bool {
        self.unties
    }

    /// Name, dtype and shape of every tensor of the merged model.
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

    /// The merged model's `config.json`.
    pub fn config(&self) -> Map<String, Value> {
        let mut raw = self.base.config.raw.clone();
        if self.unties {
            raw.insert("tie_word_embeddings".into(), json!(false));
        }
        raw
    }

    /// One tensor of the merged model as it is written, on the CPU. Memory beside it: its update.
    ///
    /// # Errors
    /// Files that cannot be read any more.
    pub fn tensor(&self, name: &str) -> ft_base::Result<Tensor> {
        let s = self.source(name)?;
        let (value, before) = self.merged(s, s.dtype)?;
        if let Some(before) = before {
            let cost = MergeCost::of(&s.base, &value, &before)?;
            self.cost.replace_with(|c| c.plus(cost));
        }
        Ok(value.to_dtype(s.dtype)?)
    }

    /// One tensor of the merged model before it is rounded to what is written, f32.
    ///
    /// # Errors
    /// As [`Merge::tensor`].
    pub fn in_f32(&self, name: &str) -> ft_base::Result<Tensor> {
        Ok(self.merged(self.source(name)?, DType::F32)?.0.to_dtype(DType::F32)?)
    }

    fn source(&self, name: &str) -> ft_base::Result<&Source> {
        match self.sources.get(name) {
            Some(s) => Ok(s),
            None => Err(candle_core::Error::Msg(format!("{name} is not in the merged model")).into()),
        }
    }

    /// The merged value, f32 or (where nothing was added) `dtype`; and what it was, if it is a 4-bit one with an
    /// update.
    fn merged(&self, s: &Source, dtype: DType) -> ft_base::Result<(Tensor, Option<Tensor>)> {
        match &s.choice {
            Choice::Full { .. } => {
                let before = self.four_bit(s).then(|| self.base(s, DType::F32)).transpose()?;
                Ok((self.held(&s.module, s.part)?, before))
            }
            Choice::Lora { spec, .. } if s.part == Part::Weight => self.updated(s, peft::scale(spec)),
            Choice::Rows { .. } if s.part == Part::Weight => Ok((self.with_rows(s)?, None)),
            _ => {
                // f64 is rounded twice on its way to 16 bits, each time that it is asked for
                let f64 = self.files.info(&s.base).is_some_and(|i| i.dtype == Dtype::F64);
                Ok((self.base(s, if f64 { DType::F32 } else { dtype })?, None))
            }
        }
    }

    /// Whether a tensor of the base is merged into as dequantized from 4 bits: as the checkpoint has it, or made so.
    fn four_bit(&self, s: &Source) -> bool {
        s.part == Part::Weight && self.base.four_bit(&s.module).is_some()
    }

    /// The base's tensor; dequantized, where it is 4-bit.
    fn base(&self, s: &Source, dtype: DType) -> ft_base::Result<Tensor> {
        let cpu = &Device::Cpu;
        match self.base.four_bit(&s.module).filter(|_| s.part == Part::Weight) {
            Some(how) => {
                // files need no number for random values
                let codes = self.base.codes((&s.module, 0), how, DType::F32, &mut CodeBooks::new(cpu)?)?;
                Ok(codes.dequantize()?.to_dtype(dtype)?.real()?.clone())
            }
            None => Ok(self.files.tensor(&s.base, dtype, cpu)?),
        }
    }

    /// Onto a 4-bit base: what the tensors merged so far lose in bf16, and in NF4.
    pub fn cost(&self) -> Option<MergeCost> {
        self.base.is_4bit().then(|| *self.cost.borrow())
    }

    /// A tensor that the adapter holds.
    fn held(&self, m: &Module, part: Part) -> ft_base::Result<Tensor> {
        // a tied head that trains in full is the embedding's tensor, and then has no source of its own
        let t = self.trained.get(&(m.name.clone(), part));
        match t.map(|t| self.adapter.get(t)).transpose()?.flatten() {
            Some(value) => Ok(value),
            None => Err(Error::Peft {
                file: self.adapter.dir.display().to_string(),
                why: format!("{}: {} is missing", m.name, part_name(m, part)),
            }
            .into()),
        }
    }

    /// The base's weight with the rows of the adapter, f32.
    fn with_rows(&self, s: &Source) -> ft_base::Result<Tensor> {
        let (weight, rows) = (self.base(s, DType::F32)?, self.held(&s.module, Part::Rows)?);
        for (row, id) in self.tokens.of(&s.module.name).iter().enumerate() {
            weight.slice_set(&rows.narrow(0, row, 1)?, 0, *id as usize)?;
        }
        Ok(weight)
    }

    /// The base's weight with its low-rank update, f32; and without it, if it is 4-bit.
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
