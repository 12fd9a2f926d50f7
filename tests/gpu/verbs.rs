//! The verbs on the device.

use super::world::{World, repository};
use super::{apart, device};

/// The quickstart's recipe, and its model's folder.
fn quickstart(w: &World) -> String {
    let text = std::fs::read_to_string(repository().join("recipes/quickstart.toml")).expect("a recipe");
    w.write("q.toml", text.replace("\"data/", &format!("\"{}/data/", repository().display())));
    repository().join("data/model").display().to_string()
}

/// Trained for a few steps on the device, an adapter evaluates there as on the CPU, and so do the model that it is merged
/// into and what it is exported to.
#[test]
fn an_adapter_from_the_device_is_one_anywhere() {
    if !device() {
        return;
    }
    let w = World::new();
    let model = quickstart(&w);
    w.ok(&[
        "run",
        "q.toml",
        "run.device=cuda",
        "model.dtype=f32",
        "run.steps=3",
        "run.eval_at_start=false",
        "run.output=a",
    ]);
    let eval =
        |args: &[&str]| w.ok(&[&["eval", "q.toml", "--json", "model.dtype=f32"], args].concat()).loss();
    let (there, here) = (
        eval(&["--adapter", "a/adapter", "run.device=cuda"]),
        eval(&["--adapter", "a/adapter", "run.device=cpu"]),
    );
    assert!(apart(there, here) <= 1e-5, "{there} on the device, {here} on the CPU");
    w.ok(&["merge", "a/adapter", "--base", &model, "--dtype", "f32", "--out", "merged"]);
    let merged = format!("model.source={}", w.path("merged").display());
    let of_merged = eval(&[&merged, "run.device=cuda"]);
    assert!(apart(of_merged, there) <= 1e-4, "{there} with the adapter, {of_merged} merged");
    w.ok(&["export", "a/adapter", "--to", "vllm", "--out", "exported"]);
}

#[test]
fn chat_and_bench_run_on_the_device() {
    if !device() {
        return;
    }
    let w = World::new();
    let model = quickstart(&w);
    let ask = |device: &str| {
        let question = ["--prompt", "What colour is the sky?", "--max-tokens", "6", "--device", device];
        w.ok(&[&["chat", &model, "--dtype", "f32"], &question[..]].concat()).out
    };
    assert_eq!(ask("cuda"), ask("cpu"));
    w.config("tiny", serde_json::json!({}));
    w.write("r.toml", super::world::recipe(super::world::LORA));
    let bench = w.ok(&["bench", "r.toml", "run.device=cuda", "--steps", "1", "--json"]);
    let j: serde_json::Value = serde_json::from_str(&bench.out).expect("JSON");
    for key in ["tokens_per_second", "matmul_flops", "copy_bytes_per_second"] {
        assert!(j[key].as_f64().is_some_and(|x| x > 0.0), "{key}: {j}");
    }
}
