//! Layers over ranks (`parallel.pipeline`): the bits of one stage, in every layout, and its memory and bytes as planned.

use crate::split::{self, ADAPTERS, CUT, MIXTURE, apart, bits, with};
use crate::world::{Dice, FULL, World, alternate, mixture, nightly};
use serde_json::{Value, json};

/// LoRA with dropout, DoRA everywhere.
const LORA: &str = r#"
[lora]
rank = 2
dropout = 0.2
dora = true
[[train]]
modules = ["attention", "mlp"]
"#;

/// The upper layers alone: stages below them have no backward pass.
const UPPER: &str = r#"
[lora]
rank = 2
[[train]]
modules = ["attention"]
layers = [2]
"#;

/// Gemma 4 with per-layer inputs, and keys of the two lower layers in the two upper ones.
fn shared() -> Value {
    json!({"model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 4, "global_head_dim": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": true,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64})
}

fn world(rules: &str, config: Value) -> World {
    split::world_of(rules, if rules == MIXTURE { mixture() } else { config })
}

fn layout(data: usize, pipeline: usize, zero: u8) -> [String; 3] {
    split::layout("pipeline", data, pipeline, zero)
}

fn losses(w: &World, run: &str) -> Vec<[u64; 2]> {
    let number = |e: &Value, key: &str| e[key].as_f64().expect("a number").to_bits();
    w.events(run, "step").iter().map(|e| ["loss", "grad_norm"].map(|key| number(e, key))).collect()
}

/// Result, states, losses and norms have the bits of one stage with the same data ranks, at every ZeRO stage; evaluation
/// too. The last step has two micro-batches.
#[test]
fn stages_have_the_bits_of_one_stage() {
    let gemma = json!({"model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "global_head_dim": 16,
        "num_global_key_value_heads": 1, "attention_k_eq_v": true, "hidden_size_per_layer_input": 0});
    let cases = [
        (FULL, json!({}), &["memory.recompute=1", "data.neftune=5"][..]),
        (LORA, json!({}), &["model.quantize=nf4", "memory.recompute=norms"]),
        (MIXTURE, json!({}), &["memory.offload=['optimizer']"]),
        (UPPER, json!({}), &["model.dtype=bf16", "parallel.stages=[2, 1]"]),
        (FULL, gemma, &["memory.recompute=all"]),
        (FULL, shared(), &["memory.recompute=norms"]),
        (CUT, shared(), &["memory.recompute=all"]),
        (ADAPTERS, json!({}), &["memory.recompute=none"]),
        (CUT, json!({}), &["lora.init=pissa"]),
        (FULL, json!({}), &["optimizer.name=galore", "optimizer.galore_rank=8", "optimizer.galore_gap=4"]),
    ];
    for (at, (rules, config, set)) in cases.into_iter().enumerate() {
        let w = world(rules, config);
        for data in [1, 2] {
            let alone: Vec<&str> = set.iter().copied().filter(|s| !s.contains("stages")).collect();
            let want = bits(&w, "one", &with(&layout(data, 1, 0), &alone));
            let layouts = [(2, 0), (3, 0), (2, 1), (2, 2), (2, 3)].into_iter();
            let layouts = layouts
                .filter(|(p, zero)| (*p == 2 || !rules.contains("layers")) && (*zero == 0 || data == 2))
                .filter(|(_, zero)| *zero == 0 || !set[0].contains("galore"));
            for (pipeline, zero) in alternate(at, layouts) {
                let own = layout(data, pipeline, zero);
                assert!(bits(&w, "run", &with(&own, set)) == want, "{rules}{own:?}");
                assert_eq!(losses(&w, "run"), losses(&w, "one"), "{rules}{own:?}");
                assert_eq!(split::evals(&w, "run"), split::evals(&w, "one"), "{rules}{own:?}");
            }
        }
    }
}

/// Rows of a format of documents: pairs, rated completions or labeled documents.
fn documents(format: &str, count: u64, seed: u64) -> String {
    let mut dice = Dice(seed);
    let mut row = |i: u64| {
        let mut ids = |most: u64| {
            let n = 2 + dice.below(most);
            (0..n).map(|_| dice.below(64)).collect::<Vec<_>>()
        };
        let row = match format {
            "preference" => json!({"prompt_ids": ids(6), "chosen_ids": ids(12), "rejected_ids": ids(9)}),
            "unpaired" => json!({"prompt_ids": ids(6), "completion_ids": ids(12), "label": i % 3 != 1}),
            _ => json!({"input_ids": ids(20), "label": i % 3}),
        };
        format!("{row}\n")
    };
    (0..count).map(&mut row).collect()
}

/// Losses of whole documents are made by the last stage, and the reference's pass goes through all: preferences, rewards
/// and classes have the bits of one stage, with the metrics and evaluations.
#[test]
fn losses_of_documents_have_the_bits_of_one_stage() {
    let cases = [
        ("dpo", LORA, "preference", &["memory.recompute=1"][..]),
        ("kto", FULL, "unpaired", &["memory.recompute=norms"]),
        ("reward", LORA, "preference", &["model.quantize=nf4"]),
        ("classify", UPPER, "labeled", &["classify.labels=['a', 'b', 'c']"]),
        ("ipo", FULL, "preference", &["preference.reference=start", "model.dtype=bf16"]),
        ("orpo", MIXTURE, "preference", &["router.aux_loss=0.01"]),
    ];
    for (kind, rules, format, set) in cases.into_iter().take(if nightly() { 6 } else { 4 }) {
        let w = world(rules, json!({}));
        w.write("rows.jsonl", documents(format, 11, 1));
        w.write("eval.jsonl", documents(format, 5, 2));
        let mut all = [&["run.epochs=2", "data.cache=false"], set].concat();
        let formats = ["train", "eval"].map(|part| format!("data.{part}.0.format={format}"));
        all.extend(formats.iter().map(String::as_str));
        let task = if kind == "ipo" { "dpo" } else { kind };
        let task = format!("task={task}");
        all.push(&task);
        if kind == "ipo" {
            all.push("preference.loss=ipo");
        }
        for data in [1, 2] {
            let want = bits(&w, "one", &with(&layout(data, 1, 0), &all));
            for (pipeline, zero) in [(3, 0), (2, 3)].into_iter().filter(|(_, zero)| *zero == 0 || data == 2) {
                let own = layout(data, pipeline, zero);
                assert!(bits(&w, "run", &with(&own, &all)) == want, "{kind} {own:?}");
                assert_eq!(losses(&w, "run"), losses(&w, "one"), "{kind} {own:?}");
                for event in ["step", "eval"] {
                    let told = |run: &str| -> Vec<Vec<Value>> {
                        let names = ["accuracy", "rewards_chosen", "margins", "pairs", "kl", "rows", "loss"];
                        let of = |e: &Value| names.map(|name| e[name].clone()).to_vec();
                        w.events(run, event).iter().map(of).collect()
                    };
                    assert!(!told("run").is_empty(), "{kind} {own:?}: no {event}");
                    assert_eq!(told("run"), told("one"), "{kind} {own:?}");
                }
            }
        }
    }
}

/// A table that embedding and head share: its gradient is the sum of both ends.
#[test]
fn a_tied_table_over_two_stages_trains_as_on_one() {
    let w = world(FULL, json!({"tie_word_embeddings": true}));
    for data in [1, 2] {
        let want = bits(&w, "one", &with(&layout(data, 1, 0), &[]));
        let mut first = None;
        for zero in [0, 1, 3] {
            let own = layout(data, 3, zero);
            let got = bits(&w, "run", &with(&own, &["parallel.stages=[1, 1, 1]"]));
            for (a, b) in got.iter().zip(&want) {
                let far = apart(a, b);
                assert!(far <= 1e-5, "{own:?}: {far:.1e}");
            }
            let first = first.get_or_insert_with(|| got.clone());
            assert!(got == *first, "{own:?}");
        }
    }
}

/// Weights updated in the backward pass of the only micro-batch; several are refused.
#[test]
fn updates_in_the_backward_pass_take_one_micro_batch() {
    let w = world(FULL, json!({}));
    let set = ["optimizer.in_backward=true", "run.clip=0", "run.epochs=1", "run.micro_rows=4"];
    let want = bits(&w, "one", &set);
    assert!(bits(&w, "run", &with(&layout(1, 2, 0), &set)) == want);
    let several = [&set[..3], &["run.micro_rows=1", "run.output=none"]].concat();
    let r = w.ft(&[&["run", "r.toml"][..], &with(&layout(1, 2, 0), &several)].concat());
    assert!(r.code == 2 && r.err.contains("optimizer.in_backward"), "{}", r.err);
}

/// A checkpoint is of logical tensors: one of any layout goes on in any other, with the bits of the same data ranks.
#[test]
fn a_run_goes_on_in_another_layout() {
    let w = world(FULL, json!({}));
    let want = bits(&w, "one", &[]);
    for (from, to) in [(2, 1), (1, 3), (3, 2)] {
        let (from, to) = (layout(1, from, 0), layout(1, to, 0));
        bits(&w, "run", &with(&from, &[]));
        split::keep_first(&w, "run");
        assert!(bits(&w, "run", &with(&to, &["--resume"])) == want, "{from:?} to {to:?}");
    }
}

/// Bytes that come are those of the plan: of losses of documents, and of state that layers share, too. The plan tells the
/// bubble and what makes it small.
#[test]
fn bytes_between_ranks_are_as_planned() {
    let row = |n: usize| format!("{}\n", json!({"input_ids": vec![n % 64; 16], "labels": vec![n % 64; 16]}));
    let pair = |n: usize| {
        let all =
            json!({"prompt_ids": vec![n % 64; 4], "chosen_ids": vec![1; 12], "rejected_ids": vec![2; 12]});
        format!("{all}\n")
    };
    let rated = |n: usize| {
        let all = json!({"prompt_ids": vec![n % 64; 4], "completion_ids": vec![n % 64; 12], "label": true});
        format!("{all}\n")
    };
    let of = |format: &str| ["train", "eval"].map(|part| format!("data.{part}.0.format={format}"));
    let none = || Vec::new();
    let task = |task: &str, format: &str| {
        let all = [vec![format!("task={task}"), "data.cache=false".into()], of(format).to_vec()];
        all.concat()
    };
    let cases = [
        (json!({}), row as fn(usize) -> String, none(), "[2, 1]"),
        (shared(), row, none(), "[3, 1]"),
        (json!({}), pair, task("dpo", "preference"), "[2, 1]"),
        (json!({}), rated, task("kto", "unpaired"), "[2, 1]"),
        (json!({}), pair, task("reward", "preference"), "[2, 1]"),
    ];
    for (config, row, set, stages) in cases {
        let w = world(FULL, config.clone());
        w.write("rows.jsonl", (0..40).map(row).collect::<String>());
        w.write("eval.jsonl", (0..8).map(row).collect::<String>());
        for (data, zero) in [(1, 0), (2, 0), (2, 3)] {
            let own = layout(data, 2, zero);
            let stages = format!("parallel.stages={stages}");
            let set: Vec<&str> = set.iter().map(String::as_str).chain([&*stages]).collect();
            bits(&w, "run", &with(&own, &set));
            let start = &w.events("run", "start")[0];
            assert_eq!(start["mesh"], if data == 1 { "pipeline 2" } else { "pipeline 2 x data 2" });
            for key in ["wire_bytes", "wire_bytes_exchanged"] {
                split::as_planned(&w, "run", key, &format!("{set:?} {own:?}"));
            }
        }
    }
    let w = world(FULL, json!({}));
    let told = w.ok(&[&["plan", "r.toml"][..], &with(&layout(1, 2, 0), &[])].concat()).out;
    assert!(
        told.contains("wait 20% of a step of 4 micro-batches; 9 micro-batches a step make it 10%"),
        "{told}"
    );
}

/// A process that dies is named with its last exchange, and ends all with exit code 7.
#[test]
fn a_lost_stage_is_named() {
    let w = world(FULL, json!({}));
    let said = split::lost(&w, &with(&layout(1, 2, 0), &[]));
    assert!(said.contains("stage 1: "), "{said}");
}

/// Processes have the bits of threads. Those of other stages tell the first what the result needs of their layers.
#[test]
fn stages_in_processes_have_the_same_bits() {
    for (rules, set) in
        [(LORA, &[][..]), (ADAPTERS, &["run.epochs=0.5"]), (CUT, &["lora.init=pissa", "run.epochs=0.5"])]
    {
        let w = world(rules, json!({}));
        let want = bits(&w, "one", &with(&layout(2, 1, 0), set));
        assert!(split::processes(&w, 4, "run", &with(&layout(2, 2, 2), set)) == want, "{rules}");
    }
}

/// What is not built for stages is refused by name, by plan, check and run.
#[test]
fn unsupported_settings_of_stages_are_refused() {
    let w = world(FULL, json!({}));
    for (set, says) in [
        (&["parallel.pipeline=4"][..], "the model has 3 layers"),
        (&["parallel.pipeline=2", "parallel.stages=[1, 1]"], "stages of 2 layers in all"),
        (&["parallel.pipeline=2", "parallel.stages=[3]"], "stages has 1 entries for pipeline = 2"),
        (
            &["parallel.pipeline=2", "task=dpo", "preference.reference=m"],
            "preference.reference with parallel.pipeline",
        ),
    ] {
        for verb in ["run", "plan", "check"] {
            split::refused(&w, verb, set, says);
        }
    }
}
