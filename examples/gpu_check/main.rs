//! Compares all CUDA kernels and the reference models with the CPU, and measures the 4-bit kernels.
//!
//! ```text
//! cargo run --release --features cuda --example gpu_check -- tests/fixtures/reference
//! gpu_check FIXTURES kernels models   selected parts: kernels, four_bit, fp8, models, offload, speed
//! gpu_check BIN instructions          asm instructions against the host twin; BIN from `.ci/gpu bundle`
//! gpu_check FIXTURES cpu              CPU against CPU: a check of this program
//! ```
//!
//! Prints one line per check (relative L2 distance, tolerance) and exits with 1 if a
//! distance exceeds the tolerance.

mod four_bit;
mod fp8;
#[cfg(feature = "cuda")]
mod instructions;
mod kernels;
mod models;
mod report;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use report::Report;
use std::path::{Path, PathBuf};

/// Tolerances in f32 (without TF32) and in bf16, with products rounded to an 8-bit mantissa.
const BARS: [(DType, f64); 2] = [(DType::F32, 1e-5), (DType::BF16, 3e-2)];

/// Parts that can be selected; `instructions` runs only on request.
const PARTS: [&str; 8] =
    ["instructions", "kernels", "four_bit", "fp8", "models", "offload", "speed", "fp8_speed"];

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [dir, asked @ ..] = args.as_slice() else { bail!("usage: gpu_check FIXTURES [PART ..] [cpu]") };
    let dir = Path::new(dir);
    if let Some(other) = asked.iter().find(|a| *a != "cpu" && !PARTS.contains(&a.as_str())) {
        bail!("no part {other:?}; there are {PARTS:?}");
    }
    let device = if asked.iter().any(|a| a == "cpu") {
        Device::Cpu
    } else {
        ft::kernel::cuda::open(0).map_err(anyhow::Error::msg)?
    };
    let named = |part: &str| asked.iter().any(|a| a == part);
    let all = !PARTS.iter().any(|p| named(p));
    let mut report = Report::default();
    if named("instructions") {
        check_instructions(&device, dir, &mut report)?;
    }
    for (dtype, bar) in BARS {
        if all || named("kernels") {
            kernels::check(&device, dtype, bar, &mut report)?;
        }
        if all || named("four_bit") {
            four_bit::check(&device, dtype, bar, &mut report)?;
        }
    }
    if all || named("four_bit") {
        four_bit::check(&device, DType::F16, 4e-3, &mut report)?;
    }
    if (all && device.is_cuda()) || named("fp8") {
        fp8::check(&device, &mut report)?;
    }
    if all || named("models") {
        for model_dir in fixtures(dir)? {
            models::check(&model_dir, &device, &mut report)?;
        }
    }
    if all || named("offload") {
        models::offload(fixtures(dir)?.first().context("no fixtures")?, &device, &mut report)?;
    }
    if (all && device.is_cuda()) || named("speed") {
        four_bit::speed(&device, &mut report)?;
    }
    if (all && device.is_cuda()) || named("fp8_speed") {
        fp8::speed(&device)?;
    }
    println!("{} checks passed, {} failed", report.checks - report.over, report.over);
    if report.over > 0 { bail!("{} checks over their bar", report.over) } else { Ok(()) }
}

#[cfg(feature = "cuda")]
fn check_instructions(device: &Device, dir: &Path, report: &mut Report) -> Result<()> {
    instructions::check(device, dir, report)
}

#[cfg(not(feature = "cuda"))]
fn check_instructions(_: &Device, _: &Path, _: &mut Report) -> Result<()> {
    bail!("instructions are a CUDA device's, and this is built without the `cuda` feature")
}

fn fixtures(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(dir)?.map(|e| Ok(e?.path())).collect::<Result<_>>()?;
    dirs.sort();
    Ok(dirs)
}
