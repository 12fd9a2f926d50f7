//! Keys that a config lacks: transformers' config classes have defaults for them.

use super::family::{Family, LOCAL};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::sync::LazyLock;

/// Defaults by `model_type`, of the keys read by `ft`. `tests/fixtures/make_configs.py` writes the file; a test below
/// requires a row for every family.
static CLASSES: LazyLock<HashMap<String, Map<String, Value>>> =
    LazyLock::new(|| serde_json::from_str(include_str!("classes.json")).unwrap_or_default());

/// Names of the number of experts. transformers 5.19 and later write the second for some families of the first.
pub(super) const EXPERT_COUNTS: [&str; 2] = ["num_experts", "num_local_experts"];

/// The keys of a text model, with the class's defaults for absent keys, and for [`LOCAL`] if the class does not read
/// it. A null stays, unless the default is a table or the class takes numbers alone.
pub(super) fn completed(family: &Family, raw: &Map<String, Value>) -> Map<String, Value> {
    let class = CLASSES.get(family.model_type).into_iter().flatten();
    let absent = class.filter(|(key, _)| is_default(family, raw, key));
    let mut all = raw.clone();
    all.extend(absent.map(|(key, default)| (key.clone(), default.clone())));
    all
}

/// Whether a key of a text model has the class's default.
pub(super) fn is_default(family: &Family, raw: &Map<String, Value>, key: &str) -> bool {
    let Some(default) = default_of(family, key) else { return false };
    let fills_null = default.is_object() || takes_no_null(family, key);
    let is_read = key != LOCAL || family.reads.contains(&LOCAL);
    let is_there = |name: &&str| is_read && raw.get(*name).is_some_and(|v| !(v.is_null() && fills_null));
    let names = if EXPERT_COUNTS.contains(&key) { &EXPERT_COUNTS[..] } else { &[key] };
    !names.iter().any(is_there)
}

/// Families with a default of key heads whose classes read null as the number of query heads.
const NULL_IS_HEADS: [&str; 7] = ["gpt_oss", "ministral", "mistral", "mixtral", "qwen2", "qwen3", "smollm3"];

/// Whether null is no value of a size of heads with a default: transformers refuses it, or fails later.
fn takes_no_null(family: &Family, key: &str) -> bool {
    match key {
        "head_dim" => true,
        "num_key_value_heads" => !NULL_IS_HEADS.contains(&family.model_type),
        _ => false,
    }
}

/// The default of a key, if the class has one.
pub(super) fn default_of(family: &Family, key: &str) -> Option<&'static Value> {
    CLASSES.get(family.model_type)?.get(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::family::FAMILIES;

    #[test]
    fn every_family_has_a_row() {
        let missing: Vec<&str> =
            FAMILIES.iter().map(|f| f.model_type).filter(|t| !CLASSES.contains_key(*t)).collect();
        assert!(missing.is_empty() && CLASSES.len() == FAMILIES.len(), "{missing:?}");
    }
}
