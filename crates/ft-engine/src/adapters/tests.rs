//! Selection by rules and by PEFT's config, and round trips of adapter configs.

use super::peft::{PREFIX, config_json, scale};
use super::{Adapter, Choice, PeftConfig, Selection};
use crate::files::{TensorFiles, write_file};
use crate::model::Config;
use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use ft_recipe::Recipe;
use serde_json::{Map, Value, json};
use std::path::Path;

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

/// Specific rules before general ones, mostly.
#[test]
fn a_rule_that_later_ones_override_wholly_is_told() -> Result<()> {
    let c = config(json!({}))?;
    let [q, attention] = ["q_proj", "attention"].map(|of| format!("[[train]]\nmodules = [\"{of}\"]\n"));
    for (later, told) in [
        (attention.clone() + "rank = 2", true),
        (format!("[[train]]\nmodules = [\"mlp\"]\n{attention}method = \"freeze\""), true),
        (attention.clone() + "rank = 2\nlayers = [1]", false),
    ] {
        let notes = select(&c, &format!("{q}{later}"))?.notes;
        assert_eq!(notes.len(), usize::from(told), "{later}: {notes:?}");
        assert!(notes.iter().all(|n| n.contains("train.0 does nothing: later rules")), "{notes:?}");
    }
    assert!(select(&c, &format!("{attention}{q}rank = 2"))?.notes.is_empty());
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
        assert_eq!(j["ensure_weight_tying"], json!(true));
    }
    let e = select(
        &c,
        "[[train]]\nmodules = [\"head\"]\nmethod = \"full\"\n[[train]]\nmodules = [\"embedding\"]",
    );
    assert!(e.err().context("refused")?.to_string().contains("one tensor"));
    let s = select(&c, "[[train]]\nmodules = [\"head\"]")?;
    assert_eq!(names(&s), ["lm_head.lora_A.weight", "lm_head.lora_B.weight"]);
    assert_eq!(config_json(&s, "m", None).get("ensure_weight_tying"), None);
    let s = select(&config(json!({}))?, "[[train]]\nmodules = [\"head\"]\nmethod = \"full\"")?;
    assert_eq!(config_json(&s, "m", None).get("ensure_weight_tying"), None);
    Ok(())
}

#[test]
fn a_rule_in_full_for_all_names_trains_every_parameter() -> Result<()> {
    for tied in [true, false] {
        let c = config(json!({"tie_word_embeddings": tied, "attention_bias": true}))?;
        let s = select(&c, "[[train]]\nmodules = [\"/.*/\"]\nmethod = \"full\"")?;
        assert!(s.everything_full());
        let values: usize = s.trained().iter().map(|t| t.elements()).sum();
        assert_eq!(values as u64, crate::model::modules::parameters(&c));
    }
    Ok(())
}

#[test]
fn parameters_without_a_module_train_with_the_whole_model_only() -> Result<()> {
    let c = config(json!({"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}))?;
    let sinks = "[[train]]\nmodules = [\"sinks\"]\nmethod = \"full\"";
    for rules in [sinks.to_string(), format!("{sinks}\n[[train]]\nmodules = [\"attention\"]")] {
        let e = select(&c, &rules).err().context("refused")?.to_string();
        assert!(e.contains("model.layers.0.self_attn.sinks has no place in an adapter"), "{e}");
    }
    select(&c, "[[train]]\nmodules = [\"/.*/\"]\nmethod = \"full\"")?;
    Ok(())
}

fn raw(extra: Value) -> Result<Map<String, Value>> {
    let mut raw =
        json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]});
    let map = raw.as_object_mut().context("an object")?;
    map.extend(extra.as_object().cloned().unwrap_or_default());
    Ok(map.clone())
}

fn peft(extra: Value) -> Result<PeftConfig> {
    Ok(PeftConfig::parse("adapter_config.json".into(), &raw(extra)?)?)
}

/// Writes an adapter of zeros: the tensors of its config, and `more` of the shape of the embedding.
fn adapter(dir: &Path, c: &Config, extra: Value, more: &[&str]) -> Result<Adapter> {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let trained = Selection::from_peft(c, &peft(extra.clone())?)?.trained();
    let mut tensors = Vec::new();
    for t in &trained {
        tensors.push((format!("{PREFIX}{}", t.name), zeros(&t.shape)?));
    }
    for name in more {
        tensors.push((format!("{PREFIX}{name}"), zeros(&[c.vocab, c.hidden])?));
    }
    write_file(&dir.join("adapter_model.safetensors"), &tensors, &[])?;
    std::fs::write(dir.join("adapter_config.json"), Value::Object(raw(extra)?).to_string())?;
    Ok(Adapter::open(dir)?)
}

/// The adapter with other names and values of its tensors.
fn rewritten(held: &Adapter, change: impl Fn(&str, Tensor) -> Result<(String, Tensor)>) -> Result<Adapter> {
    let path = held.dir.join("adapter_model.safetensors");
    let files = TensorFiles::open_file(&path)?;
    let mut tensors = Vec::new();
    for name in files.names() {
        tensors.push(change(name, files.tensor(name, DType::F32, &Device::Cpu)?)?);
    }
    write_file(&path, &tensors, &[])?;
    Ok(Adapter::open(&held.dir)?)
}

/// The adapter without the tensors with `part` in their names.
fn without(held: &Adapter, part: &str) -> Result<Adapter> {
    let path = held.dir.join("adapter_model.safetensors");
    let files = TensorFiles::open_file(&path)?;
    let mut tensors = Vec::new();
    for name in files.names().filter(|name| !name.contains(part)) {
        tensors.push((name.to_string(), files.tensor(name, DType::F32, &Device::Cpu)?));
    }
    write_file(&path, &tensors, &[])?;
    Ok(Adapter::open(&held.dir)?)
}

/// A and B are of the scale that they trained with.
#[test]
fn another_scale_than_the_adapters_is_refused() -> Result<()> {
    let (c, dir) = (config(json!({}))?, tempfile::tempdir()?);
    let extra = json!({"alpha_pattern": {"layers.3.self_attn.v_proj": 32}});
    let held = adapter(dir.path(), &c, extra, &[])?;
    let check = |held: &Adapter, alpha: usize, more: &str| -> Result<()> {
        let last = "[[train]]\nmodules = [\"v_proj\"]\nlayers = [3]\nrank = 4\nalpha = 32";
        let rules = format!(
            "[[train]]\nmodules = [\"q_proj\", \"v_proj\"]\nrank = 4\nalpha = {alpha}\n{more}\n{last}"
        );
        let s = select(&c, &rules)?;
        Ok(held.check_against(&s, &s.trained())?)
    };
    check(&held, 8, "")?;
    for (alpha, more) in [(16, ""), (8, "rslora = true")] {
        let e = check(&held, alpha, more).err().context("refused")?.to_string();
        let said = "q_proj: its scale is 2 in the adapter, 4 by the recipe";
        assert!(e.contains(said) && e.contains("hint: rank = 4, alpha = 8 and rslora = false"), "{e}");
    }
    // Another formula gives the same scale.
    check(&held, 4, "rslora = true")?;
    // Values given by name have the scale of the selection.
    check(&held.with_values(Default::default()), 16, "")
}

#[test]
fn a_magnitude_of_the_embedding_is_not_dropped() -> Result<()> {
    let (c, dir) = (config(json!({}))?, tempfile::tempdir()?);
    for (module, target, fits) in
        [("model.embed_tokens", "embed_tokens", false), ("model.layers.0.self_attn.q_proj", "q_proj", true)]
    {
        let name = format!("{module}.lora_magnitude_vector");
        let held = adapter(dir.path(), &c, json!({ "target_modules": [target] }), &[&name])?;
        let s = select(&c, &format!("[[train]]\nmodules = [\"{target}\"]\nrank = 4\nalpha = 8"))?;
        let e = held.check_against(&s, &s.trained()).err().map(|e| e.to_string());
        let said = |e: &String| e.contains("lora_magnitude_vector") && e.contains("nothing trains");
        assert!(if fits { e.is_none() } else { e.as_ref().is_some_and(said) }, "{module}: {e:?}");
    }
    Ok(())
}

/// The text model of a released vision checkpoint.
fn vision(tied: bool) -> Result<Config> {
    let text = json!({
        "model_type": "gemma3_text", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    });
    let raw = json!({"model_type": "gemma3", "tie_word_embeddings": tied, "text_config": text});
    let mut c = Config::parse("config.json", raw.as_object().context("an object")?.clone())?;
    c.body = "language_model.model";
    Ok(c)
}

/// PEFT's suffixes choose linears of a tower too, whose B stays zero in training on text.
#[test]
fn lora_on_a_tower_loads_with_a_b_of_zeros_alone() -> Result<()> {
    let (c, dir) = (vision(true)?, tempfile::tempdir()?);
    let halves = ["lora_A.weight", "lora_B.weight"]
        .map(|half| format!("model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.{half}"));
    let held = adapter(dir.path(), &c, json!({}), &[&halves[0], &halves[1]])?;
    let s = held.selection(&c)?;
    for (half, fits) in [(&halves[0], true), (&halves[1], false)] {
        let held = rewritten(&held, |name: &str, t: Tensor| {
            Ok((name.to_string(), if name.ends_with(half.as_str()) { t.ones_like()? } else { t }))
        })?;
        let e = held.check_against(&s, &s.trained()).err().map(|e| e.to_string());
        let said = |e: &String| e.contains("vision_tower") && e.contains("hint: ft computes the text model");
        assert!(if fits { e.is_none() } else { e.as_ref().is_some_and(said) }, "{half}: {e:?}");
    }
    Ok(())
}

/// The text model of a vision checkpoint is a class of its own as well, with names of its own.
#[test]
fn adapters_of_the_text_model_alone_fit_a_vision_checkpoint() -> Result<()> {
    for body in ["language_model.model", "model.language_model"] {
        let (mut c, dir) = (vision(true)?, tempfile::tempdir()?);
        c.body = body;
        let extra = json!({
            "target_modules": ["q_proj", "model.layers.1.self_attn.v_proj"],
            "exclude_modules": ["model.layers.0.self_attn.q_proj"], "modules_to_save": ["model.norm"],
            "alpha_pattern": {r"^model\.layers\.1\.self_attn\.v_proj": 32},
        });
        let held = adapter(dir.path(), &c, extra, &[])?;
        let held = rewritten(&held, |name: &str, t: Tensor| Ok((name.replace(body, "model"), t)))?;
        let s = held.selection(&c)?;
        held.check_against(&s, &s.trained())?;
        assert_eq!(names(&s).len(), 2 + 2 + 1, "{body}: {:?}", names(&s));
        match s.choice(&format!("{body}.layers.1.self_attn.v_proj")) {
            Choice::Lora { spec, .. } => assert_eq!(spec.alpha, 32.0, "{body}"),
            other => panic!("{body}: {other:?}"),
        }
    }
    Ok(())
}

/// PEFT before transformers 5 wrote the names of the release.
#[test]
fn patterns_apply_under_the_names_of_a_release() -> Result<()> {
    let name = "language_model.model.layers.0.self_attn.q_proj";
    let s = Selection::from_peft(&vision(true)?, &peft(json!({"alpha_pattern": {name: 32}}))?)?;
    match s.choice(name) {
        Choice::Lora { spec, .. } => assert_eq!(spec.alpha, 32.0),
        other => panic!("{other:?}"),
    }
    Ok(())
}

/// The names of its outputs take memory, and zero columns take no bytes in a file.
#[test]
fn a_score_head_of_another_shape_than_a_matrix_is_refused() -> Result<()> {
    let (c, dir) = (config(json!({}))?, tempfile::tempdir()?);
    adapter(dir.path(), &c, json!({}), &[])?;
    for shape in ["[1099511627776,0]", "[0,32]", "[0]"] {
        let info = format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}"#);
        let header = format!(r#"{{"base_model.model.score.weight":{info}}}"#);
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        std::fs::write(dir.path().join("adapter_model.safetensors"), bytes)?;
        let e = Adapter::open(dir.path())?.config_of(c.clone()).err().context("refused")?.to_string();
        assert!(e.contains("score.weight") && e.contains("a matrix of 1 to 65536 rows"), "{e}");
    }
    Ok(())
}

/// PEFT trains a copy of each.
#[test]
fn a_saved_head_unlike_its_tied_embedding_needs_a_merge() -> Result<()> {
    let (c, dir) = (config(json!({"tie_word_embeddings": true}))?, tempfile::tempdir()?);
    let extra = json!({"modules_to_save": ["embed_tokens", "lm_head"]});
    let held = adapter(dir.path(), &c, extra, &["lm_head.weight"])?;
    let s = held.selection(&c)?;
    held.check_against(&s, &s.trained())?;
    let held = rewritten(&held, |name: &str, t: Tensor| {
        Ok((name.to_string(), if name.contains("lm_head") { t.ones_like()? } else { t }))
    })?;
    let e = held.check_against(&s, &s.trained()).err().context("refused")?.to_string();
    assert!(e.contains("lm_head.weight is not the embedding") && e.contains("hint: merge it"), "{e}");
    Ok(())
}

/// PEFT 0.19 and later tie LoRA too, and store the head's tensors beside the embedding's.
#[test]
fn tied_lora_is_read_with_the_heads_tensors() -> Result<()> {
    let [tied, untied] = [true, false].map(|tied| config(json!({ "tie_word_embeddings": tied })));
    let (tied, untied) = (tied?, untied?);
    let both = [
        "model.embed_tokens.lora_embedding_A",
        "model.embed_tokens.lora_embedding_B",
        "lm_head.lora_A.weight",
        "lm_head.lora_B.weight",
    ];
    for (c, targets, ties, want) in [
        (&tied, json!(["q_proj", "embed_tokens"]), true, &both[..]),
        (&tied, json!(["q_proj", "model.embed_tokens"]), true, &both[..]),
        (&tied, json!(["q_proj", "lm_head"]), true, &both[..]),
        (&tied, json!(".*(q_proj|embed_tokens)"), true, &both[..]),
        (&tied, json!(["q_proj"]), true, &both[..0]),
        (&tied, json!(["q_proj", "embed_tokens"]), false, &both[..2]),
        (&untied, json!(["q_proj", "embed_tokens"]), true, &both[..2]),
    ] {
        let extra = json!({"target_modules": targets, "ensure_weight_tying": ties});
        let s = Selection::from_peft(c, &peft(extra)?)?;
        let tables: Vec<String> = names(&s).into_iter().filter(|n| !n.contains("self_attn")).collect();
        assert_eq!(tables, want, "{targets} {ties}");
    }
    let dir = tempfile::tempdir()?;
    let extra = |ties: bool| json!({"target_modules": ["embed_tokens"], "ensure_weight_tying": ties});
    let held = adapter(dir.path(), &tied, extra(true), &[])?;
    let s = held.selection(&tied)?;
    held.check_against(&s, &s.trained())?;
    // Neither the rule nor the file may leave the head out.
    let s = select(&tied, "[[train]]\nmodules = [\"embedding\"]\nrank = 4")?;
    let e = held.check_against(&s, &s.trained()).err().context("refused")?.to_string();
    assert!(
        e.contains("lm_head.lora_A.weight: 2 tensors") && e.contains("hint: add a [[train]] rule"),
        "{e}"
    );
    assert!(!e.contains("take it out"), "{e}");
    adapter(dir.path(), &tied, extra(false), &[])?;
    let config = Value::Object(raw(extra(true))?).to_string();
    std::fs::write(dir.path().join("adapter_config.json"), config)?;
    let e = Adapter::open(dir.path())?.selection(&tied).err().context("refused")?.to_string();
    assert!(e.contains("lm_head.lora_A.weight and 1 more tensors"), "{e}");
    Ok(())
}

/// PEFT matches suffixes, and the layers of a tower have norms of the same names.
#[test]
fn saved_modules_of_a_vision_checkpoint_have_full_names() -> Result<()> {
    let rules = "[[train]]\nmodules = [\"input_layernorm\"]\nlayers = [0]\nmethod = \"full\"\n\
                 [[train]]\nmodules = [\"head\"]\nmethod = \"full\"";
    for body in ["language_model.model", "model.language_model"] {
        let mut c = vision(false)?;
        c.body = body;
        let s = select(&c, rules)?;
        let json = config_json(&s, "base", None);
        let saved = ["model.language_model.layers.0.input_layernorm", "lm_head"];
        assert_eq!(json["modules_to_save"], json!(saved), "{body}");
        let map = json.as_object().context("an object")?;
        let back = Selection::from_peft(&c, &PeftConfig::parse("adapter_config.json".into(), map)?)?;
        assert_eq!(names(&back), names(&s), "{body}");
    }
    Ok(())
}

/// PEFT saves frozen tensors under the names of transformers 5; the base has those of its release.
#[test]
fn frozen_tensors_are_found_in_a_released_vision_checkpoint() -> Result<()> {
    let (embedding, head) = ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight");
    let nested = "model.language_model.embed_tokens.base_layer.weight";
    for (tied, names, own) in [
        (true, &[embedding][..], nested),
        (false, &[embedding, head], nested),
        (true, &[embedding], "model.embed_tokens.base_layer.weight"),
    ] {
        let (c, dir) = (vision(tied)?, tempfile::tempdir()?);
        let held = adapter(dir.path(), &c, json!({}), &["lm_head.base_layer.weight", own])?;
        let check = |value: f32| -> Result<()> {
            let t = Tensor::full(value, (c.vocab, c.hidden), &Device::Cpu)?;
            let path = dir.path().join("model.safetensors");
            let all: Vec<_> = names.iter().map(|n| ((*n).to_string(), t.clone())).collect();
            write_file(&path, &all, &[])?;
            Ok(held.check_base(&TensorFiles::open_file(&path)?, &c)?)
        };
        check(0.0)?;
        let e = check(1.0).err().context("refused")?.to_string();
        assert!(e.contains("differs from the base's language_model."), "{e}");
    }
    Ok(())
}

/// PEFT configs written for mixed rules must read back as the same rules.
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
        "[[train]]\nmodules = [\"new_tokens\"]\ntokens = [7, 0, 127]",
        "[[train]]\nmodules = [\"mlp\"]\n[[train]]\nmodules = [\"new_tokens\"]\ntokens = [3]",
    ] {
        let mut s = select(&c, rules)?;
        s.look_up(&c, None)?;
        let json = config_json(&s, "base", None);
        let map = json.as_object().context("an object")?;
        let back = Selection::from_peft(&c, &PeftConfig::parse("adapter_config.json".into(), map)?)?;
        assert!(s.tokens.modules().eq(back.tokens.modules()), "{rules}");
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

/// PyTorch's `padding_idx`; a tied table's row trains as the head's, and a score head has none.
#[test]
fn the_padding_token_in_an_untied_embedding_is_noted() -> Result<()> {
    for (tied, class, tokens, noted) in [
        (false, "Qwen3ForCausalLM", "[7, 5]", true),
        (false, "Qwen3ForCausalLM", "[7]", false),
        (true, "Qwen3ForCausalLM", "[7, 5]", false),
        (true, "Qwen3ForSequenceClassification", "[7, 5]", true),
    ] {
        let c = config(json!({"pad_token_id": 5, "tie_word_embeddings": tied, "architectures": [class]}))?;
        let mut s = select(&c, &format!("[[train]]\nmodules = [\"new_tokens\"]\ntokens = {tokens}"))?;
        s.look_up(&c, None)?;
        assert_eq!(s.notes.len(), usize::from(noted), "{class}, {tied}, {tokens}: {:?}", s.notes);
        assert!(!noted || s.notes[0].contains("train.0: tokens: 5 is the padding token"), "{:?}", s.notes);
    }
    Ok(())
}

#[test]
fn tokens_named_by_text_need_a_tokenizer() -> Result<()> {
    let c = config(json!({}))?;
    for (tokens, alone) in [("[7, 5]", true), ("[7, \"<think>\"]", false)] {
        let mut s = select(&c, &format!("[[train]]\nmodules = [\"new_tokens\"]\ntokens = {tokens}"))?;
        assert_eq!((s.tokens.are_numbers(), s.look_up(&c, None).is_ok()), (alone, alone), "{tokens}");
    }
    Ok(())
}

#[test]
fn selection_keys_of_peft_choose_its_modules() -> Result<()> {
    let c = config(json!({}))?;
    let count =
        |extra: Value| -> Result<usize> { Ok(Selection::from_peft(&c, &peft(extra)?)?.trained().len() / 2) };
    assert_eq!(count(json!({}))?, 8);
    assert_eq!(count(json!({"layers_to_transform": [0, 3]}))?, 4);
    assert_eq!(count(json!({"layers_to_transform": 1, "layers_pattern": "layers"}))?, 2);
    assert_eq!(count(json!({"layers_to_transform": 1, "layers_pattern": "model.layers"}))?, 2);
    assert_eq!(count(json!({"layers_to_transform": 1, "layers_pattern": "blocks"}))?, 0);
    assert_eq!(count(json!({"exclude_modules": ["v_proj"]}))?, 4);
    assert_eq!(count(json!({"exclude_modules": r".*\.0\..*"}))?, 6);
    assert_eq!(count(json!({"target_modules": r".*layers\.2\.self_attn\.(q|k)_proj"}))?, 2);
    // Look-around, as in ms-swift's adapters of vision checkpoints.
    assert_eq!(count(json!({"target_modules": r"^(model(?=\.).*\.(q_proj|v_proj))$"}))?, 8);
    assert_eq!(count(json!({"exclude_modules": r".*(?<!\.0\.self_attn)\.q_proj"}))?, 5);
    assert_eq!(count(json!({"target_modules": "all-linear"}))?, 4 * 7);
    let s = Selection::from_peft(
        &c,
        &peft(
            json!({"rank_pattern": {"layers.1.self_attn.q_proj": 2, r"layers\.3\.self_attn\.(?!v)\w+": 3},
                   "alpha_pattern": {"^model.layers.2.self_attn.v_proj": 32}}),
        )?,
    )?;
    let spec = |n: &str| match s.choice(n) {
        Choice::Lora { spec, .. } => (spec.rank, spec.alpha),
        _ => (0, 0.0),
    };
    assert_eq!(spec("model.layers.1.self_attn.q_proj"), (2, 8.0));
    assert_eq!(spec("model.layers.0.self_attn.q_proj"), (4, 8.0));
    assert_eq!(spec("model.layers.2.self_attn.v_proj"), (4, 32.0));
    assert_eq!(spec("model.layers.3.self_attn.q_proj"), (3, 8.0));
    assert_eq!(spec("model.layers.3.self_attn.v_proj"), (4, 8.0));
    Ok(())
}

/// A name of an expert has two numbers.
#[test]
fn layers_to_transform_are_layers_in_experts_too() -> Result<()> {
    let moe = config(
        json!({"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
    )?;
    let extra = json!({"target_modules": ["gate_proj"], "layers_to_transform": [1]});
    let names = names(&Selection::from_peft(&moe, &peft(extra)?)?);
    assert_eq!(names.len(), 6 * 2);
    assert!(names.iter().all(|name| name.starts_with("model.layers.1.")), "{names:?}");
    Ok(())
}

/// PEFT's adapters of Qwen2-MoE on transformers 5, where lists, expressions and saved modules choose no experts.
#[test]
fn experts_without_any_tensor_are_frozen_in_qwen2_moe() -> Result<()> {
    let linears = json!({"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]});
    let saved = json!({"target_modules": ["q_proj"], "modules_to_save": ["down_proj"]});
    let parameter = json!({"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]});
    let missing = "adapter_config.json chooses";
    for (family, extra, lost, want) in [
        ("qwen2_moe", linears.clone(), ".experts.", Ok(2 * (4 + 3 + 3 * 3))),
        ("qwen2_moe", json!({"target_modules": r".*\.(q|down)_proj"}), ".experts.", Ok(2 * (4 + 1 + 3))),
        ("qwen2_moe", saved, ".experts.", Ok(2 * 4 + 1 + 3)),
        ("qwen2_moe", linears.clone(), ".experts.0.", Err("and 17 more tensors")),
        ("qwen2_moe", linears.clone(), "expert", Err("shared_expert.gate_proj.lora_A.weight and 17 more")),
        ("qwen2_moe", json!({"target_modules": ["experts.0.up_proj"]}), ".experts.", Err(missing)),
        ("qwen2_moe", parameter, ".experts.", Err(missing)),
        ("qwen3_moe", linears, ".experts.", Err(missing)),
    ] {
        let shared = if family == "qwen2_moe" { 12 } else { 0 };
        let mut c = config(json!({"model_type": family, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 8, "shared_expert_intermediate_size": shared, "mlp_only_layers": [0]}))?;
        peft(extra.clone())?.set_layout(&mut c);
        let dir = tempfile::tempdir()?;
        let held = without(&adapter(dir.path(), &c, extra.clone(), &[])?, lost)?;
        match (held.selection(&c), want) {
            (Ok(s), Ok(count)) => {
                held.check_against(&s, &s.trained())?;
                assert_eq!(names(&s).len(), count, "{extra}: {:?}", names(&s));
            }
            (Err(e), Err(why)) => assert!(e.to_string().contains(why), "{family} {extra}: {e}"),
            (other, _) => panic!("{family} {extra} {lost}: {other:?}"),
        }
    }
    Ok(())
}

/// The names and shapes are those of PEFT 0.21 on transformers 5, where Mixtral's mixture is called `mlp`.
#[test]
fn parameters_of_mixtral_have_the_names_of_transformers_5() -> Result<()> {
    let extra = json!({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 1});
    let (base, dir) = (config(extra)?, tempfile::tempdir()?);
    let targets = json!({"target_modules": [],
        "target_parameters": ["experts.down_proj", "experts.gate_up_proj", "mlp.gate.weight"]});
    let mut tensors = Vec::new();
    for (module, shapes) in [
        ("experts.base_layer", [[16usize, 32], [96, 16]]),
        ("experts", [[16, 48], [32, 16]]),
        ("gate", [[4, 32], [4, 4]]),
    ] {
        for (half, shape) in ["A", "B"].iter().zip(&shapes) {
            let zeros = Tensor::zeros(&shape[..], DType::F32, &Device::Cpu)?;
            tensors.push((format!("{PREFIX}model.layers.0.mlp.{module}.lora_{half}.weight"), zeros));
        }
    }
    write_file(&dir.path().join("adapter_model.safetensors"), &tensors, &[])?;
    std::fs::write(dir.path().join("adapter_config.json"), Value::Object(raw(targets)?).to_string())?;
    let held = Adapter::open(dir.path())?;
    let c = held.config_of(base)?;
    let s = held.selection(&c)?;
    held.check_against(&s, &s.trained())?;
    // gate and up share A
    assert_eq!(s.trained().len(), 2 + 4 * (1 + 1 + 1 + 2));
    let (written, names) =
        (config_json(&s, "base", None), ["gate.weight", "experts.gate_up_proj", "experts.down_proj"]);
    assert_eq!(written["target_parameters"], json!(names.map(|name| format!("mlp.{name}"))));
    Ok(())
}

/// The name of one layer's linear is written whole: a short one would be of all layers.
#[test]
fn a_parameter_of_one_layer_is_written_with_its_whole_name() -> Result<()> {
    let (c, name) = (config(json!({}))?, "model.layers.0.self_attn.o_proj.weight");
    let s = Selection::from_peft(&c, &peft(json!({"target_modules": [], "target_parameters": [name]}))?)?;
    assert_eq!(config_json(&s, "base", None)["target_parameters"], json!([name]));
    Ok(())
}

#[test]
fn weights_of_linears_are_parameters_unless_their_modules_are_named() -> Result<()> {
    let c = config(json!({}))?;
    for (parameter, why) in [
        ("o_proj.weight", None),
        ("q_proj.weight", Some("self_attn.q_proj.weight: target_modules names it too")),
        ("experts.down_proj", Some("experts.down_proj: no parameter that ft adapts in qwen3")),
    ] {
        match (Selection::from_peft(&c, &peft(json!({"target_parameters": [parameter]}))?), why) {
            (Ok(s), None) => assert_eq!(names(&s).len(), 4 * 2 * 3),
            (Err(e), Some(why)) => {
                let e = e.to_string();
                assert!(e.contains(why) && e.contains("hint: merge it"), "{e}");
            }
            (other, _) => panic!("{parameter}: {other:?}"),
        }
    }
    Ok(())
}

/// A hint about rules is of no use to who has an adapter.
#[test]
fn dora_on_the_embedding_of_an_adapter_is_refused_with_a_hint() -> Result<()> {
    let extra = peft(json!({"target_modules": ["embed_tokens"], "use_dora": true}))?;
    let e = Selection::from_peft(&config(json!({}))?, &extra).err().context("refused")?.to_string();
    assert!(e.contains("DoRA on the embedding") && e.contains("hint: merge it"), "{e}");
    Ok(())
}

/// Look-around is matched by backtracking, with a bound.
#[test]
fn expressions_that_backtrack_too_often_are_refused_by_name() -> Result<()> {
    let (c, slow) = (config(json!({}))?, "(?=m)(?:.+)+!");
    for (key, value) in [
        ("target_modules", json!(slow)),
        ("exclude_modules", json!(slow)),
        ("rank_pattern", json!({ slow: 2 })),
        ("alpha_pattern", json!({ slow: 2 })),
    ] {
        let e = Selection::from_peft(&c, &peft(json!({ key: value }))?).err().context("refused")?.to_string();
        assert!(e.contains(&format!("{key}: ")) && e.contains("backtracking"), "{e}");
    }
    Ok(())
}

/// The bound is of all expressions of a key together; names of modules do not count.
#[test]
fn expressions_share_the_bound_of_backtracking() -> Result<()> {
    let c = config(json!({}))?;
    let patterns = |count: usize, names: usize| {
        let slow = (0..count).map(|i| (format!(r"({})Q{i}\1", ".?".repeat(7)), json!(2)));
        let names = (0..names).map(|i| (format!("model.layers.{i}.mlp"), json!(2)));
        Value::Object(slow.chain(names).collect())
    };
    for key in ["rank_pattern", "alpha_pattern"] {
        Selection::from_peft(&c, &peft(json!({ key: patterns(1, 50) }))?)?;
        let many = peft(json!({ key: patterns(200, 0) }))?;
        let e = Selection::from_peft(&c, &many).err().context("refused")?.to_string();
        assert!(e.contains(&format!("{key}: ")) && e.contains("backtracking"), "{e}");
    }
    Ok(())
}

/// Every key of PEFT's LoraConfig with the value PEFT writes when off, and values without effect on the
/// numbers.
#[test]
fn peft_keys_without_effect_on_numbers_are_accepted() -> Result<()> {
    for extra in [
        json!({"alora_invocation_tokens": null, "arrow_config": null, "kasa_config": null, "use_bdlora": null,
               "velora_config": null, "monteclora_config": null, "megatron_config": {}, "megatron_core": "megatron.core",
               "trainable_token_indices": null, "layer_replication": [], "target_parameters": [], "bias": "none",
               "fan_in_fan_out": false, "lora_bias": false, "use_qalora": false, "qalora_group_size": 16}),
        json!({"auto_mapping": {"base_model_class": "X"}, "inference_mode": true, "peft_version": "0.18.0",
               "revision": null, "runtime_config": {"ephemeral_gpu_offload": true}, "task_type": "SEQ_CLS",
               "loftq_config": {"loftq_bits": 4}, "eva_config": {"rho": 2.0}, "corda_config": {}, "lora_ga_config": {},
               "ensure_weight_tying": true, "rank_pattern": null, "alpha_pattern": {}, "layers_pattern": ""}),
        json!({"fan_in_fan_out": true}),
        json!({"init_lora_weights": false}),
        json!({"init_lora_weights": null}),
        json!({"init_lora_weights": "gaussian"}),
        json!({"init_lora_weights": "eva"}),
        json!({"init_lora_weights": "orthogonal"}),
        json!({"a_key_of_next_year": null, "another": false, "a_third": [], "a_fourth": {}}),
        json!({"lora_alpha": -8, "lora_dropout": 0.999, "use_rslora": null, "use_dora": false}),
    ] {
        let s = Selection::from_peft(&config(json!({}))?, &peft(extra.clone())?)?;
        assert_eq!(s.trained().len(), 16, "{extra}");
    }
    Ok(())
}

/// A plain list applies to the embedding, an object lists modules. Tied heads and modules trained otherwise
/// are refused.
#[test]
fn token_rows_of_a_peft_adapter_are_selected() -> Result<()> {
    let names = |tied: bool, extra: Value| -> Result<Vec<String>> {
        let s = Selection::from_peft(&config(json!({ "tie_word_embeddings": tied }))?, &peft(extra)?)?;
        Ok(names(&s).into_iter().filter(|n| !n.contains("self_attn")).collect())
    };
    let [embedding, head] =
        ["model.embed_tokens", "lm_head"].map(|m| m.to_string() + ".token_adapter.trainable_tokens_delta");
    for tied in [true, false] {
        assert_eq!(
            names(tied, json!({"trainable_token_indices": [3, 1]}))?,
            std::slice::from_ref(&embedding)
        );
        assert!(names(tied, json!({"trainable_token_indices": []}))?.is_empty());
    }
    let both = json!({"embed_tokens": [3, 1], "lm_head": [0]});
    assert_eq!(names(false, json!({"trainable_token_indices": both}))?, [embedding, head.clone()]);
    assert_eq!(names(false, json!({"trainable_token_indices": {"lm_head": [0]}}))?, [head]);
    for (tied, extra, said) in [
        (true, json!({"trainable_token_indices": both}), "tied"),
        (false, json!({"trainable_token_indices": [128]}), "none for token 128"),
        (false, json!({"trainable_token_indices": {"q_proj": [1]}}), "q_proj"),
        (false, json!({"trainable_token_indices": {"layers.0.self_attn.o_proj": [1]}}), "not built yet"),
        (
            false,
            json!({"trainable_token_indices": [1], "modules_to_save": ["embed_tokens"]}),
            "trains otherwise",
        ),
        (true, json!({"trainable_token_indices": [1], "target_modules": ["lm_head"]}), "trains otherwise"),
    ] {
        let e = names(tied, extra.clone()).err().with_context(|| extra.to_string())?.to_string();
        assert!(
            e.contains("adapter_config.json: trainable_token_indices") && e.contains(said),
            "{extra}: {e}"
        );
    }
    Ok(())
}

#[test]
fn keys_and_values_that_change_numbers_are_refused_by_name() {
    for (key, values) in [
        ("peft_type", json!(["LOHA", "lora", null, 3])),
        ("task_type", json!(["causal", 1, true])),
        ("bias", json!(["all", "lora_only", "NONE", false, 0])),
        ("fan_in_fan_out", json!(["false", 0])),
        ("lora_bias", json!([true, 1])),
        ("layer_replication", json!([[[0, 4]], "x", false])),
        ("target_parameters", json!([[1], "x"])),
        (
            "trainable_token_indices",
            json!([[-1], [1, 1], ["1"], {"embed_tokens": 1}, {"embed_tokens": [1.5]}, 1, "x"]),
        ),
        // an empty list enables activated LoRA
        ("alora_invocation_tokens", json!([[1], [], {}, false])),
        ("arrow_config", json!([{}, false, {"top_k": 3}])),
        ("use_bdlora", json!([{}, true])),
        ("kasa_config", json!([{}, {"beta": 1.0}])),
        ("monteclora_config", json!([{"num_samples": 8}])),
        ("velora_config", json!([{}])),
        ("use_qalora", json!([true, "true", 1])),
        ("qalora_group_size", json!(["16", -1, 1.5])),
        ("megatron_config", json!([{"x": 1}, true])),
        ("megatron_core", json!([1])),
        ("inference_mode", json!(["true", 1])),
        ("auto_mapping", json!([[1], "x"])),
        ("base_model_name_or_path", json!([3, ["x"], false])),
        ("revision", json!([3, true])),
        ("loftq_config", json!([[1], "x", 4])),
        ("ensure_weight_tying", json!(["true", 1])),
        // PEFT changes the base while loading these, or cannot load them
        (
            "init_lora_weights",
            json!([
                "pissa",
                "pissa_niter_16",
                "PiSSA",
                "olora",
                "OLoRA",
                "loftq",
                "corda",
                "lora_ga",
                "mica",
                "default",
                "true",
                "",
                1,
                0,
                [],
                {}
            ]),
        ),
        ("use_rslora", json!(["true", "false", 1, 0, "", [], {}])),
        ("use_dora", json!(["true", 1, 0.0])),
        (
            "alpha_pattern",
            json!([[], [1], "x", 3, false, {"q_proj": "8"}, {"q_proj": 0}, {"q_proj": null},
            {"q_proj": 1e300}, {"none_such": true}, {"(": 8}]),
        ),
        (
            "rank_pattern",
            json!([[], "x", {"q_proj": 0}, {"q_proj": -1}, {"q_proj": 4.0}, {"q_proj": 70000},
            {"none_such": "4"}, {"(?=x": 4}]),
        ),
        ("r", json!([0, -1, 4.0, 4.5, "4", null, true, 1e6, 70000, 99999999999999999999u128.to_string()])),
        ("lora_alpha", json!(["8", null, true, 0, 1e300, -1e300, 1e-300])),
        ("lora_dropout", json!([1, 1.0, 2, -1, -0.1, "0.1", null, true])),
        ("target_modules", json!([null, 3, [3], {}, ["q_proj", null], "(", "q_proj(?!x"])),
        ("exclude_modules", json!([3, [3], {}, "("])),
        ("layers_to_transform", json!([-1, [-1], [0, -1], "0", ["0"], 1.5, [1.0], [true], {}])),
        ("layers_pattern", json!(["layers", ["layers"], 3, [3]])),
        ("modules_to_save", json!(["lm_head", 3, [3], {"lm_head": 1}, false])),
        ("a_key_of_next_year", json!([2, true, "on", [0], {"x": 1}])),
    ] {
        for value in values.as_array().into_iter().flatten() {
            let e = peft(json!({ key: value })).map(|_| ()).map_err(|e| e.to_string());
            let named = |e: &String| e.contains(&format!("adapter_config.json: {key}"));
            assert!(e.as_ref().is_err_and(named), "{key} = {value}: {e:?}");
        }
    }
    // PEFT refuses them with a regular expression
    for (key, value) in [("layers_to_transform", json!([0])), ("layers_pattern", json!(["layers"]))] {
        let e = peft(json!({"target_modules": ".*q_proj", key: value})).err().map(|e| e.to_string());
        assert!(e.as_ref().is_some_and(|e| e.contains(key)), "{e:?}");
    }
    let text = "{\"peft_type\": \"LORA\", \"r\": 4,\n \"target_modules\": [\"q_proj\"], \"r\": 8}";
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::write(dir.path().join("adapter_config.json"), text).expect("written");
    let e = PeftConfig::load(dir.path()).expect_err("a key stands twice").to_string();
    assert!(e.contains("adapter_config.json: the key \"r\" is there twice") && e.contains("line 2"), "{e}");
}

/// The first matching pattern wins, whether a full name or a regular expression.
#[test]
fn the_first_matching_pattern_wins() -> Result<()> {
    let name = "model.layers.1.self_attn.q_proj";
    for (patterns, want) in [
        (json!({"q_proj": 2, r"^model\.layers\.1\.self_attn\.q_proj": 3}), 2),
        (json!({r"^model\.layers\.1\.self_attn\.q_proj": 3, "q_proj": 2}), 3),
        (json!({r"^model\.layers\.2\.self_attn\.q_proj": 3, "layers.1.self_attn.q_proj": 5}), 5),
        (json!({"proj": 2, "_proj": 3}), 4),
    ] {
        let spec = peft(json!({"rank_pattern": patterns}))?.spec(&[name.into()])?;
        assert_eq!(spec.rank, want, "{patterns}");
    }
    Ok(())
}

#[test]
fn empty_layers_and_exclude_keywords_of_peft_exclude_nothing() -> Result<()> {
    let c = config(json!({}))?;
    for extra in [
        json!({"layers_to_transform": []}),
        json!({"exclude_modules": "all-linear"}),
        json!({"exclude_modules": ""}),
    ] {
        assert_eq!(Selection::from_peft(&c, &peft(extra.clone())?)?.trained().len(), 16, "{extra}");
    }
    Ok(())
}

#[test]
fn layers_and_experts_that_the_model_lacks_are_named() -> Result<()> {
    let dense = config(json!({}))?;
    let moe = config(
        json!({"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
    )?;
    for (c, rule, note) in [
        (&dense, "layers = \"0-40\"", Some("layers: 4-40 are not there: this model has layers 0-3")),
        (&dense, "layers = \"2-4\"", Some("layers: 4 is not there")),
        (&dense, "layers = \"-40:\"", Some("the last 40")),
        (&dense, "layers = \"2-\"", None),
        (&dense, "layers = \"0-3\"", None),
        (&dense, "layers = \"-4:\"", None),
        (&moe, "experts = \"4-9\"", Some("experts: 6-9 are not there: this model has experts 0-5")),
        (&moe, "experts = \"all\"", None),
    ] {
        let group = if rule.starts_with("experts") { "experts" } else { "attention" };
        let s = select(c, &format!("[[train]]\nmodules = [\"{group}\"]\n{rule}"))?;
        match note {
            Some(note) => assert!(s.notes.len() == 1 && s.notes[0].contains(note), "{rule}: {:?}", s.notes),
            None => assert!(s.notes.is_empty(), "{rule}: {:?}", s.notes),
        }
    }
    for (c, rule, why) in [
        (&dense, "layers = [77]", "layers: 77 is not there"),
        (&dense, "layers = 77", "layers: 77 is not there"),
        (&dense, "layers = [0, 77, 4]", "layers: 77, 4 are not there"),
        (&dense, "layers = \"77\"", "layers: 77 is not there"),
        (&dense, "layers = \"4-\"", "layers: 4 is not there"),
        (&dense, "layers = \"24-30\"", "layers: 24-30 is not there"),
        (&moe, "experts = [0, 6]", "experts: 6 is not there"),
        (&moe, "experts = \"6-\"", "experts: 6 is not there"),
    ] {
        let group = if rule.starts_with("experts") { "experts" } else { "attention" };
        let e = select(c, &format!("[[train]]\nmodules = [\"{group}\"]\n{rule}")).err().context("refused")?;
        assert!(e.to_string().contains(why) && e.to_string().contains("groups are"), "{rule}: {e}");
    }
    Ok(())
}

/// Combinations unsupported by PEFT are refused before training; supported ones read back.
#[test]
fn lora_on_the_embedding_goes_with_dropout_elsewhere_and_not_with_dora() -> Result<()> {
    let c = config(json!({}))?;
    let rules = |other: &str| {
        format!("[[train]]\nmodules = [\"mlp\"]\n{other}\n[[train]]\nmodules = [\"embedding\"]\n")
    };
    let with_dora = rules("dora = true");
    let on_both = with_dora.clone() + "dora = true";
    for (rules, why) in [(&with_dora, "embed_tokens beside DoRA"), (&on_both, "DoRA on the embedding")] {
        let e = select(&c, rules).err().context("refused")?.to_string();
        assert!(
            e.contains(why) && e.contains("hint: dora = false in all rules, or the embedding with"),
            "{e}"
        );
    }
    select(&c, &(with_dora + "method = \"full\""))?;
    let s = select(&c, &rules("dropout = 0.1"))?;
    let json = config_json(&s, "base", None);
    let map = json.as_object().context("an object")?;
    let back = Selection::from_peft(&c, &PeftConfig::parse("adapter_config.json".into(), map)?)?;
    assert_eq!(names(&back), names(&s));
    match back.choice("model.embed_tokens") {
        Choice::Lora { spec, .. } => assert_eq!(spec.dropout, 0.0),
        other => panic!("{other:?}"),
    }
    Ok(())
}
