//! Configs that leave keys out, and keys without effect.

use super::*;
use crate::model::config::family::FAMILIES;
use crate::model::config::rope::{Rope, Scaling};

fn of_rope(r: &Rope) -> Value {
    let mut out = match &r.scaling {
        Scaling::Default => json!({"kind": "default"}),
        Scaling::Linear { factor } => json!({"kind": "linear", "factor": factor}),
        Scaling::Dynamic { factor, .. } => json!({"kind": "dynamic", "factor": factor}),
        Scaling::Proportional { factor, .. } => json!({"kind": "proportional", "factor": factor}),
        Scaling::Llama3 { factor, original, .. } => {
            json!({"kind": "llama3", "factor": factor, "original": original})
        }
        Scaling::Yarn { factor, original, truncate, .. } => {
            json!({"kind": "yarn", "factor": factor, "original": original, "truncate": truncate})
        }
        Scaling::Long { .. } => json!({"kind": "longrope"}),
    };
    out["theta"] = json!(r.theta);
    out
}

fn of_config(c: &Config) -> Value {
    let divisor = c.attention.first().map(|a| a.scale.powi(-2).round() as u64);
    json!({
        "heads": c.heads, "kv_heads": c.kv_heads, "head_dim": c.head_dim, "hidden": c.hidden, "vocab": c.vocab,
        "layers": c.layers, "positions": c.max_positions, "eps": c.eps, "tied": c.tied, "pad": c.pad,
        "divisor": divisor, "experts": c.moe.as_ref().map(|m| m.experts), "top_k": c.moe.as_ref().map(|m| m.top_k),
        "windows": c.attention.iter().map(|a| a.window).collect::<Vec<_>>(),
        "ropes": c.ropes.iter().map(of_rope).collect::<Vec<_>>(),
    })
}

/// Sizes, windows and rotary embeddings are those of transformers (`tests/fixtures/make_configs.py`).
#[test]
fn absent_keys_have_the_defaults_of_transformers() -> anyhow::Result<()> {
    let cases = cases()?;
    for case in &cases {
        let (name, got) = (&case["name"], of_config(&read(&case["config"])?));
        for (key, want) in case["want"].as_object().into_iter().flatten() {
            // Null where a family has none, or one for each layer. Frequencies: `tests/ropes.rs`.
            let is_null = want.is_null() && ["head_dim", "divisor"].contains(&key.as_str());
            if !is_null && key != "frequencies" {
                assert_eq!(&got[key], want, "{name}: {key}");
            }
        }
    }
    assert!(cases.len() > FAMILIES.len());
    Ok(())
}

/// Null is no default where a class has one.
#[test]
fn null_sizes_are_refused() {
    for key in ["hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps"]
    {
        let e = error_of(read(&json!({"model_type": "qwen3", key: null})));
        assert!(e.contains(key), "{key}: {e}");
    }
}

/// Of heads, null is as an absent key where the class takes numbers alone.
#[test]
fn null_heads_are_those_of_the_class() -> Result<()> {
    for (family, key) in [
        ("qwen3", "head_dim"),
        ("gpt_oss", "head_dim"),
        ("gemma3_text", "head_dim"),
        ("glm4", "head_dim"),
        ("qwen3_5_text", "head_dim"),
        ("qwen3_next", "head_dim"),
        ("qwen3_moe", "num_key_value_heads"),
        ("gemma3_text", "num_key_value_heads"),
    ] {
        let (null, absent) =
            (read(&json!({"model_type": family, key: null}))?, read(&json!({"model_type": family}))?);
        let of = |c: &Config| (c.head_dim, c.kv_heads);
        assert_eq!(of(&null), of(&absent), "{family}: {key}");
    }
    Ok(())
}

#[test]
fn keys_without_effect_are_told() -> Result<()> {
    let types = json!(["full_attention", "sliding_attention"]);
    let with_types = |family: &str| {
        json!({"model_type": family, "num_hidden_layers": 2, "sliding_window": 64, "use_sliding_window": true,
            "layer_types": types})
    };
    for family in ["mixtral", "phi3", "qwen3_moe"] {
        let notes = read(&with_types(family))?.notes;
        assert!(notes.len() == 1 && notes[0].starts_with("layer_types: "), "{family}: {notes:?}");
    }
    for family in ["qwen2", "qwen2_moe", "ministral", "smollm3", "gpt_oss"] {
        assert!(read(&with_types(family))?.notes.is_empty(), "{family}");
    }
    for (outer, inner, told) in [(None, Some(false), 1), (Some(false), Some(false), 0), (Some(true), None, 0)]
    {
        let text = json!({"model_type": "gemma3_text", "tie_word_embeddings": inner});
        let c = read(&json!({"model_type": "gemma3", "tie_word_embeddings": outer, "text_config": text}))?;
        assert_eq!((c.tied, c.notes.len()), (outer != Some(false), told), "{:?}", c.notes);
    }
    Ok(())
}

/// Keys that some classes read, and those of other families do not.
#[test]
fn keys_of_other_classes_are_told() -> Result<()> {
    for (key, value, family) in [
        ("query_pre_attn_scalar", json!(64), "llama"),
        ("no_rope_layers", json!([]), "llama"),
        ("final_logit_softcapping", json!(30.0), "qwen2"),
        ("query_pre_attn_scalar", json!(64), "gemma4_text"),
        ("partial_rotary_factor", json!(0.5), "llama"),
        ("embd_pdrop", json!(0.1), "phi3"),
        ("resid_pdrop", json!(0.1), "llama"),
        ("layer_types", json!(vec!["sliding_attention"; 40]), "glm4"),
    ] {
        let raw = json!({ "model_type": family });
        let c = read(&with(raw.clone(), &json!({ key: value })))?;
        assert!(c.notes.len() == 1 && c.notes[0].starts_with(&format!("{key}: ")), "{family}: {:?}", c.notes);
        let plain = read(&raw)?;
        let same = (None, plain.attention, plain.ropes);
        assert_eq!((c.logit_cap, c.attention, c.ropes), same, "{family}: {key}");
        let e = error_of(Config::overridden("config.json", object(&raw), &object(&json!({ key: value }))));
        assert!(e.contains(&format!("{key}: ")) && e.contains("model.override's"), "{e}");
    }
    Ok(())
}

/// transformers computes attention both ways with `is_causal = false`, in every family.
#[test]
fn attention_that_is_not_causal_is_refused() -> Result<()> {
    for family in ["llama", "qwen2", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_5_text"] {
        let raw = json!({ "model_type": family });
        let e = error_of(read(&with(raw.clone(), &json!({"is_causal": false}))));
        assert!(e.contains("is_causal: false; causal attention is built"), "{family}: {e}");
        for value in [json!(true), Value::Null] {
            assert!(read(&with(raw.clone(), &json!({"is_causal": value})))?.unknown.is_empty(), "{family}");
        }
        let set = object(&json!({"is_causal": false}));
        let e = error_of(Config::overridden("config.json", object(&raw), &set));
        assert!(e.contains("is_causal: false") && e.contains("model.override's"), "{family}: {e}");
    }
    Ok(())
}

/// Keys of overrides that the family does not read, or that are unknown, in text models and vision checkpoints.
#[test]
fn overrides_without_effect_are_found() -> Result<()> {
    let overridden = |raw: &Value, set: Value| Config::overridden("config.json", object(raw), &object(&set));
    let nested = json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}});
    let of = |family: &str| json!({ "model_type": family });
    for (raw, set, key, why) in [
        (of("llama"), json!({"sliding_window": 4}), "sliding_window", "models of llama do not read it"),
        (of("mistral"), json!({"use_sliding_window": false}), "use_sliding_window", "models of mistral"),
        (of("mistral"), json!({"attention_bias": true}), "attention_bias", "models of mistral"),
        (of("smollm3"), json!({"max_window_layers": 2}), "max_window_layers", "models of smollm3"),
        (of("mixtral"), json!({"norm_topk_prob": false}), "norm_topk_prob", "models of mixtral"),
        (of("qwen3"), json!({"linear_conv_kernel_dim": 2}), "linear_conv_kernel_dim", "models of qwen3"),
        (of("qwen3"), json!({"rms_norm_ep": 0.5}), "rms_norm_ep", "did you mean rms_norm_eps?"),
        (
            of("qwen3"),
            json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "facter": 3.0}}),
            "rope_scaling.facter",
            "did you mean factor?",
        ),
        (nested.clone(), json!({"hidden_act": "silu"}), "hidden_act", "models of gemma3_text"),
        (nested.clone(), json!({"slidding_window": 8}), "slidding_window", "did you mean sliding_window?"),
        (nested, json!({"text_config": {"sliding_window": 8}}), "text_config", "stand in model.override"),
    ] {
        let c = overridden(&raw, set)?;
        let Some(idle) = c.idle_override else { panic!("{key} is not told") };
        assert!(idle.0 == key && idle.1.contains(why), "{key}: {idle:?}");
        assert!(c.unknown.is_empty(), "{key}: told of the file: {:?}", c.unknown);
    }
    for (family, set) in [
        ("mistral", json!({"sliding_window": 4, "attention_dropout": 0.0, "problem_type": "regression"})),
        ("qwen2", json!({"use_sliding_window": true, "max_window_layers": 2, "tie_word_embeddings": false})),
        ("qwen3_moe", json!({"num_experts": 8, "norm_topk_prob": true, "mlp_only_layers": []})),
        ("gpt_oss", json!({"swiglu_limit": 5.0, "hidden_act": "silu", "num_local_experts": 4})),
        ("qwen3_next", json!({"linear_conv_kernel_dim": 2, "full_attention_interval": 2})),
        ("gemma4_text", json!({"hidden_activation": "gelu_pytorch_tanh", "global_head_dim": 64})),
    ] {
        let c = overridden(&of(family), set)?;
        assert!(c.idle_override.is_none() && c.unknown.is_empty(), "{family}: {:?}", c.idle_override);
    }
    let file = read(&json!({"model_type": "llama", "sliding_window": 4, "rms_norm_ep": 0.5}))?;
    assert!(file.idle_override.is_none() && file.unknown == ["rms_norm_ep"], "a warning in a file");
    Ok(())
}

/// transformers' `AutoConfig` makes a Ministral of a Mistral with this key, null too.
#[test]
fn a_mistral_with_layer_types_is_a_ministral() -> Result<()> {
    let types = json!(["full_attention", "sliding_attention"]);
    for (of, class) in [("CausalLM", None), ("SequenceClassification", Some(2))] {
        let raw = json!({"model_type": "mistral", "architectures": [format!("MistralFor{of}")],
            "num_hidden_layers": 2, "sliding_window": 64});
        for (types, windows) in [(types.clone(), [None, Some(64_usize)]), (Value::Null, [Some(64); 2])] {
            let set = json!({ "layer_types": types });
            let file = read(&with(raw.clone(), &set))?;
            for c in [file, Config::overridden("config.json", object(&raw), &object(&set))?] {
                let of_layers: Vec<Option<usize>> = c.attention.iter().map(|a| a.window).collect();
                assert_eq!(of_layers, windows, "{types}");
                assert_eq!(c.scores.as_ref().map(Vec::len), class);
                assert_eq!((&c.raw["model_type"], c.notes.len()), (&json!("ministral"), 0));
                assert_eq!(c.raw["architectures"], json!([format!("MinistralFor{of}")]));
            }
        }
        assert_eq!(read(&raw)?.family.model_type, "mistral");
    }
    Ok(())
}

/// The class of Gemma 3's vision checkpoints leaves logits as they are; those of text models and of Gemma 4 do not.
#[test]
fn a_limit_of_logits_in_a_vision_checkpoint_is_that_of_gemma_4() -> Result<()> {
    const KEY: &str = "final_logit_softcapping";
    for (family, text, cap, told) in [
        ("gemma3", true, None, 1),
        ("gemma3_text", false, Some(2.0), 0),
        ("gemma4", true, Some(2.0), 0),
        ("gemma4_text", false, Some(2.0), 0),
    ] {
        let raw = |own: Value| match text {
            true => json!({"model_type": family, "text_config": own}),
            false => with(json!({"model_type": family}), &own),
        };
        let c = read(&raw(json!({ KEY: 2.0 })))?;
        assert_eq!((c.logit_cap, c.notes.len()), (cap, told), "{family}: {:?}", c.notes);
        let path = format!("text_config.{KEY}: 2");
        assert!(c.notes.iter().all(|n| n.starts_with(&path)), "{:?}", c.notes);
        let set = Config::overridden("config.json", object(&raw(json!({}))), &object(&json!({ KEY: 2.0 })));
        assert_eq!(set.is_err(), told == 1, "{family}");
    }
    Ok(())
}

/// The distance between layers with full attention is a key of Gemma 3; other classes have their own.
#[test]
fn a_pattern_of_windows_is_read_for_gemma_3_alone() -> Result<()> {
    for (key, families) in [
        (
            "sliding_window_pattern",
            [("gemma3_text", 3, 0), ("olmo3", 4, 1), ("gpt_oss", 2, 1), ("gemma4_text", 6, 1)],
        ),
        (
            "_sliding_window_pattern",
            [("gemma3_text", 6, 1), ("olmo3", 4, 1), ("gpt_oss", 2, 1), ("gemma4_text", 6, 1)],
        ),
    ] {
        for (family, every, told) in families {
            let c = read(&json!({"model_type": family, key: 3}))?;
            let full = c.attention.iter().position(|a| a.window.is_none()).map(|l| l + 1);
            assert_eq!((full, c.notes.len()), (Some(every), told), "{family}: {:?}", c.notes);
            assert!(c.notes.iter().all(|n| n.starts_with(&format!("{key}: 3 "))), "{:?}", c.notes);
        }
    }
    for (key, value) in
        [("sliding_window_pattern", json!(3)), ("layer_types", json!(vec!["sliding_attention"; 32]))]
    {
        let (raw, set) = (object(&json!({"model_type": "mixtral"})), object(&json!({ key: value })));
        let e = error_of(Config::overridden("config.json", raw, &set));
        assert!(e.contains(&format!(": {key}: ")) && e.contains("model.override's"), "{e}");
    }
    let types = json!(["sliding_attention", "full_attention"]);
    let raw = |every: usize| {
        json!({"model_type": "gemma3_text", "num_hidden_layers": 2, "layer_types": types,
        "sliding_window_pattern": every, "_sliding_window_pattern": every})
    };
    assert_eq!((read(&raw(2))?.notes.len(), read(&raw(3))?.notes.len()), (0, 2));
    Ok(())
}

/// An error says so where the file does not have the key.
#[test]
fn errors_name_defaults_of_the_class() {
    let of_class = "the file has no value for it: the value is the default of its class";
    for (raw, key, is_default) in [
        (
            json!({"model_type": "qwen2", "num_attention_heads": 16}),
            "num_key_value_heads: 32; 16 heads",
            true,
        ),
        (
            json!({"model_type": "qwen3_moe", "num_attention_heads": 6, "num_key_value_heads": null}),
            "num_key_value_heads: 4; 6 heads",
            true,
        ),
        (
            json!({"model_type": "qwen2", "num_attention_heads": 16, "num_key_value_heads": 32}),
            "num_key_value_heads: 32; 16 heads",
            false,
        ),
        (
            json!({"model_type": "qwen2", "hidden_size": 1 << 20, "num_attention_heads": 4096, "head_dim": 4096,
            "num_key_value_heads": 4096, "num_hidden_layers": 1024}),
            "num_attention_heads: 4096; with",
            false,
        ),
        (
            json!({"model_type": "mixtral", "hidden_size": 1 << 20, "num_hidden_layers": 1024, "head_dim": 128}),
            "intermediate_size: 14336; with",
            true,
        ),
    ] {
        let e = error_of(read(&raw));
        assert!(e.contains(key) && e.contains(of_class) == is_default, "{raw}: {e}");
    }
    let text = json!({"model_type": "qwen3_5_moe", "text_config": {"num_experts_per_tok": 300}});
    let e = error_of(read(&text));
    assert!(e.contains("text_config.num_experts_per_tok: 300 of 256") && !e.contains(of_class), "{e}");
    let text = json!({"model_type": "qwen3_5", "text_config": {"num_attention_heads": 6}});
    let e = error_of(read(&text));
    assert!(e.contains("text_config.num_key_value_heads: 4; 6") && e.contains(of_class), "{e}");
}

/// The head of a vision checkpoint goes by the key of the whole, in an override too.
#[test]
fn an_override_unties_a_vision_checkpoint() -> Result<()> {
    let raw = json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}});
    let set = object(&json!({"tie_word_embeddings": false}));
    let c = Config::overridden("config.json", object(&raw), &set)?;
    assert!(!c.tied && c.notes.is_empty() && c.raw["tie_word_embeddings"] == json!(false));
    Ok(())
}

/// Classes and quantization of a vision checkpoint are of the whole.
#[test]
fn overrides_of_the_whole_have_an_effect() -> Result<()> {
    let text = json!({"model_type": "qwen3_5_text"});
    let raw =
        object(&json!({"model_type": "qwen3_5", "architectures": ["Qwen3_5Model"], "text_config": text}));
    let set = json!({"architectures": ["Qwen3_5ForConditionalGeneration"],
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}});
    let c = Config::overridden("config.json", raw.clone(), &object(&set))?;
    assert_eq!(c.format, WeightFormat::Fp8([128, 128]));
    for key in ["architectures", "quantization_config"] {
        assert_eq!((&c.raw[key], c.raw["text_config"].get(key)), (&set[key], None));
    }
    let wrong = json!({"quantization_config": {"quant_method": "gptq"}});
    let e = error_of(Config::overridden("config.json", raw, &object(&with(set, &wrong))));
    assert!(e.contains(": quantization_config.quant_method: ") && e.contains("model.override's"), "{e}");
    Ok(())
}

/// One label of several, or a number. Multi-label classification has another loss.
#[test]
fn other_problems_of_classifiers_are_refused_by_key() -> Result<()> {
    let (one, several, number) = ("single_label_classification", "multi_label_classification", "regression");
    for (outputs, problem, is_built) in
        [(3, one, true), (3, several, false), (3, number, false), (1, number, true), (1, several, false)]
    {
        let e =
            error_of(read(&json!({"model_type": "qwen3", "num_labels": outputs, "problem_type": problem,
            "architectures": ["Qwen3ForSequenceClassification"]})));
        let named = e.contains(&format!("problem_type: {problem}; "));
        assert_eq!((e.is_empty(), named), (is_built, !is_built), "{outputs}: {e}");
    }
    // The key of a language model says nothing of its new head.
    let model = read(&json!({"model_type": "qwen3", "problem_type": number}))?;
    let made = model.with_scores(vec!["a".into(), "b".into()]).expect("a classifier");
    assert!(!made.raw.contains_key("problem_type"));
    Ok(())
}

/// Names of transformers' `MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES`.
#[test]
fn classifiers_have_the_names_of_transformers() -> Result<()> {
    for (family, class) in [
        ("gemma3_text", "Gemma3TextForSequenceClassification"),
        ("qwen3_5_text", "Qwen3_5TextForSequenceClassification"),
        ("qwen3", "Qwen3ForSequenceClassification"),
    ] {
        let c = read(&json!({"model_type": family, "architectures": [class], "num_labels": 3}))?;
        assert_eq!(c.outputs(), 3, "{family}");
        let c = read(&json!({"model_type": family}))?.with_scores(vec!["a".into()]);
        assert_eq!(c.map(|c| c.raw["architectures"].clone()), Some(json!([class])));
    }
    let vision =
        read(&json!({"model_type": "gemma3_text", "architectures": ["Gemma3ForSequenceClassification"]}));
    assert!(vision.is_err());
    let none = |f: &&family::Family| f.classifier.is_none();
    assert!(read(&json!({"model_type": "gemma4_text"}))?.with_scores(vec!["a".into()]).is_none());
    let none: Vec<&str> = FAMILIES.iter().filter(none).map(|f| f.model_type).collect();
    assert_eq!(none, ["gemma4_text", "qwen3_5_moe_text"]);
    Ok(())
}
