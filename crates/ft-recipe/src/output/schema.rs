//! The JSON schema of recipes, for completion, documentation and checks in editors.

use crate::check::values::plain_json;
use crate::keys::{Bound, GROUPS, INDEX, Interval, Key, Kind, Recipe, Recompute, SMALLEST_BARE, Unset};
use crate::syntax::parse_value;
use serde_json::{Map, Value, json};

/// Generates the schema from the key table (JSON Schema draft 7, supported by TOML language servers).
///
/// The schema covers single keys. Constraints across keys, or for a model, are checked by `ft check`.
pub fn schema() -> Value {
    let mut schema = table(Recipe::KEYS);
    let parallel = &mut schema["properties"]["parallel"];
    parallel["type"] = json!(["object", "string"]);
    parallel["pattern"] = json!("^auto$");
    schema["$schema"] = json!("http://json-schema.org/draft-07/schema#");
    schema["title"] = json!("Recipe of ft");
    schema["description"] = json!("What to fine-tune, on what, and how.");
    schema
}

fn table(keys: &'static [Key]) -> Value {
    let properties: Map<String, Value> = keys.iter().map(|k| (k.name.into(), property(k))).collect();
    let required: Vec<&str> =
        keys.iter().filter(|k| matches!(k.default, Unset::Required)).map(|k| k.name).collect();
    let mut schema = json!({ "type": "object", "properties": properties });
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    schema["additionalProperties"] = json!(false);
    schema
}

fn property(key: &'static Key) -> Value {
    let mut schema = kind(key.kind);
    let mut doc = key.doc.to_string();
    match key.default {
        Unset::Required => {}
        Unset::Absent(instead) => doc.push_str(&format!(" Default: {instead}.")),
        Unset::Toml(text) => {
            if let Some(value) = parse_value(text)
                && !matches!(key.kind, Kind::Table(_))
            {
                schema["default"] = plain_json(&value.value);
            }
        }
    }
    schema["description"] = json!(doc);
    schema
}

#[expect(clippy::too_many_lines, reason = "a list: one arm a kind")]
fn kind(kind: Kind) -> Value {
    let index = json!({ "type": "integer", "minimum": 0, "maximum": INDEX });
    let indices = |pattern: &str| {
        let list = json!({ "type": "array", "minItems": 1, "uniqueItems": true, "items": index });
        json!({ "oneOf": [{ "type": "string", "pattern": pattern }, index, list] })
    };
    match kind {
        Kind::Int(from, to) => json!({ "type": "integer", "minimum": from, "maximum": to }),
        Kind::IntOrAuto(from, to) => {
            json!({ "oneOf": [{ "type": "integer", "minimum": from, "maximum": to }, { "const": "auto" }] })
        }
        Kind::Every(from, to) => json!({ "oneOf": [
            { "type": "integer", "minimum": from, "maximum": to },
            { "type": "string", "pattern": Interval::PATTERN },
        ] }),
        Kind::Number(Bound::Positive) => json!({ "type": "number", "exclusiveMinimum": 0 }),
        Kind::Number(Bound::NotNegative) => json!({ "type": "number", "minimum": 0 }),
        Kind::Number(Bound::Share) => json!({ "type": "number", "minimum": 0, "maximum": 1 }),
        Kind::Number(Bound::BelowOne) => json!({ "type": "number", "minimum": 0, "exclusiveMaximum": 1 }),
        Kind::Number(Bound::Alpha) => json!({ "type": "number", "minimum": 1e-9, "maximum": 1e9 }),
        Kind::Bool => json!({ "type": "boolean" }),
        Kind::Text => json!({ "type": "string", "minLength": 1 }),
        Kind::Name => json!({ "type": "string", "pattern": r"^[^/\\{}]+$", "maxLength": 200 }),
        Kind::Word(words) => json!({ "oneOf": choices(words) }),
        Kind::Words(words) => {
            json!({ "type": "array", "items": { "oneOf": choices(words) }, "uniqueItems": true })
        }
        Kind::Anything => json!({ "type": "object" }),
        Kind::Strings => {
            json!({ "type": "object", "additionalProperties": { "type": "string", "minLength": 1 } })
        }
        Kind::Texts => json!({
            "type": "array", "uniqueItems": true, "items": { "type": "string", "minLength": 1 },
        }),
        Kind::Modules => json!({
            "type": "array", "minItems": 1, "uniqueItems": true,
            "items": { "anyOf": [
                { "oneOf": choices(GROUPS) },
                { "type": "string", "pattern": "^([A-Za-z0-9_]+|/.+/)$" },
            ] },
        }),
        Kind::Tokens => json!({
            "type": "array", "minItems": 1, "uniqueItems": true,
            "items": { "oneOf": [
                { "type": "string", "minLength": 1 },
                { "type": "integer", "minimum": 0, "maximum": u32::MAX },
            ] },
        }),
        Kind::Layers => indices(r"^(all|\d+|\d+-\d*|-\d+:)$"),
        Kind::Experts => indices(r"^(all|\d+|\d+-\d*)$"),
        Kind::Counts => json!({ "type": "array", "items": { "type": "integer", "minimum": 1 } }),
        Kind::Betas => json!({
            "type": "array", "minItems": 2, "maxItems": 2,
            "items": { "type": "number", "minimum": 0, "exclusiveMaximum": 1 },
        }),
        Kind::Bytes => json!({ "oneOf": [
            { "type": "integer", "minimum": SMALLEST_BARE },
            { "type": "string", "pattern": r"^\s*[0-9.]+\s*([KMGT]iB|[kKMGT]B?|B)?\s*$" },
        ] }),
        Kind::Recompute => json!({ "oneOf": [{ "enum": Recompute::WORDS.map(|(w, _)| w) }, index] }),
        Kind::Devices => json!({
            "type": "array", "uniqueItems": true, "items": { "type": "string", "pattern": r"^(cpu|cuda(:\d+)?)$" },
        }),
        Kind::Table(keys) => table(keys),
        Kind::Tables(keys) => json!({ "type": "array", "items": table(keys) }),
    }
}

fn choices(words: &[(&str, &str)]) -> Vec<Value> {
    words.iter().map(|(w, doc)| json!({ "const": w, "description": doc.trim() })).collect()
}
