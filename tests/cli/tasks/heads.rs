//! Score heads: reward models and classifiers. Losses and metrics of PyTorch, results that PEFT and transformers have
//! made and load, plans, refusals.

use super::preference::{fixture, near, read};
use crate::world::{World, as_fixture};
use candle_core::{DType, Device};
use ft::files::TensorFiles;
use serde_json::{Value, json};

/// A world with the fixture's model and its tokenizer, in `m`.
fn world() -> World {
    let w = World::new();
    for from in ["model", "tokenizer"] {
        w.copy(format!("{}/{from}", fixture()), "m");
    }
    let labeled = std::fs::read_to_string(format!("{}/labeled.jsonl", fixture())).expect("read");
    let plain = labeled.lines().map(|line| {
        let mut row: Value = serde_json::from_str(line).expect("a row");
        row.as_object_mut().expect("an object").remove("weight");
        format!("{row}\n")
    });
    w.write("plain.jsonl", plain.collect::<String>());
    w.write("weighted.jsonl", labeled);
    w
}

/// The recipe of a kind, as `make_preference.py` and `make_classify.py` trained: a PEFT adapter with a head.
fn recipe(kind: &str) -> String {
    let folder = fixture();
    let (task, adapter, rows, format, classes) = match kind {
        "reward" => ("reward", "reward_adapter_init", format!("{folder}/pairs.ids.jsonl"), "preference", ""),
        kind => {
            let rows = if kind == "classify" { "plain.jsonl" } else { "weighted.jsonl" };
            let classes = "[classify]\nlabels = [\"bad\", \"fair\", \"good\"]\n";
            ("classify", "classify_adapter_init", rows.to_string(), "labeled", classes)
        }
    };
    let source = format!("{{ source = \"{rows}\", format = \"{format}\" }}");
    let start = format!(
        "task = \"{task}\"\n[model]\nsource = \"m\"\ndtype = \"f32\"\n[lora]\ninit = \"{folder}/{adapter}\"\n{classes}"
    );
    as_fixture(&start, &format!("train = [{source}]\neval = [{source}]"))
}

/// The same with new adapters and a new head.
fn anew(kind: &str, rule: &str) -> String {
    let text = recipe(kind);
    let init = text.lines().find(|l| l.starts_with("init = ")).expect("an init");
    text.replace(&format!("[lora]\n{init}\n"), &format!("{rule}\n"))
}

/// Compares the steps of a run with PyTorch's: gradient norms within 1e-4, losses and metrics within 1e-5.
#[track_caller]
fn compare(w: &World, run: &str, kind: &str) {
    let expected = match kind {
        "reward" => read("trajectory.json")["steps"]["reward"].clone(),
        kind => read("classify.json")[kind].clone(),
    };
    let steps = w.events(run, "step");
    near(&steps, &expected, kind, |key| if key == "grad_norm" { 1e-4 } else { 1e-5 });
    assert!(steps.iter().all(|step| step.get("logps_chosen").is_none()), "{steps:?}");
}

/// Each row counts once, whatever the micro-batches, the packing and the ranks.
#[test]
fn losses_and_metrics_are_those_of_pytorch_in_any_split() {
    let w = world();
    for (kind, set) in [
        ("reward", &[][..]),
        ("reward", &["run.micro_rows=4"]),
        ("reward", &["run.micro_rows=1", "parallel.data=2"]),
        ("reward", &["parallel.data=2", "parallel.zero=3"]),
        ("classify", &[]),
        ("classify", &["run.micro_rows=1", "parallel.data=2", "parallel.zero=3"]),
        ("classify_weighted", &["run.micro_rows=4"]),
        ("classify_weighted", &["run.micro_rows=1", "parallel.data=2"]),
    ] {
        w.write("r.toml", recipe(kind));
        w.ok(&[&["run", "r.toml", "--overwrite"], set].concat());
        compare(&w, "out", kind);
    }
}

/// Documents of a packed row do not see one another: the loss of the whole data is that of single documents.
#[test]
fn packed_documents_are_classified_alone() {
    let w = world();
    w.write("r.toml", recipe("classify"));
    let loss = |set: &[&str]| w.ok(&[&["eval", "r.toml", "--json"], set].concat()).loss();
    let (alone, packed) = (loss(&[]), loss(&["data.pack=true", "run.micro_rows=1"]));
    assert!((alone - packed).abs() < 1e-6 * alone, "{alone} {packed}");
}

#[test]
fn a_resumed_run_has_the_same_bits() {
    let w = world();
    for kind in ["reward", "classify_weighted"] {
        w.write("r.toml", recipe(kind).replace("shuffle = false", "shuffle = true"));
        w.ok(&["run", "r.toml", "--overwrite"]);
        w.resumed_in_half(&[]);
        assert_eq!(w.steps("half"), w.steps("out"), "{kind}");
    }
}

/// The result of a run with LoRA is PEFT's sequence classifier. Evaluated, merged, and trained on from the merged model,
/// it has the loss of the run's last evaluation.
#[test]
fn an_adapter_has_its_head_and_merges_into_a_classifier() {
    let w = world();
    for (kind, outputs) in [("reward", 1), ("classify", 3)] {
        w.write("r.toml", recipe(kind));
        let r = w.ok(&["run", "r.toml", "--overwrite"]);
        assert!(!r.err.contains("random numbers") && !r.err.contains("ft chat"), "{}", r.err);
        let config = w.json("out/adapter/adapter_config.json");
        assert_eq!(
            (&config["modules_to_save"], &config["task_type"]),
            (&json!(["score"]), &json!("SEQ_CLS"))
        );
        let files =
            TensorFiles::open_file(&w.path("out/adapter/adapter_model.safetensors")).expect("an adapter");
        let score = files.tensor("base_model.model.score.weight", DType::F32, &Device::Cpu).expect("a head");
        assert_eq!(score.dims()[0], outputs);

        let evals = w.events("out", "eval");
        let last = evals.last().and_then(|e| e["loss"].as_f64()).expect("an evaluation");
        let same = |loss: f64, what: &str| {
            assert!((loss - last).abs() <= 2e-6 * last, "{kind} {what}: {loss}, {last}")
        };
        same(w.ok(&["eval", "r.toml", "--json", "--adapter", "out/adapter"]).loss(), "eval");
        w.ok(&["merge", "out/adapter", "--out", "merged", "--overwrite"]);
        let config = w.json("merged/config.json");
        assert_eq!(config["architectures"], json!(["Qwen3ForSequenceClassification"]));
        if kind == "classify" {
            assert_eq!(config["id2label"], json!({"0": "bad", "1": "fair", "2": "good"}));
            assert_eq!(config["label2id"], json!({"bad": 0, "fair": 1, "good": 2}));
        }
        w.write(
            "merged.toml",
            anew(kind, "[[train]]\nmodules = [\"attention\"]").replace("\"m\"", "\"merged\""),
        );
        let again = w.ok(&["eval", "merged.toml", "--json"]);
        assert!(!again.err.contains("random numbers"), "{}", again.err);
        assert_eq!(again.json().get("perplexity"), None, "{kind}");
        same(again.loss(), "merged");
    }
}

/// Every tensor trains: the result is transformers' sequence classifier, without the head of the vocabulary.
#[test]
fn full_training_writes_a_classifier() {
    let w = world();
    for (set, name) in [(&[][..], "plain"), (&["parallel.data=2", "parallel.zero=2"], "sharded")] {
        w.write("r.toml", anew("classify", "[[train]]\nmodules = [\"/.*/\"]\nmethod = \"full\""));
        let output = format!("run.output={name}");
        let r = w.ok(&[&["run", "r.toml", "--overwrite", &output, "model.dtype=f32"], set].concat());
        assert!(
            r.err.contains("score: the model has no score head; its 3 outputs begin as random"),
            "{}",
            r.err
        );
        let config = w.json(&format!("{name}/model/config.json"));
        assert_eq!(config["architectures"], json!(["Qwen3ForSequenceClassification"]));
        let files = TensorFiles::open_model(&w.path(&format!("{name}/model"))).expect("a model");
        assert!(files.info("score.weight").is_some() && files.info("lm_head.weight").is_none());
        let evals = w.events(name, "eval");
        let last = evals.last().and_then(|e| e["loss"].as_f64()).expect("an evaluation");
        let again = w.ok(&["eval", name, "--json"]).loss();
        assert!((again - last).abs() <= 2e-6 * last, "{again} {last}");
    }
}

/// 4-bit bases, bf16, gradient steps in the backward pass: each learns the rows.
#[test]
fn heads_train_on_other_bases() {
    let w = world();
    let rule = "[[train]]\nmodules = [\"attention\", \"mlp\"]\nrank = 8";
    for (kind, set) in [
        ("reward", &["model.quantize=nf4"][..]),
        ("classify", &["model.quantize=nf4", "model.dtype=bf16"]),
        ("reward", &["model.dtype=bf16", "optimizer.name=adamw8bit"]),
        (
            "classify",
            &["optimizer.in_backward=true", "run.clip=0", "run.micro_rows=4", "memory.recompute=all"],
        ),
    ] {
        w.write("r.toml", anew(kind, rule).replace("steps = 8", "steps = 40").replace("2e-3", "5e-3"));
        w.ok(&[&["run", "r.toml", "--overwrite"], set].concat());
        let last = w.events("out", "eval").pop().expect("an evaluation");
        assert!(last["accuracy"].as_f64() > Some(0.9), "{kind} {set:?}: {last}");
    }
}

/// The plan has the head and no logits of the vocabulary; `ft check` finds nothing.
#[test]
fn the_plan_has_the_score_head() {
    let w = world();
    let rule = "[[train]]\nmodules = [\"attention\"]";
    for (kind, outputs) in [("reward", 1), ("classify", 3)] {
        w.write("r.toml", anew(kind, rule));
        w.ok(&["check", "r.toml"]);
        let plan = w.ok(&["plan", "r.toml", "--json"]).json();
        let config = w.json("m/config.json");
        w.write("sft.toml", "");
        let hidden = config["hidden_size"].as_u64().expect("a width");
        let trainable = plan["parameters"]["trainable"].as_u64().expect("a number");
        w.write("frozen.toml", anew(kind, "[[train]]\nmodules = [\"q_proj\"]\nlayers = \"0\"\nrank = 1"));
        let small = w.ok(&["plan", "frozen.toml", "--json"]).json();
        let lora = hidden
            + config["num_attention_heads"].as_u64().expect("heads")
                * config["head_dim"].as_u64().expect("a width");
        assert_eq!(small["parameters"]["trainable"].as_u64(), Some(lora + outputs * hidden), "{kind}");
        assert!(trainable > outputs * hidden);
    }
}

#[test]
fn unsupported_uses_of_a_score_head_are_refused_by_name() {
    let w = world();
    w.write("r.toml", recipe("classify"));
    w.ok(&["run", "r.toml"]);
    w.ok(&["merge", "out/adapter", "--out", "merged"]);
    for args in [
        &["chat", "out/adapter"][..],
        &["chat", "merged"],
        &["serve", "out/adapter", "--port", "0"],
        &["export", "out/adapter", "--to", "vllm", "--out", "x"],
        &["export", "merged", "--to", "gguf", "--out", "y"],
    ] {
        let r = w.ft_with(args, "");
        assert!(r.code != 0 && r.err.contains("score head of 3 outputs"), "{args:?}: {}", r.err);
    }
    for (set, words) in [
        ("generate.samples=2", "generate.samples with task = \"classify\""),
        ("log.samples=['w1']", "log.samples with task = \"classify\""),
        ("classify.labels=['a']", "labels has 1, and 2 to 65536 names are wanted"),
        ("classify.labels=['a', 'a']", "classify.labels has \"a\" twice"),
        (
            "classify.labels=['bad', 'fair']",
            "label: \"good\" is none of the classes: \"bad\", \"fair\", or 0 to 1",
        ),
        ("classify.num_labels=4", "num_labels = 4, and labels has 3"),
        ("task=reward", "task = \"reward\" does not read format = \"labeled\""),
        ("model.cache=c", "model.cache with task = \"classify\""),
    ] {
        let r =
            w.ft(&["run", "r.toml", "--overwrite", set, "lora.init=default", "train=[{modules=['mlp']}]"]);
        assert!(r.code != 0 && r.err.contains(words), "{set}: {}", r.err);
    }
    for (text, words) in [
        (anew("classify", "[[train]]\nmodules = [\"head\"]"), "score: a score head trains in full"),
        (
            anew(
                "classify",
                "[[train]]\nmodules = [\"mlp\"]\n[[train]]\nmodules = [\"head\"]\nmethod = \"freeze\"",
            ),
            "score: a score head trains in full",
        ),
        (recipe("classify").replace("\"fair\", ", ""), "score.weight: [3, "),
        (
            anew("reward", "[[train]]\nmodules = [\"mlp\"]").replace("\"m\"", "\"merged\""),
            "score head has 3 outputs (bad, fair, good)",
        ),
    ] {
        w.write("bad.toml", text);
        let r = w.ft(&["run", "bad.toml", "--overwrite"]);
        assert!(r.code != 0 && r.err.contains(words), "{words}: {}", r.err);
    }
    let sft = "[model]\nsource = \"merged\"\n[[train]]\nmodules = [\"mlp\"]\n[data]\ntrain = [{ source = \"rows.jsonl\", \
               format = \"tokens\" }]\n[run]\ndevice = \"cpu\"\n";
    w.write("sft.toml", sft);
    let r = w.ft(&["run", "sft.toml"]);
    assert!(r.code != 0 && r.err.contains("the model has a score head, and task = \"sft\""), "{}", r.err);
}

/// Rows of labeled documents: texts, prompts and messages; labels by number and by name.
#[test]
fn labeled_rows_are_read_and_told() {
    let w = World::new();
    w.tokenizer("m");
    w.config("m", json!({"vocab_size": 285}));
    let rows = [
        json!({"text": "Two?", "label": "no"}),
        json!({"prompt": "Two?", "label": 1}),
        json!({"messages": [{"role": "user", "content": "Two?"}], "label": "1"}),
        json!({"prompt": [{"role": "user", "content": "Two?"}], "label": "yes", "weight": 2}),
    ];
    w.write("rows.jsonl", rows.iter().map(|row| format!("{row}\n")).collect::<String>());
    let recipe = "task = \"classify\"\n[model]\nsource = \"m\"\nweights = \"random\"\n[[train]]\nmodules = \
        [\"attention\"]\n[classify]\nlabels = [\"no\", \"yes\"]\n[data]\ntrain = [{ source = \"rows.jsonl\" }]\n\
        shuffle = false\npack = false\n[run]\nsteps = 1\nbatch_rows = 4\ndevice = \"cpu\"\noutput = \"out\"\n";
    w.write("r.toml", recipe);
    let shown = w.ok(&["data", "r.toml", "--rows", "4"]).out;
    let classes: Vec<&str> = shown.lines().filter_map(|l| l.strip_prefix("  = ")).collect();
    assert_eq!(classes, ["no", "yes", "yes", "yes"], "{shown}");
    assert!(shown.contains("supervised   4 "), "{shown}");
    w.ok(&["run", "r.toml"]);
    assert_eq!(w.events("out", "step")[0]["rows"], 4);
    for (row, words) in [
        (json!({"text": "Two?"}), "no field \"label\""),
        (json!({"text": "Two?", "label": 2}), "label: 2 is none of the classes: \"no\", \"yes\", or 0 to 1"),
        (json!({"text": "Two?", "label": 0.5}), "label: 0.5 is none of the classes"),
        (json!({"text": "Two?", "label": [0, 1]}), "multi-label classification"),
        (json!({"text": "Two?", "labels": [0, 1], "label": 0}), "multi-label classification"),
        (json!({"text": "Two?", "prompt": "a", "label": 0}), "more than one of text, prompt, messages"),
        (json!({"label": 0}), "no field \"text\""),
    ] {
        w.write("rows.jsonl", format!("{row}\n"));
        let r = w.ft(&["run", "r.toml", "--overwrite"]);
        assert!(r.code == 3 && r.err.contains(words), "{row}: {}", r.err);
    }
}
