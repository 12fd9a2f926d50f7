//! 4-bit weights in bitsandbytes' formats.
//!
//! | file | content |
//! |---|---|
//! | `code` | code tables: NF4, FP4, and the 8-bit map of double quantization |
//! | `encode` | quantization of values to NF4 codes and scales |
//! | `state` | tensors of a quantized weight in a checkpoint: naming, validation, reading, writing |
//! | `parts` | lazy 4-bit weights, read or quantized by ranges for each rank |
//! | `checkpoint` | writes a quantized checkpoint |
//! | `merge_cost` | rounding loss of merged weights |
//! | `agree` | checks codes against the original weights |
//! | `source` | parallel quantization of a checkpoint tensor, never in memory as a whole |
//!
//! Dequantization and products with 4-bit matrices are in [`ft_kernels::quantized`].

mod agree;
mod checkpoint;
mod code;
mod encode;
mod merge_cost;
mod parts;
mod source;
mod state;

#[cfg(test)]
mod dequantized_tests;
#[cfg(test)]
mod tests;

pub use agree::agreement;
pub use checkpoint::{Report, quantize, quantize_into};
pub use code::{CodeBooks, Type};
pub use encode::{BLOCK, Encoded, Nested, Values, scales_of, unread};
pub use merge_cost::MergeCost;
pub use parts::{Place, Read, Unread, UnreadMatrix, UnreadScales};
pub use source::{dtype_of, from_files, scales};
pub use state::{Entry, entries, find, open, problems, read, source_dtype};

use crate::model::modules::{Group, Kind, Module};
use ft_base::error::{ExitCode, Failure};

/// Errors of 4-bit weights.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Inconsistent tensors of a quantized weight.
    #[error(
        "{file}: {name}: {why}\n  hint: fetch the checkpoint again, or quantize the model anew with `ft quantize`"
    )]
    State { file: String, name: String, why: String },
    /// A non-finite value.
    #[error("{name}: has a value that is not finite; it cannot be quantized")]
    NotFinite { name: String },
    /// A dtype or shape unsupported by quantization.
    #[error("{name}: {dtype}; F64, F32, F16 and BF16 can be quantized")]
    Dtype {
        name: String,
        /// Dtype or shape in the file.
        dtype: String,
    },
    /// The model is 4-bit already.
    #[error("{dir}: is a 4-bit checkpoint already (quantization_config in config.json)")]
    Already { dir: String },
    /// The output folder cannot be used.
    #[error("{dir}: {why}")]
    Folder {
        dir: String,
        /// Reason and hint.
        why: String,
    },
}

impl Failure for Error {
    fn exit_code(&self) -> ExitCode {
        match self {
            Error::Folder { .. } => ExitCode::Usage,
            _ => ExitCode::Model,
        }
    }
}

/// File in a `model.cache` folder that identifies the source of the copy.
pub const CACHE_MARKER: &str = "ft-cache.json";

/// Whether `model.quantize` applies to a module's weight: linears of decoder layers, experts included.
/// Head, embedding, norms and routers stay unquantized.
pub fn takes(m: &Module) -> bool {
    m.layer.is_some() && matches!(m.kind, Kind::Linear { .. }) && m.group != Group::Router
}
