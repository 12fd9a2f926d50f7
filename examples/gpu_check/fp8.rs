//! Products of 8-bit floats: against the rounded operands, against f32, and beside bf16 in time.

use super::four_bit::{blocks, seconds};
use super::report::{Report, randn};
use anyhow::Result;
use candle_core::{DType, Device};
use ft::kernel::fp8::{Format, Fp8Matrix, Source, check as can, scales_by_row};
use ft::kernel::gemm;
use ft::kernel::quantized::{QuantizedMatrix, Scales};
use ft::kernel::{Real, Tensor};
use std::sync::Arc;

/// Error of a product against f32 with operands of random normal numbers: e4m3 rounds by 2.6% in the mean, e5m2 by 5.1%.
const FORWARD: f64 = 0.042;
const BACKWARD: f64 = 0.065;
/// A smaller error is that of another format.
const LEAST: f64 = 0.02;
/// Results in bf16, with the operands as they are rounded.
const ROUNDED: f64 = 4e-3;

/// Rows of the timed products.
const ROWS: usize = 4096;

/// Values on the host, in f32.
fn host(t: &Tensor) -> Result<Vec<f32>> {
    Ok(t.real()?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

/// Rounds values in groups of `group`, each by its largest magnitude, as the kernels do.
fn rounded(values: &[f32], format: Format, group: usize) -> Vec<f32> {
    let of = |group: &[f32]| {
        let amax = group.iter().fold(0f32, |most, x| most.max(x.abs())).max(2f32.powi(-100));
        let (by, back) = (format.most() / amax, amax / format.most());
        group.iter().map(|x| format.nearest(x * by) * back).collect::<Vec<_>>()
    };
    values.chunks(group).flat_map(of).collect()
}

/// `a b` or `a b^T` on the CPU in f32.
fn product(a: Vec<f32>, a_dims: [usize; 2], b: Vec<f32>, b_dims: [usize; 2], tb: bool) -> Result<Tensor> {
    let of = |values, dims: [usize; 2]| Real::from_vec(values, &dims[..], &Device::Cpu).map(Tensor::Real);
    Ok(gemm::matmul(&of(a, a_dims)?, false, &of(b, b_dims)?, tb)?)
}

/// Products of dense and 4-bit weights. Of a card without them, says so.
pub fn check(device: &Device, report: &mut Report) -> Result<()> {
    if let Err(why) = can(device) {
        println!("      fp8: not run, {why}");
        return Ok(());
    }
    let by_row = scales_by_row(device)?;
    println!(
        "      fp8: {} of activations and gradients",
        if by_row { "a scale a row" } else { "one scale" }
    );
    for ((o, i), t) in [((64, 128), 16), ((272, 144), 50), ((1040, 528), 131)] {
        let dense = randn(1, &[o, i], DType::BF16, device)?;
        let four = Arc::new(blocks((o, i), 64, Some(256), (DType::BF16, DType::BF16), device)?);
        let plain = Arc::new(blocks((o, i), 64, None, (DType::F16, DType::BF16), device)?);
        let of = |four: &Arc<_>| Source::Blocks(Arc::clone(four));
        let all = [
            ("dense", Source::Dense(dense.clone()), dense),
            ("4-bit", of(&four), four.dequantize()?),
            ("4-bit, one scale", of(&plain), plain.dequantize()?),
        ];
        for (what, source, values) in all {
            let (w, values) = (Fp8Matrix::new(source)?, host(&values)?);
            // the kernels take the scale of 4-bit blocks from their own scales
            let most = match w.source() {
                Source::Dense(_) => values.iter().fold(0f32, |most, x| most.max(x.abs())),
                Source::Blocks(b) => largest_scale(b)?,
            };
            let (by, inverse) = (448.0 / most, most / 448.0);
            let narrow: Vec<f32> = values.iter().map(|x| Format::E4m3.nearest(x * by) * inverse).collect();
            for back in [false, true] {
                let (cols, outputs) = if back { (o, i) } else { (i, o) };
                let (format, bar) = if back { (Format::E5m2, BACKWARD) } else { (Format::E4m3, FORWARD) };
                let x = rows(t, cols, device)?;
                let multiply = || if back { w.backward(&x, None) } else { w.forward(&x) };
                let (got, x) = (multiply()?, host(&x)?);
                let near = rounded(&x, format, if by_row { cols } else { x.len() });
                let want = |x, w| product(x, [t, cols], w, [o, i], !back);
                let exact = want(x.clone(), values.clone())?;
                let what = format!("fp8 {what} {o}x{i}, {t} rows{}", if back { ", back" } else { "" });
                report.tensors(
                    &format!("{what}: operands rounded"),
                    &got,
                    &want(near, narrow.clone())?,
                    ROUNDED,
                )?;
                let apart = ft::train::logits_apart(got.real()?, exact.real()?)?;
                report.line(&format!("{what}: of f32"), apart, bar);
                report.line(&format!("{what}: not of fp8, if over"), LEAST / apart, 1.0);
                if back {
                    let dx = randn(4, &[t, outputs], DType::BF16, device)?;
                    let sum = (host(&dx)?.iter().zip(host(&got)?)).map(|(a, b)| a + b).collect();
                    let sum = Tensor::Real(Real::from_vec(sum, (t, outputs), &Device::Cpu)?);
                    let dy = rows(t, cols, device)?;
                    report.tensors(&format!("{what}: added"), &w.backward(&dy, Some(dx))?, &sum, 8e-3)?;
                }
            }
        }
    }
    Ok(())
}

/// Rows of normal numbers of other sizes, in a wider matrix.
fn rows(t: usize, cols: usize, device: &Device) -> Result<Tensor> {
    let wide = randn(2, &[t, cols + 8], DType::F32, &Device::Cpu)?;
    let by: Vec<f32> = (0..t).map(|r| 2f32.powi(-((r % 3) as i32))).collect();
    let by = Real::from_vec(by, (t, 1), &Device::Cpu)?;
    let wide = wide.real()?.broadcast_mul(&by)?.to_dtype(DType::BF16)?.to_device(device)?;
    Ok(Tensor::Real(wide).narrow(1, 0, cols)?)
}

/// Largest scale of 4-bit blocks, whose largest code is 1.
fn largest_scale(w: &QuantizedMatrix) -> Result<f32> {
    let most = |values: &mut dyn Iterator<Item = f32>| values.fold(0f32, |most, x| most.max(x.abs()));
    Ok(match w.parts().1 {
        Scales::Plain(s) => most(&mut host(s)?.into_iter()),
        Scales::Nested { codes, map, absmax, group, offset } => {
            let (map, absmax) = (host(map)?, host(absmax)?);
            let codes: Vec<u8> = codes.real()?.to_device(&Device::Cpu)?.to_vec1()?;
            most(
                &mut codes.iter().enumerate().map(|(b, c)| map[usize::from(*c)] * absmax[b / group] + offset),
            )
        }
    })
}

/// Time beside bf16, at the sizes of an 8B model and 4,096 rows.
pub fn speed(device: &Device) -> Result<()> {
    if let Err(why) = can(device) {
        println!("      fp8: not run, {why}");
        return Ok(());
    }
    println!(
        "      rows x i x o               bf16     fp8  4-bit, fp8  4-bit, bf16  (microseconds; forward, then backward)"
    );
    for dims in [(12_288, 4096), (4096, 4096), (4096, 12_288)] {
        let four = Arc::new(blocks(dims, 64, Some(256), (DType::BF16, DType::BF16), device)?);
        let dense = four.dequantize()?;
        let of_dense = Fp8Matrix::new(Source::Dense(dense.clone()))?;
        let of_four = Fp8Matrix::new(Source::Blocks(Arc::clone(&four)))?;
        let x = randn(1, &[ROWS, dims.1], DType::BF16, device)?;
        let dy = randn(2, &[ROWS, dims.0], DType::BF16, device)?;
        let forward = [
            seconds(device, || gemm::matmul(&x, false, &dense, true))?,
            seconds(device, || of_dense.forward(&x))?,
            seconds(device, || of_four.forward(&x))?,
            seconds(device, || four.forward(&x))?,
        ];
        let backward = [
            seconds(device, || gemm::matmul(&dy, false, &dense, false))?,
            seconds(device, || of_dense.backward(&dy, None))?,
            seconds(device, || of_four.backward(&dy, None))?,
            seconds(device, || four.backward(&dy, None))?,
        ];
        for [bf16, fp8, four_fp8, four_bf16] in [forward, backward].map(|times| times.map(|s| s * 1e6)) {
            println!(
                "      {ROWS} x {:>5} x {:>5}  {bf16:>9.1} {fp8:>7.1} {four_fp8:>11.1} {four_bf16:>12.1}",
                dims.1, dims.0
            );
        }
    }
    Ok(())
}
