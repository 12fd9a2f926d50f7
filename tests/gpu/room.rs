//! Peak allocations on the device agree with the plan to 1%.

use super::world::{World, ran};
use super::{device, emulated};
use serde_json::{Value, json};

const FULL: &str =
    "[[train]]\nmodules = [\"attention\", \"mlp\", \"norms\", \"embedding\", \"head\"]\nmethod = \"full\"\n";
const LORA: &str = "[[train]]\nmodules = [\"attention\", \"mlp\"]\n";
const EXPERTS: &str = "[[train]]\nmodules = [\"attention\", \"experts\"]\n";

fn config(extra: Value) -> Value {
    let mut c = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256,
        "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": 4000, "max_position_embeddings": 4096, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "hidden_act": "silu",
    });
    c.as_object_mut().expect("an object").extend(extra.as_object().cloned().unwrap_or_default());
    c
}

/// A model with random weights, four rows of 128 tokens, and a recipe with some rules.
fn write(w: &World, config: &Value, rules: &str) {
    w.write("model/config.json", config.to_string());
    let row = |k: usize| (0..128).map(|i| (i * 7919 + k * 104_729) % 4000).collect::<Vec<usize>>();
    let rows: String = (0..4).map(|k| format!("{}\n", json!({"input_ids": row(k)}))).collect();
    w.write("rows.jsonl", rows);
    w.write(
        "r.toml",
        format!(
            "[model]\nsource = \"model\"\nweights = \"random\"\n{rules}[data]\nmax_length = 128\n[[data.train]]\n\
             source = \"rows.jsonl\"\nformat = \"tokens\"\n[run]\nsteps = 1\nbatch_rows = 2\nmicro_rows = 2\n\
             device = \"cuda\"\noutput = \"out\"\n"
        ),
    );
}

/// Runs the recipe. Returns planned and measured peak.
fn run(w: &World, set: &[&str]) -> (f64, f64) {
    w.ok(&[&["run", "r.toml", "--overwrite"], set].concat());
    let (start, end) = (&w.events("out", "start")[0], &w.events("out", "end")[0]);
    // The pool holds what is in use, and blocks for reuse: both are in the plan, with its context and overhead.
    let (held, whole) = (end["reserved_device_bytes"].as_f64(), start["plan"]["peak_device_bytes"].as_f64());
    assert!(held >= end["peak_device_bytes"].as_f64() && held <= whole, "{held:?} of {whole:?}: {end}");
    let of = |key: &str| end[key].as_f64().unwrap_or_else(|| panic!("no {key}: {end}"));
    // The measured memory pool does not include the driver context.
    let context =
        start["plan"]["device"]["context"].as_f64().unwrap_or_else(|| panic!("no context: {start}"));
    (of("planned_peak_bytes") - context, of("peak_device_bytes"))
}

#[test]
fn a_run_allocates_what_its_plan_lists() {
    if !device() {
        return;
    }
    let w = World::new();
    let (dense, tied) = (config(json!({})), config(json!({"tie_word_embeddings": true})));
    let moe = config(json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": true,
    }));
    let (all, none, nf4, f32s) =
        ("memory.recompute=all", "memory.recompute=none", "model.quantize=nf4", "model.dtype=f32");
    let inputs = "memory.offload=['activations']";
    let fp8 = "memory.products=fp8";
    let (feed_forward, norms) = ("memory.recompute=feed_forward", "memory.recompute=norms");
    let cases: &[(&Value, &str, &[&str])] = &[
        (&dense, FULL, &[none]),
        (&dense, FULL, &[all]),
        (&dense, FULL, &[f32s, none]),
        (&dense, FULL, &["optimizer.master=none", all]),
        (&dense, FULL, &["optimizer.name=adamw8bit", "optimizer.in_backward=true", "run.clip=0", all]),
        (&tied, FULL, &["optimizer.name=galore8bit", "optimizer.galore_rank=32", all]),
        (&dense, LORA, &[none]),
        (&dense, LORA, &[all]),
        (&dense, LORA, &[f32s, "memory.recompute=1"]),
        (&dense, FULL, &[feed_forward]),
        (&dense, LORA, &[norms]),
        (&dense, LORA, &[norms, inputs]),
        (&dense, FULL, &[all, inputs]),
        (&dense, LORA, &[nf4, feed_forward, "memory.dequantize=per_layer"]),
        (&moe, EXPERTS, &[nf4, feed_forward]),
        (&moe, EXPERTS, &[norms]),
        (&dense, LORA, &[none, "lora.dropout=0.1"]),
        (&dense, LORA, &[none, "lora.dora=true"]),
        (&dense, LORA, &[nf4, none]),
        (&dense, LORA, &[fp8, none]),
        (&dense, LORA, &[fp8, nf4, all]),
        (&dense, LORA, &[nf4, all, "memory.dequantize=per_matmul"]),
        (&dense, LORA, &[nf4, all, "memory.dequantize=per_layer"]),
        (&tied, FULL, &[all, "run.micro_rows=1"]),
        (&moe, EXPERTS, &[none]),
        (&moe, EXPERTS, &[nf4, all]),
    ];
    let (two, one) = ("parallel.data=2", "run.micro_rows=1");
    let ranks: &[(&Value, &str, &[&str])] = &[
        (&dense, FULL, &[none, one, two, "parallel.zero=0"]),
        (&dense, FULL, &[all, one, two, "parallel.zero=1"]),
        (&dense, FULL, &[all, one, two, "parallel.zero=2"]),
        (&dense, FULL, &[all, one, two, "parallel.zero=3"]),
        (&dense, FULL, &["optimizer.master=none", all, one, two, "parallel.zero=1"]),
        (&dense, FULL, &["optimizer.master=none", all, one, two, "parallel.zero=3"]),
        (&dense, LORA, &[nf4, all, one, two, "parallel.zero=3"]),
        (&dense, LORA, &[fp8, all, one, two, "parallel.zero=3"]),
        (&moe, EXPERTS, &[none, one, two, "parallel.zero=3"]),
    ];
    let ranks = if super::ranks::devices(2) { ranks } else { &[] };
    // Runs all cases before it fails.
    let (mut table, mut wrong) = (String::new(), Vec::new());
    for (config, rules, set) in cases.iter().chain(ranks) {
        write(&w, config, rules);
        let (planned, measured) = run(&w, set);
        let apart = 100.0 * (measured / planned - 1.0);
        let family = config["model_type"].as_str().unwrap_or_default();
        let line =
            format!("{apart:>7.2}% of {planned:>10} planned, {measured:>10} measured  {family} {set:?}");
        table += &format!("{line}\n");
        if apart.abs() > 1.0 {
            wrong.push(line);
        }
    }
    eprintln!("{table}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// After a step that begins anew for lack of memory, the peak is that of the smaller plan.
#[test]
fn a_step_that_begins_anew_is_measured_anew() {
    if !device() || !emulated() {
        return;
    }
    let w = World::new();
    write(&w, &config(json!({})), LORA);
    let r = ran(w.command(&["run", "r.toml"]).env("EMU_CUBLAS_FAIL", "60").output().expect("started"));
    assert_eq!(r.code, 0, "{}", r.err);
    let (replanned, end) = (&w.events("out", "replanned")[0], &w.events("out", "end")[0]);
    let of = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{replanned}, {end}"));
    let planned = of(&end["planned_peak_bytes"]) - of(&replanned["plan"]["device"]["context"]);
    let apart = of(&end["peak_device_bytes"]) / planned - 1.0;
    assert!(apart.abs() < 0.05, "{apart:.3}: {}", r.err);
}

/// By default, inputs of recomputed layers are offloaded to the host if a step then recomputes less. The
/// numbers equal those of a run without offloading, and the memory is as planned.
#[test]
fn inputs_wait_on_the_host_where_it_pays() {
    if !device() {
        return;
    }
    let w = World::new();
    write(&w, &config(json!({"num_hidden_layers": 6})), LORA);
    let steps = "run.steps=3";
    let kept = run(&w, &[steps, "memory.recompute=feed_forward", "memory.offload=[]"]);
    let (numbers, end) = (w.steps("out"), w.events("out", "end"));
    assert!((kept.1 / kept.0 - 1.0).abs() < 0.01, "{kept:?}");
    // Slightly below the requirement, plus the reserve of the plan.
    let takes = end[0]["planned_peak_bytes"].as_u64().expect("a number");
    let budget = format!("memory.budget={}", (takes - 100_000) / 24 * 25);
    let offloaded = run(&w, &[steps, &budget, "memory.host_budget=8GiB"]);
    let start = &w.events("out", "start")[0]["plan"];
    assert_eq!(start["choices"]["inputs"]["value"], "host", "{start}");
    assert!(start["host"]["offloaded_activations"].as_u64() > Some(0), "{start}");
    assert!((offloaded.1 / offloaded.0 - 1.0).abs() < 0.01, "{offloaded:?}");
    assert!(offloaded.1 < kept.1, "{offloaded:?} {kept:?}");
    assert_eq!(w.steps("out"), numbers);
}
