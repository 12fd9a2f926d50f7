//! Measures matrix products and memory copies of this machine, as upper limits for the parts of a step.

use super::probe::{filled, timed};
use crate::train::job::Job;
use candle_core::{DType, Device, Result};
use ft_kernels::Tensor;
use ft_kernels::gemm;
use ft_kernels::tensor::Real;
use std::time::{Duration, Instant};

/// Minimum duration of one measurement.
const LOOK: Duration = Duration::from_millis(250);
/// Limits on rows and columns of a product. Larger ones take longer without a higher rate.
const LARGEST_CPU: (usize, usize) = (512, 4096);
const LARGEST_CUDA: (usize, usize) = (4096, 16_384);
/// Size of the square product, independent of the model.
const SQUARE: usize = 1024;

/// Sizes of a copy in bytes, larger than caches.
const COPY_CPU: usize = 64 << 20;
const COPY_CUDA: usize = 512 << 20;

/// Repetitions of a product per measurement. The first runs with cold caches.
const REPEAT: usize = 3;

/// Repeated timing of matrix products with the shapes of a training step.
///
/// The rate of the machine is the maximum over all measurements. Other programs may disturb one
/// measurement, so the caller measures before, between and after steps. One shape may be slow (few rows, a
/// transposed operand), so several are timed.
#[derive(Debug)]
pub struct MatmulRate {
    /// Products as (rows, inputs, outputs).
    linears: Vec<(usize, usize, usize)>,
    device: Device,
    dtype: DType,
    /// Floating-point operations per second of the fastest product.
    pub rate: f64,
    /// Shape of the fastest product: rows x inner size x columns.
    pub fastest: String,
    /// Bytes per second of the fastest copy, reads plus writes.
    pub copy: f64,
}

impl MatmulRate {
    /// Products of the linear layers of a model with `tokens` rows, and one square product.
    pub fn new(job: &Job, tokens: usize) -> Self {
        let c = &job.config;
        let (rows, cols) = if job.device.is_cuda() { LARGEST_CUDA } else { LARGEST_CPU };
        let (t, d) = (tokens.clamp(1, rows), c.hidden.clamp(1, cols));
        let ffn = c.moe.as_ref().map_or(c.intermediate, |m| m.width).clamp(1, cols);
        let attention = (c.heads * c.head_dim).clamp(1, cols);
        Self {
            linears: vec![(t, d, ffn), (t, d, attention), (SQUARE, SQUARE, SQUARE)],
            device: job.device.clone(),
            dtype: job.dtype,
            rate: 0.0,
            fastest: String::new(),
            copy: 0.0,
        }
    }

    /// Times every product and a copy at least once. Frees all buffers before it returns.
    pub fn measure(&mut self) -> Result<()> {
        self.time_copy()?;
        let begun = Instant::now();
        while begun.elapsed() < LOOK {
            for (t, d, o) in self.linears.clone() {
                let filled = |rows, cols| filled(&self.device, &[rows, cols], self.dtype);
                let (x_ti, w_oi, dy_to) = (filled(t, d)?, filled(o, d)?, filled(t, o)?);
                // Forward, input gradient, weight gradient.
                self.time(&x_ti, false, &w_oi, true, (t, d, o))?;
                self.time(&dy_to, false, &w_oi, false, (t, o, d))?;
                self.time(&dy_to, true, &x_ti, false, (o, t, d))?;
            }
        }
        Ok(())
    }

    fn time(&mut self, a: &Tensor, ta: bool, b: &Tensor, tb: bool, mkn: (usize, usize, usize)) -> Result<()> {
        let (m, k, n) = mkn;
        let product = timed(&self.device, || gemm::matmul(a, ta, b, tb).map(drop));
        for _ in 0..REPEAT {
            let rate = 2.0 * m as f64 * k as f64 * n as f64 / product()?;
            if rate > self.rate {
                self.rate = rate;
                self.fastest = format!("{m} x {k} x {n}");
            }
        }
        Ok(())
    }

    fn time_copy(&mut self) -> Result<()> {
        let bytes = if self.device.is_cuda() { COPY_CUDA } else { COPY_CPU };
        let from = Real::zeros(bytes / 4, DType::F32, &self.device)?;
        let to = from.copy()?;
        let copy = timed(&self.device, || match &self.device {
            Device::Cpu => to.slice_set(&from, 0, 0),
            // by the driver: candle's kernel for slices reaches half the rate
            _ => from.copy().map(drop),
        });
        for _ in 0..REPEAT {
            self.copy = self.copy.max(2.0 * bytes as f64 / copy()?);
        }
        Ok(())
    }
}
