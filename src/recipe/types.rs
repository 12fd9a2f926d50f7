//! The keys of a recipe, as typed values with every default filled in.

use crate::error::Place;
use serde::Serialize;
use std::path::PathBuf;

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
}

/// What is trained for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Task {
    /// Supervised fine-tuning.
    Sft,
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
    /// Load the weights, or make them at random.
    pub weights: Weights,
    /// Keys of `config.json` to replace.
    #[serde(rename = "override")]
    pub overrides: serde_json::Map<String, serde_json::Value>,
}

/// A floating-point type of weights and arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 8 exponent bits, 7 of mantissa.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
}

/// `model.quantize`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Quantize {
    /// As the checkpoint has it.
    None,
    /// Decoder linears in NF4, double quantization.
    Nf4,
}

/// `model.weights`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Weights {
    /// From the checkpoint.
    Load,
    /// Seeded random numbers of the config's shape.
    Random,
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

/// `train.method`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// A low-rank update.
    Lora,
    /// The weights themselves.
    Full,
    /// Nothing trains.
    Freeze,
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
    pub fields: std::collections::BTreeMap<String, String>,
    /// What is supervised, over `data.mask`.
    pub mask: Option<Mask>,
    /// Where the source stands in the recipe.
    #[serde(skip)]
    pub place: Place,
}

/// `data.*.format`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// `{"messages": [{"role", "content"}]}`, or ShareGPT's `conversations`.
    Messages,
    /// `instruction`, `input`, `output`.
    Alpaca,
    /// `prompt`, `completion`.
    Completion,
    /// `text`.
    Text,
    /// `input_ids`, `labels`.
    Tokens,
}

/// `data.over_length`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OverLength {
    /// Cut to `max_length`.
    Truncate,
    /// Leave it out.
    Drop,
    /// Stop.
    Error,
}

/// `data.on_bad_row`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OnBadRow {
    /// Stop.
    Error,
    /// Leave it out and count it.
    Skip,
}

/// `data.mask`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mask {
    /// The assistant's turns.
    Assistant,
    /// The completion.
    Completion,
    /// Every token.
    None,
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
    /// Rows a forward pass.
    pub micro_rows: usize,
    /// Global gradient norm; 0 is off.
    pub clip: f64,
    /// Steps between evaluations; 0 = at the end only.
    pub eval_every: usize,
    /// Steps between checkpoints; 0 = at the end only.
    pub save_every: usize,
    /// Checkpoints kept.
    pub keep: usize,
    /// The run folder, `{name}` filled in.
    pub output: PathBuf,
    /// Where to compute.
    pub device: Device,
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

/// `run.device`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// CUDA if there is one, else the CPU.
    Auto,
    /// The first CUDA device.
    Cuda,
    /// The CPU.
    Cpu,
}

/// `[optimizer]`
#[derive(Clone, Debug, Serialize)]
pub struct Optimizer {
    /// Which.
    pub name: OptimizerName,
    /// Peak learning rate; 2e-4 when only LoRA trains and 1e-5 when anything trains in full, unless given.
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

/// `optimizer.name`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// AdamW with f32 moments.
    Adamw,
    /// AdamW with 8-bit moments.
    Adamw8bit,
    /// Low-rank gradients.
    Galore,
}

/// `optimizer.decay`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// Matrices only: not norms, biases or DoRA magnitudes.
    Matrices,
    /// Everything that trains.
    All,
}

/// `optimizer.schedule`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Half a cosine from `lr` to `min_lr`.
    Cosine,
    /// A line from `lr` to `min_lr`.
    Linear,
    /// `lr` throughout.
    Constant,
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
    /// What is computed again in the backward pass instead of kept.
    pub recompute: Recompute,
    /// What lives on the host.
    pub offload: Vec<Offload>,
    /// Whether host buffers are pinned.
    pub pin: bool,
}

/// `memory.recompute`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// The fastest that fits; until the plan decides, all.
    Auto,
    /// Every layer.
    All,
    /// No layer.
    None,
    /// This many, from the bottom.
    #[serde(untagged)]
    Layers(usize),
}

/// `memory.offload`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// Master weights and moments.
    Optimizer,
    /// Weights.
    Params,
    /// Layer inputs.
    Activations,
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

/// `parallel.comm`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Comm {
    /// By device.
    Auto,
    /// NCCL.
    Nccl,
    /// MPI.
    Mpi,
    /// Threads of one process.
    Threads,
}

/// `[log]`
#[derive(Clone, Debug, Serialize)]
pub struct Log {
    /// Write TensorBoard event files.
    pub tensorboard: bool,
}
