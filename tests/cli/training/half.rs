//! Training in f16: loss scaling, repeated steps after an overflow, and resuming with the saved scale.

use crate::world::{FULL, LORA, World, recipe};
use serde_json::json;

fn world(rules: &str, std: f64) -> World {
    let w = World::new();
    w.config("tiny", json!({"initializer_range": std}));
    w.write("r.toml", recipe(rules).replace("steps = 6", "steps = 6\nsave_every = 1\nkeep = 6"));
    w
}

fn scales(w: &World, run: &str) -> Vec<f64> {
    w.events(run, "step").iter().map(|e| e["loss_scale"].as_f64().expect("a scale")).collect()
}

#[test]
fn losses_are_near_those_of_f32() {
    for rules in [LORA, FULL] {
        let w = world(rules, 0.1);
        for dtype in ["f32", "f16"] {
            w.ok(&["run", "r.toml", &format!("model.dtype={dtype}"), &format!("run.output={dtype}")]);
        }
        let losses = |run| -> Vec<f64> {
            w.events(run, "step").iter().map(|e| e["loss"].as_f64().expect("a loss")).collect()
        };
        let (half, single) = (losses("f16"), losses("f32"));
        assert_eq!((half.len(), single.len()), (6, 6));
        for (a, b) in half.iter().zip(&single) {
            assert!((a - b).abs() <= 2e-3 * b, "{half:?} {single:?}");
        }
        assert!(half != single, "f16 computes in f32");
        let norms =
            |run| w.events(run, "step").iter().map(|e| e["grad_norm"].as_f64().expect("a norm")).sum::<f64>();
        assert!((norms("f16") / norms("f32") - 1.0).abs() < 1e-2, "the scale is still in the gradients");
        assert!(w.events("f32", "step")[0].get("loss_scale").is_none());
        assert!(scales(&w, "f16").iter().all(|s| *s == 65_536.0));
    }
}

#[test]
fn an_overflowing_step_is_repeated_with_a_lower_scale() {
    let w = world(FULL, 0.1);
    let args = |run: &str| {
        [
            String::from("run"),
            "r.toml".into(),
            "model.dtype=f16".into(),
            "memory.scale=16777216".into(),
            format!("run.output={run}"),
        ]
    };
    let args = |run: &str, more: &[&str]| {
        let all: Vec<String> = args(run).into_iter().chain(more.iter().map(|s| s.to_string())).collect();
        w.ok(&all.iter().map(String::as_str).collect::<Vec<_>>());
    };
    args("whole", &[]);
    let seen = scales(&w, "whole");
    assert!(seen[0] < 16_777_216.0 && seen.windows(2).all(|s| s[1] <= s[0]), "{seen:?}");
    assert!(seen.iter().all(|s| *s >= 1.0), "{seen:?}");
    assert!(w.events("whole", "step").iter().all(|e| e["grad_norm"].as_f64().is_some_and(f64::is_finite)));

    // Resumed from the third step: same scales, same bits.
    args("again", &[]);
    for step in 4..=6 {
        std::fs::remove_dir_all(w.path(&format!("again/checkpoints/step-{step:08}"))).expect("a checkpoint");
    }
    std::fs::remove_dir_all(w.path("again/model")).expect("a result");
    args("again", &["--resume"]);
    assert_eq!(scales(&w, "again"), seen);
    assert_eq!(w.steps("again"), w.steps("whole"));
    let file = "model/model.safetensors";
    assert!(w.read(&format!("again/{file}")) == w.read(&format!("whole/{file}")), "{file} differs");
}

/// Loss scaling does not hide a non-finite loss.
#[test]
fn a_loss_that_overflows_ends_the_run() {
    let w = world(FULL, 30.0);
    let r = w.ft(&["run", "r.toml", "model.dtype=f16", "run.output=o"]);
    assert_eq!(r.code, 6, "{}", r.err);
}

/// The implementation of bf16 products on the CPU appears in metrics and output. An unavailable one is
/// refused by name.
#[test]
fn a_run_says_how_it_multiplies_bf16() {
    let w = world(LORA, 0.1);
    let run = |dtype: &str, wanted: Option<&str>| {
        let output = format!("{dtype}-{}", wanted.unwrap_or("auto"));
        let mut c = w.command(&[
            "run",
            "r.toml",
            "run.steps=1",
            &format!("model.dtype={dtype}"),
            &format!("run.output={output}"),
        ]);
        c.env_remove("FT_BF16").envs(wanted.map(|p| ("FT_BF16", p)));
        let ran = c.output().expect("started");
        let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
        (ran.status.code(), said, output)
    };
    for (dtype, wanted) in [("f32", None), ("bf16", None), ("bf16", Some("widened"))] {
        let (code, said, output) = run(dtype, wanted);
        assert_eq!(code, Some(0), "{said}");
        let products = w.events(&output, "start")[0]["products"].clone();
        let line = match products.as_str() {
            None => "CPU f32\n",
            Some("dots") => "CPU bf16 (AVX-512 BF16)\n",
            Some("widened") => "CPU bf16 (widened to f32)\n",
            Some(other) => panic!("{other}"),
        };
        assert!(said.contains(line), "{line:?} is not in {said}");
        assert_eq!(products.is_null(), dtype == "f32");
        assert!(wanted.is_none() || products == "widened", "{products}");
    }
    let (code, said, _) = run("f32", Some("fast"));
    assert!(code == Some(2) && said.contains("hint: FT_BF16=dots or widened"), "{said}");
}
