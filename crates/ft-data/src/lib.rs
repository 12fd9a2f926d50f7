//! Data pipeline: rows -> messages -> text -> token ids and labels -> packed batches.
//!
//! Modules, in the order a sample passes through them:
//!
//! ```text
//! files       data files of a source
//! reader      rows of a file, with line and column;   array: one JSON array;   strict: strict JSON parsing
//! tables      rows of CSV, TSV and plain-text files
//! columns     rows of Parquet files
//! guess       format detection, if the recipe sets no format
//! format      row -> conversation, text, or token ids
//! row_keys    unread keys of a row: refused or noted
//! messages    messages of a row -> conversation
//! template    conversation -> text, by the chat template
//! marks       invisible marks that locate strings in the rendered text
//! plain       fast proof of completeness, without marks
//! gate        full check for completeness, with marks
//! spans       byte ranges written by the assistant
//! tokenizer   text -> token ids;   beside: files next to tokenizer.json;   added: new tokens
//! pipeline    supported features of tokenizer.json, and safe places to cut a text
//! markers     template markers unknown to the tokenizer
//! encode      token ids and labels, cut to length, or the reason for a dropped row
//! pass        reads one source once; counts and refuses rows
//! samples     encoded samples: token and index files;   record: on-disk layout
//! cache       token and index files kept between commands
//! bytes       positioned reads, and integer lists that spill to disk
//! dataset     all sources of a recipe;   mix: samples per source and epoch, by weight
//! order       random permutations, in memory or computed
//! pack        packing of samples into rows;   epoch: over all sources
//! rows        rows of an epoch
//! batches     rows of a step, a pure function of the step number
//! micro       model input: concatenated documents and targets
//! score       evaluation questions, and scores of answers
//! form        prompts in the format used in training
//! ```
//!
//! An unusable row is never skipped silently: either the run stops with file, line and column, or the row
//! is counted by reason (`data.on_bad_row`) and `ft data` prints the counts. Text lost or changed in a
//! usable row is also counted and reported (`notes`).

mod added;
mod array;
mod batches;
mod beside;
mod bytes;
mod cache;
#[cfg(feature = "parquet")]
mod columns;
mod conversation;
mod dataset;
mod encode;
mod epoch;
mod error;
mod files;
mod form;
mod format;
mod gate;
mod guess;
pub mod hub;
mod json;
mod markers;
mod marks;
mod messages;
mod micro;
mod mix;
mod notes;
mod order;
mod pack;
mod pass;
mod pipeline;
mod plain;
mod reader;
mod record;
mod row_keys;
mod rows;
mod samples;
mod score;
pub mod show;
mod spans;
mod stats;
mod strftime;
mod strict;
mod tables;
mod template;
mod tokenizer;

#[cfg(test)]
#[path = "../../ft-base/src/store/small_disk.rs"]
#[expect(dead_code)]
mod small_disk;
#[cfg(test)]
mod tests;

pub use added::Added;
pub use batches::Batches;
pub use beside::template_of;
pub use dataset::{Checked, Dataset, kept};
pub use encode::{Example, UNSUPERVISED};
pub use error::{Error, Problem};
pub use files::{files as find, holds_rows, is_hub_id, unpacks_to};
pub use form::{Form, Trained};
pub use guess::{guess, to_write};
pub use micro::{Micro, PROBE_TOKENS, Size};
pub use notes::Notes;
pub use rows::{Item, Rows, RowsReader};
pub use samples::{Reader, Samples};
pub use score::{Scores, question, rouge_l};
pub use stats::{Counts, Drops, Lengths, Stats};
pub use tokenizer::{Decoder, Tokenizer};
