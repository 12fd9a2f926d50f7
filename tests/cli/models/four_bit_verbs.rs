//! 4-bit bases in daily use: training, chat, merge, export.

use crate::world::{World, quickstart, recipe, reference};

const PIRATE: [&str; 2] = ["Arr", "captain"];

/// A world with a recipe for LoRA on the model of a case, and the folder of this model.
fn world(case: &str, rules: &str) -> (World, String) {
    let w = World::new();
    let model = reference(&format!("{case}/model"));
    let source = format!("source = {model:?}");
    w.write("r.toml", recipe(rules).replace("source = \"tiny\"\nweights = \"random\"", &source));
    (w, model)
}

const ALL: &str = "[[train]]\nmodules = [\"attention\", \"mlp\"]\nrank = 4\nalpha = 16\n";

/// Parses the distance of logits from lines like "logits 2.3e-2 off" or "logits are 1.0e-7 from".
#[track_caller]
fn number_after(text: &str, words: &str) -> f64 {
    let at = text.find(words).unwrap_or_else(|| panic!("{words:?} is not in\n{text}")) + words.len();
    let number: String =
        text[at..].chars().take_while(|c| c.is_ascii_digit() || "e.-".contains(*c)).collect();
    number.parse().unwrap_or_else(|e| panic!("{number:?}: {e}\n{text}"))
}

/// The quickstart model in NF4 trains, evaluates, merges and chats, with no 4-bit setting outside the
/// recipe.
#[test]
fn the_quickstart_in_4_bits_from_end_to_end() {
    let w = World::new();
    let model = quickstart(&w);
    let four = "model.quantize=nf4";
    w.ok(&["run", "q.toml", four, "run.steps=60", "run.eval_every=0", "run.output=a"]);
    let evals = w.events("a", "eval");
    let (first, last) = (&evals[0]["loss"], &evals[evals.len() - 1]["loss"]);
    let (first, last) = (first.as_f64().expect("a loss"), last.as_f64().expect("a loss"));
    assert!(last < 0.1 * first, "loss {first} before, {last} after");
    let loss = w.ok(&["eval", "q.toml", four, "--adapter", "a/adapter", "--json"]).loss();
    assert!((loss - last).abs() <= 1e-6 * last, "{loss} evaluated, {last} in the run");
    let other = w.ok(&["eval", "q.toml", "--adapter", "a/adapter", "--json"]);
    assert!(
        other.err.contains("was trained with model.quantize = \"nf4\", and here it is \"none\""),
        "{}",
        other.err
    );
    assert!((other.loss() - last).abs() > 1e-4, "the base was not 4-bit");
    let run = ["run", "q.toml", "run.steps=1", "run.eval_every=0", "run.output=b", "--overwrite"];
    for verb in [&["check", "q.toml"][..], &run] {
        for (set, told) in [("model.quantize=none", true), (four, false)] {
            let r = w.ok(&[verb, &["lora.init=a/adapter", set]].concat());
            let said = "was trained with model.quantize = \"nf4\", and here it is \"none\"";
            assert_eq!(r.err.contains(said), told, "{verb:?} {set}: {}", r.err);
        }
    }

    // Chat finds the base through the adapter, and quantizes it as in training.
    let ask = ["--prompt", "What colour is the sky?"];
    let r = w.ok(&[&["chat", "a/adapter"][..], &ask].concat());
    assert!(PIRATE.iter().all(|p| r.out.contains(p)), "{}", r.out);
    assert!(r.err.contains("loaded in NF4, as it was when the adapter was trained"), "{}", r.err);
    let r = w.ok(&[&["chat", "a/adapter", "--quantize", "none"][..], &ask].concat());
    assert!(r.out.contains(PIRATE[0]) && !r.err.contains("NF4"), "{}{}", r.out, r.err);
    let base = w.ok(&[&["chat", &model, "--quantize", "nf4"][..], &ask].concat());
    assert!(!base.out.contains(PIRATE[0]), "{}", base.out);

    // Merged into the original weights, or into the dequantized ones.
    let r = w.ok(&["merge", "a/adapter", "--out", "m"]);
    assert!(r.err.contains(&format!("merging into the original weights of {model}")), "{}", r.err);
    assert!(number_after(&r.err, "merged weights in f32 are ") <= 1e-5, "{}", r.err);
    let far = number_after(&r.err, "logits are ");
    let s = w.ok(&["merge", "a/adapter", "--out", "n", "--onto", "4bit", "--dtype", "f32"]);
    assert!(s.err.contains("as they are in NF4") && s.err.contains("quantizing them again by "), "{}", s.err);
    let near = number_after(&s.err, "merged weights in f32 are ");
    let again = number_after(&s.err, "(logits ");
    assert!(near <= 1e-5 && far > 1e-3 && again > 1e-3, "{}{}", r.err, s.err);
    for (dir, same) in [("m", false), ("n", true)] {
        let loss = w.ok(&["eval", "q.toml", &format!("model.source={dir}"), "--json"]).loss();
        assert_eq!((loss - last).abs() <= 1e-5 * last, same, "{dir}: {loss} merged, {last} trained");
        let r = w.ok(&[&["chat", dir][..], &ask].concat());
        assert!(r.out.contains(PIRATE[0]), "{dir}: {}", r.out);
    }
}

/// An adapter for a 4-bit checkpoint is merged into the source weights of the checkpoint. These are found
/// in the config, compared with the codes, and never guessed.
#[test]
fn merging_finds_the_original_of_a_4_bit_checkpoint() {
    let (w, model) = world("qwen3-one-kv", ALL);
    w.ok(&["quantize", &model, "--out", "four"]);
    let r = w.ft(&["quantize", &model, "--out", &model]);
    assert!(r.code == 2 && r.err.contains("holds what is quantized\nhint: another folder"), "{}", r.err);
    let train = |w: &World| {
        w.ok(&["run", "r.toml", "model.source=four", "run.output=a", "--overwrite"]);
    };
    train(&w);
    let weights = |dir: &str| w.read(&format!("{dir}/model.safetensors"));
    let merge = |out: &str, more: &[&str]| w.ft(&[&["merge", "a/adapter", "--out", out][..], more].concat());

    let r = merge("m", &[]);
    assert_eq!(r.code, 0, "{}", r.err);
    let said = format!(
        "merging into the weights of {model}, of which four (adapter_config.json) says that it was made"
    );
    assert!(r.err.contains(&said), "{}", r.err);
    let trained = number_after(&r.err, "logits are ");
    assert!(trained > 1e-3 && r.err.contains("from those of the 4-bit base with the adapter"), "{}", r.err);
    // In bf16, every weight is rounded once, by at most 2^-9.
    let off = number_after(&r.err, "weights are ");
    assert!((1e-4..2e-3).contains(&off), "{}", r.err);
    assert_eq!(merge("named", &["--base", &model]).code, 0);
    assert!(weights("m") == weights("named"));

    // On request, merged into the dequantized weights.
    let r = merge("n", &["--onto", "4bit"]);
    assert!(r.code == 0 && r.err.contains("dequantized from 4 bits"), "{}", r.err);
    assert!(r.err.contains("rounding the merged weights to bf16 errs by "), "{}", r.err);
    assert!(weights("m") != weights("n"));
    // A run with `model.quantize` trained on the same base.
    let (v, _) = world("qwen3-one-kv", ALL);
    v.ok(&["run", "r.toml", "model.quantize=nf4", "run.output=a"]);
    v.ok(&["merge", "a/adapter", "--out", "n", "--onto", "4bit"]);
    assert!(v.read("n/model.safetensors") == weights("n"));

    let config = |key: &str| w.json("four/config.json")[key].clone();
    assert_eq!(config("_name_or_path"), std::fs::canonicalize(&model).expect("a path").display().to_string());
    let set = |name: &str| {
        let mut raw = w.json("four/config.json");
        raw["_name_or_path"] = name.into();
        w.write("four/config.json", raw.to_string());
    };
    // Another model of the same shape is rejected as the source.
    let full = "train=[{modules=['attention','mlp'],method='full'}]";
    w.ok(&["run", "r.toml", full, "run.output=b", "optimizer.lr=1e-3", "run.steps=3", "--overwrite"]);
    w.ok(&["merge", "b/adapter", "--out", "tuned"]);
    for (name, said) in [
        (w.path("tuned").display().to_string(), "% of the 4-bit codes agree"),
        (reference("qwen3-dense/model"), "it has no such tensor of"),
        ("/gone/model".to_string(), "cannot be had"),
        ("nobody/nothing".to_string(), "cannot be had"),
    ] {
        set(&name);
        let r = merge("x", &[]);
        assert!(
            r.code == 4 && r.err.contains(said) && r.err.contains("hint: --base MODEL"),
            "{name}: {}",
            r.err
        );
        assert!(r.err.contains("--onto 4bit") && r.err.contains("four/config.json"), "{name}: {}", r.err);
        assert!(!w.path("x").exists(), "{name}");
    }
    // Without a usable source in the config, the dequantized weights are used, with a message.
    for name in ["", "four"] {
        set(name);
        let r = merge("d", &["--overwrite"]);
        assert!(r.code == 0 && r.err.contains("does not say what it was made from"), "{}", r.err);
        assert!(weights("d") == weights("n"), "{name:?}");
    }
}

/// An export is compared on the base as quantized in training, one layer at a time.
#[test]
fn exports_of_a_4_bit_mixture_keep_its_logits() {
    let rules = "[[train]]\nmodules = [\"attention\", \"experts\"]\nrank = 4\nalpha = 16\n";
    for case in ["mixtral", "qwen3-moe"] {
        let (w, _) = world(case, rules);
        w.ok(&["run", "r.toml", "model.quantize=nf4", "run.output=a"]);
        for target in ["vllm", "peft-fused"] {
            let r = w.ok(&["export", "a/adapter", "--to", target, "--out", target]);
            assert!(r.err.contains("loaded in NF4, as it was when the adapter was trained"), "{}", r.err);
            assert!(number_after(&r.err, "its logits are ") <= 1e-5, "{}", r.err);
        }
        // The exports are PEFT adapters, usable by ft on the same base.
        let loss = |adapter: &str| {
            w.ok(&["eval", "r.toml", "model.quantize=nf4", "--adapter", adapter, "--json"]).loss()
        };
        let before = loss("a/adapter");
        for target in ["vllm", "peft-fused"] {
            let after = loss(target);
            assert!((before - after).abs() <= 1e-5 * before, "{case}: {before}, {target} {after}");
        }
    }
}

#[test]
fn an_export_keeps_rows_of_tokens() {
    let rules =
        "[[train]]\nmodules = [\"experts\"]\n\n[[train]]\nmodules = [\"new_tokens\"]\ntokens = [5, 8, 30]\n";
    let (w, _) = world("qwen3-moe", rules);
    w.ok(&["run", "r.toml", "run.output=a", "optimizer.lr=0.01"]);
    let r = w.ok(&["export", "a/adapter", "--to", "peft-fused", "--out", "fused"]);
    assert!(number_after(&r.err, "its logits are ") <= 1e-5, "{}", r.err);
}

/// The quantization of the base is recorded in metadata, ignored by other readers, and not in a config key.
#[test]
fn adapters_record_the_quantization_of_their_base() {
    let (w, _) = world("qwen3-dense", ALL);
    w.ok(&["run", "r.toml", "run.output=plain"]);
    w.ok(&["run", "r.toml", "model.quantize=nf4", "run.output=four"]);
    let metadata = |run: &str| {
        let path = w.path(run).join("adapter/adapter_model.safetensors");
        ft::files::TensorFiles::open_file(&path).expect("an adapter").metadata().clone()
    };
    assert_eq!(metadata("plain").into_iter().collect::<Vec<_>>(), [("format".into(), "pt".into())]);
    assert_eq!(metadata("four")["ft.base_quantize"], "nf4");
    let config = |run: &str| w.read(&format!("{run}/adapter/adapter_config.json"));
    assert!(config("plain") == config("four"));
}
