//! Keys and types of a GGUF file.

use crate::files::GgufValue;
use candle_core::DType;

/// Keys and values, in the order of the file.
pub(super) type Keys = Vec<(String, GgufValue)>;

/// Stands for MXFP4, in bytes.
pub(super) const MXFP4: DType = DType::U8;

/// `general.file_type` of a file with matrices in `dtype`.
pub(super) fn file_type(dtype: DType) -> u32 {
    match dtype {
        DType::F16 => 1,
        DType::BF16 => 32,
        MXFP4 => 38,
        _ => 0,
    }
}
