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

use super::batch::Context;
use super::sink::{Sink, Slot};
use crate::kernel::Tensor;
use crate::kernel::dequantized::Dequantized;
use crate::kernel::dropout::Mask;
use crate::kernel::quantized::QuantizedMatrix;
use crate::kernel::{bias, dora, dropout, gemm, is_half, scaled, upcast};
use crate::rng::{Purpose, Stream};
use candle_core::Result;
use std::ops::Range;
use std::sync::Arc;

/// The frozen or trained matrix of a linear, [o, i].
#[derive(Clone, Debug)]
pub enum Weight {
    /// Values in the compute dtype.
    Dense(Tensor),
    /// 4-bit codes in blocks (NF4, or FP4), frozen, dequantized in each product.
    Nf4(Arc<QuantizedMatrix>),
    /// The same, dequantized for as long as the walk is at the layer: see [`Linear::dequantized`].
    Dequantized(Arc<Dequantized>),
}

impl Weight {
    /// `x W^T`: [t, i] -> [t, o].
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Weight::Dense(w) => gemm::matmul(x, false, w, true),
            Weight::Nf4(w) => w.forward(x),
            Weight::Dequantized(w) => w.forward(x),
        }
    }

    /// `dy W`, added to `dx` if given: [t, o] -> [t, i].
    fn backward(&self, dy: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
        match (self, dx) {
            (Weight::Dense(w), None) => gemm::matmul(dy, false, w, false),
            (Weight::Dense(w), Some(dx)) => {
                gemm::matmul_acc(&dx, dy, false, w, false, 1.0)?;
                Ok(dx)
            }
            (Weight::Nf4(w), dx) => w.backward(dy, dx),
            (Weight::Dequantized(w), dx) => w.backward(dy, dx),
        }
    }

    /// `W A^T`: [o, r] for A [r, i].
    fn times(&self, a: &Tensor) -> Result<Tensor> {
        match self {
            Weight::Dense(w) => gemm::matmul(w, false, a, true),
            Weight::Nf4(w) => w.times(a),
            Weight::Dequantized(w) => w.times(a),
        }
    }

    /// Squared norm of each row, `[o]`, f32.
    pub fn row_squares(&self) -> Result<Tensor> {
        match self {
            Weight::Dense(w) => upcast(w)?.sqr()?.sum(1),
            Weight::Nf4(w) => w.row_squares(),
            Weight::Dequantized(w) => w.blocks().row_squares(),
        }
    }

    /// Some rows of the matrix [rows, i], in the compute dtype.
    pub fn rows(&self, rows: Range<usize>) -> Result<Tensor> {
        match self {
            Weight::Dense(w) => w.narrow(0, rows.start, rows.len()),
            Weight::Nf4(w) => w.dequantize_rows(rows),
            Weight::Dequantized(w) => w.values().narrow(0, rows.start, rows.len()),
        }
    }

    /// [o, i].
    pub fn dims(&self) -> Result<(usize, usize)> {
        match self {
            Weight::Dense(w) => w.dims2(),
            Weight::Nf4(w) => Ok(w.dims()),
            Weight::Dequantized(w) => Ok(w.blocks().dims()),
        }
    }

    /// The same matrix, dequantized if it is 4-bit: its products then have the same bits and dequantize nothing, and its
    /// values take memory until it is dropped.
    fn dequantized(&self) -> Result<Weight> {
        match self {
            Weight::Nf4(w) => Ok(Weight::Dequantized(Arc::new(Dequantized::new(Arc::clone(w))?))),
            other => Ok(other.clone()),
        }
    }
}

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
}

/// What the backward pass of a linear needs.
#[derive(Debug, Default)]
pub struct Saved {
    /// Input [t, i], kept only where something trains.
    pub x: Option<Tensor>,
    /// `drop(x) A^T` [t, r].
    u: Option<Tensor>,
    /// DoRA: the output before its magnitude and k [t, o], g [1, o] in f32, and k / norm.
    dora: Option<(Tensor, Tensor, Tensor)>,
}

impl Linear {
    /// Whether the backward pass needs the input.
    pub fn needs_input(&self) -> bool {
        self.weight_slot.is_some() || self.lora.as_ref().is_some_and(|l| l.slots.is_some())
    }

    /// The same linear with its matrix dequantized, if that is 4-bit.
    pub fn dequantized(&self) -> Result<Self> {
        Ok(Self { weight: self.weight.dequantized()?, ..self.clone() })
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
        [self.weight_slot, self.bias_slot, a, b, magnitude].into_iter().flatten()
    }

    /// What forward saves, without the output where that is not needed for it: the output of a layer that is computed again
    /// for backward is thrown away.
    pub fn recompute(&self, x: &Tensor, ctx: &Context) -> Result<Saved> {
        match &self.lora {
            Some(Lora { dora: Some(_), .. }) => Ok(self.forward(x, ctx)?.1),
            Some(lora) if lora.slots.is_some() => {
                let u = gemm::matmul(&masked(x, &lora.mask(x, ctx)?)?.0, false, &lora.a, true)?;
                Ok(Saved { x: Some(x.clone()), u: Some(u), dora: None })
            }
            _ => Ok(Saved { x: self.needs_input().then(|| x.clone()), ..Saved::default() }),
        }
    }

    /// Forward: [t, i] -> [t, o].
    pub fn forward(&self, x: &Tensor, ctx: &Context) -> Result<(Tensor, Saved)> {
        let mut saved = Saved { x: self.needs_input().then(|| x.clone()), ..Saved::default() };
        let Some(lora) = &self.lora else {
            let y = self.weight.forward(x)?;
            return Ok((self.add_bias(y)?, saved));
        };
        let mask = lora.mask(x, ctx)?;
        let (xd, k) = masked(x, &mask)?;
        let u = gemm::matmul(&xd, false, &lora.a, true)?;
        let y = match &lora.dora {
            None => {
                let y = self.add_bias(self.weight.forward(x)?)?;
                gemm::matmul_acc(&y, &u, false, &lora.b, true, lora.scale * k)?;
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
        saved.u = lora.slots.is_some().then_some(u);
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
        let mut saved = Saved { x: self.needs_input().then(|| x.clone()), ..Saved::default() };
        match &self.lora {
            None => Ok((gemm::matmul_wide(x, false, w, true)?, saved)),
            Some(lora) if lora.dora.is_none() => {
                let (xd, k) = masked(x, &lora.mask(x, ctx)?)?;
                let u = gemm::matmul(&xd, false, &lora.a, true)?;
                let y = gemm::matmul_wide(x, false, w, true)?;
                gemm::matmul_acc(&y, &u, false, &lora.b, true, lora.scale * k)?;
                saved.u = lora.slots.is_some().then_some(u);
                Ok((y, saved))
            }
            Some(_) => {
                let (y, saved) = self.forward(x, ctx)?;
                Ok((upcast(&y)?, saved))
            }
        }
    }

    /// Backward: gradients of what trains go to the sink; gives the gradient of the input, added to `dx` if
    /// given.
    pub fn backward(
        &self,
        saved: &Saved,
        dy: &Tensor,
        ctx: &Context,
        sink: &Sink<'_>,
        dx: Option<Tensor>,
    ) -> Result<Tensor> {
        let like = saved.x.as_ref().unwrap_or(dy);
        let (dx, later) = self.backward_input(saved, like, dy, ctx, sink, dx)?;
        match (later, &saved.x) {
            (None, _) => {}
            (Some(later), Some(x)) => later.add(x, sink)?,
            (Some(_), None) => candle_core::bail!("backward without the input"),
        }
        Ok(dx)
    }

    /// As [`Linear::backward`], but for the gradients that need the input: they are what comes beside the input's gradient,
    /// and wait for it. `like` is of the input's shape and dtype.
    pub fn backward_input(
        &self,
        saved: &Saved,
        like: &Tensor,
        dy: &Tensor,
        ctx: &Context,
        sink: &Sink<'_>,
        dx: Option<Tensor>,
    ) -> Result<(Tensor, Option<Later>)> {
        if let Some(slot) = self.bias_slot {
            sink.column_sums(slot, dy)?;
        }
        let weight = self.weight_slot.map(|slot| (slot, dy.clone()));
        let Some(lora) = &self.lora else {
            let dx = self.weight.backward(dy, dx)?;
            return Ok((dx, weight.map(|w| Later { weight: Some(w), a: None })));
        };
        let (Some((a_slot, b_slot)), Some(u)) = (lora.slots, &saved.u) else {
            candle_core::bail!("backward through an adapter that does not train");
        };
        let mask = lora.mask(like, ctx)?;
        let k = mask.as_ref().map_or(1.0, |(_, k)| *k);
        let dz = match &saved.dora {
            None => dy.clone(),
            Some((z, g, inverse)) => {
                if let Some(slot) = lora.dora.as_ref().and_then(|d| d.slot) {
                    sink.magnitude(slot, inverse, dy, z)?;
                }
                dora::Scaling { g, add: 0.0, k: 1.0, others: None }.of(dy)?
            }
        };
        sink.product(b_slot, &dz, u, lora.scale * k)?;
        // s du is rounded where that costs nothing; `rest` is the factor that it lacks
        let du = gemm::matmul(&dz, false, &lora.b, false)?;
        let (du, rest) = if is_half(&du) { (du, lora.scale * k) } else { ((du * lora.scale)?, 1.0) };
        let (dx, mask) = match mask {
            None => {
                let dx = self.weight.backward(&dz, dx)?;
                gemm::matmul_acc(&dx, &du, false, &lora.a, false, rest)?;
                (dx, None)
            }
            Some((m, _)) => {
                let mut dxd = gemm::matmul(&scaled(&du, rest)?, false, &lora.a, false)?;
                if let Some((_, g, _)) = &saved.dora {
                    let difference = match is_half(dy) {
                        // g is near 1: the difference of what is rounded would be noise
                        true => dora::Scaling { g, add: -1.0, k, others: None }.of(dy)?,
                        false => (&dz - dy)?,
                    };
                    dxd = self.weight.backward(&difference, Some(dxd))?;
                }
                let dx = self.weight.backward(dy, dx)?;
                (m.add(dxd, dx)?, Some(m))
            }
        };
        Ok((dx, Some(Later { weight, a: Some((a_slot, du, rest, mask)) })))
    }
}

/// The gradients of a linear that need its input.
#[derive(Debug)]
pub struct Later {
    /// Of the matrix, with the output's gradient.
    weight: Option<(Slot, Tensor)>,
    /// Of A, with that of its output, a factor, and dropout's mask.
    a: Option<(Slot, Tensor, f64, Option<Mask>)>,
}

impl Later {
    /// Adds them, for the input `x` [t, i].
    pub fn add(self, x: &Tensor, sink: &Sink<'_>) -> Result<()> {
        if let Some((slot, dy)) = self.weight {
            sink.product(slot, &dy, x, 1.0)?;
        }
        match self.a {
            None => Ok(()),
            Some((slot, du, rest, None)) => sink.product(slot, &du, x, rest),
            Some((slot, du, rest, Some(m))) => sink.product(slot, &du, &m.of(x)?, rest),
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
mod tests {
    use super::*;
    use crate::kernel::attention::Sequences;
    use crate::kernel::check::{close, gradient, randn};
    use crate::model::batch::DropoutKey;
    use crate::quant::{CodeBooks, Encoded};
    use candle_core::DType;
    use candle_core::Device;

    const T: usize = 5;
    const I: usize = 6;
    const O: usize = 4;
    const R: usize = 3;

    fn context(dropout: bool) -> Result<Context> {
        let d = &Device::Cpu;
        let table = Tensor::zeros((T, 1), DType::F32, d)?;
        let dropout = dropout.then_some(DropoutKey { seed: 3, step: 1, first_row: 7 });
        Ok(Context { seqs: Sequences::new(&[T], 0, d)?, cos: table.clone(), sin: table, dropout, rows: None })
    }

    /// Slots of weight, bias, A, B and magnitude, end to end in one buffer.
    fn slots() -> (Vec<Slot>, usize) {
        let mut offset = 0;
        let slots =
            [(O, I), (1, O), (R, I), (O, R), (1, O)].iter().enumerate().map(|(index, (rows, cols))| {
                let s = Slot { index, unit: 0, offset, rows: *rows, cols: *cols };
                offset += rows * cols;
                s
            });
        (slots.collect(), offset)
    }

    /// A matrix in NF4; f64 keeps what is dequantized.
    fn nf4(w: &Tensor) -> Result<Weight> {
        let values = w.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let encoded = Encoded::new("w", &values, w.dims2()?, DType::F32).map_err(candle_core::Error::wrap)?;
        Ok(Weight::Nf4(Arc::new(encoded.into_matrix(
            true,
            DType::F64,
            &mut CodeBooks::new(&Device::Cpu)?,
        )?)))
    }

    fn linear(kind: &str) -> Result<Linear> {
        let f64s = |seed, shape: (usize, usize)| randn(seed, shape, DType::F64);
        let (s, _) = slots();
        let weight = match kind.contains("nf4") {
            true => nf4(&f64s(1, (O, I))?)?,
            false => Weight::Dense(f64s(1, (O, I))?),
        };
        let row_squares = weight.row_squares()?;
        let dora = Dora { magnitude: f64s(5, (1, O))?, slot: Some(s[4]), row_squares };
        let full = kind == "full";
        Ok(Linear {
            weight,
            bias: Some(f64s(2, (1, O))?.squeeze(0)?),
            weight_slot: full.then_some(s[0]),
            bias_slot: full.then_some(s[1]),
            lora: (!full).then_some(Lora {
                a: f64s(3, (R, I))?,
                b: f64s(4, (O, R))?,
                slots: Some((s[2], s[3])),
                scale: 0.7,
                dropout: if kind.contains("dropout") { 0.4 } else { 0.0 },
                stream: 1,
                dora: kind.contains("dora").then_some(dora),
            }),
        })
    }

    /// Puts another tensor into a linear, by its slot; DoRA's norm stays what it was.
    fn with(l: &Linear, index: usize, t: &Tensor) -> Result<Linear> {
        let mut l = l.clone();
        match (index, &mut l.lora) {
            (0, _) => l.weight = Weight::Dense(t.clone()),
            (1, _) => l.bias = Some(t.squeeze(0)?),
            (2, Some(lora)) => lora.a = t.clone(),
            (3, Some(lora)) => lora.b = t.clone(),
            (4, Some(Lora { dora: Some(d), .. })) => d.magnitude = t.clone(),
            _ => candle_core::bail!("no tensor {index}"),
        }
        Ok(l)
    }

    #[test]
    fn gradients_of_every_kind() -> Result<()> {
        for kind in [
            "full",
            "lora",
            "lora dropout",
            "dora",
            "dora dropout",
            "nf4 lora",
            "nf4 lora dropout",
            "nf4 dora",
            "nf4 dora dropout",
        ] {
            let l = linear(kind)?;
            let ctx = context(kind.contains("dropout"))?;
            let (x, dy) = (randn(10, (T, I), DType::F64)?, randn(11, (T, O), DType::F64)?);
            let (slots, len) = slots();
            let grads = vec![Some(Tensor::zeros(len, DType::F64, &Device::Cpu)?)];
            let sink = Sink::new(&grads, 5);
            let (_, saved) = l.forward(&x, &ctx)?;
            let dx = l.backward(&saved, &dy, &ctx, &sink, None)?;
            gradient(&format!("{kind}: x"), &x, &dx, &dy, |x| Ok(l.forward(x, &ctx)?.0));
            // added to what is there
            let more = l.backward(&saved, &dy, &ctx, &Sink::new(&grads, 5), Some(dx.copy()?))?;
            close(&more, &(&dx * 2.0)?, 1e-12);
            let reached = sink.reached();
            for (i, slot) in slots.iter().enumerate().filter(|(i, _)| reached[*i]) {
                let flat = grads[0].as_ref().expect("a buffer");
                let grad = (slot.view(flat)? / 2.0)?;
                let own = |l: &Linear| -> Result<Tensor> {
                    Ok(match (i, &l.weight, &l.lora) {
                        (0, Weight::Dense(w), _) => w.clone(),
                        (1, _, _) => l.bias.clone().expect("a bias").unsqueeze(0)?,
                        (2, _, Some(lora)) => lora.a.clone(),
                        (3, _, Some(lora)) => lora.b.clone(),
                        (_, _, Some(lora)) => lora.dora.clone().expect("dora").magnitude,
                        _ => candle_core::bail!("no tensor {i}"),
                    })
                };
                // PEFT treats DoRA's norm as a constant: hold it while A and B move
                let frozen = frozen_norm(&l)?;
                gradient(&format!("{kind}: tensor {i}"), &own(&l)?, &grad, &dy, |t| {
                    let moved = with(&l, i, t)?;
                    Ok(match &frozen {
                        Some(n) => with_norm(&moved, n)?.forward(&x, &ctx)?.0,
                        None => moved.forward(&x, &ctx)?.0,
                    })
                });
            }
            let want = if kind == "full" {
                2
            } else if kind.contains("dora") {
                3
            } else {
                2
            };
            assert_eq!(reached.iter().filter(|r| **r).count(), want, "{kind}");
        }
        Ok(())
    }

    fn frozen_norm(l: &Linear) -> Result<Option<Tensor>> {
        let Some(lora) = l.lora.as_ref() else { return Ok(None) };
        let Some(d) = lora.dora.as_ref() else { return Ok(None) };
        lora.norms(&l.weight, &d.row_squares).map(Some)
    }

    /// Chooses `|W|^2` such that the norm of the moved linear is `n`.
    fn with_norm(l: &Linear, n: &Tensor) -> Result<Linear> {
        let mut l = l.clone();
        if let Some(Lora { dora: Some(_), .. }) = &l.lora {
            let zero = n.zeros_like()?;
            let lora = l.lora.as_ref().expect("lora");
            // norms(0)^2 = cross and own terms alone; they may be negative, so take them from a shifted square
            let shift = 1e3;
            let terms = (lora.norms(&l.weight, &(zero + shift)?)?.sqr()? - shift)?;
            let squares = (n.sqr()? - terms)?;
            if let Some(Lora { dora: Some(d), .. }) = &mut l.lora {
                d.row_squares = squares;
            }
        }
        Ok(l)
    }

    /// Relative error of what is common to many values, those of a column or (`whole`) all: the roundings of single
    /// values cancel out of it, a factor that was rounded does not.
    fn bias(got: &Tensor, want: &Tensor, whole: bool) -> Result<f64> {
        let lay = |t: &Tensor| match whole {
            true => t.to_dtype(DType::F64)?.reshape((t.elem_count(), 1)),
            false => t.to_dtype(DType::F64),
        };
        let (got, want) = (lay(got)?, lay(want)?);
        let share = ((&got * &want)?.sum(0)? / want.sqr()?.sum(0)?)?;
        Ok(share.to_vec1::<f64>()?.iter().map(|s| (s - 1.0).abs()).fold(0.0, f64::max))
    }

    /// In bf16, alpha / rank, 1 / (1 - p) and DoRA's gain are not rounded to bf16: forward, dx, dA, dB and dm have the
    /// factors of f64.
    #[test]
    fn factors_are_not_rounded_to_half_precision() -> Result<()> {
        let (t, i, o, r) = (512, 24, 8, 6);
        for kind in ["lora", "lora dropout", "dora", "dora dropout"] {
            // the same values for both
            let value = |seed, shape: (usize, usize)| randn(seed, shape, DType::BF16)?.to_dtype(DType::F64);
            let w = if kind.contains("dora") {
                value(1, (o, i))?
            } else {
                Tensor::zeros((o, i), DType::F64, &Device::Cpu)?
            };
            let (a, b, m) = (value(3, (r, i))?, value(4, (o, r))?, (value(5, (1, o))?.abs()? + 1.0 / 3.0)?);
            let m = m.to_dtype(DType::F32)?.to_dtype(DType::F64)?;
            let (x, dy) = (value(10, (t, i))?, value(11, (t, o))?);
            let mut offset = 0;
            let slots: Vec<Slot> = [(r, i), (o, r), (1, o)]
                .iter()
                .enumerate()
                .map(|(index, (rows, cols))| {
                    let s = Slot { index, unit: 0, offset, rows: *rows, cols: *cols };
                    offset += rows * cols;
                    s
                })
                .collect();
            let run = |dtype: DType| -> Result<Vec<Tensor>> {
                let weight = Weight::Dense(w.to_dtype(dtype)?);
                let sums = if dtype == DType::F64 { dtype } else { DType::F32 };
                let row_squares = weight.row_squares()?;
                let dora = Dora { magnitude: m.to_dtype(sums)?, slot: Some(slots[2]), row_squares };
                let l = Linear {
                    weight,
                    bias: None,
                    weight_slot: None,
                    bias_slot: None,
                    lora: Some(Lora {
                        a: a.to_dtype(dtype)?,
                        b: b.to_dtype(dtype)?,
                        slots: Some((slots[0], slots[1])),
                        scale: 4.0 / 3.0,
                        dropout: if kind.contains("dropout") { 0.1 } else { 0.0 },
                        stream: 1,
                        dora: kind.contains("dora").then_some(dora),
                    }),
                };
                let (x, dy) = (x.to_dtype(dtype)?, dy.to_dtype(dtype)?);
                let ctx = context(true)?;
                let grads = vec![Some(Tensor::zeros(offset, sums, &Device::Cpu)?)];
                let (y, saved) = l.forward(&x, &ctx)?;
                let dx = l.backward(&saved, &dy, &ctx, &Sink::new(&grads, 3), None)?;
                let trained = if kind.contains("dora") { &slots[..] } else { &slots[..2] };
                let flat = grads[0].as_ref().expect("a buffer");
                let grads = trained.iter().map(|s| s.view(flat)).collect::<Result<Vec<_>>>()?;
                Ok([vec![y, dx], grads].concat())
            };
            let (got, want) = (run(DType::BF16)?, run(DType::F64)?);
            for (what, (got, want)) in ["y", "dx", "dA", "dB", "dm"].iter().zip(got.iter().zip(&want)) {
                // gradients are sums over all tokens, and have few values of their own
                let off = bias(got, want, what.starts_with('d') && *what != "dx")?;
                let bar = if *what == "dm" { 3e-3 } else { 8e-4 };
                assert!(off < bar, "{kind}: {what}: {off:.1e}");
            }
        }
        Ok(())
    }

    #[test]
    fn dora_norms_are_those_of_the_matrix() -> Result<()> {
        for kind in ["dora", "nf4 dora"] {
            let l = linear(kind)?;
            let lora = l.lora.as_ref().expect("lora");
            let w = l.weight.rows(0..O)?;
            let merged = (w + (lora.b.matmul(&lora.a)? * lora.scale)?)?;
            let want = merged.sqr()?.sum(1)?.sqrt()?;
            close(&lora.norms(&l.weight, &lora.dora.as_ref().expect("dora").row_squares)?, &want, 1e-12);
        }
        Ok(())
    }
}
