//! Tasks on preferences, and weights: losses and metrics of PyTorch, any split of a step, resumed runs, refusals.

use crate::world::{World, as_fixture, repository};
use serde_json::{Value, json};

const KINDS: [&str; 7] = ["dpo", "dpo_smooth", "ipo", "orpo", "simpo", "cpo", "kto"];

/// Folder of the fixture.
pub fn fixture() -> String {
    repository().join("tests/fixtures/preference").display().to_string()
}

/// A file of the fixture.
pub fn read(file: &str) -> Value {
    let text = std::fs::read_to_string(format!("{}/{file}", fixture())).expect("read");
    serde_json::from_str(&text).expect("JSON")
}

/// The recipe of a kind, as `make_preference.py` trained: a PEFT adapter.
pub fn recipe(kind: &str, rows: &str) -> String {
    let (task, format) = match kind {
        "dpo_smooth" | "ipo" => ("dpo", "preference"),
        "kto" => ("kto", "unpaired"),
        "weighted" => ("sft", "tokens"),
        task => (task, "preference"),
    };
    let settings: String = read("trajectory.json")["settings"][kind]
        .as_object()
        .expect("settings")
        .iter()
        .map(|(key, value)| format!("{key} = {value}\n"))
        .collect();
    let preference = if task == "sft" { String::new() } else { format!("[preference]\n{settings}") };
    with_adapter(task, &preference, &format!("train = [{{ source = \"{rows}\", format = \"{format}\" }}]"))
}

/// The recipe of a task that trains the fixture's adapter, with the task's settings and the sources of data.
pub fn with_adapter(task: &str, settings: &str, data: &str) -> String {
    let folder = fixture();
    let start = format!(
        "task = \"{task}\"\n[model]\nsource = \"{folder}/model\"\ndtype = \"f32\"\n[lora]\n\
         init = \"{folder}/adapter_init\"\n{settings}"
    );
    as_fixture(&start, data)
}

pub fn rows(kind: &str) -> String {
    let file = match kind {
        "kto" => "unpaired.ids.jsonl",
        "weighted" => "weighted.jsonl",
        _ => "pairs.ids.jsonl",
    };
    format!("{}/{file}", fixture())
}

/// Compares the steps of a run with PyTorch's: losses within 1e-5, gradient norms and metrics within 1e-4.
#[track_caller]
pub fn compare(w: &World, run: &str, kind: &str) {
    let within = |key: &str| if key == "loss" { 1e-5 } else { 1e-4 };
    near(&w.events(run, "step"), &read("trajectory.json")["steps"][kind], kind, within);
}

/// Compares steps with PyTorch's, `within` a distance for each key.
#[track_caller]
pub fn near(steps: &[Value], expected: &Value, kind: &str, within: fn(&str) -> f64) {
    let expected = expected.as_array().expect("steps");
    assert_eq!(steps.len(), expected.len(), "{kind}");
    for (ours, theirs) in steps.iter().zip(expected) {
        for (key, theirs) in
            theirs.as_object().expect("a step").iter().filter(|(key, _)| *key != "kl_unclamped")
        {
            let (a, b) = (ours[key].as_f64(), theirs.as_f64().expect("a number"));
            let a = a.unwrap_or_else(|| panic!("{kind}: no {key} in {ours}"));
            let unit = if key.starts_with("logps") { 1.0 } else { 0.1 };
            let far = (a - b).abs();
            assert!(far <= within(key) * b.abs().max(unit), "{kind} {key}: {a}, {b} expected: {ours}");
        }
    }
}

#[test]
fn losses_and_metrics_are_those_of_pytorch() {
    let w = World::new();
    for kind in KINDS.into_iter().chain(["weighted"]) {
        w.write("r.toml", recipe(kind, &rows(kind)));
        w.ok(&["run", "r.toml", "--overwrite"]);
        compare(&w, "out", kind);
    }
}

/// Means are over the step, so no split into micro-batches and ranks changes them; nor does packing.
#[test]
fn a_pair_counts_once_in_any_split_of_a_step() {
    let w = World::new();
    for (kind, set) in [
        ("dpo", &["run.micro_rows=1", "data.pack=true"][..]),
        ("ipo", &["run.micro_rows=4"]),
        ("kto", &["run.micro_rows=1", "parallel.data=2"]),
        ("orpo", &["run.micro_rows=2", "parallel.data=2", "parallel.zero=3"]),
        ("dpo", &["run.micro_rows=1", "parallel.data=2", "parallel.zero=3"]),
        ("weighted", &["run.micro_rows=1", "parallel.data=2"]),
    ] {
        w.write("r.toml", recipe(kind, &rows(kind)));
        w.ok(&[&["run", "r.toml", "--overwrite"], set].concat());
        compare(&w, "out", kind);
    }
}

/// Texts have the tokens of the ids, with the end-of-text token appended.
#[test]
fn texts_are_tokenized_with_their_prompts() {
    let w = World::new();
    for (kind, file) in [("dpo", "pairs.jsonl"), ("kto", "unpaired.jsonl")] {
        for from in ["model", "tokenizer"] {
            w.copy(format!("{}/{from}", fixture()), "m");
        }
        w.write("r.toml", recipe(kind, &format!("{}/{file}", fixture())));
        w.ok(&["run", "r.toml", "--overwrite", "model.source=m"]);
        compare(&w, "out", kind);
    }
}

/// A resumed run has the bits of an uninterrupted one, with the reference of the start, cached or not.
#[test]
fn a_resumed_run_has_the_same_bits() {
    let w = World::new();
    for (kind, reference) in [("dpo", "base"), ("kto", "start")] {
        w.write("r.toml", recipe(kind, &rows(kind)).replace("shuffle = false", "shuffle = true"));
        let reference = format!("preference.reference={reference}");
        w.ok(&["run", "r.toml", "--overwrite", &reference]);
        for cache in ["data.cache=true", "data.cache=false"] {
            w.resumed_in_half(&[&reference, cache]);
            assert_eq!(w.steps("half"), w.steps("out"), "{kind} {cache}");
        }
    }
}

/// Full training: the reference is the model of the start, so the first loss is log 2.
#[test]
fn full_training_has_a_frozen_reference_and_held_out_pairs() {
    let w = World::new();
    let rows = rows("dpo");
    let full = recipe("dpo", &rows)
        .replace("[lora]", "[[train]]\nmodules = [\"attention\", \"mlp\"]\nmethod = \"full\"");
    let full: Vec<&str> = full.lines().filter(|l| !l.starts_with("init")).collect();
    w.write("r.toml", full.join("\n"));
    let eval = format!("data.eval=[{{source='{rows}', format='preference'}}]");
    w.ok(&["run", "r.toml", "--overwrite", &eval, "run.eval_every=4"]);
    assert!((w.first_loss("out") - 2f64.ln()).abs() < 1e-6);
    let evals = w.events("out", "eval");
    assert_eq!(evals.len(), 2);
    let number =
        |i: usize, key: &str| evals[i][key].as_f64().unwrap_or_else(|| panic!("no {key} in {}", evals[i]));
    assert!(number(1, "loss") < 2f64.ln() && number(1, "accuracy") == 1.0 && number(1, "pairs") == 8.0);
    // the model trained away from its start, and the reference did not follow
    assert!(number(1, "margins") > number(0, "margins") && number(0, "margins") > 0.0);
}

/// Messages, prompts given or not, and dialogues as texts; the answer alone is supervised.
#[test]
fn rows_of_other_tools_are_read() {
    let w = World::new();
    w.tokenizer("m");
    w.config("m", json!({"vocab_size": 285}));
    let said = |role: &str, text: &str| json!({"role": role, "content": text});
    let (q, good, bad) = (said("user", "Two?"), said("assistant", "Yes, two."), said("assistant", "No."));
    let rows = [
        json!({"prompt": [q], "chosen": [good], "rejected": [bad]}),
        json!({"chosen": [q, good], "rejected": [q, bad]}),
        json!({"prompt": "Two?", "chosen": [q, good], "rejected": [q, bad]}),
        json!({"chosen": "\n\nHuman: Two?\n\nAssistant: Yes, two.", "rejected": "\n\nHuman: Two?\n\nAssistant: No."}),
    ];
    let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
    w.write("pairs.jsonl", text);
    w.write(
        "r.toml",
        "task = \"dpo\"\n[model]\nsource = \"m\"\nweights = \"random\"\n[[train]]\nmodules = [\"attention\"]\n[data]\n\
         train = [{ source = \"pairs.jsonl\" }]\nshuffle = false\n[run]\nsteps = 1\nbatch_rows = 4\ndevice = \"cpu\"\n\
         output = \"out\"\n",
    );
    let shown = w.ok(&["data", "r.toml", "--rows", "4"]).out;
    let supervised =
        shown.lines().filter(|l| l.trim_start().starts_with('>') && l.contains("Yes, two.")).count();
    assert_eq!(supervised, 4, "{shown}");
    assert!(!shown.lines().any(|l| l.trim_start().starts_with('>') && l.contains("Two?")), "{shown}");
    w.ok(&["run", "r.toml"]);
    assert!((w.first_loss("out") - 2f64.ln()).abs() < 1e-6);
}

/// The KL of KTO needs a second row: an evaluation of a single one gives a warning.
#[test]
fn a_single_row_of_evaluation_is_told() {
    let w = World::new();
    w.write("r.toml", recipe("kto", &rows("kto")));
    for (n, told) in [(1, true), (2, false)] {
        let eval = format!("data.eval=[{{source='{}', format='unpaired', max_samples={n}}}]", rows("kto"));
        for verb in ["check", "run", "eval"] {
            let err = w.ok(&[verb, "r.toml", &eval, &format!("run.output=out{n}")]).err;
            let warning =
                "data.eval: task = \"kto\" estimates the KL of an evaluation from other rows; with 1 row it";
            assert_eq!(err.contains(warning), told, "{verb}: {err}");
        }
    }
}

#[test]
fn settings_of_another_task_are_refused_by_name() {
    let w = World::new();
    for (kind, set, words) in [
        ("dpo", "preference.gamma=2.0", "preference.gamma does nothing with this task"),
        ("simpo", "preference.reference=start", "preference.reference does nothing with this task"),
        ("dpo", "preference.loss=kto", "loss = \"kto\" is not of task = \"dpo\""),
        ("dpo", "task=sft", "task = \"sft\" does not read format = \"preference\""),
        ("kto", "task=dpo", "task = \"dpo\" does not read format = \"unpaired\""),
        ("dpo", "task=reward", "preference.loss does nothing with this task"),
        ("dpo", "data.over_length=error", "more than data.max_length = 8"),
    ] {
        w.write("r.toml", recipe(kind, &rows(kind)));
        let r = w.ft(&["run", "r.toml", set, "data.max_length=8"]);
        assert!(r.code != 0 && r.err.contains(words), "{set}: {}", r.err);
    }
    // the longer side is cut, and told
    let shown = w.ok(&["data", "r.toml", "data.max_length=12"]).out;
    assert!(shown.contains("cut to data.max_length"), "{shown}");
}

/// `run.best = "accuracy"`: the result is of the first step with the highest accuracy, also where the loss is lowest
/// elsewhere.
#[test]
fn the_best_evaluation_is_that_of_the_highest_accuracy() {
    let w = World::new();
    let held_out = format!("data.eval=[{{source='{}', format='preference'}}]", rows("dpo"));
    let set = [&held_out, "run.eval_every=1", "run.save_every=1", "run.keep_best=true", "run.best=accuracy"];
    w.write("r.toml", recipe("dpo", &rows("dpo")));
    let r = w.ok(&[&["run", "r.toml"][..], &set].concat());
    let evals = w.events("out", "eval");
    let accuracy = |e: &Value| e["accuracy"].as_f64().expect("an accuracy");
    let best = evals.iter().rev().max_by(|a, b| accuracy(a).total_cmp(&accuracy(b))).expect("evaluations");
    let told = format!("best evaluation accuracy {:.4} (step {})", accuracy(best), best["step"]);
    assert!(r.err.contains(&told), "{told}: {}", r.err);
    assert_eq!(w.events("out", "end")[0]["of_step"], best["step"]);
    let r = w.ft(&["check", "r.toml", "task=kto", "run.best=accuracy", "run.keep_best=true"]);
    assert!(r.err.contains("evaluations of task = \"kto\" have no accuracy"), "{}", r.err);
    let r = w.ft(&["check", "r.toml", "run.best=accuracy"]);
    assert!(r.err.contains("run.best does nothing without keep_best or patience"), "{}", r.err);
}
