//! A 4-bit base with tensors trained in full, end to end, against PyTorch (`tests/fixtures/nf4-full`);
//! optimizer states on the host.

use crate::world::{World, apart, as_fixture, recipe, reference, repository, rows_of};
use candle_core::{DType, Device};
use ft::files::TensorFiles;
use serde_json::{Value, json};

const OFFLOAD: &str = "memory.offload=['optimizer']";

/// Folder of a case, a recipe with the settings of `make.py`, and the contents of `trajectory.json`.
fn world(case: &str) -> (World, Value) {
    let w = World::new();
    let folder = repository().join("tests/fixtures/nf4-full").join(case);
    let log: Value = serde_json::from_slice(&std::fs::read(folder.join("trajectory.json")).expect("a file"))
        .expect("JSON");
    let mut modules: Vec<String> = log["trains"]
        .as_array()
        .expect("names")
        .iter()
        .filter_map(|n| n.as_str()?.rsplit_once('.').map(|(m, _)| format!("\"/{m}/\"")))
        .collect();
    modules.dedup();
    w.write("rows.jsonl", rows_of(reference(case).as_ref()));
    let start = format!(
        "[model]\nsource = {:?}\ndtype = \"f32\"\nquantize = \"nf4\"\n[[train]]\nmodules = [{}]\nmethod = \"full\"",
        reference(&format!("{case}/model")),
        modules.join(", ").replace('.', "\\\\."),
    );
    let rows = "[{ source = \"rows.jsonl\", format = \"tokens\" }]";
    let text = as_fixture(&start, &format!("train = {rows}\neval = {rows}\nmask = \"none\""));
    w.write("r.toml", text.replace("[run]", "[run]\neval_at_start = true"));
    (w, log)
}

/// Compares a run with a trajectory: loss and gradient norm per step, and the final tensors.
#[track_caller]
fn compare(w: &World, case: &str, run: &str, log: &Value, which: &str) {
    let steps = w.events(run, "step");
    let want = log[which].as_array().expect("steps");
    assert_eq!(steps.len(), want.len());
    for (got, want) in steps.iter().zip(want) {
        assert_eq!(got["target_tokens"], want["target_tokens"]);
        for (key, bar) in [("loss", 1e-5), ("grad_norm", 1e-4), ("aux_loss", 1e-5)] {
            let Some(want) = want[key].as_f64() else { continue };
            let off = (got[key].as_f64().expect("a number") - want).abs() / want;
            assert!(off <= bar, "{case} {which}: {key} is {off:.1e} apart in {got}");
        }
    }
    let open = |path: std::path::PathBuf| TensorFiles::open_file(&path).expect("tensors");
    let expected = open(repository().join("tests/fixtures/nf4-full").join(case).join("final.safetensors"));
    let adapter = open(w.path(&format!("{run}/adapter/adapter_model.safetensors")));
    let prefix = if which == "plain" { String::new() } else { format!("{which}.") };
    for name in log["trains"].as_array().expect("names").iter().filter_map(Value::as_str) {
        let get = |f: &TensorFiles, n: String| f.tensor(&n, DType::F32, &Device::Cpu).expect("a tensor");
        let (ours, theirs) =
            (get(&adapter, format!("base_model.model.{name}")), get(&expected, format!("{prefix}{name}")));
        let bar = if name.ends_with("k_proj.bias") { 1e-3 } else { 1e-4 };
        let off = apart(&ours, &theirs);
        assert!(off <= bar, "{case} {which}: {name} is {off:.1e} from PyTorch's");
    }
}

/// Eight steps agree with PyTorch. With offloaded states, with a cache, or with both, the bits are the
/// same.
#[test]
fn tensors_in_full_beside_a_4_bit_base_train_as_in_pytorch() {
    for case in ["mixtral", "qwen3-moe", "mixtral-fused", "qwen2-bias", "qwen3-one-kv"] {
        let (w, log) = world(case);
        w.ok(&["run", "r.toml", "run.output=plain"]);
        compare(&w, case, "plain", &log, "plain");
        if let Some(steps) = log["aux"].as_array() {
            let coefficient = match case {
                "mixtral" => "router.aux_loss=0.02",
                "qwen3-moe" => "router.aux_loss=0.05",
                _ => "router.aux_loss=0.1",
            };
            assert!(steps[0]["aux_loss"].as_f64().is_some());
            w.ok(&["run", "r.toml", "run.output=aux", coefficient, OFFLOAD]);
            compare(&w, case, "aux", &log, "aux");
        }
        let adapter = w.read("plain/adapter/adapter_model.safetensors");
        for (run, set) in [
            ("offload", &[OFFLOAD][..]),
            ("cache", &["model.cache=four-bit"]),
            ("again", &["model.cache=four-bit", OFFLOAD]),
        ] {
            let output = format!("run.output={run}");
            w.ok(&[&["run", "r.toml", &output], set].concat());
            assert_eq!(w.steps(run), w.steps("plain"), "{case}: {run}");
            assert!(w.read(&format!("{run}/adapter/adapter_model.safetensors")) == adapter, "{case}: {run}");
        }
    }
}

/// One cache serves recipes with different tensors in full, and each run has the right values.
#[test]
fn a_cache_does_not_depend_on_what_trains() {
    let (w, _) = world("mixtral");
    let other = "train.0.modules=['/model\\.layers\\.1\\.block_sparse_moe\\.experts\\.2\\.w.*/', 'q_proj']";
    let cache = "model.cache=four-bit";
    w.ok(&["run", "r.toml", "run.output=a", cache]);
    let made = w.read("four-bit/model.safetensors");
    for (run, set) in [("b", &[other][..]), ("c", &[]), ("d", &["train.0.method=lora"])] {
        let [plain, cached] = ["plain", "cached"].map(|how| format!("{run}-{how}"));
        let [to, to_cached] = [&plain, &cached].map(|r| format!("run.output={r}"));
        w.ok(&[&["run", "r.toml", &to], set].concat());
        w.ok(&[&["run", "r.toml", &to_cached, cache], set].concat());
        assert_eq!(w.steps(&plain), w.steps(&cached), "{run}");
    }
    assert!(w.steps("b-plain") != w.steps("c-plain") && w.steps("a") == w.steps("c-plain"));
    assert!(w.read("four-bit/model.safetensors") == made);
}

/// `ft routes` uses the model at the start of training: from the cache, and with the adapter of
/// `lora.init`.
#[test]
fn routes_are_those_of_the_model_that_training_starts_from() {
    let (w, _) = world("mixtral");
    let routes = |set: &[&str]| w.ok(&[&["routes", "r.toml", "--json"], set].concat()).out;
    let plain = routes(&[]);
    assert_eq!(routes(&["model.cache=kept"]), plain);
    assert!(w.path("kept/model.safetensors").is_file(), "the cache was not made");
    w.ok(&["run", "r.toml", "run.output=a", "optimizer.lr=2e-1"]);
    assert_ne!(routes(&["lora.init=a/adapter"]), plain, "the adapter was not used");
}

/// Results work with every subcommand: evaluation, merge onto 16-bit or 4-bit weights, further training.
#[test]
fn an_adapter_on_a_4_bit_base_works_in_all_verbs() {
    let (w, _) = world("mixtral");
    w.ok(&["run", "r.toml", "run.output=a", "optimizer.lr=2e-2"]);
    let evals: Vec<f64> = w.events("a", "eval").iter().filter_map(|e| e["loss"].as_f64()).collect();
    let (start, end) = (evals[0], evals[evals.len() - 1]);
    assert!(start - end > 1e-2, "the run moved nothing: {start} {end}");
    let near = |got: f64, want: f64| assert!((got - want).abs() <= 1e-6 * want, "{got}, not {want}");
    // The model at the start of training, and at the end.
    near(w.ok(&["eval", "r.toml", "--json"]).loss(), start);
    let adapter = ["--adapter", "a/adapter"];
    near(w.ok(&[&["eval", "r.toml", "--json"], &adapter[..]].concat()).loss(), end);
    near(w.ok(&[&["eval", "r.toml", "--json", "model.cache=c"], &adapter[..]].concat()).loss(), end);
    // Merged onto the original weights.
    let dense = w.ok(&[&["eval", "r.toml", "--json", "model.quantize=none"], &adapter[..]].concat()).loss();
    assert!((dense - end).abs() > 1e-4, "quantizing the base changed nothing");
    let r = w.ok(&["merge", "a/adapter", "--out", "m"]);
    assert!(r.err.contains("into the original weights") && !r.err.contains("the base is 4-bit"), "{}", r.err);
    let merged = |m: &str| w.ok(&["eval", "r.toml", "--json", "model.quantize=none", m]).loss();
    let near_merged = |got: f64, want: f64| assert!((got - want).abs() <= 1e-5 * want, "{got}, not {want}");
    near_merged(merged("model.source=m"), dense);
    // Merged onto a 4-bit checkpoint: the adapter holds the trained tensors, and the loss of precision is
    // reported.
    w.ok(&["quantize", &reference("mixtral/model"), "--out", "q"]);
    near(w.ok(&[&["eval", "r.toml", "--json", "model.source=q"], &adapter[..]].concat()).loss(), end);
    let r = w.ok(&["merge", "a/adapter", "--base", "q", "--onto", "4bit", "--out", "mq"]);
    assert!(r.err.contains("the base is 4-bit") && !r.err.contains("errs by 0.0%"), "{}", r.err);
    near_merged(merged("model.source=mq"), end);
    // Further training starts from the values of the adapter; without them, nothing is selected.
    w.ok(&["run", "r.toml", "run.output=on", "model.source=q", "lora.init=a/adapter", "run.steps=1"]);
    w.ok(&["run", "r.toml", "run.output=on2", "lora.init=a/adapter", "run.steps=1"]);
    assert_eq!(w.steps("on"), w.steps("on2"));
    near(w.events("on", "eval")[0]["loss"].as_f64().expect("a loss"), end);
    for verb in ["run", "check"] {
        let r = w.ft(&[verb, "r.toml", "model.source=q", "run.output=none"]);
        assert_eq!(r.code, 2, "{}", r.err);
        let said = "experts.0.w1: its weight is 4-bit and cannot train in full";
        assert!(r.err.contains(said) && r.err.contains("hint:"), "{}", r.err);
    }
    w.ok(&["check", "r.toml"]);
    let r = w.ft(&["export", "a/adapter", "--to", "peft-fused", "--out", "x"]);
    assert!(r.code == 4 && r.err.contains("trained in full has no place"), "{} {}", r.code, r.err);
}

/// Random numbers in place of a 4-bit checkpoint are values, which train in full.
#[test]
fn random_experts_of_a_4_bit_model_train_in_full() {
    let w = World::new();
    let oss = json!({"model_type": "gpt_oss", "attention_bias": true, "intermediate_size": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 16, "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4"}});
    w.config("tiny", oss);
    let all = ["attention", "experts", "router", "norms", "sinks", "embedding", "head"];
    w.write("r.toml", recipe(&format!("[[train]]\nmodules = {all:?}\nmethod = \"full\"\n")));
    for verb in ["check", "run"] {
        w.ok(&[verb, "r.toml", "run.steps=1"]);
    }
}
