//! Strict JSON, for rows and for files of models and adapters: a duplicate key is an error. `serde_json`
//! would silently keep the last value.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::map::Entry;
use serde_json::{Map, Value};
use std::fmt;

/// Parses a JSON value.
///
/// # Errors
/// Invalid JSON, and duplicate keys ([`serde_json::Error::is_data`]).
pub fn value(json: &[u8]) -> serde_json::Result<Value> {
    serde_json::from_slice(json).map(|Strict(value)| value)
}

/// Parses a JSON object.
///
/// # Errors
/// A message with line and column: invalid JSON, nesting too deep, a duplicate key, or a value other
/// than an object.
pub fn object(text: &str) -> Result<Map<String, Value>, String> {
    match value(text.as_bytes()) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err("not a JSON object".into()),
        Err(e) => Err(e.to_string()),
    }
}

/// Error message for a failed parse; `not_json` is the prefix for invalid JSON.
pub fn describe(e: &serde_json::Error, not_json: &str) -> String {
    if e.is_data() { e.to_string() } else { format!("{not_json}: {e}") }
}

/// Error message for a duplicate key.
pub fn duplicate_key(key: &str) -> String {
    format!("the key {key:?} is there twice")
}

/// Formats a value as JSON for messages, truncated to 80 characters.
pub fn short(v: &Value) -> String {
    cut(&v.to_string(), 80)
}

/// A text for messages, truncated to `most` characters.
pub fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}..", &text[..at]),
        None => text.to_string(),
    }
}

/// Whether two values are equal; `0` and `0.0` are.
pub fn equal(a: &Value, b: &Value) -> bool {
    a == b || (a.is_number() && a.as_f64() == b.as_f64())
}

/// A value without duplicate keys.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(Values).map(Strict)
    }
}

struct Values;

impl<'de> Visitor<'de> for Values {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(v.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Strict(v)) = seq.next_element()? {
            list.push(v);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = object.next_key::<String>()? {
            match map.entry(key) {
                Entry::Vacant(free) => free.insert(object.next_value::<Strict>()?.0),
                Entry::Occupied(entry) => return Err(A::Error::custom(duplicate_key(entry.key()))),
            };
        }
        Ok(map.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_errors_are_those_of_serde_json() {
        for json in [
            "null",
            "[true, false, -1, 18446744073709551615, 123456789012345678901, 0.1, -0.0, 1e300]",
            r#"{"b": [], "a": {"b": "\ud83d\ude00\n", "": {}}, "\u0062c": null}"#,
            "1e999",
            "[1,",
            "{\"a\"}",
            "{\"a\": NaN}",
            "",
            "\"\\ud800\"",
            "1 2",
        ] {
            let text = |r: serde_json::Result<Value>| r.map(|v| v.to_string()).map_err(|e| e.to_string());
            assert_eq!(text(value(json.as_bytes())), text(serde_json::from_str(json)), "{json}");
        }
        let deep = "[".repeat(100_000);
        assert!(value(deep.as_bytes()).unwrap_err().to_string().contains("recursion limit"));
        assert!(object("[]").is_err() && object("3").is_err() && object("{}").is_ok());
    }

    #[test]
    fn a_duplicate_key_is_an_error_with_its_place() {
        for (json, message) in [
            (r#"{"a": 1, "a": 1}"#, r#"the key "a" is there twice at line 1 column 12"#),
            ("[{\"x\": {\"b\": 1,\n\"\\u0062\": 2}}]", r#"the key "b" is there twice at line 2 column 8"#),
        ] {
            let error = value(json.as_bytes()).unwrap_err();
            assert_eq!((error.to_string().as_str(), error.is_data()), (message, true), "{json}");
        }
        assert!(value(br#"[{"a": 1}, {"a": {"a": 1}}]"#).is_ok());
    }

    #[test]
    fn long_values_are_cut_at_a_character() {
        let v = Value::from("é".repeat(500));
        assert!(short(&v).chars().count() < 100 && short(&v).ends_with(".."));
        assert_eq!(short(&Value::from(3)), "3");
        assert_eq!((cut("éé", 2), cut("ééé", 2)), ("éé".into(), "éé..".into()));
    }
}
