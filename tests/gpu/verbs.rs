//! The subcommands on the device.

use super::world::{World, few, quickstart, repository};
use super::{apart, device};
use serde_json::{Value, json};

/// Additional config keys of a mixture of experts.
pub fn mixture() -> Value {
    json!({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 5,
           "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": true,
           "decoder_sparse_step": 1, "mlp_only_layers": []})
}

/// After a few steps on the device, the adapter evaluates as on the CPU, and so do the merged model and the
/// exports.
#[test]
fn an_adapter_from_the_device_is_one_anywhere() {
    if !device() {
        return;
    }
    let w = World::new();
    let model = quickstart(&w);
    w.ok(&[
        "run",
        "q.toml",
        "run.device=cuda",
        "model.dtype=f32",
        "run.steps=3",
        "run.batch_rows=2",
        "run.micro_rows=2",
        "run.eval_at_start=false",
        "run.output=a",
    ]);
    let eval =
        |args: &[&str]| w.ok(&[&["eval", "q.toml", "--json", "model.dtype=f32"], args].concat()).loss();
    let (there, here) = (
        eval(&["--adapter", "a/adapter", "run.device=cuda"]),
        eval(&["--adapter", "a/adapter", "run.device=cpu"]),
    );
    assert!(apart(there, here) <= 1e-5, "{there} on the device, {here} on the CPU");
    w.ok(&["merge", "a/adapter", "--base", &model, "--dtype", "f32", "--out", "merged"]);
    let merged = format!("model.source={}", w.path("merged").display());
    let of_merged = eval(&[&merged, "run.device=cuda"]);
    assert!(apart(of_merged, there) <= 1e-4, "{there} with the adapter, {of_merged} merged");
    w.ok(&["export", "a/adapter", "--to", "vllm", "--out", "exported"]);
}

#[test]
fn chat_and_bench_run_on_the_device() {
    if !device() {
        return;
    }
    let w = World::new();
    let model = quickstart(&w);
    // The second prompt has enough keys to split them over thread blocks, and exceeds one block of the
    // cache.
    for prompt in ["What colour is the sky?", &"What colour is the sky? ".repeat(90)] {
        let ask = |device: &str| {
            let question = ["--prompt", prompt, "--max-tokens", "6", "--device", device];
            w.ok(&[&["chat", &model, "--dtype", "f32"], &question[..]].concat()).out
        };
        assert_eq!(ask("cuda"), ask("cpu"), "{prompt}");
    }
    w.config("tiny", serde_json::json!({}));
    w.write("r.toml", super::world::recipe(super::world::LORA));
    let bench = w.ok(&["bench", "r.toml", "run.device=cuda", "--steps", "1", "--json"]);
    let j = bench.json();
    for key in ["tokens_per_second", "matmul_flops", "copy_bytes_per_second"] {
        assert!(j[key].as_f64().is_some_and(|x| x > 0.0), "{key}: {j}");
    }
}

/// Rules in full that leave part of a 4-bit base frozen.
const FROZEN: &str = "train=[{modules=['attention']}]";

/// An untrained model for chat: random weights with the quickstart tokenizer.
fn talking(w: &World, config: Value) {
    w.config("model", config);
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        let from = repository().join("data/model").join(file);
        std::fs::copy(&from, w.path("model").join(file))
            .unwrap_or_else(|e| panic!("{}: {e}", from.display()));
    }
    let row = |q: &str, a: &str| {
        json!({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}).to_string()
    };
    w.write(
        "talk.jsonl",
        [row("What is red?", "A rose."), row("And blue?", "The sky."), row("Who?", "I.")].join("\n"),
    );
    w.write(
        "r.toml",
        "[model]\nsource = \"model\"\nweights = \"random\"\ndtype = \"f32\"\n[[train]]\nmodules = [\"/.*/\"]\n\
         method = \"full\"\n[data]\ntrain = [{ source = \"talk.jsonl\", format = \"messages\" }]\n\
         eval = [{ source = \"talk.jsonl\", format = \"messages\" }]\nmax_length = 64\n[run]\nsteps = 1\nbatch_rows = 1\n\
         device = \"cpu\"\noutput = \"whole\"\n[optimizer]\nlr = 1e-3\n",
    );
    w.ok(&["run", "r.toml"]);
}

/// All subcommands agree with the CPU, for a dense model and a mixture, in f32 and in 4 bits, with an
/// adapter trained on the device.
#[test]
fn every_verb_says_what_it_says_on_the_cpu() {
    if !device() {
        return;
    }
    let sizes =
        json!({"vocab_size": 1024, "hidden_size": 64, "tie_word_embeddings": true, "eos_token_id": 2});
    for experts in [false, true] {
        let mut config = sizes.clone();
        if let (true, Some(c), Value::Object(more)) = (experts, config.as_object_mut(), mixture()) {
            c.extend(more);
        }
        let w = World::new();
        talking(&w, config);
        let model = ["model.source=whole/model", "model.weights=load"];
        let modules = if experts { "['attention','experts','router']" } else { "['attention','mlp']" };
        let rules = format!("train=[{{modules={modules}}}]");
        let both = |f: &dyn Fn(&str) -> String| (f("cuda"), f("cpu"));
        for quantize in ["nf4", "none"].into_iter().take(few(1)) {
            let what = format!("experts: {experts}, {quantize}");
            let quantized = format!("model.quantize={quantize}");
            let set = [&model[..], &[&quantized]].concat();
            let lora =
                [&rules, "run.device=cuda", "run.output=lora", "run.steps=2", "lora.rank=4", "--overwrite"];
            w.ok(&[&["run", "r.toml"], &set[..], &lora].concat());
            let eval = |set: &[&str], device: &str| {
                let device = format!("run.device={device}");
                let head = ["eval", "r.toml", "--json", FROZEN, &device];
                w.ok(&[&head, set].concat()).loss()
            };
            for adapter in [&[][..], &["--adapter", "lora/adapter"]] {
                let set = [&set[..], adapter].concat();
                let (there, here) = (eval(&set, "cuda"), eval(&set, "cpu"));
                assert!(apart(there, here) <= 1e-5, "{what}: {there} on the device, {here} on the CPU");
            }
            let (there, here) = both(&|device| {
                let ask =
                    ["--prompt", "What is red?", "--max-tokens", "7", "--temperature", "0", "--dtype", "f32"];
                w.ok(&[&["chat", "lora/adapter", "--device", device], &ask[..]].concat()).out
            });
            assert_eq!(there, here, "{what}");
            assert!(there.len() > 1, "{what}: it says nothing");
            if experts {
                let (there, here) = both(&|device| {
                    let device = format!("run.device={device}");
                    w.ok(&[&["routes", "r.toml", "--json", FROZEN, &device], &set[..]].concat()).out
                });
                assert_eq!(there, here, "{what}");
            }
            w.ok(&["merge", "lora/adapter", "--dtype", "f32", "--overwrite", "--out", "merged"]);
            let merged = eval(&["model.source=merged", "model.weights=load"], "cuda");
            assert!(merged.is_finite(), "{what}");
            let to = format!("exported-{quantize}");
            w.ok(&["export", "lora/adapter", "--to", "vllm", "--out", &to]);
        }
        w.ok(&["quantize", "whole/model", "--out", "four"]);
        let four = ["model.source=four", "model.weights=load"];
        let (there, here) = (["cuda", "cpu"])
            .map(|device| {
                let device = format!("run.device={device}");
                let head = ["eval", "r.toml", "--json", FROZEN, &device];
                w.ok(&[&head, &four[..]].concat()).loss()
            })
            .into();
        assert!(apart(there, here) <= 1e-5, "{there} on the device, {here} on the CPU");
    }
}

/// A chat on the device agrees with the CPU, and takes one synchronization per token.
#[test]
fn a_token_waits_once() {
    if !device() {
        return;
    }
    let w = World::new();
    let model = quickstart(&w);
    let waits = |tokens: &str| -> Option<i64> {
        let args =
            ["chat", &model, "--dtype", "f32", "--prompt", "What colour is the sky?", "--temperature", "0"];
        let report = w.path("report");
        let args = [&args[..], &["--max-tokens", tokens, "--device", "cuda"]].concat();
        let out = w.command(&args).env("EMU_REPORT", &report).output().expect("started");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let text = std::fs::read_to_string(report).ok()?;
        let of = |what: &str| {
            let line = text.lines().find(|l| l.trim_start().starts_with(what))?;
            line[what.len()..].split_whitespace().next()?.parse::<i64>().ok()
        };
        Some(
            of("blocking copies")?
                + of("context synchronisations").unwrap_or(0)
                + of("stream synchronisations").unwrap_or(0),
        )
    };
    let (Some(few), Some(more)) = (waits("2"), waits("5")) else {
        eprintln!("not run: the device writes no report");
        return;
    };
    assert_eq!(more - few, 3);
}
