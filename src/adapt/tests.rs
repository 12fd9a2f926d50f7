//! Selection by rules and by PEFT's config, and adapter configs out and in.

use super::peft::{PeftConfig, config_json, scale};
use super::{Choice, Selection};
use crate::model::Config;
use crate::recipe::Recipe;
use anyhow::{Context, Result};
use serde_json::{Value, json};

fn config(extra: Value) -> Result<Config> {
    let mut raw = json!({
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
        "tie_word_embeddings": false,
    });
    let map = raw.as_object_mut().context("an object")?;
    map.extend(extra.as_object().cloned().unwrap_or_default());
    Ok(Config::parse("config.json", map.clone())?)
}

fn select(config: &Config, rules: &str) -> Result<Selection> {
    let text = format!(
        "[model]\nsource = \"m\"\n{rules}\n[data]\ntrain = [{{ source = \"x\", format = \"text\" }}]\n"
    );
    Ok(Selection::from_rules(config, &Recipe::parse(&text, "r.toml", &[])?.train)?)
}

fn names(s: &Selection) -> Vec<String> {
    s.trained().into_iter().map(|t| t.name).collect()
}

#[test]
fn rules_choose_by_group_name_and_expression() -> Result<()> {
    let c = config(json!({}))?;
    let s = select(&c, "[[train]]\nmodules = [\"attention\"]\nlayers = \"-1:\"\nrank = 2")?;
    assert_eq!(names(&s).len(), 8);
    assert_eq!(names(&s)[0], "model.layers.3.self_attn.q_proj.lora_A.weight");
    let s =
        select(&c, "[[train]]\nmodules = [\"/model.layers.[01].mlp.(up|down)_proj/\"]\nmethod = \"full\"")?;
    assert_eq!(names(&s).len(), 4);
    // a later rule wins
    let s = select(
        &c,
        "[[train]]\nmodules = [\"norms\"]\nmethod = \"full\"\n[[train]]\nmodules = [\"q_norm\"]\nmethod = \"freeze\"",
    )?;
    assert_eq!(names(&s).len(), 4 * 3 + 1);
    Ok(())
}

#[test]
fn a_rule_that_matches_nothing_lists_what_there_is() -> Result<()> {
    let c = config(json!({}))?;
    for (rules, inside) in [
        ("modules = [\"q_porj\"]", "q_porj"),
        ("modules = [\"experts\"]\nexperts = [0]", "experts"),
        ("modules = [\"attention\"]\nlayers = [9]", "attention"),
        ("modules = [\"attention\", \"embedding\"]\nlayers = [1]", "embedding"),
    ] {
        let e = select(&c, &format!("[[train]]\n{rules}")).err().context("refused")?.to_string();
        assert!(e.contains(inside) && e.contains("groups are attention, mlp") && e.contains("0-3"), "{e}");
    }
    Ok(())
}

#[test]
fn a_tied_head_and_embedding_are_one_tensor() -> Result<()> {
    let c = config(json!({"tie_word_embeddings": true}))?;
    for rule in ["head", "embedding"] {
        let s = select(&c, &format!("[[train]]\nmodules = [\"{rule}\"]\nmethod = \"full\""))?;
        assert_eq!(names(&s), ["model.embed_tokens.weight"]);
        assert!(s.tied_in_full());
        // PEFT needs both names
        let j = config_json(&s, "m", None);
        assert_eq!(j["modules_to_save"], json!(["embed_tokens", "lm_head"]));
        assert_eq!(j["target_modules"], json!("dummy-target-modules"));
    }
    let e = select(
        &c,
        "[[train]]\nmodules = [\"head\"]\nmethod = \"full\"\n[[train]]\nmodules = [\"embedding\"]",
    );
    assert!(e.err().context("refused")?.to_string().contains("one tensor"));
    let s = select(&c, "[[train]]\nmodules = [\"head\"]")?;
    assert_eq!(names(&s), ["lm_head.lora_A.weight", "lm_head.lora_B.weight"]);
    Ok(())
}

#[test]
fn everything_in_full_is_a_model() -> Result<()> {
    for tied in [true, false] {
        let c = config(json!({"tie_word_embeddings": tied, "attention_bias": true}))?;
        let s = select(&c, "[[train]]\nmodules = [\"/.*/\"]\nmethod = \"full\"")?;
        assert!(s.everything_full());
        let values: usize = s.trained().iter().map(|t| t.elements()).sum();
        assert_eq!(values as u64, crate::model::modules::parameters(&c));
    }
    Ok(())
}

fn peft(extra: Value) -> Result<PeftConfig> {
    let mut raw =
        json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]});
    let map = raw.as_object_mut().context("an object")?;
    map.extend(extra.as_object().cloned().unwrap_or_default());
    Ok(PeftConfig::parse("adapter_config.json".into(), map.clone())?)
}

/// What PEFT writes for mixed rules must read back as those rules.
#[test]
fn adapter_configs_round_trip() -> Result<()> {
    let c = config(json!({"attention_bias": true}))?;
    for rules in [
        "[[train]]\nmodules = [\"attention\", \"mlp\"]\nrank = 8",
        "[[train]]\nmodules = [\"attention\"]\nlayers = \"1-2\"\nrank = 8\nalpha = 4",
        "[[train]]\nmodules = [\"attention\"]\nrank = 8\n[[train]]\nmodules = [\"q_proj\"]\nlayers = [2]\nrank = 3\nalpha = 7.5",
        "[[train]]\nmodules = [\"mlp\"]\nrslora = true\nrank = 9",
        "[[train]]\nmodules = [\"mlp\"]\nrslora = true\nrank = 9\n[[train]]\nmodules = [\"o_proj\"]\nrank = 9",
        "[[train]]\nmodules = [\"mlp\"]\nrank = 9\n[[train]]\nmodules = [\"norms\", \"q_proj\"]\nlayers = [0]\nmethod = \"full\"",
        "[[train]]\nmodules = [\"norms\"]\nmethod = \"full\"",
        "[[train]]\nmodules = [\"head\", \"embedding\"]\nrank = 2",
    ] {
        let s = select(&c, rules)?;
        let json = config_json(&s, "base", None);
        let map = json.as_object().context("an object")?.clone();
        let back = Selection::from_peft(&c, &PeftConfig::parse("adapter_config.json".into(), map)?)?;
        for ((m, a), (_, b)) in s.modules.iter().zip(&back.modules) {
            match (a, b) {
                (Choice::Lora { spec: a, .. }, Choice::Lora { spec: b, .. }) => {
                    assert!(a.rank == b.rank && (scale(a) - scale(b)).abs() < 1e-12, "{rules}: {}", m.name);
                }
                (a, b) => assert_eq!(
                    std::mem::discriminant(a),
                    std::mem::discriminant(b),
                    "{rules}: {} in\n{json:#}",
                    m.name
                ),
            }
        }
    }
    Ok(())
}

#[test]
fn pefts_selection_keys() -> Result<()> {
    let c = config(json!({}))?;
    let count =
        |extra: Value| -> Result<usize> { Ok(Selection::from_peft(&c, &peft(extra)?)?.trained().len() / 2) };
    assert_eq!(count(json!({}))?, 8);
    assert_eq!(count(json!({"layers_to_transform": [0, 3]}))?, 4);
    assert_eq!(count(json!({"layers_to_transform": 1, "layers_pattern": "layers"}))?, 2);
    assert_eq!(count(json!({"layers_to_transform": 1, "layers_pattern": "blocks"}))?, 0);
    assert_eq!(count(json!({"exclude_modules": ["v_proj"]}))?, 4);
    assert_eq!(count(json!({"exclude_modules": r".*\.0\..*"}))?, 6);
    assert_eq!(count(json!({"target_modules": r".*layers\.2\.self_attn\.(q|k)_proj"}))?, 2);
    assert_eq!(count(json!({"target_modules": "all-linear"}))?, 4 * 7);
    let s = Selection::from_peft(
        &c,
        &peft(
            json!({"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"^model.layers.2.self_attn.v_proj": 32}}),
        )?,
    )?;
    let spec = |n: &str| match s.choice(n) {
        Choice::Lora { spec, .. } => (spec.rank, spec.alpha),
        _ => (0, 0.0),
    };
    assert_eq!(spec("model.layers.1.self_attn.q_proj"), (2, 8.0));
    assert_eq!(spec("model.layers.0.self_attn.q_proj"), (4, 8.0));
    assert_eq!(spec("model.layers.2.self_attn.v_proj"), (4, 32.0));
    Ok(())
}

#[test]
fn keys_that_change_numbers_are_refused_by_name() {
    for (key, value) in [
        ("peft_type", json!("LOHA")),
        ("bias", json!("all")),
        ("fan_in_fan_out", json!(true)),
        ("lora_bias", json!(true)),
        ("layer_replication", json!([[0, 4]])),
        ("target_parameters", json!(["mlp.experts.gate_up_proj"])),
        ("trainable_token_indices", json!([1])),
        ("alora_invocation_tokens", json!([1])),
        ("use_qalora", json!(true)),
        ("a_key_of_next_year", json!(2)),
    ] {
        let e = peft(json!({ key: value })).map(|_| ()).map_err(|e| e.to_string());
        assert!(e.as_ref().is_err_and(|e| e.contains(key)), "{key}: {e:?}");
    }
}
