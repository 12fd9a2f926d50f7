use super::product::acc_composed;
use super::*;
use crate::check::{close, randn};
use crate::{Tensor, upcast};
use candle_core::{DType, Result};

#[test]
fn products_agree_with_candle() -> Result<()> {
    for dtype in [DType::F64, DType::F32] {
        let (a, b) = (randn(1, (7, 5), dtype)?, randn(2, (3, 5), dtype)?);
        close(&matmul(&a, false, &b, true)?, &a.matmul(&b.t()?)?, 1e-6);
        let (a, b) = (randn(1, (5, 7), dtype)?, randn(2, (5, 3), dtype)?);
        close(&matmul(&a, true, &b, false)?, &a.t()?.matmul(&b)?, 1e-6);
    }
    Ok(())
}

#[test]
fn accumulation_reaches_only_its_view() -> Result<()> {
    let flat = Tensor::ones(40, DType::F32, &candle_core::Device::Cpu)?;
    let (a, b) = (randn(3, (6, 4), DType::F32)?, randn(4, (6, 5), DType::F32)?);
    let c = flat.narrow(0, 10, 20)?.reshape((4, 5))?;
    matmul_acc(&c, &a, true, &b, false, 0.5)?;
    close(&c, &((a.t()?.matmul(&b)? * 0.5)? + 1.0)?, 1e-6);
    let (head, tail) = (flat.narrow(0, 0, 10)?.to_vec1::<f32>()?, flat.narrow(0, 30, 10)?.to_vec1::<f32>()?);
    assert!(head.iter().chain(&tail).all(|x| *x == 1.0));
    let other = Tensor::ones((4, 5), DType::F32, &candle_core::Device::Cpu)?;
    acc_composed(&other, &a, true, &b, false, 0.5)?;
    close(&other, &c, 1e-6);
    Ok(())
}

#[test]
fn parts_are_accumulated_as_one_by_one() -> Result<()> {
    parts_of(DType::F32)?;
    parts_of(DType::BF16)
}

fn parts_of(dtype: DType) -> Result<()> {
    let flat = Tensor::ones(4 * 64, DType::F32, &candle_core::Device::Cpu)?;
    let one_by_one = flat.copy()?;
    // enough products for any machine, out of order, with gaps
    let count = 64.min(4 * rayon::current_num_threads());
    let mut parts = Vec::new();
    for i in (0..count).rev() {
        let (a, b) = (randn(i as u64, (3, 1), dtype)?, randn(i as u64 + 99, (3, 3), dtype)?);
        // every third overwrites its slice
        let add = i % 3 > 0;
        let p = GradProduct { offset: 4 * i, rows: 1, cols: 3, a, b, alpha: 0.5, add, alike: 1.0 };
        let c = one_by_one.narrow(0, p.offset, 3)?.reshape((1, 3))?;
        matmul_onto((&c, add), &p.a, true, &p.b, false, p.alpha)?;
        if !add {
            close(&c, &(p.a.t()?.matmul(&p.b)? * 0.5)?, 0.02);
        }
        parts.push(p);
    }
    let mut overlapping = parts.clone();
    accumulate(&flat, parts.clone())?;
    assert_eq!(flat.to_vec1::<f32>()?, one_by_one.to_vec1::<f32>()?);
    overlapping[0].offset = overlapping[1].offset;
    accumulate(&flat, overlapping)?;
    parts[0].offset = 4 * 64;
    assert!(accumulate(&flat, parts.clone()).is_err());
    parts[0].offset = 0;
    parts[0].rows = 2;
    assert!(accumulate(&flat, parts).is_err());
    Ok(())
}

#[test]
fn bf16_is_widened_and_views_are_not_their_parent() -> Result<()> {
    let all = randn(5, (8, 6), DType::BF16)?;
    let x = randn(6, (4, 6), DType::BF16)?;
    let w = all.narrow(0, 2, 3)?;
    let want = x.to_dtype(DType::F32)?.matmul(&w.to_dtype(DType::F32)?.t()?)?.to_dtype(DType::BF16)?;
    close(&matmul(&x, false, &w, true)?, &want, 1e-2);
    Ok(())
}

#[test]
fn a_factor_is_not_rounded_to_half_precision() -> Result<()> {
    let (a, b) = (randn(7, (4, 3), DType::BF16)?, randn(8, (3, 5), DType::BF16)?);
    let start = randn(9, (4, 5), DType::BF16)?;
    let exact =
        (upcast(&start)? + (upcast(&a)?.matmul(&upcast(&b)?)? * (4.0 / 3.0))?)?.to_dtype(DType::BF16)?;
    let c = start.copy()?;
    matmul_acc(&c, &a, false, &b, false, 4.0 / 3.0)?;
    assert_eq!(upcast(&c)?.to_vec2::<f32>()?, upcast(&exact)?.to_vec2::<f32>()?);
    // the reference rounds the product, never the factor: results agree within one rounding
    let c = start.copy()?;
    acc_composed(&c, &a, false, &b, false, 4.0 / 3.0)?;
    close(&upcast(&c)?, &upcast(&exact)?, 1e-2);
    Ok(())
}

#[test]
fn shapes_that_do_not_fit_are_errors() -> Result<()> {
    let (a, b) = (randn(1, (7, 5), DType::F32)?, randn(2, (3, 4), DType::F32)?);
    assert!(matmul(&a, false, &b, true).is_err());
    assert!(matmul_acc(&a, &a, false, &b, true, 1.0).is_err());
    Ok(())
}
