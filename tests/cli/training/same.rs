//! Results do not depend on recompute and micro-batches.

use crate::world::{FULL, LORA, World, recipe};
use serde_json::json;

#[test]
fn recomputing_changes_no_byte() {
    let w = World::new();
    w.config("tiny", json!({}));
    for (rules, result) in [(LORA, "adapter/adapter_model.safetensors"), (FULL, "model/model.safetensors")] {
        w.write("r.toml", recipe(rules));
        let mut first = None;
        for recompute in ["all", "feed_forward", "norms", "none", "2", "auto"] {
            let output = format!("run.output=runs/{recompute}");
            let set = format!("memory.recompute={recompute}");
            w.ok(&["run", "r.toml", &output, &set, "--overwrite"]);
            let run = format!("runs/{recompute}");
            let end = (w.read(&format!("{run}/{result}")), w.steps(&run));
            assert_eq!(end.1.len(), 6);
            assert!(*first.get_or_insert_with(|| end.clone()) == end, "{recompute}: {result} differs");
        }
    }
}

#[test]
fn offloading_changes_no_byte() {
    let w = World::new();
    w.config("tiny", json!({}));
    for (rules, result) in [(LORA, "adapter/adapter_model.safetensors"), (FULL, "model/model.safetensors")] {
        w.write("r.toml", recipe(rules));
        for dtype in ["model.dtype=f32", "model.dtype=bf16"] {
            let end = |run: &str, offload: &str| {
                let output = format!("run.output={run}");
                w.ok(&["run", "r.toml", &output, dtype, offload, "--overwrite"]);
                let files = [result, "checkpoints/step-00000006/optimizer.safetensors"];
                (files.map(|f| w.read(&format!("{run}/{f}"))), w.steps(run))
            };
            let (on, off) = (end("on", "memory.offload=['optimizer']"), end("off", "memory.offload=[]"));
            assert_eq!(on.1.len(), 6);
            assert!(on == off, "{dtype}: {result} differs");
        }
    }
}

#[test]
fn any_split_into_micro_batches_has_the_same_loss() {
    let w = World::new();
    w.config("tiny", json!({}));
    for (name, pack) in [("packed", "data.pack=true"), ("padded", "data.pack=false")] {
        for (rules, kind) in [(LORA, "lora"), (FULL, "full")] {
            w.write("r.toml", recipe(rules));
            let mut ends = Vec::new();
            for micro in [1, 2, 4] {
                let run = format!("runs/{name}-{kind}-{micro}");
                let (output, micro) = (format!("run.output={run}"), format!("run.micro_rows={micro}"));
                w.ok(&["run", "r.toml", "run.steps=2", pack, &output, &micro]);
                let norm = w.events(&run, "step")[0]["grad_norm"].as_f64().expect("a norm");
                ends.push((w.first_loss(&run), norm));
            }
            for (loss, norm) in &ends[1..] {
                assert!((loss - ends[0].0).abs() <= 1e-6 * ends[0].0, "{name} {kind}: {ends:?}");
                assert!((norm - ends[0].1).abs() <= 1e-5 * ends[0].1, "{name} {kind}: {ends:?}");
            }
        }
    }
}
