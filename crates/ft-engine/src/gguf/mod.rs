//! Models and adapters as llama.cpp reads them: GGUF files with its keys, its names of tensors, its order of rotary
//! channels, its tokenizer.
//!
//! What llama.cpp would compute otherwise than `ft` is refused by name, never written.

mod adapter;
mod keys;
mod model;
mod names;
mod tokenizer;

pub use adapter::write_adapter;
pub use model::write_model;

use ft_base::error::{ExitCode, Failure};
use crate::files::GgufValue;
use candle_core::DType;

/// What llama.cpp cannot hold, or computes otherwise.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {why}")]
pub struct Error {
    /// The file, key or tensor.
    pub place: String,
    /// What is wrong, and what to do.
    pub why: String,
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        ExitCode::Model
    }
}

fn refuse<T>(place: impl Into<String>, why: impl Into<String>) -> Result<T, Error> {
    Err(Error { place: place.into(), why: why.into() })
}

/// Keys with their values, in the order of the file.
type Keys = Vec<(String, GgufValue)>;

/// Name, dtype and shape of a tensor.
type Entry = (String, DType, Vec<usize>);

/// What llama.cpp calls a file whose matrices are of a dtype (`general.file_type`).
fn file_type(dtype: DType) -> u32 {
    match dtype {
        DType::F16 => 1,
        DType::BF16 => 32,
        _ => 0,
    }
}
