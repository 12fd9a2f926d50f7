//! Reference models: eight steps on the device agree with PyTorch in loss and gradient norm, and with the
//! CPU in the result.

use super::world::{World, as_fixture, few, repository, rows_of};
use super::{apart, device};
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;

/// Training methods of a case: in full, with the adapter, with the adapter on a 4-bit base.
const FULL: &str = "[[train]]\nmodules = [\"/.*/\"]\nmethod = \"full\"\n";

fn load(path: &Path) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(path, &Device::Cpu).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Recipe of a case, as trained with PyTorch (`tests/fixtures/README.md`).
fn case(w: &World, model: &str, rules: &str) {
    let start = format!("[model]\nsource = {model:?}\ndtype = \"f32\"\n{rules}");
    let rows = "train = [{ source = \"case.jsonl\", format = \"tokens\" }]\nmask = \"none\"";
    w.write("case.toml", as_fixture(&start, rows));
}

/// Distance between the results of two runs.
fn ends(w: &World, file: &str) -> f64 {
    let (a, b) = (load(&w.path("cuda").join(file)), load(&w.path("cpu").join(file)));
    assert_eq!(a.len(), b.len());
    let flat = |t: &Tensor| t.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
    let (mut off, mut all) = (0.0, 0.0);
    for (name, t) in &b {
        let (x, y) = (flat(&a[name]).expect("values"), flat(t).expect("values"));
        off += x.iter().zip(&y).map(|(x, y)| (x - y).powi(2)).sum::<f64>();
        all += y.iter().map(|y| y.powi(2)).sum::<f64>();
    }
    (off / all).sqrt()
}

/// Trains on the device and on the CPU, and compares.
fn train(w: &World, what: &str, file: &str, expected: &Value) {
    for device in ["cuda", "cpu"] {
        w.ok(&[
            "run",
            "case.toml",
            "--overwrite",
            &format!("run.device={device}"),
            &format!("run.output={device}"),
        ]);
    }
    let got = w.events("cuda", "step");
    let want = expected.as_array().unwrap_or_else(|| panic!("{what}: no trajectory"));
    assert_eq!(got.len(), want.len(), "{what}");
    let number = |v: &Value, key: &str| v[key].as_f64().unwrap_or(f64::NAN);
    let worst = |key: &str| {
        got.iter().zip(want).map(|(g, w)| apart(number(g, key), number(w, key))).fold(0.0, f64::max)
    };
    let (loss, norm, end) = (worst("loss"), worst("grad_norm"), ends(w, file));
    eprintln!("{what}: loss {loss:.1e}, gradient norm {norm:.1e}, end {end:.1e}");
    assert!(loss <= 1e-5 && norm <= 1e-4 && end <= 1e-4, "{what}: {loss:.1e} {norm:.1e} {end:.1e}");
}

fn reference(case: &str) -> String {
    format!("reference/{case}")
}

/// The first of these cases; all of them each night.
fn cases(names: &[String]) {
    if !device() {
        return;
    }
    for name in names.iter().take(few(1)) {
        let (w, dir) = (World::new(), repository().join("tests/fixtures").join(name).display().to_string());
        w.write("case.jsonl", rows_of(dir.as_ref()));
        let model = format!("{dir}/model");
        let text = std::fs::read_to_string(format!("{dir}/trajectory.json")).expect("a trajectory");
        let trajectory: Value = serde_json::from_str(&text).expect("JSON");
        case(&w, &model, FULL);
        train(&w, &format!("{name} full"), "model/model.safetensors", &trajectory["full"]);
        if Path::new(&dir).join("adapter_init").exists() {
            case(&w, &model, &format!("[lora]\ninit = \"{dir}/adapter_init\"\n"));
            train(&w, &format!("{name} lora"), "adapter/adapter_model.safetensors", &trajectory["lora"]);
        }
    }
}

#[test]
fn dense_models_train_as_in_pytorch() {
    cases(&["qwen3-dense", "qwen2-bias", "llama3-rope", "llama-yarn", "mistral"].map(reference));
}

#[test]
fn windows_and_other_heads_train_as_in_pytorch() {
    cases(&["qwen2-sliding", "qwen3-one-kv", "llama-embed-head", "qwen3-moe-sliding"].map(reference));
}

#[test]
fn mixtures_train_as_in_pytorch() {
    cases(&["mixtral", "qwen3-moe", "mixtral-fused", "qwen2-moe", "qwen3-moe-top1"].map(reference));
}

/// Norms behind the blocks, neighboring channels that rotate, joint matrices, factors by length; experts beside a dense
/// part; the delta rule, sinks.
#[test]
fn newer_families_train_as_in_pytorch() {
    let attention = ["gemma4-moe", "phi3-long", "glm4", "phi3", "olmo2", "olmo3", "smollm3", "ministral"];
    let others = ["gemma3", "gemma4", "gemma4-joint", "gpt-oss", "qwen35-dense", "qwen35-moe", "qwen3-next"];
    cases(
        &[&attention[..], &others].concat().into_iter().map(|c| format!("families/{c}")).collect::<Vec<_>>(),
    );
}
