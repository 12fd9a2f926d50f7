//! Overrides of rotary embeddings.

use super::*;
use crate::model::config::rope::{Rope, Scaling};

/// A config with overrides: its embeddings, and the text model in its file, read again.
fn overridden(raw: Value, set: Value) -> Result<(Config, Value)> {
    let c = Config::overridden("config.json", object(&raw), &object(&set))?;
    assert_eq!(Config::parse("config.json", c.raw.clone())?.ropes, c.ropes, "{:?}", c.raw);
    let text = c.raw.get(Config::TEXT).cloned().unwrap_or_else(|| c.raw.clone().into());
    Ok((c, text))
}

fn refused(raw: Value, set: Value) -> String {
    error_of(overridden(raw, set).map(|(c, _)| c))
}

fn yarn() -> Value {
    json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
}

fn is_yarn(c: &Config, by: f64) -> bool {
    matches!(c.ropes[0].scaling, Scaling::Yarn { factor, .. } if factor == by)
}

#[test]
fn a_new_scaling_keeps_the_base() -> Result<()> {
    let parameters = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6});
    let (c, text) = overridden(json!({"model_type": "qwen3", "rope_parameters": parameters}), yarn())?;
    assert!(is_yarn(&c, 4.0) && c.ropes[0].theta == 1e6);
    assert_eq!(text["rope_parameters"], json!({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}));
    assert!(text.get("rope_scaling").is_none());
    Ok(())
}

#[test]
fn a_new_scaling_keeps_the_share_that_rotates() -> Result<()> {
    let parameters = json!({"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1], "mrope_interleaved": true});
    let text = json!({"model_type": "qwen3_5_text", "rope_parameters": parameters});
    let (c, text) = overridden(json!({"model_type": "qwen3_5", "text_config": text}), yarn())?;
    assert!(is_yarn(&c, 4.0) && (c.ropes[0].theta, c.ropes[0].dim) == (1e7, 128));
    assert_eq!(text["rope_parameters"]["mrope_section"], json!([1, 1]));
    Ok(())
}

#[test]
fn a_new_scaling_is_of_full_layers() -> Result<()> {
    for family in ["gemma3_text", "olmo3", "gemma4_text"] {
        let full = json!({"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6});
        let sliding = json!({"rope_type": "default", "rope_theta": 2e4});
        let parameters = json!({"full_attention": full, "sliding_attention": sliding});
        let (c, text) = overridden(json!({"model_type": family, "rope_parameters": parameters}), yarn())?;
        assert!(is_yarn(&c, 4.0), "{family}");
        assert_eq!((c.ropes[0].theta, c.ropes[1].theta), (2e6, 2e4), "{family}");
        assert_eq!(c.ropes[1].scaling, Scaling::Default, "{family}");
        assert!(text.get("rope_scaling").is_none(), "{family}");
    }
    Ok(())
}

/// The released table of Gemma 4 rotates a quarter of the channels, which only its own type does.
#[test]
fn a_scaling_of_all_channels_is_refused_with_a_share() -> Result<()> {
    let raw = json!({"model_type": "gemma4_text"});
    let e = refused(raw.clone(), yarn());
    assert!(e.contains("partial_rotary_factor"), "{e}");
    let whole = json!({"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 1.0});
    assert!(is_yarn(&overridden(raw, json!({"rope_scaling": whole}))?.0, 4.0));
    Ok(())
}

/// A file with both tables: the one in effect changes, and stands in both places.
#[test]
fn a_new_scaling_is_in_the_table_in_effect() -> Result<()> {
    let scaling = json!({"type": "linear", "factor": 2.0, "rope_theta": 3e5});
    let parameters = json!({"rope_type": "linear", "factor": 3.0, "rope_theta": 7e5});
    let raw = json!({"model_type": "llama", "rope_scaling": scaling, "rope_parameters": parameters});
    let (c, text) = overridden(raw, yarn())?;
    assert!(is_yarn(&c, 4.0) && c.ropes[0].theta == 3e5);
    assert_eq!(text["rope_scaling"], json!({"rope_type": "yarn", "factor": 4.0, "rope_theta": 3e5}));
    assert_eq!(text["rope_parameters"], text["rope_scaling"]);
    Ok(())
}

#[test]
fn a_new_base_is_the_one_in_effect() -> Result<()> {
    let set = json!({"rope_theta": 4e6, "rope_local_base_freq": 5e4});
    let scaling = json!({"type": "linear", "factor": 2.0, "rope_theta": 3e5});
    let (c, _) =
        overridden(json!({"model_type": "llama", "rope_scaling": scaling}), json!({"rope_theta": 4e6}))?;
    assert_eq!(c.ropes[0].theta, 4e6);
    let by_type = json!({"full_attention": {"rope_type": "default", "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}});
    for raw in [
        json!({"model_type": "gemma4_text"}),
        json!({"model_type": "gemma3_text"}),
        json!({"model_type": "gemma3_text", "rope_parameters": by_type}),
    ] {
        let (c, _) = overridden(raw, set.clone())?;
        assert_eq!((c.ropes[0].theta, c.ropes[1].theta), (4e6, 5e4), "{:?}", c.raw);
    }
    Ok(())
}

#[test]
fn a_factor_without_a_type_is_refused() {
    let e = refused(json!({"model_type": "llama"}), json!({"rope_scaling": {"factor": 4.0}}));
    assert!(e.contains("rope_scaling.factor"), "{e}");
}

/// transformers ignores the factor of a file, in a table by layer type too.
#[test]
fn a_factor_without_a_type_in_a_file_is_noted() -> Result<()> {
    let table = json!({"rope_type": "default", "factor": 8.0, "rope_theta": 1e6});
    let by_type = json!({"full_attention": {"rope_theta": 1e6}, "sliding_attention": table});
    for (family, parameters, path) in [
        ("qwen3", table, "rope_parameters.factor: "),
        ("gemma3_text", by_type, "rope_parameters.sliding_attention.factor: "),
    ] {
        let raw = json!({"model_type": family, "rope_parameters": parameters});
        let (c, _) = overridden(raw, json!({"rope_theta": 4e6}))?;
        assert!(c.ropes.iter().all(|r| r.scaling == Scaling::Default), "{family}");
        assert!(c.notes.len() == 1 && c.notes[0].starts_with(path), "{family}: {:?}", c.notes);
        let e = refused(json!({"model_type": family}), json!({"rope_parameters": parameters}));
        assert!(e.contains(path), "{family}: {e}");
    }
    Ok(())
}

/// A file's empty table is an absent one. In an override it would change nothing.
#[test]
fn an_empty_scaling_is_refused() -> Result<()> {
    let raw = json!({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}});
    let e = refused(raw.clone(), json!({"rope_scaling": {}}));
    assert!(e.contains("rope_scaling: {}") && e.contains("rope_type = \"default\""), "{e}");
    let (c, _) = overridden(raw, json!({"rope_scaling": {"rope_type": "default"}}))?;
    assert_eq!(c.ropes[0].scaling, Scaling::Default);
    Ok(())
}

/// A file of transformers 4 keeps its spelling, and a base in its table.
#[test]
fn a_new_scaling_stays_in_the_table_of_the_file() -> Result<()> {
    let before = json!({"type": "linear", "factor": 2.0, "rope_theta": 3e5});
    let raw = json!({"model_type": "llama", "rope_theta": 5e5, "rope_scaling": before});
    let (c, text) = overridden(raw, json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}))?;
    assert!(is_yarn(&c, 4.0) && c.ropes[0].theta == 3e5);
    assert_eq!(text["rope_scaling"], json!({"type": "yarn", "factor": 4.0, "rope_theta": 3e5}));
    assert!(text.get("rope_parameters").is_none());
    Ok(())
}

#[test]
fn a_scaling_without_a_type_changes_the_one_there_is() -> Result<()> {
    let parameters = json!({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6});
    let raw = json!({"model_type": "qwen3", "rope_parameters": parameters});
    assert!(is_yarn(&overridden(raw, json!({"rope_scaling": {"factor": 8.0}}))?.0, 8.0));
    Ok(())
}

#[test]
fn a_new_base_is_in_the_table() -> Result<()> {
    let parameters = json!({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6});
    let raw = json!({"model_type": "qwen3", "rope_parameters": parameters});
    let (c, _) = overridden(raw, json!({"rope_theta": 4e6}))?;
    assert!(is_yarn(&c, 2.0) && c.ropes[0].theta == 4e6);
    Ok(())
}

#[test]
fn a_new_table_replaces_both() -> Result<()> {
    let raw =
        json!({"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}});
    let set = json!({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 7e5}});
    let (c, text) = overridden(raw, set)?;
    assert!(is_yarn(&c, 4.0) && c.ropes[0].theta == 7e5 && text.get("rope_scaling").is_none());
    Ok(())
}

/// In a table of the file too, a wrong value is said to be the override's.
#[test]
fn a_wrong_scaling_is_named_as_an_override() {
    let raw = json!({"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}});
    let e = refused(raw, json!({"rope_scaling": {"rope_type": "yarn", "factor": -1}}));
    assert!(e.contains("model.override"), "{e}");
}

/// transformers does not read it beside the parameters by layer type of this family.
#[test]
fn a_scaling_that_nothing_reads_is_refused() {
    let raw = json!({"model_type": "gemma4_text", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}});
    let e = refused(raw, json!({}));
    assert!(e.contains("rope_scaling"), "{e}");
}

/// The classes of other families have their own base for sliding layers.
#[test]
fn a_local_base_in_a_file_is_read_for_gemma_3_alone() -> Result<()> {
    for (family, theta, told) in [("gemma3_text", 5e4, 0), ("olmo3", 5e5, 1), ("gemma4_text", 1e4, 1)] {
        let raw = json!({"model_type": family, "rope_local_base_freq": 5e4});
        let (c, _) = overridden(raw, json!({}))?;
        assert_eq!((c.ropes[1].theta, c.notes.len()), (theta, told), "{family}: {:?}", c.notes);
        assert!(c.notes.iter().all(|n| n.starts_with("rope_local_base_freq: ")), "{:?}", c.notes);
    }
    Ok(())
}

/// In its table, transformers reads it for every family with two embeddings.
#[test]
fn a_new_local_base_is_in_the_table_of_sliding_layers() -> Result<()> {
    let set = json!({"rope_local_base_freq": 5e4});
    for mut raw in [json!({}), yarn()] {
        raw["model_type"] = json!("olmo3");
        let (c, text) = overridden(raw, set.clone())?;
        assert_eq!((c.ropes[0].theta, c.ropes[1].theta, c.notes.len()), (5e5, 5e4, 0));
        assert_eq!(text["rope_parameters"]["sliding_attention"]["rope_theta"], json!(5e4));
    }
    let e = refused(json!({"model_type": "llama"}), set);
    assert!(e.contains("rope_local_base_freq: 50000.0 has no effect") && e.contains("model.override"), "{e}");
    Ok(())
}

/// transformers 4 scales by it, 5 has `rope_type` default of the class.
#[test]
fn a_type_without_rope_type_is_refused_with_two_embeddings() -> Result<()> {
    let former = json!({"type": "linear", "factor": 8.0});
    for family in ["gemma3_text", "olmo3"] {
        let raw = json!({"model_type": family, "rope_scaling": former});
        let e = refused(raw.clone(), json!({}));
        assert!(e.contains("rope_scaling.type: linear; ") && e.contains("rope_type = \"linear\""), "{e}");
        for set in [json!({"rope_type": "linear", "factor": 8.0}), former.clone()] {
            let (c, _) = overridden(raw.clone(), json!({"rope_scaling": set}))?;
            assert_eq!(c.ropes[0].scaling, Scaling::Linear { factor: 8.0 }, "{family}: {set}");
        }
        let (c, _) = overridden(json!({"model_type": family, "rope_scaling": {"factor": 8.0}}), json!({}))?;
        assert!(c.ropes[0].scaling == Scaling::Default && c.notes.len() == 1, "{family}: {:?}", c.notes);
    }
    Ok(())
}

/// In files they are noted, in overrides refused.
#[test]
fn keys_that_no_class_with_two_embeddings_reads_are_told() -> Result<()> {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "truncate": false});
    let by_type = json!({"full_attention": yarn, "sliding_attention": {"rope_type": "default"}});
    let shared = json!({"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default"}});
    for (key, value, path) in [
        ("rope_scaling", yarn, "rope_scaling.truncate: "),
        ("rope_parameters", by_type, "rope_parameters.full_attention.truncate: "),
        ("rope_parameters", shared, "rope_parameters.full_attention.partial_rotary_factor: "),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor: "),
        ("original_max_position_embeddings", json!(512), "original_max_position_embeddings: "),
        ("rope_theta", json!(7e5), ""),
    ] {
        for family in ["gemma3_text", "olmo3"] {
            let (c, _) = overridden(json!({"model_type": family, key: value}), json!({}))?;
            let told: Vec<bool> = c.notes.iter().map(|n| n.starts_with(path)).collect();
            assert_eq!(told, vec![true; usize::from(!path.is_empty())], "{family}: {key}: {:?}", c.notes);
            let e = refused(json!({"model_type": family}), json!({ key: value }));
            let is_told = e.contains("has no effect") && e.contains("model.override");
            assert_eq!(is_told, !path.is_empty(), "{family}: {key}: {e}");
        }
    }
    Ok(())
}

/// Where the tables have a base, transformers does not read the one at the top level.
#[test]
fn a_base_beside_one_in_the_table_is_told() -> Result<()> {
    let raw = json!({"model_type": "qwen3", "rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6}});
    let (c, _) = overridden(raw, json!({}))?;
    assert!(c.ropes[0].theta == 1e6 && c.notes.len() == 1, "{:?}", c.notes);
    assert!(c.notes[0].starts_with("rope_theta: "), "{:?}", c.notes);
    Ok(())
}

/// The share at the top level is that of tables without one.
#[test]
fn a_share_at_the_top_level_is_read() -> Result<()> {
    let by_type = json!({"full_attention": {"rope_type": "proportional", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}});
    let raw = json!({"model_type": "gemma4_text", "rope_parameters": by_type, "partial_rotary_factor": 0.25});
    let (c, _) = overridden(raw, json!({}))?;
    assert_eq!(c.ropes[0].scaling, Scaling::Proportional { factor: 1.0, share: 0.25 });
    let mut raw = yarn();
    raw["model_type"] = json!("gemma3_text");
    raw["partial_rotary_factor"] = json!(0.25);
    let e = refused(raw, json!({}));
    assert!(e.contains("config.json: partial_rotary_factor: 0.25; 1 is wanted"), "{e}");
    Ok(())
}

#[test]
fn errors_name_the_table_that_has_the_key() {
    let by_type = |base: f64| {
        json!({"full_attention": {"rope_type": "default", "rope_theta": base},
            "sliding_attention": {"rope_type": "default"}})
    };
    let linear = |factor: f64| json!({"rope_type": "linear", "factor": factor});
    for (raw, path) in [
        (
            json!({"model_type": "gemma3_text", "rope_parameters": by_type(0.5), "rope_scaling": linear(8.0)}),
            ": rope_parameters.full_attention.rope_theta: ",
        ),
        (
            json!({"model_type": "gemma3_text", "rope_parameters": by_type(1e6), "rope_scaling": linear(-1.0)}),
            ": rope_scaling.factor: ",
        ),
        (
            json!({"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear"}}),
            ": rope_scaling.factor: missing",
        ),
        (
            json!({"model_type": "gemma4_text", "rope_theta": 1e6, "rope_parameters": by_type(1e6)}),
            ": rope_parameters.sliding_attention.rope_theta: missing",
        ),
        (
            json!({"model_type": "phi3", "rope_parameters": linear(2.0)}),
            ": rope_parameters.rope_type: linear; ",
        ),
        (json!({"model_type": "phi3", "rope_scaling": {"type": "yarn"}}), ": rope_scaling.type: yarn; "),
        (
            json!({"model_type": "llama", "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}),
            ": rope_scaling.rope_type: proportional; ",
        ),
        (
            json!({"model_type": "llama", "partial_rotary_factor": 0.5, "rope_parameters": linear(2.0)}),
            ": partial_rotary_factor: 64 of 128 channels; llama rotates all",
        ),
        (
            json!({"model_type": "olmo3", "rope_scaling": {"rope_type": "longrope"}}),
            ": rope_scaling.rope_type: longrope; olmo3 is built with default, dynamic, linear, llama3, proportional",
        ),
    ] {
        let e = refused(raw.clone(), json!({}));
        assert!(e.contains(path), "{raw}: {e}");
    }
}

/// The logarithm of a length of 1 is a divisor of the attention factor.
#[test]
fn longrope_wants_a_length_above_1() -> Result<()> {
    let factors = vec![1.0; 48];
    let of = |table: Option<usize>, top: Option<usize>| {
        json!({"model_type": "phi3", "original_max_position_embeddings": top, "rope_scaling": {
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors,
            "original_max_position_embeddings": table}})
    };
    overridden(of(Some(2), None), json!({}))?;
    for (table, top, path) in
        [(Some(1), None, ": rope_scaling.original_max"), (Some(8), Some(1), ": original_max")]
    {
        let e = refused(of(table, top), json!({}));
        assert!(e.contains(path) && e.contains(": 1; 2 or more is wanted"), "{e}");
    }
    Ok(())
}

/// Each type of scaling reads keys of its own; the others are noted in files, and refused in overrides.
#[test]
fn keys_of_other_types_are_told() -> Result<()> {
    let flat = json!({"rope_type": "yarn", "factor": 4.0});
    for (family, key, table, path) in [
        ("llama", "rope_scaling", json!({"original_max_position_embeddings": 64}), "original_max"),
        ("llama", "rope_scaling", json!({"rope_type": "default", "beta_fast": 16}), "beta_fast"),
        ("qwen3", "rope_parameters", json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (
            "llama",
            "rope_scaling",
            json!({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}),
            "original_max",
        ),
        (
            "llama",
            "rope_scaling",
            json!({"rope_type": "linear", "factor": 4.0, "attention_factor": 1.5}),
            "attention_factor",
        ),
        (
            "gemma3_text",
            "rope_scaling",
            json!({"rope_type": "yarn", "factor": 4.0, "low_freq_factor": 1.0}),
            "low_freq_factor",
        ),
        (
            "qwen3",
            "rope_scaling",
            json!({"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "attention_factor": 1.5}),
            "attention_factor",
        ),
        ("gemma3_text", "rope_parameters", json!({"factor": 4.0}), "factor"),
    ] {
        let (c, _) = overridden(json!({"model_type": family, key: table}), json!({}))?;
        let told = c.notes.len() == 1 && c.notes[0].starts_with(&format!("{key}.{path}"));
        assert!(told, "{family}: {table}: {:?}", c.notes);
        let e = refused(json!({"model_type": family}), json!({ key: table }));
        assert!(e.contains(&format!(".{path}")) && e.contains("has no effect"), "{family}: {table}: {e}");
    }
    let e = refused(json!({"model_type": "gemma3_text"}), json!({"rope_parameters": flat}));
    assert!(e.contains("rope_parameters.factor: 4.0 has no effect"), "{e}");
    // A key of the file, beside an override that is put into the tables of the layer types.
    let file = json!({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e6}});
    let (c, _) = overridden(file, json!({"rope_theta": 2e6}))?;
    assert_eq!(c.ropes[0].theta, 2e6);
    assert!(c.notes[0].starts_with("rope_parameters.rope_theta: 1000000.0 has no effect"), "{:?}", c.notes);
    Ok(())
}

/// A document beyond `max_position_embeddings` has frequencies by its length, in a packed row too.
#[test]
fn dynamic_has_the_frequencies_of_transformers() -> anyhow::Result<()> {
    let mut compared = 0;
    for case in &cases()? {
        let Some(want) = case["want"]["frequencies"].as_array() else { continue };
        let rope = read(&case["config"])?.ropes.swap_remove(0);
        let positions: Vec<u32> = (0..20).chain(0..90).collect();
        let [_, sin] = rope.values(&positions, &[20, 90]);
        let row = |i: usize| &sin[i * want.len()..(i + 1) * want.len()];
        let plain = Rope { scaling: Scaling::Default, ..rope.clone() };
        assert_eq!(row(1), plain.values(&[1], &[20])[1], "{}", case["name"]);
        for (sin, want) in row(21).iter().zip(want) {
            let want = want.as_f64().unwrap_or(0.0).sin();
            assert!((f64::from(*sin) - want).abs() <= 1e-6 * want, "{}: {sin}, {want}", case["name"]);
        }
        compared += 1;
    }
    assert!(compared > 0);
    Ok(())
}

#[test]
fn two_values_of_a_base_in_an_override_are_refused() -> Result<()> {
    let set =
        |top: f64| json!({"rope_theta": top, "rope_scaling": {"rope_type": "default", "rope_theta": 5e5}});
    assert_eq!(overridden(json!({"model_type": "llama"}), set(5e5))?.0.ropes[0].theta, 5e5);
    let whole = json!({"rope_theta": 500_000, "rope_scaling": {"rope_type": "default", "rope_theta": 5e5}});
    overridden(json!({"model_type": "llama"}), whole)?;
    let e = refused(json!({"model_type": "llama"}), set(4e6));
    assert!(e.contains("rope_theta: 4000000.0; model.override's rope_scaling has another: 500000.0"), "{e}");
    Ok(())
}

#[test]
fn a_value_of_the_file_is_not_said_to_be_an_override() {
    let linear = json!({"rope_type": "linear", "factor": -1});
    for (key, set) in [
        ("rope_scaling", json!({"rope_theta": 4e6})),
        ("rope_parameters", json!({"rope_scaling": {"attention_factor": 1.0}})),
    ] {
        let e = refused(json!({"model_type": "llama", key: linear}), set);
        assert!(e.contains(&format!("{key}.factor: -1; ")) && !e.contains("model.override"), "{e}");
    }
}

/// As in transformers, which fails only where a scaling wants an absent table.
#[test]
fn absent_tables_of_layer_types_are_the_default() -> Result<()> {
    for family in ["gemma3_text", "olmo3"] {
        let whole = overridden(json!({"model_type": family}), json!({}))?.0.ropes;
        for tables in [
            json!({}),
            json!({"full_attention": null}),
            json!({"full_attention": {"rope_type": "default"}}),
            json!({"sliding_attention": {"rope_type": "default"}}),
        ] {
            let (c, _) = overridden(json!({"model_type": family, "rope_parameters": tables}), json!({}))?;
            assert_eq!(c.ropes, whole, "{family}: {tables}");
        }
        let mut raw = yarn();
        (raw["model_type"], raw["rope_parameters"]) = (json!(family), json!({}));
        let e = refused(raw, json!({}));
        assert!(e.contains("full_attention: missing"), "{family}: {e}");
    }
    let e = refused(json!({"model_type": "gemma4_text", "rope_parameters": {}}), json!({}));
    assert!(e.contains("full_attention: missing"), "{e}");
    Ok(())
}

#[test]
fn su_is_a_name_of_longrope_for_phi_3_alone() -> Result<()> {
    let factors = vec![1.0; 48];
    let of = |family: &str| {
        json!({"model_type": family, "head_dim": 96, "rope_scaling": {"type": "su",
            "short_factor": factors, "long_factor": factors, "original_max_position_embeddings": 64}})
    };
    assert!(matches!(overridden(of("phi3"), json!({}))?.0.ropes[0].scaling, Scaling::Long { .. }));
    let e = refused(of("llama"), json!({}));
    assert!(e.contains(": rope_scaling.type: su; llama is built with"), "{e}");
    Ok(())
}

#[test]
fn an_odd_head_size_of_full_layers_is_named() {
    let e = refused(json!({"model_type": "gemma4_text", "global_head_dim": 15}), json!({}));
    assert!(e.contains(": global_head_dim: "), "{e}");
}

/// An empty table is an absent one, as for other families.
#[test]
fn an_empty_scaling_in_a_file_is_ignored() -> Result<()> {
    for family in ["gemma4_text", "gemma3_text", "llama"] {
        let (c, _) = overridden(json!({"model_type": family, "rope_scaling": {}}), json!({}))?;
        assert_eq!(c.ropes, overridden(json!({"model_type": family}), json!({}))?.0.ropes, "{family}");
    }
    Ok(())
}
