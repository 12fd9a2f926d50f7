//! Plans vs. runs: planned peak memory is compared with allocations counted by the binary.

use super::world::{few, nightly};
use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use ft::files::write_file;
use ft::model::Config;
use ft::model::modules::{Group, modules};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

const FULL: &str =
    "[[train]]\nmodules = [\"attention\", \"mlp\", \"norms\", \"embedding\", \"head\"]\nmethod = \"full\"\n";
const LORA: &str = "[[train]]\nmodules = [\"attention\", \"mlp\"]\n";

/// A width of the models here: half of it at a push, where overhead that is not planned stays below 0.3% of a run.
fn width(n: usize) -> usize {
    if nightly() { n } else { n / 2 }
}

/// A config with 25 to 40 million parameters, about 10 million at a push.
fn config(family: &str, tied: bool) -> Value {
    let (model_type, architecture) = match family {
        "qwen2" => ("qwen2", "Qwen2ForCausalLM"),
        _ => ("qwen3", "Qwen3ForCausalLM"),
    };
    json!({
        "architectures": [architecture], "model_type": model_type, "hidden_size": width(512),
        "intermediate_size": width(1536), "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8000, "max_position_embeddings": 4096,
        "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied, "hidden_act": "silu",
    })
}

/// A mixture of experts with 45 million parameters, about 22 million at a push.
fn mixture() -> Value {
    let mut c = config("qwen3", false);
    for (key, value) in [
        ("architectures", json!(["Qwen3MoeForCausalLM"])),
        ("model_type", json!("qwen3_moe")),
        ("num_hidden_layers", json!(4)),
        ("num_experts", json!(16)),
        ("num_experts_per_tok", json!(4)),
        ("moe_intermediate_size", json!(384)),
        ("norm_topk_prob", json!(true)),
    ] {
        c[key] = value;
    }
    c
}

/// A mixture with a shared expert.
fn shared() -> Value {
    let mut c = mixture();
    for (key, value) in [
        ("architectures", json!(["Qwen2MoeForCausalLM"])),
        ("model_type", json!("qwen2_moe")),
        ("shared_expert_intermediate_size", json!(768)),
    ] {
        c[key] = value;
    }
    c
}

/// A few large experts, computed one by one; if all are chosen for every token, all have the same number of
/// rows.
fn mixtral() -> Value {
    let mut c = config("qwen3", false);
    for (key, value) in [
        ("architectures", json!(["MixtralForCausalLM"])),
        ("model_type", json!("mixtral")),
        ("num_hidden_layers", json!(3)),
        ("num_local_experts", json!(3)),
        ("num_experts_per_tok", json!(3)),
        ("intermediate_size", json!(1024)),
    ] {
        c[key] = value;
    }
    c
}

/// A vocabulary so large that a logit chunk is smaller than a row.
fn wide() -> Value {
    let mut c = config("qwen3", true);
    (c["vocab_size"], c["num_hidden_layers"]) = (json!(48_000), json!(2));
    c
}

/// LoRA in combination with many trained token rows.
fn rows() -> String {
    let tokens: Vec<usize> = (0..8000).step_by(25).collect();
    format!("{LORA}[[train]]\nmodules = [\"new_tokens\"]\ntokens = {tokens:?}\n")
}

/// Rows with 64 values of a teacher at each token.
const DISTILL: &str = "task=distill";
const EIGHT_BIT: &str = "optimizer.name=adamw8bit";
/// Updates in the backward pass, and the settings they require.
const ALL_AT_ONCE: &[&str] =
    &["optimizer.in_backward=true", "run.clip=0", "run.batch_rows=2", "run.micro_rows=2"];
const PARAMS: &str = "memory.offload=['params']";
const ACTIVATIONS: &str = "memory.offload=['activations']";
const ON_HOST: &str = "memory.offload=['optimizer', 'params', 'activations']";
const CUT: &str = "parallel.tensor=2";
const NF4: &str = "model.quantize=nf4";
const NORMS: &str = "memory.recompute=norms";
const FEED_FORWARD: &str = "memory.recompute=feed_forward";

const REWARD: &str = "task=reward";
const CLASSIFY: &str = "task=classify";

/// A checkpoint in half precision; in f32 runs, the matrices stay in half precision.
const LOAD: &str = "model.weights=load";

/// Writes small bf16 weights for the config in `dir`.
fn weights(dir: &Path) -> Result<()> {
    let mut tensors = Vec::new();
    let config = Config::load(dir, &serde_json::Map::new())?;
    for m in modules(&config).into_iter().filter(|m| !config.tied || m.group != Group::Head) {
        let (shape, cpu) = (m.weight_shape(), &Device::Cpu);
        let weight = match shape.len() {
            1 => Tensor::ones(shape, DType::BF16, cpu)?,
            _ => Tensor::randn(0f32, 0.02, shape, cpu)?.to_dtype(DType::BF16)?,
        };
        tensors.push((m.weight_name(), weight));
        if let Some(n) = m.bias() {
            tensors.push((format!("{}.bias", m.name), Tensor::zeros(n, DType::BF16, cpu)?));
        }
    }
    Ok(write_file(&dir.join("model.safetensors"), &tensors, &[])?)
}

/// Runs one step and returns planned and measured peak.
fn run(dir: &Path, config: &Value, rules: &str, lengths: &[usize], set: &[&str]) -> Result<(u64, u64)> {
    run_rows(dir, config, rules, lengths, set, |i, k| (i * 7919 + k * 104_729) % 8000)
}

/// As [`run`], on rows with token `i` of row `k` given by a function.
fn run_rows(
    dir: &Path,
    config: &Value,
    rules: &str,
    lengths: &[usize],
    set: &[&str],
    token: impl Fn(usize, usize) -> usize,
) -> Result<(u64, u64)> {
    std::fs::create_dir_all(dir.join("model"))?;
    std::fs::write(dir.join("model/config.json"), config.to_string())?;
    // Half of the tokens at a push.
    let shorter = if nightly() { 1 } else { 2 };
    let rows: String = lengths
        .iter()
        .map(|n| n / shorter)
        .enumerate()
        .map(|(k, n)| {
            let ids: Vec<usize> = (0..n).map(|i| token(i, k)).collect();
            let row = if set.contains(&REWARD) {
                json!({"prompt_ids": [], "chosen_ids": ids, "rejected_ids": &ids[..n / 2]})
            } else if set.contains(&CLASSIFY) {
                json!({"input_ids": ids, "label": k % 5})
            } else if set.contains(&DISTILL) {
                let kept: Vec<Vec<usize>> =
                    (0..n).map(|i| (0..64).map(|j| (i + j * 100) % 8000).collect()).collect();
                json!({"input_ids": ids, "teacher_ids": kept, "teacher_logits": vec![vec![0.5; 64]; n]})
            } else {
                json!({"input_ids": ids})
            };
            format!("{row}\n")
        })
        .collect();
    std::fs::write(dir.join("rows.jsonl"), rows)?;
    if set.contains(&LOAD) {
        weights(&dir.join("model"))?;
    }
    // Two micro-batches, of which the second adds to gradients; four where the settings divide the step.
    let divided = set.iter().any(|s| s.starts_with("run.micro_rows") || s.starts_with("parallel."));
    let batch = if divided || nightly() { 4 } else { 2 };
    let recipe = format!(
        "[model]\nsource = \"model\"\nweights = \"random\"\n{rules}[data]\nmax_length = {}\n[[data.train]]\n\
         source = \"rows.jsonl\"\nformat = \"tokens\"\n[run]\nsteps = 1\nbatch_rows = {batch}\ndevice = \"cpu\"\n\
         output = \"out\"\n",
        512 / shorter
    );
    std::fs::write(dir.join("r.toml"), recipe)?;
    let out = Command::new(env!("CARGO_BIN_EXE_ft"))
        .current_dir(dir)
        .args(["run", "r.toml", "--overwrite"])
        .args(set)
        .env("FT_CACHE", dir.join("cache"))
        .output()?;
    ensure!(out.status.success(), "{set:?}: {}", String::from_utf8_lossy(&out.stderr));
    let end = event(dir, "end")?;
    let of = |key: &str| end[key].as_u64().with_context(|| format!("no {key}"));
    Ok((of("planned_peak_bytes")?, of("peak_device_bytes")?))
}

/// The first event of a kind in the metrics of the run in `dir`.
fn event(dir: &Path, kind: &str) -> Result<Value> {
    let text = std::fs::read_to_string(dir.join("out/metrics.jsonl"))?;
    let events: Vec<Value> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    events.into_iter().find(|e| e["event"] == kind).with_context(|| format!("no {kind}"))
}

/// On the CPU, the measured peak of a run agrees with the plan to 1%: in full and with LoRA, DoRA, dropout,
/// biases, a tied head, mixtures of experts, packed and ragged rows, micro-batches, recompute levels, half
/// precision, 4-bit bases dequantized per matmul and per layer, and logit chunks. Every eighteenth case, all in
/// the nightly tier.
#[test]
fn a_run_allocates_what_its_plan_lists() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (full_rows, short) = ([512; 8], [8; 512]);
    let ragged: Vec<usize> = (0..40).map(|i| 30 + (i * 37) % 470).collect();
    let moe = mixture();
    let experts = "[[train]]\nmodules = [\"attention\", \"experts\"]\n";
    let everything = FULL.replace("\"mlp\"", "\"experts\", \"router\"");
    let (qwen3, tied, qwen2) = (config("qwen3", false), config("qwen3", true), config("qwen2", false));
    let some = "[[train]]\nmodules = [\"experts\"]\nexperts = [0, 1]\nmethod = \"full\"\n[[train]]\n\
                modules = [\"router\"]\nmethod = \"full\"\n";
    let offload = "memory.offload=['optimizer']";
    let ends = "[[train]]\nmodules = [\"embedding\", \"attention\"]\n";
    let (wide, shared, mixtral, mut all, tokens) = (wide(), shared(), mixtral(), mixture(), rows());
    all["num_experts_per_tok"] = all["num_experts"].clone();
    let cases: &[(&Value, &str, &[usize], &[&str])] = &[
        (&qwen3, FULL, &full_rows, &["memory.recompute=none"]),
        (&qwen3, FULL, &full_rows, &["memory.recompute=all"]),
        (&qwen3, FULL, &full_rows, &["memory.recompute=2", "run.micro_rows=2"]),
        (&qwen3, LORA, &full_rows, &["memory.recompute=none"]),
        (&qwen3, LORA, &full_rows, &["memory.recompute=all", "run.micro_rows=2"]),
        (&qwen3, LORA, &full_rows, &["lora.dropout=0.1", "memory.recompute=3"]),
        (&qwen3, LORA, &full_rows, &["lora.dora=true", "memory.recompute=none"]),
        (&qwen3, LORA, &full_rows, &["train.0.layers=-2:", "memory.recompute=none", "run.micro_rows=4"]),
        (&qwen3, FULL, &full_rows, &["model.dtype=bf16", "memory.recompute=none"]),
        (&tied, FULL, &ragged, &["memory.recompute=none"]),
        (&tied, FULL, &ragged, &["data.pack=false", "run.micro_rows=4"]),
        (&qwen2, LORA, &ragged, &["memory.recompute=none", "run.micro_rows=2"]),
        (&qwen2, FULL, &full_rows, &["memory.recompute=4"]),
        (&moe, experts, &full_rows, &["memory.recompute=none"]),
        (&moe, experts, &full_rows, &["memory.recompute=all"]),
        (&moe, &everything, &full_rows, &["memory.recompute=2"]),
        (&moe, experts, &full_rows, &["memory.recompute=none", "lora.dora=true"]),
        (&moe, experts, &full_rows, &["memory.recompute=all", "lora.dropout=0.1"]),
        (&moe, experts, &full_rows, &["memory.recompute=2", "lora.dora=true", "lora.dropout=0.1"]),
        (&qwen3, LORA, &full_rows, &["memory.recompute=all", "run.batch_rows=16", "data.shuffle=false"]),
        // Recomputes norms only, or the feed-forward as well.
        (&qwen3, FULL, &full_rows, &[FEED_FORWARD]),
        (&qwen3, FULL, &full_rows, &[NORMS, "model.dtype=bf16", "run.micro_rows=2"]),
        (&qwen3, LORA, &full_rows, &[FEED_FORWARD, "lora.dora=true", "lora.dropout=0.1"]),
        (&qwen3, LORA, &full_rows, &[NORMS, ACTIVATIONS]),
        (&qwen3, LORA, &full_rows, &[NF4, FEED_FORWARD, "model.dtype=bf16", "memory.dequantize=per_layer"]),
        (&qwen2, LORA, &ragged, &[FEED_FORWARD, "run.micro_rows=2"]),
        (&tied, ends, &ragged, &[NORMS]),
        (&tied, FULL, &full_rows, &[&[FEED_FORWARD, ON_HOST], ALL_AT_ONCE].concat()),
        (&moe, &everything, &full_rows, &[NORMS]),
        (&moe, experts, &full_rows, &[FEED_FORWARD, "lora.dora=true"]),
        (&moe, some, &full_rows, &[NF4, NORMS, "model.dtype=bf16"]),
        (&shared, &everything, &full_rows, &[NORMS, "run.micro_rows=2"]),
        (&mixtral, experts, &full_rows, &[NF4, FEED_FORWARD, "memory.dequantize=per_layer"]),
        (&all, experts, &full_rows, &[NORMS, "lora.dropout=0.1"]),
        // Some experts and the routers in full, with a 4-bit base; offloaded states stay in the same memory
        // on the CPU.
        (&moe, some, &full_rows, &["model.quantize=nf4", "memory.recompute=none"]),
        (&moe, some, &full_rows, &["model.quantize=nf4", "memory.recompute=all", offload]),
        (&moe, some, &full_rows, &["model.quantize=nf4", "memory.recompute=none", "model.dtype=bf16"]),
        (&moe, some, &full_rows, &["model.quantize=nf4", "memory.recompute=2", "model.dtype=bf16", offload]),
        (&moe, &everything, &full_rows, &["memory.recompute=all", offload]),
        (&qwen3, FULL, &full_rows, &["memory.recompute=all", offload]),
        (&qwen3, FULL, &full_rows, &["memory.recompute=all", "model.dtype=bf16", offload]),
        // Weights and saved layer inputs on the host.
        (&qwen3, FULL, &full_rows, &["memory.recompute=none", PARAMS]),
        (&qwen3, FULL, &full_rows, &["memory.recompute=all", ON_HOST]),
        (&tied, FULL, &ragged, &["memory.recompute=all", "model.dtype=bf16", ON_HOST, "run.micro_rows=4"]),
        (&tied, FULL, &full_rows, &["memory.recompute=2", "model.dtype=bf16", PARAMS]),
        (&qwen3, LORA, &full_rows, &["lora.dora=true", "model.dtype=bf16", "memory.recompute=3", ON_HOST]),
        (&qwen3, LORA, &full_rows, &[NF4, "memory.recompute=all", "run.micro_rows=4", ACTIVATIONS]),
        (&qwen3, LORA, &full_rows, &[NF4, "model.dtype=bf16", "memory.recompute=all", ON_HOST]),
        (&moe, some, &full_rows, &[NF4, "memory.recompute=all", "model.dtype=bf16", ON_HOST]),
        (&moe, &everything, &full_rows, &[&["memory.recompute=2", PARAMS], ALL_AT_ONCE].concat()),
        (&qwen3, FULL, &full_rows, &[&["memory.recompute=2"], ALL_AT_ONCE].concat()),
        (
            &tied,
            FULL,
            &full_rows,
            &[&[EIGHT_BIT, "memory.recompute=all", "model.dtype=bf16"], ALL_AT_ONCE].concat(),
        ),
        (
            &moe,
            some,
            &full_rows,
            &[&["memory.recompute=all", "model.dtype=bf16", offload], ALL_AT_ONCE].concat(),
        ),
        (&qwen3, FULL, &full_rows, &[EIGHT_BIT, "memory.recompute=2"]),
        (
            &qwen3,
            FULL,
            &full_rows,
            &[&[EIGHT_BIT, "model.dtype=bf16", "optimizer.master=f32"], ALL_AT_ONCE].concat(),
        ),
        (&qwen3, FULL, &full_rows, &["optimizer.master=none", "model.dtype=bf16"]),
        (
            &tied,
            FULL,
            &full_rows,
            &[
                "optimizer.name=galore8bit",
                "optimizer.galore_rank=32",
                "model.dtype=bf16",
                "memory.recompute=2",
            ],
        ),
        (&tied, FULL, &ragged, &[EIGHT_BIT, "memory.recompute=all", "model.dtype=bf16"]),
        (&moe, some, &full_rows, &[EIGHT_BIT, "model.quantize=nf4", "memory.recompute=all", offload]),
        (&qwen3, LORA, &full_rows, &[NF4, "memory.recompute=none"]),
        (&qwen3, LORA, &full_rows, &[NF4, "memory.recompute=all", "memory.dequantize=per_matmul"]),
        (&qwen3, LORA, &full_rows, &[NF4, "memory.recompute=all", "memory.dequantize=per_layer"]),
        (
            &qwen3,
            FULL,
            &full_rows,
            &["optimizer.name=galore", "optimizer.galore_rank=32", "memory.recompute=2"],
        ),
        (&qwen3, LORA, &full_rows, &["run.micro_rows=auto"]),
        (&qwen3, LORA, &full_rows, &["lora.init=olora", "data.neftune=5", "memory.recompute=none"]),
        (&qwen3, LORA, &full_rows, &["lora.init=pissa", NF4, "model.dtype=bf16", "memory.recompute=all"]),
        (&qwen3, &tokens, &full_rows, &["memory.recompute=none"]),
        (&tied, &tokens, &ragged, &["model.dtype=bf16", "memory.recompute=all", ON_HOST]),
        (&tied, &tokens, &full_rows, &[&["memory.recompute=2", EIGHT_BIT], ALL_AT_ONCE].concat()),
        (&wide, LORA, &full_rows, &["memory.recompute=all"]),
        (&wide, LORA, &ragged, &["memory.recompute=none", "run.micro_rows=4"]),
        (&qwen3, LORA, &full_rows, &["lora.dora=true", "lora.dropout=0.1", "memory.recompute=all"]),
        (&qwen3, LORA, &full_rows, &["model.dtype=bf16", "memory.recompute=none", "run.micro_rows=2"]),
        (&qwen3, LORA, &full_rows, &[NF4, "model.dtype=bf16", "memory.recompute=all"]),
        (
            &qwen3,
            LORA,
            &full_rows,
            &[NF4, "model.dtype=bf16", "memory.recompute=all", "memory.dequantize=per_layer"],
        ),
        (&qwen3, LORA, &full_rows, &["model.dtype=bf16", "lora.dora=true", "memory.recompute=none"]),
        (&tied, ends, &ragged, &["memory.recompute=none"]),
        (&shared, &everything, &full_rows, &["memory.recompute=none"]),
        (&shared, experts, &full_rows, &["memory.recompute=all", "model.dtype=bf16"]),
        (&mixtral, experts, &full_rows, &["memory.recompute=none"]),
        (&mixtral, &everything, &full_rows, &["memory.recompute=all"]),
        (&mixtral, experts, &full_rows, &[NF4, "memory.recompute=all", "memory.dequantize=per_layer"]),
        (&moe, experts, &full_rows, &["model.dtype=bf16", "memory.recompute=none"]),
        // Experts without tokens are not dequantized, so short documents are chosen to reach all experts.
        (&moe, experts, &short, &[NF4, "memory.recompute=all", "memory.dequantize=per_layer"]),
        (&qwen3, LORA, &full_rows, &[LOAD, "memory.recompute=none"]),
        (&qwen3, LORA, &full_rows, &[LOAD, "memory.recompute=all", "lora.dora=true", "lora.dropout=0.1"]),
        (&tied, ends, &ragged, &[LOAD, "memory.recompute=2", "run.micro_rows=4"]),
        (&moe, experts, &full_rows, &[LOAD, "memory.recompute=all"]),
        (&qwen3, LORA, &full_rows, &[LOAD, NF4, "memory.recompute=none"]),
        (&qwen3, LORA, &full_rows, &[LOAD, "memory.recompute=2", PARAMS]),
        // All experts for every token, side by side: shared buffers live until the last expert.
        (&all, experts, &full_rows, &["memory.recompute=all", "lora.dropout=0.1"]),
        (&all, experts, &full_rows, &[NF4, "memory.recompute=all", "memory.dequantize=per_layer"]),
        (&all, experts, &full_rows, &["memory.recompute=all", "lora.dora=true", "lora.dropout=0.1"]),
    ];
    // Runs all cases before it fails.
    let (mut table, mut wrong) = (String::new(), Vec::new());
    let every = if nightly() { 1 } else { 18 };
    for (config, rules, lengths, set) in cases.iter().step_by(every) {
        let (planned, measured) = run(dir.path(), config, rules, lengths, set)?;
        let apart = 100.0 * (measured as f64 / planned as f64 - 1.0);
        let family = config["model_type"].as_str().unwrap_or_default();
        let line =
            format!("{apart:>6.2}% of {planned:>10} planned, {measured:>10} measured  {family:<10} {set:?}");
        writeln!(table, "{line}")?;
        if apart.abs() > 1.0 {
            wrong.push(line);
        }
        let end = event(dir.path(), "end")?;
        let pairs = ["forward", "backward"].map(|p| (p, "planned_phases", "measured_phases"));
        let kept = ["frozen_weights", "weights_that_train", "gradients", "master_weights", "moments"];
        for (what, ours, theirs) in pairs.into_iter().chain(kept.map(|k| (k, "planned", "measured"))) {
            let of = |table: &str| end["memory"][table][what].as_f64().with_context(|| format!("no {what}"));
            let (planned, measured) = (of(ours)?, of(theirs)?);
            // Tables of names and shapes are counted as frozen weights.
            if (planned - measured).abs() > 0.015 * planned + 5e5 {
                wrong.push(format!("{family} {set:?}, {what}: planned {planned}, measured {measured}"));
            }
        }
    }
    eprintln!("{table}");
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// A score head: its weights, gradients and moments, and no logits of the vocabulary.
#[test]
fn a_score_head_takes_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (full_rows, short) = ([512; 8], [8; 512]);
    let labels = ["classify.num_labels=5", "data.train.0.format=labeled"];
    let pairs = ["data.train.0.format=preference", "memory.recompute=all"];
    let (qwen3, tied) = (config("qwen3", false), config("qwen3", true));
    let cases: &[(&Value, &str, &[usize], Vec<&str>)] = &[
        (&qwen3, LORA, &full_rows, [&[REWARD], &pairs[..]].concat()),
        (
            &tied,
            FULL,
            &full_rows,
            [&[REWARD], &pairs[..], &["run.micro_rows=2", "model.dtype=bf16"]].concat(),
        ),
        (&tied, FULL, &short, [&[CLASSIFY], &labels[..], &["memory.recompute=none"]].concat()),
        (&qwen3, LORA, &full_rows, [&[CLASSIFY], &labels[..], &[NF4, "memory.recompute=none"]].concat()),
        (&qwen3, LORA, &full_rows, [&[CLASSIFY], &labels[..], &[LOAD, "memory.recompute=norms"]].concat()),
    ];
    within_a_percent(dir.path(), cases)
}

/// Runs of a config, by rules, row lengths and settings, take what their plans say: two of the cases at each push, all
/// in the nightly tier.
fn within_a_percent<'a, S>(dir: &Path, cases: &[(&Value, &str, &[usize], S)]) -> Result<()>
where
    S: AsRef<[&'a str]>,
{
    let mut wrong = Vec::new();
    let every = cases.len().div_ceil(few(2).min(cases.len()));
    for (config, rules, lengths, set) in cases.iter().step_by(every) {
        let set = set.as_ref();
        let (planned, measured) = run(dir, config, rules, lengths, set)?;
        let apart = 100.0 * (measured as f64 / planned as f64 - 1.0);
        eprintln!("{apart:>6.2}% of {planned:>10} planned, {measured:>10} measured  {set:?}");
        if apart.abs() > 1.0 {
            wrong.push(format!("{set:?}: planned {planned}, measured {measured}"));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Sinks, biases of experts, gates beside up; and four norms a layer, windows by layer, a scaled embedding.
#[test]
fn gpt_oss_and_gemma_take_what_their_plans_say() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let full_rows = [512; 8];
    let ragged: Vec<usize> = (0..40).map(|i| 30 + (i * 37) % 470).collect();
    let (mut oss, mut gemma) = (config("qwen3", false), config("qwen3", true));
    for (key, value) in [
        ("architectures", json!(["GptOssForCausalLM"])),
        ("model_type", json!("gpt_oss")),
        ("num_hidden_layers", json!(4)),
        ("attention_bias", json!(true)),
        ("num_local_experts", json!(16)),
        ("num_experts_per_tok", json!(4)),
        ("intermediate_size", json!(384)),
        ("sliding_window", json!(128)),
        ("swiglu_limit", json!(7.0)),
    ] {
        oss[key] = value;
    }
    let mut released = oss.clone();
    released["quantization_config"] = json!({"quant_method": "mxfp4"});
    for (key, value) in [
        ("architectures", json!(["Gemma3ForCausalLM"])),
        ("model_type", json!("gemma3_text")),
        ("hidden_activation", json!("gelu_pytorch_tanh")),
        ("query_pre_attn_scalar", json!(64)),
        ("sliding_window", json!(128)),
        ("sliding_window_pattern", json!(3)),
        ("rope_local_base_freq", json!(1e4)),
    ] {
        gemma[key] = value;
    }
    let all = FULL.replace("\"attention\", \"mlp\", \"norms\", \"embedding\", \"head\"", "\"/.*/\"");
    let experts = "[[train]]\nmodules = [\"attention\", \"experts\"]\n";
    let cases: &[(&Value, &str, &[usize], &[&str])] = &[
        (&oss, &all, &full_rows, &["memory.recompute=none"]),
        (&oss, experts, &full_rows, &[FEED_FORWARD]),
        (&oss, experts, &ragged, &["memory.recompute=all", "model.dtype=bf16"]),
        // random experts are values
        (&released, experts, &ragged, &["memory.recompute=all", "model.dtype=bf16"]),
        (&gemma, FULL, &full_rows, &["memory.recompute=none"]),
        (&gemma, LORA, &ragged, &[NF4, "memory.recompute=2"]),
        (&gemma, LORA, &full_rows, &[NORMS, "lora.dora=true", "model.dtype=bf16"]),
    ];
    within_a_percent(dir.path(), cases)
}

/// Cut matrices take what the plan says on the rank with the most.
#[test]
fn cut_matrices_take_what_their_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (qwen3, tied) = (config("qwen3", false), config("qwen3", true));
    let mut biased = config("llama", false);
    (biased["model_type"], biased["attention_bias"], biased["mlp_bias"]) =
        (json!("llama"), json!(true), json!(true));
    biased["architectures"] = json!(["LlamaForCausalLM"]);
    let (full_rows, data) = ([512; 8], "parallel.data=2");
    let cases: &[(&Value, &str, &[usize], &[&str])] = &[
        (&qwen3, FULL, &full_rows, &[CUT, "memory.recompute=none"]),
        (&tied, LORA, &full_rows, &[CUT, NF4, "model.dtype=bf16", "memory.recompute=all"]),
        (&biased, LORA, &full_rows, &[CUT, NORMS, "lora.dropout=0.1"]),
        (
            &tied,
            FULL,
            &full_rows,
            &[CUT, data, "parallel.zero=3", "model.dtype=bf16", "memory.recompute=all"],
        ),
        (&qwen3, FULL, &full_rows, &[CUT, data, "parallel.zero=2", FEED_FORWARD]),
        (&biased, LORA, &full_rows, &["parallel.tensor=4", "memory.recompute=1", LOAD]),
    ];
    within_a_percent(dir.path(), cases)
}

/// A Gemma 4 of small sizes, with further keys.
fn gemma_4(more: Value) -> Value {
    let mut gemma = config("qwen3", true);
    let family = json!({
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh",
    });
    for keys in [family, more] {
        for (key, value) in keys.as_object().into_iter().flatten() {
            gemma[key] = value.clone();
        }
    }
    gemma
}

/// Per-layer inputs, keys and values of earlier layers, sizes by layer; trained down to the embedding, or not.
#[test]
fn gemma_4_takes_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let full_rows = [512; 8];
    let ragged: Vec<usize> = (0..40).map(|i| 30 + (i * 37) % 470).collect();
    let vocab = config("qwen3", true)["vocab_size"].clone();
    let gemma = gemma_4(json!({
        "num_hidden_layers": 6,
        "layer_types": [
            "sliding_attention", "sliding_attention", "full_attention",
            "sliding_attention", "sliding_attention", "full_attention",
        ],
        "global_head_dim": 96,
        "sliding_window": 128,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": vocab,
        "use_double_wide_mlp": true,
        "final_logit_softcapping": 30.0,
    }));
    let all = FULL.replace("\"attention\", \"mlp\", \"norms\", \"embedding\", \"head\"", "\"/.*/\"");
    let upper = "[[train]]\nmodules = [\"attention\"]\nlayers = \"-2:\"\n";
    let cases: &[(&Value, &str, &[usize], &[&str])] = &[
        (&gemma, &all, &full_rows, &["memory.recompute=none"]),
        (&gemma, &all, &ragged, &["memory.recompute=all"]),
        (&gemma, LORA, &ragged, &[NF4, FEED_FORWARD]),
        (&gemma, LORA, &full_rows, &[NORMS, "model.dtype=bf16"]),
        (&gemma, upper, &full_rows, &["memory.recompute=none"]),
    ];
    within_a_percent(dir.path(), cases)
}

/// A dense part beside experts, with factors on gates.
#[test]
fn experts_beside_a_dense_part_take_what_their_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let full_rows = [512; 8];
    let ragged: Vec<usize> = (0..40).map(|i| 30 + (i * 37) % 470).collect();
    let own = config("qwen3", true);
    let layers = own["num_hidden_layers"].as_u64().unwrap_or(0) as usize;
    let gemma = gemma_4(json!({
        "layer_types": vec!["full_attention"; layers],
        "global_head_dim": own["head_dim"],
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": true,
        "enable_moe_block": true,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    }));
    let all = FULL.replace("\"attention\", \"mlp\", \"norms\", \"embedding\", \"head\"", "\"/.*/\"");
    let experts = "[[train]]\nmodules = [\"attention\", \"experts\", \"router\"]\n";
    let cases: &[(&Value, &str, &[usize], &[&str])] = &[
        (&gemma, &all, &full_rows, &["memory.recompute=none"]),
        (&gemma, &all, &ragged, &["memory.recompute=all"]),
        (&gemma, experts, &full_rows, &[NORMS]),
        (&gemma, experts, &ragged, &[NF4, FEED_FORWARD]),
        (&gemma, experts, &full_rows, &["memory.recompute=none", "model.dtype=bf16"]),
        (&gemma, &all, &ragged, &["memory.recompute=all", "model.dtype=bf16"]),
    ];
    within_a_percent(dir.path(), cases)
}

/// Memory and traffic per rank agree with the plan to 1%. Sharded states, gradients and weights shrink in
/// proportion to the number of ranks.
#[test]
fn a_rank_holds_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (full_rows, moe, tokens) = ([128; 8], mixture(), rows());
    let (qwen3, tied) = (config("qwen3", false), config("qwen3", true));
    let experts = "[[train]]\nmodules = [\"attention\", \"experts\"]\n";
    let cases: [(&Value, &str, &[&str]); 8] = [
        (&tied, &tokens, &["model.dtype=bf16", NORMS]),
        (&qwen3, LORA, &[LOAD, "lora.dora=true", "memory.recompute=1"]),
        (&tied, FULL, &["model.dtype=bf16", "memory.recompute=all", ON_HOST]),
        (&qwen3, LORA, &["lora.dora=true", "model.dtype=bf16", "memory.recompute=1"]),
        (&qwen3, FULL, &["memory.recompute=none"]),
        (&tied, FULL, &["model.dtype=bf16", "memory.recompute=all"]),
        (&qwen3, LORA, &[NF4, "memory.recompute=2", "model.dtype=bf16"]),
        (&moe, experts, &[FEED_FORWARD, "memory.offload=['optimizer']"]),
    ];
    let (mut table, mut wrong) = (String::new(), Vec::new());
    let every = if nightly() { 1 } else { 4 };
    for (config, rules, set) in cases.into_iter().step_by(every) {
        let mut whole = [0.0; 3];
        let all = [(1, 0), (2, 2), (4, 3), (2, 0), (2, 1), (4, 2), (2, 3)];
        for &(ranks, zero) in all.iter().take(few(3)) {
            let parallel = [format!("parallel.data={ranks}"), format!("parallel.zero={zero}")];
            let more = ["memory.budget=2GiB", "data.max_length=128", &*parallel[0], &*parallel[1]];
            let set = [set, &more[..]].concat();
            let (planned, measured) = run(dir.path(), config, rules, &full_rows, &set)?;
            let apart = 100.0 * (measured as f64 / planned as f64 - 1.0);
            writeln!(table, "{apart:>6.2}% of {planned:>10} planned, {measured:>10} a rank  {set:?}")?;
            // With several ranks, this is the largest one.
            if apart.abs() > 1.0 {
                wrong.push(format!("{set:?}: {apart:.2}%"));
            }
            let (start, end) = (event(dir.path(), "start")?, event(dir.path(), "end")?);
            let kept = ["frozen_weights", "weights_that_train", "gradients", "master_weights", "moments"];
            let of = |table: &str, what: &str| {
                end["memory"][table][what].as_f64().with_context(|| format!("no {what}"))
            };
            for what in kept {
                let (planned, measured) = (of("planned", what)?, of("measured", what)?);
                // Tables of names and shapes are counted as frozen weights.
                let rest = if what == "frozen_weights" { 5e5 } else { 1e4 };
                if (planned - measured).abs() > 0.01 * planned + rest {
                    wrong.push(format!("{set:?}, {what}: planned {planned}, measured {measured}"));
                }
            }
            let (gradients, moments) = (of("measured", "gradients")?, of("measured", "moments")?);
            let weights = of("measured", "frozen_weights")? + of("measured", "weights_that_train")?;
            let held = [gradients, moments, weights];
            if ranks == 1 {
                whole = held;
            }
            for ((bytes, whole), (from, rest)) in
                held.into_iter().zip(whole).zip([(2, 0.0), (1, 0.0), (3, 3e5)])
            {
                let parts = if zero >= from { f64::from(ranks) } else { 1.0 };
                if (bytes - whole / parts).abs() > 0.01 * whole / parts + rest {
                    wrong.push(format!("{set:?}: {bytes} of {whole} on a rank"));
                }
            }
            writeln!(
                table,
                "        {weights:>10} of weights, {gradients} of gradients, {moments} of moments"
            )?;
            let wire = start["plan"]["wire_bytes_a_step"].as_f64().context("no wire bytes")?;
            let came = event(dir.path(), "step")?["wire_bytes"].as_f64().unwrap_or(0.0);
            if (wire - came).abs() > 0.01 * wire {
                wrong.push(format!("{set:?}: {wire} planned on the wire, {came} came"));
            }
        }
    }
    eprintln!("{table}");
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// With layers over ranks, the rank with the most allocates what the plan says, to 1%. Weights and states of each of two
/// equal stages are half of those of one rank, to 2%.
#[test]
fn a_stage_holds_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (qwen3, tied, moe) = (config("qwen3", false), config("qwen3", true), mixture());
    let (rows, all) = ([512; 8], FULL.replace("\"mlp\"", "\"experts\", \"router\""));
    let cases: [(&Value, &str, &[usize], &[&str]); 6] = [
        (&qwen3, FULL, &rows, &["parallel.pipeline=2", "memory.recompute=none"]),
        (&tied, FULL, &rows, &["parallel.pipeline=2", "parallel.data=2", "parallel.zero=1"]),
        (&qwen3, LORA, &rows, &["parallel.pipeline=3", NF4, "memory.recompute=all"]),
        (&moe, &all, &rows, &["parallel.pipeline=2", "memory.recompute=1", "router.aux_loss=0.01"]),
        (&qwen3, LORA, &rows, &["parallel.pipeline=2", "parallel.data=2", "parallel.zero=3"]),
        (&tied, FULL, &rows, &["parallel.pipeline=6", "model.dtype=bf16", NORMS]),
    ];
    let cases = cases.map(|(config, rules, rows, set)| {
        (config, rules, rows, [set, &["memory.budget=2GiB", "run.micro_rows=1"]].concat())
    });
    within_a_percent(dir.path(), &cases)?;
    let states = |set: &[&str]| -> Result<f64> {
        run(dir.path(), &qwen3, FULL, &rows, &[set, &["memory.budget=2GiB"]].concat())?;
        let planned = event(dir.path(), "end")?["memory"]["planned"].clone();
        let parts = ["frozen_weights", "weights_that_train", "gradients", "master_weights", "moments"];
        Ok(parts.iter().filter_map(|part| planned[part].as_f64()).sum())
    };
    let (one, two) = (states(&[])?, states(&["parallel.pipeline=2", "parallel.stages=[3, 3]"])?);
    let far = 2.0 * two / one - 1.0;
    ensure!(far.abs() <= 0.02, "{two} of {one} on each of two ranks");
    Ok(())
}

/// With several axes together, the rank with the most allocates what the plan says, to 1%. Tokens go to all experts, so
/// that the spread is even.
#[test]
fn a_rank_of_several_axes_holds_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (qwen3, mut moe) = (config("qwen3", false), shared());
    (moe["num_experts"], moe["mlp_only_layers"]) = (json!(4), json!([1]));
    let (long, all) = ([1024; 4], FULL.replace("\"mlp\"", "\"mlp\", \"experts\", \"router\""));
    let (stages, context, expert) = ("parallel.pipeline=2", "parallel.context=2", "parallel.expert=2");
    let (data, aux) = ("parallel.data=2", "router.aux_loss=0.01");
    let cases: [(&Value, &str, &[usize], &[&str]); 7] = [
        (&qwen3, FULL, &long, &[context, CUT, NORMS]),
        (&moe, &all, &long, &[stages, data, expert, "memory.recompute=1", aux]),
        (&moe, &all, &long, &[CUT, expert, "memory.recompute=none", aux]),
        (&qwen3, FULL, &long, &[stages, context, "memory.recompute=none"]),
        (&qwen3, LORA, &long, &[stages, CUT, NF4, "memory.recompute=all"]),
        (&moe, &all, &long, &[CUT, data, "parallel.zero=3", FEED_FORWARD]),
        (&qwen3, LORA, &long, &[stages, context, CUT, "parallel.zero=3", NORMS]),
    ];
    let more = ["memory.budget=2GiB", "data.max_length=1024", "data.pack=false", "run.micro_rows=1"];
    let cases = cases.map(|(config, rules, rows, set)| (config, rules, rows, [set, &more].concat()));
    within_a_percent(dir.path(), &cases)
}

/// With the tokens of a row over ranks, memory and traffic agree with the plan to 1%: keys and values go to the ranks
/// whose queries see them, and their gradients back.
#[test]
fn a_rank_with_some_tokens_holds_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (qwen3, moe) = (config("qwen3", false), mixture());
    let mut windows = config("qwen3", false);
    for (key, value) in
        [("use_sliding_window", json!(true)), ("sliding_window", json!(200)), ("max_window_layers", json!(2))]
    {
        windows[key] = value;
    }
    let (long, short) = ([1024; 4], [128; 8]);
    let experts = "[[train]]\nmodules = [\"attention\", \"experts\"]\n";
    let cases: [(&Value, &str, &[usize], &[&str]); 6] = [
        (&qwen3, FULL, &long, &["parallel.context=2", "memory.recompute=none"]),
        (&qwen3, LORA, &long, &["parallel.context=4", "parallel.zero=3", "memory.recompute=all", NF4]),
        (&windows, LORA, &long, &["parallel.context=2", "memory.recompute=norms"]),
        (&moe, experts, &long, &["parallel.context=2", "parallel.zero=2", FEED_FORWARD]),
        (
            &qwen3,
            LORA,
            &long,
            &["parallel.data=2", "parallel.context=2", "model.dtype=bf16", "memory.recompute=all"],
        ),
        (&qwen3, FULL, &short, &["parallel.context=2", "run.micro_rows=4", "memory.recompute=1"]),
    ];
    let (mut table, mut wrong) = (String::new(), Vec::new());
    for (config, rules, lengths, set) in cases.into_iter().step_by(if nightly() { 1 } else { 2 }) {
        let micro: &[&str] = if lengths.len() == 4 { &["run.micro_rows=1"] } else { &[] };
        let more = ["memory.budget=2GiB", "data.max_length=1024", "data.pack=false"];
        let batch: &[&str] = if micro.is_empty() || nightly() { &[] } else { &["run.batch_rows=2"] };
        let set = [set, micro, batch, &more].concat();
        let (planned, measured) = run(dir.path(), config, rules, lengths, &set)?;
        let apart = 100.0 * (measured as f64 / planned as f64 - 1.0);
        writeln!(table, "{apart:>6.2}% of {planned:>10} planned, {measured:>10} a rank  {set:?}")?;
        if apart.abs() > 1.0 {
            wrong.push(format!("{set:?}: {apart:.2}%"));
        }
        let (start, step) = (event(dir.path(), "start")?, event(dir.path(), "step")?);
        for (planned, came) in
            [("wire_bytes_a_step", "wire_bytes"), ("wire_bytes_exchanged", "wire_bytes_exchanged")]
        {
            let planned = start["plan"][planned].as_f64().with_context(|| format!("no {planned}"))?;
            let came = step[came].as_f64().with_context(|| format!("no {came}"))?;
            writeln!(table, "        {planned} bytes planned on the wire, {came} came")?;
            if (planned - came).abs() > 0.01 * planned {
                wrong.push(format!("{set:?}: {planned} planned on the wire, {came} came"));
            }
        }
    }
    eprintln!("{table}");
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Linear layers of a 4-bit base take at most 4.13 bits per value, in plan and run.
#[test]
fn a_4_bit_base_takes_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let set = ["model.quantize=nf4", "model.dtype=bf16", "run.batch_rows=1", "memory.budget=8GiB"];
    // Large enough at each push for the tables of names and shapes below.
    let mut qwen3 = config("qwen3", false);
    (qwen3["hidden_size"], qwen3["intermediate_size"]) = (json!(512), json!(1536));
    run(dir.path(), &qwen3, LORA, &[64; 2], &set)?;
    let (start, end) = (event(dir.path(), "start")?, event(dir.path(), "end")?);
    let planned = |names: &[&str]| -> f64 {
        names.iter().filter_map(|n| start["plan"]["device"][format!("weights_{n}")].as_f64()).sum()
    };
    let scales = start["plan"]["device"]["quantization_constants"].as_f64().context("no scales")?;
    let linears = planned(&["attention", "mlp"]) + scales;
    let values = 6.0 * (2.0 * 512.0 * 512.0 + 2.0 * 512.0 * 256.0 + 3.0 * 512.0 * 1536.0);
    ensure!(8.0 * linears / values <= 4.13, "planned {} bits", 8.0 * linears / values);
    let rest = planned(&["embedding", "head", "norms"]);
    let measured = end["memory"]["measured"]["frozen_weights"].as_f64().context("not measured")?;
    let bits = 8.0 * (measured - rest) / values;
    // 0.2 MB of tables of names and shapes are not weights.
    ensure!(bits <= 4.13 + 8.0 * 2e5 / values && bits >= 4.1, "measured {bits} bits");
    Ok(())
}

/// Memory of the process in the last run, minus the usage before loading, and the planned value.
fn process(dir: &Path) -> Result<(u64, u64)> {
    let (start, end) = (event(dir, "start")?, event(dir, "end")?);
    let of = |v: &Value, key: &str| v[key].as_u64().with_context(|| format!("no {key}"));
    Ok((of(&start["plan"], "peak_device_bytes")?, of(&end["memory"], "process_bytes")?))
}

/// A teacher's values and both losses, where the logits of a row are one chunk and where they are several.
#[test]
fn a_teacher_takes_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (qwen3, wide) = (config("qwen3", false), wide());
    let eval = "data.eval=[{source='rows.jsonl', format='tokens'}]";
    let cases: &[(&Value, &str, &[&str])] = &[
        (&qwen3, LORA, &[DISTILL, "memory.recompute=all", "run.micro_rows=2"]),
        (&wide, LORA, &[DISTILL, "memory.recompute=none"]),
        (&wide, FULL, &[DISTILL, "memory.recompute=all", "model.dtype=bf16", eval]),
    ];
    for (config, rules, set) in cases {
        let (planned, measured) = run(dir.path(), config, rules, &[512; 8], set)?;
        let apart = 100.0 * (measured as f64 / planned as f64 - 1.0);
        ensure!(apart.abs() <= 1.0, "{set:?}: {apart:.2}% of {planned} planned, {measured} measured");
    }
    Ok(())
}

/// Rows of one repeated token route all tokens to the same experts. The run stays within the routing
/// reserve of the plan.
#[test]
fn uneven_routing_takes_no_more_than_its_reserve() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let moe = mixture();
    let everything = FULL.replace("\"mlp\"", "\"experts\", \"router\"");
    let experts = "[[train]]\nmodules = [\"experts\"]\n";
    let some = "[[train]]\nmodules = [\"experts\"]\nexperts = \"0-3\"\n";
    let cases = [
        (experts, &["memory.recompute=none", "lora.dora=true", "lora.dropout=0.1"][..]),
        (some, &["memory.recompute=all", "run.micro_rows=4", NF4]),
        (everything.as_str(), &["memory.recompute=all", "run.micro_rows=4"]),
        (experts, &["memory.recompute=all", "run.micro_rows=4"]),
    ];
    for (rules, set) in cases.into_iter().take(few(2)) {
        // The repeated token fills one document.
        let (planned, measured) = run_rows(dir.path(), &moe, rules, &[512; 4], set, |_, _| 7)?;
        let start = event(dir.path(), "start")?;
        let reserve = start["plan"]["device"]["routing_reserve"].as_u64().unwrap_or(0);
        ensure!(
            measured as f64 <= 1.01 * (planned + reserve) as f64,
            "{set:?}: {planned} {reserve} {measured}"
        );
        let (total, process) = process(dir.path())?;
        ensure!(process <= total, "{set:?}: {process} of {total}");
    }
    Ok(())
}

/// With uneven routing, the largest experts need more memory than with even routing, most of all with DoRA
/// and dropout. The peak lies between the plan and the plan plus reserve.
#[test]
fn some_uneven_routing_takes_a_part_of_the_reserve() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let experts = "[[train]]\nmodules = [\"attention\", \"experts\"]\n";
    for level in [FEED_FORWARD, "memory.recompute=all"].into_iter().take(few(1)) {
        let set = [level, "lora.dora=true", "lora.dropout=0.1"];
        let (planned, measured) = run(dir.path(), &mixture(), experts, &[512; 8], &set)?;
        let reserve = event(dir.path(), "start")?["plan"]["device"]["routing_reserve"].as_u64().unwrap_or(0);
        let between = planned - planned / 100..=planned + reserve;
        ensure!(between.contains(&measured), "{level}: {measured} of {planned} and {reserve}");
    }
    Ok(())
}

/// A step of many rows needs no more memory than a step of few, because micro-batches are built on demand.
#[test]
fn rows_of_a_step_are_made_as_they_are_needed() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut tiny = config("qwen3", false);
    for (key, value) in
        [("hidden_size", 32), ("intermediate_size", 64), ("num_hidden_layers", 1), ("num_attention_heads", 2)]
    {
        tiny[key] = json!(value);
    }
    (tiny["num_key_value_heads"], tiny["head_dim"], tiny["vocab_size"]) = (json!(1), json!(16), json!(64));
    let rows = |n: &str| run_rows(dir.path(), &tiny, LORA, &[512; 4], &[n], |i, k| (i * 7 + k) % 64);
    let (few, many) = (rows("run.batch_rows=2")?, rows("run.batch_rows=1024")?);
    // Shuffled in two epochs.
    ensure!(few.0.abs_diff(many.0) < 1 << 10, "{few:?} {many:?}");
    // The collated tokens alone would take 16 MB.
    ensure!(many.1 < few.1 + (1 << 18), "{few:?} {many:?}");
    Ok(())
}

/// The budget determines the number of recomputed layers. The run stays within it, with the same bits.
#[test]
fn a_run_obeys_its_budget() -> Result<()> {
    let dir = tempfile::tempdir()?;
    // As wide as at night: half of it, the allocator's overhead is up to 2% of the process.
    let mut model = config("qwen3", false);
    (model["hidden_size"], model["intermediate_size"]) = (json!(512), json!(1536));
    let peak = |budget: &str| run(dir.path(), &model, LORA, &[512; 8], &[budget]);
    let adapter = || std::fs::read(dir.path().join("out/adapter/adapter_model.safetensors"));
    run(dir.path(), &model, LORA, &[512; 8], &["memory.recompute=all", "memory.budget=10GiB"])?;
    let least = process(dir.path())?.0;
    peak("memory.budget=10GiB")?;
    let (most, free) = (process(dir.path())?.0, adapter()?);
    for tenths in [5, 0, 8, 2].into_iter().take(few(2)) {
        let tight = least + (most - least) * tenths / 10;
        let (_, measured) = peak(&format!("memory.budget={tight}"))?;
        let (planned, process) = process(dir.path())?;
        // Includes allocator overhead, to 0.5%, because small blocks vary between runs.
        let within = tight + tight / 200;
        ensure!(
            planned <= tight && measured < process && process <= within,
            "{planned} {process} of {tight}"
        );
        // A layer saves 14 MiB of activations.
        ensure!(planned > tight - (15 << 20), "more was recomputed than had to be: {planned} of {tight}");
        ensure!(adapter()? == free, "the recompute level changed the result");
    }

    let out = Command::new(env!("CARGO_BIN_EXE_ft"))
        .current_dir(dir.path())
        .args(["run", "r.toml", "--overwrite", "memory.budget=20MiB"])
        .output()?;
    let said = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.code() == Some(8), "{said}");
    ensure!(said.contains("hint:"), "{said}");
    Ok(())
}

/// Choices of the plan in a run, by key.
fn chosen(dir: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(dir.join("out/metrics.jsonl"))?;
    let start: Value = serde_json::from_str(text.lines().next().context("no line")?)?;
    Ok(start["plan"]["choices"].clone())
}

/// With less memory, logit chunks and micro-batches shrink and layers are recomputed. The run needs the
/// planned memory, and gives the same bits for the same micro-batch size.
#[test]
fn a_run_makes_do_with_what_there_is() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let model = wide();
    let adapter = || std::fs::read(dir.path().join("out/adapter/adapter_model.safetensors"));
    let at = |budget: u64, rows: &str| -> Result<(u64, Value, Vec<u8>)> {
        let budget = format!("memory.budget={budget}");
        let (planned, measured) = run(dir.path(), &model, LORA, &[512; 8], &[&budget, rows])?;
        let apart = measured as f64 / planned as f64 - 1.0;
        ensure!(apart.abs() <= 0.01, "{budget}: planned {planned}, measured {measured}");
        Ok((process(dir.path())?.0, chosen(dir.path())?, adapter()?))
    };
    let value = |c: &Value, key: &str| c[key]["value"].as_u64().with_context(|| format!("{key}: {c}"));
    let (most, free, bits) = at(64 << 30, "run.micro_rows=4")?;
    ensure!(value(&free, "recompute")? == 0, "{free}");
    let (taken, tight, same) = at(most - (90 << 20), "run.micro_rows=4")?;
    ensure!(taken <= most - (90 << 20), "{taken} of {most}");
    ensure!(value(&tight, "head_rows")? < value(&free, "head_rows")?, "{free} {tight}");
    ensure!(bits == same, "the choices changed the result");
    let (_, auto, _) = at(64 << 30, "run.micro_rows=auto")?;
    ensure!(value(&auto, "micro_rows")? > 1, "{auto}");
    let recipe = std::fs::read_to_string(dir.path().join("out/recipe.toml"))?;
    let line = format!("micro_rows    = {}\n", value(&auto, "micro_rows")?);
    ensure!(recipe.contains(&line), "{recipe}");
    let (_, few, _) = at(most - (90 << 20), "run.micro_rows=auto")?;
    ensure!(value(&few, "micro_rows")? <= value(&auto, "micro_rows")?, "{few}");
    Ok(())
}

/// `ft plan` needs only the config, prints the plan before it fails, and exits with 8.
#[test]
fn plan_prints_and_says_by_its_exit_code_whether_it_fits() -> Result<()> {
    let plan = |set: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_ft"))
            .args(["plan", "--json", concat!(env!("CARGO_MANIFEST_DIR"), "/recipes/qwen3-8b-lora.toml")])
            .args(set)
            .env("HF_HUB_OFFLINE", "1")
            .env("FT_CACHE", "/dev/null")
            .output()
    };
    for (budget, code) in [("memory.budget=200GiB", 0), ("memory.budget=4GiB", 8)] {
        for device in ["run.device=cpu", "run.device=cuda"] {
            let out = plan(&[budget, device, "parallel.data=2", "parallel.zero=2"])?;
            ensure!(out.status.code() == Some(code), "{}", String::from_utf8_lossy(&out.stderr));
            let json: Value = serde_json::from_slice(&out.stdout)?;
            ensure!(json["fits"] == json!(code == 0) && json["ranks"] == 2);
            for key in ["parameters", "device", "host", "disk", "hints", "theory"] {
                ensure!(!json[key].is_null(), "no {key}");
            }
        }
    }
    Ok(())
}

/// `--gpu` is the same as the two keys, takes cards by name, and the verdict comes first.
#[test]
fn a_card_stands_for_two_keys() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let plan = |args: &[&str]| {
        let mut ft = Command::new(env!("CARGO_BIN_EXE_ft"));
        let ft = ft.args(["plan", "qwen3-8b-qlora"]).args(args).current_dir(dir.path());
        ft.env("HF_HUB_OFFLINE", "1").env("HF_HOME", dir.path()).env("FT_CACHE", "/dev/null").output()
    };
    let said = |args: &[&str]| plan(args).map(|out| String::from_utf8_lossy(&out.stdout).into_owned());
    let by_keys = said(&["--json", "run.device=cuda", "memory.budget=48GB"])?;
    ensure!(!by_keys.is_empty() && by_keys == said(&["--json", "--gpu", "48GB"])?);
    ensure!(by_keys == said(&["--json", "--gpu", "48"])?);
    let text = said(&["--gpu", "48GB"])?;
    ensure!(text.starts_with("fits: 42.50 of 44.70 GiB on one CUDA card ("), "{text}");
    ensure!(text.lines().count() < 20 && !text.contains("theory"), "{text}");
    ensure!(said(&["--gpu", "48GB", "--verbose"])?.contains("theory"));
    let small = said(&["--gpu", "6GB"])?;
    ensure!(
        small.starts_with("does not fit: ")
            && small.contains("hint: memory.offload = [\"params\"]: 5.34 GiB"),
        "{small}"
    );
    let named = said(&["--gpu", "a100-80gb"])?;
    ensure!(named.starts_with("fits: ") && named.contains("by the data sheet of A100-80"), "{named}");
    let out = plan(&["--gpu", "A100"])?;
    let err = String::from_utf8_lossy(&out.stderr).into_owned();
    ensure!(out.status.code() == Some(2) && err.contains("A100-40, "), "{err}");
    Ok(())
}

/// Layers of linear attention among others: in full, with adapters, in 4 bits, in mixtures with fused experts.
#[test]
fn linear_attention_takes_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let full_rows = [512; 8];
    let ragged: Vec<usize> = (0..40).map(|i| 30 + (i * 37) % 470).collect();
    let mut dense = config("qwen3", false);
    for (key, value) in [
        ("architectures", json!(["Qwen3_5ForCausalLM"])),
        ("model_type", json!("qwen3_5_text")),
        ("linear_num_key_heads", json!(4)),
        ("linear_num_value_heads", json!(8)),
        ("linear_key_head_dim", json!(64)),
        ("linear_value_head_dim", json!(64)),
        ("linear_conv_kernel_dim", json!(4)),
        ("full_attention_interval", json!(3)),
    ] {
        dense[key] = value;
    }
    let mut moe = dense.clone();
    for (key, value) in [
        ("architectures", json!(["Qwen3_5MoeForCausalLM"])),
        ("model_type", json!("qwen3_5_moe_text")),
        ("num_hidden_layers", json!(4)),
        ("num_experts", json!(16)),
        ("num_experts_per_tok", json!(4)),
        ("moe_intermediate_size", json!(384)),
        ("shared_expert_intermediate_size", json!(384)),
    ] {
        moe[key] = value;
    }
    let (all, experts) = (
        FULL.replace("\"attention\", \"mlp\", \"norms\", \"embedding\", \"head\"", "\"/.*/\""),
        "[[train]]\nmodules = [\"attention\", \"experts\"]\n",
    );
    let cases: &[(&Value, &str, &[usize], &[&str])] = &[
        (&dense, &all, &full_rows, &["memory.recompute=none"]),
        (&dense, &all, &ragged, &[NORMS, "run.micro_rows=2", "model.dtype=bf16"]),
        (&dense, LORA, &full_rows, &["memory.recompute=all", "lora.dora=true"]),
        (&dense, LORA, &ragged, &[NF4, "memory.recompute=2"]),
        (&moe, experts, &full_rows, &[FEED_FORWARD]),
    ];
    within_a_percent(dir.path(), cases)
}
