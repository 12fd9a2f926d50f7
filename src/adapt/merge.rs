//! Base and adapter as one model, tensor by tensor.
//!
//! With `s` the adapter's scale, A [r, i], B [o, r], m `[o]`:
//!
//! * LoRA: `W + s B A`;
//! * DoRA: `(m / |W + s B A|) (W + s B A)`, norms by row;
//! * LoRA on the embedding, A [r, v], B [d, r]: `table + s (B A)^T`;
//! * what the adapter holds whole (`modules_to_save`) replaces the base's.
//!
//! Head and embedding of a tied model are one tensor: where only one of them has an update, or each its own, the
//! merged model has two.

use super::Error;
use super::adapter::Adapter;
use super::build::check_tensors;
use super::merge_cost::MergeCost;
use super::peft;
use super::selection::{Choice, Part, Selection, Trained, part_name};
use crate::kernel::gemm::matmul_acc;
use crate::model::Config;
use crate::model::modules::{Group, Kind, Module};
use crate::quant::{self, Books};
use crate::store::TensorFiles;
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
    config: &'a Config,
    files: &'a TensorFiles,
    adapter: &'a Adapter,
    trained: HashMap<(String, Part), Trained>,
    /// Names in the order of the forward pass.
    order: Vec<String>,
    sources: HashMap<String, Source>,
    unties: bool,
    /// What the tensors merged so far lose, on a 4-bit base.
    cost: RefCell<MergeCost>,
}

impl<'a> Merge<'a> {
    /// Checks that base and adapter fit. `dtype` is that of all merged tensors; by default each keeps the base's.
    ///
    /// # Errors
    /// Tensors of base or adapter that are missing, unexpected or of another shape; an adapter of another base.
    pub fn new(
        config: &'a Config,
        files: &'a TensorFiles,
        adapter: &'a Adapter,
        selection: &Selection,
        dtype: Option<DType>,
    ) -> crate::Result<Self> {
        check_tensors(config, files)?;
        let trained = selection.trained();
        adapter.check_against(selection, &trained)?;
        adapter.check_base(files, config.tied)?;
        let is_lora = |c: &Choice| matches!(c, Choice::Lora { .. });
        let is_end = |m: &Module| matches!(m.group, Group::Head | Group::Embedding);
        let unties = config.tied && selection.modules.iter().any(|(m, c)| is_end(m) && is_lora(c));
        let trained = trained.into_iter().map(|t| ((t.module.clone(), t.part), t)).collect();
        let (order, sources, cost) = (Vec::new(), HashMap::new(), RefCell::default());
        let mut merge = Self { config, files, adapter, trained, order, sources, unties, cost };
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
        if let Some(dtype) = self.config.four_bit.then(|| quant::source_dtype(self.files, base)).flatten() {
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

    /// The coarsest dtype of the merged model: what the distance from base and adapter comes from.
    pub fn coarsest(&self) -> DType {
        let digits = |d: &DType| match d {
            DType::BF16 => 8,
            DType::F16 => 11,
            _ => 24,
        };
        self.sources.values().map(|s| s.dtype).min_by_key(digits).unwrap_or(DType::F32)
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
        let mut raw = self.config.raw.clone();
        if self.unties {
            raw.insert("tie_word_embeddings".into(), json!(false));
        }
        raw
    }

    /// One tensor of the merged model, on the CPU. Memory beside it: its update.
    ///
    /// # Errors
    /// Files that cannot be read any more.
    pub fn tensor(&self, name: &str) -> crate::Result<Tensor> {
        let Some(s) = self.sources.get(name) else {
            return Err(candle_core::Error::Msg(format!("{name} is not in the merged model")).into());
        };
        match &s.choice {
            Choice::Full { .. } => {
                let held = self.held(&s.module, s.part)?;
                if s.part == Part::Weight && self.is_four_bit(s) {
                    self.count(s, &held, &self.base(s, DType::F32)?)?;
                }
                Ok(held.to_dtype(s.dtype)?)
            }
            Choice::Lora { spec, .. } if s.part == Part::Weight => {
                Ok(self.updated(s, peft::scale(spec))?.to_dtype(s.dtype)?)
            }
            _ => self.base(s, s.dtype),
        }
    }

    /// Whether the base has a tensor in 4 bits.
    fn is_four_bit(&self, s: &Source) -> bool {
        self.config.four_bit && quant::find(self.files, &s.base).is_some()
    }

    /// Adds what a merged tensor loses.
    fn count(&self, s: &Source, merged: &Tensor, before: &Tensor) -> crate::Result<()> {
        let cost = MergeCost::of(&s.base, merged, before)?;
        self.cost.replace_with(|c| c.plus(cost));
        Ok(())
    }

    /// The base's tensor; decoded, where it is 4-bit.
    fn base(&self, s: &Source, dtype: DType) -> crate::Result<Tensor> {
        let cpu = &Device::Cpu;
        match s.module.weight_shape().as_slice() {
            &[o, i] if self.is_four_bit(s) => {
                let blocks = quant::read(self.files, &s.base, (o, i), DType::F32, &mut Books::new(cpu)?)?;
                Ok(blocks.decode()?.to_dtype(dtype)?)
            }
            _ => Ok(self.files.tensor(&s.base, dtype, cpu)?),
        }
    }

    /// Onto a 4-bit base: what the tensors merged so far lose in bf16, and in NF4.
    pub fn cost(&self) -> Option<MergeCost> {
        self.config.four_bit.then(|| *self.cost.borrow())
    }

    /// A tensor that the adapter holds.
    fn held(&self, m: &Module, part: Part) -> crate::Result<Tensor> {
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

    /// The base's weight with its low-rank update, f32.
    fn updated(&self, s: &Source, scale: f64) -> crate::Result<Tensor> {
        let m = &s.module;
        let w = self.base(s, DType::F32)?;
        let before = if self.config.four_bit && matches!(m.kind, Kind::Linear { .. }) {
            Some(w.copy()?)
        } else {
            None
        };
        let (a, b) = (self.held(m, Part::A)?, self.held(m, Part::B)?);
        match m.kind {
            Kind::Embedding { .. } => matmul_acc(&w, &a, true, &b, true, scale)?,
            _ => matmul_acc(&w, &b, false, &a, false, scale)?,
        }
        let merged = if self.trained.contains_key(&(m.name.clone(), Part::Magnitude)) {
            let norms = w.sqr()?.sum(1)?.sqrt()?;
            let factor = (self.held(m, Part::Magnitude)?.flatten_all()? / norms)?.unsqueeze(1)?;
            w.broadcast_mul(&factor)?
        } else {
            w
        };
        if let Some(before) = before {
            self.count(s, &merged, &before)?;
        }
        Ok(merged)
    }
}
