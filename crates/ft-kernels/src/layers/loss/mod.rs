//! Cross-entropy of a logit chunk, and the gradient of the logits.
//!
//! The head never forms the whole matrix of logits: it processes one chunk at a time and consumes the
//! gradient of the chunk at once.

mod cuda;
mod distill;
mod top;

pub use distill::{MOST_KEPT, Teacher, distillation};
pub use top::top;

use crate::cpu::{self, Float, ghosts, in_place, is_cpu, on_real, tensor, vectorised, view};
use crate::{Ledger, Tensor};
use candle_core::{DType, Device, Result};

/// Gradient to compute beside the losses: of `scale * sum(weights * losses)`.
#[derive(Clone, Copy, Debug)]
pub struct Gradient<'a> {
    /// Factor of all rows.
    pub scale: f64,
    /// Weights of the rows `[n]`, f32; all 1 without.
    pub weights: Option<&'a Tensor>,
    /// Dtype of the gradient.
    pub dtype: DType,
}

/// Logits within a limit: `cap tanh(logits / cap)`.
///
/// # Errors
/// Device errors.
pub fn capped(logits: Tensor, cap: f64) -> Result<Tensor> {
    ((logits / cap)?.tanh()? * cap)?.contiguous()
}

/// Runs `loss` on the CPU, on the logits soft-capped if there is a cap; rounds its gradient to the requested dtype and
/// multiplies it by the cap's slope.
fn limited<L>(
    logits: Tensor,
    cap: Option<f64>,
    gradient: Option<Gradient<'_>>,
    loss: impl FnOnce(Tensor) -> Result<(L, Option<Tensor>)>,
) -> Result<(L, Option<Tensor>)> {
    let logits = if let Some(cap) = cap { capped(logits, cap)? } else { logits };
    let slope =
        |(cap, g): (f64, Gradient<'_>)| logits.sqr()?.affine(-1.0 / (cap * cap), 1.0)?.to_dtype(g.dtype);
    let slope = cap.zip(gradient).map(slope).transpose()?;
    let (losses, d) = loss(logits)?;
    let rounded = |(d, g): (Tensor, Gradient<'_>)| {
        let d = d.to_dtype(g.dtype)?;
        if let Some(slope) = slope { d * slope } else { Ok(d) }
    };
    Ok((losses, d.zip(gradient).map(rounded).transpose()?))
}

/// Losses of the rows, without scale and weights, and the gradient, if requested. With a cap, losses are of the logits
/// within this limit, see [`capped`].
///
/// `logits` are consumed: an f32 gradient on CUDA, and every gradient on the CPU, overwrites their storage. A
/// target outside the vocabulary is an error on the CPU and a NaN loss on CUDA.
///
/// # Shapes
/// `logits` `[n, v]` in f32 (f64 in tests), `targets` `[n]` u32 -> losses `[n]`, gradient `[n, v]`.
pub fn cross_entropy(
    logits: Tensor,
    cap: Option<f64>,
    targets: &Tensor,
    gradient: Option<Gradient<'_>>,
) -> Result<(Tensor, Option<Tensor>)> {
    if !is_cpu(&logits) {
        return cuda::cross_entropy(logits, cap, targets, gradient);
    }
    limited(logits, cap, gradient, |logits| {
        on_real!(logits.dtype(), cross_entropy_cpu(logits, targets, gradient))
    })
}

fn cross_entropy_cpu<T: Float>(
    logits: Tensor,
    targets: &Tensor,
    gradient: Option<Gradient<'_>>,
) -> Result<(Tensor, Option<Tensor>)> {
    let (n, v) = logits.dims2()?;
    // without a gradient the logits stay intact: one row of workspace per thread
    let row = |l: &Ledger| l.touch(l.machine().threads * if gradient.is_some() { 0 } else { 4 * v as u64 });
    if let Some([losses]) = ghosts::<T, 1>(&[&logits], [(n.into(), T::DTYPE)], row) {
        return Ok((losses, gradient.map(|_| logits)));
    }
    let targets = targets.to_vec1::<u32>()?;
    if targets.len() != n || targets.iter().any(|t| *t as usize >= v) {
        candle_core::bail!(
            "cross-entropy: a target outside {v} logits, or {} targets for {n} rows",
            targets.len()
        );
    }
    let Some(Gradient { scale, weights, .. }) = gradient else {
        let x = view::<T>(&logits)?;
        let losses = cpu::map(x.chunks(v).zip(&targets), |(row, t)| {
            vectorised(|| {
                let max = cpu::max(row);
                let e: Vec<T> = row.iter().map(|x| (*x - max).exp()).collect();
                max + cpu::sum(&e).ln() - row[*t as usize]
            })
        });
        return Ok((tensor(losses, n, T::DTYPE)?, None));
    };
    let weights = weights.map(|w| w.to_vec1::<f32>()).transpose()?;
    if weights.as_ref().is_some_and(|w| w.len() != n) {
        candle_core::bail!("cross-entropy: weights of another number than {n} rows");
    }
    let scale_of = |i: usize| T::of(weights.as_ref().map_or(scale, |w| scale * f64::from(w[i])));
    let mut losses = Vec::new();
    in_place::<T>("cross-entropy", &logits, |x| {
        losses = cpu::map(x.chunks_mut(v).zip(&targets).enumerate(), |(i, (row, t))| {
            vectorised(|| {
                let scale = scale_of(i);
                let (max, picked) = (cpu::max(row), row[*t as usize]);
                row.iter_mut().for_each(|x| *x = (*x - max).exp());
                let sum = cpu::sum(row);
                let k = scale / sum;
                row.iter_mut().for_each(|x| *x *= k);
                row[*t as usize] -= scale;
                max + sum.ln() - picked
            })
        });
        Ok(())
    })?;
    Ok((tensor(losses, n, T::DTYPE)?, Some(logits)))
}

/// Sum of losses in f64, in order: independent of the split into chunks.
pub fn total(losses: &[Tensor]) -> Result<f64> {
    let mut all = Running::default();
    all.keep(losses.to_vec(), &[])?;
    all.total()
}

/// Copies losses to the host, those of a device in a single copy.
pub fn on_host(losses: Vec<Tensor>) -> Result<Vec<Vec<f64>>> {
    let all = if losses.iter().all(is_cpu) { losses } else { vec![Tensor::cat(&losses, 0)?] };
    let read = |t: &Tensor| {
        let t = t.real()?;
        let t = if t.device().is_cpu() { t.clone() } else { t.to_device(&Device::Cpu)? };
        t.to_dtype(DType::F64)?.to_vec1::<f64>()
    };
    all.iter().map(read).collect()
}

/// Running weighted sum of losses.
///
/// Reading losses from a device synchronizes, so a bounded number of them stays on the device.
#[derive(Debug, Default)]
pub struct Running {
    sum: f64,
    kept: Vec<Tensor>,
    /// Weights of the kept losses.
    weights: Vec<f32>,
}

impl Running {
    /// Maximum number of losses on the device: 4 MiB.
    const MOST: usize = 1 << 20;

    /// Adds the losses of a micro-batch. `weights` are empty for weights of 1.
    pub fn keep(&mut self, losses: Vec<Tensor>, weights: &[f32]) -> Result<()> {
        if self.weights.is_empty() != weights.is_empty() {
            self.add()?;
        }
        self.kept.extend(losses);
        self.weights.extend(weights);
        let here = self.kept.iter().all(is_cpu);
        if here || self.kept.iter().map(Tensor::elem_count).sum::<usize>() > Self::MOST {
            self.add()?;
        }
        Ok(())
    }

    fn add(&mut self) -> Result<()> {
        let (kept, weights) = (std::mem::take(&mut self.kept), std::mem::take(&mut self.weights));
        if kept.is_empty() {
            return Ok(());
        }
        let mut weights = weights.into_iter();
        for losses in on_host(kept)? {
            let weighted = losses.iter().map(|l| weights.next().map_or(*l, |w| l * f64::from(w)));
            self.sum += weighted.sum::<f64>();
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
    use crate::ledger::Machine;
    use crate::tensor::Ghost;

    fn by(scale: f64, weights: Option<&Tensor>, dtype: DType) -> Gradient<'_> {
        Gradient { scale, weights, dtype }
    }

    #[test]
    fn gradient_of_weighted_losses() -> Result<()> {
        let x = (randn(1, (3, 7), DType::F64)? * 3.0)?;
        let targets = Tensor::new(&[0u32, 6, 3], &Device::Cpu)?;
        let weights = Tensor::new(&[0.5f32, 0.0, -2.0], &Device::Cpu)?;
        let (loss, grad) =
            cross_entropy(x.copy()?, None, &targets, Some(by(0.25, Some(&weights), DType::F64)))?;
        let factors = Tensor::new(&[0.125f64, 0.0, -0.5], &Device::Cpu)?;
        gradient("logits", &x, grad.as_ref().expect("wanted"), &factors, |x| {
            Ok(cross_entropy(x.copy()?, None, &targets, None)?.0)
        });
        let mut sum = Running::default();
        sum.keep(vec![loss.copy()?], &[0.5, 0.0, 2.0])?;
        sum.keep(vec![loss.copy()?], &[])?;
        let l = loss.to_vec1::<f64>()?;
        let expected = 0.5 * l[0] + 2.0 * l[2] + l.iter().sum::<f64>();
        assert!((sum.total()? - expected).abs() < 1e-12);
        Ok(())
    }

    #[test]
    fn gradient_of_the_losses() -> Result<()> {
        let x = (randn(1, (5, 7), DType::F64)? * 3.0)?;
        let targets = Tensor::new(&[0u32, 6, 3, 3, 1], &Device::Cpu)?;
        let ones = Tensor::full(0.25f64, 5, &Device::Cpu)?;
        for cap in [None, Some(2.0)] {
            let (loss, grad) = cross_entropy(x.copy()?, cap, &targets, Some(by(0.25, None, DType::F64)))?;
            gradient("logits", &x, grad.as_ref().expect("wanted"), &ones, |x| {
                Ok(cross_entropy(x.copy()?, cap, &targets, None)?.0)
            });
            let (closs, none) = cross_entropy(x.copy()?, cap, &targets, None)?;
            close(&closs, &loss, 1e-12);
            assert!(none.is_none());
            if cap.is_none() {
                let (_, half) = cross_entropy(x.copy()?, cap, &targets, Some(by(0.25, None, DType::BF16)))?;
                close(&half.expect("wanted"), &grad.expect("wanted").to_dtype(DType::BF16)?, 0.0);
            }
        }
        Ok(())
    }

    #[test]
    fn targets_of_another_dtype_are_refused_on_cuda() -> Result<()> {
        let ledger = Ledger::new(Machine { cuda: true, ..Machine::default() });
        let ghost = |shape: &[usize], dtype| Tensor::from(Ghost::new(&ledger, shape, dtype));
        let (ids, probs) = (ghost(&[3, 2], DType::U32), ghost(&[3, 2], DType::F32));
        for (dtype, fits) in [(DType::U32, true), (DType::F32, false)] {
            let (logits, targets) = (ghost(&[3, 7], DType::F32), ghost(&[3], dtype));
            assert_eq!(cross_entropy(logits.clone(), None, &targets, None).is_ok(), fits);
            let teacher = Teacher { ids: &ids, probs: &probs, temperature: 1.0, alpha: 0.5 };
            assert_eq!(distillation(logits, None, &targets, teacher, None).is_ok(), fits);
        }
        Ok(())
    }

    #[test]
    fn large_logits_stay_finite() -> Result<()> {
        let x = Tensor::new(&[[1e30f32, 0.0], [-1e30, 5.0]], &Device::Cpu)?;
        let targets = Tensor::new(&[0u32, 1], &Device::Cpu)?;
        let (loss, _) = cross_entropy(x, None, &targets, None)?;
        assert_eq!(loss.to_vec1::<f32>()?, vec![0.0, 0.0]);
        Ok(())
    }
}
