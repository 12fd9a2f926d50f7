//! Rows -> messages -> text -> tokens and mask -> packed batches.
//!
//! The way of a sample, one file a station:
//!
//! ```text
//! files       a source as its files
//! reader      a file's bytes as rows, with line and column
//! format      a row as a sample: a conversation, a text, or ready tokens
//! template    a conversation as text, by the model's chat template
//! spans       which part of that text the assistant wrote
//! tokenizer   text as token ids
//! encode      ids and labels, cut to length, or the reason why not
//! dataset     all of a recipe's sources: counting, refusing, mixing
//! pack        which samples share a row
//! batches     which rows a step takes: a pure function of the step
//! micro       what enters the model: documents end to end, and the targets
//! lengths     samples' lengths, kept for plans
//! ```
//!
//! A row that cannot be used is never passed over in silence: it stops the run with its file, line and column,
//! or it is counted under its reason (`data.on_bad_row`), and `ft data` shows the counts.

mod batches;
mod dataset;
mod encode;
mod error;
mod files;
mod format;
mod json;
pub mod lengths;
mod micro;
mod pack;
mod reader;
mod spans;
mod stats;
mod strftime;
mod template;
mod tokenizer;

#[cfg(test)]
mod tests;

pub use batches::Batches;
pub use dataset::{Checked, Dataset};
pub use encode::{Example, UNSUPERVISED};
pub use error::{Error, Problem};
pub use files::files as find;
pub use micro::{Micro, Size};
pub use stats::{Drops, Lengths, Stats};
pub use tokenizer::{Decoder, Tokenizer};
