//! Update of a part of a flat buffer.

use crate::params::FlatParam;
use crate::params::buffers::LocalShard;
use crate::params::buffers::moments::MomentsView;
use candle_core::{DType, Result};
use ft_kernels::Tensor;
use ft_kernels::optimizer::{AdamW, adamw, adamw_rounded, adamw8bit, adamw8bit_rounded};
use std::ops::Range;

/// Update of a range of flat buffers, within one parameter group.
#[derive(Clone)]
pub(super) struct Update<'a> {
    pub flat: &'a FlatParam,
    pub grads: &'a LocalShard,
    pub range: Range<usize>,
    /// Hyperparameters.
    pub k: AdamW,
}

impl Update<'_> {
    pub fn grads(&self) -> Result<Tensor> {
        self.grads.of(self.range.clone())
    }

    /// Master weights of the range.
    pub fn master(&self) -> Result<Tensor> {
        self.flat.master.of(self.range.clone())
    }

    /// Compute buffer of the range.
    pub fn compute(&self) -> Result<Tensor> {
        self.flat.compute.held.of(self.range.clone())
    }

    /// Whether the compute buffer is the only copy of these weights (no f32 master weights).
    pub fn is_rounded(&self) -> bool {
        !self.flat.keeps(&self.range)
    }

    /// Updates states and weights from `grads` on the device of the states, and writes the new weights to
    /// `copy` as well. Weights without an f32 copy may be on another device.
    pub fn apply(&self, grads: &Tensor, copy: Option<&Tensor>) -> Result<()> {
        let Some(moments) = &self.flat.moments else { candle_core::bail!("no moments to update") };
        let moments = moments.of(self.range.clone())?;
        if self.is_rounded() {
            return self.apply_rounded(grads, moments);
        }
        let p = self.master()?;
        match moments {
            MomentsView::F32([m, v]) => adamw(&p, &m, &v, grads, copy, &self.k),
            MomentsView::EightBit(all) => adamw8bit(&p, &all, grads, copy, &self.k),
        }
    }

    fn apply_rounded(&self, grads: &Tensor, moments: MomentsView) -> Result<()> {
        let draws = self.flat.draws(self.k.t, self.range.start);
        self.flat.compute_on(self.range.clone(), grads.real()?.device(), |p| match &moments {
            MomentsView::F32([m, v]) => adamw_rounded(p, [m, v, grads], draws, &self.k),
            MomentsView::EightBit(all) => adamw8bit_rounded(p, all, grads, draws, &self.k),
        })
    }

    /// Applies the update with states and compute buffer on one device.
    pub fn on_device(&self) -> Result<()> {
        // for f32, master weights and compute buffer are the same
        let copied = self.flat.compute.whole.dtype() != DType::F32 && !self.is_rounded();
        let copy = copied.then(|| self.compute()).transpose()?;
        self.apply(&self.grads()?, copy.as_ref())
    }
}
