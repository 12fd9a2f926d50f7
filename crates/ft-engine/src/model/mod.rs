//! Decoder math: hand-written forward and backward passes of every module.
//!
//! Model families are rows of a table ([`family`]) and share one decoder [`layer`]. Each module has
//! `forward -> (y, Saved)` and `backward(Saved, dy, sink) -> dx` on plain tensors without autograd. `Saved`
//! holds the saved activations of the backward pass; gradients of trained tensors go to the [`sink`].
//!
//! Axes in names: `t` tokens of a micro-batch (documents end to end, no padding), `d` model width, `h`
//! query heads, `g` key/value heads, `c` channels per head, `f` feed-forward width, `v` vocabulary, `o`/`i`
//! output and input features, `r` LoRA rank, `e` experts, `k` experts per token, `n` rows sorted by expert.

pub mod attention;
pub mod batch;
pub mod config;
pub mod decoder;
pub mod embedding;
pub mod experts;
pub mod family;
pub mod head;
pub mod layer;
pub mod linear;
pub mod mlp;
pub mod modules;
pub mod moe;
pub mod norm;
pub mod rope;
pub mod rows;
pub mod sink;

pub use batch::Batch;
pub use config::Config;
pub use decoder::Decoder;

use ft_base::error::{ExitCode, Failure};

/// Errors in a model's config.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("{file}: cannot be read: {source}")]
    Read { file: String, source: std::io::Error },
    /// The file is not UTF-8 or not a JSON object.
    #[error("{file}: {why}")]
    Syntax {
        file: String,
        /// Description of the problem, with line and column if known.
        why: String,
    },
    /// Unknown `model_type`.
    #[error("{file}: model_type: {found} is not a family that ft knows\n  hint: known are {known}")]
    Architecture {
        file: String,
        /// Value of `model_type` in the file.
        found: String,
        /// Comma-separated list of supported families.
        known: String,
    },
    /// A key is missing, malformed or not supported.
    #[error("{file}: {key}: {why}")]
    Key {
        file: String,
        /// Key, with dots for nested tables.
        key: String,
        why: String,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::Tensor(e) if e.exit_code() == ExitCode::DoesNotFit => ExitCode::DoesNotFit,
            _ => ExitCode::Model,
        }
    }
}

/// Result with this module's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
