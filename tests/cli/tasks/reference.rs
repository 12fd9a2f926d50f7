//! References of preference tasks: kept between runs, other models, plans.

use super::preference::{compare, fixture, recipe, rows};
use crate::world::World;
use serde_json::{Value, json};

/// Metrics of the steps of a run, as bits.
fn metrics(w: &World, run: &str) -> Vec<Vec<u64>> {
    let of = |e: &Value| {
        let keys = ["loss", "rewards_chosen", "rewards_rejected", "logps_chosen", "grad_norm"];
        keys.map(|key| e[key].as_f64().unwrap_or_else(|| panic!("no {key} in {e}")).to_bits()).to_vec()
    };
    w.events(run, "step").iter().map(of).collect()
}

const COMPUTED: &str = "once, before training";
const KEPT: &str = "reference: log-probabilities of an earlier run, from";

/// A second run reads them; other rows, other weights, or a damaged file have them computed.
#[test]
fn log_probabilities_are_kept_by_their_content() {
    let w = World::new();
    let text = std::fs::read_to_string(rows("dpo")).expect("rows");
    w.write("pairs.jsonl", &text);
    w.write("r.toml", recipe("dpo", "pairs.jsonl"));
    let run = |set: &[&str]| w.ok(&[&["run", "r.toml", "--overwrite"], set].concat()).err;
    let told = |err: &str| (err.contains(COMPUTED), err.contains(KEPT));
    assert_eq!(told(&run(&[])), (true, false));
    let first = metrics(&w, "out");
    assert_eq!(told(&run(&[])), (false, true));
    assert_eq!(metrics(&w, "out"), first);
    // a setting of the loss does not change them
    assert_eq!(told(&run(&["preference.loss=ipo"])), (false, true));
    assert_eq!(told(&run(&["preference.reference=start"])), (true, false));
    // one token of one row
    let mut row: Value = serde_json::from_str(text.lines().nth(2).expect("a row")).expect("json");
    let id = row["chosen_ids"][0].as_u64().expect("an id");
    row["chosen_ids"][0] = json!((id + 1) % 32);
    let changed: String = text
        .lines()
        .enumerate()
        .map(|(i, l)| if i == 2 { format!("{row}\n") } else { format!("{l}\n") })
        .collect();
    w.write("pairs.jsonl", changed);
    assert_eq!(told(&run(&[])), (true, false));
    assert_ne!(metrics(&w, "out"), first);
    w.write("pairs.jsonl", &text);
    assert_eq!(told(&run(&["data.cache=false"])), (true, false));
    for entry in std::fs::read_dir(w.path("cache/reference")).expect("a folder") {
        let path = entry.expect("an entry").path();
        let kept = std::fs::read_to_string(&path).expect("text");
        std::fs::write(&path, kept.replacen("[[", "[[[1,2],", 1)).expect("written");
    }
    let err = run(&[]);
    assert!(
        err.contains("damaged; the log-probabilities are computed again") && err.contains(COMPUTED),
        "{err}"
    );
    assert_eq!(metrics(&w, "out"), first);
}

/// The base by its path is "base", and the first adapter by its path is "start", with PyTorch's losses; over ranks, and
/// kept between runs.
#[test]
fn another_model_or_adapter_is_the_reference() {
    let w = World::new();
    let (model, adapter) = (format!("{}/model", fixture()), format!("{}/adapter_init", fixture()));
    for (kind, named, same) in [("dpo", &model, "base"), ("kto", &model, "base"), ("dpo", &adapter, "start")]
    {
        w.write("r.toml", recipe(kind, &rows(kind)));
        let run = |reference: &str, more: &[&str]| {
            let reference = format!("preference.reference={reference}");
            let err = w.ok(&[&["run", "r.toml", "--overwrite", &reference], more].concat()).err;
            (metrics(&w, "out"), err)
        };
        let expected = run(same, &[]).0;
        let (found, err) = run(named, &[]);
        assert!(err.contains(COMPUTED), "{err}");
        assert_eq!(found, expected, "{kind} {same}");
        if same == "base" {
            compare(&w, "out", kind);
        }
        let (again, err) = run(named, &[]);
        assert!(again == expected && err.contains(KEPT), "{err}");
        run(named, &["parallel.data=2", "parallel.zero=3", "run.micro_rows=1"]);
        if same == "base" {
            compare(&w, "out", kind);
        }
    }
    // an adapter of a run, on held-out pairs
    w.write("r.toml", recipe("dpo", &rows("dpo")));
    let eval = format!("data.eval=[{{source='{}', format='preference'}}]", rows("dpo"));
    w.ok(&["run", "r.toml", "run.output=first", "preference.reference=start", &eval]);
    let next = w.ok(&[
        "run",
        "r.toml",
        "--overwrite",
        "preference.reference=first",
        "lora.init=first/adapter",
        &eval,
    ]);
    assert!(next.err.contains(COMPUTED), "{}", next.err);
    assert!((w.first_loss("out") - 2f64.ln()).abs() < 1e-6);
    let json = w.ok(&["eval", "out", "--json", "preference.reference=first", &eval]);
    let last = w.events("out", "eval").pop().expect("an evaluation");
    assert!((json.loss() - last["loss"].as_f64().expect("a loss")).abs() < 1e-6, "{} {last}", json.out);
    // the content of the reference belongs to the identity of a run
    let held = ["run", "r.toml", "run.output=held", "preference.reference=first"];
    w.ok(&held);
    w.ok(&["run", "r.toml", "run.output=first", "--overwrite", "preference.reference=start", "run.steps=2"]);
    let changed = w.ft(&[&held[..], &["--resume"]].concat());
    assert!(changed.code == 2 && changed.err.contains("hash.reference: was "), "{}", changed.err);
}

/// The recipe of pairs, with modules that train in full from their start.
fn in_full(modules: &str) -> String {
    recipe("dpo", &rows("dpo"))
        .replace("[lora]", &format!("[[train]]\nmodules = [\"{modules}\"]\nmethod = \"full\""))
        .lines()
        .filter(|l| !l.starts_with("init"))
        .map(|l| format!("{l}\n"))
        .collect()
}

/// An adapter over the start of a model is no adapter over its end.
#[test]
fn an_adapter_is_no_reference_of_a_model_trained_in_full() {
    let w = World::new();
    w.write("r.toml", in_full("/.*/"));
    let adapter = format!("preference.reference={}/adapter_init", fixture());
    let eval = format!("data.eval=[{{source='{}', format='preference'}}]", rows("dpo"));
    w.ok(&["run", "r.toml", &adapter, &eval]);
    let r = w.ft(&["eval", "out", &adapter, &eval]);
    let says = ["or an adapter over its start", "hint: preference.reference = PATH"];
    assert!(r.code == 2 && says.iter().all(|s| r.err.contains(s)), "{}", r.err);
}

/// What trains in full starts at the adapter's values, and the reference stays there.
#[test]
fn tensors_in_full_of_an_adapter_stay_at_their_start() {
    let w = World::new();
    w.write("norms.toml", in_full("norms"));
    w.ok(&["run", "norms.toml", "run.output=norms"]);
    w.write("r.toml", recipe("dpo", &rows("dpo")));
    w.ok(&["run", "r.toml", "lora.init=norms/adapter"]);
    assert!((w.first_loss("out") - 2f64.ln()).abs() < 1e-6);
    let eval = format!("data.eval=[{{source='{}', format='preference'}}]", rows("dpo"));
    let r = w.ft(&["eval", "out", &eval]);
    assert!(
        r.code == 2 && r.err.contains("the start of what trained in full, which only the run knows"),
        "{}",
        r.err
    );
}

/// Rows of tokens belong to the adapter: "base" is without them, as the base by its path is.
#[test]
fn the_base_as_reference_is_without_trained_token_rows() {
    let w = World::new();
    let text = recipe("dpo", &rows("dpo"));
    let init = text.lines().find(|l| l.starts_with("init = ")).expect("an init");
    let rule = "[[train]]\nmodules = [\"new_tokens\"]\ntokens = [2, 98, 146]\n";
    w.write("tokens.toml", text.replace(&format!("[lora]\n{init}\n"), rule));
    w.ok(&["run", "tokens.toml", "run.output=first"]);
    w.write("r.toml", &text);
    let model = format!("{}/model", fixture());
    let [base, named] = ["base", model.as_str()].map(|reference| {
        let reference = format!("preference.reference={reference}");
        w.ok(&["run", "r.toml", "--overwrite", "lora.init=first/adapter", &reference]);
        metrics(&w, "out")
    });
    assert_eq!(base, named);
}

#[test]
fn unusable_reference_models_are_refused() {
    let w = World::new();
    w.write("r.toml", recipe("dpo", &rows("dpo")));
    w.config("small", json!({"vocab_size": 50}));
    w.config("bare", json!({"vocab_size": 512}));
    for (other, code, words) in [
        ("nowhere/at-all/there", 4, "nowhere/at-all/there"),
        ("bare", 4, "bare"),
        ("wide", 2, "preference.reference"),
    ] {
        if other == "wide" {
            // random weights of another vocabulary
            w.write("sft.toml", crate::world::recipe(crate::world::FULL).replace("\"tiny\"", "\"small\""));
            w.write("rows.jsonl", "{\"input_ids\": [1, 2, 3, 4]}\n".repeat(8));
            w.ok(&["run", "sft.toml", "data.eval=[]", "run.output=wide"]);
        }
        let r = w.ft(&["run", "r.toml", &format!("preference.reference={other}")]);
        assert!(r.code == code && r.err.contains(words), "{other} {}: {}", r.code, r.err);
    }
    let r = w.ft(&["run", "r.toml", "preference.reference=wide"]);
    assert!(r.err.contains("a vocabulary of 50 tokens"), "{}", r.err);
    let events = w.text("wide/metrics.jsonl");
    w.write(
        "wide/metrics.jsonl",
        events.lines().filter(|l| !l.contains("\"end\"")).fold(String::new(), |a, l| a + l + "\n"),
    );
    let r = w.ft(&["run", "r.toml", "preference.reference=wide"]);
    let said = ["wide: this run has not ended", "wide/model, the result of an earlier run"];
    assert!(r.code == 2 && said.iter().all(|s| r.err.contains(s)), "{}", r.err);
}

/// The plan names the pass, its samples and its file, which a run then makes of no more bytes.
#[test]
fn the_plan_has_the_reference_pass() {
    let w = World::new();
    for kind in ["dpo", "kto"] {
        w.write("r.toml", recipe(kind, &rows(kind)));
        let plan = || w.ok(&["plan", "r.toml", "--json"]).json();
        assert!(plan()["reference"]["samples"].is_null());
        w.ok(&["run", "r.toml", "--overwrite"]);
        let of = plan();
        let samples = std::fs::read_to_string(rows(kind)).expect("rows").lines().count();
        assert_eq!(of["reference"]["samples"], samples, "{}", of["reference"]);
        let work = |key: &Value| key.as_f64().expect("work");
        assert!(
            work(&of["reference"]["work"]) > 0.0
                && work(&of["reference"]["work"]) < 8.0 * work(&of["work_per_step"])
        );
        let text = w.ok(&["plan", "r.toml", "preference.reference=other/model"]).out;
        let words = format!("one pass over {samples} samples before training");
        assert!(text.contains(&words) && text.contains("other/model is loaded alone for it"), "{text}");
        let file = std::fs::read_dir(w.path("cache/reference"))
            .expect("a folder")
            .next()
            .expect("a file")
            .expect("it");
        let (made, planned) =
            (file.metadata().expect("size").len(), of["disk"]["reference"].as_u64().expect("bytes"));
        assert!(made <= planned + 200 && planned < 2 * made, "{made} of {planned}");
        std::fs::remove_dir_all(w.path("cache")).expect("removed");
    }
    w.write("r.toml", recipe("simpo", &rows("dpo")));
    let text = w.ok(&["plan", "r.toml"]).out;
    assert!(!text.contains("reference "), "{text}");
}
