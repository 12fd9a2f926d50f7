//! A linear: frozen or trained in full, with or without LoRA or DoRA. Model code does not know which.
//!
//! With `s = alpha / rank` (rsLoRA: `alpha / sqrt(rank)`), A [r, i], B [o, r]:
//!
//! * LoRA (Hu et al., 2021): `y = x W^T + b + s drop(x) A^T B^T`;
//! * DoRA (Liu et al., 2024), m `[o]`: `y = b + g * (x W^T + s x A^T B^T)`, `g = m / |W + s B A|` by row, the
//!   norm treated as a constant, as PEFT does it. With dropout PEFT scales only what passed it:
//!   `y = b + x W^T - drop(x) W^T + g * (drop(x) W^T + s drop(x) A^T B^T)`.
//!
//! Factors are applied where sums are f32. In half precision dropout's mask is 0 or 1, and `k = 1 / (1 - p)` goes with
//! `s` and `g`; in f32 the mask has it, and k is 1.

//!
//! On CUDA the matrix's product and the adapter's are one, where whoever writes the operands leaves room beside them
//! ([`Linear::room`], [`Linear::room_back`]): [`ft_kernels::padded`] says why. Not with DoRA; and backward not with
//! dropout, which is on the adapter's part of the gradient alone.

mod backward;
mod weight;

pub use self::backward::Later;
pub use self::weight::Weight;

use super::batch::Context;
use super::rows::Rows;
use super::sink::Slot;
use ft_kernels::Tensor;
use ft_kernels::dropout::Mask;
use ft_kernels::padded::Padded;
use ft_kernels::quantized::tiles::FEW;
use ft_kernels::{bias, dora, dropout, gemm, scaled, upcast};
use ft_base::rng::{Purpose, Stream};
use candle_core::Result;

/// A low-rank update.
#[derive(Clone, Debug)]
pub struct Lora {
    /// A [r, i].
    pub a: Tensor,
    /// B [o, r].
    pub b: Tensor,
    /// Where the gradients of A and B go; none when the adapter is only used.
    pub slots: Option<(Slot, Slot)>,
    /// Factor on the update.
    pub scale: f64,
    /// Probability that an input is zeroed in training.
    pub dropout: f64,
    /// Number that tells this linear's dropout stream from others'.
    pub stream: u64,
    /// DoRA's magnitude.
    pub dora: Option<Dora>,
}

/// DoRA's magnitude, and what its norm needs.
#[derive(Clone, Debug)]
pub struct Dora {
    /// m [1, o].
    pub magnitude: Tensor,
    /// Where its gradient goes.
    pub slot: Option<Slot>,
    /// `|W|^2` by row, `[o]`, f32: W is frozen.
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

    /// `x A^T`, and what it lacks of k s: nothing where it is `scaled`, in f32.
    fn low(&self, xd: &Tensor, k: f64, scaled: bool) -> Result<(Tensor, f64)> {
        let factor = self.scale * k;
        Ok(match scaled {
            true => (gemm::matmul_scaled(xd, false, &self.a, true, factor)?, 1.0),
            false => (gemm::matmul(xd, false, &self.a, true)?, factor),
        })
    }

    /// Dropout's mask of an input, and what of its factor the mask does not have.
    fn mask(&self, x: &Tensor, ctx: &Context) -> Result<Option<(Mask, f64)>> {
        let Some(d) = ctx.dropout.filter(|_| self.dropout > 0.0) else { return Ok(None) };
        let stream = Stream::new(d.seed, Purpose::Dropout, d.step, self.stream);
        let rows = match &ctx.rows {
            Some(list) => dropout::Rows::These { first: d.first_row, list },
            None => dropout::Rows::From { first: d.first_row },
        };
        dropout::mask(stream, rows, self.dropout, x).map(Some)
    }
}

/// One linear.
#[derive(Clone, Debug)]
pub struct Linear {
    /// The matrix.
    pub weight: Weight,
    /// The bias `[o]`.
    pub bias: Option<Tensor>,
    /// Where the matrix's gradient goes, when it trains in full.
    pub weight_slot: Option<Slot>,
    /// Where the bias's gradient goes.
    pub bias_slot: Option<Slot>,
    /// The low-rank update.
    pub lora: Option<Lora>,
    /// Rows that train alone: a head's.
    pub rows: Option<Rows>,
}

/// What the backward pass of a linear needs.
#[derive(Debug, Default)]
pub struct Saved {
    /// Input [t, i], kept only where something trains.
    pub x: Option<Tensor>,
    /// `drop(x) A^T` [t, r], and what it lacks of k s.
    u: Option<(Tensor, f64)>,
    /// DoRA: the output before its magnitude and k [t, o], g [1, o] in f32, and k / norm.
    dora: Option<(Tensor, Tensor, Tensor)>,
}

impl Linear {
    /// Whether the backward pass needs the input.
    pub fn needs_input(&self) -> bool {
        self.weight_slot.is_some()
            || self.lora.as_ref().is_some_and(|l| l.slots.is_some())
            || self.rows_slot().is_some()
    }

    /// What is kept of the input `x` for the backward pass.
    pub fn input(&self, x: &Tensor) -> Option<Tensor> {
        self.needs_input().then(|| x.clone())
    }

    /// Where the gradient of rows goes that train alone.
    fn rows_slot(&self) -> Option<Slot> {
        self.rows.as_ref().and_then(|r| r.slot)
    }

    /// Writes the rows that train alone into the matrix, before it is used.
    ///
    /// # Errors
    /// A matrix that is 4-bit.
    pub fn write_rows(&self) -> Result<()> {
        match (&self.rows, &self.weight) {
            (None, _) => Ok(()),
            (Some(rows), Weight::Dense(w)) => rows.write(w),
            (Some(_), _) => candle_core::bail!("rows that train alone, of a matrix that is not as it is"),
        }
    }

    /// The same linear with its matrix dequantized, if that is 4-bit.
    pub fn dequantized(&self) -> Result<Self> {
        // where an adapter has a product of its own, room would only take memory
        let rank = match &self.lora {
            Some(Lora { dora: None, a, .. }) => a.dim(0)?,
            _ => 0,
        };
        Ok(Self { weight: self.weight.dequantized(rank)?, ..self.clone() })
    }

    /// Columns that belong beside an input like `x` [t, ..] (in rows, dtype and place), for one product with the matrix and
    /// the adapter: its rank, or none.
    pub fn room(&self, x: &Tensor) -> usize {
        let Some(Lora { a, b, dora: None, .. }) = &self.lora else { return 0 };
        let (rows, rank) = (x.dims().first().copied().unwrap_or(0), a.dims()[0]);
        let one = !x.device().is_cpu()
            // so few are multiplied straight from the codes
            && rows > FEW
            && [a.dtype(), b.dtype()] == [x.dtype(); 2]
            && self.weight.merges(x, rank);
        if one { rank } else { 0 }
    }

    /// The same beside the gradient of an output like `y` [t, ..].
    pub fn room_back(&self, y: &Tensor, ctx: &Context) -> usize {
        let drops = |l: &Lora| l.dropout > 0.0 && ctx.dropout.is_some();
        if self.lora.as_ref().is_none_or(|l| l.slots.is_none() || drops(l)) { 0 } else { self.room(y) }
    }

    /// Whether its matrix is 4-bit and is dequantized in each product.
    pub fn is_packed(&self) -> bool {
        matches!(self.weight, Weight::Nf4(_))
    }

    /// Where the gradients of all that trains here go.
    pub fn slots(&self) -> impl Iterator<Item = Slot> {
        let lora = self.lora.as_ref();
        let (a, b) = lora.and_then(|l| l.slots).unzip();
        let magnitude = lora.and_then(|l| l.dora.as_ref()?.slot);
        [self.weight_slot, self.bias_slot, a, b, magnitude, self.rows_slot()].into_iter().flatten()
    }

    /// What forward saves, without the output where that is not needed for it: the output of a layer that is computed again
    /// for backward is thrown away.
    pub fn recompute(&self, x: &Tensor, ctx: &Context) -> Result<Saved> {
        match &self.lora {
            Some(Lora { dora: Some(_), .. }) => Ok(self.forward(x, ctx)?.1),
            Some(lora) if lora.slots.is_some() => {
                let (xd, k) = masked(x, &lora.mask(x, ctx)?)?;
                let u = lora.low(&xd, k, self.room(x) > 0)?;
                Ok(Saved { x: Some(x.clone()), u: Some(u), dora: None })
            }
            _ => Ok(Saved { x: self.input(x), ..Saved::default() }),
        }
    }

    /// Forward: [t, i] -> [t, o].
    pub fn forward(&self, x: &Tensor, ctx: &Context) -> Result<(Tensor, Saved)> {
        self.forward_padded(&Padded::of(x)?, ctx)
    }

    /// As [`Linear::forward`], of an input with room: see [`Linear::room`].
    pub fn forward_padded(&self, x: &Padded, ctx: &Context) -> Result<(Tensor, Saved)> {
        let padded = x;
        let x = &padded.values()?;
        let mut saved = Saved { x: self.input(x), ..Saved::default() };
        let Some(lora) = &self.lora else {
            let y = self.weight.forward(x)?;
            return Ok((self.add_bias(y)?, saved));
        };
        let mask = lora.mask(x, ctx)?;
        let (xd, k) = masked(x, &mask)?;
        let rank = self.room(x);
        let one = rank > 0 && padded.room() >= rank;
        let (u, rest) = lora.low(&xd, k, one)?;
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
            Some(b) => bias::add(y, b),
            None => Ok(y),
        }
    }

    /// As [`Linear::forward`], in the dtype of sums: the logits of a head. On CUDA the sums are not rounded before.
    pub fn forward_wide(&self, x: &Tensor, ctx: &Context) -> Result<(Tensor, Saved)> {
        let (Weight::Dense(w), None, false) = (&self.weight, &self.bias, x.device().is_cpu()) else {
            let (y, saved) = self.forward(x, ctx)?;
            return Ok((upcast(&y)?, saved));
        };
        let mut saved = Saved { x: self.input(x), ..Saved::default() };
        match &self.lora {
            None => Ok((gemm::matmul_wide(x, false, w, true)?, saved)),
            Some(lora) if lora.dora.is_none() => {
                let (xd, k) = masked(x, &lora.mask(x, ctx)?)?;
                let (u, rest) = lora.low(&xd, k, false)?;
                let y = gemm::matmul_wide(x, false, w, true)?;
                gemm::matmul_acc(&y, &u, false, &lora.b, true, rest)?;
                saved.u = lora.slots.is_some().then_some((u, rest));
                Ok((y, saved))
            }
            Some(_) => {
                let (y, saved) = self.forward(x, ctx)?;
                Ok((upcast(&y)?, saved))
            }
        }
    }
}

/// What dropout leaves of an input, and the factor that it lacks.
fn masked(x: &Tensor, mask: &Option<(Mask, f64)>) -> Result<(Tensor, f64)> {
    match mask {
        Some((m, k)) => Ok((m.of(x)?, *k)),
        None => Ok((x.clone(), 1.0)),
    }
}

#[cfg(test)]
mod tests;
