//! Text models within vision checkpoints, with linear attention and fused experts; checkpoints in 8 bits; names of
//! tensors that only transformers maps.

use crate::world::{World, recipe, repository};
use candle_core::{DType, Device, Tensor};
use ft::files::{TensorFiles, write_file};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

const ALL: &str = "[[train]]\nmodules = [\"/.*/\"]\nmethod = \"full\"\n";
const DENSE: &str = "[[train]]\nmodules = [\"attention\", \"mlp\"]\nrank = 3\n";
const MIXTURE: &str = "[[train]]\nmodules = [\"attention\", \"experts\", \"mlp\"]\nrank = 3\n";

/// A folder with the recipe `r.toml` of a fixture's model. Returns the model's folder.
fn world(case: &str, rules: &str) -> (World, String) {
    let w = World::new();
    let model = repository().join("tests/fixtures").join(case).display().to_string();
    let source = format!("source = \"{model}\"");
    w.write("r.toml", recipe(rules).replace("source = \"tiny\"\nweights = \"random\"", &source));
    (w, model)
}

/// Dtype, shape and bytes of all tensors of a model.
fn tensors(dir: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let files = TensorFiles::open_model(dir).expect("a model");
    let read = |n: &str| {
        let info = files.info(n).expect("a tensor");
        (info.dtype.to_string(), info.shape.clone(), files.read(n).expect("read"))
    };
    files.names().map(|n| (n.to_string(), read(n))).collect()
}

/// The model of a run in full has the tensors of its source by name and shape; those of other parts to the byte.
#[test]
fn other_parts_of_a_checkpoint_stay_as_they_are() {
    for case in ["families/qwen35-dense/model", "families/qwen35-moe/model"] {
        let (w, model) = world(case, ALL);
        w.ok(&["run", "r.toml", "run.output=a"]);
        let (before, after) = (tensors(Path::new(&model)), tensors(&w.path("a/model")));
        assert!(before.keys().eq(after.keys()), "{case}: {:?}", after.keys());
        for (name, (dtype, shape, bytes)) in &before {
            let (d, s, b) = &after[name];
            let apart = name.contains("visual") || name.starts_with("mtp");
            assert_eq!((dtype, shape), (d, s), "{name}");
            assert_eq!(bytes == b, apart, "{name}");
        }
        // An absolute path stays as it is.
        let (source, written) = (w.json(&format!("{model}/config.json")), w.json("a/model/config.json"));
        assert_eq!(source["architectures"], written["architectures"]);
        assert_eq!(source["vision_config"], written["vision_config"]);
        let end = w.events("a", "eval").last().and_then(|e| e["loss"].as_f64()).expect("an evaluation");
        let loss = w.ok(&["eval", "r.toml", "--json", "model.source=a/model"]).loss();
        assert!((loss - end).abs() <= 1e-6 * end, "{case}: {loss} read again, {end} in the run");
    }
}

/// Adapters, evaluated and merged, give one loss, on fused experts and on weights in 8 bits; a stopped run goes on.
#[test]
fn adapters_merge_and_runs_resume() {
    for (case, rules) in [
        ("families/qwen35-dense/model", DENSE),
        ("families/qwen35-moe/model", MIXTURE),
        ("families/qwen3-next/model", MIXTURE),
        ("families/gemma4/model", DENSE),
        ("families/gemma4-moe/model", MIXTURE),
        ("fp8/model", DENSE),
    ] {
        let (w, model) = world(case, rules);
        w.ok(&["run", "r.toml", "run.output=a", "run.steps=12"]);
        let end = w.events("a", "eval").last().and_then(|e| e["loss"].as_f64()).expect("an evaluation");
        let unmerged = w.ok(&["eval", "r.toml", "--json", "--adapter", "a/adapter"]).loss();
        w.ok(&["merge", "a/adapter", "--out", "m", "--dtype", "f32"]);
        let merged = w.ok(&["eval", "r.toml", "--json", "model.source=m"]).loss();
        assert!((unmerged - end).abs() <= 1e-6 * end, "{case}: {unmerged} unmerged, {end} in the run");
        assert!((merged - end).abs() <= 1e-5 * end, "{case}: {merged} merged, {end} in the run");
        let (before, after) = (tensors(Path::new(&model)), tensors(&w.path("m")));
        let of_weights = |n: &&String| !n.ends_with("_scale_inv");
        assert!(before.keys().filter(of_weights).eq(after.keys()), "{case}: {:?}", after.keys());
        w.resumed_in_half(&["run.steps=12"]);
        assert!(
            w.read("half/adapter/adapter_model.safetensors") == w.read("a/adapter/adapter_model.safetensors")
        );
    }
}

/// An adapter on a checkpoint with the names of its release has those of transformers 5, leaves the towers alone, and is
/// read again.
#[test]
fn adapters_of_a_release_have_the_names_of_transformers_5() {
    let (w, _) = world("families/gemma3/model_nested", DENSE);
    w.ok(&["run", "r.toml", "run.output=a", "run.steps=2"]);
    let files = TensorFiles::open_file(&w.path("a/adapter/adapter_model.safetensors")).expect("an adapter");
    const BELOW: &str = "base_model.model.model.language_model.layers.";
    assert!(files.names().all(|n| n.starts_with(BELOW)), "{:?}", files.names().next());
    let config = w.json("a/adapter/adapter_config.json");
    let others = config["exclude_modules"].as_str().expect("an expression");
    assert!(others.contains("vision_tower"), "{others}");
    let end = w.events("a", "eval").last().and_then(|e| e["loss"].as_f64()).expect("an evaluation");
    let again = w.ok(&["eval", "r.toml", "--json", "--adapter", "a/adapter"]).loss();
    assert!((again - end).abs() <= 1e-6 * end, "{again} read again, {end} in the run");
}

/// Training on the text model's own class gives its names; suffixes of names choose linears of a tower too.
#[test]
fn adapters_of_other_programs_fit_a_vision_checkpoint() {
    let (w, _) = world("families/gemma3/model_nested", DENSE);
    w.ok(&["run", "r.toml", "run.output=a", "run.steps=2"]);
    let end = w.events("a", "eval").last().and_then(|e| e["loss"].as_f64()).expect("an evaluation");
    let path = w.path("a/adapter/adapter_model.safetensors");
    let files = TensorFiles::open_file(&path).expect("an adapter");
    let read = |n: &str| files.tensor(n, DType::F32, &Device::Cpu).expect("a tensor");
    let held: Vec<(String, Tensor)> = files.names().map(|n| (n.to_string(), read(n))).collect();
    let eval = ["eval", "r.toml", "--json", "--adapter", "a/adapter"];

    const TOWER: &str = "base_model.model.model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj";
    for (value, code) in [(0f32, 0), (1.0, 4)] {
        let mut all = held.clone();
        for (half, rows, cols) in [("A", 3usize, 8usize), ("B", 8, 3)] {
            let values = Tensor::full(value, (rows, cols), &Device::Cpu).expect("values");
            all.push((format!("{TOWER}.lora_{half}.weight"), values));
        }
        write_file(&path, &all, &[("format", "pt")]).expect("written");
        for r in [w.ft(&eval), w.ft(&["merge", "a/adapter", "--out", &format!("m{code}")])] {
            assert_eq!(r.code, code, "{}", r.err);
            assert!(
                code == 0 || r.err.contains(TOWER) && r.err.contains("the text model alone"),
                "{}",
                r.err
            );
        }
    }

    let alone = |n: &str| n.replace("model.language_model.", "model.");
    let all: Vec<_> = held.iter().map(|(n, t)| (alone(n), t.clone())).collect();
    write_file(&path, &all, &[("format", "pt")]).expect("written");
    let module =
        |n: &String| Some(n.strip_prefix("base_model.model.")?.strip_suffix(".lora_A.weight")?.to_string());
    let mut config = w.json("a/adapter/adapter_config.json");
    config["target_modules"] = json!(all.iter().filter_map(|(n, _)| module(n)).collect::<Vec<_>>());
    w.write("a/adapter/adapter_config.json", config.to_string());
    let again = w.ok(&eval).loss();
    assert!((again - end).abs() <= 1e-6 * end, "{again} read again, {end} in the run");
}

/// A base model's checkpoint lacks the prefix (Qwen3-Embedding), and a tied one of safetensors' `save_model` has the
/// head's name alone. Both train as the model with a head, and are written under its names.
#[test]
fn names_of_a_base_model_and_of_a_tied_head_are_found() {
    let (w, model) = world("reference/qwen3-dense/model", DENSE);
    let step = |run: &str, source: &str| {
        let set = [format!("run.output={run}"), format!("model.source={source}")];
        w.ok(&["run", "r.toml", "run.steps=1", &set[0], &set[1]]);
    };
    step("whole", &model);
    let files = TensorFiles::open_model(Path::new(&model)).expect("a model");
    for (of, from, to) in [("base", "model.", ""), ("head", "model.embed_tokens.", "lm_head.")] {
        w.copy(&model, "other");
        let renamed = |name: &str| {
            let own = files.tensor(name, DType::F32, &Device::Cpu).expect("a tensor");
            (name.replacen(from, to, 1), own)
        };
        let held: Vec<_> = files.names().map(renamed).collect();
        write_file(&w.path("other/model.safetensors"), &held, &[]).expect("written");
        step(of, &w.path("other").display().to_string());
        assert_eq!(w.steps(of), w.steps("whole"), "{of}");
        let out = format!("merged-{of}");
        w.ok(&["merge", &format!("{of}/adapter"), "--out", &out]);
        let merged = tensors(&w.path(&out));
        assert!(tensors(Path::new(&model)).keys().eq(merged.keys()), "{of}: {:?}", merged.keys());
    }
}

/// Generation holds the state of linear layers.
#[test]
fn states_are_kept_in_generation() {
    let w = World::new();
    w.tokenizer("tiny");
    w.config(
        "tiny",
        json!({
            "model_type": "qwen3_5_text", "vocab_size": 285, "full_attention_interval": 3,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
        }),
    );
    w.write("r.toml", recipe(ALL));
    w.ok(&["run", "r.toml", "run.output=a", "model.dtype=bf16"]);
    w.ok(&["chat", "a/model", "--prompt", "What colour is the sky?", "--max-tokens", "5"]);
    w.ok(&["quantize", "a/model", "--out", "q"]);
    w.ok(&["eval", "r.toml", "--json", "model.source=q", "model.weights=load"]);
}
