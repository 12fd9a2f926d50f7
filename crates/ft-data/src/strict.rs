//! JSON parsing of rows, with duplicate keys refused: keeping either value could train something
//! unintended.

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::map::Entry;
use serde_json::{Map, Value};
use std::fmt;

/// A parsed value.
struct Strict(Value);

/// Error message for a duplicate key.
pub(super) fn twice(key: &str) -> String {
    format!("the key {key:?} is there twice")
}

/// Parses a JSON value.
///
/// # Errors
/// Invalid JSON, and duplicate keys ([`serde_json::Error::is_data`]).
pub(super) fn value(json: &[u8]) -> serde_json::Result<Value> {
    serde_json::from_slice::<Strict>(json).map(|s| s.0)
}

/// Error message for a failed parse; `not_json` is the prefix for invalid JSON.
pub(super) fn told(e: &serde_json::Error, not_json: &str) -> String {
    if e.is_data() { e.to_string() } else { format!("{not_json}: {e}") }
}

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Values).map(Strict)
    }
}

struct Values;

impl<'de> Visitor<'de> for Values {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, b: bool) -> Result<Value, E> {
        Ok(b.into())
    }

    fn visit_i64<E>(self, n: i64) -> Result<Value, E> {
        Ok(n.into())
    }

    fn visit_u64<E>(self, n: u64) -> Result<Value, E> {
        Ok(n.into())
    }

    fn visit_f64<E>(self, x: f64) -> Result<Value, E> {
        Ok(x.into())
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_string<E>(self, text: String) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut out = Vec::new();
        while let Some(Strict(item)) = items.next_element()? {
            out.push(item);
        }
        Ok(Value::Array(out))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut out = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            match out.entry(key) {
                Entry::Vacant(free) => free.insert(entries.next_value::<Strict>()?.0),
                Entry::Occupied(there) => return Err(A::Error::custom(twice(there.key()))),
            };
        }
        Ok(Value::Object(out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_key_twice_is_read_as_serde_json_reads_it() {
        for json in [
            "null",
            "[true, false, -1, 18446744073709551615, 123456789012345678901, 0.1, -0.0, 1e300]",
            r#"{"b": [], "a": {"b": "\ud83d\ude00\n", "": {}}, "\u0062c": null}"#,
            "1e999",
            "[1,",
            "{\"a\"}",
            "",
            "\"\\ud800\"",
            "1 2",
        ] {
            let text = |r: serde_json::Result<Value>| r.map(|v| v.to_string()).map_err(|e| e.to_string());
            let theirs = text(serde_json::from_str(json));
            assert_eq!(text(value(json.as_bytes())), theirs, "{json}");
        }
        let deep = "[".repeat(1000);
        assert!(value(deep.as_bytes()).unwrap_err().to_string().contains("recursion limit"));
    }

    #[test]
    fn a_key_twice_is_refused_where_it_stands() {
        for (json, said) in [
            (r#"{"a": 1, "a": 1}"#, r#"the key "a" is there twice at line 1 column 12"#),
            ("[{\"x\": {\"b\": 1,\n\"\\u0062\": 2}}]", r#"the key "b" is there twice at line 2 column 8"#),
        ] {
            let error = value(json.as_bytes()).unwrap_err();
            assert_eq!((error.to_string().as_str(), error.is_data()), (said, true), "{json}");
        }
        assert!(value(br#"[{"a": 1}, {"a": {"a": 1}}]"#).is_ok());
    }
}
