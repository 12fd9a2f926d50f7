//! Checks whether 4-bit codes were made from given weights.

use super::codebook::Type;
use super::lazy::LazyScales;
use super::stored;
use crate::files::TensorFiles;
use candle_core::{DType, Device};
use rayon::prelude::*;

/// Share of values in a weight of `dims` for which quantizing `original` reproduces the code in `four`, for
/// any 4-bit type and block size. Near 1 if `four` was made from `original`: only ties can differ.
///
/// # Errors
/// A weight not quantized in `four`, or unreadable in either.
pub fn agreement(
    four: &TensorFiles,
    original: &TensorFiles,
    name: &str,
    dims: (usize, usize),
) -> ft_base::Result<f64> {
    let w = stored::open(four, name, dims)?;
    let (table, size) = (w.kind.table(), w.block);
    let codes = (w.packed.read)(0..w.packed.len)?.to_vec1::<u8>()?;
    let values = original.tensor(name, w.source, &Device::Cpu)?.to_dtype(DType::F32)?;
    let values = values.flatten_all()?.to_vec1::<f32>()?;
    // MXFP4's scales are powers of two; the other types scale the largest value of a block to 1.
    let powers = match w.scales {
        LazyScales::Nested { codes, map, .. } if w.kind == Type::Mxfp4 => {
            let codes = (codes.read)(0..codes.len)?.to_vec1::<u8>()?;
            Some(codes.into_iter().map(|c| map[usize::from(c)]).collect::<Vec<f32>>())
        }
        _ => None,
    };
    let same: usize = values
        .par_chunks(size)
        .zip(codes.par_chunks(size / 2))
        .enumerate()
        .map(|(block, (values, codes))| {
            let scale = match &powers {
                Some(powers) => powers[block],
                None => values.iter().fold(0f32, |m, x| m.max(x.abs())),
            };
            let unit = if scale > 0.0 { 1.0 / scale } else { 0.0 };
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

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Tensor;

    /// MXFP4 codes agree with the values that they stand for, and of twice these with the zeros and the largest.
    #[test]
    fn mxfp4_codes_agree_only_with_the_weights_they_encode() -> ft_base::Result<()> {
        let dir = tempfile::tempdir().map_err(candle_core::Error::wrap)?;
        let files = |file: &str, tensors: &[(String, Tensor)]| -> ft_base::Result<TensorFiles> {
            let path = dir.path().join(file);
            crate::files::write_file(&path, tensors, &[])?;
            Ok(TensorFiles::open_file(&path)?)
        };
        // Every code in each half of a byte; the scale is 2^2.
        let codes: Vec<u8> = (0..16).map(|c| c << 4 | (15 - c)).collect();
        let table = Type::Mxfp4.table();
        let value = |code: u8| 4.0 * table[usize::from(code)];
        let values: Vec<f32> = codes.iter().flat_map(|b| [value(b & 15), value(b >> 4)]).collect();
        let blocks = Tensor::from_vec(codes, (1, 1, 16), &Device::Cpu)?;
        let scales = Tensor::from_vec(vec![129u8], (1, 1), &Device::Cpu)?;
        let four = files("four.safetensors", &[("w.blocks".into(), blocks), ("w.scales".into(), scales)])?;
        let values = Tensor::from_vec(values, (1, 32), &Device::Cpu)?;
        for (times, share) in [(1f64, 1.0), (2.0, 0.25)] {
            let original = files(&format!("{times}.safetensors"), &[("w".into(), (&values * times)?)])?;
            assert_eq!(agreement(&four, &original, "w", (1, 32))?, share, "{times}");
        }
        Ok(())
    }
}
