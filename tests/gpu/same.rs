//! What must not change the numbers, on the device too; and kinds of training that have no case, against the CPU.

use super::world::{FULL, LORA, World, recipe};
use super::{apart, device};
use serde_json::json;

fn world(rules: &str) -> World {
    let w = World::new();
    w.config("tiny", json!({}));
    w.write("r.toml", recipe(rules));
    w
}

#[test]
fn recomputing_changes_no_byte() {
    if !device() {
        return;
    }
    for (rules, result) in [(LORA, "adapter/adapter_model.safetensors"), (FULL, "model/model.safetensors")] {
        let w = world(rules);
        for dtype in ["f32", "bf16"] {
            let mut first = None;
            for recompute in ["all", "none"] {
                let (output, set) =
                    (format!("run.output={recompute}"), format!("memory.recompute={recompute}"));
                let dtype = format!("model.dtype={dtype}");
                let args = ["run", "r.toml", "run.device=cuda", "run.steps=2"];
                let args = [&args[..], &[&output, &set, &dtype, "--overwrite"]].concat();
                w.ok(&args);
                let end = (w.read(&format!("{recompute}/{result}")), w.steps(recompute));
                assert!(
                    *first.get_or_insert_with(|| end.clone()) == end,
                    "{dtype}, {recompute}: {result} differs"
                );
            }
        }
    }
}

/// Losses and gradient norms of six steps on both devices.
fn close(rules: &str, set: &[&str], bar: f64) {
    let w = world(rules);
    for device in ["cuda", "cpu"] {
        let (device, output) = (format!("run.device={device}"), format!("run.output={device}"));
        w.ok(&[&["run", "r.toml", &device, &output], set].concat());
    }
    let (a, b) = (w.events("cuda", "step"), w.events("cpu", "step"));
    assert_eq!((a.len(), b.len()), (6, 6));
    for (a, b) in a.iter().zip(&b) {
        for key in ["loss", "grad_norm"] {
            let (x, y) = (a[key].as_f64().expect("a number"), b[key].as_f64().expect("a number"));
            assert!(apart(x, y) <= bar, "{set:?}: {key} {x} on the device, {y} on the CPU");
        }
    }
}

#[test]
fn every_kind_of_adapter_is_close_to_the_cpu() {
    if !device() {
        return;
    }
    close(LORA, &["model.dtype=f32"], 1e-4);
    close(LORA, &["model.dtype=f32", "lora.dora=true"], 1e-4);
    close(LORA, &["model.dtype=f32", "model.quantize=nf4"], 1e-4);
    close(LORA, &["model.dtype=f32", "model.quantize=nf4", "memory.dequantize=per_layer"], 1e-4);
    close(LORA, &["model.dtype=bf16"], 3e-2);
    close(LORA, &["model.dtype=bf16", "model.quantize=nf4"], 3e-2);
}

/// f16 with its loss scaled: as on the CPU, also where gradients overflow and a step is done again.
#[test]
fn half_precision_is_close_to_the_cpu() {
    if !device() {
        return;
    }
    for rules in [LORA, FULL] {
        close(rules, &["model.dtype=f16"], 1e-2);
    }
    let w = world(FULL);
    for device in ["cuda", "cpu"] {
        let (device, output) = (format!("run.device={device}"), format!("run.output={device}"));
        w.ok(&["run", "r.toml", &device, &output, "model.dtype=f16", "memory.scale=16777216"]);
    }
    let scales = |run: &str| -> Vec<f64> {
        w.events(run, "step").iter().map(|e| e["loss_scale"].as_f64().expect("a scale")).collect()
    };
    assert_eq!(scales("cuda").len(), 6);
    assert!(scales("cuda")[0] < 16_777_216.0, "nothing overflowed: {:?}", scales("cuda"));
    for (a, b) in w.events("cuda", "step").iter().zip(&w.events("cpu", "step")) {
        let [x, y] = [a, b].map(|e| e["loss"].as_f64().expect("a loss"));
        assert!(apart(x, y) <= 1e-2, "{x} on the device, {y} on the CPU");
    }
}

#[test]
fn training_in_full_is_close_to_the_cpu() {
    if !device() {
        return;
    }
    close(FULL, &["model.dtype=f32"], 1e-4);
    close(FULL, &["model.dtype=bf16"], 3e-2);
    close(FULL, &["model.dtype=f32", "memory.offload=['optimizer']"], 1e-4);
    let ends = "[[train]]\nmodules = [\"embedding\", \"head\", \"attention\"]\n";
    close(ends, &["model.dtype=f32"], 1e-4);
}
