//! GGUF export of models and adapters for llama.cpp: metadata keys, tensor names, rotary channel order,
//! tokenizer.
//!
//! Anything llama.cpp would compute differently is refused by name.

mod adapter;
mod keys;
mod model;
mod names;
mod tokenizer;

pub use adapter::write_adapter;
pub use model::write_model;

use crate::files::GgufValue;
use candle_core::DType;
use ft_base::error::{ExitCode, Failure};

/// A model or adapter unsupported by llama.cpp.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {why}")]
pub struct Error {
    /// File, key or tensor.
    pub place: String,
    /// Reason and hint.
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

/// Keys and values, in the order of the file.
type Keys = Vec<(String, GgufValue)>;

/// Name, dtype and shape of a tensor.
type Entry = (String, DType, Vec<usize>);

/// `general.file_type` of a file with matrices in `dtype`.
fn file_type(dtype: DType) -> u32 {
    match dtype {
        DType::F16 => 1,
        DType::BF16 => 32,
        _ => 0,
    }
}
