//! Matrices over ranks (`parallel.tensor`): results agree with one rank, and do not depend on sharding or transport.

use crate::split::{self, CUT, apart, bits, ends, gradients, gradients_apart, launch, told, with};
use crate::world::{Dice, FULL, World, merged, recipe};
use serde_json::{Value, json};

/// LoRA on a 4-bit base.
pub const QUANTIZED: &str = r#"
quantize = "nf4"
[lora]
rank = 2
[[train]]
modules = ["attention", "mlp"]
"#;

/// Micro-batches of one row, four a step. A row of two tokens leaves ranks without tokens.
fn world(rules: &str, config: Value) -> World {
    let w = World::new();
    let wide = json!({"hidden_size": 64, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 64});
    let extra = if rules == QUANTIZED { wide } else { json!({"num_key_value_heads": 4}) };
    w.config("tiny", merged(extra, &config));
    let mut dice = Dice(3);
    let mut row = |n: u64| {
        let ids: Vec<u64> = (0..n).map(|_| dice.below(64)).collect();
        let label = |(i, id): (usize, &u64)| if i % 4 == 2 { -100 } else { *id as i64 };
        let labels: Vec<i64> = ids.iter().enumerate().map(label).collect();
        format!("{}\n", json!({"input_ids": ids, "labels": labels}))
    };
    w.write("rows.jsonl", [16, 3, 2, 31, 5, 12, 2, 20, 9, 32, 2, 7].map(&mut row).concat());
    w.write("eval.jsonl", [13, 2, 30].map(&mut row).concat());
    let run = "steps = 6\nsave_every = 3\nkeep = 9\nclip = 0.5";
    let text = recipe(rules).replace("steps = 6", run).replace("micro_rows = 2", "micro_rows = 1");
    w.write("r.toml", text.replace("max_length = 32", "max_length = 32\npack = false"));
    w
}

fn layout(data: usize, tensor: usize, zero: u8) -> [String; 3] {
    split::layout("tensor", data, tensor, zero)
}

/// Linear attention, gated attention with one head of keys. With an `initializer_range` of 0.1, gradients in f32, PyTorch's
/// too, are 3e-6 from those in f64, with 0.02 2e-7.
fn hybrid() -> Value {
    json!({"model_type": "qwen3_5_text", "full_attention_interval": 3, "num_key_value_heads": 1, "initializer_range": 0.02,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4})
}

/// Per-layer inputs, keys of an earlier layer, twice the width there, other heads in full attention.
fn gemma_4() -> Value {
    json!({"model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 4, "global_head_dim": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": true,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "tie_word_embeddings": true})
}

/// Norms over all heads.
fn norms() -> Value {
    json!({"model_type": "olmo2"})
}

fn families() -> [(&'static str, Value); 8] {
    let biases = json!({"model_type": "llama", "attention_bias": true, "mlp_bias": true});
    let gemma = json!({"model_type": "gemma3_text", "query_pre_attn_scalar": 8, "sliding_window": 4,
        "sliding_window_pattern": 2, "rope_local_base_freq": 1e4, "hidden_activation": "gelu_pytorch_tanh"});
    [
        (FULL, json!({})),
        (FULL, biases.clone()),
        (FULL, gemma),
        (CUT, biases),
        (QUANTIZED, json!({"tie_word_embeddings": true})),
        (CUT, hybrid()),
        (FULL, norms()),
        (QUANTIZED, json!({"model_type": "phi3"})),
    ]
}

/// Gradients of every tensor and their norm are those of one rank, in every family, with adapters and 4-bit weights.
#[test]
fn gradients_are_those_of_one_rank() {
    for (rules, config) in families() {
        let w = world(rules, config);
        let one_step = ["run.steps=1", "run.save_every=1"];
        bits(&w, "one", &one_step);
        let want = gradients(&w, "one");
        let norm = |run: &str| w.events(run, "step")[0]["grad_norm"].as_f64().expect("a norm");
        for (data, tensor, set) in [
            (1, 2, &["memory.recompute=none"][..]),
            (2, 2, &["memory.recompute=all"]),
            (1, 4, &["memory.recompute=feed_forward"]),
            (1, 2, &["memory.recompute=norms"]),
        ] {
            let own = layout(data, tensor, 0);
            bits(&w, "run", &[&with(&own, set)[..], &one_step].concat());
            let far = (norm("run") / norm("one") - 1.0).abs();
            assert!(far <= 1e-6, "{rules}{own:?}: the norm is {far:.1e} apart");
            let far = gradients_apart(&gradients(&w, "run"), &want, &format!("{rules}{own:?} {set:?}"));
            // Sums of four parts round more often.
            let bar = if tensor > 2 { 2e-6 } else { 1e-6 };
            assert!(far <= bar, "{rules}{own:?} {set:?}: all gradients are {far:.1e} apart");
        }
    }
}

/// Sharding changes no bit at a fixed number of data and tensor ranks; losses, evaluations and results are those of one
/// rank.
#[test]
fn matrices_over_ranks_train_as_whole_ones() {
    for (rules, set) in [
        (FULL, &["memory.recompute=1"][..]),
        (CUT, &["memory.recompute=norms", "data.neftune=5"]),
        (QUANTIZED, &["memory.offload=['optimizer']"]),
    ] {
        let w = world(rules, Value::Null);
        let one = bits(&w, "one", set);
        for (data, tensor) in [(1, 2), (2, 2)] {
            let want = bits(&w, "first", &with(&layout(data, tensor, 0), set));
            let far = apart(&want[0], &one[0]);
            // 1.4e-5 on processors without AVX-512
            assert!(far <= 2e-5, "{rules}{data} {tensor}: {far:.1e}");
            for zero in (1..=3).filter(|_| data > 1) {
                let own = layout(data, tensor, zero);
                assert!(bits(&w, "run", &with(&own, set)) == want, "{rules}{own:?}");
            }
            let loss = |run: &str| [told(&w, run, "step", "loss"), split::evals(&w, run)].concat();
            let pairs: Vec<_> = loss("first").into_iter().zip(loss("one")).collect();
            assert!(pairs.len() > 6 && pairs.iter().all(|(a, b)| (a - b).abs() <= 2e-6 * b), "{pairs:?}");
        }
    }
}

/// A checkpoint is of logical tensors: one of any layout goes on in any other.
#[test]
fn a_run_goes_on_in_another_layout() {
    for rules in [FULL, CUT] {
        let w = world(rules, Value::Null);
        let one = bits(&w, "one", &[]);
        let layouts = [layout(1, 1, 0), layout(1, 2, 0), layout(2, 2, 3), layout(1, 4, 1)];
        for (from, to) in layouts.iter().zip(layouts.iter().cycle().skip(1)) {
            bits(&w, "run", &with(from, &[]));
            split::keep_first(&w, "run");
            let got = bits(&w, "run", &with(to, &["--resume"]));
            let far = got.iter().zip(&one).map(|(a, b)| apart(a, b)).fold(0.0, f64::max);
            assert!(far <= 1e-4, "{rules}{from:?} to {to:?}: {far:.1e}");
        }
    }
}

/// Planned bytes are those that come.
#[test]
fn bytes_between_ranks_are_as_planned() {
    for (rules, config, [data, tensor, zero]) in [
        (FULL, json!({}), [1, 2, 0]),
        (CUT, hybrid(), [2, 2, 3]),
        (QUANTIZED, json!({}), [1, 4, 0]),
        (FULL, norms(), [1, 2, 0]),
        (FULL, gemma_4(), [1, 2, 0]),
        (FULL, gemma_4(), [2, 2, 3]),
        (FULL, gemma_4(), [2, 1, 3]),
        (CUT, gemma_4(), [2, 1, 3]),
    ] {
        let w = world(rules, config);
        let mut dice = Dice(3);
        let mut row =
            || format!("{}\n", json!({"input_ids": (0..32).map(|_| dice.below(64)).collect::<Vec<_>>()}));
        w.write("rows.jsonl", (0..24).map(|_| row()).collect::<String>());
        for recompute in ["memory.recompute=none", "memory.recompute=norms", "memory.recompute=all"] {
            let own = layout(data, tensor, zero as u8);
            bits(&w, "run", &with(&own, &[recompute]));
            split::as_planned(&w, "run", "wire_bytes", &format!("{rules}{own:?} {recompute}"));
        }
    }
}

/// States in 8 bits keep the blocks of whole tensors. A cut within a block is refused.
#[test]
fn states_in_8_bits_keep_their_blocks() {
    let config = |width: usize| json!({"hidden_size": 64, "intermediate_size": width, "head_dim": 128});
    let w = world(FULL, config(512));
    let set = ["optimizer.name=adamw8bit"];
    let one = bits(&w, "one", &set);
    for own in [layout(1, 2, 0), layout(2, 2, 3)] {
        let got = bits(&w, "run", &with(&own, &set));
        assert_eq!(got[1].len(), one[1].len(), "{own:?}: other states");
        // A gradient at the edge of a code may have another one.
        let far = apart(&got[0], &one[0]);
        assert!(far <= 1e-3, "{own:?}: {far:.1e}");
    }
    let w = world(FULL, config(256));
    split::refused(&w, "run", &with(&layout(1, 2, 0), &set), "blocks of 256");
}

/// Processes have the bits of threads. One that dies is named, and ends all with exit code 7.
#[test]
fn processes_train_as_threads_and_a_lost_one_is_named() {
    let w = world(CUT, Value::Null);
    let own = layout(1, 2, 0);
    let want = bits(&w, "threads", &with(&own, &[]));
    let short = with(&own, &["run.output=processes"]);
    let ended = split::all(launch(&w, &[0, 1], 2, &[&["run", "r.toml"][..], &short].concat()));
    assert!(ended.iter().all(|p| p.code == 0), "{}", ended[0].err);
    assert!(ends(&w, "processes") == want);
    assert!(ended[0].err.contains("tensor 2"), "{}", ended[0].err);
    let said = split::lost(&w, &with(&own, &[]));
    assert!(said.contains("its process is gone"), "{said}");
}

/// What ranks cannot cut is refused by name, by plan, check and run.
#[test]
fn matrices_that_ranks_cannot_cut_are_refused() {
    let w = world(CUT, Value::Null);
    for (config, set, says) in [
        (json!({}), &["parallel.tensor=3"][..], "1, 2, 4"),
        (json!({"num_key_value_heads": 2}), &["parallel.tensor=4"], "1, 2"),
        (json!({"intermediate_size": 50}), &["model.quantize=nf4"], "4-bit"),
        (json!({"model_type": "phi3", "num_key_value_heads": 1}), &[], "1 heads"),
        (json!({}), &["lora.dora=true"], "DoRA"),
        (json!({}), &["log.samples=['a']"], "log.samples"),
        (json!({}), &["generate.samples=2"], "generate.samples"),
    ] {
        w.config("tiny", merged(json!({"num_key_value_heads": 4}), &config));
        let tensor = if set.iter().any(|s| s.starts_with("parallel.tensor")) {
            &[][..]
        } else {
            &["parallel.tensor=2"]
        };
        for verb in ["plan", "check", "run"] {
            split::refused(&w, verb, &[set, tensor].concat(), says);
        }
    }
}
