//! Data pipeline: rows -> messages -> text -> token ids and labels -> packed batches.
//!
//! Folders, in the order a sample passes through them:
//!
//! ```text
//! read         data files -> rows, with line and column
//! shape        row -> conversation, text, or token ids
//! text         conversation -> text and supervised spans, by the chat template
//! tokenize     text -> token ids and labels
//! token_cache  encoded samples: token and index files, kept between commands
//! rows         samples -> rows -> batches -> model input
//! ```
//!
//! An unusable row is never skipped silently: either the run stops with file, line and column, or the row
//! is counted by reason (`data.on_bad_row`) and `ft data` prints the counts. Text lost or changed in a
//! usable row is also counted and reported ([`Notes`]).

#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, clippy::too_many_lines, reason = "tests write files, and list cases")
)]
#![forbid(unsafe_code)]

mod error;
mod read;
mod rows;
mod shape;
mod text;
mod token_cache;
mod tokenize;

#[cfg(test)]
#[path = "../../ft-base/src/store/small_disk.rs"]
#[expect(dead_code)]
mod small_disk;
#[cfg(test)]
mod tests;

pub use error::{Error, Problem};
pub use read::classes::classes_of;
pub use read::detect::{Shape, detect, shape_in, task_of};
pub use read::files::splits::{is_data, splits};
pub use read::files::{files as find, holds_rows, is_hub_id, unpacks_to};
pub use rows::batches::Batches;
pub use rows::dataset::{Checked, Dataset, cached_rows};
pub use rows::micro::segments::{CUT, Segments, segments};
pub use rows::micro::{Micro, PROBE_TOKENS, Size};
pub use rows::packed::{Rows, RowsReader};
pub use rows::score::{Scores, question, rouge_l};
pub use rows::show;
pub use shape::example::{Content, Example, IGNORE_INDEX, Teacher};
pub use shape::messages::open_calls;
pub use shape::notes::Notes;
pub use token_cache::record::Item;
pub use token_cache::samples::{Reader, Samples};
pub use token_cache::stats::{Counts, Drops, Lengths, Stats};
pub use token_cache::teacher_rows::{TeacherRows, TopTokens};
pub use tokenize::added::Added;
pub use tokenize::model_files::{CHAT_TEMPLATE, TOOL_USE, TemplateSource, template_of};
pub use tokenize::prompt::{PromptConfig, PromptFormat, adapter_template};
pub use tokenize::tokenizer::{Decoder, Tokenizer, TokenizerIdentity};
