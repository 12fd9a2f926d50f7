//! Learning rates by method: on the screen before a run, in the plan, in the metrics, and in the identity
//! for a resume.

use crate::world::{World, recipe};
use serde_json::{Value, json};

/// LoRA, a rule in full, and a factor.
const MIXED: &str = r#"
[[train]]
modules = ["attention"]
[[train]]
modules = ["mlp"]
lr_scale = 0.5
[[train]]
modules = ["norms"]
method = "full"
"#;

fn world(rules: &str, lr: &str) -> World {
    let w = World::new();
    w.config("tiny", json!({}));
    w.write(
        "r.toml",
        recipe(rules).replace("lr = 1e-2", lr).replace("warmup_steps = 2", "schedule = \"constant\""),
    );
    w
}

fn rates(list: &Value) -> Vec<(String, f64)> {
    let list = list.as_array().expect("a list");
    list.iter()
        .map(|r| (r["method"].as_str().expect("a method").into(), r["lr"].as_f64().expect("a rate")))
        .collect()
}

fn is(found: &[(String, f64)], want: &[(&str, f64)]) -> bool {
    found.len() == want.len()
        && found.iter().zip(want).all(|((m, lr), (method, x))| m == method && (lr - x).abs() <= 1e-12 * x)
}

/// A rule in full does not use the default for LoRA. All subcommands show the rates before the run.
#[test]
fn every_learning_rate_is_shown_before_a_run() {
    let w = world(MIXED, "");
    let want = [("lora", 2e-4), ("lora", 1e-4), ("full", 1e-5)];
    let plan = w.ok(&["plan", "r.toml", "--json"]).json();
    let found = rates(&plan["learning_rates"]);
    assert!(is(&found, &want), "{found:?}");
    let trainable: u64 = plan["learning_rates"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|r| r["parameters"].as_u64())
        .sum();
    assert_eq!(plan["parameters"]["trainable"], trainable);
    let line = "2e-4 (LoRA, by default), 1e-4 (LoRA, by default, lr_scale 0.5), 1e-5 (in full, by default)";
    for command in [&["check", "r.toml"][..], &["plan", "r.toml", "--verbose"]] {
        let out = w.ok(command).out;
        assert!(out.contains(line), "{command:?}: {out}");
    }
    let r = w.ok(&["run", "r.toml"]);
    let (at, step) = (r.err.find(line), r.err.find("step 1/"));
    assert!(at.is_some() && at < step, "{}", r.err);
    assert!(is(&rates(&w.events("runs/r", "start")[0]["learning_rates"]), &want));
    let step = &w.events("runs/r", "step")[3];
    assert_eq!(step["lr"], 2e-4);
    assert_eq!(step["learning_rates"], json!([2e-4, 1e-4, 1e-5]));

    // With a single rate, the table is omitted.
    let w = world("[[train]]\nmodules = [\"mlp\"]\n", "lr = 3e-3");
    w.ok(&["run", "r.toml"]);
    let step = &w.events("runs/r", "step")[0];
    assert!(step["lr"] == 3e-3 && step["learning_rates"].is_null(), "{step}");
}

/// Every rate is used in the update: each method alone gives the same weights as in the combination.
#[test]
fn each_tensor_moves_by_its_own_rate() {
    let first = |rules: &str, set: &[&str]| {
        let w = world(rules, "");
        w.ok(&[&["run", "r.toml", "run.steps=1", "run.clip=0", "optimizer.weight_decay=0.0"][..], set]
            .concat());
        let files = ft::files::TensorFiles::open_file(&w.path("runs/r/adapter/adapter_model.safetensors"))
            .expect("an adapter");
        let get = |end: &str| {
            let name = files.names().find(|n| n.ends_with(end)).expect("a tensor").to_string();
            files.read(&name).expect("bytes")
        };
        [get("layers.1.self_attn.q_proj.lora_B.weight"), get("layers.1.input_layernorm.weight")]
    };
    let mixed = first(MIXED, &[]);
    assert!(mixed[0] == first(MIXED, &["optimizer.lr=2e-4"])[0], "LoRA's default");
    assert!(mixed[1] == first(MIXED, &["optimizer.lr=1e-5"])[1], "the default in full");
    assert!(mixed[0] != first(MIXED, &["optimizer.lr=1e-5"])[0]);
}

/// The default rate is part of the identity: writing it into the recipe changes nothing, another rate does.
#[test]
fn a_resume_refuses_another_learning_rate() {
    let w = world(MIXED, "");
    w.ok(&["run", "r.toml", "run.save_every=3"]);
    std::fs::remove_dir_all(w.path("runs/r/checkpoints/step-00000006")).expect("removed");
    let state = "runs/r/checkpoints/step-00000003/state.json";
    let text = w.text(state);
    assert!(text.contains("\"optimizer.lr\": \"(default: full 1e-5, lora 2e-4)\""), "{text}");
    w.ok(&["run", "r.toml", "--resume"]);
    let r = w.ft(&["run", "r.toml", "--resume", "optimizer.lr=2e-4"]);
    assert!(r.code == 2 && r.err.contains("optimizer.lr: was (default: full 1e-5, lora 2e-4)"), "{}", r.err);
}

/// Without rules, the modules of an adapter train with the same defaults.
#[test]
fn modules_of_an_adapter_have_the_default_rates_of_their_method() {
    let w = world(MIXED, "");
    w.ok(&["run", "r.toml", "run.output=a"]);
    w.write("b.toml", recipe("[lora]\ninit = \"a/adapter\"\n").replace("lr = 1e-2", ""));
    let want = [("lora", 2e-4), ("full", 1e-5)];
    let plan = w.ok(&["plan", "b.toml", "--json"]).json();
    assert!(is(&rates(&plan["learning_rates"]), &want), "{plan}");
    w.ok(&["run", "b.toml"]);
    assert!(is(&rates(&w.events("runs/b", "start")[0]["learning_rates"]), &want));
    // A final rate above one of the peak rates.
    for verb in ["check", "plan", "run"] {
        let r = w.ft(&[verb, "b.toml", "optimizer.min_lr=1e-4", "run.output=c"]);
        assert!(r.code == 2 && r.err.contains("min_lr"), "{verb}: {} {}", r.code, r.err);
    }
}

/// LoRA+: updates of B are larger by the ratio, other updates are not. In the first step, B = 0, so A has
/// no gradient.
#[test]
fn lr_scale_b_changes_updates_of_b_alone() {
    let w = world("[[train]]\nmodules = [\"mlp\"]\n", "lr = 1e-3");
    let adapter = |set: &[&str], out: &str| {
        w.ok(&[&["run", "r.toml", "run.steps=1", "run.clip=0", out], set].concat());
        let folder = out.trim_start_matches("run.output=");
        ft::files::TensorFiles::open_file(&w.path(&format!("{folder}/adapter/adapter_model.safetensors")))
            .expect("an adapter")
    };
    let (one, plus) =
        (adapter(&[], "run.output=one"), adapter(&["optimizer.lr_scale_b=16"], "run.output=plus"));
    for name in one.names() {
        let values = |files: &ft::files::TensorFiles| -> Vec<f32> {
            let bytes = files.read(name).expect("bytes");
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        let factor = if name.contains("lora_B") { 16.0 } else { 1.0 };
        let (a, b) = (values(&one), values(&plus));
        assert!(a.iter().any(|x| *x != 0.0), "{name}");
        assert!(a.iter().zip(&b).all(|(x, y)| (x * factor - y).abs() <= 1e-5 * y.abs()), "{name}");
    }
    let plan = w.ok(&["plan", "r.toml", "--json", "optimizer.lr_scale_b=16"]).json();
    let found = rates(&plan["learning_rates"]);
    assert!(is(&found, &[("lora", 1.6e-2), ("lora", 1e-3)]), "{found:?}");
    assert_eq!(plan["learning_rates"][0]["lora_b"], true);
}
