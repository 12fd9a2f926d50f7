use super::*;
use crate::Tensor;
use crate::check::{on, randn, values};
use crate::gemm::serial;
use candle_core::{DType, Result};
use half::bf16;
use std::ops::Range;

/// Sizes around the limits of panels, strips and blocks.
const SIZES: [(usize, usize, usize); 13] = [
    (1, 1, 1),
    (1, 7, 33),
    (12, 32, 32),
    (13, 33, 31),
    (5, 70, 130),
    (100, 31, 16),
    (130, 64, 17),
    (33, 257, 700),
    (9, 2051, 40),
    (26, 4096, 40),
    (7, 4099, 70),
    (110, 8200, 33),
    (300, 20, 64),
];

/// Error bound of an f32 sum of `k` products, relative to the sum of their magnitudes: one rounding per
/// product.
fn bar(k: usize) -> f64 {
    (k as f64 + 2.0) * f64::from(f32::EPSILON) / 2.0
}

fn transposed(t: &Tensor, really: bool) -> Result<Tensor> {
    if really { t.t()?.contiguous() } else { Ok(t.clone()) }
}

/// Asserts values and expected values to agree within individual bounds.
#[track_caller]
fn near(what: &str, got: &Tensor, want: impl Iterator<Item = (f64, f64)>) {
    let got = values(got);
    for (i, (got, (want, off))) in got.into_iter().zip(want).enumerate() {
        assert!((got - want).abs() <= off, "{what} [{i}]: {got:e} for {want:e} within {off:e}");
    }
}

/// Every layout and size, rounded and not, alone and accumulated, stays within the bound of f32 sums.
#[test]
fn products_are_within_the_bound_of_f32_sums() -> Result<()> {
    if !Path::Dots.is_here() {
        return Ok(());
    }
    for (i, (m, k, n)) in SIZES.into_iter().enumerate() {
        let (a, b) = (randn(i as u64, (m, k), DType::BF16)?, randn(50 + i as u64, (k, n), DType::BF16)?);
        let f64s = |t: &Tensor| t.to_dtype(DType::F64);
        let exact = values(&f64s(&a)?.matmul(&f64s(&b)?)?);
        let sums = values(&f64s(&a)?.abs()?.matmul(&f64s(&b)?.abs()?)?);
        let exact = || exact.iter().zip(&sums).map(|(x, s)| (*x, bar(k) * s));
        let rounded = |(x, off): (f64, f64)| (x, off + (x.abs() + off) / 256.0);
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            let what = |of: &str| format!("{of} {m} {k} {n} {ta} {tb}");
            let (a, b) = (transposed(&a, ta)?, transposed(&b, tb)?);
            near(&what("sums"), &matmul(&a, ta, &b, tb, 1.0, false)?, exact());
            near(&what("rounded"), &matmul(&a, ta, &b, tb, 1.0, true)?, exact().map(rounded));
            let (c, d) = (randn(99, (m, n), DType::F32)?, randn(98, (m, n), DType::BF16)?);
            let sum = |c: &Tensor| {
                values(c)
                    .into_iter()
                    .zip(exact())
                    .map(|(c, (x, off))| (c + 0.75 * x, off + 1e-6 * c.abs()))
                    .collect::<Vec<_>>()
            };
            let (want_c, want_d) = (sum(&c), sum(&d));
            onto((&c, true), &a, ta, &b, tb, 0.75)?;
            onto((&d, true), &a, ta, &b, tb, 0.75)?;
            near(&what("added in f32"), &c, want_c.into_iter());
            near(&what("added in bf16"), &d, want_d.into_iter().map(rounded));
            for (c, wide) in [(&c, true), (&d, false)] {
                onto((c, false), &a, ta, &b, tb, 1.0)?;
                let alone = matmul(&a, ta, &b, tb, 1.0, !wide)?;
                assert_eq!(values(c), values(&alone), "{}", what("written over"));
            }
        }
    }
    Ok(())
}

/// Results are bit-identical for any number of threads, inside and outside `serial`, and for stored and
/// generated operands.
#[test]
fn threads_change_no_bit() -> Result<()> {
    if !Path::Dots.is_here() {
        return Ok(());
    }
    for (m, k, n) in SIZES {
        let (a, b) = (randn(1, (m, k), DType::BF16)?, randn(2, (n, k), DType::BF16)?);
        let product = || {
            values(&matmul(&a, false, &b, true, 0.5, true)?)
                .into_iter()
                .map(|x| Ok(x.to_bits()))
                .collect::<Result<Vec<u64>>>()
        };
        let one = serial(product)?;
        for threads in [1, 2, 3, 7] {
            assert_eq!(on(threads, product)?, one, "{m} {k} {n} on {threads} threads");
        }
        let whole = values(&matmul(&a, false, &b, true, 1.0, true)?);
        let rows = b.to_vec2::<bf16>()?;
        let by_column = |columns: Range<usize>, inner: Range<usize>, tile: &mut [bf16]| {
            for (tile, row) in tile.chunks_mut(inner.len()).zip(&rows[columns]) {
                tile.copy_from_slice(&row[inner.clone()]);
            }
        };
        let by_inner = |columns: Range<usize>, inner: Range<usize>, tile: &mut [bf16]| {
            for (tile, i) in tile.chunks_mut(columns.len()).zip(inner) {
                tile.iter_mut().zip(&rows[columns.clone()]).for_each(|(t, row)| *t = row[i]);
            }
        };
        for threads in [1, 3] {
            assert_eq!(values(&on(threads, || made(&a, n, true, &by_column, None))?), whole);
            assert_eq!(values(&on(threads, || made(&a, n, false, &by_inner, None))?), whole);
        }
    }
    Ok(())
}

/// NaN and infinity stay in their row or column.
#[test]
fn non_finite_values_stay_in_their_row_or_column() -> Result<()> {
    if !Path::Dots.is_here() {
        return Ok(());
    }
    let mut values = vec![bf16::ONE; 30 * 40];
    (values[3 * 40 + 7], values[20 * 40]) = (bf16::NAN, bf16::INFINITY);
    let a = Tensor::from_vec(values, (30, 40), &candle_core::Device::Cpu)?;
    let b = Tensor::ones((40, 50), DType::BF16, &candle_core::Device::Cpu)?;
    for (r, row) in matmul(&a, false, &b, false, 1.0, false)?.to_vec2::<f32>()?.into_iter().enumerate() {
        let as_it_should = |x: &f32| match r {
            3 => x.is_nan(),
            20 => *x == f32::INFINITY,
            _ => *x == 40.0,
        };
        assert!(row.iter().all(as_it_should), "row {r}: {row:?}");
    }
    Ok(())
}

#[test]
fn ft_bf16_chooses_the_path_of_products() {
    let fastest = if Path::Dots.is_here() { Path::Dots } else { Path::Widened };
    assert_eq!(Path::choose(None), Ok(fastest));
    assert_eq!(Path::choose(Some("")), Ok(fastest));
    assert_eq!(Path::choose(Some("widened")), Ok(Path::Widened));
    assert_eq!(Path::choose(Some("dots")).ok(), Path::Dots.is_here().then_some(Path::Dots));
    assert!(Path::choose(Some("fast")).is_err_and(|e| e.contains("hint: FT_BF16=dots or widened")));
}
