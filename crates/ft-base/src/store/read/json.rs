//! Strict JSON objects, for files of models and adapters: a duplicate key is an error. `serde_json`
//! would silently keep the last value.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// Parses a JSON object.
///
/// # Errors
/// A message with line and column: invalid JSON, nesting too deep, a duplicate key, or a value other
/// than an object.
pub fn object(text: &str) -> Result<Map<String, Value>, String> {
    let Strict(value) = serde_json::from_str(text).map_err(|e| e.to_string())?;
    match value {
        Value::Object(map) => Ok(map),
        _ => Err("not a JSON object".into()),
    }
}

/// Formats a value as JSON for messages, truncated to 80 characters.
pub fn short(v: &Value) -> String {
    const MOST: usize = 80;
    let text = v.to_string();
    match text.char_indices().nth(MOST) {
        Some((at, _)) => format!("{}..", &text[..at]),
        None => text,
    }
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
            if map.contains_key(&key) {
                return Err(A::Error::custom(format!("{key}: the key stands twice in one object")));
            }
            let Strict(v) = object.next_value()?;
            map.insert(key, v);
        }
        Ok(map.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_serde_json() -> anyhow::Result<()> {
        let text = r#"{"a": [1, -2, 1.5, 1e3, 18446744073709551615, null, true, "x\u00e9"], "b": {"a": {}}}"#;
        let read = object(text).map_err(anyhow::Error::msg)?;
        assert_eq!(Value::Object(read), serde_json::from_str::<Value>(text)?);
        Ok(())
    }

    #[test]
    fn a_key_that_stands_twice_is_an_error_with_its_place() {
        for text in ["{\"r\": 8,\n \"r\": 16}", "{\"x\": [{\"r\": 1,\n \"r\": 1}]}"] {
            let e = object(text).expect_err("refused");
            assert!(e.contains("r: the key stands twice") && e.contains("line 2"), "{e}");
        }
        for text in ["", "[]", "3", "{\"a\": NaN}", "{\"a\": 1e999}", "{\"a\": 1} x", &"[".repeat(100_000)] {
            assert!(object(text).is_err(), "{text:.20}");
        }
    }

    #[test]
    fn long_values_are_cut_at_a_character() {
        let v = Value::from("é".repeat(500));
        assert!(short(&v).chars().count() < 100 && short(&v).ends_with(".."));
        assert_eq!(short(&Value::from(3)), "3");
    }
}
