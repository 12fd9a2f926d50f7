//! Values of the command line, by the kind of their key.

use crate::keys::{Kind, find_key};
use crate::syntax::{Entry, Node, Table, Value};

/// Text that TOML takes for a number, a date or a truth value (`name=7`) stays text; the text of one source is a list
/// of one (`data.train=my.jsonl`). `word` is the value as written.
pub(crate) fn meant(path: &str, word: &str, node: Node) -> Node {
    let Some(key) = find_key(path) else { return node };
    let at = node.at;
    let value = match (key.kind, node.value) {
        (Kind::Text | Kind::Name, Value::Int(_) | Value::Float(_) | Value::Bool(_) | Value::Date(_)) => {
            Value::Text(word.to_string())
        }
        (Kind::Tables(keys), Value::Text(text)) if keys.iter().any(|k| k.name == "source") => {
            let node = Node { value: Value::Text(text), at: at.clone() };
            let source = Table(vec![Entry { key: "source".into(), key_at: at.clone(), node }]);
            Value::List(vec![Node { value: Value::Table(source), at: at.clone() }])
        }
        (_, value) => value,
    };
    Node { value, at }
}
