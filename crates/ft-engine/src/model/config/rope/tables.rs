//! Tables of rotary embeddings in `config.json`, in the spellings of transformers 4 and 5, and overrides of them.

use crate::model::config::defaults::default_of;
use crate::model::config::error::Result;
use crate::model::config::family::{Family, LOCAL, PARTIAL};
use crate::model::config::keys::Keys;
use crate::model::config::types::Config;
use ft_base::store::json::{equal, short};
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

/// Table of transformers 4: scaling of the frequencies; in full layers alone if sliding ones have another embedding.
pub(in crate::model::config) const ROPE_SCALING: &str = "rope_scaling";
/// Table of transformers 5: scaling and base; by layer type where layers differ.
pub(in crate::model::config) const ROPE_PARAMETERS: &str = "rope_parameters";
/// Names of layer types: full attention, and sliding windows.
pub(in crate::model::config) const LAYER_TYPES: [&str; 2] = ["full_attention", "sliding_attention"];
/// Key of the base, in a table or at the top level.
pub(super) const BASE: &str = "rope_theta";
/// Names of the key of the scaling's type, of transformers 5 and 4.
pub(super) const KINDS: [&str; 2] = ["rope_type", "type"];
/// Name of the type without scaling.
pub(super) const DEFAULT: &str = "default";
/// Keys of a table kept by a new scaling.
const UNSCALED: [&str; 6] =
    [BASE, PARTIAL, "mrope_section", "mrope_interleaved", LAYER_TYPES[0], LAYER_TYPES[1]];

/// An absent table.
pub(super) static NONE: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);

/// Completes [`ROPE_PARAMETERS`] as transformers does. Absent tables have the default of the class, if any.
/// [`ROPE_SCALING`] replaces a table of all layers, with its base, or keys of the table of full layers; Gemma 4 has
/// none.
pub(in crate::model::config) fn settle(raw: &mut Map<String, Value>, family: &Family) {
    if raw.get(ROPE_PARAMETERS).is_none_or(Value::is_null) {
        let plain =
            || json!({ LAYER_TYPES[0]: { KINDS[0]: DEFAULT }, LAYER_TYPES[1]: { KINDS[0]: DEFAULT } });
        let class = default_of(family, ROPE_PARAMETERS).cloned();
        let class = class.or_else(|| family.two_ropes.then(plain));
        raw.extend(class.map(|tables| (ROPE_PARAMETERS.to_string(), tables)));
    }
    let scaling = raw.get(ROPE_SCALING).and_then(Value::as_object).cloned().unwrap_or_default();
    let is_scaled = !scaling.is_empty();
    let tables = raw.get_mut(ROPE_PARAMETERS).filter(|_| !family.by_layer);
    match tables {
        Some(Value::Object(tables)) if family.two_ropes => {
            if let Some(Value::Object(full)) = tables.get_mut(LAYER_TYPES[0]) {
                full.extend(scaling);
            }
            // A scaling wants a table of full layers.
            for layers in LAYER_TYPES.into_iter().skip(usize::from(is_scaled)) {
                let table = tables.entry(layers).or_insert(Value::Null);
                if table.is_null() {
                    *table = json!({ KINDS[0]: DEFAULT });
                }
            }
        }
        Some(Value::Object(table)) if is_scaled => *table = scaling,
        _ => {}
    }
}

/// The table of each rotary embedding of settled keys: of all layers, or of full and of sliding ones.
pub(super) fn in_effect<'a>(keys: &Keys<'a>, family: &Family) -> Result<Vec<Keys<'a>>> {
    let scaling = keys.table(ROPE_SCALING)?.filter(|t| !t.raw.is_empty());
    if family.by_layer && scaling.is_some() {
        let why = format!("{} has rope_parameters: transformers does not read it", family.model_type);
        return Err(keys.bad(ROPE_SCALING, why));
    }
    let parameters = keys.table(ROPE_PARAMETERS)?.unwrap_or_else(|| keys.over(&NONE));
    if family.two_ropes {
        let of = |layers: &str| -> Result<Keys<'a>> {
            let missing = || parameters.bad(layers, "missing; a table is wanted for each layer type");
            parameters.table(layers)?.ok_or_else(missing)
        };
        return Ok(vec![of(LAYER_TYPES[0])?.merged(scaling), of(LAYER_TYPES[1])?]);
    }
    let table = scaling.unwrap_or(parameters);
    match LAYER_TYPES.into_iter().find(|layers| table.raw.get(*layers).is_some_and(Value::is_object)) {
        Some(layers) => Err(table.bad(layers, "this family has no parameters by layer type")),
        None => Ok(vec![table]),
    }
}

/// Whether the value at this path of a config comes from overrides.
pub(in crate::model::config) fn is_changed(path: &str, overrides: &Map<String, Value>) -> bool {
    let has = |key: &str| overrides.contains_key(key);
    let mut parts = path.split('.').skip_while(|part| *part == Config::TEXT);
    let top = parts.next().unwrap_or(path);
    match (top, parts.last()) {
        (ROPE_PARAMETERS, Some(_)) if has(top) => true,
        (ROPE_SCALING | ROPE_PARAMETERS, Some(key)) if path.contains(LAYER_TYPES[1]) => {
            key == BASE && has(LOCAL)
        }
        (ROPE_SCALING | ROPE_PARAMETERS, Some(key)) => {
            let scaling = overrides.get(ROPE_SCALING);
            scaling.is_some_and(|t| t.get(key).is_some()) || ([BASE, PARTIAL].contains(&key) && has(key))
        }
        _ => has(top),
    }
}

/// Refuses overrides with an empty scaling, or with two values of a base or share.
pub(in crate::model::config) fn refuse(overrides: &Keys<'_>) -> Result<()> {
    let Some(table) = overrides.get(ROPE_SCALING).and_then(Value::as_object) else { return Ok(()) };
    if table.is_empty() {
        // transformers takes an empty table for an absent one.
        let why = "{} changes nothing\n  hint: model.override's rope_scaling = { rope_type = \"default\" } \
                   removes the scaling";
        return Err(overrides.bad(ROPE_SCALING, why));
    }
    for key in [BASE, PARTIAL] {
        if let (Some(top), Some(own)) = (overrides.get(key), table.get(key).filter(|own| !own.is_null()))
            && !equal(top, own)
        {
            let why = format!("{}; model.override's {ROPE_SCALING} has another: {}", short(top), short(own));
            return Err(overrides.bad(key, why));
        }
    }
    Ok(())
}

/// Replaces keys of a text model by overrides. Scaling and bases go into the tables in effect, and leave the rest: at
/// the top level, transformers would take another base with the scaling, and ignore the bases. A new
/// [`ROPE_PARAMETERS`] replaces the tables.
pub(in crate::model::config) fn replace(
    raw: &mut Map<String, Value>,
    overrides: &Map<String, Value>,
    family: &Family,
) {
    let mut top = overrides.clone();
    let changes = [BASE, LOCAL, PARTIAL, ROPE_SCALING];
    if overrides.contains_key(ROPE_PARAMETERS) {
        raw.remove(ROPE_SCALING);
    } else if changes.iter().any(|key| overrides.contains_key(*key))
        && overrides.get(ROPE_SCALING).is_none_or(Value::is_object)
    {
        change(raw, overrides, family);
        top.remove(ROPE_SCALING);
    }
    raw.extend(top);
}

/// Changes the tables in effect by overrides: the file's, else the class's, else a new one.
fn change(raw: &mut Map<String, Value>, overrides: &Map<String, Value>, family: &Family) {
    let is_scaled = overrides.contains_key(ROPE_SCALING);
    // Not read in a file, or refused there and replaced here.
    let is_idle = match raw.get(ROPE_SCALING) {
        Some(Value::Object(table)) if !family.by_layer => table.is_empty(),
        _ => is_scaled,
    };
    if is_idle {
        raw.remove(ROPE_SCALING);
    }
    settle(raw, family);
    let always = raw.get(ROPE_PARAMETERS).is_some_and(Value::is_object);
    if is_scaled && !always {
        raw.entry(ROPE_SCALING).or_insert_with(|| json!({}));
    }
    for (key, table) in raw.iter_mut() {
        match key.as_str() {
            ROPE_PARAMETERS if family.two_ropes => {
                for (layers, base) in LAYER_TYPES.into_iter().zip([BASE, LOCAL]) {
                    if let Some(table) = table.get_mut(layers) {
                        put(table, overrides, base, always);
                    }
                }
            }
            ROPE_SCALING | ROPE_PARAMETERS => put(table, overrides, BASE, always),
            _ => {}
        }
    }
}

/// Puts overrides into a table: a base, and scaling and share with the base of full layers. A scaling with a type
/// replaces the former one. Base and share are put if the table has them, or `always`.
fn put(table: &mut Value, overrides: &Map<String, Value>, base: &str, always: bool) {
    let Value::Object(table) = table else { return };
    let of_full = |key: &str| overrides.get(key).filter(|_| base == BASE);
    if let Some(Value::Object(scaling)) = of_full(ROPE_SCALING) {
        if KINDS.iter().any(|name| scaling.contains_key(*name)) {
            table.retain(|key, _| UNSCALED.contains(&key.as_str()));
        }
        table.extend(scaling.clone());
    }
    for (key, value) in [(BASE, overrides.get(base)), (PARTIAL, of_full(PARTIAL))] {
        if let Some(value) = value.filter(|_| always || table.contains_key(key)) {
            table.insert(key.into(), value.clone());
        }
    }
}
