//! Names of the classes of a source whose rows are labeled texts, for a recipe without them.

use super::files::files;
use super::reader::Rows;
use crate::error::Error;
use crate::shape::schema::Schema;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Most classes; more distinct labels are ids or descriptions.
const CLASSES: usize = 64;

/// The labels of a source in order, if every row has `text` and, as a string, `label`, and the labels are few.
///
/// # Errors
/// Missing or unreadable files.
pub fn classes_of(
    source: &ft_recipe::Source,
    resolve: &dyn Fn(&str) -> PathBuf,
) -> Result<Option<Vec<String>>, Error> {
    let mut names = BTreeSet::new();
    for path in files(source, resolve)? {
        for row in Rows::open(&path, &Schema::of_any(source)?)? {
            let Ok(Value::Object(row)) = row?.parse() else { return Ok(None) };
            match (row.get("text"), row.get("label")) {
                (Some(Value::String(_)), Some(Value::String(label))) if !label.trim().is_empty() => {
                    names.insert(label.clone());
                }
                _ => return Ok(None),
            }
            if names.len() > CLASSES {
                return Ok(None);
            }
        }
    }
    Ok((names.len() > 1).then(|| names.into_iter().collect()))
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
        for other in [json!({"text": "a"}), json!({"text": "a", "label": 1}), json!({"label": "no"})] {
            assert_eq!(of(&[labeled("yes"), labeled("no"), other]), None);
        }
        assert_eq!(of(&["one"].map(labeled)), None);
        assert_eq!(of(&[labeled("yes"), labeled(" ")]), None);
    }
}
