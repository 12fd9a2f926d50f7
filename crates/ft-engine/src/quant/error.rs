//! Errors of quantization.

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
    /// A cut within a byte of two codes.
    #[error(
        "{name}: a rank's part is [{rows}, {cols}], and two 4-bit codes are one byte\n  hint: a parallel.tensor that \
         leaves even parts"
    )]
    Cut {
        name: String,
        /// Rows and columns of a rank.
        rows: usize,
        cols: usize,
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
