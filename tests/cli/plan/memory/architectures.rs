//! Peaks of models with other layers.

use super::{FEED_FORWARD, FULL, LORA, NF4, NORMS, config, within_a_percent};
use anyhow::Result;
use serde_json::{Value, json};

/// Sinks, biases of experts, gates beside up; and four norms a layer, windows by layer, a scaled embedding.
#[test]
fn gpt_oss_and_gemma_take_what_their_plans_say() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let full_rows = [512; 8];
    let ragged: Vec<usize> = (0..40).map(|i| 30 + (i * 37) % 470).collect();
    let (mut oss, mut gemma) = (config("qwen3", false), config("qwen3", true));
    for (key, value) in [
        ("architectures", json!(["GptOssForCausalLM"])),
        ("model_type", json!("gpt_oss")),
        ("num_hidden_layers", json!(4)),
        ("attention_bias", json!(true)),
        ("num_local_experts", json!(16)),
        ("num_experts_per_tok", json!(4)),
        ("intermediate_size", json!(384)),
        ("sliding_window", json!(128)),
        ("swiglu_limit", json!(7.0)),
    ] {
        oss[key] = value;
    }
    let mut released = oss.clone();
    released["quantization_config"] = json!({"quant_method": "mxfp4"});
    for (key, value) in [
        ("architectures", json!(["Gemma3ForCausalLM"])),
        ("model_type", json!("gemma3_text")),
        ("hidden_activation", json!("gelu_pytorch_tanh")),
        ("query_pre_attn_scalar", json!(64)),
        ("sliding_window", json!(128)),
        ("sliding_window_pattern", json!(3)),
        ("rope_local_base_freq", json!(1e4)),
    ] {
        gemma[key] = value;
    }
    let all = FULL.replace("\"attention\", \"mlp\", \"norms\", \"embedding\", \"head\"", "\"/.*/\"");
    let experts = "[[train]]\nmodules = [\"attention\", \"experts\"]\n";
    let cases: &[(&Value, &str, &[usize], &[&str])] = &[
        (&oss, &all, &full_rows, &["memory.recompute=none"]),
        (&oss, experts, &full_rows, &[FEED_FORWARD]),
        (&oss, experts, &ragged, &["memory.recompute=all", "model.dtype=bf16"]),
        // random experts are values
        (&released, experts, &ragged, &["memory.recompute=all", "model.dtype=bf16"]),
        (&gemma, FULL, &full_rows, &["memory.recompute=none"]),
        (&gemma, LORA, &ragged, &[NF4, "memory.recompute=2"]),
        (&gemma, LORA, &full_rows, &[NORMS, "lora.dora=true", "model.dtype=bf16"]),
    ];
    within_a_percent(dir.path(), cases)
}

/// A Gemma 4 of small sizes, with further keys.
fn gemma_4(more: Value) -> Value {
    let mut gemma = config("qwen3", true);
    let family = json!({
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh",
    });
    for keys in [family, more] {
        for (key, value) in keys.as_object().into_iter().flatten() {
            gemma[key] = value.clone();
        }
    }
    gemma
}

/// Per-layer inputs, keys and values of earlier layers, sizes by layer; trained down to the embedding, or not.
#[test]
fn gemma_4_takes_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let full_rows = [512; 8];
    let ragged: Vec<usize> = (0..40).map(|i| 30 + (i * 37) % 470).collect();
    let vocab = config("qwen3", true)["vocab_size"].clone();
    let gemma = gemma_4(json!({
        "num_hidden_layers": 6,
        "layer_types": [
            "sliding_attention", "sliding_attention", "full_attention",
            "sliding_attention", "sliding_attention", "full_attention",
        ],
        "global_head_dim": 96,
        "sliding_window": 128,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": vocab,
        "use_double_wide_mlp": true,
        "final_logit_softcapping": 30.0,
    }));
    let all = FULL.replace("\"attention\", \"mlp\", \"norms\", \"embedding\", \"head\"", "\"/.*/\"");
    let upper = "[[train]]\nmodules = [\"attention\"]\nlayers = \"-2:\"\n";
    let cases: &[(&Value, &str, &[usize], &[&str])] = &[
        (&gemma, &all, &full_rows, &["memory.recompute=none"]),
        (&gemma, &all, &ragged, &["memory.recompute=all"]),
        (&gemma, LORA, &ragged, &[NF4, FEED_FORWARD]),
        (&gemma, LORA, &full_rows, &[NORMS, "model.dtype=bf16"]),
        (&gemma, upper, &full_rows, &["memory.recompute=none"]),
    ];
    within_a_percent(dir.path(), cases)
}

/// A dense part beside experts, with factors on gates.
#[test]
fn experts_beside_a_dense_part_take_what_their_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let full_rows = [512; 8];
    let ragged: Vec<usize> = (0..40).map(|i| 30 + (i * 37) % 470).collect();
    let own = config("qwen3", true);
    let layers = own["num_hidden_layers"].as_u64().unwrap_or(0) as usize;
    let gemma = gemma_4(json!({
        "layer_types": vec!["full_attention"; layers],
        "global_head_dim": own["head_dim"],
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": true,
        "enable_moe_block": true,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    }));
    let all = FULL.replace("\"attention\", \"mlp\", \"norms\", \"embedding\", \"head\"", "\"/.*/\"");
    let experts = "[[train]]\nmodules = [\"attention\", \"experts\", \"router\"]\n";
    let cases: &[(&Value, &str, &[usize], &[&str])] = &[
        (&gemma, &all, &full_rows, &["memory.recompute=none"]),
        (&gemma, &all, &ragged, &["memory.recompute=all"]),
        (&gemma, experts, &full_rows, &[NORMS]),
        (&gemma, experts, &ragged, &[NF4, FEED_FORWARD]),
        (&gemma, experts, &full_rows, &["memory.recompute=none", "model.dtype=bf16"]),
        (&gemma, &all, &ragged, &["memory.recompute=all", "model.dtype=bf16"]),
    ];
    within_a_percent(dir.path(), cases)
}

/// Layers of linear attention among others: in full, with adapters, in 4 bits, in mixtures with fused experts.
#[test]
fn linear_attention_takes_what_its_plan_says() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let full_rows = [512; 8];
    let ragged: Vec<usize> = (0..40).map(|i| 30 + (i * 37) % 470).collect();
    let mut dense = config("qwen3", false);
    for (key, value) in [
        ("architectures", json!(["Qwen3_5ForCausalLM"])),
        ("model_type", json!("qwen3_5_text")),
        ("linear_num_key_heads", json!(4)),
        ("linear_num_value_heads", json!(8)),
        ("linear_key_head_dim", json!(64)),
        ("linear_value_head_dim", json!(64)),
        ("linear_conv_kernel_dim", json!(4)),
        ("full_attention_interval", json!(3)),
    ] {
        dense[key] = value;
    }
    let mut moe = dense.clone();
    for (key, value) in [
        ("architectures", json!(["Qwen3_5MoeForCausalLM"])),
        ("model_type", json!("qwen3_5_moe_text")),
        ("num_hidden_layers", json!(4)),
        ("num_experts", json!(16)),
        ("num_experts_per_tok", json!(4)),
        ("moe_intermediate_size", json!(384)),
        ("shared_expert_intermediate_size", json!(384)),
    ] {
        moe[key] = value;
    }
    let (all, experts) = (
        FULL.replace("\"attention\", \"mlp\", \"norms\", \"embedding\", \"head\"", "\"/.*/\""),
        "[[train]]\nmodules = [\"attention\", \"experts\"]\n",
    );
    let cases: &[(&Value, &str, &[usize], &[&str])] = &[
        (&dense, &all, &full_rows, &["memory.recompute=none"]),
        (&dense, &all, &ragged, &[NORMS, "run.micro_rows=2", "model.dtype=bf16"]),
        (&dense, LORA, &full_rows, &["memory.recompute=all", "lora.dora=true"]),
        (&dense, LORA, &ragged, &[NF4, "memory.recompute=2"]),
        (&moe, experts, &full_rows, &[FEED_FORWARD]),
    ];
    within_a_percent(dir.path(), cases)
}
