//! Words that recipe keys accept, and further scalar types.

use super::checked::Checked;
use super::data_words::Format;
use super::field::{Field, Formatted, list_of};
use super::macros::{doc, words};
use crate::syntax::quote;

words! {
    /// `task`
    pub enum Task {
        /// Supervised fine-tuning.
        Sft = "sft",
        /// Direct preference optimization of pairs (arXiv 2305.18290), or IPO (preference.loss).
        Dpo = "dpo",
        /// Odds ratio preference optimization of pairs, without a reference (arXiv 2403.07691).
        Orpo = "orpo",
        /// Simple preference optimization of pairs, without a reference (arXiv 2405.14734).
        Simpo = "simpo",
        /// Contrastive preference optimization of pairs, without a reference (arXiv 2401.08417).
        Cpo = "cpo",
        /// Kahneman-Tversky optimization of rated completions (arXiv 2402.01306).
        Kto = "kto",
        /// A reward model: a score head of one output, trained on pairs (arXiv 2203.02155, equation 1).
        Reward = "reward",
        /// Classification: a score head with an output for each label.
        Classify = "classify",
        /// Distillation: a teacher's probabilities, as ft logits writes them, beside the labels (arXiv 1503.02531).
        Distill = "distill",
    }
}

impl Task {
    /// Whether completions are compared or rated.
    pub fn prefers(self) -> bool {
        matches!(self, Task::Dpo | Task::Orpo | Task::Simpo | Task::Cpo | Task::Kto)
    }

    /// Whether the loss compares the model with a reference.
    pub fn has_reference(self) -> bool {
        matches!(self, Task::Dpo | Task::Kto)
    }

    /// Whether the model has a score head, on the last token of a document, in place of the vocabulary's.
    pub fn has_scores(self) -> bool {
        matches!(self, Task::Reward | Task::Classify)
    }

    /// Whether the gradients of the head's outputs follow from the losses or scores of whole documents.
    pub fn has_objective(self) -> bool {
        self.prefers() || self.has_scores()
    }

    /// The only format of the task's rows; `None` for every format of single documents.
    pub fn format(self) -> Option<Format> {
        match self {
            Task::Dpo | Task::Orpo | Task::Simpo | Task::Cpo | Task::Reward => Some(Format::Preference),
            Task::Kto => Some(Format::Unpaired),
            Task::Distill => Some(Format::Tokens),
            Task::Classify => Some(Format::Labeled),
            Task::Sft => None,
        }
    }

    /// Fewest rows of a step. KTO estimates a row's KL from another row.
    pub fn least_rows(self) -> usize {
        if self == Task::Kto { 2 } else { 1 }
    }

    /// Whether the task reads rows of a format.
    pub fn takes(self, format: Format) -> bool {
        self.format().map_or(!format.is_of_a_task(), |only| only == format)
    }
}

words! {
    /// `run.best`
    pub enum Best {
        /// The lowest loss.
        Loss = "loss",
        /// The highest accuracy, of pairs or of classes; the first of equal ones.
        Accuracy = "accuracy",
    }
}

words! {
    /// `preference.loss`
    pub enum PreferenceLoss {
        /// The negative logarithm of the sigmoid of the difference of rewards (DPO).
        Sigmoid = "sigmoid",
        /// Identity preference optimization (arXiv 2310.12036), by means over the tokens.
        Ipo = "ipo",
        /// Of task "orpo".
        Orpo = "orpo",
        /// Of task "simpo".
        Simpo = "simpo",
        /// Of task "cpo".
        Cpo = "cpo",
        /// Of task "kto".
        Kto = "kto",
    }
}

impl PreferenceLoss {
    /// Whether the loss takes `preference.label_smoothing`.
    pub fn smooths(self) -> bool {
        matches!(self, PreferenceLoss::Sigmoid | PreferenceLoss::Simpo | PreferenceLoss::Cpo)
    }
}

/// `preference.reference`
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reference {
    /// The base model, without adapters.
    Base,
    /// The model at the start of the run.
    Start,
    /// Another model, or an adapter of this one: path or hub id.
    Other(String),
}

impl Field for Reference {
    fn read(checked: Option<&Checked>) -> Self {
        match String::read(checked) {
            text if text.is_empty() || text == "base" => Reference::Base,
            text if text == "start" => Reference::Start,
            text => Reference::Other(text),
        }
    }

    fn write(&self) -> Formatted {
        Formatted::Value(quote(match self {
            Reference::Base => "base",
            Reference::Start => "start",
            Reference::Other(other) => other.as_str(),
        }))
    }
}

words! {
    /// Floating-point type of weights and arithmetic.
    pub enum Dtype {
        /// 8 exponent bits, 7 of mantissa.
        Bf16 = "bf16",
        /// IEEE half.
        F16 = "f16",
        /// IEEE single.
        F32 = "f32",
    }
}

words! {
    /// `model.quantize`
    pub enum Quantize {
        /// As the checkpoint has it.
        None = "none",
        /// Decoder linears in NF4, double quantization.
        Nf4 = "nf4",
    }
}

words! {
    /// `model.weights`
    pub enum Weights {
        /// From the checkpoint.
        Load = "load",
        /// Seeded random numbers of the config's shape.
        Random = "random",
    }
}

words! {
    /// A `lora.init` computed from the base weights.
    pub enum Decomposition {
        /// The largest singular values (PiSSA).
        Pissa = "pissa",
        /// The first columns of a QR decomposition (OLoRA).
        Olora = "olora",
        /// The largest singular values of what 4 bits lose (LoftQ).
        Loftq = "loftq",
    }
}

impl Decomposition {
    /// Whether the initial update is subtracted from the base weights.
    pub fn changes_base(self) -> bool {
        self != Decomposition::Loftq
    }
}

/// `lora.init`
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Init {
    /// A Kaiming-uniform, B zero.
    Default,
    /// Computed from the base weights.
    Of(Decomposition),
    /// A PEFT adapter to continue training: path or hub id.
    Adapter(String),
}

impl Init {
    /// Path or hub id of the adapter to continue training, if any.
    pub fn adapter(&self) -> Option<&str> {
        match self {
            Init::Default | Init::Of(_) => None,
            Init::Adapter(a) => Some(a),
        }
    }

    /// The decomposition that initializes A and B, if any.
    pub fn decomposition(&self) -> Option<Decomposition> {
        match self {
            Init::Of(d) => Some(*d),
            Init::Default | Init::Adapter(_) => None,
        }
    }
}

impl Field for Init {
    fn read(checked: Option<&Checked>) -> Self {
        let text = String::read(checked);
        match (text.as_str(), Decomposition::from_word(&text)) {
            ("" | "default", _) => Init::Default,
            (_, Some(d)) => Init::Of(d),
            (adapter, None) => Init::Adapter(adapter.into()),
        }
    }

    fn write(&self) -> Formatted {
        Formatted::Value(quote(match self {
            Init::Default => "default",
            Init::Of(d) => d.word(),
            Init::Adapter(a) => a.as_str(),
        }))
    }
}

words! {
    /// `train.method`
    pub enum Method {
        /// A low-rank update.
        Lora = "lora",
        /// The weights themselves.
        Full = "full",
        /// Nothing trains.
        Freeze = "freeze",
    }
}

/// `run.micro_rows`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MicroRows {
    /// Chosen by the plan.
    Auto,
    /// A fixed number of rows.
    Rows(usize),
}

impl From<usize> for MicroRows {
    fn from(rows: usize) -> Self {
        MicroRows::Rows(rows)
    }
}

impl MicroRows {
    /// Whether the plan chooses.
    pub fn is_auto(self) -> bool {
        self == MicroRows::Auto
    }

    /// The number of rows; 1 before the plan has chosen.
    pub fn count(self) -> usize {
        match self {
            MicroRows::Auto => 1,
            MicroRows::Rows(n) => n.max(1),
        }
    }
}

/// Length of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Length {
    /// Optimizer steps.
    Steps(usize),
    /// Passes over the training data.
    Epochs(f64),
}

words! {
    /// `run.device`
    pub enum Device {
        /// CUDA if there is one, else the CPU.
        Auto = "auto",
        /// The first CUDA device.
        Cuda = "cuda",
        /// The CPU.
        Cpu = "cpu",
    }
}

/// One device of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OneDevice {
    /// The CPU.
    Cpu,
    /// A CUDA device, by index.
    Cuda(usize),
}

impl OneDevice {
    /// The accepted spellings, for messages.
    pub const SPELT: &'static str = "\"cpu\", \"cuda\" (the first) or \"cuda:1\", by number";

    /// Parses a device name.
    pub fn from_word(word: &str) -> Option<Self> {
        match word.split_once(':') {
            None => match Device::from_word(word)? {
                Device::Cpu => Some(OneDevice::Cpu),
                Device::Cuda => Some(OneDevice::Cuda(0)),
                Device::Auto => None,
            },
            // Canonical spelling only: no leading zeros or sign.
            Some(("cuda", n)) => n.parse().ok().filter(|i: &usize| i.to_string() == n).map(OneDevice::Cuda),
            Some(_) => None,
        }
    }

    /// The device name as spelled in a recipe.
    pub fn word(self) -> String {
        match self {
            OneDevice::Cpu => "cpu".into(),
            OneDevice::Cuda(n) => format!("cuda:{n}"),
        }
    }
}

words! {
    /// `optimizer.name`
    pub enum OptimizerName {
        /// AdamW with f32 moments.
        Adamw = "adamw",
        /// AdamW with 8-bit moments as in bitsandbytes (below 4096 values in f32).
        Adamw8bit = "adamw8bit",
        /// GaLore: AdamW on low-rank projections of the gradients of layers' matrices that train in full.
        Galore = "galore",
        /// The same with 8-bit moments.
        Galore8bit = "galore8bit",
    }
}

impl OptimizerName {
    /// Whether moments of large tensors are stored in 8 bits.
    pub fn eight_bit(self) -> bool {
        matches!(self, OptimizerName::Adamw8bit | OptimizerName::Galore8bit)
    }

    /// Whether gradients are projected (GaLore).
    pub fn projects(self) -> bool {
        matches!(self, OptimizerName::Galore | OptimizerName::Galore8bit)
    }
}

words! {
    /// `optimizer.master`
    pub enum Master {
        /// "none" with 8-bit moments, as bitsandbytes has it; else "f32".
        Auto = "auto",
        /// Of everything that trains.
        F32 = "f32",
        /// Of LoRA alone.
        None = "none",
    }
}

words! {
    /// `optimizer.decay`
    pub enum Decay {
        /// Matrices only: not norms, biases or DoRA magnitudes.
        Matrices = "matrices",
        /// Everything that trains.
        All = "all",
    }
}

words! {
    /// `optimizer.schedule`
    pub enum Schedule {
        /// Half a cosine from `lr` to `min_lr`.
        Cosine = "cosine",
        /// A line from `lr` to `min_lr`.
        Linear = "linear",
        /// `lr` throughout.
        Constant = "constant",
    }
}

words! {
    /// `memory.dequantize`
    pub enum Dequantize {
        /// The faster of the two, where it fits.
        Auto = "auto",
        /// In each matrix product, a tile at a time; nothing is kept.
        PerMatmul = "per_matmul",
        /// The whole layer, once for its recomputed forward and its backward pass.
        PerLayer = "per_layer",
    }
}

words! {
    /// `memory.products`
    pub enum Products {
        /// In `model.dtype`.
        Dtype = "dtype",
        /// In 8-bit floats: e4m3, and e5m2 for gradients.
        Fp8 = "fp8",
    }
}

words! {
    /// `memory.offload`
    pub enum Offload {
        /// Master weights and moments; the optimizer step runs on the host.
        Optimizer = "optimizer",
        /// Weights, frozen ones too: a layer's come a visit ahead, and go after it.
        Params = "params",
        /// Inputs of layers that are computed again.
        Activations = "activations",
    }
}

words! {
    /// `parallel.comm`
    pub enum Comm {
        /// By device.
        Auto = "auto",
        /// NCCL.
        Nccl = "nccl",
        /// MPI.
        Mpi = "mpi",
        /// Threads of one process.
        Threads = "threads",
    }
}

impl Field for MicroRows {
    fn read(checked: Option<&Checked>) -> Self {
        match checked {
            Some(Checked::Auto) => MicroRows::Auto,
            other => MicroRows::Rows(Option::<usize>::read(other).unwrap_or(1)),
        }
    }

    fn write(&self) -> Formatted {
        match self {
            MicroRows::Auto => Formatted::Value(quote("auto")),
            MicroRows::Rows(n) => n.write(),
        }
    }
}

/// Implements `Field` for lists of words. Invalid words have been reported already.
macro_rules! word_lists {
    ($($type:ty),+) => {$(
        impl Field for Vec<$type> {
            fn read(checked: Option<&Checked>) -> Self {
                Vec::<String>::read(checked).iter().filter_map(|w| <$type>::from_word(w)).collect()
            }

            fn write(&self) -> Formatted {
                Formatted::Value(list_of(self.iter().map(|w| w.word())))
            }
        }
    )+};
}

word_lists!(Offload, OneDevice);
