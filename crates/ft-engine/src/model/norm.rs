//! RMSNorm.

use super::pass::grad_accumulator::{GradAccumulator, Slot};
use super::pass::sequence_parallel::Columns;
use candle_core::{DType, Result};
use ft_kernels::Tensor;
use ft_kernels::norm;
use ft_kernels::padded::Padded;
use ft_kernels::upcast;

/// RMSNorm with a weight.
#[derive(Clone, Debug)]
pub struct Norm {
    /// Weight `[d]`.
    pub weight: Tensor,
    /// Gradient slot, if trained.
    pub slot: Option<Slot>,
    /// Epsilon, added to the mean square.
    pub eps: f64,
    /// Added to the weight: 1 in families storing `w - 1`, else 0.
    pub plus: f64,
}

impl Norm {
    /// Weight and constants, for kernels.
    pub fn scale(&self) -> norm::Scale<'_> {
        norm::Scale { weight: &self.weight, eps: self.eps, plus: self.plus }
    }

    /// Normalizes the last dimension: `[.., d]` -> `[.., d]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        norm::forward(x, self.scale())
    }

    /// `[t, d]` -> `[t, d]`, with `rank` spare columns for an adapter.
    pub fn forward_padded(&self, x: &Tensor, rank: usize) -> Result<Padded> {
        norm::forward_padded(x, self.scale(), rank)
    }

    /// Returns `x + a` and the norm of the sum, the latter with `rank` spare columns.
    pub fn forward_add(&self, x: &Tensor, a: Tensor, rank: usize) -> Result<(Tensor, Padded)> {
        norm::forward_add(x, a, self.scale(), rank)
    }

    /// Returns the gradient of the input `x`; the weight's gradient goes to the accumulator.
    pub fn backward(&self, x: &Tensor, dy: &Tensor, accum: &GradAccumulator<'_>) -> Result<Tensor> {
        let (dx, dw) = norm::backward(x, self.scale(), dy, self.slot.is_some())?;
        self.give(dw, accum)?;
        Ok(dx)
    }

    /// As [`Norm::backward`], plus `add`; the result has `rank` spare columns.
    pub fn backward_add(
        &self,
        x: &Tensor,
        dy: &Tensor,
        add: &Padded,
        rank: usize,
        accum: &GradAccumulator<'_>,
    ) -> Result<Padded> {
        let (dx, dw) = norm::backward_add(x, self.scale(), dy, add, self.slot.is_some(), rank)?;
        self.give(dw, accum)?;
        Ok(dx)
    }

    /// Values of a row on all ranks.
    fn all(&self, columns: Columns<'_>) -> Result<f64> {
        Ok((self.weight.dim(0)? * columns.ranks) as f64)
    }

    /// Factors of rows `[t, 1]` in f64, from the sums of their squares over all ranks.
    fn factors(&self, squares: &Tensor, columns: Columns<'_>) -> Result<Tensor> {
        squares.to_dtype(DType::F64)?.affine(1.0 / self.all(columns)?, self.eps)?.sqrt()?.recip()
    }

    /// The weight as a factor, in f32.
    fn wide_weight(&self) -> Result<Tensor> {
        upcast(&self.weight)?.affine(1.0, self.plus)
    }

    /// As [`Norm::forward`], of rows `[t, d]` with columns split over ranks. Collective.
    pub fn forward_over(&self, x: &Tensor, columns: Columns<'_>) -> Result<Tensor> {
        let wide = upcast(x)?;
        let squares = columns.sum(&wide.sqr()?.sum_keepdim(1)?)?;
        let r = self.factors(&squares, columns)?.to_dtype(wide.dtype())?;
        wide.broadcast_mul(&r)?.broadcast_mul(&self.wide_weight()?)?.to_dtype(x.dtype())
    }

    /// As [`Norm::backward`], of rows `[t, d]` with columns split over ranks. Collective.
    pub fn backward_over(
        &self,
        x: &Tensor,
        dy: &Tensor,
        columns: Columns<'_>,
        accum: &GradAccumulator<'_>,
    ) -> Result<Tensor> {
        let (wide, dy) = (upcast(x)?, upcast(dy)?);
        let gw = dy.broadcast_mul(&self.wide_weight()?)?;
        let own = [wide.sqr()?.sum_keepdim(1)?, (&gw * &wide)?.sum_keepdim(1)?];
        let sums = columns.sum(&Tensor::cat(&own, 1)?)?;
        let of = |i| sums.narrow(1, i, 1)?.contiguous();
        let r = self.factors(&of(0)?, columns)?;
        let along = ((of(1)?.to_dtype(DType::F64)? * &r)? * (r.sqr()? / self.all(columns)?)?)?;
        let [r, along] = [r, along].map(|f| f.to_dtype(wide.dtype()));
        let r = r?;
        if self.slot.is_some() {
            self.give(Some((&dy * &wide)?.broadcast_mul(&r)?.sum_keepdim(0)?), accum)?;
        }
        (gw.broadcast_mul(&r)? - wide.broadcast_mul(&along?)?)?.to_dtype(x.dtype())
    }

    /// Adds the weight's gradient, given as partial sums by row, to the accumulator.
    pub fn give(&self, dw: Option<Tensor>, accum: &GradAccumulator<'_>) -> Result<()> {
        match (self.slot, dw) {
            (Some(slot), Some(dw)) => accum.column_sums(slot, &dw),
            _ => Ok(()),
        }
    }
}
