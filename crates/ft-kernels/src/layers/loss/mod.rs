//! Cross-entropy of a logit chunk, and the gradient of the logits.
//!
//! The head never forms the whole matrix of logits: it processes one chunk at a time and consumes the
//! gradient of the chunk at once.

mod cuda;

use crate::cpu::{self, Float, ghosts, in_place, is_cpu, on_real, tensor, vectorised, view};
use crate::{Ledger, Tensor};
use candle_core::{DType, Device, Result};
use rayon::prelude::*;
use std::sync::Mutex;

/// Losses of the rows and, if `gradient` holds a scale and a dtype, the gradient of
/// `scale * sum(losses)` in this dtype.
///
/// `logits` are consumed: an f32 gradient on CUDA, and every gradient on the CPU, overwrites their storage. A
/// target outside the vocabulary is an error on the CPU and a NaN loss on CUDA.
///
/// # Shapes
/// `logits` `[n, v]` in f32 (f64 in tests), `targets` `[n]` u32 -> losses `[n]`, gradient `[n, v]`.
pub fn cross_entropy(
    logits: Tensor,
    targets: &Tensor,
    gradient: Option<(f64, DType)>,
) -> Result<(Tensor, Option<Tensor>)> {
    if !is_cpu(&logits) {
        return cuda::cross_entropy(logits, targets, gradient);
    }
    let scale = gradient.map(|(scale, _)| scale);
    let (losses, dlogits) = on_real!(logits.dtype(), cross_entropy_cpu(logits, targets, scale))?;
    let rounded = |(d, (_, dtype)): (Tensor, (f64, DType))| d.to_dtype(dtype);
    Ok((losses, dlogits.zip(gradient).map(rounded).transpose()?))
}

fn cross_entropy_cpu<T: Float>(
    logits: Tensor,
    targets: &Tensor,
    scale: Option<f64>,
) -> Result<(Tensor, Option<Tensor>)> {
    let (n, v) = logits.dims2()?;
    // without a gradient the logits stay intact: one row of workspace per thread
    let row = |l: &Ledger| l.touch(l.machine().threads * if scale.is_some() { 0 } else { 4 * v as u64 });
    if let Some([losses]) = ghosts::<T, 1>(&[&logits], [(n.into(), T::DTYPE)], row) {
        return Ok((losses, scale.map(|_| logits)));
    }
    let targets = targets.to_vec1::<u32>()?;
    if targets.len() != n || targets.iter().any(|t| *t as usize >= v) {
        candle_core::bail!(
            "cross-entropy: a target outside {v} logits, or {} targets for {n} rows",
            targets.len()
        );
    }
    let Some(scale) = scale else {
        let x = view::<T>(&logits)?;
        let losses: Vec<T> = x
            .par_chunks(v)
            .zip(&targets)
            .map(|(row, t)| {
                vectorised(|| {
                    let max = cpu::max(row);
                    let e: Vec<T> = row.iter().map(|x| (*x - max).exp()).collect();
                    max + cpu::sum(&e).ln() - row[*t as usize]
                })
            })
            .collect();
        return Ok((tensor(losses, n, T::DTYPE)?, None));
    };
    let losses = Mutex::new(Vec::new());
    in_place::<T>("cross-entropy", &logits, |x| {
        let out: Vec<T> = x
            .par_chunks_mut(v)
            .zip(&targets)
            .map(|(row, t)| {
                vectorised(|| {
                    let (max, picked) = (cpu::max(row), row[*t as usize]);
                    row.iter_mut().for_each(|x| *x = (*x - max).exp());
                    let sum = cpu::sum(row);
                    let k = T::of(scale) / sum;
                    row.iter_mut().for_each(|x| *x *= k);
                    row[*t as usize] -= T::of(scale);
                    max + sum.ln() - picked
                })
            })
            .collect();
        if let Ok(mut l) = losses.lock() {
            *l = out;
        }
        Ok(())
    })?;
    let losses = losses.into_inner().unwrap_or_default();
    Ok((tensor(losses, n, T::DTYPE)?, Some(logits)))
}

/// Sum of losses in f64, in order: independent of the split into chunks.
pub fn total(losses: &[Tensor]) -> Result<f64> {
    let mut all = Running::default();
    all.keep(losses.to_vec())?;
    all.total()
}

/// Running sum of losses.
///
/// Reading losses from a device synchronizes, so a bounded number of them stays on the device.
#[derive(Debug, Default)]
pub struct Running {
    sum: f64,
    kept: Vec<Tensor>,
}

impl Running {
    /// Maximum number of losses on the device: 4 MiB.
    const MOST: usize = 1 << 20;

    /// Adds the losses of a micro-batch.
    pub fn keep(&mut self, losses: Vec<Tensor>) -> Result<()> {
        self.kept.extend(losses);
        let here = self.kept.iter().all(is_cpu);
        if here || self.kept.iter().map(Tensor::elem_count).sum::<usize>() > Self::MOST {
            self.add()?;
        }
        Ok(())
    }

    fn add(&mut self) -> Result<()> {
        let kept = std::mem::take(&mut self.kept);
        if kept.is_empty() {
            return Ok(());
        }
        // a single copy to the host for all losses on a device; the host sums in f64
        let all = if kept.iter().all(is_cpu) { kept } else { vec![Tensor::cat(&kept, 0)?] };
        for t in all {
            let t = t.real()?;
            let t = if t.device().is_cpu() { t.clone() } else { t.to_device(&Device::Cpu)? };
            self.sum += t.to_dtype(DType::F64)?.to_vec1::<f64>()?.iter().sum::<f64>();
        }
        Ok(())
    }

    /// The sum of all losses.
    pub fn total(mut self) -> Result<f64> {
        self.add()?;
        Ok(self.sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, gradient, randn};

    #[test]
    fn gradient_of_the_losses() -> Result<()> {
        let x = (randn(1, (5, 7), DType::F64)? * 3.0)?;
        let targets = Tensor::new(&[0u32, 6, 3, 3, 1], &Device::Cpu)?;
        let (loss, grad) = cross_entropy(x.copy()?, &targets, Some((0.25, DType::F64)))?;
        let ones = Tensor::full(0.25f64, 5, &Device::Cpu)?;
        gradient("logits", &x, grad.as_ref().expect("wanted"), &ones, |x| {
            Ok(cross_entropy(x.copy()?, &targets, None)?.0)
        });
        let (closs, none) = cross_entropy(x.copy()?, &targets, None)?;
        close(&closs, &loss, 1e-12);
        assert!(none.is_none());
        let (_, half) = cross_entropy(x.copy()?, &targets, Some((0.25, DType::BF16)))?;
        close(&half.expect("wanted"), &grad.expect("wanted").to_dtype(DType::BF16)?, 0.0);
        Ok(())
    }

    #[test]
    fn large_logits_stay_finite() -> Result<()> {
        let x = Tensor::new(&[[1e30f32, 0.0], [-1e30, 5.0]], &Device::Cpu)?;
        let targets = Tensor::new(&[0u32, 1], &Device::Cpu)?;
        let (loss, _) = cross_entropy(x, &targets, None)?;
        assert_eq!(loss.to_vec1::<f32>()?, vec![0.0, 0.0]);
        Ok(())
    }
}
