//! Distillation: the divergence from a teacher's kept probabilities, beside the cross-entropy of the labels.

use super::{Gradient, cuda, limited};
use crate::cpu::{self, Float, ghosts, in_place, is_cpu, on_real, tensor, vectorised, view};
use crate::{Ledger, Tensor};
use candle_core::{DType, Result};

/// Largest number of probabilities kept for a row. On CUDA, each thread of a block has one.
pub const MOST_KEPT: usize = 512;

/// Kept probabilities of a teacher for the rows of a logit chunk, and the weights of the losses.
///
/// With temperature `T` and student probabilities `q = softmax(logits / T)` over the whole vocabulary, the divergence
/// of a row is `T^2 sum(p (ln p - ln q))` over the kept tokens (arXiv 1503.02531). The gradient is that of
/// `alpha` divergence + `(1 - alpha)` cross-entropy.
#[derive(Clone, Copy, Debug)]
pub struct Teacher<'a> {
    /// Token ids `[n, k]`, u32, different within a row. Without meaning where the probability is 0.
    pub ids: &'a Tensor,
    /// Probabilities at the temperature `[n, k]`, f32, with sum 1.
    pub probs: &'a Tensor,
    /// T, above 0.
    pub temperature: f64,
    /// Weight of the divergence.
    pub alpha: f64,
}

/// Cross-entropies and divergences of the rows, without scale and weights, and the gradient, if requested.
/// Consumes `logits`, and limits them, as [`super::cross_entropy`] does.
///
/// # Shapes
/// `logits` `[n, v]` in f32 (f64 in tests), `targets` `[n]` u32 -> cross-entropies and divergences `[n]`, gradient
/// `[n, v]`.
pub fn distillation(
    logits: Tensor,
    cap: Option<f64>,
    targets: &Tensor,
    teacher: Teacher<'_>,
    gradient: Option<Gradient<'_>>,
) -> Result<([Tensor; 2], Option<Tensor>)> {
    let (n, k) = teacher.ids.dims2()?;
    let fits = teacher.probs.dims() == [n, k] && logits.dims().first() == Some(&n) && k <= MOST_KEPT;
    if !fits || teacher.ids.dtype() != DType::U32 || teacher.probs.dtype() != DType::F32 {
        candle_core::bail!(
            "distillation: {:?} ids and {:?} probabilities for logits {:?}",
            teacher.ids.shape(),
            teacher.probs.shape(),
            logits.shape()
        );
    }
    if !is_cpu(&logits) {
        return cuda::distillation(logits, cap, targets, teacher, gradient);
    }
    limited(logits, cap, gradient, |logits| {
        on_real!(logits.dtype(), distillation_cpu(logits, targets, teacher, gradient))
    })
}

/// Target and teacher of a row.
struct Row<'a> {
    target: usize,
    ids: &'a [u32],
    probs: &'a [f32],
    temperature: f64,
    alpha: f64,
}

impl Row<'_> {
    /// Tokens with a probability, and the probability.
    fn kept(&self) -> impl Iterator<Item = (usize, f64)> {
        let all = self.ids.iter().zip(self.probs).filter(|(_, p)| **p > 0.0);
        all.map(|(id, p)| (*id as usize, f64::from(*p)))
    }

    /// Maximum of the logits; exponentials at the temperature, their sum, and the divergence.
    fn soft<T: Float>(&self, row: &[T]) -> (T, Vec<T>, T, T) {
        let (max, inverse) = (cpu::max(row), T::of(1.0 / self.temperature));
        let soft: Vec<T> = row.iter().map(|x| ((*x - max) * inverse).exp()).collect();
        let sum = cpu::sum(&soft);
        let log_q = |id: usize| (row[id] - max).to_f64() / self.temperature - sum.to_f64().ln();
        let divergence: f64 = self.kept().map(|(id, p)| p * (p.ln() - log_q(id))).sum();
        (max, soft, sum, T::of(self.temperature * self.temperature * divergence))
    }

    /// Losses; the logits stay.
    fn losses<T: Float>(&self, row: &[T]) -> [T; 2] {
        let (max, mut e, _, divergence) = self.soft(row);
        e.iter_mut().zip(row).for_each(|(e, x)| *e = (*x - max).exp());
        [max + cpu::sum(&e).ln() - row[self.target], divergence]
    }

    /// Losses, and the gradient times `scale` in place of the logits.
    fn backward<T: Float>(&self, row: &mut [T], scale: f64) -> [T; 2] {
        let (max, soft, soft_sum, divergence) = self.soft(row);
        let picked = row[self.target];
        row.iter_mut().for_each(|x| *x = (*x - max).exp());
        let sum = cpu::sum(row);
        let (hard, tempered) = (scale * (1.0 - self.alpha), scale * self.alpha * self.temperature);
        let (of_hard, of_soft) = (T::of(hard) / sum, T::of(tempered) / soft_sum);
        row.iter_mut().zip(&soft).for_each(|(x, s)| *x = *x * of_hard + *s * of_soft);
        row[self.target] -= T::of(hard);
        self.kept().for_each(|(id, p)| row[id] -= T::of(tempered * p));
        [max + sum.ln() - picked, divergence]
    }
}

fn distillation_cpu<T: Float>(
    logits: Tensor,
    targets: &Tensor,
    teacher: Teacher<'_>,
    gradient: Option<Gradient<'_>>,
) -> Result<([Tensor; 2], Option<Tensor>)> {
    let ((n, v), (_, k)) = (logits.dims2()?, teacher.ids.dims2()?);
    // a row of exponentials per thread, and lists of the teacher's values
    let work = |l: &Ledger| l.touch((l.machine().threads * 4 * v as u64) + 8 * (n * k) as u64);
    let losses = || (n.into(), T::DTYPE);
    if let Some(both) = ghosts::<T, 2>(&[&logits], [losses(), losses()], work) {
        return Ok((both, gradient.map(|_| logits)));
    }
    let targets = targets.to_vec1::<u32>()?;
    let ids = teacher.ids.flatten_all()?.to_vec1::<u32>()?;
    let probs = teacher.probs.flatten_all()?.to_vec1::<f32>()?;
    let outside = ids.iter().zip(&probs).any(|(id, p)| *p > 0.0 && *id as usize >= v);
    if targets.len() != n || outside || targets.iter().any(|t| *t as usize >= v) {
        candle_core::bail!(
            "distillation: a token outside {v} logits, or {} targets for {n} rows",
            targets.len()
        );
    }
    let row = |i: usize| Row {
        target: targets[i] as usize,
        ids: &ids[i * k..(i + 1) * k],
        probs: &probs[i * k..(i + 1) * k],
        temperature: teacher.temperature,
        alpha: teacher.alpha,
    };
    let made = |losses: Vec<[T; 2]>| -> Result<[Tensor; 2]> {
        let [ce, kd] = [0, 1].map(|i| tensor(losses.iter().map(|l| l[i]).collect(), n, T::DTYPE));
        Ok([ce?, kd?])
    };
    let Some(Gradient { scale, weights, .. }) = gradient else {
        let x = view::<T>(&logits)?;
        let losses = cpu::map(x.chunks(v).enumerate(), |(i, x)| vectorised(|| row(i).losses(x)));
        return Ok((made(losses)?, None));
    };
    let weights = weights.map(|w| w.to_vec1::<f32>()).transpose()?;
    if weights.as_ref().is_some_and(|w| w.len() != n) {
        candle_core::bail!("distillation: weights of another number than {n} rows");
    }
    let scale_of = |i: usize| weights.as_ref().map_or(scale, |w| scale * f64::from(w[i]));
    let mut losses = Vec::new();
    in_place::<T>("distillation", &logits, |x| {
        let rows = x.chunks_mut(v).enumerate();
        losses = cpu::map(rows, |(i, x)| vectorised(|| row(i).backward(x, scale_of(i))));
        Ok(())
    })?;
    Ok((made(losses)?, Some(logits)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, gradient, randn};
    use candle_core::Device;

    /// Central differences of the weighted sum of both losses; an empty place, a target among the kept tokens.
    #[test]
    fn gradient_of_both_losses() -> Result<()> {
        let x = (randn(1, (3, 7), DType::F64)? * 3.0)?;
        let targets = Tensor::new(&[0u32, 6, 3], &Device::Cpu)?;
        let ids = Tensor::new(&[[1u32, 0, 5], [2, 3, 9], [3, 4, 6]], &Device::Cpu)?;
        let probs =
            Tensor::new(&[[0.5f32, 0.25, 0.25], [0.75, 0.25, 0.0], [0.5, 0.375, 0.125]], &Device::Cpu)?;
        let weights = Tensor::new(&[0.5f32, 1.0, 2.0], &Device::Cpu)?;
        let cases = [(2.0, 0.7, None), (1.0, 0.5, None), (0.5, 1.0, Some(2.0)), (3.0, 0.0, None)];
        for (temperature, alpha, cap) in cases {
            let teacher = Teacher { ids: &ids, probs: &probs, temperature, alpha };
            let by = Gradient { scale: 0.25, weights: Some(&weights), dtype: DType::F64 };
            let ([ce, kd], grad) = distillation(x.copy()?, cap, &targets, teacher, Some(by))?;
            let factors = Tensor::new(&[0.125f64, 0.25, 0.5], &Device::Cpu)?;
            let both = |[ce, kd]: [Tensor; 2]| (ce * (1.0 - alpha))? + (kd * alpha)?;
            gradient("logits", &x, grad.as_ref().expect("wanted"), &factors, |x| {
                both(distillation(x.copy()?, cap, &targets, teacher, None)?.0)
            });
            let ([own, again], none) = distillation(x.copy()?, cap, &targets, teacher, None)?;
            close(&again, &kd, 1e-12);
            close(&own, &ce, 1e-12);
            close(&own, &super::super::cross_entropy(x.copy()?, cap, &targets, None)?.0, 1e-12);
            assert!(none.is_none());
        }
        Ok(())
    }

    /// A student with the teacher's probabilities has no divergence, and no gradient of one.
    #[test]
    fn a_student_that_is_the_teacher_has_no_divergence() -> Result<()> {
        let x = (randn(2, (2, 5), DType::F64)? * 2.0)?;
        let row: Vec<Vec<f64>> = x.to_vec2()?;
        let probs: Vec<Vec<f32>> = row
            .iter()
            .map(|row| {
                let sum: f64 = row.iter().map(|x| (x / 2.0).exp()).sum();
                row.iter().map(|x| ((x / 2.0).exp() / sum) as f32).collect()
            })
            .collect();
        let ids = Tensor::new(&[[0u32, 1, 2, 3, 4]; 2], &Device::Cpu)?;
        let probs = Tensor::new(probs, &Device::Cpu)?;
        let teacher = Teacher { ids: &ids, probs: &probs, temperature: 2.0, alpha: 1.0 };
        let by = Gradient { scale: 1.0, weights: None, dtype: DType::F64 };
        let targets = Tensor::new(&[0u32, 4], &Device::Cpu)?;
        let ([_, kd], grad) = distillation(x, None, &targets, teacher, Some(by))?;
        let grad = grad.expect("wanted");
        assert!(kd.to_vec1::<f64>()?.iter().all(|kd| kd.abs() < 1e-6));
        assert!(grad.flatten_all()?.to_vec1::<f64>()?.iter().all(|g| g.abs() < 1e-6));
        Ok(())
    }
}
