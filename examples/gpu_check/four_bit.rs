//! 4-bit matrices: every kernel against the CPU, and the speed compared with a copy and a dense product.

use super::report::{Report, randn};
use anyhow::Result;
use candle_core::{DType, Device};
use ft::kernel::Tensor;
use ft::kernel::gemm;
use ft::kernel::quantized::{Codebook, QuantizedMatrix, Scales};
use ft::quant::Type;
use std::sync::Arc;
use std::time::Instant;

/// A matrix with random codes and scales.
pub fn blocks(
    (rows, cols): (usize, usize),
    block: usize,
    group: Option<usize>,
    (source, compute): (DType, DType),
    device: &Device,
) -> Result<QuantizedMatrix> {
    let n = rows * cols;
    let byte = |i: usize| (i.wrapping_mul(2_654_435_761) >> 7) as u8;
    let packed: Vec<u8> = (0..n.div_ceil(2)).map(byte).collect();
    let count = n.div_ceil(block);
    let scales = match group {
        None => {
            let s: Vec<f32> = (0..count).map(|b| 0.01 + f32::from(byte(b + 99)) / 5000.0).collect();
            Scales::Plain(Tensor::new(s, device)?)
        }
        Some(group) => Scales::Nested {
            codes: Tensor::new((0..count).map(|b| byte(b + 7)).collect::<Vec<u8>>(), device)?,
            map: Tensor::new((0..256).map(|i| (i as f32 - 127.7) / 128.3).collect::<Vec<f32>>(), device)?,
            absmax: Tensor::new(
                (0..count.div_ceil(group)).map(|g| 0.01 + (g % 7) as f32 * 0.001).collect::<Vec<f32>>(),
                device,
            )?,
            group,
            offset: 0.021,
        },
    };
    let kind = if block == 64 { Type::Nf4 } else { Type::Fp4 };
    let book = Arc::new(Codebook::new(kind.table(), device)?);
    let packed = Tensor::new(packed, device)?;
    Ok(QuantizedMatrix::new((rows, cols), block, packed, scales, book, source, compute)?)
}

/// Dequantization, bit for bit, and products.
pub fn check(device: &Device, dtype: DType, bar: f64, report: &mut Report) -> Result<()> {
    let name = format!("{dtype:?}").to_lowercase();
    // aligned sizes, quantization blocks across rows, odd sizes, several tiles
    let shapes = [
        ((64, 1024), 64, Some(256)),
        ((130, 96), 64, Some(256)),
        ((9, 48), 32, Some(3)),
        ((7, 51), 64, None),
        ((130, 4096), 4096, Some(256)),
        ((4100, 8224), 64, Some(256)),
    ];
    for (dims, block, group) in shapes {
        for source in [DType::F32, DType::BF16, DType::F16] {
            let large = dims.0 > 4000;
            if large && source != DType::BF16 {
                continue;
            }
            let mine = blocks(dims, block, group, (source, dtype), device)?;
            let cpu = blocks(dims, block, group, (source, dtype), &Device::Cpu)?;
            let what = format!("4-bit {}x{}/{block} {source:?} to {name}", dims.0, dims.1);
            let mut line = |part: &str, a: Tensor, b: Tensor, bar: f64| {
                report.tensors(&format!("{what}: {part}"), &a, &b, bar)
            };
            line("dequantized", mine.dequantize()?, cpu.dequantize()?, 0.0)?;
            let rows = dims.0 / 3..dims.0 - 1;
            line("some rows", mine.dequantize_rows(rows.clone())?, cpu.dequantize_rows(rows)?, 0.0)?;
            line("squares of rows", mine.row_squares()?, cpu.row_squares()?, 1e-5)?;
            for tokens in if large { vec![8, 40] } else { vec![1, 3, 8, 9, 130] } {
                let (x, dy) = ([tokens, dims.1], [tokens, dims.0]);
                let forward = |w: &QuantizedMatrix, d: &Device| -> Result<_> {
                    Ok(w.forward(&randn(1, &x, dtype, d)?)?)
                };
                line(
                    &format!("x W^T of {tokens}"),
                    forward(&mine, device)?,
                    forward(&cpu, &Device::Cpu)?,
                    bar,
                )?;
                for add in [false, true] {
                    let backward = |w: &QuantizedMatrix, d: &Device| -> Result<_> {
                        let there = if add { Some(randn(3, &x, dtype, d)?) } else { None };
                        Ok(w.backward(&randn(2, &dy, dtype, d)?, there)?)
                    };
                    let part = format!("{}dy W of {tokens}", if add { "+= " } else { "" });
                    line(&part, backward(&mine, device)?, backward(&cpu, &Device::Cpu)?, bar)?;
                }
            }
            for tokens in [3, 40] {
                with_an_adapter(report, &what, (&mine, &cpu), tokens, bar)?;
            }
        }
    }
    Ok(())
}

/// One fused product with an adapter, against two products on the CPU.
fn with_an_adapter(
    report: &mut Report,
    what: &str,
    (mine, cpu): (&QuantizedMatrix, &QuantizedMatrix),
    tokens: usize,
    bar: f64,
) -> anyhow::Result<()> {
    const RANK: usize = 12;
    let (rows, cols) = mine.dims();
    let (dtype, device) = (mine.dtype(), mine.pairs().real()?.device().clone());
    let host = &Device::Cpu;
    let of = |seed, shape: [usize; 2]| -> Result<[Tensor; 2]> {
        let t = randn(seed, &shape, dtype, host)?;
        Ok([Tensor::Real(t.real()?.to_device(&device)?), t])
    };
    let ([xu, hxu], [b, hb]) = (of(11, [tokens, cols + RANK])?, of(12, [rows, RANK])?);
    let ([dydu, hdydu], [a, ha]) = (of(13, [tokens, rows + RANK])?, of(14, [RANK, cols])?);
    let two = |y: Tensor, low: Tensor, m: &Tensor, t: bool| -> Result<Tensor> {
        gemm::matmul_acc(&y, &low, false, m, t, 1.0)?;
        Ok(y)
    };
    let y = two(cpu.forward(&hxu.narrow(1, 0, cols)?)?, hxu.narrow(1, cols, RANK)?, &hb, true)?;
    report.tensors(
        &format!("{what}: with an adapter, of {tokens}"),
        &mine.forward_with(&xu, &b)?,
        &y,
        bar,
    )?;
    let dx = two(cpu.backward(&hdydu.narrow(1, 0, rows)?, None)?, hdydu.narrow(1, rows, RANK)?, &ha, false)?;
    let ours = mine.backward_with(&dydu, &a, None)?;
    report.tensors(&format!("{what}: back with an adapter, of {tokens}"), &ours, &dx, bar)
}

/// Seconds per call, best of three rounds.
pub fn seconds<T>(device: &Device, mut f: impl FnMut() -> candle_core::Result<T>) -> Result<f64> {
    const CALLS: u32 = 20;
    f()?;
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        device.synchronize()?;
        let start = Instant::now();
        for _ in 0..CALLS {
            f()?;
        }
        device.synchronize()?;
        best = best.min(start.elapsed().as_secs_f64() / f64::from(CALLS));
    }
    Ok(best)
}

/// Bandwidth of the dequantize kernel relative to a copy (at least 0.85), and of 4-bit products relative to
/// dense ones (no limit).
pub fn speed(device: &Device, report: &mut Report) -> Result<()> {
    // larger than any cache
    let dims = (16_384, 16_384);
    let n = (dims.0 * dims.1) as f64;
    let w = blocks(dims, 64, Some(256), (DType::BF16, DType::BF16), device)?;
    let from = Tensor::zeros(dims, DType::BF16, device)?;
    let copy = seconds(device, || from.copy())?;
    let dequantize = seconds(device, || w.dequantize())?;
    drop(from);
    let (read, written) = (w.bytes() as f64, 2.0 * n);
    let share = (read + written) / dequantize / (4.0 * n / copy);
    println!(
        "      4-bit dequantize {:.0} GB/s, copy {:.0} GB/s, share {share:.2}",
        (read + written) / dequantize / 1e9,
        4.0 * n / copy / 1e9
    );
    report.line(
        "4-bit dequantize: time beyond a copy's, a byte",
        (1.0 / share - 1.0).max(0.0),
        1.0 / 0.85 - 1.0,
    );
    drop(w);
    println!("      [o, i] x tokens            4-bit forward    dense  ratio   backward    dense  ratio");
    for dims in [(4096, 4096), (14_336, 4096), (4096, 14_336), (768, 2048)] {
        let w = blocks(dims, 64, Some(256), (DType::BF16, DType::BF16), device)?;
        let dense = w.dequantize()?;
        for tokens in [1, 4, 8, 64, 512, 2048, 8192] {
            let x = randn(1, &[tokens, dims.1], DType::BF16, device)?;
            let dy = randn(2, &[tokens, dims.0], DType::BF16, device)?;
            let times = [
                seconds(device, || w.forward(&x))?,
                seconds(device, || gemm::matmul(&x, false, &dense, true))?,
                seconds(device, || w.backward(&dy, None))?,
                seconds(device, || gemm::matmul(&dy, false, &dense, false))?,
            ]
            .map(|s| s * 1e6);
            let [f, df, b, db] = times;
            println!(
                "      {:>5} x {:>5} x {tokens:>5}   {f:>9.1} us {df:>8.1}  {:>5.2}  {b:>9.1} {db:>8.1}  {:>5.2}",
                dims.0,
                dims.1,
                f / df,
                b / db
            );
        }
    }
    Ok(())
}
