//! Trained tensors in flat buffers, one set per unit of the walk and group of ranks with copies.
//!
//! A unit (embedding, layer or head) stores all trained tensors of a kind end to end, so that reduction, norm,
//! clipping and optimizer take one pass per unit. Layers use views of the `compute` buffer; a step updates
//! it in place, without copies, unless master weights and moments are offloaded to the host
//! (`memory.offload`). With ZeRO, a rank holds a range of every unit's buffer; with offloaded weights, the
//! device holds nothing permanently. In both cases compute weights are gathered before a visit to the unit
//! and released afterwards.

use super::buffers::allocate::Allocate;
use super::buffers::layout::{FlatLayout, layout, wide_units};
use super::buffers::moments::is_large;
use super::buffers::projected::{Projected, Projection, Shapes};
use super::buffers::{Buffer, FlatKind, Piece, Split, common};
use super::flat::{FlatParam, Placement};
use crate::adapters::Trained;
use crate::load::Initials;
use crate::model::grad_accumulator::Slot;
use crate::ranks::{CollectiveId, Comm};
use candle_core::{DType, Device, Result};
use ft_kernels::Tensor;
use ft_kernels::crossing::PendingTransfer;
use ft_kernels::resizable::free;
use ft_kernels::tensor::Real;
use std::ops::Range;
use std::sync::Arc;

/// All trained tensors of a model.
#[derive(Debug)]
pub struct Params {
    /// Trained tensors in the order of the forward pass.
    pub tensors: Vec<Trained>,
    /// Slot of each tensor.
    pub slots: Vec<Slot>,
    /// Piece of each tensor on this rank: the slot's contents.
    pub pieces: Vec<Piece>,
    /// Flat buffers, first of whole tensors by unit, then of pieces or of split experts; `None` if nothing trains.
    pub flats: Vec<Option<FlatParam>>,
    /// Compute dtype, and elements with master weights by flat buffer, those of other ranks too.
    dtype: DType,
    kept: Vec<Range<usize>>,
    /// Frozen weights by unit, if sharded or offloaded; otherwise empty.
    pub frozen: Vec<Vec<Buffer>>,
    /// Whether master weights and moments are on the host.
    pub offloaded: bool,
    /// Whether compute weights are on the host and copied to the device for each visit.
    pub weights_offloaded: bool,
    /// Whether host buffers for transfers are page-locked.
    pub pin: bool,
    /// Whether large tensors have 8-bit moments.
    pub eight_bit: bool,
    /// Gradient projection.
    pub projection: Projection,
    /// Whether units are updated during the backward pass.
    pub in_backward: bool,
    /// Place of this rank on the mesh.
    pub split: Split,
    /// LoRA initializations from the base, if any.
    pub initials: Option<Arc<Initials>>,
}

impl Params {
    /// Allocates zero-filled buffers for these tensors.
    pub fn new(
        tensors: Vec<Trained>,
        units: usize,
        dtype: DType,
        device: &Device,
        what: Allocate,
    ) -> Result<Self> {
        let projection = Projection { rank: what.project, eight_bit: what.eight_bit };
        let pieces: Vec<Piece> = tensors.iter().map(|t| what.split.piece_of(t)).collect();
        let place = (|t: &Trained| what.split.flat(t, units), |i: usize| pieces[i].shape());
        let of = (&tensors[..], device.is_cuda());
        let (slots, layouts) = layout(of, (units, what.split.flats(units)), projection, place);
        let wide = wide_units(slots.iter().map(|s| (s.flat, tensors[s.index].part)));
        let dora = wide_units(tensors.iter().map(|t| (t.unit, t.part)));
        let kept = layouts.iter().enumerate();
        let kept = kept.map(|(i, l)| l.kept(what.rounding.is_some(), dtype, dora.contains(&(i % units))));
        let kept: Vec<Range<usize>> = kept.collect();
        let home = if what.offload { &Device::Cpu } else { device };
        let flat = |(number, layout): (usize, FlatLayout)| {
            let Some(of) = what.split.held(number, units).filter(|_| layout.len > 0) else { return Ok(None) };
            let own = || slots.iter().filter(move |s| s.flat == number);
            let wide = wide.contains(&number);
            let is_projected = |s: &&Slot| what.train && projection.takes_tensor(&tensors[s.index], units);
            let projected = own().filter(is_projected);
            let projected = projected.map(|s| Projected::new(s.index, (s.rows, s.cols), projection, home));
            let kept = kept[number].clone();
            let place = Placement { of, number, kept, wide, dtype, device, home };
            FlatParam::new(layout, place, what, projected.collect::<Result<_>>()?).map(Some)
        };
        let flats = layouts.into_iter().enumerate().map(flat).collect::<Result<_>>()?;
        Ok(Self {
            tensors,
            slots,
            pieces,
            flats,
            dtype,
            kept,
            frozen: vec![Vec::new(); units],
            offloaded: what.offload,
            weights_offloaded: what.offload_weights,
            pin: what.pin,
            eight_bit: what.eight_bit,
            projection,
            in_backward: what.in_backward,
            split: what.split,
            initials: None,
        })
    }

    /// Buffers of a slot.
    ///
    /// # Errors
    /// A slot of no buffer.
    pub fn flat(&self, slot: &Slot) -> Result<&FlatParam> {
        match self.flats.get(slot.flat) {
            Some(Some(f)) => Ok(f),
            _ => candle_core::bail!("no buffers for {slot:?}"),
        }
    }

    /// Buffers of a unit, with their index.
    pub fn of_unit(&self, unit: usize) -> impl Iterator<Item = (usize, &FlatParam)> {
        let all = self.flats.iter().enumerate().filter_map(|(i, f)| Some((i, f.as_ref()?)));
        all.filter(move |(_, f)| f.unit == unit)
    }

    /// Whether this rank holds the buffer of a tensor: an expert's may be on another rank.
    pub fn is_here(&self, index: usize) -> bool {
        self.flat(&self.slots[index]).is_ok()
    }

    /// Index of a trained tensor by name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.tensors.iter().position(|t| t.name == name)
    }

    /// View of this rank's piece of the compute weights, in the shape used in files.
    pub fn view(&self, index: usize) -> Result<Tensor> {
        let slot = &self.slots[index];
        slot.view(&self.flat(slot)?.compute.whole)?.reshape(self.pieces[index].shape())
    }

    /// As [`Params::view`], but in f32 if master weights are on the device.
    pub fn wide_view(&self, index: usize) -> Result<Tensor> {
        let (slot, shape) = (&self.slots[index], self.pieces[index].shape());
        let flat = self.flat(slot)?;
        let here = flat.master.values.real()?.device().same_device(flat.compute.whole.real()?.device());
        match &flat.wide {
            Some(wide) => slot.view(&wide.whole)?.reshape(shape),
            None if here && !flat.compute.is_apart() => flat.master.whole(slot, &shape),
            None => self.view(index),
        }
    }

    /// Whether compute weights are sharded (ZeRO stage 3).
    pub fn is_split(&self) -> bool {
        self.split.shard(FlatKind::Whole).is_split()
    }

    /// Whether a forward pass of this rank alone needs the other ranks: for split weights, pieces, experts, or layers.
    pub fn needs_others(&self) -> bool {
        self.is_split() || self.split.is_of_part()
    }

    /// Whether compute weights are gathered for a visit and released afterwards: sharded or offloaded.
    pub fn is_gathered(&self) -> bool {
        self.is_split() || self.weights_offloaded
    }

    /// Buffers to gather before a unit can compute.
    fn gathered(&self, unit: usize) -> impl Iterator<Item = &Buffer> {
        let own = self.of_unit(unit).flat_map(|(_, f)| std::iter::once(&f.compute).chain(&f.wide));
        self.frozen.get(unit).into_iter().flatten().chain(own).filter(|b| b.is_apart())
    }

    /// Starts gathering all weights of a unit, if sharded or offloaded; collective if sharded. The weights
    /// are usable after waiting for every arrival.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn gather(&self, unit: usize, comm: &dyn Comm) -> ft_base::Result<Vec<PendingTransfer>> {
        let at = CollectiveId::unit("the gathering of weights", unit);
        self.gathered(unit).map(|b| b.gather(at, &self.split, comm)).collect()
    }

    /// Frees the device memory of a unit's gathered weights. Held parts remain.
    ///
    /// # Errors
    /// Device errors.
    pub fn release(&self, unit: usize) -> Result<()> {
        // All of them, whatever one says: after an out-of-memory error, the step begins anew.
        self.gathered(unit).map(|b| free(&b.whole)).fold(Ok(()), Result::and)
    }

    /// Elements of a tensor's piece to be set by this rank.
    ///
    /// # Errors
    /// As [`Params::flat`].
    pub fn mine(&self, index: usize) -> Result<Range<usize>> {
        let slot = &self.slots[index];
        let here = common(&self.flat(slot)?.compute.held.at, &slot.range());
        Ok(if here.is_empty() { 0..0 } else { here.start - slot.offset..here.end - slot.offset })
    }

    /// First element and values of [`Params::mine`]; `read` reads a range of the whole tensor as a vector.
    ///
    /// # Errors
    /// As [`Params::flat`]; errors of `read`.
    pub fn read_mine(
        &self,
        index: usize,
        read: impl FnMut(Range<usize>) -> ft_base::Result<Real>,
    ) -> ft_base::Result<(usize, Real)> {
        let mine = self.mine(index)?;
        Ok((mine.start, self.pieces[index].read(mine, read)?))
    }

    /// Authoritative values of a tensor's piece: a view of the master weights, or else of the compute weights.
    ///
    /// # Errors
    /// A tensor only partly held by this rank.
    pub fn master(&self, index: usize) -> Result<Tensor> {
        let slot = &self.slots[index];
        self.flat(slot)?.values(slot.range())?.reshape(self.pieces[index].shape())
    }

    /// Whether this rank holds the authoritative values of all trained tensors.
    pub fn has_masters(&self) -> bool {
        let whole = |u: &FlatParam| u.kept == (0..u.len) || u.compute.held.at == (0..u.len);
        !self.split.is_of_part() && self.flats.iter().flatten().all(|u| u.master.at == u.kept && whole(u))
    }

    /// Dtype of a tensor's authoritative values: f32 with master weights.
    ///
    /// # Errors
    /// As [`Params::flat`].
    pub fn stored(&self, index: usize) -> Result<DType> {
        let slot = &self.slots[index];
        let Some(kept) = self.kept.get(slot.flat) else { candle_core::bail!("no buffers for {slot:?}") };
        let keeps = kept.start <= slot.offset && slot.range().end <= kept.end;
        Ok(if keeps { DType::F32 } else { self.dtype })
    }

    /// View of the gradient of a tensor's piece.
    ///
    /// # Errors
    /// As [`Params::master`].
    pub fn grad(&self, index: usize) -> Result<Option<Tensor>> {
        let slot = &self.slots[index];
        let grads = &self.flat(slot)?.grads;
        grads.as_ref().map(|g| g.whole(slot, &self.pieces[index].shape())).transpose()
    }

    /// Shapes of the GaLore state of a tensor, here or on another rank, if the gradient is projected.
    pub fn projected_shapes(&self, index: usize) -> Option<Shapes> {
        let t = &self.tensors[index];
        let &[o, i] = t.shape.as_slice() else { return None };
        self.projection.takes_tensor(t, self.frozen.len()).then(|| self.projection.shapes((o, i)))
    }

    /// GaLore state of a tensor of this rank, if the gradient is projected.
    pub fn projected(&self, index: usize) -> Option<&Projected> {
        self.flat(&self.slots[index]).ok()?.projected.iter().find(|p| p.index == index)
    }

    /// Whether a tensor's moments are in 8 bits.
    pub fn is_coded(&self, index: usize) -> bool {
        self.eight_bit && is_large(self.tensors[index].elements())
    }

    /// Sets the locally held part of a tensor, in master and compute weights.
    pub fn set(&self, index: usize, value: &Real) -> Result<()> {
        let (t, slot) = (&self.tensors[index], &self.slots[index]);
        if value.elem_count() != t.elements() {
            candle_core::bail!("{}: {:?} values into {:?}", t.name, value.shape(), slot);
        }
        self.set_from(index, 0, &self.pieces[index].of(value)?)
    }

    /// Sets values of the piece of a tensor, from its element `first` on, in master and compute weights.
    pub fn set_from(&self, index: usize, first: usize, value: &Real) -> Result<()> {
        // CUDA rejects launches without elements.
        if value.elem_count() == 0 {
            return Ok(());
        }
        let slot = &self.slots[index];
        let flat = self.flat(slot)?;
        // Converted on the device of `value`, nearly always the host.
        let values = value.to_dtype(DType::F32)?.contiguous()?.flatten_all()?;
        flat.master.set(slot.offset + first, &values)?;
        if flat.is_master() { Ok(()) } else { self.set_compute(index, first, &values) }
    }

    /// As [`Self::set_from`], in the compute weights alone.
    pub fn set_compute(&self, index: usize, first: usize, value: &Real) -> Result<()> {
        if value.elem_count() == 0 {
            return Ok(());
        }
        let slot = &self.slots[index];
        let compute = &self.flat(slot)?.compute;
        let values = value.to_dtype(compute.whole.dtype())?.contiguous()?.flatten_all()?;
        compute.held.set(slot.offset + first, &values)
    }

    /// Device of a tensor's master weights; the best one to read values to.
    pub fn home(&self, index: usize) -> Result<&Device> {
        Ok(self.flat(&self.slots[index])?.master.values.real()?.device())
    }

    /// Gradient buffers, for a [`crate::model::grad_accumulator::GradAccumulator`].
    pub fn grads(&self) -> Vec<Option<Tensor>> {
        let grads = |u: &FlatParam| u.grads.as_ref().map(|g| g.values.clone());
        self.flats.iter().map(|u| u.as_ref().and_then(grads)).collect()
    }

    /// Length of every buffer, in elements.
    pub fn lens(&self) -> Vec<usize> {
        self.flats.iter().map(|u| u.as_ref().map_or(0, |u| u.len)).collect()
    }

    /// Zeroes all gradients.
    pub fn zero_grads(&self) -> Result<()> {
        self.flats.iter().flatten().filter_map(|u| u.grads.as_ref()).try_for_each(|g| g.values.zero_set())
    }

    /// Slots of this rank's gradients; a new step writes over the values of the last one.
    pub fn new_sums(&self) -> Vec<Slot> {
        self.slots.iter().filter(|s| self.flat(s).is_ok()).copied().collect()
    }

    /// Number of trained values.
    pub fn count(&self) -> usize {
        self.tensors.iter().map(Trained::elements).sum()
    }

    /// Lowest unit with a trained tensor.
    pub fn lowest_unit(&self) -> Option<usize> {
        self.tensors.iter().map(|t| t.unit).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapters::Part;
    use crate::model::modules::CutAlong;
    use crate::ranks::Mesh;

    /// A layer with DoRA has master weights of all that trains in it, of pieces and experts too.
    #[test]
    fn layers_with_dora_keep_all_masters() -> anyhow::Result<()> {
        let tensor = |unit, part, (expert, cut)| Trained {
            name: format!("{unit} {part:?} {expert:?} {cut:?}"),
            module: String::new(),
            part,
            shape: vec![64, 64],
            unit,
            expert,
            cut,
            lr_scale: 1.0,
            plus: false,
            matrix: true,
            fused: None,
        };
        let all = [(None, CutAlong::Nothing), (Some(1), CutAlong::Nothing), (None, CutAlong::Columns)];
        let full = [0, 1].into_iter().flat_map(|unit| all.map(|of| tensor(unit, Part::Weight, of)));
        let tensors = std::iter::once(tensor(0, Part::Magnitude, all[0])).chain(full).collect();
        let mesh = Mesh { data: 2, tensor: 2, expert: 2, ..Mesh::ONE };
        let split = Split { mesh, rank: 3, experts: 2, ..Split::default() };
        let what = Allocate { rounding: Some(1), split, ..Allocate::default() };
        let p = Params::new(tensors, 2, DType::BF16, &Device::Cpu, what)?;
        for (i, t) in p.tensors.iter().enumerate() {
            let dtype = if t.unit == 0 { DType::F32 } else { DType::BF16 };
            assert_eq!(p.stored(i)?, dtype, "{}", t.name);
            let slot = &p.slots[i];
            assert_eq!(p.flat(slot)?.keeps(&slot.range()), t.unit == 0, "{}", t.name);
        }
        Ok(())
    }
}
