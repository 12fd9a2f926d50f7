//! Broken inputs: exit codes, and messages that name the file, line, key or tensor.

use crate::world::{World, reference};
use serde_json::{Value, json};
use std::fmt::Write;

/// A valid rule.
const RULE: &str = "[[train]]\nmodules = [\"attention\"]\nrank = 2\n";

/// Name, exit code, and a function that breaks a valid folder and returns recipe overrides.
type Case = (&'static str, i32, fn(&World) -> Vec<&'static str>);

fn set(w: &World, change: (&str, &str)) -> Vec<&'static str> {
    let text = w.text("r.toml");
    assert!(text.contains(change.0), "{change:?}");
    w.write("r.toml", text.replace(change.0, change.1));
    vec![]
}

fn data(w: &World, bytes: impl AsRef<[u8]>) -> Vec<&'static str> {
    w.write("rows.jsonl", bytes);
    vec![]
}

fn config(w: &World, extra: Value) -> Vec<&'static str> {
    w.config("tiny", extra);
    vec![]
}

/// The recipe with a model on disk, copied to `m`.
fn weights(w: &World) {
    w.copy(reference("llama-embed-head/model"), "m");
    set(w, ("source = \"tiny\"\nweights = \"random\"", "source = \"m\""));
}

/// As [`weights`], with an adapter from PEFT in `a` to resume from, and without rules.
fn adapter(w: &World) {
    weights(w);
    w.copy(reference("llama-embed-head/adapter_init"), "a");
    set(w, (RULE, "[lora]\ninit = \"a\"\n"));
}

fn edit(w: &World, file: &str, key: &str, value: Value) {
    let mut json = w.json(file);
    json[key] = value;
    w.write(file, json.to_string());
}

/// New name and shape of a tensor; `None` drops it.
type Change = dyn Fn(&str, &[usize]) -> Option<(String, Vec<usize>)>;

/// Rewrites a tensor file with zeros. `change` returns new names and shapes, or `None` to drop a tensor.
fn tensors(w: &World, file: &str, change: &Change) {
    let files = ft::files::TensorFiles::open_file(&w.path(file)).expect("tensors");
    let zeros = |n: &str| {
        let (name, shape) = change(n, &files.info(n)?.shape)?;
        let device = &candle_core::Device::Cpu;
        Some((name, candle_core::Tensor::zeros(shape, candle_core::DType::F32, device).expect("zeros")))
    };
    let changed: Vec<_> = files.names().filter_map(zeros).collect();
    ft::files::write_file(&w.path(file), &changed, &[]).expect("written");
}

const CASES: &[Case] = &[
    // Recipes and usage: 2.
    ("misspelt key", 2, |_| vec!["optimizer.lrr=1"]),
    ("wrong type", 2, |w| set(w, ("steps = 6", "steps = \"six\""))),
    ("out of range", 2, |w| set(w, ("lr = 1e-2", "lr = -1.0\nbetas = [0.9, 1.5]"))),
    ("not TOML", 2, |w| set(w, ("[data]", "[data"))),
    ("recipe not UTF-8", 2, |w| {
        w.write("r.toml", b"name = \"\xff\"\n");
        vec![]
    }),
    ("no recipe", 2, |w| {
        std::fs::remove_file(w.path("r.toml")).expect("removed");
        vec![]
    }),
    ("not built", 2, |_| vec!["parallel.tensor=2", "log.samples=['a']"]),
    ("micro rows do not divide", 2, |_| vec!["run.micro_rows=3"]),
    ("a rule matches nothing", 2, |w| set(w, ("\"attention\"", "\"q_porj\""))),
    ("a budget of 48 bytes", 2, |_| vec!["memory.budget=48"]),
    ("layers that are not there", 2, |w| set(w, ("rank = 2", "layers = [7]"))),
    ("LoRA on a norm", 2, |w| set(w, ("\"attention\"", "\"norms\""))),
    ("nothing trains", 2, |w| set(w, ("rank = 2", "method = \"freeze\""))),
    ("a shorter epoch than a step is still one", 0, |w| {
        set(w, ("steps = 6", "epochs = 0.01"));
        vec![]
    }),
    // Data: 3.
    ("no data file", 3, |_| vec!["data.train.0.source=gone.jsonl"]),
    ("data file is empty", 3, |w| data(w, "")),
    ("data is cut short", 3, |w| data(w, "{\"input_ids\": [1, 2, 3]}\n{\"input_ids\": [1, 2")),
    ("data is not UTF-8", 3, |w| data(w, b"{\"input_ids\": [1, 2]}\n{\"te\xffxt\": 1}\n")),
    ("data lacks its field", 3, |w| data(w, "{\"text\": \"a\"}\n")),
    ("nothing is supervised", 3, |w| data(w, "{\"input_ids\": [1, 2, 3], \"labels\": [-100, -100, -100]}\n")),
    ("a token that the model does not have", 3, |w| data(w, "{\"input_ids\": [1, 64, 2]}\n")),
    ("labels of another length", 3, |w| data(w, "{\"input_ids\": [1, 2], \"labels\": [1]}\n")),
    ("several problems in several files", 3, |w| {
        w.write("eval.jsonl", "[]\n");
        data(w, "{\"input_ids\": []}\n{\"input_ids\": \"1 2\"}\n{\"input_ids\": [1, 2.5]}\n")
    }),
    // Models: 4.
    ("no model", 4, |_| vec!["model.source=./gone"]),
    ("a model of the hub, offline", 4, |_| vec!["model.source=someone/something"]),
    ("unknown architecture", 4, |w| config(w, json!({"model_type": "mamba"}))),
    ("config cut short", 4, |w| {
        w.write("tiny/config.json", "{\"model_type\": \"qwen3\",\n \"hidden_size\":");
        vec![]
    }),
    ("config lacks a size", 4, |w| config(w, json!({"hidden_size": null}))),
    ("config with another attention", 4, |w| config(w, json!({"attn_logit_softcapping": 30.0}))),
    ("config with heads that do not divide", 4, |w| config(w, json!({"num_key_value_heads": 3}))),
    ("config with more layers than there are", 4, |w| config(w, json!({"num_hidden_layers": 10_000_000}))),
    ("config with more experts than there are", 4, |w| {
        config(
            w,
            json!({"model_type": "qwen3_moe", "num_experts": 1_000_000, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
        )
    }),
    ("config with heads that wrap around", 4, |w| {
        config(
            w,
            json!({"num_attention_heads": 1u64 << 31, "num_key_value_heads": 1, "head_dim": 1u64 << 31}),
        )
    }),
    ("an override with too many layers", 4, |_| vec!["model.override={num_hidden_layers=100000}"]),
    ("rotary scaling that is not built", 4, |w| {
        config(w, json!({"rope_scaling": {"rope_type": "axial", "factor": 2.0}}))
    }),
    ("no tokenizer for text", 4, |w| set(w, ("format = \"tokens\"", "format = \"text\""))),
    ("tokenizer is not JSON", 4, |w| {
        w.write("tiny/tokenizer.json", "{\"version\": ");
        vec![]
    }),
    ("pickle weights only", 4, |w| {
        weights(w);
        std::fs::remove_file(w.path("m/model.safetensors")).expect("removed");
        w.write("m/pytorch_model.bin", "x");
        vec![]
    }),
    ("pickle under another name", 4, |w| {
        weights(w);
        w.write("m/model.safetensors", b"\x80\x02}q\x00X\x06\x00\x00\x00weightq\x01K\x01s.");
        vec![]
    }),
    ("weights cut short", 4, |w| {
        weights(w);
        let bytes = w.read("m/model.safetensors");
        w.write("m/model.safetensors", &bytes[..bytes.len() - 100]);
        vec![]
    }),
    ("an index that points outside", 4, |w| {
        weights(w);
        std::fs::rename(w.path("m/model.safetensors"), w.path("outside.safetensors")).expect("moved");
        let map = json!({"weight_map": {"lm_head.weight": "../outside.safetensors"}});
        w.write("m/model.safetensors.index.json", map.to_string());
        vec![]
    }),
    ("tensors missing, unexpected and of another shape", 4, |w| {
        weights(w);
        tensors(w, "m/model.safetensors", &|name, shape| match name {
            "lm_head.weight" => Some(("lm_haed.weight".into(), shape.to_vec())),
            "model.norm.weight" => Some((name.into(), vec![7])),
            _ => Some((name.into(), shape.to_vec())),
        });
        vec![]
    }),
    ("a tensor of integers", 4, |w| {
        weights(w);
        let mut bytes = w.read("m/model.safetensors");
        let format = bytes.windows(3).position(|b| b == b"F32").expect("a format");
        bytes[format] = b'I';
        w.write("m/model.safetensors", bytes);
        vec![]
    }),
    // Adapters: 4.
    ("no adapter", 4, |w| {
        adapter(w);
        vec!["lora.init=./gone"]
    }),
    ("adapter as pickle", 4, |w| {
        adapter(w);
        std::fs::rename(w.path("a/adapter_model.safetensors"), w.path("a/adapter_model.bin")).expect("moved");
        vec![]
    }),
    ("adapter of another method", 4, |w| {
        adapter(w);
        edit(w, "a/adapter_config.json", "peft_type", json!("IA3"));
        vec![]
    }),
    ("adapter with a key that changes numbers", 4, |w| {
        adapter(w);
        edit(w, "a/adapter_config.json", "use_qalora", json!(true));
        vec![]
    }),
    ("adapter whose initialisation changed its base", 4, |w| {
        adapter(w);
        edit(w, "a/adapter_config.json", "init_lora_weights", json!("pissa_niter_4"));
        vec![]
    }),
    ("adapter with a text for true", 4, |w| {
        adapter(w);
        edit(w, "a/adapter_config.json", "use_rslora", json!("true"));
        vec![]
    }),
    ("adapter that drops everything", 4, |w| {
        adapter(w);
        edit(w, "a/adapter_config.json", "lora_dropout", json!(1));
        vec![]
    }),
    ("adapter with a list of alphas", 4, |w| {
        adapter(w);
        edit(w, "a/adapter_config.json", "alpha_pattern", json!([8]));
        vec![]
    }),
    ("adapter config cut short", 4, |w| {
        adapter(w);
        w.write("a/adapter_config.json", "{\"r\": 4,");
        vec![]
    }),
    ("adapter of another rank than its config", 4, |w| {
        adapter(w);
        edit(w, "a/adapter_config.json", "r", json!(3));
        vec![]
    }),
    ("adapter without what its config chooses", 4, |w| {
        adapter(w);
        tensors(w, "a/adapter_model.safetensors", &|n, s| {
            (!n.contains("lm_head")).then(|| (n.to_string(), s.to_vec()))
        });
        vec![]
    }),
    ("adapter of another base", 4, |w| {
        adapter(w);
        tensors(w, "a/adapter_model.safetensors", &|n, s| Some((n.to_string(), s.to_vec())));
        vec![]
    }),
    ("adapter tensors that no rule chooses", 4, |w| {
        adapter(w);
        set(
            w,
            ("[lora]\ninit = \"a\"\n", "[lora]\ninit = \"a\"\n[[train]]\nmodules = [\"head\"]\nrank = 4\n"),
        );
        vec![]
    }),
];

#[test]
fn broken_inputs_have_their_code_and_name_the_place() {
    let mut all = String::new();
    for (name, code, broken) in CASES {
        let w = World::tiny(RULE);
        let over = broken(&w);
        let check = w.ft(&[&["check", "r.toml"][..], &over].concat());
        // A run stops at the first of the same problems, before it writes anything.
        let run = w.ft(&[&["run", "r.toml"][..], &over].concat());
        for r in [&check, &run] {
            assert_eq!(r.code, *code, "{name}:\n{}{}", r.out, r.err);
            assert!(!r.err.contains("panicked"), "{name}: {}", r.err);
        }
        if *code == 0 {
            continue;
        }
        assert!(!w.path("runs").exists(), "{name}: a run folder is left");
        assert!(check.out.is_empty() && run.out.is_empty(), "{name}: {}{}", check.out, run.out);
        let first = run.err.lines().find(|l| l.starts_with("error")).unwrap_or_default();
        assert!(
            !first.is_empty() && check.err.contains(first),
            "{name}: run and check differ\n{}\n{}",
            run.err,
            check.err
        );
        let place = w.path("").display().to_string();
        let shown = check.err.replace(&place, "").replace(env!("CARGO_PKG_VERSION"), "VERSION");
        writeln!(all, "===== {name}: {code}\n{shown}").expect("a string");
    }
    let broken = CASES.iter().filter(|c| c.1 != 0).count();
    assert!(broken >= 40, "only {broken} cases");
    insta::assert_snapshot!(all);
}
