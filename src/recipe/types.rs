//! The keys of a recipe, as typed values with every default filled in.

use crate::error::Place;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Defines an enum of a key's words: one place for their spelling, their documentation and their order.
macro_rules! choices {
    ($(#[$meta:meta])* pub enum $name:ident { $(#[doc = $doc:literal] $variant:ident = $word:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
        #[serde(rename_all = "lowercase")]
        pub enum $name {
            $(#[doc = $doc] $variant,)*
        }

        impl $name {
            /// Every word of the key with what it means, in the order of the documentation.
            pub const WORDS: &'static [(&'static str, &'static str)] = &[$(($word, $doc)),*];

            /// The value that `word` names.
            pub fn from_word(word: &str) -> Option<Self> {
                match word {
                    $($word => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// The word as a recipe spells it.
            pub fn word(self) -> &'static str {
                match self {
                    $(Self::$variant => $word,)*
                }
            }
        }
    };
}

/// A whole recipe.
#[derive(Clone, Debug, Serialize)]
pub struct Recipe {
    /// Version of the recipe format: 1.
    pub version: u32,
    /// Name of the run; the file's stem unless given.
    pub name: String,
    /// What is trained for; `sft` is the only task so far.
    pub task: Task,
    /// The base model.
    pub model: Model,
    /// Defaults of every rule that says `method = "lora"`.
    pub lora: Lora,
    /// What trains: rules in order, a later one wins where two match.
    pub train: Vec<Rule>,
    /// Losses on the routers of mixture models.
    pub router: Router,
    /// Training and evaluation data.
    pub data: Data,
    /// Length of the run, batches, where it writes.
    pub run: Run,
    /// The optimizer and its schedule.
    pub optimizer: Optimizer,
    /// What is kept, recomputed and moved.
    pub memory: Memory,
    /// Ranks.
    pub parallel: Parallel,
    /// Extra logs.
    pub log: Log,
    /// Folder of the recipe file, for relative paths; empty for a recipe that is not a file's.
    #[serde(skip)]
    pub folder: PathBuf,
    /// Where each key stands that the user wrote, by its dotted path.
    #[serde(skip)]
    pub(super) places: BTreeMap<String, Place>,
    /// Keys with values that `ft run` does not build yet; empty after `load`, which refuses them.
    #[serde(skip)]
    pub not_built: Vec<super::Diagnostic>,
}

impl Recipe {
    /// Whether `[lora]`'s rank, alpha, dropout, rslora and dora mean anything: some rule trains LoRA. Without
    /// rules, the config of the adapter in `lora.init` decides.
    pub fn uses_lora_defaults(&self) -> bool {
        self.train.iter().any(|r| r.method == Method::Lora)
    }
}

choices! {
    /// What is trained for.
    pub enum Task {
        /// Supervised fine-tuning.
        Sft = "sft",
    }
}

/// `[model]`
#[derive(Clone, Debug, Serialize)]
pub struct Model {
    /// Hub id, or a local folder.
    pub source: String,
    /// Branch, tag or commit on the hub.
    pub revision: String,
    /// Compute dtype and dtype of frozen weights; by device when not given (bf16 on CUDA, f32 on the CPU).
    pub dtype: Option<Dtype>,
    /// 4-bit base.
    pub quantize: Quantize,
    /// Folder that keeps what `quantize` makes.
    pub cache: Option<PathBuf>,
    /// Load the weights, or make them at random.
    pub weights: Weights,
    /// Keys of `config.json` to replace.
    #[serde(rename = "override")]
    pub overrides: serde_json::Map<String, serde_json::Value>,
}

choices! {
    /// A floating-point type of weights and arithmetic.
    pub enum Dtype {
        /// 8 exponent bits, 7 of mantissa.
        Bf16 = "bf16",
        /// IEEE half.
        F16 = "f16",
        /// IEEE single.
        F32 = "f32",
    }
}

choices! {
    /// `model.quantize`
    pub enum Quantize {
        /// As the checkpoint has it.
        None = "none",
        /// Decoder linears in NF4, double quantization.
        Nf4 = "nf4",
    }
}

choices! {
    /// `model.weights`
    pub enum Weights {
        /// From the checkpoint.
        Load = "load",
        /// Seeded random numbers of the config's shape.
        Random = "random",
    }
}

/// `[lora]`
#[derive(Clone, Debug, Serialize)]
pub struct Lora {
    /// Defaults for rules.
    #[serde(flatten)]
    pub spec: LoraSpec,
    /// `None` for `"default"` (A Kaiming-uniform, B zero), else path or hub id of a PEFT adapter to go on from.
    pub init: Option<String>,
}

/// How one linear is adapted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LoraSpec {
    /// Inner width of the update.
    pub rank: usize,
    /// Scale: the update is multiplied by alpha / rank (rsLoRA: alpha / sqrt(rank)).
    pub alpha: f64,
    /// Probability that an input of A is zeroed in training.
    pub dropout: f64,
    /// Scale by sqrt(rank).
    pub rslora: bool,
    /// Weight-decomposed: a trained magnitude for each output row.
    pub dora: bool,
}

/// One `[[train]]` rule.
#[derive(Clone, Debug, Serialize)]
pub struct Rule {
    /// Group names, last components of module names, or `/regex/`.
    pub modules: Vec<String>,
    /// Layers; `None` is all, and matches modules outside layers too.
    pub layers: Option<LayerSet>,
    /// Experts; when given, the rule matches inside experts only.
    pub experts: Option<IndexSet>,
    /// What happens to what it matches.
    pub method: Method,
    /// LoRA settings of this rule, `[lora]`'s where it says nothing.
    #[serde(flatten)]
    pub spec: LoraSpec,
    /// Factor on the learning rate.
    pub lr_scale: f64,
    /// Where the rule stands in the recipe.
    #[serde(skip)]
    pub place: Place,
}

choices! {
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

/// `train.layers`: which decoder layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum LayerSet {
    /// `"0-5"` (both ends belong), `"24-"` (from 24 on), and lists of indices.
    Indices(IndexSet),
    /// `"-6:"`: the last six.
    Last(usize),
}

/// A set of indices as the user wrote it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum IndexSet {
    /// From the first to the second, both included; open when there is no second.
    Range(usize, Option<usize>),
    /// Exactly these.
    List(Vec<usize>),
}

impl IndexSet {
    /// Whether `i` belongs to the set.
    pub fn contains(&self, i: usize) -> bool {
        match self {
            IndexSet::Range(a, b) => i >= *a && b.is_none_or(|b| i <= b),
            IndexSet::List(v) => v.contains(&i),
        }
    }
}

impl LayerSet {
    /// Whether layer `i` of `count` belongs to the set.
    pub fn contains(&self, i: usize, count: usize) -> bool {
        match self {
            LayerSet::Indices(s) => s.contains(i),
            LayerSet::Last(n) => i + n >= count,
        }
    }
}

/// `[router]`
#[derive(Clone, Debug, Serialize)]
pub struct Router {
    /// Coefficient of the load-balancing loss.
    pub aux_loss: f64,
    /// Coefficient of the z-loss.
    pub z_loss: f64,
}

/// `[data]`
#[derive(Clone, Debug, Serialize)]
pub struct Data {
    /// Training sources.
    pub train: Vec<Source>,
    /// Evaluation sources.
    pub eval: Vec<Source>,
    /// Tokens a row at the most.
    pub max_length: usize,
    /// What happens to a longer sample.
    pub over_length: OverLength,
    /// What happens to a row that cannot be used.
    pub on_bad_row: OnBadRow,
    /// Whether documents share a row.
    pub pack: bool,
    /// Whether rows come in random order.
    pub shuffle: bool,
    /// What is supervised; by format when not given.
    pub mask: Option<Mask>,
    /// A chat template to use instead of the model's own.
    pub chat_template: Option<PathBuf>,
    /// Variables for the template.
    pub template: serde_json::Map<String, serde_json::Value>,
}

/// One data source.
#[derive(Clone, Debug, Serialize)]
pub struct Source {
    /// A file, a folder or a hub dataset.
    pub source: String,
    /// The shape of its rows.
    pub format: Format,
    /// Share of the mix.
    pub weight: f64,
    /// Split of a hub dataset.
    pub split: Option<String>,
    /// Config of a hub dataset.
    pub config: Option<String>,
    /// Names of fields where they differ from the format's own: format's name -> file's name.
    pub fields: BTreeMap<String, String>,
    /// What is supervised, over `data.mask`.
    pub mask: Option<Mask>,
    /// Where the source stands in the recipe.
    #[serde(skip)]
    pub place: Place,
}

choices! {
    /// `data.*.format`
    pub enum Format {
        /// `{"messages": [{"role", "content"}]}`, or ShareGPT's `conversations`.
        Messages = "messages",
        /// `instruction`, `input`, `output`.
        Alpaca = "alpaca",
        /// `prompt`, `completion`.
        Completion = "completion",
        /// `text`.
        Text = "text",
        /// `input_ids`, `labels`.
        Tokens = "tokens",
    }
}

choices! {
    /// `data.over_length`
    pub enum OverLength {
        /// Cut to `max_length`.
        Truncate = "truncate",
        /// Leave it out.
        Drop = "drop",
        /// Stop.
        Error = "error",
    }
}

choices! {
    /// `data.on_bad_row`
    pub enum OnBadRow {
        /// Stop.
        Error = "error",
        /// Leave it out and count it.
        Skip = "skip",
    }
}

choices! {
    /// `data.mask`
    pub enum Mask {
        /// The assistant's turns.
        Assistant = "assistant",
        /// The completion.
        Completion = "completion",
        /// Every token.
        None = "none",
    }
}

/// `[run]`
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    /// Seed of every random number of the run.
    pub seed: u64,
    /// How long: `steps` if given, else `epochs`.
    #[serde(flatten)]
    pub length: Length,
    /// Rows an optimizer step.
    pub batch_rows: usize,
    /// Rows a forward pass; 1 where the plan chooses and has not yet.
    pub micro_rows: usize,
    /// Whether the plan chooses `micro_rows`.
    pub micro_auto: bool,
    /// Global gradient norm; 0 is off.
    pub clip: f64,
    /// Steps between evaluations; 0 = at the end only.
    pub eval_every: usize,
    /// Steps between checkpoints; 0 = at the end only.
    pub save_every: usize,
    /// Whether to evaluate before the first step too.
    pub eval_at_start: bool,
    /// Checkpoints kept.
    pub keep: usize,
    /// The run folder, `{name}` filled in.
    pub output: PathBuf,
    /// Where to compute.
    pub device: Device,
}

impl Run {
    /// Sets the rows of a micro-batch for good.
    pub fn set_micro_rows(&mut self, rows: usize) {
        (self.micro_rows, self.micro_auto) = (rows, false);
    }
}

/// How long a run is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Length {
    /// Optimizer steps.
    Steps(usize),
    /// Passes over the rows.
    Epochs(f64),
}

choices! {
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

/// `[optimizer]`
#[derive(Clone, Debug, Serialize)]
pub struct Optimizer {
    /// Which.
    pub name: OptimizerName,
    /// Peak learning rate; unless given, 2e-4 for what trains by LoRA and 1e-5 for what trains in full.
    pub lr: Option<f64>,
    /// Decay rates of the moments.
    pub betas: [f64; 2],
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// What decays.
    pub decay: Decay,
    /// Shape of the learning rate over the run.
    pub schedule: Schedule,
    /// Warm-up.
    #[serde(flatten)]
    pub warmup: Warmup,
    /// Learning rate at the end.
    pub min_lr: f64,
    /// Step each layer's optimizer in the backward pass.
    pub in_backward: bool,
}

choices! {
    /// `optimizer.name`
    pub enum OptimizerName {
        /// AdamW with f32 moments.
        Adamw = "adamw",
        /// AdamW with 8-bit moments.
        Adamw8bit = "adamw8bit",
        /// Low-rank gradients.
        Galore = "galore",
    }
}

choices! {
    /// `optimizer.decay`
    pub enum Decay {
        /// Matrices only: not norms, biases or DoRA magnitudes.
        Matrices = "matrices",
        /// Everything that trains.
        All = "all",
    }
}

choices! {
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

/// Warm-up, in steps or as a share of the run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum Warmup {
    /// Steps.
    #[serde(rename = "warmup_steps")]
    Steps(usize),
    /// Share of all steps, rounded up.
    #[serde(rename = "warmup_ratio")]
    Ratio(f64),
}

/// `[memory]`
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    /// Bytes of one device that may be used.
    pub budget: Option<u64>,
    /// Bytes of host memory that a rank may use.
    pub host_budget: Option<u64>,
    /// Bytes that a run may write to disks.
    pub disk_budget: Option<u64>,
    /// What is computed again in the backward pass instead of kept.
    pub recompute: Recompute,
    /// How 4-bit weights are decoded for a layer that is computed again.
    pub decoded: Decoded,
    /// What lives on the host.
    pub offload: Vec<Offload>,
    /// Whether host buffers are pinned.
    pub pin: bool,
}

/// `memory.recompute`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// The fewest that fit the budget: the fastest.
    Auto,
    /// Every layer.
    All,
    /// No layer.
    None,
    /// This many, from the bottom.
    #[serde(untagged)]
    Layers(usize),
}

choices! {
    /// `memory.decoded`
    pub enum Decoded {
        /// The faster of the two, where it fits.
        Auto = "auto",
        /// In each product, a panel at a time; nothing is kept.
        Panels = "panels",
        /// Once for the forward and backward pass over the layer, whole.
        Visit = "visit",
    }
}

choices! {
    /// `memory.offload`
    pub enum Offload {
        /// Master weights and moments.
        Optimizer = "optimizer",
        /// Weights.
        Params = "params",
        /// Layer inputs.
        Activations = "activations",
    }
}

/// `[parallel]`
#[derive(Clone, Debug, Serialize)]
pub struct Parallel {
    /// Ranks that split the rows.
    pub data: usize,
    /// ZeRO stage.
    pub zero: u8,
    /// Tensor parallel ranks.
    pub tensor: usize,
    /// Pipeline stages.
    pub pipeline: usize,
    /// Expert parallel ranks.
    pub expert: usize,
    /// Context parallel ranks.
    pub context: usize,
    /// Transport of collectives.
    pub comm: Comm,
    /// Seconds a collective may take.
    pub timeout: u64,
}

choices! {
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

/// `[log]`
#[derive(Clone, Debug, Serialize)]
pub struct Log {
    /// Write TensorBoard event files.
    pub tensorboard: bool,
    /// A prompt that is answered before and after training.
    pub sample: Option<String>,
}
