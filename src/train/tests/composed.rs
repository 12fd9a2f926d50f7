//! Runs with composed operations, used on CUDA in place of missing kernels: allocations on the CPU agree
//! with the plan.

use crate::train::{Options, run};
use anyhow::{Context as _, Result, ensure};
use ft_kernels::check::composed;
use ft_recipe::Recipe;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// Set in the child process that runs the recipes. Counts are global, and other tests allocate too.
const ALONE: &str = "FT_TEST_ALONE";

/// A config with 20 million parameters, or 40 million with experts.
fn config(experts: bool) -> Value {
    let mut c = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 512,
        "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 64, "vocab_size": 8000, "max_position_embeddings": 4096, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "hidden_act": "silu",
    });
    if experts {
        c["architectures"] = json!(["Qwen3MoeForCausalLM"]);
        c["model_type"] = json!("qwen3_moe");
        (c["num_experts"], c["num_experts_per_tok"]) = (json!(8), json!(8));
        (c["moe_intermediate_size"], c["norm_topk_prob"]) = (json!(384), json!(true));
    }
    c
}

/// Planned and measured peak of a run of one step, in bytes.
fn peaks(dir: &Path, config: &Value, modules: &str, set: &[&str]) -> Result<(u64, u64)> {
    std::fs::create_dir_all(dir.join("model"))?;
    std::fs::write(dir.join("model/config.json"), config.to_string())?;
    let row = |k: usize| json!({"input_ids": (0..512).map(|i| (i * 7919 + k * 104_729) % 8000).collect::<Vec<_>>()});
    let rows: String = (0..2).map(|k| format!("{}\n", row(k))).collect();
    std::fs::write(dir.join("rows.jsonl"), rows)?;
    let text = format!(
        "[model]\nsource = \"{0}/model\"\nweights = \"random\"\n[[train]]\nmodules = [{modules}]\n[data]\n\
         max_length = 512\n[[data.train]]\nsource = \"{0}/rows.jsonl\"\nformat = \"tokens\"\n[run]\nsteps = 1\n\
         batch_rows = 2\nmicro_rows = 1\ndevice = \"cpu\"\noutput = \"{0}/out\"\n",
        dir.display()
    );
    let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
    let recipe = Recipe::parse(&text, "r.toml", &set)?;
    composed(|| run(recipe, &Options { overwrite: true, ..Options::default() }))?;
    let text = std::fs::read_to_string(dir.join("out/metrics.jsonl"))?;
    let last: Value = serde_json::from_str(text.lines().last().context("no line")?)?;
    let of = |key: &str| last[key].as_u64().with_context(|| format!("no {key} in {last}"));
    Ok((of("planned_peak_bytes")?, of("peak_device_bytes")?))
}

#[test]
fn composed_operations_allocate_what_their_plan_lists() -> Result<()> {
    if std::env::var_os(ALONE).is_none() {
        let name = "train::tests::composed::composed_operations_allocate_what_their_plan_lists";
        let alone = Command::new(std::env::current_exe()?)
            .args([name, "--exact", "--nocapture"])
            .env(ALONE, "1")
            .output()?;
        print!("{}", String::from_utf8_lossy(&alone.stdout));
        ensure!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stderr));
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let (dense, moe) = (config(false), config(true));
    let all = "\"attention\", \"mlp\", \"norms\", \"embedding\", \"head\"";
    let linears = "\"attention\", \"mlp\"";
    let experts = "\"attention\", \"experts\"";
    let (full, nf4) = ("train.0.method=full", "model.quantize=nf4");
    let cases: &[(&Value, &str, &[&str])] = &[
        (&dense, all, &[full, "memory.recompute=none"]),
        (&dense, all, &[full, "memory.recompute=all"]),
        (&dense, linears, &["memory.recompute=none"]),
        (&dense, linears, &["memory.recompute=1", "lora.dropout=0.1"]),
        (&dense, linears, &["memory.recompute=none", "lora.dora=true"]),
        (&dense, linears, &[nf4, "memory.recompute=none"]),
        (&dense, linears, &[nf4, "memory.recompute=all", "memory.dequantize=per_layer"]),
        (&moe, experts, &["memory.recompute=none"]),
        (&moe, experts, &[full, "memory.recompute=all"]),
    ];
    let mut wrong = Vec::new();
    for (config, modules, set) in cases {
        let (planned, measured) = peaks(dir.path(), config, modules, set)?;
        let apart = 100.0 * (measured as f64 / planned as f64 - 1.0);
        let line =
            format!("{apart:>6.2}% of {planned:>10} planned, {measured:>10} measured  {modules} {set:?}");
        println!("{line}");
        if apart.abs() > 1.0 {
            wrong.push(line);
        }
    }
    ensure!(wrong.is_empty(), "more than 1% apart:\n{}", wrong.join("\n"));
    Ok(())
}
