//! Every key of a recipe: its name, kind, default and documentation.
//!
//! The one table that the checks, the JSON schema and the reference page read. A new key is a row here, a
//! field in `types.rs`, a line in `read.rs` and one in `write.rs`; tests compare the four.

use super::types::{
    Comm, Decay, Decoded, Device, Dtype, Format, Mask, Method, Offload, OnBadRow, OptimizerName, OverLength,
    Quantize, Schedule, Task, Weights,
};

/// One key.
#[derive(Debug)]
pub struct Key {
    /// Its name in the table that it belongs to.
    pub name: &'static str,
    /// What it takes.
    pub kind: Kind,
    /// What it is when the recipe does not say.
    pub default: Unset,
    /// What it means, in a sentence or two.
    pub doc: &'static str,
}

/// What a key is when the recipe does not say.
#[derive(Debug, Clone, Copy)]
pub enum Unset {
    /// It must be given.
    Required,
    /// This value, as TOML.
    Toml(&'static str),
    /// No value; what happens instead, in words.
    Absent(&'static str),
}

/// What a key takes.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// A whole number from the first to the second.
    Int(u64, u64),
    /// As `Int`, or `"auto"`.
    IntOrAuto(u64, u64),
    /// A finite number.
    Number(Bound),
    /// `true` or `false`.
    Bool,
    /// A string that is not empty.
    Text,
    /// A string that can name a folder.
    Name,
    /// One of these words: (word, meaning).
    Word(&'static [(&'static str, &'static str)]),
    /// A list of these words, each at most once.
    Words(&'static [(&'static str, &'static str)]),
    /// A table of anything that JSON can hold.
    Anything,
    /// A table of strings.
    Strings,
    /// The list of `train.modules`.
    Modules,
    /// `train.layers`.
    Layers,
    /// `train.experts`.
    Experts,
    /// Two numbers in [0, 1).
    Betas,
    /// A number of bytes, such as `"48GiB"`.
    Bytes,
    /// `memory.recompute`.
    Recompute,
    /// A table with these keys.
    Table(&'static [Key]),
    /// A list of tables with these keys.
    Tables(&'static [Key]),
}

/// The range of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// Above 0.
    Positive,
    /// 0 or above.
    NotNegative,
    /// 0 to 1, both included.
    Share,
    /// 0 to 1, without 1.
    BelowOne,
}

impl Bound {
    /// Whether `x` is finite and within.
    pub fn holds(self, x: f64) -> bool {
        x.is_finite()
            && match self {
                Bound::Positive => x > 0.0,
                Bound::NotNegative => x >= 0.0,
                Bound::Share => (0.0..=1.0).contains(&x),
                Bound::BelowOne => (0.0..1.0).contains(&x),
            }
    }

    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Bound::Positive => "a number above 0",
            Bound::NotNegative => "a number of 0 or more",
            Bound::Share => "a number from 0 to 1",
            Bound::BelowOne => "a number from 0 to below 1",
        }
    }
}

/// The groups of `train.modules`, with what each holds.
pub const GROUPS: &[(&str, &str)] = &[
    ("attention", "the projections q, k, v, o"),
    ("mlp", "dense and shared-expert linears"),
    ("experts", "the linears of routed experts"),
    ("router", "the routers of mixture layers"),
    ("norms", "every norm, q and k norms too"),
    ("embedding", "the token embedding"),
    ("head", "the output head"),
];

/// The largest whole number that TOML promises to hold.
const BIG: u64 = i64::MAX as u64;
/// A bound on counts that nobody reaches and that no product of three overflows.
const COUNT: u64 = 1_000_000_000;
/// A bound on indices of layers and experts, and on ranks.
pub const INDEX: u64 = 65_535;

use Kind::{Bool, Int, Number, Table, Tables, Text, Word};
use Unset::{Absent, Required, Toml};

const fn key(name: &'static str, kind: Kind, default: Unset, doc: &'static str) -> Key {
    Key { name, kind, default, doc }
}

/// The recipe itself.
pub const ROOT: &[Key] = &[
    key("version", Int(1, 1), Toml("1"), "Version of the recipe format."),
    key("name", Kind::Name, Absent("the file's stem"), "Name of the run."),
    key("task", Word(Task::WORDS), Toml("\"sft\""), "What is trained for."),
    key("model", Table(MODEL), Required, "The base model."),
    key("lora", Table(LORA), Toml("{}"), "Defaults of every rule that says method = \"lora\"."),
    key(
        "train",
        Tables(TRAIN),
        Toml("[]"),
        "What trains: rules in order, a later rule wins where two match; what no rule matches is frozen. At \
         least one rule, or an adapter in lora.init.",
    ),
    key("router", Table(ROUTER), Toml("{}"), "Losses on the routers of mixture models."),
    key("data", Table(DATA), Required, "Training and evaluation data."),
    key("run", Table(RUN), Toml("{}"), "Length of the run, batches, and where it writes."),
    key("optimizer", Table(OPTIMIZER), Toml("{}"), "The optimizer and its schedule."),
    key("memory", Table(MEMORY), Toml("{}"), "What is kept, recomputed and moved."),
    key("parallel", Table(PARALLEL), Toml("{}"), "How ranks share the work."),
    key("log", Table(LOG), Toml("{}"), "Extra logs."),
];

const MODEL: &[Key] = &[
    key(
        "source",
        Text,
        Required,
        "Hub id such as Qwen/Qwen3-8B, or a local folder (one with config.json alone can be planned, or run \
         with weights = \"random\").",
    ),
    key("revision", Text, Toml("\"main\""), "Branch, tag or commit on the hub."),
    key(
        "dtype",
        Word(Dtype::WORDS),
        Absent("bf16 on CUDA, f32 on the CPU"),
        "Type of the arithmetic and of frozen weights.",
    ),
    key(
        "quantize",
        Word(Quantize::WORDS),
        Toml("\"none\""),
        "4-bit weights: decoder linears only; head, embedding, norms, routers and what trains in full stay.",
    ),
    key(
        "cache",
        Text,
        Absent("the model is quantized again at each start"),
        "A folder where the model that quantize makes is kept, and loaded from at the next start.",
    ),
    key("weights", Word(Weights::WORDS), Toml("\"load\""), "Where the weights come from."),
    key("override", Kind::Anything, Toml("{}"), "Keys of the model's config.json to replace."),
];

const RANK: Kind = Int(1, INDEX);

const LORA: &[Key] = &[
    key("rank", RANK, Toml("16"), "Inner width of the update."),
    key(
        "alpha",
        Number(Bound::Positive),
        Toml("32"),
        "Scale: the update is multiplied by alpha / rank (with rslora: alpha / sqrt(rank)).",
    ),
    key(
        "dropout",
        Number(Bound::BelowOne),
        Toml("0.0"),
        "Probability that an input of A is zeroed in training.",
    ),
    key("rslora", Bool, Toml("false"), "Scale by sqrt(rank) in place of rank."),
    key("dora", Bool, Toml("false"), "Weight-decomposed: a trained magnitude for each output row."),
    key(
        "init",
        Text,
        Toml("\"default\""),
        "\"default\" (A Kaiming-uniform, B zero), or the path or hub id of a PEFT adapter to go on from.",
    ),
];

const TRAIN: &[Key] = &[
    key(
        "modules",
        Kind::Modules,
        Required,
        "Groups (attention, mlp, experts, router, norms, embedding, head), last components of module names \
         (q_proj, w1, gate), or \"/regex/\" that must match a whole module name.",
    ),
    key(
        "layers",
        Kind::Layers,
        Toml("\"all\""),
        "\"all\", \"3\", \"0-5\", \"24-\", \"-6:\" (the last six) or [0, 3, 5]; given as anything but all, the \
         rule matches inside layers only.",
    ),
    key(
        "experts",
        Kind::Experts,
        Absent("the rule does not ask for experts"),
        "\"all\", \"0-3\" or [0, 7]; a rule that has this key matches inside experts only.",
    ),
    key("method", Word(Method::WORDS), Toml("\"lora\""), "What happens to what the rule matches."),
    key("rank", RANK, Absent("lora.rank"), "Rank of this rule."),
    key("alpha", Number(Bound::Positive), Absent("lora.alpha"), "Alpha of this rule."),
    key("dropout", Number(Bound::BelowOne), Absent("lora.dropout"), "Dropout of this rule."),
    key("rslora", Bool, Absent("lora.rslora"), "rsLoRA for this rule."),
    key("dora", Bool, Absent("lora.dora"), "DoRA for this rule."),
    key("lr_scale", Number(Bound::Positive), Toml("1.0"), "Factor on the learning rate."),
];

const ROUTER: &[Key] = &[
    key("aux_loss", Number(Bound::NotNegative), Toml("0.0"), "Coefficient of the load-balancing loss."),
    key("z_loss", Number(Bound::NotNegative), Toml("0.0"), "Coefficient of the z-loss."),
];

const DATA: &[Key] = &[
    key("train", Tables(SOURCE), Required, "Training data, one table a source."),
    key("eval", Tables(SOURCE), Toml("[]"), "Evaluation data, one table a source."),
    key("max_length", Int(2, 100_000_000), Toml("2048"), "Tokens a row at the most."),
    key("over_length", Word(OverLength::WORDS), Toml("\"truncate\""), "What happens to a longer sample."),
    key("on_bad_row", Word(OnBadRow::WORDS), Toml("\"error\""), "What happens to a row that cannot be used."),
    key("pack", Bool, Toml("true"), "Whether documents share a row (never attention; positions restart)."),
    key("shuffle", Bool, Toml("true"), "Whether rows come in random order."),
    key("mask", Word(Mask::WORDS), Absent("what the format supports"), "What is supervised."),
    key(
        "chat_template",
        Text,
        Absent("the model's own"),
        "A file with a chat template to use instead of the model's own.",
    ),
    key("template", Kind::Anything, Toml("{}"), "Variables for the chat template."),
];

const SOURCE: &[Key] = &[
    key("source", Text, Required, "A file (.jsonl, .json, .parquet), a folder, or a hub dataset."),
    key("format", Word(Format::WORDS), Required, "The shape of the rows."),
    key("weight", Number(Bound::Positive), Toml("1.0"), "Share of this source in the mix."),
    key("split", Text, Absent("the dataset's only one"), "Split of a hub dataset."),
    key("config", Text, Absent("the dataset's only one"), "Config of a hub dataset."),
    key(
        "fields",
        Kind::Strings,
        Toml("{}"),
        "Names of fields where the file differs from the format: the format's name = \"the file's name\".",
    ),
    key("mask", Word(Mask::WORDS), Absent("data.mask"), "What is supervised in this source."),
];

const RUN: &[Key] = &[
    key("seed", Int(0, BIG), Toml("0"), "Seed of every random number of the run."),
    key("epochs", Number(Bound::Positive), Toml("1"), "Passes over the rows."),
    key("steps", Int(1, COUNT), Absent("by epochs"), "Optimizer steps; wins over epochs."),
    key("batch_rows", Int(1, COUNT), Toml("16"), "Rows an optimizer step, over all ranks."),
    key(
        "micro_rows",
        Kind::IntOrAuto(1, COUNT),
        Toml("1"),
        "Rows a forward pass, a rank: batch_rows must divide by micro_rows x data ranks; or \"auto\": the number \
         with which a step is fastest, of those that fit memory.budget. Loss and gradients do not depend on it, but \
         for router.aux_loss, which is a mean over micro-batches.",
    ),
    key("clip", Number(Bound::NotNegative), Toml("1.0"), "Largest global gradient norm; 0 is off."),
    key("eval_every", Int(0, COUNT), Toml("0"), "Steps between evaluations; 0 = at the end only."),
    key("save_every", Int(0, COUNT), Toml("0"), "Steps between checkpoints; 0 = at the end only."),
    key("eval_at_start", Bool, Toml("false"), "Whether to evaluate before the first step too."),
    key("keep", Int(1, COUNT), Toml("2"), "Checkpoints that are kept."),
    key("output", Text, Toml("\"runs/{name}\""), "The run folder; {name} is filled in."),
    key("device", Word(Device::WORDS), Toml("\"auto\""), "Where to compute."),
];

const OPTIMIZER: &[Key] = &[
    key("name", Word(OptimizerName::WORDS), Toml("\"adamw\""), "The optimizer."),
    key(
        "lr",
        Number(Bound::Positive),
        Absent("2e-4 for LoRA alone, 1e-5 when anything trains in full"),
        "Peak learning rate.",
    ),
    key("betas", Kind::Betas, Toml("[0.9, 0.999]"), "Decay rates of the two moments."),
    key("eps", Number(Bound::Positive), Toml("1e-8"), "Added to the denominator."),
    key("weight_decay", Number(Bound::NotNegative), Toml("0.0"), "Decoupled weight decay."),
    key("decay", Word(Decay::WORDS), Toml("\"matrices\""), "What decays."),
    key("schedule", Word(Schedule::WORDS), Toml("\"cosine\""), "Shape of the learning rate over the run."),
    key(
        "warmup_steps",
        Int(0, COUNT),
        Toml("0"),
        "Updates over which the learning rate rises: update i (from 0) has lr * (i + 1) / warmup.",
    ),
    key(
        "warmup_ratio",
        Number(Bound::Share),
        Absent("by warmup_steps"),
        "Warm-up as a share of all steps, rounded up; instead of warmup_steps.",
    ),
    key("min_lr", Number(Bound::NotNegative), Toml("0.0"), "Learning rate at the end."),
    key("in_backward", Bool, Toml("false"), "Step each layer's optimizer in the backward pass."),
];

const MEMORY: &[Key] = &[
    key(
        "budget",
        Kind::Bytes,
        Absent("what is free"),
        "Memory of one device that may be used, such as \"48GiB\". On CUDA a twenty-fifth of it is kept back where that \
         is possible. On the CPU it holds what training takes, the allocator's part included; the program's code, \
         the tokenizer and the data stand beside it, in the plan's line of the host.",
    ),
    key(
        "host_budget",
        Kind::Bytes,
        Absent("what is free"),
        "Host memory that a rank may use, to plan for another machine. On the CPU it holds the device's bytes too.",
    ),
    key(
        "disk_budget",
        Kind::Bytes,
        Absent("what is free on each disk"),
        "Bytes that a run may write in all, to plan for another machine.",
    ),
    key(
        "recompute",
        Kind::Recompute,
        Toml("\"auto\""),
        "Layers whose activations are computed again in the backward pass: \"auto\" (the fewest that fit \
         memory.budget), \"all\", \"none\" or a number of layers.",
    ),
    key(
        "decoded",
        Word(Decoded::WORDS),
        Toml("\"auto\""),
        "How 4-bit weights are decoded for a layer that is computed again.",
    ),
    key("offload", Kind::Words(Offload::WORDS), Toml("[]"), "What lives on the host."),
    key("pin", Bool, Toml("true"), "Whether host buffers are pinned."),
];

const RANKS: Kind = Int(1, INDEX);

const PARALLEL: &[Key] = &[
    key("data", RANKS, Toml("1"), "Ranks that split the rows."),
    key("zero", Int(0, 3), Toml("0"), "ZeRO stage."),
    key("tensor", RANKS, Toml("1"), "Tensor parallel ranks."),
    key("pipeline", RANKS, Toml("1"), "Pipeline stages."),
    key("expert", RANKS, Toml("1"), "Expert parallel ranks."),
    key("context", RANKS, Toml("1"), "Context parallel ranks."),
    key("comm", Word(Comm::WORDS), Toml("\"auto\""), "Transport of collectives."),
    key("timeout", Int(1, 1_000_000), Toml("600"), "Seconds that a collective may take."),
];

const LOG: &[Key] = &[
    key("tensorboard", Bool, Toml("false"), "Write TensorBoard event files."),
    key(
        "sample",
        Text,
        Absent("no reply is shown"),
        "A prompt that the model answers before and after training, on the terminal and in metrics.jsonl.",
    ),
];

/// Calls `f` with the dotted path of every key, lists of tables as `train.0`.
pub fn each(f: &mut dyn FnMut(&str, &'static Key)) {
    walk(ROOT, "", f);
}

fn walk(keys: &'static [Key], prefix: &str, f: &mut dyn FnMut(&str, &'static Key)) {
    for k in keys {
        let path = super::tree::join(prefix, k.name);
        f(&path, k);
        match k.kind {
            Kind::Table(inner) => walk(inner, &path, f),
            Kind::Tables(inner) => walk(inner, &format!("{path}.0"), f),
            _ => {}
        }
    }
}
