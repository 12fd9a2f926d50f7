//! All experts of a mixture on CUDA: one launch per product, with routing lists on the device.
//!
//! Computes the same as the expert-by-expert path of `Mixture`; `tests/gpu` compares the two.

use super::mlp::Mlp;
use crate::model::linear::{Linear, Weight};
use crate::model::pass::batch::Context;
use crate::model::pass::grad_accumulator::GradAccumulator;
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

/// Operands of the gradients of a linear.
#[derive(Clone, Copy)]
struct Operands<'a> {
    dy: &'a Tensor,
    /// `s dy B`.
    du: Option<&'a Tensor>,
    x: Option<&'a Tensor>,
    /// `s drop(x) A^T`.
    u: Option<&'a Tensor>,
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
    /// Input of the down projection, if a recomputed pass has computed it.
    h: Option<Tensor>,
    /// Expert outputs `[n, d]`, before the gates: of a forward pass, and of a recomputed one if the backward pass reads
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

    /// Dropout parameters, if dropout is active.
    fn drops(&self, ctx: &Context) -> Option<Drops> {
        let d = ctx.dropout.filter(|_| self.table.totals.drops)?;
        Some(Drops { seed: d.seed, step: d.step, first: d.first_row })
    }

    /// `s drop(x) A^T` of rows `x`, of each linear; `None` without adapters.
    fn low<const N: usize>(
        all: [&Self; N],
        x: &Tensor,
        ctx: &Context,
        s: &Sorted,
    ) -> Result<[Option<Tensor>; N]> {
        if all.iter().all(|l| l.drops(ctx).is_none()) {
            return grouped::low(all.map(|l| (&l.table, x)), s);
        }
        // sequentially: the rows differ
        let mut low = [const { None }; N];
        for (low, l) in low.iter_mut().zip(all) {
            let dropped = l.drops(ctx).map(|key| grouped::drop_out(&l.table, x, None, key, s)).transpose()?;
            [*low] = grouped::low([(&l.table, dropped.as_ref().unwrap_or(x))], s)?;
        }
        Ok(low)
    }

    /// Forward pass of rows `x` through linears of one input: their outputs and `s drop(x) A^T`.
    fn forward<const N: usize>(
        all: [&Self; N],
        x: &Tensor,
        ctx: &Context,
        s: &Sorted,
    ) -> Result<([Tensor; N], [Option<Tensor>; N])> {
        let u = Self::low(all, x, ctx, s)?;
        let y = grouped::forward(std::array::from_fn(|i| (&all[i].table, x, u[i].as_ref())), s)?;
        for (l, y) in all.iter().zip(&y) {
            l.biases.iter().try_for_each(|b| b.add(y, s))?;
        }
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

    /// Adds the gradients of a linear to the accumulator.
    fn gradients(
        &self,
        of: Operands<'_>,
        ctx: &Context,
        s: &Sorted,
        accum: &GradAccumulator<'_>,
    ) -> Result<()> {
        Self::gradients_of([(self, of)], ctx, s, accum)
    }

    /// Adds weight and adapter gradients of linears with one input to the accumulator.
    fn gradients_of<const N: usize>(
        all: [(&Self, Operands<'_>); N],
        ctx: &Context,
        s: &Sorted,
        accum: &GradAccumulator<'_>,
    ) -> Result<()> {
        let [(first, of_first), ..] = all[..] else { return Ok(()) };
        let apart = |(l, _): &(&Self, Operands<'_>)| l.flat != first.flat || l.drops(ctx).is_some();
        if N > 1 && all.iter().any(apart) {
            return all.into_iter().try_for_each(|(l, of)| l.gradients(of, ctx, s, accum));
        }
        let Some(flat) = first.flat else { return Ok(()) };
        let grads = accum.flat(flat)?;
        for (l, of) in all {
            if let Some(b) = l.biases.as_ref().filter(|b| b.trains) {
                b.add_sums(of.dy, s, &grads)?;
            }
        }
        let dropped = match (first.drops(ctx), of_first.x) {
            (Some(key), Some(x)) => Some(grouped::drop_out(&first.table, x, None, key, s)?),
            _ => None,
        };
        for which in [Gradient::Weight, Gradient::A, Gradient::B] {
            let operands = |i: usize| {
                let (l, of) = all[i];
                let (a, b) = match which {
                    Gradient::Weight => (Some(of.dy), of.x),
                    Gradient::A => (of.du, dropped.as_ref().or(of.x)),
                    Gradient::B => (Some(of.dy), of.u),
                };
                match (a, b) {
                    (Some(a), Some(b)) => Ok((&l.table, a, b)),
                    _ => candle_core::bail!("backward through experts whose input was not kept"),
                }
            };
            let train: Vec<usize> = (0..N).filter(|i| all[*i].0.table.trains(which)).collect();
            match train[..] {
                [a, b] => grouped::gradients([operands(a)?, operands(b)?], which, s, &grads)?,
                _ => train
                    .into_iter()
                    .try_for_each(|i| grouped::gradients([operands(i)?], which, s, &grads))?,
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

    /// Whether the backward pass needs the expert outputs y. Without biases it does not: d gate = dy · y =
    /// (dy W + du A) · h, with dropout on both sides too, and dy W + du A is computed anyway.
    pub fn reads_outputs(&self) -> bool {
        self.down.biases.is_some()
    }

    /// Forward pass of rows `x` `[n, d]`, without the outputs if neither `outputs` nor the backward pass asks for them.
    pub fn forward(&self, x: Tensor, ctx: &Context, s: &Sorted, outputs: bool) -> Result<Saved> {
        let (gate, up, [low_gate, low_up]) = match &self.up {
            None => {
                let ([gate], [low]) = GroupedLinear::forward([&self.gate], &x, ctx, s)?;
                (gate, None, [low, None])
            }
            Some(up) => {
                let ([gate, up], low) = GroupedLinear::forward([&self.gate, up], &x, ctx, s)?;
                (gate, Some(up), low)
            }
        };
        let needs_input = self.gate.needs_input || self.up.as_ref().is_some_and(|up| up.needs_input);
        let x = needs_input.then_some(x);
        let h = || swiglu::forward(self.glu, &gate, up.as_ref());
        let (h, out, low_down) = if outputs || self.reads_outputs() {
            let ([out], [low]) = GroupedLinear::forward([&self.down], &h()?, ctx, s)?;
            (None, Some(out), low)
        } else if self.down.table.has_adapters() {
            let h = h()?;
            let [low] = GroupedLinear::low([&self.down], &h, ctx, s)?;
            (self.down.needs_input.then_some(h), None, low)
        } else {
            (None, None, None)
        };
        Ok(Saved { x, gate, up, low: [low_gate, low_up, low_down], h, out })
    }

    /// Backward pass from gradients of the outputs `dout` `[n, d]`: returns the gradient of the expert inputs `[n, d]`.
    /// With `gates` `[t, k]`, `dout` are those of the outputs over their gates: returns the gradient of the gates too.
    pub fn backward(
        &self,
        saved: Saved,
        (dout, gates): (Tensor, Option<&Tensor>),
        ctx: &Context,
        s: &Sorted,
        accum: &GradAccumulator<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let Saved { x, gate, up, low: [low_gate, low_up, low_down], h, out } = saved;
        drop(out);
        let dh = {
            let [du] = grouped::low_back([(&self.down.table, &dout)], s)?;
            let h = match h {
                None if self.down.needs_input => Some(swiglu::forward(self.glu, &gate, up.as_ref())?),
                h => h,
            };
            self.down_gradients((&dout, du.as_ref()), (h, low_down), gates, ctx, s, accum)?;
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
        let operands = |dy, du, u| Operands { dy, du, x: x.as_ref(), u };
        let (Some(up), Some(du)) = (&self.up, du) else {
            let [low_dg] = grouped::low_back([(&self.gate.table, &dg)], s)?;
            self.gate.gradients(operands(&dg, low_dg.as_ref(), low_gate.as_ref()), ctx, s, accum)?;
            return Ok((self.gate.backward((&dg, low_dg.as_ref()), None, ctx, s)?, dgates));
        };
        let [low_dg, low_du] = grouped::low_back([(&self.gate.table, &dg), (&up.table, &du)], s)?;
        let of_gate = operands(&dg, low_dg.as_ref(), low_gate.as_ref());
        let of_up = operands(&du, low_du.as_ref(), low_up.as_ref());
        GroupedLinear::gradients_of([(&self.gate, of_gate), (up, of_up)], ctx, s, accum)?;
        drop((x, low_gate, low_up));
        if self.gate.drops(ctx).is_some() || up.drops(ctx).is_some() {
            let dx = self.gate.backward((&dg, low_dg.as_ref()), None, ctx, s)?;
            return Ok((up.backward((&du, low_du.as_ref()), Some(dx), ctx, s)?, dgates));
        }
        let more = (&up.table, &du, low_du.as_ref());
        Ok((grouped::backward((&self.gate.table, &dg, low_dg.as_ref()), Some(more), s)?, dgates))
    }

    /// Adds the gradients of the down projection. Rows are weighted by `gates` here, where few values are: on both
    /// sides of the adapters' rank, or on the input of a trained weight.
    fn down_gradients(
        &self,
        (dout, du): (&Tensor, Option<&Tensor>),
        (h, low): (Option<Tensor>, Option<Tensor>),
        gates: Option<&Tensor>,
        ctx: &Context,
        s: &Sorted,
        accum: &GradAccumulator<'_>,
    ) -> Result<()> {
        let of_input = self.down.table.trains(Gradient::Weight);
        let weighted =
            |x: &Tensor, in_place| gates.map_or(Ok(x.clone()), |gates| s.weigh(x, gates, in_place));
        let h = h.map(|h| if of_input { weighted(&h, true) } else { Ok(h) }).transpose()?;
        let du = du.map(|du| if of_input { Ok(du.clone()) } else { weighted(du, false) }).transpose()?;
        let low = low.map(|low| weighted(&low, true)).transpose()?;
        let of = Operands { dy: dout, du: du.as_ref(), x: h.as_ref(), u: low.as_ref() };
        self.down.gradients(of, ctx, s, accum)
    }
}
