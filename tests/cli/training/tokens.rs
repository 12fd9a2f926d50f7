//! Trained token rows, alone or in combination with LoRA.

use crate::split::{apart, ends, evals, on_files};
use crate::world::{Dice, World, recipe};
use ft::files::TensorFiles;
use serde_json::{Value, json};

const TOKENS: &str = "[[train]]\nmodules = [\"new_tokens\"]\ntokens = [40, 5, 6, 63]\n";
const IDS: [usize; 4] = [40, 5, 6, 63];
const BESIDE: &str = "[lora]\nrank = 4\n[[train]]\nmodules = [\"attention\"]\ndora = true\n";

/// A model on disk, with a tied head or without.
fn world(rules: &str, tied: bool) -> World {
    on_files(rules, json!({ "tie_word_embeddings": tied }))
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * b.abs()
}

/// Rows of a tensor with differences between two models.
fn changed(w: &World, models: [&str; 2], name: &str) -> Vec<usize> {
    let rows = models.map(|m| {
        let files = TensorFiles::open_model(&w.path(m)).expect("a model");
        let t = files.tensor(name, candle_core::DType::F32, &candle_core::Device::Cpu).expect("a tensor");
        t.to_vec2::<f32>().expect("rows")
    });
    (0..rows[0].len()).filter(|i| rows[0][*i] != rows[1][*i]).collect()
}

/// The run starts at the loss of the base. Adapter and merged model reproduce the trained model, and only
/// the selected rows differ from the base.
#[test]
fn only_the_selected_token_rows_train() {
    let beside = BESIDE.to_string() + TOKENS;
    for (rules, tied) in [(TOKENS, true), (TOKENS, false), (&beside, true), (&beside, false)] {
        let w = world(rules, tied);
        let base = w.ok(&["eval", "r.toml", "--json"]).loss();
        w.ok(&["run", "r.toml", "run.output=a"]);
        let losses = evals(&w, "a");
        assert!(near(losses[0], base), "{} and {base}", losses[0]);
        assert!((losses[1] - base).abs() > 1e-4 * base, "nothing was trained: {losses:?}");
        let with = w.ok(&["eval", "r.toml", "--json", "--adapter", "a/adapter"]).loss();
        assert!(near(with, losses[1]), "{with} and {}", losses[1]);

        let config = w.json("a/adapter/adapter_config.json");
        let lists = match tied {
            true => json!({ "embed_tokens": IDS }),
            false => json!({ "embed_tokens": IDS, "lm_head": IDS }),
        };
        assert_eq!(config["trainable_token_indices"], lists);
        assert_eq!(config["modules_to_save"], Value::Null);
        let file = "a/adapter/adapter_model.safetensors";
        let adapter = TensorFiles::open_file(&w.path(file)).expect("an adapter");
        let names: Vec<&str> = adapter.names().filter(|n| !n.contains("lora_")).collect();
        assert_eq!(names.len(), if tied { 1 } else { 2 }, "{names:?}");

        let merged = w.ok(&["merge", "a/adapter", "--out", "m"]);
        assert!(!merged.err.contains("two tensors"), "{}", merged.err);
        let after = w.ok(&["eval", "r.toml", "--json", "model.source=m"]).loss();
        assert!((after - losses[1]).abs() <= 1e-5 * after, "{after} and {}", losses[1]);
        let mut sorted = IDS;
        sorted.sort_unstable();
        assert_eq!(changed(&w, ["made/model", "m"], "model.embed_tokens.weight"), sorted);
        if !tied {
            assert_eq!(changed(&w, ["made/model", "m"], "lm_head.weight"), sorted);
        }

        // Without rules, the adapter selects the rows.
        let text = w.text("r.toml").replace(rules, "");
        w.write("on.toml", text.replace("[data]", "[lora]\ninit = \"a/adapter\"\n[data]"));
        w.ok(&["run", "on.toml", "run.output=on"]);
        assert!(near(evals(&w, "on")[0], losses[1]), "{:?} and {}", evals(&w, "on"), losses[1]);
    }
}

/// With recompute, offloading, ranks with any sharding, and after a resume: the same bits.
#[test]
fn trained_token_rows_have_the_same_bits_in_any_layout() {
    for tied in [true, false] {
        let w = world(&(BESIDE.to_string() + TOKENS), tied);
        let run = |name: &str, set: &[&str]| {
            let output = format!("run.output={name}");
            w.ok(&[&["run", "r.toml", &output][..], set].concat());
            ends(&w, name)
        };
        let want = run("plain", &["memory.recompute=none"]);
        assert!(run("again", &["memory.recompute=all"]) == want);
        let host = "memory.offload=['optimizer', 'params', 'activations']";
        assert!(run("host", &[host]) == want);
        // Without a result, the run does not count as finished.
        for gone in ["checkpoints/step-00000006", "adapter"] {
            std::fs::remove_dir_all(w.path("plain").join(gone)).expect("removed");
        }
        w.ok(&["run", "r.toml", "run.output=plain", "memory.recompute=none", "--resume"]);
        assert!(ends(&w, "plain") == want, "other bits after a resume");

        let two = run("two", &["parallel.data=2", "run.micro_rows=1"]);
        assert!(apart(&two[2], &want[2]) < 1e-4);
        for (ranks, zero) in [(2, 1), (2, 2), (2, 3), (4, 3)] {
            let parallel = [format!("parallel.data={ranks}"), format!("parallel.zero={zero}")];
            let set = ["run.micro_rows=1", &*parallel[0], &*parallel[1]];
            assert!(run(&format!("{ranks}-{zero}"), &set) == two, "{ranks} ranks, stage {zero}");
        }
        let half = ["model.dtype=bf16", "run.micro_rows=1", "parallel.data=2"];
        let want = run("half", &half);
        assert!(run("half-3", &[&half[..], &["parallel.zero=3", host]].concat()) == want);
        let back = ["optimizer.in_backward=true", "run.clip=0", "run.micro_rows=4"];
        let want = run("clip", &back[1..]);
        assert!(run("back", &back) == want);
    }
}

/// The row of the padding token in an untied embedding gets no gradient, with one warning per command.
#[test]
fn the_padding_token_among_trained_rows_is_one_warning() {
    let w = world(TOKENS, false);
    let set = ["model.override={pad_token_id=5}", "optimizer.weight_decay=0", "run.output=a"];
    for verb in ["check", "run"] {
        let r = w.ok(&[&[verb, "r.toml"][..], &set].concat());
        let told = r.err.matches("train.0: tokens: 5 is the padding token").count();
        assert_eq!(told, 1, "{verb}: {}", r.err);
    }
    w.ok(&["merge", "a/adapter", "--out", "m"]);
    let trained = |name: &str| changed(&w, ["made/model", "m"], name).contains(&5);
    assert!(!trained("model.embed_tokens.weight") && trained("lm_head.weight"));
}

/// Tokens by text with a tokenizer, by id always. Unknown texts and invalid ids are reported.
#[test]
fn tokens_are_named_by_text_or_number() {
    let w = World::new();
    w.config("tiny", json!({ "vocab_size": 320 }));
    w.tokenizer("tiny");
    let mut dice = Dice(3);
    let rows: String = (0..40)
        .map(|_| {
            format!(
                "{}\n",
                json!({"text": format!("<|im_start|>{} {}<|im_end|>", dice.below(99), dice.below(99))})
            )
        })
        .collect();
    w.write("rows.jsonl", &rows);
    w.write("eval.jsonl", &rows);
    let rule =
        |tokens: &str| recipe(&TOKENS.replace("40, 5, 6, 63", tokens)).replace("\"tokens\"", "\"text\"");
    w.write("r.toml", rule("\"<|im_end|>\", 300, \"<|im_start|>\""));
    let r = w.ok(&["check", "r.toml"]);
    assert!(r.out.contains("embedding: 1 module, the rows of 3 tokens"), "{}", r.out);
    assert!(r.out.contains("rows of tokens"), "{}", r.out);
    w.ok(&["plan", "r.toml"]);
    w.ok(&["run", "r.toml"]);
    let config = w.json("runs/r/adapter/adapter_config.json");
    assert_eq!(config["trainable_token_indices"]["lm_head"], json!([284, 300, 283]));

    for (tokens, said) in [
        ("320", &["320 is token 320", "320 rows", "resize_token_embeddings"][..]),
        ("284, \"<|im_end|>\"", &["are one token"]),
    ] {
        w.write("x.toml", rule(tokens));
        for verb in ["check", "run"] {
            let r = w.ft(&[verb, "x.toml", "run.output=x"]);
            assert!(r.code == 2 && said.iter().all(|s| r.err.contains(s)), "{verb}: {}", r.err);
            assert!(
                r.err.contains("x.toml:") && r.err.contains("train.0") && r.err.contains("hint: "),
                "{}",
                r.err
            );
        }
        assert!(!w.path("x").exists());
    }
}

/// A text unknown to the tokenizer gets the next id. Adapter and merged model include the extended
/// tokenizer, and all subcommands tokenize like the run.
#[test]
fn unknown_token_texts_extend_the_tokenizer() {
    let w = World::new();
    w.config("start", json!({ "vocab_size": 287, "tie_word_embeddings": true }));
    w.tokenizer("start");
    let all = "[[train]]\nmodules = [\"/.*/\"]\nmethod = \"full\"\n";
    let text =
        recipe(all).replace("source = \"tiny\"", "source = \"start\"").replace("steps = 6", "steps = 1");
    w.write("start.toml", text);
    w.ok(&["run", "start.toml", "run.output=made"]);
    let mut dice = Dice(3);
    let rows: String = (0..40)
        .map(|_| {
            format!("{}\n", json!({"text": format!("<think>{}</think> {}", dice.below(99), dice.below(99))}))
        })
        .collect();
    w.write("rows.jsonl", &rows);
    w.write("eval.jsonl", &rows);
    let rules = TOKENS.replace("40, 5, 6, 63", "\"<think>\", \"</think>\"");
    let text = recipe(&rules).replace("source = \"tiny\"\nweights = \"random\"", "source = \"made/model\"");
    let text = text.replace("\"tokens\"", "\"text\"");
    w.write("r.toml", &text);
    let r = w.ok(&["run", "r.toml", "run.output=a"]);
    assert!(r.err.contains("\"<think>\" (token 285), \"</think>\" (token 286)"), "{}", r.err);
    let config = w.json("a/adapter/adapter_config.json");
    assert_eq!(config["trainable_token_indices"], json!({"embed_tokens": [285, 286]}));
    let end = evals(&w, "a").pop().expect("an evaluation");

    // Without the rule, the adapter defines the tokens.
    w.write("plain.toml", text.replace(&rules, ""));
    let rule = "train=[{modules=['mlp']}]";
    let with = w.ok(&["eval", "plain.toml", rule, "--json", "--adapter", "a/adapter"]).loss();
    assert!(near(with, end), "{with} and {end}");
    w.ok(&["merge", "a/adapter", "--out", "m"]);
    let after = w.ok(&["eval", "plain.toml", rule, "--json", "model.source=m"]).loss();
    assert!((after - end).abs() <= 1e-5 * end, "{after} and {end}");
    assert!(w.read("m/tokenizer.json") == w.read("a/adapter/tokenizer.json"));
    assert!(w.read("m/tokenizer.json") != w.read("made/model/tokenizer.json"));
    let base = w.ok(&["eval", "plain.toml", rule, "--json"]).loss();
    assert!((base - end).abs() > 1e-3, "{base} and {end}");
    w.ok(&["chat", "a/adapter", "--raw", "--max-tokens", "2", "--prompt", "<think>1"]);
    let hash = |set: &[&str]| w.ok(&[&["data", "--json"][..], set].concat()).json()["hash"].clone();
    let own = hash(&["r.toml"]);
    assert_eq!(hash(&["plain.toml", rule, "lora.init=a/adapter"]), own);
    assert_ne!(hash(&["plain.toml", rule]), own);

    // More tokens than rows.
    w.write("x.toml", text.replace("\"</think>\"", "\"</think>\", \"<more>\""));
    for verb in ["check", "run"] {
        let r = w.ft(&[verb, "x.toml", "run.output=x"]);
        assert!(r.code == 2 && r.err.contains("\"<more>\" is token 287"), "{verb}: {}", r.err);
    }
}

#[test]
fn rules_that_conflict_with_token_rows_are_refused() {
    let w = world(TOKENS, true);
    let refused = |rules: &str, said: &[&str]| {
        for rules in [format!("{TOKENS}{rules}"), format!("{rules}{TOKENS}")] {
            w.write("x.toml", recipe(&rules));
            w.config("tiny", json!({ "tie_word_embeddings": true }));
            let r = w.ft(&["check", "x.toml"]);
            assert!(r.code == 2 && said.iter().all(|s| r.err.contains(s)), "{rules}: {}", r.err);
        }
    };
    let full = "[[train]]\nmodules = [\"embedding\"]\nmethod = \"full\"\n";
    refused(full, &["model.embed_tokens trains otherwise too", "leave the embedding"]);
    refused("[[train]]\nmodules = [\"head\"]\nrank = 2\n", &["lm_head trains otherwise too"]);
    refused(TOKENS, &["is for tokens already"]);
    for (rules, said) in [
        (TOKENS.replace("tokens = [40, 5, 6, 63]", ""), "train.0.tokens is missing"),
        (TOKENS.to_string() + "method = \"full\"\n", "train.0.method does nothing"),
        (TOKENS.to_string() + "layers = [1]\n", "train.0.layers does nothing"),
        (TOKENS.to_string() + "rank = 4\n", "train.0.rank does nothing"),
        (TOKENS.replace("40, 5, 6, 63", ""), "train.0.tokens is empty"),
        (TOKENS.replace("40, 5", "5, 5"), "has 5 twice"),
        (TOKENS.replace("40, 5", "-1"), "train.0.tokens has -1"),
        (TOKENS.replace("\"new_tokens\"", "\"new_tokens\", \"mlp\""), "names modules too"),
        (TOKENS.replace("new_tokens", "mlp"), "without modules"),
    ] {
        w.write("x.toml", recipe(&rules));
        let r = w.ft(&["check", "x.toml"]);
        assert!(r.code == 2 && r.err.contains(said), "{rules}: {}", r.err);
    }
    // Formats that other programs cannot load.
    w.ok(&["run", "r.toml", "run.output=a"]);
    for to in ["vllm", "gguf"] {
        let r = w.ft(&["export", "a/adapter", "--to", to, "--out", "e"]);
        assert!(r.code == 4 && r.err.contains("rows of tokens"), "{to}: {} {}", r.code, r.err);
    }
    // An adapter with other tokens.
    w.write("y.toml", w.text("r.toml").replace("40, 5", "5, 40"));
    let r = w.ft(&["run", "y.toml", "lora.init=a/adapter", "run.output=y"]);
    assert!(r.code == 4 && r.err.contains("other tokens"), "{}", r.err);
}
