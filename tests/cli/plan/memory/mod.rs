//! Plans vs. runs: planned peak memory is compared with allocations counted by the binary.

mod architectures;
mod budget;
mod one_rank;
mod sharded;

use crate::world::{command, few, nightly};
use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use ft::files::write_file;
use ft::model::Config;
use ft::model::modules::{Group, modules};
use serde_json::{Value, json};
use std::path::Path;

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
    // Bounds are for two threads: each has memory that is not planned.
    let mut ft = command(dir, &["run", "r.toml", "--overwrite"]);
    let out = ft.args(set).env("RAYON_NUM_THREADS", "2").output()?;
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

/// Memory of the process in the last run, minus the usage before loading, and the planned value.
fn process(dir: &Path) -> Result<(u64, u64)> {
    let (start, end) = (event(dir, "start")?, event(dir, "end")?);
    let of = |v: &Value, key: &str| v[key].as_u64().with_context(|| format!("no {key}"));
    Ok((of(&start["plan"], "peak_device_bytes")?, of(&end["memory"], "process_bytes")?))
}
