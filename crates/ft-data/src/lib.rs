//! Rows -> messages -> text -> tokens and mask -> packed batches.
//!
//! The way of a sample, one file a station:
//!
//! ```text
//! files       a source as its files
//! reader      a file's bytes as rows, with line and column;   array: those of one JSON list;   strict: one as a value
//! tables      rows of tables of text, and of plain texts
//! columns     rows of Parquet files
//! guess       the format, where the recipe does not name it
//! format      a row as a sample: a conversation, a text, or ready tokens
//! row_keys    which keys of a row are read, and what becomes of others
//! messages    a row's messages as a conversation
//! template    a conversation as text, by the model's chat template
//! marks       where the strings of a conversation stand in that text
//! plain       whether it is clear without marks that all of them do
//! gate        whether they do, by the marks
//! spans       which part of it the assistant wrote
//! tokenizer   text as token ids;   beside: what the files beside tokenizer.json say;   added: tokens that it gets
//! pipeline    what a tokenizer.json may do, and where texts can be cut
//! markers     markers of the template that the tokenizer has no token for
//! encode      ids and labels, cut to length, or the reason why not
//! pass        one source, read once: counting, refusing
//! samples     what it made: tokens and an index in files;   record: one as it is written
//! cache       those files, kept between commands
//! bytes       what is read by place, and lists that go to disk where they are long
//! dataset     all of a recipe's sources;   mix: what an epoch holds of each, by its weight
//! order       random orders, also of more samples than memory should hold
//! pack        which samples share a row;   epoch: those of all sources
//! rows        the rows of an epoch
//! batches     which rows a step takes: a pure function of the step
//! micro       what enters the model: documents end to end, and the targets
//! score       samples as questions, and answers against theirs
//! form        a prompt in the form that was trained
//! ```
//!
//! A row that cannot be used is never passed over in silence: it stops the run with its file, line and column,
//! or it is counted under its reason (`data.on_bad_row`), and `ft data` shows the counts. What a text lost or changed
//! where a row is used all the same is counted too, and told (`notes`).

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
mod spans;
mod stats;
mod strftime;
mod strict;
mod tables;
mod template;
mod tokenizer;

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
