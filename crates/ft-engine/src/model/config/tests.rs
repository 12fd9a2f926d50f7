use super::*;
use ft_kernels::swiglu::Activation;
use serde_json::{Map, Value, json};

mod classes;
mod ropes;

/// A mixture of one layer, whose experts have gate and up in one tensor.
pub(crate) fn tiny_qwen3_5_moe() -> Config {
    let raw = json!({
        "model_type": "qwen3_5_moe_text", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "head_dim": 8, "vocab_size": 64, "layer_types": ["full_attention"], "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    });
    read(&raw).expect("a config")
}

fn object(value: &Value) -> Map<String, Value> {
    value.as_object().expect("an object").clone()
}

fn read(raw: &Value) -> Result<Config> {
    Config::parse("config.json", object(raw))
}

/// The error of a config; empty without one.
fn error_of(config: Result<Config>) -> String {
    config.err().map(|e| e.to_string()).unwrap_or_default()
}

/// An object with more keys.
fn with(raw: Value, extra: &Value) -> Value {
    Value::Object(object(&raw).into_iter().chain(object(extra)).collect())
}

fn parse(extra: Value) -> Result<Config> {
    let raw = json!({
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    });
    read(&with(raw, &extra))
}

#[test]
fn a_text_config_in_the_wrong_family_is_told_and_long_names_are_cut() {
    let told = error_of(parse(json!({"text_config": {"hidden_size": 64}})));
    assert_eq!(told, "config.json: text_config: qwen2 has none; its keys stand beside model_type");
    let told = error_of(parse(json!({"model_type": "gemma3"})));
    assert_eq!(told, "config.json: text_config: missing; gemma3 has its keys there, gemma3_text has none");
    let told = error_of(parse(json!({"model_type": "a".repeat(100_000)})));
    assert!(told.contains("aaa.. is not a family that ft knows") && told.len() < 1000, "{told}");
}

#[test]
fn bitsandbytes_4_bit_configs_are_read_and_no_others() -> Result<()> {
    let q = |extra: Value| {
        let q = json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "bfloat16", "llm_int8_skip_modules": ["lm_head"], "llm_int8_threshold": 6.0});
        parse(json!({"quantization_config": with(q, &extra)}))
    };
    assert!(q(json!({}))?.is_bitsandbytes() && q(json!({"bnb_4bit_quant_type": "fp4"}))?.is_bitsandbytes());
    assert!(
        !parse(json!({}))?.is_bitsandbytes()
            && !parse(json!({"quantization_config": null}))?.is_bitsandbytes()
    );
    for (key, value) in [
        ("quant_method", json!("awq")),
        ("quant_method", json!(null)),
        ("load_in_4bit", json!(false)),
        ("load_in_8bit", json!(true)),
        ("_load_in_8bit", json!(true)),
        ("bnb_4bit_quant_type", json!("int4")),
        ("bnb_4bit_quant_type", json!(4)),
        ("bnb_4bit_hadamard", json!(true)),
    ] {
        let e = error_of(q(json!({ key: value })));
        assert!(e.contains(key), "{key} = {value}: {e}");
    }
    Ok(())
}

/// Keys of transformers 5.24, which writes nulls too.
#[test]
fn fp8_configs_are_read_and_no_others() -> Result<()> {
    let q = |extra: Value| {
        let q = json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "dequantize": false, "modules_to_not_convert": null, "modules_to_convert": null, "scale_fmt": "float",
            "expert_dtype": "fp8"});
        parse(json!({"quantization_config": with(q, &extra)}))
    };
    for extra in [json!({}), json!({"modules_to_convert": []}), json!({"of_a_later_version": null})] {
        assert_eq!(q(extra)?.format, WeightFormat::Fp8([128, 128]));
    }
    for (key, value) in [
        ("expert_dtype", json!("fp4")),
        ("modules_to_convert", json!(["embed_tokens"])),
        ("modules_to_convert", json!("embed_tokens")),
        ("fmt", json!("e5m2")),
        ("weight_block_size", json!(null)),
        ("of_a_later_version", json!(true)),
    ] {
        let e = error_of(q(json!({ key: value })));
        assert!(e.contains(key), "{key} = {value}: {e}");
    }
    Ok(())
}

#[test]
fn unsupported_configs_are_refused_by_key() {
    for (key, value) in [
        ("model_type", json!("gpt2")),
        ("model_type", json!(null)),
        ("architectures", json!(["Qwen2ForTokenClassification"])),
        ("hidden_act", json!("gelu")),
        ("hidden_size", json!("64")),
        ("hidden_size", json!(-1)),
        ("num_hidden_layers", json!(0)),
        ("num_key_value_heads", json!(3)),
        ("num_attention_heads", json!(6)),
        ("head_dim", json!(7)),
        ("vocab_size", json!(null)),
        ("rms_norm_eps", json!("small")),
        ("tie_word_embeddings", json!(1)),
        ("rope_theta", json!(0)),
        ("rope_scaling", json!({"rope_type": "dynamic"})),
        ("rope_scaling", json!({"rope_type": "longrope"})),
        ("rope_scaling", json!({"rope_type": "yarn"})),
        ("rope_scaling", json!({"type": "linear", "factor": 0})),
        ("rope_scaling", json!([])),
        ("rope_parameters", json!({"full_attention": {"rope_type": "default"}})),
        ("attn_logit_softcapping", json!(30.0)),
        ("use_qk_norm", json!(true)),
        ("layer_types", json!(["full_attention"])),
        ("layer_types", json!(["full_attention", "linear_attention", "full_attention"])),
        ("quantization_config", json!({"quant_method": "gptq"})),
    ] {
        let e = error_of(parse(json!({ key: value })));
        let names_key = e.contains(key) || key.starts_with("rope") || e.contains("hidden_size");
        assert!(e.contains("config.json") && names_key, "{key} = {value}: {e}");
    }
}

#[test]
fn windows_slide_where_the_config_turns_them_on() -> Result<()> {
    let w = |extra| parse(extra).map(|c| c.attention.iter().map(|a| a.window).collect::<Vec<_>>());
    assert_eq!(w(json!({"sliding_window": 8}))?, [None; 3]);
    assert_eq!(w(json!({"sliding_window": 0, "use_sliding_window": false}))?, [None; 3]);
    assert!(w(json!({"sliding_window": 0, "use_sliding_window": true})).is_err());
    assert_eq!(
        w(json!({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 1}))?,
        [None, Some(8), Some(8)]
    );
    let types = json!(["sliding_attention", "full_attention", "sliding_attention"]);
    assert_eq!(
        w(json!({"sliding_window": 8, "use_sliding_window": true, "layer_types": types}))?,
        [Some(8), None, Some(8)]
    );
    Ok(())
}

/// Configs by transformers (`tests/fixtures/make_configs.py`).
fn cases() -> anyhow::Result<Vec<Value>> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/configs.json");
    Ok(serde_json::from_str(&std::fs::read_to_string(file)?)?)
}

/// -1 is none; other ids outside the vocabulary never end an answer.
#[test]
fn end_tokens_outside_the_vocabulary_are_told() -> Result<()> {
    for (ids, told) in [(json!(-1), 0), (json!([2, -1]), 0), (json!([99]), 0), (json!([2, 100]), 1)] {
        let notes = parse(json!({ "eos_token_id": ids }))?.notes;
        assert_eq!(notes.len(), told, "{ids}: {notes:?}");
        assert!(notes.iter().all(|n| n.starts_with("eos_token_id: 100 is not in the")), "{notes:?}");
    }
    let (raw, set) = (json!({"model_type": "qwen2"}), json!({"eos_token_id": 151_936}));
    let e = error_of(Config::overridden("config.json", object(&raw), &object(&set)));
    assert!(e.contains("eos_token_id: 151936 is not in the") && e.contains("model.override's"), "{e}");
    Ok(())
}

/// Convolutions and per-layer inputs have one function.
#[test]
fn gates_have_the_function_that_the_config_names() -> Result<()> {
    let of = |family: &str, key: &str, name: &str| read(&json!({"model_type": family, key: name}));
    for (family, key, name, want) in [
        ("llama", "hidden_act", "gelu_pytorch_tanh", Activation::GeluTanh),
        ("mixtral", "hidden_act", "swish", Activation::Silu),
        ("gemma3_text", "hidden_activation", "silu", Activation::Silu),
        ("gemma3_text", "hidden_activation", "gelu_pytorch_tanh", Activation::GeluTanh),
    ] {
        assert_eq!(of(family, key, name)?.glu.activation, want, "{family}: {name}");
    }
    for (family, key, name) in [
        ("llama", "hidden_act", "gelu"),
        ("qwen3_5_text", "hidden_act", "gelu_pytorch_tanh"),
        ("gpt_oss", "hidden_act", "gelu_pytorch_tanh"),
        ("gemma4_text", "hidden_activation", "silu"),
    ] {
        let e = error_of(of(family, key, name));
        assert!(e.contains(&format!("{key}: {name}; {family} is built with")), "{e}");
    }
    Ok(())
}

#[test]
fn unknown_keys_are_reported() -> Result<()> {
    assert_eq!(parse(json!({"new_trick": 1, "torch_dtype": "bfloat16"}))?.unknown, ["new_trick"]);
    Ok(())
}

fn moe(extra: Value) -> Result<Config> {
    let raw = json!({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "head_dim": 16});
    parse(with(raw, &extra))
}

/// Numbers out of range or of another type are refused by key.
#[test]
fn numbers_out_of_range_are_refused_by_key() {
    let wrong = |key: &str, values: Value, nested: Option<Value>| {
        for value in values.as_array().into_iter().flatten() {
            let extra = match &nested {
                None => json!({ key: value }),
                Some(t) => {
                    let mut t = t.clone();
                    t["rope_scaling"][key] = value.clone();
                    t
                }
            };
            for read in [parse, moe] {
                let e = error_of(read(extra.clone()));
                assert!(e.contains(key), "{key} = {value}: {e}");
            }
        }
    };
    let sizes = json!([0, -1, 1.5, 2.0, "64", true, [1], {}, 4294967295u64, 9223372036854775807u64, 1e300]);
    for key in [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "intermediate_size",
        "sliding_window",
    ] {
        wrong(key, sizes.clone(), None);
    }
    wrong("num_hidden_layers", json!([100_000, 10_000_000, 1025]), None);
    wrong("head_dim", json!([7, 8192]), None);
    wrong("num_key_value_heads", json!([3, 8]), None);
    wrong("rms_norm_eps", json!([0, -1e-6, 1e300, 1e-300, "1e-6", true]), None);
    wrong("rope_theta", json!([0, 1, -1e4, 1e300, "1e4", true]), None);
    wrong("initializer_range", json!([0, -1, 1e300, "0.02", true]), None);
    wrong("eos_token_id", json!(["2", 1.5, [null], {}, true]), None);
    wrong("pad_token_id", json!(["0", 1.5, {}, [true]]), None);
    wrong("use_sliding_window", json!(["true", 1]), None);
    wrong("max_window_layers", json!([-1, "3", 1.5]), None);
    for (kind, keys) in [
        ("linear", &["factor"][..]),
        (
            "llama3",
            &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"][..],
        ),
        ("yarn", &["factor", "attention_factor", "original_max_position_embeddings"][..]),
    ] {
        let table = json!({"rope_scaling": {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}});
        for key in keys {
            wrong(key, json!([0, -1, 1e300, 1e-300, "2", true]), Some(table.clone()));
        }
    }
    let yarn = json!({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}});
    for key in ["beta_fast", "beta_slow", "mscale", "mscale_all_dim"] {
        wrong(key, json!([-1, 1e300, "1"]), Some(yarn.clone()));
    }
    wrong("truncate", json!(["no", 0]), Some(yarn.clone()));
    wrong("rope_type", json!(["axial", "", 3]), Some(yarn));
    for (key, values) in [
        ("num_experts", json!([-1, 1.5, "8", 65_537, 1_000_000])),
        ("num_experts_per_tok", json!([0, 9, "2", 4294967295u64])),
        ("moe_intermediate_size", json!([0, "16", 1u64 << 40])),
        ("decoder_sparse_step", json!([0, -1, "1"])),
        ("mlp_only_layers", json!([3, ["1"], [-1], [1.5]])),
        ("norm_topk_prob", json!(["true", 1])),
    ] {
        for value in values.as_array().into_iter().flatten() {
            let e = error_of(moe(json!({ key: value })));
            assert!(e.contains(key), "{key} = {value}: {e}");
        }
    }
}

/// Sizes valid one by one but too large together.
#[test]
fn products_of_sizes_have_bounds() {
    for (extra, key) in [
        (json!({"vocab_size": 1 << 26, "hidden_size": 1 << 20, "num_attention_heads": 4096}), "vocab_size"),
        (
            json!({"num_attention_heads": 4096, "num_key_value_heads": 4096, "head_dim": 4096, "hidden_size": 1 << 20,
                "num_hidden_layers": 1024}),
            "num_attention_heads",
        ),
        (json!({"intermediate_size": 1 << 22, "num_hidden_layers": 1024}), "intermediate_size"),
        (
            json!({"intermediate_size": 1 << 22, "hidden_size": 1 << 20, "head_dim": 64, "num_hidden_layers": 1024}),
            "intermediate_size",
        ),
    ] {
        let e = error_of(parse(extra));
        assert!(e.contains(&format!("{key}: ")) && e.contains("takes up to"), "{key}: {e}");
    }
    let e = error_of(moe(json!({"num_experts": 16_384, "num_hidden_layers": 1024})));
    assert!(e.contains("num_experts"), "{e}");
    assert!(parse(json!({"eos_token_id": [0, 99], "pad_token_id": -1, "bos_token_id": 1 << 20})).is_ok());
    assert!(parse(json!({"rms_norm_eps": 2.5})).is_ok_and(|c| c.eps == 2.5));
    // the largest accepted values
    assert!(parse(json!({"num_hidden_layers": 1024})).is_ok());
    assert!(moe(json!({"num_experts": 16_384})).is_ok());
}

#[test]
fn errors_name_overrides_and_duplicate_keys() {
    let dir = tempfile::tempdir().expect("a folder");
    let load = |text: &str, set: Value| {
        std::fs::write(dir.path().join("config.json"), text).expect("written");
        error_of(Config::load(dir.path(), &object(&set)))
    };
    let good = r#"{"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}"#;
    assert_eq!(load(good, json!({})), "");
    for set in
        [json!({"num_hidden_layers": 100_000}), json!({"rope_scaling": {"type": "linear", "factor": -1}})]
    {
        let e = load(good, set.clone());
        assert!(e.contains("model.override"), "{set}: {e}");
    }
    let e = load(&good.replace("\"vocab_size\"", "\"hidden_size\": 32, \"vocab_size\""), json!({}));
    assert!(e.contains("the key \"hidden_size\" is there twice"), "{e}");
}

#[test]
fn keys_of_rope_tables_that_are_not_known_are_reported() -> Result<()> {
    let c = parse(json!({"rope_scaling": {"type": "linear", "factor": 2.0, "short_mscale": [1.0]}}))?;
    assert_eq!(c.unknown, ["rope_scaling.short_mscale"]);
    Ok(())
}
