//! Rows of columnar files.
//!
//! | file | contents |
//! |---|---|
//! | `parquet`, `pages`, `levels` | Parquet; sizes of its pages; values of its rows |
//! | `arrow`, `cells` | Arrow files and streams; values of Arrow's types as JSON |

mod arrow;
mod cells;
mod levels;
mod pages;
mod parquet;

pub(super) use arrow::Batches;
pub(super) use parquet::Columns;
