//! Overrides of rotary embeddings.

use super::*;
use crate::model::config::rope::Scaling;

/// A config with overrides: its embeddings, and the text model in its file, read again.
fn overridden(raw: Value, set: Value) -> Result<(Config, Value)> {
    let [raw, set] = [raw, set].map(|v| v.as_object().cloned().unwrap_or_default());
    let c = Config::overridden("config.json", raw, &set)?;
    assert_eq!(Config::parse("config.json", c.raw.clone())?.ropes, c.ropes, "{:?}", c.raw);
    let text = c.raw.get(Config::TEXT).cloned().unwrap_or_else(|| c.raw.clone().into());
    Ok((c, text))
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
    let e = overridden(raw.clone(), yarn()).map(|_| ()).map_err(|e| e.to_string());
    assert!(e.as_ref().is_err_and(|e| e.contains("partial_rotary_factor")), "{e:?}");
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
    let set = json!({"rope_scaling": {"factor": 4.0}});
    let e = overridden(json!({"model_type": "llama"}), set).map(|_| ()).map_err(|e| e.to_string());
    assert!(e.as_ref().is_err_and(|e| e.contains("rope_scaling.factor")), "{e:?}");
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
    let e = overridden(raw, json!({"rope_scaling": {"rope_type": "yarn", "factor": -1}})).map(|_| ());
    let e = e.map_err(|e| e.to_string());
    assert!(e.as_ref().is_err_and(|e| e.contains("model.override")), "{e:?}");
}

/// transformers does not read it beside the parameters by layer type of this family.
#[test]
fn a_scaling_that_nothing_reads_is_refused() {
    let raw = json!({"model_type": "gemma4_text", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}});
    let e = overridden(raw, json!({})).map(|_| ()).map_err(|e| e.to_string());
    assert!(e.as_ref().is_err_and(|e| e.contains("rope_scaling")), "{e:?}");
}
