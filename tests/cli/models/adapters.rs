//! Training from an adapter, and merging.

use crate::world::{World, merged, ran, recipe, reference, repository};
use serde_json::json;

/// A world with a model on disk; `rules` select the trained modules.
fn world(case: &str, rules: &str) -> World {
    let w = World::new();
    let source = format!("source = {:?}", reference(&format!("{case}/model")));
    w.write("r.toml", recipe(rules).replace("source = \"tiny\"\nweights = \"random\"", &source));
    w
}

/// Trains, evaluates the adapter, merges, and evaluates the merged model: all losses must agree. Returns
/// whether the merge untied head and embedding.
#[track_caller]
fn one_loss(case: &str, rules: &str) -> bool {
    let w = world(case, rules);
    w.ok(&["run", "r.toml", "run.output=a"]);
    let end = w.events("a", "eval").last().and_then(|e| e["loss"].as_f64()).expect("an evaluation");
    let base = w.ok(&["eval", "r.toml", "--json"]).loss();
    let unmerged = w.ok(&["eval", "r.toml", "--json", "--adapter", "a/adapter"]).loss();
    let merged = w.ok(&["merge", "a/adapter", "--out", "m"]);
    let loss = w.ok(&["eval", "r.toml", "--json", "model.source=m"]).loss();
    assert!((base - end).abs() > 1e-3, "{case}: the run moved nothing");
    assert!((unmerged - end).abs() <= 1e-6 * end, "{case}: {unmerged} unmerged, {end} in the run");
    assert!((loss - end).abs() <= 1e-5 * end, "{case}: {loss} merged, {end} in the run");
    assert_eq!(merged.out, "m\n");
    merged.err.contains("head and embedding are two tensors now")
}

const ENDS: &str = "[[train]]\nmodules = [\"attention\", \"embedding\", \"head\"]\nrank = 3\nalpha = 6\n";

#[test]
fn adapters_merge_into_the_same_model() {
    assert!(!one_loss("llama-embed-head", ENDS), "an untied model");
    assert!(one_loss("qwen3-dense", ENDS), "a tied model, both ends");
    assert!(one_loss("qwen3-dense", &ENDS.replace("\"embedding\", ", "")), "a tied model, its head");
    assert!(one_loss("qwen3-dense", &ENDS.replace(", \"head\"", "")), "a tied model, its embedding");
    let full = "[[train]]\nmodules = [\"mlp\"]\nrank = 3\n[[train]]\nmodules = [\"embedding\", \"norms\"]\nmethod = \"full\"";
    assert!(!one_loss("qwen3-dense", full), "a tied model whose one tensor trains in full");
    // Biases; those of linear layers in full are trained.
    let biases = "[[train]]\nmodules = [\"attention\"]\nmethod = \"full\"\n[[train]]\nmodules = [\"mlp\", \"head\"]\nrslora = true\nrank = 3";
    assert!(!one_loss("qwen2-bias", biases));
    let dora = "[[train]]\nmodules = [\"attention\", \"head\"]\ndora = true\n[[train]]\nmodules = [\"mlp\"]\nrank = 3";
    assert!(one_loss("llama-yarn", dora), "a tied model, DoRA on its head");
}

#[test]
fn a_merged_model_keeps_the_dtype_and_needs_an_empty_folder() {
    let w = world("qwen3-one-kv", "[[train]]\nmodules = [\"attention\"]\nrank = 3\n");
    w.ok(&["run", "r.toml", "run.output=a"]);
    let dtype = |dir: &str| {
        let files = ft::files::TensorFiles::open_model(&w.path(dir)).expect("a model");
        let config = w.json(&format!("{dir}/config.json"));
        let named =
            config.get("dtype").or(config.get("torch_dtype")).and_then(|d| d.as_str()).map(str::to_string);
        (files.names().map(|n| files.info(n).expect("a tensor").dtype.to_string()).collect::<Vec<_>>(), named)
    };
    w.ok(&["merge", "a/adapter", "--out", "m"]);
    let (all, named) = dtype("m");
    assert!(all.iter().all(|d| d == "BF16") && named.as_deref() == Some("bfloat16"), "{all:?} {named:?}");

    // The merge needs an empty folder, or `--overwrite`.
    w.write("m/notes.txt", "mine");
    let r = w.ft(&["merge", "a/adapter", "--out", "m", "--dtype", "f32"]);
    assert!(
        r.code == 2 && r.err.contains("is no empty folder") && r.err.contains("hint: another folder"),
        "{}",
        r.err
    );
    w.ok(&["merge", "a/adapter", "--out", "m", "--dtype", "f32", "--overwrite"]);
    let (all, named) = dtype("m");
    assert!(all.iter().all(|d| d == "F32") && named.as_deref() == Some("float32"), "{all:?} {named:?}");
    assert_eq!(w.read("m/notes.txt"), b"mine");
    for into in ["a/adapter", "a/../a/adapter/"] {
        let r = w.ft(&["merge", "a/adapter", "--out", into, "--overwrite"]);
        assert!(r.code == 2 && r.err.contains("holds what is merged"), "{}", r.err);
    }

    // The base of the adapter has moved.
    w.ok(&["logits", "a/adapter", "r.toml", "--out", "taught"]);
    let config = w.text("a/adapter/adapter_config.json");
    let base = reference("qwen3-one-kv/model");
    w.write("a/adapter/adapter_config.json", config.replace(&base, "/gone"));
    let r = w.ft(&["merge", "a/adapter", "--out", "n"]);
    assert!(
        r.code == 4 && r.err.contains("base_model_name_or_path") && r.err.contains("--base"),
        "{}",
        r.err
    );
    for args in [
        &["chat", "a/adapter", "--prompt", "a"][..],
        &["serve", "a/adapter", "--port", "0"],
        &["logits", "a/adapter", "r.toml", "--out", "again"],
    ] {
        let r = w.ft(args);
        let hint = "hint: BASE --adapter a/adapter, or run it where that path leads to it";
        assert!(r.code == 4 && r.err.contains(hint) && !r.err.contains("--base"), "{args:?}: {}", r.err);
    }
    w.ok(&["logits", &base, "r.toml", "--adapter", "a/adapter", "--out", "again"]);
    assert!(w.read("again/train-0.jsonl.zst") == w.read("taught/train-0.jsonl.zst"));
    w.ok(&["merge", "a/adapter", "--out", "n", "--base", &base, "--dtype", "f32"]);
    assert!(w.read("n/model.safetensors") == w.read("m/model.safetensors"));
    let r = w.ft(&["merge", "a/adapter", "--out", "o", "--base", &reference("llama3-rope/model")]);
    assert!(r.code == 4 && r.err.contains("adapter_model.safetensors"), "{}", r.err);
    assert!(!w.path("o").exists());
}

/// A base by a relative path is in the folder of its run, also where another folder has that path; a change of it is a
/// warning.
#[test]
fn the_base_of_a_run_is_its_own() {
    let w = World::new();
    w.copy(repository().join("data/model"), "model");
    let text = recipe("[[train]]\nmodules = [\"attention\"]\nrank = 3\n");
    w.write("r.toml", text.replace("source = \"tiny\"\nweights = \"random\"", "source = \"model\""));
    w.ok(&["run", "r.toml", "run.output=a"]);
    let full = "train=[{modules=['attention','mlp','norms','embedding','head'],method='full'}]";
    w.ok(&["run", "r.toml", "run.output=other", full]);

    let in_other = |args: &[&str]| {
        let r = ran(w.command(args).current_dir(w.path("other")).output().expect("started"));
        assert!(r.code == 0 && !r.err.contains("has changed"), "{args:?}: {}", r.err);
        r
    };
    let r = w.ok(&["merge", "a", "--out", "m"]);
    assert!(r.err.contains("merging into the weights of model (adapter_config.json)"), "{}", r.err);
    let r = in_other(&["merge", "../a", "--out", "m"]);
    assert!(r.err.contains("/model (adapter_config.json)"), "{}", r.err);
    assert!(w.read("other/m/model.safetensors") == w.read("m/model.safetensors"));
    in_other(&["export", "../a", "--to", "vllm", "--out", "v"]);
    let chat = ["--prompt", "Hello!", "--max-tokens", "8"];
    let [there, here] = ["../a", "a"].map(|run| [&["chat", run][..], &chat].concat());
    assert_eq!(in_other(&there).out, w.ok(&here).out);

    w.copy(w.path("other/model"), "model");
    for (args, told) in [
        (&["merge", "a", "--out", "n"][..], true),
        (&["export", "a", "--to", "vllm", "--out", "v"], true),
        (&["merge", "a", "--out", "o", "--base", "model"], false),
    ] {
        let r = w.ok(args);
        let said = "warning: model: the base has changed since the training: a was trained on other weights";
        assert_eq!(r.err.contains(said), told, "{args:?}: {}", r.err);
    }
}

/// Without rules, the config of the adapter selects the trained modules; with rules, the rules do.
#[test]
fn a_run_goes_on_from_an_adapter() {
    let rules = "[[train]]\nmodules = [\"attention\"]\nrank = 3\nrslora = true\n[[train]]\nmodules = [\"norms\"]\nmethod = \"full\"\n";
    let w = world("llama3-rope", rules);
    w.ok(&["run", "r.toml", "run.output=a"]);
    let end = w.events("a", "eval").last().and_then(|e| e["loss"].as_f64()).expect("an evaluation");
    let starts =
        |run: &str| w.events(run, "eval").first().and_then(|e| e["loss"].as_f64()).expect("an evaluation");
    let on = ["lora.init=a/adapter", "run.eval_at_start=true", "run.steps=2"];

    w.ok(&[&["run", "r.toml", "run.output=with"][..], &on].concat());
    assert!((starts("with") - end).abs() <= 1e-6 * end);
    let mut text = w.text("r.toml");
    text = text.replace(rules, "");
    w.write("without.toml", &text);
    w.ok(&[&["run", "without.toml", "run.output=without"][..], &on].concat());
    assert!((starts("without") - end).abs() <= 1e-6 * end);
    // The default learning rate depends on the trained modules, and these are the same.
    let weights = |run: &str| w.read(&format!("{run}/adapter/adapter_model.safetensors"));
    assert!(weights("with") == weights("without") && weights("with") != weights("a"));

    let refused = |name: &str, rules: &str, said: &[&str]| {
        w.write("x.toml", text.replace("[data]", &format!("{rules}\n[data]")));
        let r = w.ft(&[&["run", "x.toml", "run.output=x"][..], &on].concat());
        assert_eq!(r.code, 4, "{name}: {}", r.err);
        assert!(said.iter().all(|s| r.err.contains(s)), "{name}: {}", r.err);
        assert!(!w.path("x").exists(), "{name}");
    };
    refused(
        "another rank",
        &rules.replace("rank = 3", "rank = 4"),
        &["lora_A.weight: [3, 32] in the adapter, [4, 32]"],
    );
    refused(
        "fewer modules",
        &rules.replace("\"attention\"", "\"q_proj\""),
        &["tensors in the adapter that nothing trains"],
    );
}

/// As PEFT makes them on transformers 5: it has other names for Mixtral's parts, and a parameter of all experts.
#[test]
fn an_adapter_of_all_experts_is_used_and_trains_on() {
    let rules = "[[train]]\nmodules = [\"attention\", \"mlp\", \"experts\", \"router\"]\nrank = 3\n";
    for (case, rules) in [("mixtral", rules.replace("\"mlp\", ", "")), ("qwen2-moe", rules.to_string())] {
        let w = world(case, &rules);
        let loss = |adapter: &str| w.ok(&["eval", "r.toml", "--json", "--adapter", adapter]).loss();
        w.ok(&["run", "r.toml", "run.output=a"]);
        w.ok(&["export", "a/adapter", "--to", "peft-fused", "--out", "fused"]);
        let end = loss("a/adapter");
        let near = |other: f64| assert!((other - end).abs() <= 1e-5 * end, "{case}: {other}, before {end}");
        near(loss("fused"));
        w.ok(&["merge", "fused", "--out", "m"]);
        near(w.ok(&["eval", "r.toml", "--json", "model.source=m"]).loss());
        w.write("on.toml", w.text("r.toml").replace(&rules, ""));
        let on = ["lora.init=fused", "run.eval_at_start=true", "run.steps=2", "run.output=b"];
        w.ok(&[&["run", "on.toml"][..], &on].concat());
        let evals = w.events("b", "eval");
        let [first, last] = [evals.first(), evals.last()].map(|e| e.and_then(|e| e["loss"].as_f64()));
        near(first.expect("a loss"));
        let (last, written) = (last.expect("a loss"), loss("b/adapter"));
        assert!((last - written).abs() <= 1e-6 * last, "{case}: {last} in the run, {written} written");
        let config = w.json("b/adapter/adapter_config.json");
        let names = config["target_parameters"].as_array().cloned().unwrap_or_default();
        assert!(names.contains(&json!("mlp.experts.gate_up_proj")), "{case}: {names:?}");
    }
}

/// PEFT has one switch for DoRA. A mix of DoRA and LoRA is saved with magnitudes for all modules, and rules
/// restore the mix.
#[test]
fn an_adapter_of_dora_and_lora_trains_on_from_its_loss() {
    let rules =
        "[[train]]\nmodules = [\"attention\"]\ndora = true\n[[train]]\nmodules = [\"mlp\"]\nrank = 3\n";
    let w = world("llama3-rope", rules);
    w.ok(&["run", "r.toml", "run.output=a"]);
    let end = w.events("a", "eval").last().and_then(|e| e["loss"].as_f64()).expect("an evaluation");
    let on = ["lora.init=a/adapter", "run.eval_at_start=true", "run.steps=1"];
    w.ok(&[&["run", "r.toml", "run.output=b"][..], &on].concat());
    let start = w.events("b", "eval")[0]["loss"].as_f64().expect("a loss");
    assert!((start - end).abs() <= 1e-6 * end, "{start} at the start, {end} at the end before");
    // A magnitude other than the neutral one is not dropped.
    let plain = rules.replace("dora = true", "dora = false");
    w.write("x.toml", w.text("r.toml").replace(rules, &plain));
    let r = w.ft(&[&["run", "x.toml", "run.output=x"][..], &on].concat());
    assert!(
        r.code == 4 && r.err.contains("lora_magnitude_vector") && r.err.contains("dora = true"),
        "{}",
        r.err
    );
}

/// Adapters saved by PEFT include tensors of the base. They are compared with the base and never trained.
#[test]
fn adapters_of_peft_are_used_as_they_are() {
    for (case, adapter) in [("llama-embed-head", "adapter_final"), ("qwen3-dense", "head_adapter_final")] {
        let w = world(case, "");
        let adapter = reference(&format!("{case}/{adapter}"));
        let init = format!("lora.init={adapter}");
        let on = ["run", "r.toml", &init, "run.eval_at_start=true", "run.steps=1", "run.output=a"];
        w.ok(&on);
        let start = w.events("a", "eval")[0]["loss"].as_f64().expect("a loss");
        let used = w.ok(&["eval", "r.toml", &init, "--json"]).loss();
        assert!((start - used).abs() <= 1e-6 * used, "{case}");
        let base = reference(&format!("{case}/model"));
        w.ok(&["merge", &adapter, "--base", &base, "--out", "m"]);
        let source = ["model.source=m", "lora.init=default", "train=[{modules=['head']}]"];
        let merged = w.ok(&[&["eval", "r.toml", "--json"][..], &source].concat()).loss();
        assert!((merged - used).abs() <= 1e-5 * used, "{case}: {merged} merged, {used} unmerged");
        // The same adapter on another model of the same shape.
        w.config("other", json!({}));
        let config = std::fs::read(format!("{base}/config.json")).expect("a config");
        w.write("random/config.json", config);
        let full = "train=[{modules=['attention','mlp','norms','embedding','head'],method='full'}]";
        let other = ["model.source=random", "model.weights=random", "run.steps=1", "run.output=other"];
        w.ok(&[&["run", "r.toml", full][..], &other].concat());
        let r = w.ft(&[&on[..], &["model.source=other/model", "--overwrite"]].concat());
        assert!(r.code == 4 && r.err.contains("base_layer") && r.err.contains("another model"), "{}", r.err);
    }
}

/// Older versions of transformers write the template as a key of `tokenizer_config.json`.
#[test]
fn an_adapter_answers_with_its_own_chat_template() {
    let w = World::new();
    let source = format!("source = {:?}", repository().join("data/model"));
    let rules = "[[train]]\nmodules = [\"attention\"]\nrank = 2\n";
    w.write("r.toml", recipe(rules).replace("source = \"tiny\"\nweights = \"random\"", &source));
    w.ok(&["run", "r.toml", "run.output=a", "run.steps=1"]);
    let of = |text: &str| format!("{{{{ raise_exception('{text}') }}}}");
    let template = of("own template");
    let config = merged(w.json("a/adapter/tokenizer_config.json"), &json!({"chat_template": template}));
    w.write("a/adapter/tokenizer_config.json", config.to_string());
    let chat = ["chat", "a/adapter", "--prompt", "x", "--max-tokens", "1"];
    // beside ft.json, the tokenizer is the base's
    w.ok(&chat);
    std::fs::remove_file(w.path("a/adapter/ft.json")).expect("removed");
    let r = w.ft(&chat);
    assert!(r.code == 4 && r.err.contains("own template"), "{}: {}", r.code, r.err);
    w.write("t.jinja", of("another template"));
    let r = w.ft(&[&chat[..], &["--chat-template", "t.jinja"]].concat());
    assert!(r.code == 4 && r.err.contains("another template"), "{}: {}", r.code, r.err);
    w.ok(&["merge", "a/adapter", "--out", "m"]);
    w.ok(&["export", "a/adapter", "--to", "vllm", "--out", "v"]);
    assert_eq!(
        ["m", "v"].map(|dir| w.text(&format!("{dir}/chat_template.jinja"))),
        [&template; 2].map(Clone::clone)
    );
}

/// A layer range beyond the last layer trains the existing layers, with one warning per command.
#[test]
fn a_range_of_layers_beyond_the_last_is_one_warning() {
    let w = World::new();
    w.config("tiny", json!({}));
    let rule = |layers: &str| {
        recipe(&format!("[[train]]\nmodules = [\"attention\"]\nrank = 2\nlayers = {layers}\n"))
    };
    w.write("r.toml", rule("\"0-40\""));
    for verb in
        [&["check", "r.toml"][..], &["plan", "r.toml"], &["plan", "r.toml", "--json"], &["run", "r.toml"]]
    {
        let r = w.ok(verb);
        let told = r.err.matches("train.0.layers: 3-40 are not there").count();
        assert_eq!(told, 1, "{verb:?}: {}", r.err);
    }
    w.write("r.toml", rule("[0, 77]"));
    for verb in ["check", "plan", "run"] {
        let r = w.ft(&[verb, "r.toml", "run.output=x"]);
        assert!(r.code == 2 && r.err.contains("77 is not there"), "{verb}: {}", r.err);
    }
    assert!(!w.path("x").exists());
}

/// transformers 5 goes by the file where the config ties a head that is not the embedding.
#[test]
fn a_head_unlike_the_embedding_is_not_tied() {
    let w = world("llama-embed-head", "[[train]]\nmodules = [\"/.*/\"]\nmethod = \"full\"\n");
    let model = reference("llama-embed-head/model");
    std::fs::create_dir(w.path("m")).expect("a folder");
    std::fs::copy(format!("{model}/model.safetensors"), w.path("m/model.safetensors")).expect("copied");
    let mut config = w.json(&format!("{model}/config.json"));
    config["tie_word_embeddings"] = json!(true);
    w.write("m/config.json", config.to_string());
    let want = w.ok(&["eval", "r.toml", "--json"]).loss();
    let got = w.ok(&["eval", "r.toml", "--json", "model.source=m"]);
    assert_eq!(got.loss(), want);
    assert!(got.err.contains("lm_head.weight in the file is not model.embed_tokens.weight"), "{}", got.err);
    w.ok(&["check", "r.toml", "model.source=m"]);
    w.ok(&["run", "r.toml", "model.source=m", "run.output=a"]);
    let files = ft::files::TensorFiles::open_model(&w.path("a/model")).expect("a model");
    assert!(files.info("lm_head.weight").is_some());
    assert_eq!(w.json("a/model/config.json")["tie_word_embeddings"], json!(false));
}

/// In PEFT, an embedding saved without the tied head is a separate copy, and so is the head without the embedding. In
/// `ft`, both are one tensor.
#[test]
fn an_embedding_without_its_tied_head_is_refused() {
    let w = world("qwen3-dense", "[[train]]\nmodules = [\"embedding\"]\nmethod = \"full\"\n");
    w.ok(&["run", "r.toml", "run.output=a"]);
    w.ok(&["eval", "r.toml", "--json", "--adapter", "a/adapter"]);
    let path = w.path("a/adapter/adapter_model.safetensors");
    let files = ft::files::TensorFiles::open_file(&path).expect("tensors");
    let (f32, cpu) = (candle_core::DType::F32, candle_core::Device::Cpu);
    let mut config = w.json("a/adapter/adapter_config.json");
    let mut with = |kept: &str, ties: bool| {
        let names = files.names().filter(|n| n.contains(kept));
        let tensors: Vec<_> =
            names.map(|n| (n.to_string(), files.tensor(n, f32, &cpu).expect("a tensor"))).collect();
        ft::files::write_file(&path, &tensors, &[("format", "pt")]).expect("written");
        config["modules_to_save"] = json!([kept]);
        config["ensure_weight_tying"] = json!(ties);
        w.write("a/adapter/adapter_config.json", config.to_string());
        w.ft(&["eval", "r.toml", "--json", "--adapter", "a/adapter"])
    };
    for (kept, ties, said) in [
        ("embed_tokens", false, Some("embed_tokens.weight without lm_head")),
        ("embed_tokens", true, None),
        ("lm_head", false, Some("lm_head.weight without embed_tokens")),
    ] {
        let r = with(kept, ties);
        assert_eq!(r.code, if said.is_some() { 4 } else { 0 }, "{}", r.err);
        assert!(said.is_none_or(|said| r.err.contains(said) && r.err.contains("hint: ")), "{}", r.err);
    }
}
