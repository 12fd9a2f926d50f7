//! Linears of one input, with adapters computed together on CUDA: queries, keys and values; gate and up.
//!
//! The A of all, `[n r, i]`, stand end to end in their buffer. One product gives `x A^T` of all, and one the gradients
//! of all A, so that x is read once for n adapters. In the backward pass, the gradients of `x A^T` of all stand beside
//! the output gradient of the last linear: `[dy | du] [W ; A]`, one product, adds the part of all adapters to the
//! gradient of x.

use super::forward::{Linear, Lora, Saved};
use super::weight::Weight;
use crate::model::pass::grad_accumulator::GradAccumulator;
use candle_core::Result;
use ft_kernels::padded::Padded;
use ft_kernels::quantized::tiles::FEW;
use ft_kernels::{Tensor, gemm};

/// A of the adapters of one input.
#[derive(Clone, Debug)]
pub struct Stack {
    /// `[n r, i]`.
    pub a: Tensor,
}

/// One linear of a stack in the backward pass, with its saved activations and output gradient.
pub type Member<'a> = (&'a Linear, &'a Saved, Padded);

impl Stack {
    /// Sum of the LoRA ranks.
    pub fn all(&self) -> usize {
        self.a.dims()[0]
    }

    /// The adapters, if all linears still have theirs.
    fn adapters<'a>(&self, linears: impl Iterator<Item = &'a Linear>) -> Option<Vec<&'a Lora>> {
        let all = linears.map(|l| l.lora.as_ref()).collect::<Option<Vec<_>>>()?;
        let rank: usize = all.iter().map(|l| l.a.dims()[0]).sum();
        (self.all() == rank).then_some(all)
    }

    /// `s x A^T` `[t, r]` of every linear for the input `x` `[t, i]`; none for inputs of few rows.
    pub fn low<'a>(&self, linears: impl Iterator<Item = &'a Linear>, x: &Tensor) -> Result<Vec<Tensor>> {
        let Some(all) = self.adapters(linears).filter(|_| x.dims()[0] > FEW && x.dtype() == self.a.dtype())
        else {
            return Ok(Vec::new());
        };
        let low = gemm::matmul_scaled(x, false, &self.a, true, all[0].scale)?;
        let rank = low.dim(1)? / all.len();
        (0..all.len()).map(|n| low.narrow(1, n * rank, rank)).collect()
    }

    /// Whether [`Stack::backward`] takes the gradients of these linears' outputs, like `y` `[t, ..]`: the last matrix
    /// is 4-bit, with room below for the A of all, or in 8-bit floats, multiplied apart from all A. A dense one has
    /// room for its own A only.
    pub fn trains<'a>(
        &self,
        linears: impl DoubleEndedIterator<Item = &'a Linear> + Clone,
        y: &Tensor,
    ) -> bool {
        let fits = linears
            .clone()
            .next_back()
            .is_some_and(|last| last.weight.merges(y, self.all()) || matches!(last.weight, Weight::Fp8(_)));
        let adapters = self.adapters(linears).filter(|_| fits && y.dtype() == self.a.dtype());
        adapters.is_some_and(|all| all.iter().all(|l| l.slots.is_some()))
    }

    /// Backward pass of all linears in turn: returns the gradient of their input. Gradients of trained tensors go to
    /// the accumulator.
    pub fn backward(&self, members: Vec<Member<'_>>, accum: &GradAccumulator<'_>) -> Result<Tensor> {
        let Some((last, saved, dy)) = members.last() else { candle_core::bail!("{NONE}") };
        let (Some(x), (t, _)) = (saved.x.clone(), dy.dims()) else { candle_core::bail!("{NONE}") };
        let all = self.all();
        let beside = dy.room() >= all && last.weight.merges(dy.all(), all);
        let du = if beside {
            dy.beside(all)?
        } else {
            Padded::empty(dy.all(), (t, all), 0, dy.dtype())?.values()?
        };
        let (mut dx, mut slots, mut at, count) = (None, Vec::new(), 0, members.len());
        for (n, (linear, saved, dy)) in members.into_iter().enumerate() {
            let (Some(lora), Some((u, rest))) = (&linear.lora, &saved.u) else {
                candle_core::bail!("{NONE}")
            };
            let (Some((a_slot, b_slot)), rank) = (lora.slots, lora.a.dim(0)?) else {
                candle_core::bail!("{NONE}")
            };
            let values = dy.values()?;
            if let Some(slot) = linear.bias_slot {
                accum.column_sums(slot, &values)?;
            }
            lora.low_gradient_into(&du.narrow(1, at, rank)?, &values, b_slot, (u, *rest), accum)?;
            dx = Some(match dx {
                dx if beside && n + 1 == count => linear.weight.backward_with(&dy.with(all)?, &self.a, dx)?,
                dx => linear.weight.backward(&values, dx)?,
            });
            slots.push(a_slot);
            at += rank;
        }
        let Some(dx) = dx else { candle_core::bail!("{NONE}") };
        if !beside {
            gemm::matmul_acc(&dx, &du, false, &self.a, false, 1.0)?;
        }
        accum.products(&slots, &du, &x, 1.0)?;
        Ok(dx)
    }
}

/// Error for a bug in the model.
const NONE: &str = "backward through adapters of one input without their activations";
