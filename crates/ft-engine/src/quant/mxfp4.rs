//! MXFP4 (OCP Microscaling Formats v1.0): 32 values share a power of two.
//!
//! A weight `[o, i]` is two u8 tensors: `weight.blocks` `[o, i / 32, 16]`, where byte j of a block holds value 2j in
//! its low and value 2j + 1 in its high half, and `weight.scales` `[o, i / 32]`, exponents with a bias of 127.

use super::codebook::Type;
use super::error::Error;
use super::lazy::{LazyMatrix, LazyScales, LazyVector};
use crate::files::{MXFP4_BLOCK, TensorFiles};
use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;

/// Last components of the names of codes and scales.
pub const MXFP4_PARTS: [&str; 2] = ["blocks", "scales"];
/// Exponent code of NaN.
const NAN: u8 = 255;
/// Largest exponent code that keeps every value finite: 6 times 2^125.
const LARGEST: u8 = 252;

/// Names of the two tensors of a weight, if the files hold it in MXFP4.
pub(super) fn find(files: &TensorFiles, weight: &str) -> Option<Vec<String>> {
    let names = MXFP4_PARTS.map(|part| format!("{weight}.{part}"));
    files.info(&names[0]).is_some().then(|| names.into())
}

/// Defects of the two tensors of a weight of `dims`, except for their values.
pub(super) fn problems(files: &TensorFiles, weight: &str, (o, i): (usize, usize)) -> Option<String> {
    let wanted = [vec![o, i / MXFP4_BLOCK, MXFP4_BLOCK / 2], vec![o, i / MXFP4_BLOCK]];
    if i % MXFP4_BLOCK != 0 {
        return Some(format!("{i} columns in MXFP4; a multiple of {MXFP4_BLOCK} is wanted"));
    }
    for (part, shape) in MXFP4_PARTS.into_iter().zip(wanted) {
        match files.info(&format!("{weight}.{part}")) {
            None => return Some(format!("{part} is missing")),
            Some(i) if i.dtype != Dtype::U8 || i.shape != shape => {
                return Some(format!("{part} is {} {:?}; U8 {shape:?} is wanted", i.dtype, i.shape));
            }
            Some(_) => {}
        }
    }
    None
}

/// Opens a weight of `dims` for lazy reading.
///
/// # Errors
/// [`Error::State`] with the weight's name for tensors of other sizes; read errors.
pub(super) fn open<'a>(
    files: &'a TensorFiles,
    weight: &str,
    dims: (usize, usize),
) -> ft_base::Result<LazyMatrix<'a>> {
    let fail = {
        let (file, name) = (files.path_of(&format!("{weight}.{}", MXFP4_PARTS[0])), weight.to_string());
        let file = file.map_or(String::new(), |p| p.display().to_string());
        move |why: String| ft_base::Error::from(Error::State { file: file.clone(), name: name.clone(), why })
    };
    if let Some(why) = problems(files, weight, dims) {
        return Err(fail(why));
    }
    let (n, blocks) = (dims.0 * dims.1, dims.0 * dims.1 / MXFP4_BLOCK);
    let [codes, scales] = MXFP4_PARTS.map(|part| format!("{weight}.{part}"));
    let packed = LazyVector {
        dtype: DType::U8,
        len: n / 2,
        read: Box::new(move |r| {
            // ours have the first code in the high half
            let turned: Vec<u8> = files.read_part(&codes, r)?.into_iter().map(|b| b.rotate_left(4)).collect();
            Ok(Tensor::new(turned, &Device::Cpu)?)
        }),
    };
    let exponents = LazyVector {
        dtype: DType::U8,
        len: blocks,
        read: Box::new(move |r| {
            let bytes = files.read_part(&scales, r)?;
            match bytes.iter().copied().max() {
                Some(NAN) => Err(fail("a scale is not a number".into())),
                Some(e) if e > LARGEST => Err(fail("a scale makes infinite weights".into())),
                _ => Ok(Tensor::new(bytes, &Device::Cpu)?),
            }
        }),
    };
    Ok(LazyMatrix {
        dims,
        block: MXFP4_BLOCK,
        kind: Type::Mxfp4,
        // every value is exact in bf16
        source: DType::BF16,
        packed,
        scales: LazyScales::Nested {
            codes: exponents,
            factors: LazyVector::of(vec![1f32]),
            map: (0..=255).map(|e| 2f32.powi(e - 127)).collect(),
            group: blocks.next_power_of_two(),
            offset: 0.0,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::{self, CodeTables};

    /// The published example of the order of halves: byte 0x21 is 0.5, then 1; times the power of two.
    #[test]
    fn a_block_is_sixteen_values_times_a_power_of_two() -> ft_base::Result<()> {
        let dir = tempfile::tempdir().map_err(candle_core::Error::wrap)?;
        let mut codes = vec![0u8; 32];
        codes[0] = 0x21;
        codes[1] = 0xf9;
        codes[16] = 0x07;
        let blocks = Tensor::from_vec(codes, (2, 1, 16), &Device::Cpu)?;
        let scales = Tensor::from_vec(vec![128u8, 126], (2, 1), &Device::Cpu)?;
        let path = dir.path().join("model.safetensors");
        crate::files::write_file(&path, &[("w.blocks".into(), blocks), ("w.scales".into(), scales)], &[])?;
        let files = TensorFiles::open_file(&path)?;
        let mut books = CodeTables::new(&Device::Cpu)?;
        let w = quant::read(&files, "w", (2, 32), DType::F32, &mut books)?.dequantize()?;
        let rows = w.to_vec2::<f32>()?;
        assert_eq!(rows[0][..5], [1.0, 2.0, -1.0, -12.0, 0.0]);
        assert_eq!(rows[1][..2], [3.0, 0.0]);
        assert!(quant::read(&files, "w", (2, 64), DType::F32, &mut books).is_err());
        Ok(())
    }

    /// The largest scale keeps all values finite; larger ones are refused by name.
    #[test]
    fn scales_without_finite_weights_are_refused() -> ft_base::Result<()> {
        let dir = tempfile::tempdir().map_err(candle_core::Error::wrap)?;
        let path = dir.path().join("model.safetensors");
        for (scale, says) in [
            (LARGEST, None),
            (LARGEST + 1, Some("w: a scale makes infinite weights")),
            (NAN - 1, Some("w: a scale makes infinite weights")),
            (NAN, Some("w: a scale is not a number")),
        ] {
            let blocks = Tensor::full(0x77u8, (1, 1, 16), &Device::Cpu)?;
            let scales = Tensor::full(scale, (1, 1), &Device::Cpu)?;
            let parts = [("w.blocks".into(), blocks), ("w.scales".into(), scales)];
            crate::files::write_file(&path, &parts, &[])?;
            let files = TensorFiles::open_file(&path)?;
            let mut books = CodeTables::new(&Device::Cpu)?;
            match (quant::read(&files, "w", (1, 32), DType::F32, &mut books), says) {
                (Ok(w), None) => {
                    let values = w.dequantize()?.flatten_all()?.real()?.to_vec1::<f32>()?;
                    assert!(values.iter().all(|x| x.is_finite()), "{scale}");
                }
                (Err(e), Some(says)) => assert!(e.to_string().contains(says), "{scale}: {e}"),
                (read, _) => panic!("{scale}: {:?}", read.map(drop).map_err(|e| e.to_string())),
            }
        }
        Ok(())
    }
}
