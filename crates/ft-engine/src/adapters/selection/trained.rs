//! Trained tensors of a selection.

use crate::model::modules::{CutAlong, Kind, Module, Parameter};
use ft_recipe::Method;
use std::sync::Arc;

/// Part of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    Weight,
    Bias,
    A,
    B,
    /// DoRA's magnitude.
    Magnitude,
    /// Token rows of the weight.
    Rows,
}

impl Part {
    /// Training method of this part. Token rows belong to the adapter and train like LoRA.
    pub fn method(self) -> Method {
        match self {
            Part::Weight | Part::Bias => Method::Full,
            Part::A | Part::B | Part::Magnitude | Part::Rows => Method::Lora,
        }
    }
}

/// A trained tensor.
#[derive(Clone, Debug)]
pub struct Trained {
    /// Name in `ft`'s checkpoints: module name and PEFT's name of the part.
    pub name: String,
    /// Name of the module.
    pub module: String,
    pub part: Part,
    /// Shape in files.
    pub shape: Vec<usize>,
    /// Unit of the walk.
    pub unit: usize,
    /// Expert of a mixture, if the tensor is of one.
    pub expert: Option<usize>,
    /// How ranks of a tensor group cut the module's weight.
    pub cut: CutAlong,
    /// Factor on the learning rate.
    pub lr_scale: f64,
    /// Whether LoRA+ scales its learning rate: B and magnitudes, embeddings apart.
    pub plus: bool,
    /// Whether weight decay applies under `decay = "matrices"`.
    pub matrix: bool,
    /// Place in an adapter of parameters.
    pub fused: Option<Fused>,
}

/// Place in PEFT's tensors of a parameter: of a linear, or of all experts of a layer, with A `[e r, i]`, rows of an
/// expert together, and B `[o, r e]`, columns of an expert apart.
#[derive(Clone, Debug)]
pub struct Fused {
    pub parameter: Arc<Parameter>,
    /// 0 for a linear outside of experts.
    pub expert: usize,
    /// Whether another parameter of the module is adapted around this one.
    pub nested: bool,
}

impl Fused {
    /// Name of a part of the parameter.
    pub fn name(&self, part: Part) -> String {
        let nested = if self.nested { ".base_layer" } else { "" };
        let last = match part {
            Part::A => "lora_A.weight",
            Part::B => "lora_B.weight",
            Part::Bias => "bias",
            Part::Weight | Part::Magnitude | Part::Rows => "weight",
        };
        format!("{}{nested}.{last}", self.parameter.block())
    }
}

impl Trained {
    /// Number of values.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A trained tensor by module, without owned names.
#[derive(Clone, Copy, Debug)]
pub struct TrainedPart<'a> {
    pub module: &'a Module,
    pub part: Part,
    /// Shape, in the first `rank` entries.
    pub(super) dims: [usize; 3],
    pub(super) rank: usize,
    /// Factor on the learning rate.
    pub lr_scale: f64,
    /// Whether LoRA+ scales its learning rate.
    pub plus: bool,
    /// Whether weight decay applies under `decay = "matrices"`.
    pub matrix: bool,
}

impl TrainedPart<'_> {
    /// Shape in files.
    pub fn shape(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    /// Number of values.
    pub fn elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// Length of the tensor's name in checkpoints, in bytes.
    pub fn name_bytes(&self) -> usize {
        tensor_name(self.module, self.part).len()
    }
}

/// Name of a part in checkpoints: module name and PEFT's name of the part.
pub fn tensor_name(m: &Module, part: Part) -> String {
    match part {
        Part::Weight => m.weight_name(),
        _ => format!("{}.{}", m.name, part_name(m, part)),
    }
}

/// Suffix of a part in PEFT's files, after the module name.
pub fn part_name(m: &Module, part: Part) -> &'static str {
    match (part, m.kind) {
        (Part::Weight, _) => "weight",
        (Part::Bias, _) => "bias",
        (Part::A, Kind::Embedding { .. }) => "lora_embedding_A",
        (Part::B, Kind::Embedding { .. }) => "lora_embedding_B",
        (Part::A, _) => "lora_A.weight",
        (Part::B, _) => "lora_B.weight",
        (Part::Magnitude, _) => "lora_magnitude_vector",
        (Part::Rows, _) => "token_adapter.trainable_tokens_delta",
    }
}
