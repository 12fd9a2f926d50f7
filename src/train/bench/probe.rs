//! `ft bench --probe`: rates of a CUDA card for plans, measured in a few seconds. A run does so in a separate process,
//! at the first start on a card.

use super::measured::{Measured, kept, now};
use crate::train::Error;
use crate::train::job::Job;
use candle_core::{DType, Device, Result};
use ft_base::terminal::{tell, warn};
use ft_kernels::attention::{self, Causal, Sequences};
use ft_kernels::crossing::{self, Locked};
use ft_kernels::dispatch::Sorted;
use ft_kernels::fp8::{self, Fp8Matrix, Source};
use ft_kernels::grouped::{self, Entry, Side, Table};
use ft_kernels::moment::Moment;
use ft_kernels::quantized::{Codebook, QuantizedMatrix, Scales};
use ft_kernels::tensor::Real;
use ft_kernels::{Tensor, cuda, gemm};
use ft_plan::Target;
use ft_plan::probe::{self, CardRates, Probe};
use serde_json::json;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Seconds of a call above which no larger size follows.
const LONG: f64 = 0.25;
/// Time for the calls of a size: a device raises the clock meanwhile.
const EACH: Duration = Duration::from_millis(100);
/// Values that [`filled`] repeats.
const BLOCK: usize = 1 << 16;

/// Sides of square products; the last one is omitted for 8-bit floats.
const SQUARES: &[usize] = &[128, 512, 2048, 4096, 8192];
/// Tokens and heads of attention, with `CHANNELS` channels a head.
const ROWS: &[(usize, usize)] = &[(64, 1), (512, 8), (4096, 32)];
const CHANNELS: usize = 128;
/// Sides of a 4-bit matrix.
const MATRICES: &[usize] = &[256, 2048, 8192];
/// Experts with rows and columns of their matrices, and the rows of each expert's input.
const EXPERTS: &[(usize, usize, usize)] = &[(1, 64, 64), (4, 256, 512), (128, 768, 2048)];
const OF_EXPERT: usize = 256;
/// Bytes of a copy on the device, and from the host.
const COPIES: &[usize] = &[1 << 20, 1 << 25, 1 << 28];
const CROSSINGS: &[usize] = &[1 << 20, 1 << 26];
/// Operations launched one after the other.
const LAUNCHES: usize = 100;

/// Measures device 0, and keeps the rates for plans.
///
/// # Errors
/// No CUDA device; not enough memory on it.
pub fn run() -> ft_base::Result<Measured> {
    let fail =
        |why: String| Error::Usage(format!("--probe: {why}\n  hint: plans take data sheets without it"));
    let device = cuda::open(0).map_err(fail)?;
    let (card, probe) = of_now(&device).ok_or_else(|| fail("the CUDA device has no name".into()))?;
    let probe = Probe { rates: measure(&device)?, ..probe };
    Ok(Measured { kept: kept(probe::save(card, &probe)), json: json!(probe), text: text(&probe) })
}

/// The card as plans name it, and a probe of it by this program and driver, without rates.
fn of_now(device: &Device) -> Option<(&'static str, Probe)> {
    let probe = Probe {
        device: cuda::name(device)?,
        driver: cuda::driver_version().unwrap_or_default(),
        ft: env!("CARGO_PKG_VERSION").into(),
        date: now(),
        rates: CardRates::default(),
    };
    Some((Target::of(device).card?, probe))
}

/// Measures the card of a job in a process of `program`, `ft` itself, unless its rates are known for this device,
/// driver and ft. The process leaves no memory on the device, and an error in it does not end the run. Does nothing for
/// f32, whose plans take no such rates, and with `FT_PROBE=0`.
pub fn before(job: &Job, program: Option<&Path>) {
    let off = job.device.is_cpu()
        || job.dtype == DType::F32
        || std::env::var_os("FT_PROBE").is_some_and(|v| v == "0");
    let Some(program) = program.filter(|_| !off) else { return };
    let Some((card, now)) = of_now(&job.device) else { return };
    let circumstances = |p: &Probe| (p.device.clone(), p.driver, p.ft.clone());
    if probe::find(card).is_some_and(|known| circumstances(known) == circumstances(&now)) {
        return;
    }
    tell(&format!(
        "measuring the rates of {} for plans, in a few seconds (FT_PROBE=0 leaves it out)",
        now.device
    ));
    match child(program) {
        Ok(probe) => probe::take(card, probe),
        Err(why) => warn(&format!(
            "the rates of {card} are not measured: {why}\n  hint: ft bench --probe with nothing else on the card, \
             or FT_PROBE=0"
        )),
    }
}

/// Runs `ft bench --probe` as a process. It keeps the rates and writes messages to stderr.
fn child(program: &Path) -> std::result::Result<Probe, String> {
    let mut command = Command::new(program);
    command.args(["bench", "--probe", "--json"]).stdin(Stdio::null()).stderr(Stdio::inherit());
    let out = command.output().map_err(|e| format!("{}: {e}", program.display()))?;
    if !out.status.success() {
        return Err(format!("ft bench --probe: {}", out.status));
    }
    serde_json::from_slice(&out.stdout).map_err(|e| format!("ft bench --probe: {e}"))
}

/// Output of `ft bench --probe`.
fn text(probe: &Probe) -> String {
    let r = &probe.rates;
    let tera = |x: f64| format!("{:.4} TFLOP/s", x / 1e12);
    let giga = |x: f64| format!("{:.2} GB/s", x / 1e9);
    let ([forward, backward], [locked, pageable]) = (r.attention.map(tera), r.crossing.map(giga));
    let fp8 = r.fp8.map_or("none on this card".into(), |share| format!("{share:.2} of the time of bf16"));
    let lines = [
        ("products", format!("{} (bf16)", tera(r.products))),
        ("in fp8", fp8),
        ("experts", format!("{} (4-bit, {OF_EXPERT} rows each)", tera(r.grouped))),
        ("attention", format!("{forward} forward, {backward} backward")),
        ("4-bit values", format!("{:.2} G/s dequantized", r.dequantize / 1e9)),
        ("copies", giga(r.copy)),
        ("from host", format!("{locked} page-locked, {pageable} pageable")),
        ("a launch", format!("{:.1} us", 1e6 * r.launch)),
    ];
    let lines = lines.map(|(name, value)| format!("  {name:<13} {value}\n")).concat();
    format!("{}\n{lines}", probe.device)
}

fn measure(device: &Device) -> Result<CardRates> {
    let products = rate(SQUARES, cube, |n| {
        let (a, b) = (square(device, n)?, square(device, n)?);
        Ok(timed(device, move || gemm::matmul(&a, false, &b, true)))
    })?;
    let attention = [attention(device, false)?, attention(device, true)?];
    let dequantize = rate(
        MATRICES,
        |n| (n * n) as f64,
        |n| {
            let w = blocks(device, (n, n))?;
            Ok(timed(device, move || w.dequantize()))
        },
    )?;
    let copy = rate(
        COPIES,
        |bytes| 2.0 * bytes as f64,
        |bytes| {
            let from = Real::zeros(bytes / 4, DType::F32, device)?;
            // by the driver: candle's kernel for slices reaches half the rate
            Ok(timed(device, move || from.copy()))
        },
    )?;
    let crossing = [crossing(device, true)?, crossing(device, false)?];
    let grouped = grouped(device, dequantize)?;
    let (fp8, launch) = (eight(device)?, launch(device)?);
    Ok(CardRates { products, attention, grouped, dequantize, fp8, copy, crossing, launch })
}

/// Runs a call and returns the seconds.
type Timed<'a> = Box<dyn Fn() -> Result<f64> + 'a>;

/// Times a call on the stream of the device.
pub fn timed<'a, T>(device: &'a Device, call: impl Fn() -> Result<T> + 'a) -> Timed<'a> {
    Box::new(move || {
        let start = Moment::now(device)?;
        let result = call()?;
        let seconds = Moment::now(device)?.since(&start)?;
        drop(result);
        Ok(seconds.max(1e-9))
    })
}

/// Best rate of `work` a second over growing sizes; `make` makes the call of a size. For slow devices, stops before a
/// size that would take too long at the last rate.
fn rate<'a, S: Copy>(
    sizes: &[S],
    work: impl Fn(S) -> f64,
    make: impl Fn(S) -> Result<Timed<'a>>,
) -> Result<f64> {
    let (mut best, mut last) = (0.0f64, 0.0);
    for size in sizes {
        let work = work(*size);
        if last > 0.0 && work / last > LONG {
            break;
        }
        let call = make(*size)?;
        // loads kernels
        call()?;
        let (began, mut seconds) = (Instant::now(), call()?);
        while began.elapsed() < EACH {
            seconds = seconds.min(call()?);
        }
        last = work / seconds;
        best = best.max(last);
    }
    Ok(best)
}

/// FLOPs of a square product.
fn cube(n: usize) -> f64 {
    2.0 * (n as f64).powi(3)
}

/// Values of pseudorandom numbers, since constants run faster on some devices: from -1 to 1, or bytes.
pub fn filled(device: &Device, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let number = |i: usize| (i as u32).wrapping_mul(2_654_435_761) >> 8;
    let block = match dtype {
        DType::U8 => Real::from_vec((0..BLOCK).map(|i| number(i) as u8).collect(), (1, BLOCK), device)?,
        _ => {
            let values: Vec<f32> = (0..BLOCK).map(|i| number(i) as f32 / (1 << 23) as f32 - 1.0).collect();
            Real::from_vec(values, (1, BLOCK), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?
        }
    };
    // a block again and again: the host would take longer than the device
    let n: usize = shape.iter().product();
    let all = block.broadcast_as((n.div_ceil(BLOCK), BLOCK))?.contiguous()?.flatten_all()?;
    all.narrow(0, 0, n)?.reshape(shape)?.contiguous().map(Tensor::Real)
}

fn square(device: &Device, n: usize) -> Result<Tensor> {
    filled(device, &[n, n], DType::BF16)
}

/// FLOPs per second of attention over one document, as the plan counts them: two products forward and five backward, of
/// the visible half.
fn attention(device: &Device, back: bool) -> Result<f64> {
    let products = if back { 5.0 } else { 2.0 };
    rate(
        ROWS,
        |(t, heads)| products * (t * t * heads * CHANNELS) as f64,
        |(t, heads)| {
            let of = || filled(device, &[t, heads, CHANNELS], DType::BF16);
            let (q, k, v, d_o) = (of()?, of()?, of()?, of()?);
            let seqs = Sequences::new(&[t], 0, device)?;
            let scale = 1.0 / (CHANNELS as f64).sqrt();
            if !back {
                return Ok(timed(device, move || {
                    attention::forward(&q, &k, &v, &Causal { seqs: &seqs, window: None, scale }, 0)
                }));
            }
            let saved = attention::forward(&q, &k, &v, &Causal { seqs: &seqs, window: None, scale }, 0)?;
            Ok(timed(device, move || {
                attention::backward(&q, &k, &v, &saved, &d_o, &Causal { seqs: &seqs, window: None, scale }, 0)
            }))
        },
    )
}

/// A 4-bit matrix with double quantization.
fn blocks(device: &Device, (rows, cols): (usize, usize)) -> Result<QuantizedMatrix> {
    let (n, group) = (rows * cols, 256);
    let count = n.div_ceil(64);
    let scales = Scales::Nested {
        codes: filled(device, &[count], DType::U8)?,
        map: Real::ones(256, DType::F32, device)?.into(),
        absmax: Real::ones(count.div_ceil(group), DType::F32, device)?.into(),
        group,
        offset: 0.0,
    };
    let book = Arc::new(Codebook::new(ft_engine::quant::Type::Nf4.table(), device)?);
    let packed = filled(device, &[n / 2], DType::U8)?;
    QuantizedMatrix::new((rows, cols), 64, packed, scales, book, DType::BF16, DType::BF16)
}

/// FLOPs per second of grouped products with 4-bit experts, forward and back. The cost model adds the time to
/// dequantize the experts; the rates leave it out, up to half of all.
fn grouped(device: &Device, dequantize: f64) -> Result<f64> {
    let flops = |(experts, o, i): (usize, usize, usize)| 4.0 * (experts * OF_EXPERT * o * i) as f64;
    let whole = rate(EXPERTS, flops, |(experts, o, i)| {
        let rows = experts * OF_EXPERT;
        let weights = (0..experts).map(|_| blocks(device, (o, i))).collect::<Result<Vec<_>>>()?;
        let entry = |w| Entry { weight: Side::Codes(w), gradient: None, adapter: None, alike: 1 };
        let table = Table::new(&weights.iter().map(entry).collect::<Vec<_>>(), DType::BF16)?;
        let chosen: Vec<u32> = (0..rows).map(|r| (r % experts) as u32).collect();
        let chosen = Tensor::Real(Real::from_vec(chosen, (rows, 1), device)?);
        let sorted = Sorted::new(&chosen, experts, DType::BF16)?;
        let (x, dy) = (filled(device, &[rows, i], DType::BF16)?, filled(device, &[rows, o], DType::BF16)?);
        Ok(timed(device, move || {
            grouped::forward([(&table, &x, None)], &sorted)?;
            grouped::backward((&table, &dy, None), None, &sorted)
        }))
    })?;
    let of_flop = 1.0 / whole;
    Ok(1.0 / (of_flop - 0.5 / OF_EXPERT as f64 / dequantize).max(0.5 * of_flop))
}

/// Bytes per second from the host.
fn crossing(device: &Device, pin: bool) -> Result<f64> {
    rate(
        CROSSINGS,
        |bytes| bytes as f64,
        |bytes| {
            let from = Real::zeros(bytes / 4, DType::F32, &Device::Cpu)?;
            let locked = pin.then(|| Locked::new(&from, device)).transpose()?;
            let to = Real::zeros(bytes / 4, DType::F32, device)?;
            Ok(Box::new(move || {
                let _locked = &locked;
                // the clock of the host: copies have a stream of their own
                device.synchronize()?;
                let start = Instant::now();
                crossing::send(&from, &to)?.wait()?;
                device.synchronize()?;
                Ok(start.elapsed().as_secs_f64().max(1e-9))
            }))
        },
    )
}

/// Seconds of an operation that computes next to nothing, one after the other.
fn launch(device: &Device) -> Result<f64> {
    let (a, b) = (square(device, 16)?, square(device, 16)?);
    let all = || (0..LAUNCHES).try_for_each(|_| gemm::matmul(&a, false, &b, true).map(drop));
    rate(&[LAUNCHES], |n| n as f64, |_| Ok(timed(device, all))).map(|rate| 1.0 / rate)
}

/// Time of a product of 8-bit floats, casts included, as a share of the time in bf16; `None` on cards without.
fn eight(device: &Device) -> Result<Option<f64>> {
    if fp8::check(device).is_err() {
        return Ok(None);
    }
    let rate = |in_fp8: bool| {
        rate(&SQUARES[..SQUARES.len() - 1], cube, |n| {
            let (x, w) = (square(device, n)?, Fp8Matrix::new(Source::Dense(square(device, n)?))?);
            let call = move || if in_fp8 { w.forward(&x) } else { fp8::exactly(|| w.forward(&x)) };
            Ok(timed(device, call))
        })
    };
    Ok(Some(rate(false)? / rate(true)?))
}
