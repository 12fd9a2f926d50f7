//! Names of the classes of a source whose rows are labeled texts, for a recipe without them.

use super::detect::key_of;
use super::files::files;
use super::reader::Rows;
use crate::error::Error;
use crate::shape::schema::Schema;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Most classes; more distinct labels are ids or descriptions.
const CLASSES: usize = 64;

/// The class names of a source: the file's own, else the distinct values of `label` in order, if all rows have `text`
/// and most a `label` that is a string, a whole number or a boolean. `None` for other rows.
///
/// # Errors
/// Missing or unreadable files.
pub fn classes_of(
    source: &ft_recipe::Source,
    resolve: &dyn Fn(&str) -> PathBuf,
) -> Result<Option<Vec<String>>, Error> {
    let mut names = BTreeSet::new();
    let (mut all, mut unlabeled) = (0, 0);
    for path in files(source, resolve)? {
        let rows = Rows::open(&path, &Schema::of_any(source)?)?;
        let named = rows.class_names("label").filter(|names| names.len() > 1);
        for row in rows {
            let Ok(Value::Object(row)) = row?.parse() else { return Ok(None) };
            let value = |name: &str| key_of(&row, name).and_then(|key| row.get(key));
            let (Some(Value::String(_)), Some(label)) = (value("text"), value("label")) else {
                return Ok(None);
            };
            if named.is_some() {
                return Ok(named);
            }
            let Some(name) = name_of(label) else { return Ok(None) };
            all += 1;
            if name.is_empty() {
                unlabeled += 1;
            } else {
                names.insert(name);
            }
            if names.len() > CLASSES {
                return Ok(None);
            }
        }
    }
    let mut names: Vec<String> = names.into_iter().collect();
    names.sort_by_key(|name| name.parse::<i64>().ok());
    Ok((names.len() > 1 && unlabeled * 2 <= all).then_some(names))
}

/// The name of a label's class; empty without a label. `None` for values that name no class.
fn name_of(label: &Value) -> Option<String> {
    match label {
        Value::Null => Some(String::new()),
        Value::String(name) => Some(name.trim().to_string()),
        Value::Bool(is) => Some(is.to_string()),
        // columns of floats hold 1.0 for 1
        Value::Number(n) => n.as_f64().filter(|n| n.fract() == 0.0).map(|n| n.to_string()),
        Value::Array(_) | Value::Object(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ft_recipe::Format;
    use serde_json::json;

    #[test]
    fn few_labels_in_every_row_are_classes() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.jsonl");
        let source = crate::tests::source("a.jsonl", Format::Text);
        let of = |rows: &[Value]| {
            std::fs::write(&file, rows.iter().map(|r| format!("{r}\n")).collect::<String>()).unwrap();
            classes_of(&source, &|_| file.clone()).unwrap()
        };
        let labeled = |label: &str| json!({"text": "a", "label": label});
        let names = of(&["yes", "no", "yes"].map(labeled));
        assert_eq!(names, Some(vec!["no".to_string(), "yes".to_string()]));
        let many: Vec<Value> = (0..=CLASSES).map(|i| labeled(&i.to_string())).collect();
        assert_eq!(of(&many[1..]).map(|names| names.len()), Some(CLASSES));
        assert_eq!(of(&many), None);
        for other in [json!({"text": "a"}), json!({"text": "a", "label": 0.7}), json!({"label": "no"})] {
            assert_eq!(of(&[labeled("yes"), labeled("no"), other]), None);
        }
        assert_eq!(of(&["one"].map(labeled)), None);
        assert_eq!(of(&[labeled("yes"), labeled(" ")]), None);
        // white space, numbers, booleans, and rows without a label
        for (labels, names) in [
            (json!([" no", "no ", "yes", "", null]), Some(vec!["no", "yes"])),
            (json!([1, 0, 10.0, 2]), Some(vec!["0", "1", "2", "10"])),
            (json!([true, false]), Some(vec!["false", "true"])),
            (json!(["no", "yes", "", null, " "]), None),
        ] {
            let rows = labels.as_array().unwrap().iter().map(|label| json!({"Text": "a", "label": label}));
            let names = names.map(|names| names.into_iter().map(String::from).collect::<Vec<_>>());
            assert_eq!(of(&rows.collect::<Vec<_>>()), names, "{labels}");
        }
    }
}
