//! Products by dequantized copies of a matrix against products that dequantize tile by tile.

use super::{CodeTables, Encoded};
use candle_core::{DType, Device, Result};
use ft_kernels::Tensor;
use ft_kernels::check::{on, randn};
use ft_kernels::dequantized::Dequantized;
use std::sync::Arc;

/// Whatever the shape, number of threads and dtype: the bits of the products that dequantize.
#[test]
fn products_have_the_bits_of_those_that_decode() -> Result<()> {
    let d = &Device::Cpu;
    for threads in [1, 2, 5] {
        on(threads, || -> Result<()> {
            for (rows, cols) in [(64, 64), (192, 64), (300, 640), (640, 1100), (70, 2112)] {
                for (dtype, t) in [(DType::F32, 1), (DType::F32, 7), (DType::F32, 130), (DType::BF16, 65)] {
                    let w = randn(1, (rows, cols), DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
                    let e =
                        Encoded::new("w", &w, (rows, cols), DType::BF16).map_err(candle_core::Error::wrap)?;
                    let blocks = Arc::new(e.into_matrix(true, dtype, &mut CodeTables::new(d)?)?);
                    let whole = Dequantized::new(Arc::clone(&blocks), 0)?;
                    let bits = |x: &Tensor| -> Result<Vec<u32>> {
                        let x = x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
                        Ok(x.into_iter().map(f32::to_bits).collect())
                    };
                    let what = format!("{rows} x {cols}, {t} rows, {dtype:?}, {threads} threads");
                    let (x, dy) = (randn(2, (t, cols), dtype)?, randn(3, (t, rows), dtype)?);
                    assert!(bits(&whole.forward(&x)?)? == bits(&blocks.forward(&x)?)?, "{what}");
                    let to = |add: bool| if add { x.copy().map(Some) } else { Ok(None) };
                    for add in [false, true] {
                        let ours = bits(&whole.backward(&dy, to(add)?)?)?;
                        assert!(ours == bits(&blocks.backward(&dy, to(add)?)?)?, "{what}, {add}");
                    }
                    let a = randn(4, (5, cols), dtype)?;
                    assert!(bits(&whole.times(&a)?)? == bits(&blocks.times(&a)?)?, "{what}");
                }
            }
            Ok(())
        })?;
    }
    let e = Encoded::new("w", &[1.0; 128], (2, 64), DType::F32).map_err(candle_core::Error::wrap)?;
    let whole = Dequantized::new(Arc::new(e.into_matrix(true, DType::F32, &mut CodeTables::new(d)?)?), 0)?;
    let wrong = randn(1, (3, 5), DType::F32)?;
    assert!(whole.forward(&wrong).is_err() && whole.backward(&wrong, None).is_err());
    Ok(())
}
