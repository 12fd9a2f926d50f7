//! All experts of a mixture on CUDA: one launch per product, with routing lists on the device.
//!
//! Computes the same as the expert-by-expert path of `Mixture`; `tests/gpu` compares the two.

use super::mlp::Mlp;
use crate::model::linear::{Linear, Weight};
use crate::model::pass::batch::Context;
use crate::model::pass::sink::Sink;
use candle_core::{DType, Result};
use ft_kernels::Tensor;
use ft_kernels::dispatch::Sorted;
use ft_kernels::grouped::{self, Adapter, Biases, Drops, Entry, Gradient, Side, Table, table};
use ft_kernels::swiglu::{self, Glu};

/// One linear, for all experts.
#[derive(Debug)]
struct GroupedLinear {
    table: Table,
    /// Biases, if the experts have them.
    biases: Option<Biases>,
    /// Whether a tensor of this linear trains, so that the input is saved.
    needs_input: bool,
    /// Unit of the gradient buffer.
    flat: Option<usize>,
}

/// The linears, for all experts.
#[derive(Debug)]
pub struct GroupedExperts {
    /// Gate, or gate and up in one.
    gate: GroupedLinear,
    up: Option<GroupedLinear>,
    down: GroupedLinear,
    glu: Glu,
}

/// Saved activations.
#[derive(Debug)]
pub struct Saved {
    /// Expert inputs `[n, d]`; `None` if frozen.
    pub(super) x: Option<Tensor>,
    gate: Tensor,
    up: Option<Tensor>,
    /// `s drop(x) A^T` of gate, up and down `[n, ranks]`; `None` without adapters.
    low: [Option<Tensor>; 3],
    /// Expert outputs `[n, d]`, before the gates: of a forward pass, and of a recomputed one whose backward pass reads
    /// them ([`GroupedExperts::reads_outputs`]).
    pub out: Option<Tensor>,
}

/// Whether the grouped products support a linear.
fn supports_linear(l: &Linear, dtype: DType) -> bool {
    let weight = match &l.weight {
        Weight::Dense(w) => w.dtype() == dtype && w.is_contiguous(),
        Weight::Nf4(w) => w.dtype() == dtype && table::takes(w),
        Weight::Padded(_) | Weight::Dequantized(_) | Weight::Fp8(_) => false,
    };
    let adapter =
        l.lora.as_ref().is_none_or(|l| l.dora.is_none() && l.a.dtype() == dtype && l.b.dtype() == dtype);
    weight && adapter && l.bias.as_ref().is_none_or(|b| b.dtype() == dtype && b.is_contiguous())
}

/// Whether the grouped products support these experts for rows in `dtype`.
pub(super) fn supports(experts: &[Mlp], dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
        && experts.iter().flat_map(Mlp::linears).all(|l| supports_linear(l, dtype))
}

impl GroupedLinear {
    fn new<'a>(linears: impl Iterator<Item = (&'a Linear, usize)> + Clone, dtype: DType) -> Result<Self> {
        let entry = |(l, alike): (&'a Linear, usize)| {
            let weight = match &l.weight {
                Weight::Nf4(q) => Side::Codes(q),
                Weight::Dense(w) => Side::Values(w),
                Weight::Padded(_) | Weight::Dequantized(_) | Weight::Fp8(_) => {
                    candle_core::bail!("an expert whose matrix is another's: supports() was not asked")
                }
            };
            let adapter = l.lora.as_ref().map(|l| Adapter {
                a: &l.a,
                b: &l.b,
                scale: l.scale,
                gradients: l.slots.map(|(a, b)| (a.offset, b.offset)),
                dropout: (l.dropout, l.stream),
            });
            Ok(Entry { weight, gradient: l.weight_slot.map(|s| s.offset), adapter, alike })
        };
        let entries = linears.clone().map(entry).collect::<Result<Vec<_>>>()?;
        let mut flats = linears.clone().flat_map(|(l, _)| l.slots()).map(|s| s.flat);
        let flat = flats.next();
        if flats.any(|f| Some(f) != flat) {
            candle_core::bail!("experts of a layer whose gradients are in several buffers");
        }
        let needs_input = linears.clone().any(|(l, _)| l.needs_input());
        let bias =
            |(l, alike): (&'a Linear, usize)| Some((l.bias.as_ref()?, l.bias_slot.map(|s| s.offset), alike));
        let biases: Vec<_> = linears.clone().filter_map(bias).collect();
        let biases = match biases.len() {
            0 => None,
            n if n == entries.len() => Some(Biases::new(&biases)?),
            _ => candle_core::bail!("experts of which some have biases"),
        };
        Ok(Self { table: Table::new(&entries, dtype)?, biases, needs_input, flat })
    }

    fn has_adapters(&self) -> bool {
        self.table.has_adapters()
    }

    /// Dropout parameters, if dropout is active.
    fn drops(&self, ctx: &Context) -> Option<Drops> {
        let d = ctx.dropout.filter(|_| self.table.drops)?;
        Some(Drops { seed: d.seed, step: d.step, first: d.first_row })
    }

    /// `s drop(x) A^T` of rows `x`; `None` without adapters.
    fn low(&self, x: &Tensor, ctx: &Context, s: &Sorted) -> Result<Option<Tensor>> {
        match self.drops(ctx) {
            Some(key) => grouped::low(&self.table, &grouped::drop_out(&self.table, x, None, key, s)?, s),
            None => grouped::low(&self.table, x, s),
        }
    }

    /// Forward pass of rows `x`; also returns `s drop(x) A^T`.
    fn forward(&self, x: &Tensor, ctx: &Context, s: &Sorted) -> Result<(Tensor, Option<Tensor>)> {
        let u = self.low(x, ctx, s)?;
        let y = grouped::forward((&self.table, x, u.as_ref()), s)?;
        self.biases.iter().try_for_each(|b| b.add(&y, s))?;
        Ok((y, u))
    }

    /// Gradient of the input from `dy` and `du`, added to `dx` if given.
    fn backward(
        &self,
        (dy, du): (&Tensor, Option<&Tensor>),
        dx: Option<Tensor>,
        ctx: &Context,
        s: &Sorted,
    ) -> Result<Tensor> {
        let of = (&self.table, dy, du);
        let Some(key) = self.drops(ctx) else {
            let own = grouped::backward(of, None, s)?;
            return dx.map_or(Ok(own.clone()), |dx| dx + own);
        };
        let own = grouped::values_back(of, s)?;
        let dx = dx.map_or(Ok(own.clone()), |dx| dx + own)?;
        grouped::drop_out(&self.table, &grouped::adapter_back(of, s)?, Some(&dx), key, s)
    }

    /// Adds weight and adapter gradients to the sink. `u` is `s drop(x) A^T`, `du` its gradient.
    fn gradients(
        &self,
        (dy, du): (&Tensor, Option<&Tensor>),
        (x, u): (Option<&Tensor>, Option<&Tensor>),
        ctx: &Context,
        s: &Sorted,
        sink: &Sink<'_>,
    ) -> Result<()> {
        let Some(flat) = self.flat else { return Ok(()) };
        let grads = sink.flat(flat)?;
        if let Some(b) = self.biases.as_ref().filter(|b| b.trains) {
            b.add_sums(dy, s, &grads)?;
        }
        let dropped = match (self.drops(ctx), x) {
            (Some(key), Some(x)) => Some(grouped::drop_out(&self.table, x, None, key, s)?),
            _ => None,
        };
        let xd = dropped.as_ref().or(x);
        for (which, a, b) in
            [(Gradient::Weight, Some(dy), x), (Gradient::A, du, xd), (Gradient::B, Some(dy), u)]
        {
            if !self.table.trains(which) {
                continue;
            }
            match (a, b) {
                (Some(a), Some(b)) => grouped::gradients(&self.table, which, a, b, s, &grads)?,
                _ => candle_core::bail!("backward through experts whose input was not kept"),
            }
        }
        Ok(())
    }
}

impl GroupedExperts {
    /// Builds the tables; `copies` has the number of identical experts per entry.
    ///
    /// # Errors
    /// Experts rejected by [`supports`].
    pub fn new(experts: &[Mlp], copies: &[usize], dtype: DType) -> Result<Self> {
        let of = |which: fn(&Mlp) -> Option<&Linear>| -> Result<Option<GroupedLinear>> {
            let linears = experts.iter().zip(copies).filter_map(move |(e, n)| Some((which(e)?, *n)));
            linears.clone().next().map(|_| GroupedLinear::new(linears, dtype)).transpose()
        };
        let (gate, up) = (of(|e| Some(&e.gate))?, of(|e| e.up.as_ref())?);
        match (gate, of(|e| Some(&e.down))?, experts.first()) {
            (Some(gate), Some(down), Some(first)) => Ok(Self { gate, up, down, glu: first.glu }),
            _ => candle_core::bail!("a layer without experts"),
        }
    }

    /// Whether the backward pass reads the outputs. Otherwise it has the gradients of the gates from the down
    /// projection's input: `dy . (W h + B u) = (dy W + du A) . h`, with dropout on both sides too.
    pub fn reads_outputs(&self) -> bool {
        self.down.biases.is_some()
    }

    /// Forward pass of rows `x` `[n, d]`, without the outputs if neither `outputs` nor the backward pass asks for them.
    pub fn forward(&self, x: Tensor, ctx: &Context, s: &Sorted, outputs: bool) -> Result<Saved> {
        let (gate, low_gate) = self.gate.forward(&x, ctx, s)?;
        let (up, low_up) = self.up.as_ref().map(|up| up.forward(&x, ctx, s)).transpose()?.unzip();
        let needs_input = self.gate.needs_input || self.up.as_ref().is_some_and(|up| up.needs_input);
        let x = needs_input.then_some(x);
        let h = || swiglu::forward(self.glu, &gate, up.as_ref());
        let (out, low_down) = if outputs || self.reads_outputs() {
            let (out, low) = self.down.forward(&h()?, ctx, s)?;
            (Some(out), low)
        } else if self.down.has_adapters() {
            (None, self.down.low(&h()?, ctx, s)?)
        } else {
            (None, None)
        };
        Ok(Saved { x, gate, up, low: [low_gate, low_up.flatten(), low_down], out })
    }

    /// Backward pass from gradients of the outputs `dout` `[n, d]`: returns the gradient of the expert inputs `[n, d]`.
    /// With `gates` `[t, k]`, `dout` are those of the outputs over their gates: returns the gradient of the gates too.
    pub fn backward(
        &self,
        saved: Saved,
        (dout, gates): (Tensor, Option<&Tensor>),
        ctx: &Context,
        s: &Sorted,
        sink: &Sink<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let Saved { x, gate, up, low: [low_gate, low_up, low_down], out } = saved;
        drop(out);
        let dh = {
            let du = grouped::low_back(&self.down.table, &dout, s)?;
            let inputs = (&gate, up.as_ref(), low_down);
            self.down_gradients((&dout, du.as_ref()), inputs, gates, ctx, s, sink)?;
            self.down.backward((&dout, du.as_ref()), None, ctx, s)?
        };
        drop(dout);
        let (dg, du, dgates) = match gates {
            None => {
                let (dg, du) = swiglu::backward(self.glu, &gate, up.as_ref(), &dh)?;
                (dg, du, None)
            }
            Some(gates) => {
                let (dg, du, dgates) = swiglu::weighted_back(self.glu, &gate, up.as_ref(), &dh, s, gates)?;
                (dg, du, Some(dgates))
            }
        };
        drop((dh, gate, up));
        let low_dg = grouped::low_back(&self.gate.table, &dg, s)?;
        self.gate.gradients((&dg, low_dg.as_ref()), (x.as_ref(), low_gate.as_ref()), ctx, s, sink)?;
        let (Some(up), Some(du)) = (&self.up, du) else {
            return Ok((self.gate.backward((&dg, low_dg.as_ref()), None, ctx, s)?, dgates));
        };
        let low_du = grouped::low_back(&up.table, &du, s)?;
        up.gradients((&du, low_du.as_ref()), (x.as_ref(), low_up.as_ref()), ctx, s, sink)?;
        drop((x, low_gate, low_up));
        if self.gate.drops(ctx).is_some() || up.drops(ctx).is_some() {
            let dx = self.gate.backward((&dg, low_dg.as_ref()), None, ctx, s)?;
            return Ok((up.backward((&du, low_du.as_ref()), Some(dx), ctx, s)?, dgates));
        }
        let more = (&up.table, &du, low_du.as_ref());
        Ok((grouped::backward((&self.gate.table, &dg, low_dg.as_ref()), Some(more), s)?, dgates))
    }

    /// Adds the gradients of the down projection. Rows are weighted by `gates` here, where few values are: on both
    /// sides of the adapters' rank, or on the input of a weight that trains.
    fn down_gradients(
        &self,
        (dout, du): (&Tensor, Option<&Tensor>),
        (gate, up, low): (&Tensor, Option<&Tensor>, Option<Tensor>),
        gates: Option<&Tensor>,
        ctx: &Context,
        s: &Sorted,
        sink: &Sink<'_>,
    ) -> Result<()> {
        let of_input = self.down.table.trains(Gradient::Weight);
        let weighted =
            |x: &Tensor, in_place| gates.map_or(Ok(x.clone()), |gates| s.weigh(x, gates, in_place));
        let h = self.down.needs_input.then(|| swiglu::forward(self.glu, gate, up)).transpose()?;
        let h = h.map(|h| if of_input { weighted(&h, true) } else { Ok(h) }).transpose()?;
        let du = du.map(|du| if of_input { Ok(du.clone()) } else { weighted(du, false) }).transpose()?;
        let low = low.map(|low| weighted(&low, true)).transpose()?;
        self.down.gradients((dout, du.as_ref()), (h.as_ref(), low.as_ref()), ctx, s, sink)
    }
}
