use super::half::{Format, Half};
use super::*;
use crate::Tensor;
use crate::check::{on, randn};
use crate::gemm::{matmul as product_of, matmul_acc, serial};
use ::half::{bf16, f16};
use candle_core::{DType, Result};

/// Rows, inner values and columns: around the crate's special cases (one row, few values, small matrices,
/// long sums), and around panels and squares.
const SIZES: [(usize, usize, usize); 25] = [
    (1, 1, 1),
    (1, 40, 7),
    (1, 700, 256),
    (1, 700, 257),
    (1, 1100, 1500),
    (2, 3, 128),
    (2, 700, 129),
    (3, 513, 85),
    (3, 90, 86),
    (4, 600, 64),
    (5, 2, 300),
    (5, 1, 70),
    (16, 700, 16),
    (16, 700, 17),
    (17, 1030, 33),
    (64, 1300, 64),
    (65, 1300, 64),
    (64, 1300, 65),
    (130, 31, 127),
    (70, 511, 129),
    (49, 2051, 300),
    (300, 520, 1),
    (200, 520, 1),
    (7, 1537, 640),
    (128, 96, 385),
];

fn values(t: &Tensor) -> Result<Vec<u32>> {
    Ok(t.flatten_all()?.to_vec1::<f32>()?.into_iter().map(f32::to_bits).collect())
}

/// Every layout and size, alone and accumulated, in both dtypes and on any number of threads, matches the
/// product with the widened matrix bit for bit.
#[test]
fn bits_are_those_of_the_widened_matrix() -> Result<()> {
    for (i, (m, k, n)) in SIZES.into_iter().enumerate() {
        for (half, ta, tb) in [
            (DType::BF16, false, true),
            (DType::BF16, false, false),
            (DType::F16, false, true),
            (DType::F16, true, false),
            (DType::BF16, true, true),
        ] {
            let what = format!("{m} {k} {n} {half:?} {ta} {tb}");
            let shape = |t: bool, r: usize, c: usize| if t { (c, r) } else { (r, c) };
            let a = randn(i as u64, shape(ta, m, k), DType::F32)?;
            let b = randn(50 + i as u64, shape(tb, k, n), half)?;
            let whole = b.to_dtype(DType::F32)?;
            let want = values(&product_of(&a, ta, &whole, tb)?)?;
            assert!(takes(&a, &b) && !takes(&a, &whole), "{what}");
            let product = || values(&product_of(&a, ta, &b, tb)?);
            assert!(serial(product)? == want, "{what}");
            for threads in [1, 2, 5] {
                assert!(on(threads, product)? == want, "{what} on {threads} threads");
            }
            let sums = || randn(99, (m, n), DType::F32);
            let (c, d) = (sums()?, sums()?);
            matmul_acc(&c, &a, ta, &b, tb, 0.75)?;
            matmul_acc(&d, &a, ta, &whole, tb, 0.75)?;
            assert!(values(&c)? == values(&d)?, "{what}, added");
        }
    }
    Ok(())
}

/// NaN, infinity and subnormals widen exactly, on both transposition paths.
#[test]
fn every_number_is_widened_to_itself() {
    for format in [Format::Bf16, Format::F16] {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        let values = Half { bits: &bits, format };
        let want = |b: u16| match format {
            Format::Bf16 => bf16::from_bits(b).to_f32(),
            Format::F16 => f16::from_bits(b).to_f32(),
        };
        // NaN payloads don't count
        let same = |x: f32, y: f32| x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan());
        let (lines, k) = (250, 256);
        let mut turned = vec![0f32; lines * 201];
        transpose::transpose(values, (3..3 + lines, k), 50..251, &mut turned);
        let mut wide = vec![0f32; bits.len()];
        values.widen(0, &mut wide);
        assert!(bits.iter().zip(&wide).all(|(b, x)| same(*x, want(*b))));
        for (i, x) in turned.iter().enumerate() {
            let (p, l) = (i / lines, i % lines);
            assert!(same(*x, want(((3 + l) * k + 50 + p) as u16)), "{format:?}: {p} {l}: {x}");
        }
    }
}

/// Frozen matrices stay in half precision only on the CPU with f32 compute.
#[test]
fn half_precision_is_kept_where_it_would_be_widened() {
    use DType::{BF16, F16, F32};
    for (stored, compute, cuda, want) in [
        (BF16, F32, false, BF16),
        (F16, F32, false, F16),
        (BF16, F32, true, F32),
        (F32, F32, false, F32),
        (F32, BF16, false, BF16),
        (BF16, F16, false, F16),
    ] {
        assert_eq!(kept(stored, compute, cuda), want);
    }
}

#[test]
fn shapes_that_do_not_fit_are_errors() -> Result<()> {
    let (a, b) = (randn(1, (7, 5), DType::F32)?, randn(2, (3, 4), DType::BF16)?);
    assert!(product_of(&a, false, &b, true).is_err());
    assert!(matmul_acc(&a, &a, false, &b, true, 1.0).is_err());
    Ok(())
}
