//! Forward pass of a linear.

use super::rows::Rows;
use super::weight::Weight;
use crate::model::pass::batch::Context;
use crate::model::pass::grad_accumulator::Slot;
use candle_core::Result;
use ft_base::rng::{Purpose, Stream};
use ft_kernels::Tensor;
use ft_kernels::dropout::Mask;
use ft_kernels::padded::Padded;
use ft_kernels::quantized::tiles::FEW;
use ft_kernels::{bias, dora, dropout, gemm, scaled, upcast};

/// LoRA of a linear.
#[derive(Clone, Debug)]
pub struct Lora {
    /// A `[r, i]`.
    pub a: Tensor,
    /// B `[o, r]`.
    pub b: Tensor,
    /// Gradient slots of A and B; `None` in inference.
    pub slots: Option<(Slot, Slot)>,
    /// Scale s of the update.
    pub scale: f64,
    /// Dropout probability of the adapter's input in training.
    pub dropout: f64,
    /// Index of this linear's dropout stream.
    pub stream: u64,
    /// First input column and number of all columns, if ranks cut them: dropout depends on the column alone.
    pub columns: Option<(usize, usize)>,
    pub dora: Option<Dora>,
}

/// DoRA's magnitude, with constants for the row norm.
#[derive(Clone, Debug)]
pub struct Dora {
    /// m `[1, o]`.
    pub magnitude: Tensor,
    /// Gradient slot; `None` in inference.
    pub slot: Option<Slot>,
    /// Squared row norms `|W|^2` `[o]`, f32. Constant, since W is frozen.
    pub row_squares: Tensor,
}

impl Lora {
    /// Row norms of `W + s B A`, `[o]`, f32, without forming the matrix.
    pub fn norms(&self, weight: &Weight, squares: &Tensor) -> Result<Tensor> {
        self.norms_of(&weight.times(&self.a)?, squares).values()
    }

    fn norms_of<'a>(&'a self, times: &'a Tensor, squares: &'a Tensor) -> dora::Norms<'a> {
        dora::Norms { a: &self.a, b: &self.b, times, squares, scale: self.scale }
    }

    /// `x A^T` and the remaining part of the factor k s: 1 if `scaled` (factor applied to the f32 sums).
    fn low(&self, xd: &Tensor, k: f64, scaled: bool) -> Result<(Tensor, f64)> {
        let factor = self.scale * k;
        Ok(if scaled {
            (gemm::matmul_scaled(xd, false, &self.a, true, factor)?, 1.0)
        } else {
            (gemm::matmul(xd, false, &self.a, true)?, factor)
        })
    }

    /// Dropout mask for an input and the factor not included in the mask; `None` without dropout.
    pub(super) fn mask(&self, x: &Tensor, ctx: &Context) -> Result<Option<(Mask, f64)>> {
        let Some(d) = ctx.dropout.filter(|_| self.dropout > 0.0) else { return Ok(None) };
        let stream = Stream::new(d.seed, Purpose::Dropout, d.step, self.stream);
        let rows = dropout::Rows { first: d.first_row, list: ctx.rows.as_ref().map(|rows| rows.as_slice()) };
        let columns = self.columns.unwrap_or((0, x.dim(1)?));
        dropout::mask(stream, (rows, columns), self.dropout, x).map(Some)
    }
}

/// A linear layer.
#[derive(Clone, Debug)]
pub struct Linear {
    pub weight: Weight,
    /// Bias `[o]`.
    pub bias: Option<Tensor>,
    /// Gradient slot of the matrix, if trained in full.
    pub weight_slot: Option<Slot>,
    /// Gradient slot of the bias.
    pub bias_slot: Option<Slot>,
    pub lora: Option<Lora>,
    /// Trained rows (output head only).
    pub rows: Option<Rows>,
}

/// Saved activations of a linear.
#[derive(Debug, Default)]
pub struct Saved {
    /// Input `[t, i]`, if the backward pass needs it.
    pub x: Option<Tensor>,
    /// `drop(x) A^T` `[t, r]`, and the remaining part of the factor k s.
    pub(super) u: Option<(Tensor, f64)>,
    /// DoRA: the output `[t, o]` before magnitude and k, g `[1, o]` in f32, and k / norm.
    pub(super) dora: Option<(Tensor, Tensor, Tensor)>,
}

impl Linear {
    /// Whether the backward pass needs the input.
    pub fn needs_input(&self) -> bool {
        self.weight_slot.is_some()
            || self.lora.as_ref().is_some_and(|l| l.slots.is_some())
            || self.rows_slot().is_some()
    }

    /// `x` if the backward pass needs the input.
    pub fn input(&self, x: &Tensor) -> Option<Tensor> {
        self.needs_input().then(|| x.clone())
    }

    /// Gradient slot of the trained rows.
    fn rows_slot(&self) -> Option<Slot> {
        self.rows.as_ref().and_then(|r| r.slot)
    }

    /// Writes the trained rows into the matrix; required before use.
    ///
    /// # Errors
    /// A 4-bit matrix.
    pub fn write_rows(&self) -> Result<()> {
        match (&self.rows, &self.weight) {
            (None, _) => Ok(()),
            (Some(rows), Weight::Dense(w)) => rows.write(w),
            (Some(_), _) => candle_core::bail!("rows that train alone, of a matrix that is not as it is"),
        }
    }

    /// A copy with the matrix dequantized, if 4-bit.
    pub fn dequantized(&self) -> Result<Self> {
        self.dequantized_with(0)
    }

    /// As [`Linear::dequantized`], with room for at least the LoRA rank `stack`.
    pub fn dequantized_with(&self, stack: usize) -> Result<Self> {
        // DoRA is not fused and needs no spare columns.
        let rank = match &self.lora {
            Some(Lora { dora: None, a, .. }) => a.dim(0)?.max(stack),
            _ => 0,
        };
        Ok(Self { weight: self.weight.dequantized(rank)?, ..self.clone() })
    }

    /// Spare columns for an input like `x` `[t, ..]` (same rows, dtype and device) to fuse the products of
    /// matrix and adapter: the LoRA rank, or 0 if not fused.
    pub fn fused_rank(&self, x: &Tensor) -> usize {
        let Some(Lora { a, b, dora: None, .. }) = &self.lora else { return 0 };
        let (rows, rank) = (x.dims().first().copied().unwrap_or(0), a.dims()[0]);
        let one = !x.device().is_cpu()
            // For fewer rows, products read the codes directly.
            && rows > FEW
            && [a.dtype(), b.dtype()] == [x.dtype(); 2]
            && self.weight.merges(x, rank);
        if one { rank } else { 0 }
    }

    /// Spare columns for the gradient of an output like `y` `[t, ..]`, to fuse the backward products.
    pub fn fused_rank_back(&self, y: &Tensor, ctx: &Context) -> usize {
        let drops = |l: &Lora| l.dropout > 0.0 && ctx.dropout.is_some();
        if self.lora.as_ref().is_none_or(|l| l.slots.is_none() || drops(l)) { 0 } else { self.fused_rank(y) }
    }

    /// Whether the matrix is 4-bit and dequantized in every product.
    pub fn is_packed(&self) -> bool {
        matches!(self.weight, Weight::Nf4(_))
    }

    /// Gradient slots of all trained tensors of this linear.
    pub fn slots(&self) -> impl Iterator<Item = Slot> {
        let lora = self.lora.as_ref();
        let (a, b) = lora.and_then(|l| l.slots).unzip();
        let magnitude = lora.and_then(|l| l.dora.as_ref()?.slot);
        [self.weight_slot, self.bias_slot, a, b, magnitude, self.rows_slot()].into_iter().flatten()
    }

    /// Recomputes the saved activations; skips the output unless they depend on it (DoRA).
    pub fn recompute(&self, x: &Tensor, ctx: &Context) -> Result<Saved> {
        match &self.lora {
            Some(Lora { dora: Some(_), .. }) => Ok(self.forward(x, ctx)?.1),
            Some(lora) if lora.slots.is_some() => {
                let (xd, k) = masked(x, &lora.mask(x, ctx)?)?;
                let u = lora.low(&xd, k, self.fused_rank(x) > 0)?;
                Ok(Saved { x: Some(x.clone()), u: Some(u), dora: None })
            }
            _ => Ok(Saved { x: self.input(x), ..Saved::default() }),
        }
    }

    /// Forward pass: `[t, i]` -> `[t, o]`.
    pub fn forward(&self, x: &Tensor, ctx: &Context) -> Result<(Tensor, Saved)> {
        self.forward_padded(&Padded::of(x)?, ctx)
    }

    /// As [`Linear::forward`], for an input with spare columns: see [`Linear::fused_rank`].
    pub fn forward_padded(&self, x: &Padded, ctx: &Context) -> Result<(Tensor, Saved)> {
        self.forward_with(x, None, ctx)
    }

    /// As [`Linear::forward_padded`], given `s x A^T`, if computed already: see [`Stack::low`](super::Stack::low).
    pub fn forward_with(&self, x: &Padded, low: Option<Tensor>, ctx: &Context) -> Result<(Tensor, Saved)> {
        let padded = x;
        let x = &padded.values()?;
        let mut saved = Saved { x: self.input(x), ..Saved::default() };
        let Some(lora) = &self.lora else {
            let y = self.weight.forward(x)?;
            return Ok((self.add_bias(y)?, saved));
        };
        let mask = lora.mask(x, ctx)?;
        let (xd, k) = masked(x, &mask)?;
        let rank = self.fused_rank(x);
        let one = rank > 0 && padded.room() >= rank;
        let (u, rest) = low.map_or_else(|| lora.low(&xd, k, one), |u| Ok((u, 1.0)))?;
        let y = match &lora.dora {
            None if one => {
                padded.set_beside(&u)?;
                self.add_bias(self.weight.forward_with(&padded.with(rank)?, &lora.b)?)?
            }
            None => {
                let y = self.add_bias(self.weight.forward(x)?)?;
                gemm::matmul_acc(&y, &u, false, &lora.b, true, rest)?;
                y
            }
            Some(dora) => {
                let base = self.weight.forward(&xd)?;
                let z = base.copy()?;
                gemm::matmul_acc(&z, &u, false, &lora.b, true, lora.scale)?;
                let times = self.weight.times(&lora.a)?;
                let [g, inverse] = lora.norms_of(&times, &dora.row_squares).factors(&dora.magnitude)?;
                drop(times);
                let whole = mask.as_ref().map(|_| self.weight.forward(x)).transpose()?;
                let others = whole.as_ref().map(|w| (w, &base));
                let y = dora::Scaling { g: &g, add: 0.0, k, others }.of(&z)?;
                if dora.slot.is_some() {
                    saved.dora = Some((z, g, scaled(&inverse, k)?));
                }
                self.add_bias(y)?
            }
        };
        saved.u = lora.slots.is_some().then_some((u, rest));
        Ok((y, saved))
    }

    fn add_bias(&self, y: Tensor) -> Result<Tensor> {
        match &self.bias {
            // A router computes in f32, whatever its bias is kept in.
            Some(b) if b.dtype() != y.dtype() => bias::add(y.clone(), &b.to_dtype(y.dtype())?),
            Some(b) => bias::add(y, b),
            None => Ok(y),
        }
    }

    /// As [`Linear::forward`], with outputs in f32 (f64 for f64), for the logits. On CUDA, f32 sums are
    /// returned without intermediate rounding.
    pub fn forward_wide(&self, x: &Tensor, ctx: &Context) -> Result<(Tensor, Saved)> {
        let is_dora = self.lora.as_ref().is_some_and(|l| l.dora.is_some());
        let (Weight::Dense(w), None, false) = (&self.weight, &self.bias, is_dora || x.device().is_cpu())
        else {
            let (y, saved) = self.forward(x, ctx)?;
            return Ok((upcast(&y)?, saved));
        };
        let mut saved = Saved { x: self.input(x), ..Saved::default() };
        let Some(lora) = &self.lora else { return Ok((gemm::matmul_wide(x, false, w, true)?, saved)) };
        let (xd, k) = masked(x, &lora.mask(x, ctx)?)?;
        let (u, rest) = lora.low(&xd, k, false)?;
        let y = gemm::matmul_wide(x, false, w, true)?;
        gemm::matmul_acc(&y, &u, false, &lora.b, true, rest)?;
        saved.u = lora.slots.is_some().then_some((u, rest));
        Ok((y, saved))
    }
}

/// Applies dropout; also returns the factor not included in the mask.
fn masked(x: &Tensor, mask: &Option<(Mask, f64)>) -> Result<(Tensor, f64)> {
    match mask {
        Some((m, k)) => Ok((m.of(x)?, *k)),
        None => Ok((x.clone(), 1.0)),
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
