//! Value types of recipe keys, and values derived from several keys.

use super::check::Checked;
use super::keys::{Lora, Memory, Optimizer, Parallel, Recipe, Rule, Run};
use super::kind::TOKENS;
use super::launch::Launch;
use super::table::{Field, Written, doc, words};
use super::tree::quote;

impl Memory {
    /// Whether `memory.offload` contains `what`.
    pub fn offloads(&self, what: Offload) -> bool {
        self.offload.as_ref().is_some_and(|all| all.contains(&what))
    }
}

impl Recipe {
    /// Whether a frozen matrix that stays on the device is stored with padding columns for an adapter. Never
    /// with several ranks, so that results round alike in all ZeRO stages.
    pub fn has_rooms(&self) -> bool {
        self.parallel.ranks() == 1 && !self.weights_come_and_go()
    }

    /// Whether a layer's compute weights are fetched before a visit and released afterwards: with ZeRO
    /// stage 3 from other ranks, with `memory.offload = ["params"]` from the host.
    pub fn weights_come_and_go(&self) -> bool {
        let split = self.parallel.data > 1 && self.parallel.zero >= 3;
        split || self.memory.offloads(Offload::Params)
    }

    /// Whether `[lora]`'s rank, alpha, dropout, rslora and dora have an effect, because some rule trains
    /// LoRA. Without rules, the config of the adapter in `lora.init` decides.
    pub fn uses_lora_defaults(&self) -> bool {
        self.train.iter().any(|r| r.is(Method::Lora))
    }
}

words! {
    /// `task`
    pub enum Task {
        /// Supervised fine-tuning.
        Sft = "sft",
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

/// LoRA parameters of one linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraSpec {
    /// LoRA rank: inner dimension of A and B.
    pub rank: usize,
    /// The update is scaled by alpha / rank (rsLoRA: alpha / sqrt(rank)).
    pub alpha: f64,
    /// Dropout probability on the input of A during training.
    pub dropout: f64,
    /// Scale by alpha / sqrt(rank).
    pub rslora: bool,
    /// DoRA: a trained magnitude for each output row.
    pub dora: bool,
}

/// An entry of `train.tokens`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Token {
    /// Text, as spelled by the tokenizer.
    Text(String),
    /// Token id.
    Id(u32),
}

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Token::Text(text) => f.write_str(&quote(text)),
            Token::Id(id) => write!(f, "{id}"),
        }
    }
}

impl Rule {
    /// Whether the rule trains rows of single tokens. Such rows train in full, regardless of the default
    /// of `method`.
    pub fn is_of_tokens(&self) -> bool {
        self.modules.iter().any(|m| m == TOKENS)
    }

    /// Whether the rule applies `method` to modules. False for a rule for token rows.
    pub fn is(&self, method: Method) -> bool {
        self.method == method && !self.is_of_tokens()
    }

    /// Fills in LoRA parameters missing in the rule from `[lora]`.
    pub(super) fn inherit(&mut self, lora: &Lora) {
        self.rank.get_or_insert(lora.rank);
        self.alpha.get_or_insert(lora.alpha);
        self.dropout.get_or_insert(lora.dropout);
        self.rslora.get_or_insert(lora.rslora);
        self.dora.get_or_insert(lora.dora);
    }

    /// The LoRA parameters of the rule.
    pub fn spec(&self) -> LoraSpec {
        LoraSpec {
            rank: self.rank.unwrap_or_default(),
            alpha: self.alpha.unwrap_or_default(),
            dropout: self.dropout.unwrap_or_default(),
            rslora: self.rslora.unwrap_or_default(),
            dora: self.dora.unwrap_or_default(),
        }
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

    fn write(&self) -> Written {
        Written::Value(quote(match self {
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

/// `train.layers`, except "all".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerSet {
    /// `"0-5"` (inclusive), `"24-"` (from 24 on), or a list of indices.
    Indices(IndexSet),
    /// `"-6:"`: the last six.
    Last(usize),
}

/// A set of indices, in the form written by the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IndexSet {
    /// Inclusive range; without an upper bound if `None`.
    Range(usize, Option<usize>),
    /// Explicit indices.
    List(Vec<usize>),
}

impl Default for IndexSet {
    /// The empty set.
    fn default() -> Self {
        IndexSet::List(Vec::new())
    }
}

impl IndexSet {
    /// Whether the set contains `i`.
    pub fn contains(&self, i: usize) -> bool {
        match self {
            IndexSet::Range(a, b) => i >= *a && b.is_none_or(|b| i <= b),
            IndexSet::List(v) => v.contains(&i),
        }
    }
}

impl LayerSet {
    /// Whether the set contains layer `i` of `count`.
    pub fn contains(&self, i: usize, count: usize) -> bool {
        match self {
            LayerSet::Indices(s) => s.contains(i),
            LayerSet::Last(n) => i + n >= count,
        }
    }
}

impl Run {
    /// Length of the run: `steps` if given, else `epochs`.
    pub fn length(&self) -> Length {
        self.steps.map_or(Length::Epochs(self.epochs), Length::Steps)
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

impl Optimizer {
    /// Whether fully trained weights have separate f32 master weights, or are f32 themselves (`in_f32`).
    pub fn keeps_master(&self, in_f32: bool) -> bool {
        in_f32
            || match self.master {
                Master::Auto => !self.name.eight_bit(),
                Master::F32 => true,
                Master::None => false,
            }
    }

    /// Number of warm-up steps in a run of `steps`: `warmup_ratio` of the steps, rounded up, if given,
    /// else `warmup_steps`.
    pub fn warmup(&self, steps: usize) -> usize {
        self.warmup_ratio.map_or(self.warmup_steps, |r| (r * steps as f64).ceil() as usize)
    }
}

/// `memory.recompute`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// The fastest option within the memory budget.
    #[default]
    Auto,
    /// All layers.
    All,
    /// Feed-forward modules and norms of all layers.
    FeedForward,
    /// The norms of all layers.
    Norms,
    /// Nothing.
    None,
    /// This many layers, from the bottom.
    Layers(usize),
}

impl Recompute {
    /// The words of `memory.recompute`, with values.
    pub(super) const WORDS: [(&str, Recompute); 5] = [
        ("auto", Recompute::Auto),
        ("all", Recompute::All),
        ("feed_forward", Recompute::FeedForward),
        ("norms", Recompute::Norms),
        ("none", Recompute::None),
    ];
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
    /// `memory.offload`
    pub enum Offload {
        /// Master weights and moments, which are updated there.
        Optimizer = "optimizer",
        /// Weights, frozen ones too: a layer's come a visit ahead, and go after it.
        Params = "params",
        /// Inputs of layers that are computed again.
        Activations = "activations",
    }
}

impl Parallel {
    /// Total number of ranks.
    pub fn ranks(&self) -> u64 {
        [self.data, self.tensor, self.pipeline, self.expert, self.context]
            .iter()
            .fold(1, |all, n| all.saturating_mul(*n as u64))
    }

    /// Number of ranks that are threads of this process.
    pub fn local(&self) -> u64 {
        match self.comm {
            Comm::Mpi => 1,
            Comm::Auto | Comm::Nccl if Launch::of_env().is_some() => 1,
            _ => self.ranks(),
        }
    }

    /// Compute threads per rank, for a process with `all` threads. Ranks in one process share the
    /// threads evenly.
    pub fn threads(&self, all: usize) -> usize {
        (all / self.local().max(1) as usize).max(1)
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
