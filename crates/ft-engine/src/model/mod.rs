//! The mathematics of a decoder: hand-written forward and backward of each module.
//!
//! A family is data ([`family`]); one decoder [`layer`] covers all of them. Each module has
//! `forward -> (y, Saved)` and `backward(Saved, dy, sink) -> dx` on untracked tensors; what a backward needs
//! is what `Saved` holds, and gradients of trained tensors go into the [`sink`], never into a tape.
//!
//! Axes in names: `t` tokens of a micro-batch (documents end to end, no padding), `d` model width,
//! `h` query heads, `g` key/value heads, `c` channels of a head, `f` feed-forward width, `v` vocabulary,
//! `o`/`i` out and in features, `r` LoRA rank, `e` experts, `k` experts a token, `n` rows sorted by expert.

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

/// Problems of a model's config.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("{file}: cannot be read: {source}")]
    Read {
        /// Path.
        file: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// The file is not a JSON object.
    #[error("{file}: {why}")]
    Syntax {
        /// Path.
        file: String,
        /// What is wrong, with line and column where known.
        why: String,
    },
    /// No such family.
    #[error("{file}: model_type: {found} is not a family that ft knows\n  hint: known are {known}")]
    Architecture {
        /// Path.
        file: String,
        /// What the file says.
        found: String,
        /// What there is.
        known: String,
    },
    /// A key is missing, malformed or not supported.
    #[error("{file}: {key}: {why}")]
    Key {
        /// Path.
        file: String,
        /// Name of the key.
        key: String,
        /// What is wrong.
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

/// A result of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;
