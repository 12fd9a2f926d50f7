//! Tests dequantization against the definition, and products against those of the dequantized matrix.

use super::tiles::FEW;
use super::*;
use crate::Tensor;
use crate::check::{close, on, randn};
use crate::gemm;
use candle_core::{DType, Device, Result};
use std::sync::Arc;

/// A matrix of pseudo-random codes and scales, beyond the range of any encoder.
pub(super) struct Made {
    pub w: QuantizedMatrix,
    pub packed: Vec<u8>,
    scales: Vec<f32>,
    code: [f32; 16],
}

pub(super) fn made(
    dims: (usize, usize),
    block: usize,
    group: Option<usize>,
    source: DType,
    compute: DType,
) -> Result<Made> {
    let cpu = &Device::Cpu;
    let n = dims.0 * dims.1;
    let byte = |i: usize| (i.wrapping_mul(2_654_435_761) >> 7) as u8;
    let packed: Vec<u8> = (0..n.div_ceil(2)).map(byte).collect();
    let code: [f32; 16] = std::array::from_fn(|i| (i as f32 - 7.3) / 8.7);
    let blocks = n.div_ceil(block);
    let (scales, host) = match group {
        None => {
            let s: Vec<f32> = (0..blocks).map(|b| 0.01 + f32::from(byte(b + 99)) / 300.0).collect();
            (Scales::Plain(Tensor::new(s.as_slice(), cpu)?), s)
        }
        Some(group) => {
            let codes: Vec<u8> = (0..blocks).map(|b| byte(b + 7)).collect();
            let map: Vec<f32> = (0..256).map(|i| (i as f32 - 127.7) / 128.3).collect();
            let absmax: Vec<f32> = (0..blocks.div_ceil(group)).map(|g| 0.3 + g as f32 * 0.07).collect();
            let host =
                codes.iter().enumerate().map(|(b, c)| map[*c as usize] * absmax[b / group] + 0.41).collect();
            let s = Scales::Nested {
                codes: Tensor::new(codes, cpu)?,
                map: Tensor::new(map, cpu)?,
                absmax: Tensor::new(absmax, cpu)?,
                group,
                offset: 0.41,
            };
            (s, host)
        }
    };
    let book = Arc::new(Codebook::new(code, cpu)?);
    let tensor = Tensor::new(packed.as_slice(), cpu)?;
    Ok(Made {
        w: QuantizedMatrix::new(dims, block, tensor, scales, book, source, compute)?,
        packed,
        scales: host,
        code,
    })
}

/// All relevant shapes: whole blocks, blocks across rows, a short last block, an odd number of values,
/// many groups of scales, more columns than a tile.
fn all() -> Result<Vec<Made>> {
    let (f32s, f64s) = (DType::F32, DType::F64);
    Ok(vec![
        made((12, 128), 64, None, f32s, f64s)?,
        made((9, 48), 64, Some(256), DType::BF16, f64s)?,
        made((7, 50), 64, Some(4), f32s, f64s)?,
        made((5, 13), 32, None, DType::F16, f64s)?,
        made((300, 64), 32, Some(256), DType::BF16, f32s)?,
        made((6, 4096), 4096, Some(256), f32s, DType::BF16)?,
        made((3, 700), 128, None, DType::BF16, DType::F16)?,
    ])
}

pub(super) fn bits(t: &Tensor) -> Result<Vec<u64>> {
    Ok(t.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?.into_iter().map(f64::to_bits).collect())
}

/// Asserts bit equality, and reports the number of differences.
#[track_caller]
fn same(what: &QuantizedMatrix, a: &Tensor, b: &Tensor) -> Result<()> {
    let (a, b) = (bits(a)?, bits(b)?);
    assert_eq!(a.len(), b.len());
    let differ: Vec<_> = a.iter().zip(&b).filter(|(x, y)| x != y).collect();
    let first = differ.first().map(|(x, y)| (f64::from_bits(**x), f64::from_bits(**y)));
    assert!(differ.is_empty(), "{:?}, block {}: {} differ: {first:?}", what.dims(), what.block, differ.len());
    Ok(())
}

#[test]
fn decoding_is_code_times_scale_rounded_twice() -> Result<()> {
    for m in all()? {
        let (rows, cols) = m.w.dims();
        let want: Vec<f32> = (0..rows * cols)
            .map(|i| {
                let byte = m.packed[i / 2];
                m.code[if i % 2 == 0 { byte >> 4 } else { byte & 15 } as usize] * m.scales[i / m.w.block]
            })
            .collect();
        let want = Tensor::from_vec(want, (rows, cols), &Device::Cpu)?;
        let want = want.to_dtype(m.w.source)?.to_dtype(m.w.compute)?;
        same(&m.w, &m.w.dequantize()?, &want)?;
        for part in [0..1, 1..rows, rows / 2..rows / 2] {
            let rows = want.narrow(0, part.start, part.len())?;
            same(&m.w, &m.w.dequantize_rows(part)?, &rows)?;
        }
        assert!(m.w.dequantize_rows(0..rows + 1).is_err());
    }
    Ok(())
}

/// The fallback for other devices, run on the CPU.
#[test]
fn composed_decoding_gives_the_same_bits() -> Result<()> {
    for m in all()? {
        let rows = m.w.dims().0;
        for part in [0..rows, 1..rows, rows - 1..rows] {
            let (a, b) = (m.w.dequantize_composed(part.clone())?, m.w.dequantize_rows(part)?);
            assert_eq!(a.dtype(), b.dtype());
            same(&m.w, &a, &b)?;
        }
    }
    Ok(())
}

/// Hashes of all values of `create_dynamic_map` of bitsandbytes 0.50.2, with torch 2.15 on AVX2 and AVX-512.
#[test]
fn dynamic_maps_are_those_of_bitsandbytes() {
    for (signed, hash) in [(true, 0xbccb_8e6c_a441_6a6c), (false, 0xc018_be81_058e_22f4)] {
        let add = |hash: u64, x: &f32| hash.wrapping_mul(31).wrapping_add(x.to_bits().into());
        assert_eq!(dynamic_map(signed).iter().fold(0, add), hash, "signed: {signed}");
    }
}

#[test]
fn products_are_those_of_the_dequantized_matrix() -> Result<()> {
    for m in all()? {
        let (o, i) = m.w.dims();
        for (dtype, bar, t) in [(DType::F64, 1e-14, 5), (DType::F32, 2e-6, 1), (DType::F32, 1e-6, FEW + 1)] {
            let dense = m.w.dequantize()?.to_dtype(dtype)?;
            let (x, dy) = (randn(1, (t, i), dtype)?, randn(2, (t, o), dtype)?);
            close(&m.w.forward(&x)?, &gemm::matmul(&x, false, &dense, true)?, bar);
            let want = gemm::matmul(&dy, false, &dense, false)?;
            close(&m.w.backward(&dy, None)?, &want, bar);
            let there = randn(3, (t, i), dtype)?;
            let sum = m.w.backward(&dy, Some(there.copy()?))?;
            close(&sum, &(there + want)?, bar);
            close(&m.w.times(&x)?, &gemm::matmul(&dense, false, &x, true)?, bar);
        }
        let want = m.w.dequantize()?.to_dtype(m.w.row_squares()?.dtype())?.sqr()?.sum(1)?;
        close(&m.w.row_squares()?, &want, 1e-6);
    }
    Ok(())
}

#[test]
fn threads_change_no_bit() -> Result<()> {
    let m = made((600, 640), 64, Some(256), DType::BF16, DType::F32)?;
    let (x, dy) = (randn(1, (33, 640), DType::F32)?, randn(2, (33, 600), DType::F32)?);
    let few = randn(1, (3, 640), DType::F32)?;
    let run = || -> Result<_> {
        let forward = [bits(&m.w.forward(&x)?)?, bits(&m.w.forward(&few)?)?];
        Ok((forward, bits(&m.w.backward(&dy, None)?)?))
    };
    let one = on(1, run)?;
    assert!(one == on(2, run)? && one == on(5, run)?);
    Ok(())
}

#[test]
fn parts_that_do_not_fit_are_errors() -> Result<()> {
    let m = made((8, 64), 64, None, DType::F32, DType::F32)?;
    let (packed, scales) = m.w.parts();
    let make = |dims, block| {
        let book = m.w.book.clone();
        QuantizedMatrix::new(dims, block, packed.clone(), scales.clone(), book, DType::F32, DType::F32)
    };
    assert!(make((8, 64), 64).is_ok());
    for (dims, block) in [((8, 65), 64), ((8, 64), 32), ((8, 64), 0), ((8, 64), 63), ((9, 64), 64)] {
        assert!(make(dims, block).is_err(), "{dims:?} {block}");
    }
    let x = randn(1, (3, 65), DType::F32)?;
    assert!(m.w.forward(&x).is_err() && m.w.backward(&x, None).is_err());
    assert!(m.w.backward(&randn(1, (3, 8), DType::F32)?, Some(x)).is_err());
    Ok(())
}
