//! Leftovers of an earlier run are never mistaken for results of a later one, and are deleted only when it
//! begins.

use crate::world::{FULL, World, content, recipe};

const LORA: &str = "[lora]\nrank = 4\n[[train]]\nmodules = [\"attention\", \"mlp\"]\n";

fn world() -> World {
    let w = World::tiny(LORA);
    w.ok(&["run", "r.toml", "run.output=o", "run.save_every=1", "run.keep=9"]);
    w
}

/// Metrics of a run killed after the last step.
fn without_end(w: &World) {
    let text = w.text("o/metrics.jsonl");
    let kept = text.lines().filter(|l| !l.contains("\"event\":\"end\""));
    w.write("o/metrics.jsonl", kept.map(|l| format!("{l}\n")).collect::<String>());
}

#[test]
fn a_resumed_run_does_not_answer_with_its_earlier_result() {
    let w = world();
    let loss = |of: &str| w.ok(&["eval", "r.toml", "--adapter", of, "--json"]).loss();
    let (first, before) = (loss("o"), content(&w.path("o/adapter")));
    assert_eq!(first, loss("o/adapter"));
    w.ok(&[
        "run",
        "r.toml",
        "run.output=o",
        "run.save_every=1",
        "run.steps=8",
        "--resume",
        "--accept-change",
        "run.steps",
    ]);
    let (last, newest) = (loss("o"), w.checkpoints("o").pop().expect("a checkpoint"));
    assert_ne!(first, last, "it learns nothing");
    // The state after a kill just before the new result replaces the first.
    for (name, bytes) in &before {
        std::fs::write(name, bytes).expect("written");
    }
    without_end(&w);
    assert_eq!(loss("o"), last);
    let r = w.ok(&["eval", "o"]);
    let shown = format!("o/checkpoints/{newest}");
    assert!(r.out.contains(&shown) && r.err.contains(&shown), "{}{}", r.out, r.err);
    assert_eq!(loss("o/adapter"), first);
    // A damaged checkpoint is refused by its name, and skipped with a warning by that of the run.
    let weights = format!("{shown}/weights.safetensors");
    let mut bytes = w.read(&weights);
    *bytes.last_mut().expect("weights") ^= 1;
    w.write(&weights, bytes);
    let r = w.ft(&["merge", &shown, "--out", "m"]);
    assert!(r.code == 5 && r.err.contains("weights.safetensors is not what was written"), "{}", r.err);
    let r = w.ok(&["eval", "o"]);
    assert!(r.err.contains("weights.safetensors is not what was written"), "{}", r.err);
    // The same without a checkpoint.
    std::fs::remove_dir_all(w.path("o/checkpoints")).expect("removed");
    for verb in [&["eval", "o"][..], &["merge", "o", "--out", "m"], &["push", "o", "me/x", "--dry-run"]] {
        let r = w.ft(verb);
        assert!(
            r.code == 2 && r.err.contains("has not ended and has no checkpoint yet"),
            "{verb:?}: {}",
            r.err
        );
        assert!(r.err.contains("o/adapter is an earlier one's"), "{}", r.err);
    }
}

/// If the base cannot be loaded, existing files stay.
#[test]
fn checkpoints_stay_until_the_next_run_is_loaded() {
    let w = world();
    w.write("full.toml", recipe(FULL));
    w.ok(&["run", "full.toml", "run.output=f"]);
    let mut bytes = w.read("f/model/model.safetensors");
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    w.write("f/model/model.safetensors", bytes);
    let before = content(&w.path("o"));
    let on = ["run", "r.toml", "run.output=o", "--overwrite", "model.weights=load"];
    let r = w.ft(&[&on[..], &["model.source=f/model"]].concat());
    assert!(r.code == 4 && r.err.contains("not finite"), "{} {}", r.code, r.err);
    assert!(content(&w.path("o")) == before, "what was there changed");
    w.ok(&["run", "r.toml", "run.output=o", "--overwrite", "run.save_every=0", "run.keep=1"]);
    assert_eq!(w.checkpoints("o").len(), 1, "checkpoints of the first run are left");
}
