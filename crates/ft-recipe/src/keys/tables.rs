//! All keys of a recipe. Each key is one entry of a table; checks, JSON schema, typed recipe and
//! resolved recipe are generated from the entries.

use super::checked::{Checked, Section};
use super::data_words::*;
use super::field::{Field, Formatted, Json, Keys};
use super::interval::Interval;
use super::kind::{Bound, INDEX, Key, Kind, Unset};
use super::macros::{doc, table};
use super::sets::*;
use super::words::*;
use crate::syntax::Diagnostic;
use Kind::{
    Anything, Betas, Bool, Bytes, Counts, Devices, Every, Experts, Int, IntOrAuto, Layers, Modules, Name,
    Number, Strings, Table, Tables, Text, Texts, Tokens, Word, Words,
};
use Unset::{Absent, Required, Toml};
use ft_base::error::Location;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Largest integer guaranteed by TOML.
const BIG: u64 = i64::MAX as u64;
/// Upper bound on counts: beyond practical use, and small enough that a product of two fits in 64 bits.
pub const COUNT: u64 = 1_000_000_000;
/// Largest number of rows of a micro-batch. Plans list their documents.
pub(crate) const MICRO_ROWS: u64 = 1 << 16;
/// Log-probabilities of a teacher for each token that `ft logits` writes by default.
pub const TOP_K: usize = 64;
/// Largest number of classes.
pub const MAX_LABELS: usize = 1 << 16;
const RANK: Kind = Int(1, INDEX);
const RANKS: Kind = Int(1, INDEX);

table! {
    /// A whole recipe.
    pub struct Recipe {
        /// Version of the recipe format.
        version: u32 = Int(1, 1), Toml("1");
        /// Name of the run.
        name: String = Name, Absent("the file's stem");
        /// What is trained for.
        task: Task = Word(Task::WORDS), Toml("\"sft\"");
        /// The base model.
        model: Model = Table(Model::KEYS), Required;
        /// Defaults of every rule that says method = "lora".
        lora: Lora = Table(Lora::KEYS), Toml("{}");
        /// What trains: rules in order, a later rule wins where two match; what no rule matches is frozen. At
        /// least one rule, or an adapter in lora.init.
        train: Vec<Rule> = Tables(Rule::KEYS), Toml("[]");
        /// Loss of pairs and rated completions (tasks dpo, orpo, simpo, cpo, kto).
        preference: Preference = Table(Preference::KEYS), Toml("{}");
        /// Loss on a teacher's probabilities (task distill).
        distill: Distill = Table(Distill::KEYS), Toml("{}");
        /// Classes of task classify.
        classify: Classify = Table(Classify::KEYS), Toml("{}");
        /// Losses on the routers of mixture models.
        router: Router = Table(Router::KEYS), Toml("{}");
        /// Training and evaluation data.
        data: Data = Table(Data::KEYS), Required;
        /// Evaluation by generation, beside the loss.
        generate: Generate = Table(Generate::KEYS), Toml("{}");
        /// Length of the run, batches, and where it writes.
        run: Run = Table(Run::KEYS), Toml("{}");
        /// The optimizer and its schedule.
        optimizer: Optimizer = Table(Optimizer::KEYS), Toml("{}");
        /// What is kept, recomputed and moved.
        memory: Memory = Table(Memory::KEYS), Toml("{}");
        /// How ranks share the work. In place of the table, `parallel = "auto"` takes the fastest layout that `ft plan
        /// --devices` finds for the started processes, or for the CUDA devices of this machine.
        parallel: Parallel = Table(Parallel::KEYS), Toml("{}");
        /// A server beside the training.
        serve: Serve = Table(Serve::KEYS), Toml("{}");
        /// Extra logs.
        log: Log = Table(Log::KEYS), Toml("{}");
        ..
        /// Folder of the recipe file, for relative paths; empty if the recipe is not from a file.
        pub folder: PathBuf,
        /// Positions of keys in the recipe, by dotted path.
        pub(crate) places: BTreeMap<String, Location>,
        /// Dotted paths of given keys with another value than their default; of a rule, all.
        pub(crate) changed: BTreeSet<String>,
        /// A value that this build of `ft run` does not support. Always `None` after `load`, which rejects it.
        pub not_built: Option<Diagnostic>,
        /// `parallel = "auto"`, with a layout still to be chosen; `parallel` has the defaults.
        pub auto_layout: bool,
    }
}

table! {
    /// `[model]`
    pub struct Model {
        /// Hub id such as Qwen/Qwen3-8B, or a local folder (one with config.json alone can be planned, or run
        /// with weights = "random").
        source: String = Text, Required;
        /// Branch, tag or commit on the hub.
        revision: String = Text, Toml("\"main\"");
        /// Type of the arithmetic and of frozen weights. On the CPU an f32 run keeps matrices that are stored in half
        /// precision as they are.
        dtype: Option<Dtype> = Word(Dtype::WORDS), Absent("bf16 on CUDA, f32 on the CPU");
        /// 4-bit weights: decoder linears only; head, embedding, norms, routers and what trains in full stay.
        quantize: Quantize = Word(Quantize::WORDS), Toml("\"none\"");
        /// A folder where the model that quantize makes is kept, and loaded from at the next start.
        cache: Option<PathBuf> = Text, Absent("the model is quantized again at each start");
        /// Where the weights come from.
        weights: Weights = Word(Weights::WORDS), Toml("\"load\"");
        /// Keys of the model's config.json to replace.
        overrides as "override": Json = Anything, Toml("{}");
    }
}

table! {
    /// `[lora]`
    pub struct Lora {
        /// Inner width of the update.
        rank: usize = RANK, Toml("16");
        /// Scale: the update is multiplied by alpha / rank (with rslora: alpha / sqrt(rank)).
        alpha: f64 = Number(Bound::Alpha), Toml("32");
        /// Probability that an input of A is zeroed in training.
        dropout: f64 = Number(Bound::BelowOne), Toml("0.0");
        /// Scale by sqrt(rank) in place of rank.
        rslora: bool = Bool, Toml("false");
        /// Weight-decomposed: a trained magnitude for each output row.
        dora: bool = Bool, Toml("false");
        /// "default": A Kaiming-uniform, B zero. "pissa": the update begins as the truncated SVD of the weight;
        /// "olora": as the leading part of its QR decomposition. Both are subtracted from the base; the saved adapter
        /// has twice the rank and fits the unchanged base. "loftq": the update begins as the truncated SVD of the error
        /// of model.quantize. These three leave embeddings and experts with one adapter a layer at the default, "loftq"
        /// the head too. Else the path or hub id of a PEFT adapter to continue from.
        init: Init = Text, Toml("\"default\"");
    }
}

table! {
    /// One `[[train]]` rule.
    pub struct Rule {
        /// Groups (attention, mlp, experts, router, norms, recurrence, per_layer, sinks, router_scales, embedding,
        /// head), last components of module names (q_proj, w1, gate), or "/regex/" that must match a whole module name;
        /// or new_tokens.
        modules: Vec<String> = Modules, Required;
        /// With modules = ["new_tokens"], the tokens with trained rows, by text or number. They train alone,
        /// from their values in the model, and become PEFT's trainable_token_indices. A text that the tokenizer
        /// does not have is added to it, with the next number; the embedding must have a row for that.
        tokens: Option<Vec<Token>> = Tokens, Absent("the rule is of modules");
        /// "all", "3", "0-5", "24-", "-6:" (the last six) or [0, 3, 5]; given as anything but all, the rule
        /// matches inside layers only.
        layers: Option<LayerSet> = Layers, Toml("\"all\"");
        /// "all", "0-3" or [0, 7]; a rule that has this key matches inside experts only.
        experts: Option<IndexSet> = Experts, Absent("the rule does not ask for experts");
        /// Training method of the matched modules.
        method: Method = Word(Method::WORDS), Toml("\"lora\"");
        /// Rank of this rule.
        rank: Option<usize> = RANK, Absent("lora.rank");
        /// Alpha of this rule.
        alpha: Option<f64> = Number(Bound::Alpha), Absent("lora.alpha");
        /// Dropout of this rule.
        dropout: Option<f64> = Number(Bound::BelowOne), Absent("lora.dropout");
        /// rsLoRA for this rule.
        rslora: Option<bool> = Bool, Absent("lora.rslora");
        /// DoRA for this rule.
        dora: Option<bool> = Bool, Absent("lora.dora");
        /// Factor on the learning rate.
        lr_scale: f64 = Number(Bound::Positive), Toml("1.0");
        ..
        /// Position of the rule in the recipe.
        pub place: Location,
    }
}

table! {
    /// `[preference]`
    pub struct Preference {
        /// For task "dpo", "sigmoid" or "ipo"; for another task the task's name.
        loss: Option<PreferenceLoss> = Word(PreferenceLoss::WORDS), Absent("\"sigmoid\" for dpo, else the task's name");
        /// Scale of the rewards.
        beta: Option<f64> = Number(Bound::Positive), Absent("0.1; for simpo 2.0");
        /// Share of pairs taken as labeled the wrong way round (losses "sigmoid", "simpo", "cpo").
        label_smoothing: f64 = Number(Bound::BelowOne), Toml("0.0");
        /// Margin of rewards to reach (simpo).
        gamma: f64 = Number(Bound::NotNegative), Toml("1.0");
        /// Weight of the mean negative log-likelihood of the chosen completion (cpo).
        nll: f64 = Number(Bound::NotNegative), Toml("1.0");
        /// Weight of desirable completions (kto).
        desirable_weight: f64 = Number(Bound::NotNegative), Toml("1.0");
        /// Weight of undesirable completions (kto).
        undesirable_weight: f64 = Number(Bound::NotNegative), Toml("1.0");
        /// The model that rewards are relative to (dpo, kto): "base" (adapters off; what trains in full as the run
        /// begins), "start" (as the run begins, adapters on), the path of an adapter over the model or of a run, or the
        /// path or hub id of another model with the same tokenizer. It makes one pass before training, and is not kept
        /// in memory.
        reference: Reference = Text, Toml("\"base\"");
    }
}

table! {
    /// `[distill]`
    pub struct Distill {
        /// Divides the logits of teacher and student before the softmax.
        temperature: f64 = Number(Bound::Positive), Toml("1.0");
        /// Weight of the divergence from the teacher, temperature^2 KL(teacher, student); 1 - alpha is the weight of
        /// the cross-entropy of the labels.
        alpha: f64 = Number(Bound::Share), Toml("0.5");
    }
}

table! {
    /// `[classify]`
    pub struct Classify {
        /// Names of the classes, in the order of the outputs.
        labels: Vec<String> = Texts, Toml("[]");
        /// Number of classes without names of their own, which are then LABEL_0, LABEL_1 and so on.
        num_labels: Option<usize> = Int(2, MAX_LABELS as u64), Absent("that of labels");
    }
}

table! {
    /// `[router]`
    pub struct Router {
        /// Coefficient of the load-balancing loss.
        aux_loss: f64 = Number(Bound::NotNegative), Toml("0.0");
        /// Coefficient of the z-loss.
        z_loss: f64 = Number(Bound::NotNegative), Toml("0.0");
    }
}

table! {
    /// `[data]`
    pub struct Data {
        /// Training data, one table a source; at least one.
        train: Vec<Source> = Tables(Source::KEYS), Required;
        /// Evaluation data, one table a source.
        eval: Vec<Source> = Tables(Source::KEYS), Toml("[]");
        /// Share of each training source's samples that is evaluated on and not trained on, chosen by run.seed.
        eval_share: f64 = Number(Bound::BelowOne), Toml("0.0");
        /// Tokens a row at the most.
        max_length: usize = Int(2, 100_000_000), Toml("2048");
        /// What happens to a longer sample.
        over_length: OverLength = Word(OverLength::WORDS), Toml("\"truncate\"");
        /// Handling of unusable rows.
        on_bad_row: OnBadRow = Word(OnBadRow::WORDS), Toml("\"error\"");
        /// Largest share of a source's rows that may be left out, for any reason, before a command refuses the data.
        /// Beyond half the length or the format is most likely wrong.
        drop_share: f64 = Number(Bound::Share), Toml("0.5");
        /// Whether tokens are kept on disk, for later commands and so that they need no memory.
        cache: bool = Bool, Toml("true");
        /// Whether documents share a row (never attention; positions restart). A row of pairs or rated completions is
        /// always one of them: no row is padded.
        pack: bool = Bool, Toml("true");
        /// Whether rows come in random order.
        shuffle: bool = Bool, Toml("true");
        /// What is supervised. In rows with labels (formats tokens and labeled), the labels say it.
        mask: Option<Mask> = Word(Mask::WORDS), Absent("what the format supports");
        /// A file with a chat template to use instead of the model's own.
        chat_template: Option<PathBuf> = Text, Absent("the model's own");
        /// Variables for the chat template.
        template: Json = Anything, Toml("{}");
        /// NEFTune: in training, uniform noise on the embeddings of a document of L tokens, within this over the square
        /// root of L times the model's width; 5 is usual, 0 is off.
        neftune: f64 = Number(Bound::NotNegative), Toml("0.0");
        ..
        /// Targets of a score head, by the task.
        pub scores: ScoreTargets,
        /// Whether rows need a teacher's values, by the task.
        pub taught: bool,
    }
}

table! {
    /// One source of `[[data.train]]` or `[[data.eval]]`.
    pub struct Source {
        /// A file of rows (.jsonl, .json, .csv, .tsv, .txt, each also with .gz or .zst; .parquet, .arrow), a folder of
        /// such files or of `save_to_disk`, a pattern (data/*.jsonl), or a hub dataset.
        source: String = Text, Required;
        /// The shape of the rows.
        format: Option<Format> = Word(Format::WORDS), Absent("what fits the first row, and said");
        /// How rows of prompt and completion, question and answer, or instruction become text, and the texts of pairs
        /// and rated completions.
        form: Option<Form> = Word(Form::WORDS),
            Absent("chat if the model has a chat template, plain for pairs and rated completions, and said");
        /// How often an epoch holds each sample of this source: 2.0 twice, 0.5 half of them. The same in each epoch.
        weight: f64 = Number(Bound::Positive), Toml("1.0");
        /// Split of a hub dataset, of a folder of `save_to_disk`, or of a folder with files named after splits, and a
        /// slice of its rows or of a file's: `train[:20%]`, `train[100:200]`, `[-50:]`.
        split: Option<String> = Text, Absent("the dataset's only one");
        /// Rows of this source that are read at the most: the first ones, of the slice.
        max_samples: Option<usize> = Int(1, COUNT), Absent("all");
        /// Config of a hub dataset.
        config: Option<String> = Text, Absent("the dataset's default, or only one");
        /// Branch, tag or commit of a hub dataset.
        revision: Option<String> = Text, Absent("main");
        /// Encoding of the files, by its name in the WHATWG's Encoding Standard: "windows-1252" (for Latin-1 too),
        /// "utf-16le", "shift_jis". A byte order mark goes before it; Parquet has none.
        encoding: Option<String> = Text, Absent("UTF-8, or UTF-16 by its byte order mark");
        /// Names of fields where the file differs from the format: the format's name = "the file's name".
        fields: BTreeMap<String, String> = Strings, Toml("{}");
        /// What is supervised in this source.
        mask: Option<Mask> = Word(Mask::WORDS), Absent("data.mask");
        ..
        /// Position of the source in the recipe.
        pub place: Location,
        /// Downloaded files of a hub dataset; empty for local sources.
        pub fetched: Vec<PathBuf>,
    }
}

table! {
    /// `[run]`
    pub struct Run {
        /// Seed of every random number of the run.
        seed: u64 = Int(0, BIG), Toml("0");
        /// Passes over the rows.
        epochs: f64 = Number(Bound::Positive), Toml("1");
        /// Optimizer steps; wins over epochs.
        steps: Option<usize> = Int(1, COUNT), Absent("by epochs");
        /// Rows an optimizer step, over all ranks.
        batch_rows: usize = Int(1, COUNT), Toml("16");
        /// Rows a forward pass, a rank: batch_rows must divide by micro_rows x data ranks; or "auto": the
        /// fastest number within memory.budget. Loss and gradients do not depend on it beyond rounding, but for
        /// router.aux_loss, which is a mean over micro-batches.
        micro_rows: MicroRows = IntOrAuto(1, MICRO_ROWS), Toml("1");
        /// Largest global gradient norm; 0 is off.
        clip: f64 = Number(Bound::NotNegative), Toml("1.0");
        /// Interval of evaluations, in steps or as a part of the run; 0 = at the end only.
        eval_every: Interval = Every(0, COUNT), Toml("0");
        /// Interval of checkpoints, in steps or as a part of the run; 0 = at the end only.
        save_every: Interval = Every(0, COUNT), Toml("0");
        /// Whether to evaluate before the first step too.
        eval_at_start: bool = Bool, Toml("false");
        /// Checkpoints that are kept.
        keep: usize = Int(1, COUNT), Toml("2");
        /// Keep the checkpoint of the best evaluation too, and write the result from it.
        keep_best: bool = Bool, Toml("false");
        /// What makes an evaluation the best one.
        best: Best = Word(Best::WORDS), Toml("\"loss\"");
        /// Evaluations in a row without a better one after which the run ends; 0 = it does not end early.
        patience: usize = Int(0, COUNT), Toml("0");
        /// The run folder; {name} is filled in.
        output: PathBuf = Text, Toml("\"runs/{name}\"");
        /// Where to compute.
        device: Device = Word(Device::WORDS), Toml("\"auto\"");
    }
}

table! {
    /// `[optimizer]`
    pub struct Optimizer {
        /// The optimizer.
        name: OptimizerName = Word(OptimizerName::WORDS), Toml("\"adamw\"");
        /// Peak learning rate; a rule's lr_scale multiplies it.
        lr: Option<f64> = Number(Bound::Positive), Absent("2e-4 for what trains by LoRA, 1e-5 for what trains in full");
        /// Factor on the learning rate of LoRA's B and magnitudes, embeddings apart (LoRA+): 16 is usual there, with a
        /// lower lr.
        lr_scale_b: f64 = Number(Bound::Positive), Toml("1.0");
        /// Decay rates of the two moments.
        betas: [f64; 2] = Betas, Toml("[0.9, 0.999]");
        /// Added to the denominator.
        eps: f64 = Number(Bound::Positive), Toml("1e-8");
        /// Decoupled weight decay.
        weight_decay: f64 = Number(Bound::NotNegative), Toml("0.0");
        /// What decays.
        decay: Decay = Word(Decay::WORDS), Toml("\"matrices\"");
        /// Shape of the learning rate over the run.
        schedule: Schedule = Word(Schedule::WORDS), Toml("\"cosine\"");
        /// Updates over which the learning rate rises: update i (from 0) has lr * (i + 1) / warmup.
        warmup_steps: usize = Int(0, COUNT), Toml("0");
        /// Warm-up as a share of all steps, rounded up; instead of warmup_steps.
        warmup_ratio: Option<f64> = Number(Bound::Share), Absent("by warmup_steps");
        /// Learning rate at the end.
        min_lr: f64 = Number(Bound::NotNegative), Toml("0.0");
        /// Update each layer at the end of its backward pass, with the gradients of one layer in memory: needs
        /// one micro-batch a step, run.clip = 0 and no f16. The bits are those of an update at the end.
        in_backward: bool = Bool, Toml("false");
        /// Whether weights that train in full have f32 master weights, where layers compute in 16 bits: without them an
        /// update is computed in f32 and rounded up or down by random numbers, so that its mean is right, and a weight
        /// takes 4 bytes less. LoRA has them always, and so has what trains in full in a layer with DoRA.
        master: Master = Word(Master::WORDS), Toml("\"auto\"");
        /// GaLore: rank of the projection of a gradient, along its shorter side.
        galore_rank: usize = RANK, Toml("128");
        /// GaLore: updates between two computations of the projection.
        galore_gap: usize = Int(1, COUNT), Toml("200");
        /// GaLore: factor on the update of projected weights.
        galore_scale: f64 = Number(Bound::Positive), Toml("0.25");
    }
}

table! {
    /// `[memory]`
    pub struct Memory {
        /// Memory of one device that a run may use, such as "48GiB". On CUDA 4% of it stays free if possible. On the
        /// CPU it covers tensors and allocator overhead; code, tokenizer and data are counted as host memory.
        budget: Option<u64> = Bytes, Absent("95% of what is free");
        /// Host memory that a rank may use, to plan for another machine. On the CPU it holds the device's bytes
        /// too.
        host_budget: Option<u64> = Bytes, Absent("what is free");
        /// Bytes that a run may write in all, to plan for another machine.
        disk_budget: Option<u64> = Bytes, Absent("what is free on each disk");
        /// What is computed again in the backward pass, so that less is kept: "none"; "norms" (of each layer the norms'
        /// outputs, rotated queries and keys, and rows that enter experts: no product); "feed_forward" (its
        /// feed-forward block or experts too, attention not); "all" (layers from their inputs), or a number of layers,
        /// from the bottom; "auto" (layer by layer the fastest of these that fits memory.budget).
        recompute: Recompute = Kind::Recompute, Toml("\"auto\"");
        /// When the 4-bit weights of a recomputed layer are dequantized.
        dequantize: Dequantize = Word(Dequantize::WORDS), Toml("\"auto\"");
        /// Type of the operands of products with frozen weights of attention and dense feed-forward blocks in training:
        /// that of model.dtype, or "fp8": weights and inputs rounded to e4m3, output gradients to e5m2 (3 and 2 bits of
        /// mantissa), with f32 sums and bf16 results. Needs CUDA, bf16 and compute capability 8.9 or later (Ada,
        /// Hopper, Blackwell). Adapters, experts, the head, what trains in full, and weights of sizes that are no
        /// multiples of 16 stay in bf16. Losses change; ft bench shows the error.
        products: Products = Word(Products::WORDS), Toml("\"dtype\"");
        /// Tensors in host memory. Without the key: none on the CPU; on CUDA with memory.recompute = "auto" the plan
        /// may keep inputs of recomputed layers there, in at most half of the free host memory, if the run does not fit
        /// otherwise or a step gets 1% shorter. [] forbids it.
        offload: Option<Vec<Offload>> = Words(Offload::WORDS), Absent("nothing, or what the plan moves there");
        /// Factor on the loss that training in f16 begins with: halved when a gradient overflows, doubled after 2,000
        /// steps in which none does.
        scale: Option<u64> = Int(1, 1 << 24), Absent("65536");
        /// Whether host memory that values cross from and to is page-locked, for faster copies. Where the system
        /// refuses, a warning says so, and copies take pageable memory.
        pin: bool = Bool, Toml("true");
    }
}

table! {
    /// `[parallel]`
    pub struct Parallel {
        /// Ranks that split the rows.
        data: usize = RANKS, Toml("1");
        /// ZeRO stage.
        zero: u8 = Int(0, 3), Toml("0");
        /// Ranks that cut the matrices of a layer: heads of attention, and columns of the feed-forward. Number of key
        /// heads (of query heads, where there is one key head) and feed-forward width divide by it. Mixtures stay
        /// whole, and are computed on each rank's own tokens.
        tensor: usize = RANKS, Toml("1");
        /// Pipeline stages: each has consecutive layers, and micro-batches pass through all. The first has the
        /// embedding, the last the head.
        pipeline: usize = RANKS, Toml("1");
        /// Layers of each pipeline stage, from the bottom; empty cuts by the work of the layers and of the head.
        stages: Vec<usize> = Counts, Toml("[]");
        /// Ranks that split the experts of a mixture, in blocks of neighbors. They are among those of the other axes,
        /// and rows travel to them.
        expert: usize = RANKS, Toml("1");
        /// Ranks that split the tokens of a row, for rows that do not fit on one rank. A rank receives the keys and
        /// values visible to its segments. Cuts are at multiples of 128 tokens.
        context: usize = RANKS, Toml("1");
        /// Processes that `ft run` starts on this machine, one a device, in place of threads: all ranks, or with NNODES
        /// and NODE_RANK (PET_NNODES and PET_NODE_RANK; JOB_COMPLETION_INDEX) this machine's part of them. Not beside a
        /// launcher.
        local: Option<usize> = RANKS, Absent("threads on one machine; on several, ranks / NNODES");
        /// Transport of collectives.
        comm: Comm = Word(Comm::WORDS), Toml("\"auto\"");
        /// Seconds that a collective may take; processes wait for one another at the start for a minute at least.
        timeout: u64 = Int(1, 1_000_000), Toml("600");
    }
}

table! {
    /// `[generate]`
    pub struct Generate {
        /// Number of evaluation samples, from the first, that the model answers at each evaluation. The prompt is all
        /// text before the last supervised tokens; these are the expected answer, for exact match and ROUGE-L. 0 is
        /// off.
        samples: usize = Int(0, 1_000_000_000), Toml("0");
        /// Tokens of an answer at the most.
        max_new_tokens: usize = Int(1, 1_000_000), Toml("256");
        /// 0 takes the most likely token each time; else tokens are drawn, by run.seed.
        temperature: f64 = Number(Bound::NotNegative), Toml("0.0");
        /// A regular expression that takes the answer out of a text, as its first group or as its whole first match;
        /// the share of answers with the same as the sample's is told too.
        regex: Option<String> = Text, Absent("no such share");
    }
}

table! {
    /// `[serve]`
    pub struct Serve {
        /// While `ft run` trains, devices on which the newest checkpoint answers as `ft serve` does: each has a copy of
        /// the model, which answers a request at a time. None may be one that trains: "cuda:1" (the second), or "cpu",
        /// which is shared with a training on the CPU while it answers. The server is a process of its own, which ends
        /// with the run.
        devices: Vec<OneDevice> = Devices, Toml("[]");
        /// Port of this machine that it listens on; 0 takes a free one.
        port: u16 = Int(0, 65_535), Toml("8000");
    }
}

table! {
    /// `[log]`
    pub struct Log {
        /// Write TensorBoard event files, into tensorboard/ of the run folder.
        tensorboard: bool = Bool, Toml("false");
        /// Write steps and evaluations as a table too, metrics.csv of the run folder.
        csv: bool = Bool, Toml("false");
        /// Prompts that the model answers before training and at each evaluation, greedily and in the form of the
        /// training data; on the terminal, in metrics.jsonl and in the report.
        samples: Vec<String> = Texts, Toml("[]");
        /// Address of an MLflow server that gets metrics, keys, answers to log.samples and the end of the run:
        /// "http://localhost:5000". A server that does not answer never stops a run. Secrets are read from
        /// MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
        mlflow: Option<String> = Text, Absent("nothing is sent");
        /// The experiment on that server, made when missing. The run has the recipe's name.
        mlflow_experiment: Option<String> = Text, Absent("MLFLOW_EXPERIMENT_NAME, else \"ft\"");
    }
}
