//! Trained tensors of a selection.

use crate::model::modules::{Kind, Module};
use ft_recipe::Method;

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
    /// Factor on the learning rate.
    pub lr_scale: f64,
    /// Whether weight decay applies under `decay = "matrices"`.
    pub matrix: bool,
    /// Place in PEFT's tensor for all experts, for adapters of fused experts.
    pub fused: Option<FusedPart>,
}

/// Place of an expert's A or B in PEFT's tensor for all experts of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FusedPart {
    /// Module in PEFT's files.
    pub module: String,
    /// Index of the expert, and number of experts.
    pub expert: usize,
    pub experts: usize,
}

impl Trained {
    /// Number of values.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Key in PEFT's files.
    pub fn key(&self) -> String {
        match &self.fused {
            Some(place) => {
                let part = if self.part == Part::A { "lora_A" } else { "lora_B" };
                format!("{PREFIX}{}.{part}.weight", place.module)
            }
            None => format!("{PREFIX}{}", self.name),
        }
    }
}

/// Prefix of all keys in a PEFT adapter's file.
pub const PREFIX: &str = "base_model.model.";

/// A trained tensor by module, without owned names.
#[derive(Clone, Copy, Debug)]
pub struct TrainedPart<'a> {
    pub module: &'a Module,
    pub part: Part,
    /// Shape of a matrix; a vector uses the first entry.
    pub(super) dims: [usize; 2],
    pub(super) rank: usize,
    pub(super) lr_scale: f64,
    pub(super) matrix: bool,
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

    /// Factor on the learning rate.
    pub fn lr_scale(&self) -> f64 {
        self.lr_scale
    }
}

/// Name of a part's tensor, without PEFT's prefix.
pub fn tensor_name(m: &Module, part: Part) -> String {
    match (part, m.kind) {
        (Part::Weight, _) => m.weight_name(),
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
