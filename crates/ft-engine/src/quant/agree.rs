//! Checks whether 4-bit codes were made from given weights.

use super::codebook::CodeTables;
use super::stored;
use crate::files::TensorFiles;
use candle_core::{DType, Device};
use rayon::prelude::*;

/// Share of values in a weight of `dims` for which quantizing `original` reproduces the code in `four`, for
/// any 4-bit type and block size. Near 1 if `four` was made from `original`: only ties can differ.
///
/// # Errors
/// A weight that is not quantized in `four`, or unreadable in either.
pub fn agreement(
    four: &TensorFiles,
    original: &TensorFiles,
    name: &str,
    dims: (usize, usize),
) -> ft_base::Result<f64> {
    let cpu = &Device::Cpu;
    let blocks = stored::read(four, name, dims, DType::F32, &mut CodeTables::new(cpu)?)?;
    let table = stored::kind(four, name).map_or([0.0; 16], |t| t.table());
    let codes = blocks.parts().0.flatten_all()?.to_vec1::<u8>()?;
    let values = original.tensor(name, blocks.source_dtype(), cpu)?.to_dtype(DType::F32)?;
    let values = values.flatten_all()?.to_vec1::<f32>()?;
    let size = blocks.block();
    let same: usize = values
        .par_chunks(size)
        .zip(codes.par_chunks(size / 2))
        .map(|(values, codes)| {
            let largest = values.iter().fold(0f32, |m, x| m.max(x.abs()));
            let unit = if largest > 0.0 { 1.0 / largest } else { 0.0 };
            let has = |i: usize| {
                table[usize::from(if i.is_multiple_of(2) { codes[i / 2] >> 4 } else { codes[i / 2] & 15 })]
            };
            let is = |x: f32| {
                table
                    .iter()
                    .fold(f32::INFINITY, |best, t| if (t - x).abs() < (best - x).abs() { *t } else { best })
            };
            values.iter().enumerate().filter(|(i, x)| has(*i) == is(**x * unit)).count()
        })
        .sum();
    Ok(same as f64 / values.len().max(1) as f64)
}
