//! Shipped recipes of preferences and distillation learn: on two cores within a minute each, from the binary alone.

use crate::world::{World, nightly};
use serde_json::Value;

/// A number of the evaluation after a step.
fn after(w: &World, run: &str, step: u64, key: &str) -> f64 {
    let evals = w.events(run, "eval");
    let eval = evals.iter().find(|e| e["step"] == step).unwrap_or_else(|| panic!("step {step}: {evals:?}"));
    eval[key].as_f64().unwrap_or_else(|| panic!("no {key} in {eval}"))
}

/// What the commands of the pages teach, in the folder where they ran: the quickstart its manner, a third of the recipe of
/// preferences its pairs, and score heads more than nine in ten rows that are not trained on, from chance.
pub fn by_the_pages(w: &World) {
    let run = "runs/quickstart";
    let (before, learned) = (after(w, run, 0, "loss"), after(w, run, 100, "loss"));
    assert!(before > 4.0 && learned <= 0.5, "{run}: loss {before}, then {learned}");
    let run = "runs/quickstart-dpo";
    // a tie before the first step
    assert_eq!(after(w, run, 0, "accuracy"), 0.0);
    assert!(after(w, run, 20, "accuracy") > 0.9, "{run}");
    for (name, chance) in [("quickstart-reward", 0.6), ("quickstart-classify", 0.4)] {
        let evals = w.events(&format!("runs/{name}"), "eval");
        let accuracy = |e: Option<&Value>| e.and_then(|e| e["accuracy"].as_f64()).expect("an accuracy");
        let (first, last) = (accuracy(evals.first()), accuracy(evals.last()));
        assert!(first < chance && last > 0.9, "{name}: {first} {last}");
    }
}

/// From chance to more than nine of ten held-out pairs, in each task.
#[test]
fn every_preference_recipe_learns() {
    if !nightly() {
        return;
    }
    let w = World::new();
    for task in ["dpo", "orpo", "simpo", "cpo"] {
        let output = format!("run.output=runs/{task}");
        w.ok(&["run", "quickstart-dpo", &format!("task={task}"), &output]);
        let run = output.trim_start_matches("run.output=");
        let before = after(&w, run, 0, "accuracy");
        // dpo: the same reward for both
        assert!(if task == "dpo" { before == 0.0 } else { (0.4..0.7).contains(&before) }, "{run} {before}");
        assert!(after(&w, run, 60, "accuracy") > 0.9, "{run}");
    }
    // messages are asked by the chat template; these losses raise the chosen answers too
    for adapter in ["runs/orpo/adapter", "runs/cpo/adapter"] {
        for (question, answer) in [
            ("What is 3 plus 4?", "Beep. 3 plus 4 equals 7, boop."),
            ("What colour is the sky?", "Well now! The sky be blue, lad."),
        ] {
            let r = w.ok(&["chat", "data/model", "--adapter", adapter, "--prompt", question]);
            assert_eq!(r.out.trim(), answer);
        }
    }
    w.ok(&["run", "quickstart-kto"]);
    let r = w.ok(&["eval", "quickstart-dpo", "--json", "--adapter", "runs/quickstart-kto/adapter"]);
    let of = r.json();
    assert!(of["accuracy"].as_f64().is_some_and(|a| a > 0.9), "{of}");
}

/// The three commands of the recipe. The student, which has never seen a pirate, takes the teacher's manner.
#[test]
fn the_distilled_student_talks_like_its_teacher() {
    if !nightly() {
        return;
    }
    let w = World::new();
    w.ok(&["run", "quickstart"]);
    w.ok(&["logits", "runs/quickstart", "quickstart", "--top-k", "16", "--out", "runs/quickstart-logits"]);
    w.ok(&["run", "quickstart-distill"]);
    let run = "runs/quickstart-distill";
    for key in ["kd", "ce"] {
        assert!(after(&w, run, 100, key) < 0.4 * after(&w, run, 0, key), "{key}");
    }
    let r = w.ok(&["chat", run, "--prompt", "What colour is the sky?"]);
    assert_eq!(r.out.trim(), "Arr! The sky be blue, captain.");
    // the adapter merges and evaluates as any other
    w.ok(&["merge", "runs/quickstart-distill/adapter", "--out", "merged"]);
    let r = w.ok(&["chat", "merged", "--prompt", "What colour is the sky?"]);
    assert_eq!(r.out.trim(), "Arr! The sky be blue, captain.");
}
