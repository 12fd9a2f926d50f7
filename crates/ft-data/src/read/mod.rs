//! Reads data files as rows.
//!
//! | file | contents |
//! |---|---|
//! | `files` | data files of a source, file types |
//! | `reader` | rows of a file of any type |
//! | `row`, `lines`, `array` | unparsed rows; JSON Lines; one JSON array |
//! | `tables`, `columns` | CSV, TSV and plain text; Parquet |
//! | `detect` | format of a source without one |

mod array;
#[cfg(feature = "parquet")]
mod columns;
pub(crate) mod detect;
pub(crate) mod files;
mod lines;
pub(crate) mod reader;
pub(crate) mod row;
mod tables;
