use super::*;
use serde_json::json;

fn parse(extra: Value) -> Result<Config> {
    let mut raw = json!({
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    });
    if let (Some(map), Value::Object(more)) = (raw.as_object_mut(), extra) {
        map.extend(more);
        return Config::parse("config.json", map.clone());
    }
    unreachable!("objects")
}

#[test]
fn bitsandbytes_4_bit_configs_are_read_and_no_others() -> Result<()> {
    let q = |extra: Value| {
        let mut q = json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "bfloat16", "llm_int8_skip_modules": ["lm_head"], "llm_int8_threshold": 6.0});
        if let (Some(map), Value::Object(more)) = (q.as_object_mut(), extra) {
            map.extend(more);
        }
        parse(json!({"quantization_config": q}))
    };
    assert!(q(json!({}))?.four_bit && q(json!({"bnb_4bit_quant_type": "fp4"}))?.four_bit);
    assert!(!parse(json!({}))?.four_bit && !parse(json!({"quantization_config": null}))?.four_bit);
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
        let e = q(json!({ key: value })).map(|_| ()).map_err(|e| e.to_string());
        assert!(e.as_ref().is_err_and(|e| e.contains(key)), "{key} = {value}: {e:?}");
    }
    Ok(())
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    for (key, value) in [
        ("model_type", json!("gpt2")),
        ("model_type", json!(null)),
        ("architectures", json!(["Qwen2ForSequenceClassification"])),
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
        ("rope_scaling", json!({"rope_type": "dynamic", "factor": 2.0})),
        ("rope_scaling", json!({"rope_type": "longrope"})),
        ("rope_scaling", json!({"rope_type": "yarn"})),
        ("rope_scaling", json!({"type": "linear", "factor": 0})),
        ("rope_scaling", json!([])),
        ("rope_parameters", json!({"full_attention": {"rope_type": "default"}})),
        ("partial_rotary_factor", json!(0.5)),
        ("attention_dropout", json!(0.1)),
        ("final_logit_softcapping", json!(30.0)),
        ("layer_types", json!(["full_attention"])),
        ("layer_types", json!(["full_attention", "linear_attention", "full_attention"])),
        ("quantization_config", json!({"quant_method": "gptq"})),
    ] {
        let e = parse(json!({ key: value })).map(|_| ()).map_err(|e| e.to_string());
        let hit = |e: &String| {
            e.contains("config.json")
                && (e.contains(key) || key.starts_with("rope") || e.contains("hidden_size"))
        };
        assert!(e.as_ref().is_err_and(hit), "{key} = {value}: {e:?}");
    }
}

#[test]
fn windows_slide_where_the_config_turns_them_on() -> Result<()> {
    let w = |extra| parse(extra).map(|c| c.windows);
    assert_eq!(w(json!({"sliding_window": 8}))?, [None; 3]);
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

#[test]
fn unknown_keys_are_reported() -> Result<()> {
    assert_eq!(parse(json!({"new_trick": 1, "torch_dtype": "bfloat16"}))?.unknown, ["new_trick"]);
    Ok(())
}
