//! Reads data files as rows.
//!
//! | file | contents |
//! |---|---|
//! | `files` | data files of a source, file types; folders of several splits, and of `save_to_disk` |
//! | `reader` | rows of a file of any type |
//! | `row`, `lines`, `array` | unparsed rows; JSON Lines; one JSON array |
//! | `tables`, `quotes` | CSV, TSV and plain text; quotes of tables |
//! | `columns` | Parquet and Arrow |
//! | `encoding` | files in UTF-16, Windows-1252, and others |
//! | `detect`, `classes` | format of a source without one; names of its classes |

mod array;
pub(crate) mod classes;
#[cfg(feature = "parquet")]
mod columns;
pub(crate) mod detect;
mod encoding;
pub(crate) mod files;
mod lines;
mod quotes;
pub(crate) mod reader;
pub(crate) mod row;
mod tables;
