//! 4-bit weights as bitsandbytes makes and stores them.
//!
//! | file | what it does |
//! |---|---|
//! | `code` | the tables: NF4, FP4, and the 8-bit map of double quantization |
//! | `encode` | values to codes and scales (NF4) |
//! | `state` | the tensors of a quantized weight in a checkpoint: checked and read, named and written |
//! | `parts` | a weight of which each rank reads, or makes, its part |
//! | `agree` | whether codes were made from given weights |
//! | `source` | a tensor of a checkpoint to 4-bit, in pieces and in parallel: never whole in memory |
//!
//! Dequantizing, and products with 4-bit matrices, are in [`ft_kernels::quantized`].

mod agree;
mod code;
mod encode;
mod parts;
mod source;
mod state;

#[cfg(test)]
mod dequantized_tests;
#[cfg(test)]
mod tests;

pub use agree::agreement;
pub use code::{CodeBooks, Type};
pub use encode::{BLOCK, Encoded, Nested, Values, scales_of, unread};
pub use parts::{Place, Read, Unread, UnreadMatrix, UnreadScales};
pub use source::{dtype_of, from_files, scales};
pub use state::{Entry, entries, find, open, problems, read, source_dtype};

use ft_base::error::{ExitCode, Failure};
use crate::model::modules::{Group, Kind, Module};

/// Problems of 4-bit weights.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A quantized tensor of a checkpoint that does not hold together.
    #[error(
        "{file}: {name}: {why}\n  hint: fetch the checkpoint again, or quantize the model anew with `ft quantize`"
    )]
    State {
        /// The folder.
        file: String,
        /// The weight.
        name: String,
        /// What is wrong.
        why: String,
    },
    /// A value that cannot be quantized.
    #[error("{name}: has a value that is not finite; it cannot be quantized")]
    NotFinite {
        /// The tensor.
        name: String,
    },
    /// A number format that cannot be quantized.
    #[error("{name}: {dtype}; F64, F32, F16 and BF16 can be quantized")]
    Dtype {
        /// The tensor.
        name: String,
        /// What the file says.
        dtype: String,
    },
    /// A model that is 4-bit already.
    #[error("{dir}: is a 4-bit checkpoint already (quantization_config in config.json)")]
    Already {
        /// The folder.
        dir: String,
    },
    /// A folder that may not be written.
    #[error("{dir}: {why}")]
    Folder {
        /// The folder.
        dir: String,
        /// Why not, and what to do.
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

/// The file in a folder of `model.cache` that says of what it is a copy.
pub const CACHE_MARKER: &str = "ft-cache.json";

/// Whether `model.quantize` makes a module's weight 4-bit: decoder linears and experts. Head, embedding, norms
/// and routers stay as they are.
pub fn takes(m: &Module) -> bool {
    m.layer.is_some() && matches!(m.kind, Kind::Linear { .. }) && m.group != Group::Router
}
