//! Tokenizes texts, and encodes samples as token ids and labels.
//!
//! | file | contents |
//! |---|---|
//! | `tokenizer` | text -> token ids |
//! | `model_files`, `added` | files next to `tokenizer.json`; new tokens |
//! | `pipeline` | supported features of `tokenizer.json`, and safe places to cut a text |
//! | `encode` | token ids and labels, cut to length, or the reason for a dropped row |
//! | `markers` | template markers unknown to the tokenizer |
//! | `prompt` | prompts in the format used in training |
//! | `model_key` | cache key of a model folder |

pub(crate) mod added;
pub(crate) mod encode;
pub(crate) mod markers;
pub(crate) mod model_files;
pub(crate) mod model_key;
mod pipeline;
pub(crate) mod prompt;
pub(crate) mod tokenizer;
