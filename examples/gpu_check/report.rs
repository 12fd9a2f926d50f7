//! Lines of the report, and inputs of the checks.

use anyhow::Result;
use candle_core::{DType, Device};
use ft::kernel::{Real, Tensor};
use ft::rng::{Purpose, Stream};

/// Counts of checks.
#[derive(Default)]
pub struct Report {
    pub over: usize,
    pub checks: usize,
}

impl Report {
    pub fn line(&mut self, what: &str, apart: f64, bar: f64) {
        self.checks += 1;
        let ok = apart <= bar;
        self.over += usize::from(!ok);
        println!("{}  {what:<44} {apart:.1e}  (bar {bar:.0e})", if ok { "ok  " } else { "OVER" });
    }

    pub fn tensors(&mut self, what: &str, a: &Tensor, b: &Tensor, bar: f64) -> Result<()> {
        self.line(what, ft::train::logits_apart(a.real()?, b.real()?)?, bar);
        Ok(())
    }
}

/// Standard normal values on a device.
pub fn randn(seed: u64, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let s = Stream::new(seed, Purpose::Test, 0, 0);
    let n: usize = shape.iter().product();
    let v: Vec<f32> = (0..n as u64).map(|i| s.normal(i)).collect();
    Ok(Tensor::Real(Real::from_vec(v, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?))
}
