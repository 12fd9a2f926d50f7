//! Length of a run, batches, evaluations, checkpoints, precision, ranks, logs.

use super::context::{Context, Convert, Fate, Outcome, conversions, converted, needless, refused};
use super::draft::number_text;
use super::prefer::reads_pairs;
use super::read::{Entry, is_off, number, text, truth, words};
use crate::keys::{Interval, Kind, Task, find_key};
use crate::syntax::quote;
use serde_json::Value;

/// Rows of a forward pass, by the toolkits' names.
const MICRO: &[&str] = &["micro_batch_size", "per_device_train_batch_size", "batch_size"];
/// Ranks as named by accelerate and TRL, and per node by torchrun and deepspeed, with the nodes.
const RANKS: [&str; 2] = ["launch.num_processes", "num_processes"];
const OF_NODE: [&str; 3] = ["launch.nproc_per_node", "launch.nproc-per-node", "launch.num_gpus"];
const NODES: [&str; 2] = ["launch.nnodes", "launch.num_nodes"];

conversions! {
    accumulation, total_batch, steps, steps_an_epoch, every, strategy, per_epoch, clip, precision, dtype, device,
    deepspeed, fsdp, launch, plugins, report_to, sampling, kept, epochs, timeout, best, greater;
    "patience" => |ctx, e| ctx.take("run.patience", e),
    "saved" => |ctx, e| if e.line == 0 { per_epoch(ctx, e) } else { ctx.take("run.save_every", e) },
    "fsdp_version" => |ctx, e| match (number(&e.value), ctx.get("fsdp").is_none_or(is_off)) {
        (Some(2.0), true) if ctx.entries.list.iter().any(|e| e.path.starts_with("fsdp_config.")) => {
            zero(ctx, 3, e)
        }
        _ => needless("parallel.zero has no further settings"),
    },
    "cpu" => |ctx, e| ctx.switch("run.device", quote("cpu"), e),
    "offload" => |ctx, e| ctx.switch("memory.offload", OFFLOAD, e)
}

/// `memory.offload` of FSDP's option.
const OFFLOAD: &str = "[\"params\", \"optimizer\"]";

/// Ranks that the command starts; 1 if it does not say.
fn ranks(ctx: &Context<'_>) -> f64 {
    let of = |keys: &[&str]| ctx.number(keys).filter(|n| *n >= 1.0);
    let on_nodes = || Some(of(&OF_NODE)? * of(&NODES).unwrap_or(1.0));
    of(&RANKS).or_else(on_nodes).unwrap_or(1.0)
}

fn accumulation(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    if ctx.tool == "axolotl" && ctx.number(&["batch_size"]).is_some_and(|n| n >= 1.0 && n.fract() == 0.0) {
        return needless("batch_size has the rows of a step");
    }
    let (micro, ranks) = (ctx.number(MICRO).unwrap_or(1.0), ranks(ctx));
    let Some(accumulated) = number(&e.value) else { return refused("a number is wanted: run.batch_rows") };
    let set = ctx.set("run.batch_rows", number_text(micro * accumulated * ranks), e);
    let more = if ranks > 1.0 { "" } else { "; with more cards, times their number" };
    converted(format!("{set}: {micro} rows x {accumulated} x {ranks} rank(s){more}"))
}

fn total_batch(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match ctx.take("run.batch_rows", e) {
        Outcome(Fate::Taken, set) => converted(set + ": rows of a step"),
        other => other,
    }
}

/// Epochs, unless a number of steps ends the run.
fn epochs(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let of_steps = |key: &&str| ctx.number(&[*key]).is_some_and(|n| n >= 1.0);
    match ["max_steps", "max_steps_per_epoch"].into_iter().find(of_steps) {
        Some(key) => needless(format!("{key} says the length")),
        None => ctx.take("run.epochs", e),
    }
}

fn steps(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match number(&e.value) {
        Some(n) if n >= 1.0 => ctx.take("run.steps", e),
        _ => needless("off: the epochs say the length"),
    }
}

fn steps_an_epoch(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let Some(n) = number(&e.value) else { return needless("not set") };
    let epochs = ctx.number(&["epochs"]).unwrap_or(1.0);
    let set = ctx.set("run.steps", number_text(n * epochs), e);
    converted(format!("{set}: {n} steps x {epochs} epoch(s), also where an epoch has fewer"))
}

/// `eval_steps`, `save_steps`: a number of steps, or a share of all.
fn every(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let saves = e.path.starts_with("save");
    let (key, strategy) =
        if saves { ("run.save_every", "save_strategy") } else { ("run.eval_every", "eval_strategy") };
    let strategy = ctx.word(strategy) + &if saves { String::new() } else { ctx.word("evaluation_strategy") };
    if matches!(strategy.as_str(), "no" | "false" | "epoch" | "best") {
        return needless(format!("the strategy is {strategy:?}"));
    }
    match number(&e.value) {
        Some(x) if x > 0.0 && x < 1.0 => converted(ctx.set(key, quote(&Interval::percent_text(x)), e)),
        _ => ctx.take(key, e),
    }
}

fn strategy(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let saves = e.path.starts_with("save");
    let key = if saves { "run.save_every" } else { "run.eval_every" };
    let implied = match ctx.tool {
        _ if saves || ctx.get("eval_steps").is_some() => None,
        "TRL" => Some(10.0),
        "LLaMA-Factory" => Some(500.0),
        _ => None,
    };
    match (text(&e.value).unwrap_or_default().as_str(), implied) {
        ("steps", Some(logged)) => {
            let steps = ctx.number(&["logging_steps"]).filter(|n| *n >= 1.0).unwrap_or(logged);
            converted(ctx.set(key, number_text(steps), e) + ": logging_steps, without eval_steps")
        }
        ("steps", None) => needless("so it is here too"),
        ("no" | "false" | "", _) => needless(format!("{key} is 0: once, at the end")),
        ("epoch", _) => converted(ctx.set(key, quote("epoch"), e)),
        (other, _) => refused(format!("{other}: {key} takes steps, {}", Interval::SPELT)),
    }
}

/// `saves_per_epoch` and its kin; by default a checkpoint is written at the end of each epoch.
fn per_epoch(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    if is_off(&e.value) {
        return needless("off");
    }
    let said = ["save_steps", "save_strategy"].iter().any(|key| ctx.get(key).is_some());
    if e.line == 0 && (said || ctx.number(&["num_epochs", "epochs"]).is_none_or(|n| n <= 1.0)) {
        return needless("so it is here too");
    }
    let key = if e.path.starts_with("save") { "run.save_every" } else { "run.eval_every" };
    match number(&e.value) {
        Some(1.0) => converted(ctx.set(key, quote("epoch"), e)),
        Some(n) if n.fract() == 0.0 => converted(ctx.set(key, quote(&format!("epoch/{n}")), e)),
        _ => refused(format!("a whole number is wanted: {key}")),
    }
}

/// `save_total_limit`: without it the toolkit keeps every checkpoint.
fn kept(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let saves = !matches!(ctx.word("save_strategy").as_str(), "no" | "false");
    match e.line {
        0 if saves => refused("every checkpoint is kept there, here the newest run.keep, 2 by default"),
        0 => needless("there are no checkpoints on the way"),
        _ => ctx.take("run.keep", e),
    }
}

/// `metric_for_best_model`, with or without `eval_`.
fn best(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let word = text(&e.value).unwrap_or_default();
    let has_accuracy = reads_pairs(ctx.task) && ctx.task != Task::Kto;
    match word.strip_prefix("eval_").unwrap_or(&word) {
        _ if is_off(&e.value) => needless("not set"),
        "loss" => converted(ctx.set("run.best", quote("loss"), e)),
        "accuracy" | "rewards/accuracies" if has_accuracy => {
            converted(ctx.set("run.best", quote("accuracy"), e))
        }
        _ => refused(format!("{word}: run.best takes loss, or the accuracy of pairs and of classes")),
    }
}

/// `greater_is_better` of `metric_for_best_model`, by default the loss.
fn greater(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let metric = ctx.word("metric_for_best_model");
    match truth(&e.value) {
        None => needless("not set"),
        Some(greater) if greater != (metric.is_empty() || metric.ends_with("loss")) => {
            needless("so it is here too")
        }
        _ => refused("run.best = \"loss\" is the lowest one, \"accuracy\" the highest one"),
    }
}

/// `ddp_timeout`, in seconds: the longest in place of longer ones.
fn timeout(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    const KEY: &str = "parallel.timeout";
    match (number(&e.value), find_key(KEY).map(|k| k.kind)) {
        (Some(n), Some(Kind::Int(_, most))) if n > most as f64 => match ranks(ctx) > 1.0 {
            true => converted(ctx.set(KEY, most.to_string(), e) + ": the longest"),
            false => needless("one rank waits for no other"),
        },
        _ => ctx.take(KEY, e),
    }
}

fn clip(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match number(&e.value) {
        Some(_) if e.line > 0 => ctx.take("run.clip", e),
        _ => {
            let set = ctx.set("run.clip", "0", e);
            converted(format!("{set}: gradients are not clipped"))
        }
    }
}

/// `bf16`, `fp16` and their like: true, false, "auto", "full".
fn precision(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let dtype = match e.path.trim_start_matches("pure_") {
        "bf16" | "bfloat16" => "bf16",
        "fp16" | "float16" => "f16",
        _ => "f32",
    };
    // a default gives way to f16 in the file
    let other = e.line == 0 && ["fp16", "float16"].iter().any(|k| ctx.is(k));
    if text(&e.value).as_deref() == Some("auto") {
        return needless("bf16 on CUDA, f32 on the CPU");
    }
    let on = truth(&e.value).unwrap_or(text(&e.value).is_some_and(|t| t == "full"));
    match on && !other {
        true => converted(ctx.set("model.dtype", quote(dtype), e)),
        false if dtype == "bf16" && e.line > 0 && is_f32(ctx) => {
            converted(ctx.set("model.dtype", quote("f32"), e))
        }
        false => needless("off"),
    }
}

/// Whether a file with bf16 off trains in f32; LLaMA-Factory takes the data type of the checkpoint then.
fn is_f32(ctx: &Context<'_>) -> bool {
    let off = |key: &str| matches!(ctx.word(key).as_str(), "" | "false");
    let all = ["bf16", "bfloat16", "fp16", "float16", "dtype", "torch_dtype"];
    ctx.tool != "LLaMA-Factory" && all.into_iter().all(off)
}

fn dtype(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    if let Some(on) = ["bf16", "fp16"].into_iter().find(|k| ctx.is(k)) {
        return needless(format!("{on} says the arithmetic; master weights are f32"));
    }
    if text(&e.value).as_deref() == Some("auto") {
        return needless("bf16 on CUDA, f32 on the CPU");
    }
    ctx.take_word("model.dtype", e)
}

fn device(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match text(&e.value).unwrap_or_default().as_str() {
        "cpu" => ctx.take("run.device", e),
        "cuda" => needless("a CUDA device is taken where there is one"),
        other => refused(format!("{other}: run.device is cuda or cpu")),
    }
}

/// ZeRO: written with several ranks, else a hint.
fn zero(ctx: &mut Context<'_>, stage: u8, e: &Entry) -> Outcome {
    if ranks(ctx) > 1.0 {
        return converted(ctx.set("parallel.zero", stage.to_string(), e));
    }
    needless(format!("one rank splits nothing; with parallel.data = N cards: parallel.zero = {stage}"))
}

/// ZeRO stage in the name of a DeepSpeed configuration: the digit behind `zero`, `stage` or `z`.
fn named_stage(path: &str) -> Option<u64> {
    let name = path.rsplit('/').next().unwrap_or_default().to_lowercase();
    let digit = |rest: &str| rest.trim_start_matches(['_', '-']).chars().next()?.to_digit(10);
    ["zero", "stage", "z"]
        .into_iter()
        .find_map(|mark| name.split(mark).skip(1).find_map(digit))
        .map(u64::from)
}

/// ZeRO stage of a DeepSpeed configuration, from the file or the file name, and offload from the file.
fn deepspeed(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let Some(path) = text(&e.value).filter(|_| !is_off(&e.value)) else { return needless("off") };
    let inside =
        ctx.around.read(&path).and_then(|t| serde_json::from_str::<Value>(&t).ok()).unwrap_or_default();
    let theirs = &inside["zero_optimization"];
    let stage = theirs["stage"].as_u64().or_else(|| named_stage(&path)).filter(|s| *s <= 3);
    let Some(stage) = stage else {
        return refused("parallel.zero = 0 to 3, and memory.offload, say what it does");
    };
    let on = |device: &str| {
        let parts = [("offload_param", "params"), ("offload_optimizer", "optimizer")].into_iter();
        parts.filter(|(key, _)| theirs[*key]["device"] == device).map(|(_, ours)| ours).collect::<Vec<_>>()
    };
    let (host, disk) = (on("cpu"), on("nvme"));
    let Outcome(fate, mut told) = zero(ctx, stage as u8, e);
    if !host.is_empty() {
        told = format!("{}; {told}", ctx.set("memory.offload", format!("{host:?}"), e));
    }
    match (host.is_empty(), disk.is_empty()) {
        (_, false) => refused(format!("{told}; memory.offload keeps {disk:?} in host memory, not on NVMe")),
        (true, true) => Outcome(fate, told),
        (false, true) => converted(told),
    }
}

fn fsdp(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let all: Vec<String> =
        words(&e.value).iter().flat_map(|w| w.split_whitespace()).map(String::from).collect();
    let has = |w: &str| all.iter().any(|a| a == w);
    let Outcome(fate, told) = match () {
        () if is_off(&e.value) => needless("off"),
        () if has("shard_grad_op") => zero(ctx, 2, e),
        () if has("full_shard") || truth(&e.value) == Some(true) => zero(ctx, 3, e),
        () => refused("parallel.zero = 2 or 3, and memory.offload = [\"params\"]"),
    };
    match has("offload") && fate < Fate::NotSupported {
        true => converted(format!("{}; {told}", ctx.set("memory.offload", OFFLOAD, e))),
        false => Outcome(fate, told),
    }
}

/// Flags of a launcher.
fn launch(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match e.path.as_str() {
        path if RANKS.contains(&path) || OF_NODE.contains(&path) => match ranks(ctx) {
            _ if matches!(text(&e.value).as_deref(), Some("gpu" | "auto")) => {
                refused("all cards of the machine: parallel.data = their number, run.batch_rows times it")
            }
            ranks if ranks > 1.0 => converted(ctx.set("parallel.data", number_text(ranks), e)),
            _ => needless("one rank"),
        },
        "launch.config_file" | "accelerate_config" => refused(
            "accelerate's file is not read: write its ZeRO stage (parallel.zero), ranks (parallel.data), offload \
             (memory.offload) and precision (model.dtype)",
        ),
        "launch.fsdp_offload_params" => ctx.switch("memory.offload", OFFLOAD, e),
        _ => needless("torchrun, srun, mpirun or parallel.local start processes; [parallel] has the layout"),
    }
}

/// Plugins of axolotl: fused kernels, or others.
fn plugins(_: &mut Context<'_>, e: &Entry) -> Outcome {
    let fused = ["LigerPlugin", "CutCrossEntropyPlugin", "KernelsPlugin", "ExpertParallelPlugin"];
    let all = words(&e.value);
    let names = all.iter().filter_map(|path| path.rsplit('.').next());
    let others: Vec<&str> = names.filter(|name| !fused.contains(name)).collect();
    match (all.is_empty(), others.is_empty()) {
        (true, _) => needless("off"),
        (_, true) => needless("fused kernels are always used"),
        _ => refused(format!("{}: not taken over", others.join(", "))),
    }
}

/// `train_sampling_strategy`; its default is of KTO alone.
fn sampling(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    match text(&e.value).unwrap_or_default().to_lowercase().as_str() {
        _ if e.line == 0 && ctx.task != Task::Kto => needless("so it is here too"),
        "" | "random" => needless("so it is here too"),
        "sequential" => converted(ctx.set("data.shuffle", "false", e)),
        _ => refused("rows come in random order, or in the file's with data.shuffle = false"),
    }
}

fn report_to(ctx: &mut Context<'_>, e: &Entry) -> Outcome {
    let mut refuse: Vec<String> = Vec::new();
    let mut set = Vec::new();
    for tracker in words(&e.value) {
        match tracker.as_str() {
            "none" | "" => {}
            "tensorboard" => set.push(ctx.set("log.tensorboard", "true", e)),
            "mlflow" => match ctx.get("MLFLOW_TRACKING_URI").and_then(text) {
                Some(server) => set.push(ctx.set("log.mlflow", quote(&server), e)),
                None => refuse.push("mlflow (write log.mlflow = the address of its server)".into()),
            },
            "all" => refuse.push("all trackers".into()),
            _ => refuse.push(tracker),
        }
    }
    match (refuse.is_empty(), set.is_empty()) {
        (true, true) => needless("no tracker; metrics.jsonl has every step"),
        (true, false) => converted(set.join(", ")),
        (false, _) => {
            let also = if set.is_empty() { String::new() } else { format!("{}; ", set.join(", ")) };
            refused(format!(
                "{also}{}: metrics.jsonl, log.csv, log.tensorboard and log.mlflow have every step",
                refuse.join(", ")
            ))
        }
    }
}
