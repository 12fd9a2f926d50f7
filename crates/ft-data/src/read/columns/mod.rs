//! Rows of columnar files.
//!
//! | file | contents |
//! |---|---|
//! | `parquet`, `nesting`, `pages`, `levels` | Parquet; depth of its schema; sizes of its pages; values of its rows |
//! | `arrow`, `cells` | Arrow files and streams; values of Arrow's types as JSON |

mod arrow;
mod cells;
mod levels;
mod nesting;
mod pages;
mod parquet;

pub(super) use arrow::Batches;
pub(super) use parquet::Columns;

use serde_json::Value;

/// Key of a file's metadata under which the datasets package describes columns, as JSON.
const FEATURES: &str = "huggingface";

/// Refuses a non-finite number in a column that is `read`. As JSON's null, it would be an absent one.
fn finite(number: f64, read: bool) -> Result<f64, String> {
    if number.is_finite() || !read { Ok(number) } else { Err(format!(": {number} is not a finite number")) }
}

/// Names of the numbers in a column of classes, by the description of the columns.
fn class_names(features: &str, column: &str) -> Option<Vec<String>> {
    let features: Value = serde_json::from_str(features).ok()?;
    let feature = features.pointer("/info/features")?.get(column)?;
    let names = feature.get("names").filter(|_| feature.get("_type").is_some_and(|t| t == "ClassLabel"))?;
    names.as_array()?.iter().map(|name| name.as_str().map(str::to_string)).collect()
}
