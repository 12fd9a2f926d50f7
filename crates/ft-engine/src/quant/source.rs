//! Quantizes checkpoint tensors while reading, in parallel pieces; a tensor is never in memory as a whole.

use super::encode::{self, BLOCK, Encoded};
use super::error::Error;
use crate::files::TensorFiles;
use crate::model::modules::{Group, Kind, Module};
use candle_core::{DType, Device};
use ft_kernels::cpu;
use safetensors::Dtype;

/// Values read and quantized per task.
const PIECE: usize = 1 << 20;

/// Quantizes the matrix `name`, reading pieces of whole rows.
///
/// # Errors
/// A tensor that is missing, not a matrix, of an unsupported dtype, or not finite.
pub fn from_files(files: &TensorFiles, name: &str) -> ft_base::Result<Encoded> {
    pass(files, name, true)
}

/// As [`from_files`], but computes only the scales; all codes are zero.
///
/// # Errors
/// As [`from_files`].
pub fn scales(files: &TensorFiles, name: &str) -> ft_base::Result<Encoded> {
    pass(files, name, false)
}

/// Dtype of a quantizable tensor.
///
/// # Errors
/// A missing tensor or an unsupported dtype.
pub fn dtype_of(files: &TensorFiles, name: &str) -> ft_base::Result<DType> {
    match files.get(name)?.dtype {
        Dtype::F64 => Ok(DType::F64),
        Dtype::F32 => Ok(DType::F32),
        Dtype::F16 => Ok(DType::F16),
        Dtype::BF16 => Ok(DType::BF16),
        // Products of codes and scales.
        Dtype::F8_E4M3 if files.is_scaled(name) => Ok(DType::F32),
        other => Err(Error::Dtype { name: name.into(), dtype: other.to_string() }.into()),
    }
}

fn pass(files: &TensorFiles, name: &str, codes: bool) -> ft_base::Result<Encoded> {
    let (info, source) = (files.get(name)?, dtype_of(files, name)?);
    let (rows, cols) = match info.shape[..] {
        [rows, cols] if rows > 0 && cols > 0 => (rows, cols),
        _ => return Err(Error::Dtype { name: name.into(), dtype: format!("shape {:?}", info.shape) }.into()),
    };
    let mut e = Encoded::empty((rows, cols), source);
    // Pieces are whole rows and whole blocks.
    let unit = (1..BLOCK).find(|rows| (rows * cols).is_multiple_of(BLOCK)).unwrap_or(BLOCK);
    let rows_a_piece = unit * (PIECE / (unit * cols)).max(1);
    let values = rows_a_piece * cols;
    let pieces = e.packed.chunks_mut(values / 2).zip(e.scales.chunks_mut(values / BLOCK));
    let done = cpu::map(pieces.enumerate(), |(i, (packed, scales))| {
        let (first, end) = (i * rows_a_piece, rows.min((i + 1) * rows_a_piece));
        let values =
            files.part(name, first * cols..end * cols, DType::F32, &Device::Cpu)?.to_vec1::<f32>()?;
        // `part` refuses non-finite values.
        encode::encode(&values, packed, scales, codes);
        Ok(())
    });
    done.into_iter().collect::<ft_base::Result<()>>()?;
    Ok(e)
}

/// Whether `model.quantize` applies to a module's weight: linears of decoder layers, experts included.
/// Head, embedding, norms and routers stay unquantized.
pub fn applies_to(m: &Module) -> bool {
    m.layer.is_some() && matches!(m.kind, Kind::Linear { .. }) && m.group != Group::Router
}
