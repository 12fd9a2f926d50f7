//! Loads a model's tensors as the decoder asks for them: frozen ones from the base, trained ones into their
//! flat buffers.

use super::build::Build;
use super::check::{check_full, four_bit};
use super::frozen::{FrozenSlot, FrozenUnit};
use crate::adapters::{Choice, Part, peft};
use crate::load::{self, FourBit};
use crate::model::decoder::Weights;
use crate::model::embedding::EmbeddingLora;
use crate::model::feed_forward::LocalExperts;
use crate::model::grad_accumulator::Slot;
use crate::model::linear::Rows;
use crate::model::linear::{Dora, Lora, Stack, Weight};
use crate::model::modules::{Kind, MlpTree, Module};
use crate::model::{Decoder, Units};
use crate::params::Params;
use crate::params::buffers::{FlatKind, Piece, Shard, cut_module};
use crate::quant::{BLOCK, CodeTables, LazyVector};
use crate::ranks::{self, CollectiveId, Comm, Threads};
use candle_core::{DType, Device};
use ft_base::rng::{Purpose, Stream};
use ft_base::terminal::bytes_bar;
use ft_kernels::Tensor;
use ft_kernels::crossing::PendingTransfer;
use ft_kernels::fp8::Source;
use ft_kernels::padded::Padded;
use ft_kernels::quantized::QuantizedMatrix;
use ft_kernels::resizable::unallocated;
use ft_kernels::tensor::Real;
use ft_recipe::LoraSpec;
use indicatif::ProgressBar;
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// State of a build.
pub(super) struct Loader<'a> {
    b: &'a Build<'a>,
    /// Ranks that build the model.
    comm: &'a dyn Comm,
    params: Params,
    /// Index of each module.
    numbers: HashMap<String, usize>,
    /// Index of each trained tensor, hashed: a model may have tens of thousands.
    tensors: HashMap<(String, Part), usize>,
    /// Tables of the 4-bit types.
    books: CodeTables,
    /// The unit under construction, if frozen weights are sharded or offloaded.
    split: Option<FrozenUnit<'a>>,
    /// Adapters of this unit with row norms computed after the gathering.
    norms: Vec<Norms>,
    bar: Option<ProgressBar>,
}

/// An adapter waiting for the row norms of the adapted matrix.
struct Norms {
    module: Module,
    weight: Weight,
    lora: Lora,
    /// DoRA: index of the magnitude among the trained tensors, and location of the squared row norms.
    dora: Option<(usize, FrozenSlot)>,
}

impl<'a> Loader<'a> {
    /// Allocates the trained tensors.
    pub(super) fn new(b: &'a Build<'a>, alone: &'a Threads) -> ft_base::Result<Self> {
        b.base.check()?;
        check_full(b.base, b.selection, b.adapter)?;
        let units = b.base.config.layers + 2;
        let mut params = Params::new(b.selection.trained(), units, b.dtype, b.device, b.allocate)?;
        params.initials = b.base.initials().cloned();
        if let Some(a) = b.adapter {
            a.check_against(b.selection, &params.tensors)?;
        }
        let books = CodeTables::new(b.device)?;
        let bar = b.shown.map(|what| bytes_bar(what, b.base.bytes()));
        let modules = b.selection.modules.iter().enumerate();
        let numbers = modules.map(|(i, (m, _))| (m.name.clone(), i)).collect();
        let tensors = params.tensors.iter().enumerate();
        let tensors = tensors.map(|(i, t)| ((t.module.clone(), t.part), i)).collect();
        let (comm, split, norms) = (b.comm.unwrap_or(alone), None, Vec::new());
        Ok(Self { b, comm, params, numbers, tensors, books, split, norms, bar })
    }

    /// Moves on to a module of this rank; entering a new unit completes the previous one.
    fn come_to(&mut self, m: &Module) -> ft_base::Result<()> {
        let unit = m.unit(self.b.base.config.layers);
        if self.is_here(m) && self.params.is_gathered() && self.split.as_ref().is_none_or(|s| s.unit != unit)
        {
            self.complete()?;
            self.split = Some(FrozenUnit::new(unit, self.b.device));
        }
        Ok(())
    }

    /// Whether this rank holds the tensors of a module: tensors of another stage have a shape only.
    fn is_here(&self, m: &Module) -> bool {
        self.params.split.has(m.unit(self.b.base.config.layers))
    }

    /// Kind of the buffers of a frozen part of a module, and whether they are gathered for a visit. Tensors of a single
    /// owner stay where they are.
    fn kind(&self, m: &Module, part: Part) -> (FlatKind, bool) {
        let (split, offloaded) = (self.params.split, self.params.weights_offloaded);
        let kind = split.kind_of(m, part);
        (kind, self.split.is_some() && (offloaded || split.shard(kind).is_split()))
    }

    /// Reads this rank's part of the finished unit.
    fn complete(&mut self) -> ft_base::Result<()> {
        let Some(split) = self.split.take() else { return Ok(()) };
        let unit = split.unit;
        self.params.frozen[unit] = split.end(self.b.allocate)?;
        let norms = std::mem::take(&mut self.norms);
        if norms.is_empty() && !self.others_norm(unit) {
            return Ok(());
        }
        // A tied head uses the embedding's table.
        let tied = self.b.base.config.tied && unit == self.b.base.config.layers + 1;
        let units = std::iter::once(unit).chain(tied.then_some(0));
        for u in units.clone() {
            self.params.gather(u, self.comm)?.into_iter().try_for_each(PendingTransfer::wait)?;
        }
        for Norms { module, weight, lora, dora } in norms {
            let (magnitude, place) = dora.unzip();
            let squares = self.set_norms(&module, &weight, &lora, magnitude)?;
            if let (Some(place), Some(squares)) = (place, squares) {
                place.set(&self.params.frozen[unit], squares.real()?)?;
            }
        }
        for u in units {
            self.params.release(u)?;
        }
        Ok(())
    }

    /// Whether ranks with other experts gather the unit for row norms.
    fn others_norm(&self, unit: usize) -> bool {
        let (layers, adapter) = (self.b.base.config.layers, self.b.adapter.is_some());
        let normed = |(m, spec): (&Module, &LoraSpec)| {
            m.expert.is_some() && m.unit(layers) == unit && (spec.dora || adapter)
        };
        self.params.split.own().is_some() && self.b.selection.loras().any(normed)
    }

    /// Sets DoRA's `magnitude` to the adapter's, else to the row norms of a weight; returns the squares of the norms.
    /// Without a magnitude, checks the adapter's.
    fn set_norms(
        &self,
        m: &Module,
        weight: &Weight,
        lora: &Lora,
        magnitude: Option<usize>,
    ) -> ft_base::Result<Option<Tensor>> {
        let Some(i) = magnitude else {
            // PEFT has a single DoRA switch: an adapter with DoRA stores magnitudes for plain LoRA too,
            // which must be neutral.
            if let Some(adapter) = self.b.adapter {
                adapter.check_neutral(m, &|| lora.norms(weight, &weight.row_squares()?)?.real().cloned())?;
            }
            return Ok(None);
        };
        let squares = weight.row_squares()?;
        let init = match self.adapter_value(i)? {
            Some(t) => t,
            None => lora.norms(weight, &squares)?.real()?.clone(),
        };
        self.params.set(i, &init)?;
        Ok(Some(squares))
    }

    /// DoRA with the magnitude at index `i` of the trained tensors.
    fn dora(&self, i: usize, row_squares: Tensor) -> ft_base::Result<Dora> {
        let magnitude = self.params.wide_view(i)?.unsqueeze(0)?;
        Ok(Dora { magnitude, slot: self.slot(i), row_squares })
    }

    /// Index of a module in the model, from 1; seeds the module's random numbers.
    fn number(&self, m: &Module) -> u64 {
        self.numbers.get(&m.name).map_or(0, |i| *i as u64 + 1)
    }

    fn choice(&self, m: &Module) -> Choice {
        let number = self.numbers.get(&m.name).filter(|_| self.is_here(m));
        number.map_or(Choice::Freeze, |i| self.b.selection.modules[*i].1)
    }

    fn part(&self, m: &Module, part: Part) -> Option<usize> {
        self.tensors.get(&(m.name.clone(), part)).copied().filter(|_| self.is_here(m))
    }

    /// Finishes the last unit and the progress bar.
    pub(super) fn end(mut self) -> ft_base::Result<Params> {
        self.complete()?;
        self.bar.inspect(|bar| bar.finish_and_clear());
        Ok(self.params)
    }

    /// Advances the progress bar by the bytes read for a module.
    fn was_read(&self, m: &Module, bias: bool, full: bool) {
        if let Some(bar) = &self.bar {
            bar.inc(self.b.base.bytes_of(m, bias, full));
        }
    }

    /// Reads a range of this rank's piece of a base tensor as a vector on `device`.
    fn base(
        &self,
        m: &Module,
        part: Part,
        (piece, elements): (&Piece, Range<usize>),
        dtype: DType,
        device: &Device,
    ) -> ft_base::Result<Real> {
        let (bias, full) = (part == Part::Bias, matches!(self.choice(m), Choice::Full { .. }));
        let of = (m, self.number(m));
        let t = piece.read(elements, |r| self.b.base.part(of, bias, full, r, dtype, device))?;
        self.was_read(m, bias, full);
        Ok(t)
    }

    /// Loads the weight of a linear in 4 bits.
    fn blocks(&mut self, m: &Module, how: FourBit) -> ft_base::Result<QuantizedMatrix> {
        let of = (m, self.number(m));
        let (ranks, (kind, apart)) = (self.params.split, self.kind(m, Part::Weight));
        let piece = ranks.piece(m, Part::Weight);
        // All ranks with any part of the weight share the computation of its scales.
        let with = if kind == FlatKind::Cut { FlatKind::Whole } else { kind };
        let (group, shard) = (ranks.group(self.comm, with), ranks.shard(with));
        let scales = |n: usize, make: load::Scales<'_>| all_scales(m, n, make, shard, &group);
        let unread = || self.b.base.lazy_codes(of, how, self.b.dtype, &scales)?.cut(&m.name, &piece);
        let blocks = match self.split.as_mut().filter(|_| apart) {
            Some(split) => {
                unread()?.materialize(self.b.dtype, &mut self.books, &mut |u| Ok(split.later(kind, u)?))?
            }
            None if piece.dim().is_some() => unread()?.whole(self.b.dtype, &mut self.books)?,
            None => self.b.base.codes(of, how, self.b.dtype, &mut self.books)?,
        };
        self.was_read(m, false, false);
        Ok(blocks)
    }

    /// Loads a frozen tensor: a separate one, or a view if frozen weights are sharded or offloaded.
    fn frozen(&mut self, m: &Module, part: Part) -> ft_base::Result<Tensor> {
        let piece = self.params.split.piece(m, part);
        let (shape, len, b, number) = (piece.shape(), piece.elements(), self.b, self.number(m));
        let dtype = match part {
            Part::Weight if self.choice(m).leaves_weight() => b.base.frozen_dtype(m, b.dtype, b.device),
            _ => b.dtype,
        };
        let (kind, apart) = self.kind(m, part);
        let Some(split) = self.split.as_mut().filter(|_| apart) else {
            let flat = self.base(m, part, (&piece, 0..len), dtype, b.device)?;
            return Ok(flat.reshape(shape)?.into());
        };
        let module = m.clone();
        let read = move |elements| {
            let bias = part == Part::Bias;
            piece.read(elements, |r| b.base.part((&module, number), bias, false, r, dtype, &Device::Cpu))
        };
        let view = split.later(kind, LazyVector { dtype, len, read: Box::new(read) })?;
        self.was_read(m, part == Part::Bias, false);
        Ok(view.reshape(shape)?)
    }

    /// Loads a tensor of the base: frozen, or trained in its buffer.
    fn tensor(&mut self, m: &Module, part: Part) -> ft_base::Result<(Tensor, Option<Slot>)> {
        if !self.is_here(m) {
            let piece = self.params.split.piece(m, part);
            let flat = unallocated(piece.elements(), self.b.dtype, self.b.device)?;
            return Ok((flat.reshape(piece.shape())?, None));
        }
        self.come_to(m)?;
        let Some(i) = self.part(m, part) else { return Ok((self.frozen(m, part)?, None)) };
        match self.adapter_value(i)? {
            Some(t) => self.params.set(i, &t)?,
            None => {
                let mine = self.params.mine(i)?;
                let first = mine.start;
                let of = (&self.params.pieces[i], mine);
                let values = self.base(m, part, of, DType::F32, self.params.home(i)?)?;
                self.params.set_from(i, first, &values)?;
            }
        }
        Ok((self.params.view(i)?, self.slot(i)))
    }

    /// Fills A and B from the adapter, or initializes them.
    fn init_lora(&self, m: &Module, a: usize, b: usize) -> ft_base::Result<()> {
        if let (Some(ta), Some(tb)) = (self.adapter_value(a)?, self.adapter_value(b)?) {
            self.params.set(a, &ta)?;
            self.params.set(b, &tb)?;
            return Ok(());
        }
        if let Some(f) = self.b.base.factors((m, self.number(m)))? {
            self.params.set(a, &f.a)?;
            self.params.set(b, &f.b)?;
            return Ok(());
        }
        let embedding = matches!(m.kind, Kind::Embedding { .. });
        // PEFT's initialization: A is Kaiming-uniform with a = sqrt(5), that is uniform within 1 / sqrt(i),
        // and B zero; on an embedding, A is zero and B standard normal.
        let (index, stream) = if embedding { (b, 1) } else { (a, 0) };
        let t = &self.params.tensors[index];
        let s = Stream::new(self.b.seed, Purpose::Adapter, stream, self.number(m));
        let bound = 1.0 / (t.shape[1] as f32).sqrt();
        let n = t.elements() as u64;
        let values: Vec<f32> = (0..n)
            .into_par_iter()
            .map(|i| if embedding { s.normal(i) } else { (2.0 * s.uniform(i) - 1.0) * bound })
            .collect();
        Ok(self.params.set(index, &Real::from_vec(values, t.shape.as_slice(), &Device::Cpu)?)?)
    }

    /// Values of a trained tensor in the adapter, if any.
    fn adapter_value(&self, index: usize) -> ft_base::Result<Option<Real>> {
        match self.b.adapter {
            Some(adapter) => adapter.get(&self.params.tensors[index]),
            None => Ok(None),
        }
    }

    /// First of this rank's input columns of a linear, and the number of all, if they are cut.
    fn columns(&self, m: &Module) -> Option<(usize, usize)> {
        let piece = self.params.split.piece(m, Part::Weight);
        let own = piece.shape().last().copied().unwrap_or(0);
        (piece.dim() == Some(1)).then(|| (self.params.split.place().0 * own, m.cols()))
    }

    /// Gradient slot of a trained tensor, in training.
    fn slot(&self, index: usize) -> Option<Slot> {
        self.b.allocate.train.then_some(self.params.slots[index])
    }

    fn slots(&self, a: usize, b: usize) -> Option<(Slot, Slot)> {
        self.slot(a).zip(self.slot(b))
    }
}

impl Build<'_> {
    /// Loads the model and allocates trained tensors.
    ///
    /// # Errors
    /// Missing, unexpected or misshapen tensors, all named; an adapter that does not match.
    pub fn run(&self) -> ft_base::Result<(Decoder, Params)> {
        let alone = ranks::alone();
        let mut loader = Loader::new(self, &alone)?;
        let decoder = Decoder::build(&self.base.config, &mut loader)?;
        Ok((decoder, loader.end()?))
    }

    /// Logits `[t, v]` (f32) for a few tokens of one document, with a single layer in memory at a time.
    ///
    /// # Errors
    /// As [`Build::run`].
    pub fn logits(&self, ids: &[u32]) -> ft_base::Result<Real> {
        let alone = ranks::alone();
        let mut loader = Loader::new(self, &alone)?;
        let logits = Decoder::logits_by_layer(&self.base.config, &mut loader, ids, self.device)?;
        loader.end()?;
        Ok(logits)
    }
}

impl Weights for Loader<'_> {
    fn dtype(&self) -> DType {
        self.b.dtype
    }

    fn units(&self) -> Option<Units> {
        self.params.split.units
    }

    fn weight(&mut self, m: &Module) -> ft_base::Result<(Tensor, Option<Slot>)> {
        self.tensor(m, Part::Weight)
    }

    fn matrix(&mut self, m: &Module) -> ft_base::Result<(Weight, Option<Slot>)> {
        if !self.is_here(m) {
            let (weight, slot) = self.weight(m)?;
            return Ok((Weight::Dense(weight), slot));
        }
        self.come_to(m)?;
        let here = cut_module(m, self.params.split.mesh.tensor);
        let fp8 = super::ghost::in_fp8(&here, &self.choice(m), self.b.fp8);
        match four_bit(self.b.base, m, &self.choice(m)) {
            Some(how) => {
                let blocks = Arc::new(self.blocks(m, how)?);
                Ok((Weight::of(Source::Blocks(blocks), fp8)?, None))
            }
            None => {
                let (weight, slot) = self.weight(m)?;
                let (ranks, apart) = (self.params.split.mesh.ranks(), self.params.is_gathered());
                let rooms = self.b.device.is_cuda() && ranks == 1 && !apart;
                let rank = super::ghost::room(m, &self.choice(m), rooms);
                let weight = match rank {
                    1.. if !fp8 => Weight::Padded(Padded::copy_of(&weight, rank)?),
                    _ => Weight::of(Source::Dense(weight), fp8)?,
                };
                Ok((weight, slot))
            }
        }
    }

    fn stack(&mut self, modules: &[&Module]) -> ft_base::Result<Option<Stack>> {
        let whole = self.b.device.is_cuda() && self.params.split.mesh.tensor == 1;
        let rank = super::ghost::stacked(modules, |m| self.choice(m), whole);
        let slots: Vec<Slot> =
            modules.iter().filter_map(|m| Some(self.params.slots[self.part(m, Part::A)?])).collect();
        let follow = slots.windows(2).all(|p| p[0].flat == p[1].flat && p[0].range().end == p[1].offset);
        let Some(first) = slots.first() else { return Ok(None) };
        if rank == 0 || !follow || slots.len() != modules.len() {
            return Ok(None);
        }
        let a = Slot { rows: rank, ..*first }.view(&self.params.flat(first)?.compute.whole)?;
        Ok(Some(Stack { a }))
    }

    fn bias(&mut self, m: &Module) -> ft_base::Result<(Tensor, Option<Slot>)> {
        self.tensor(m, Part::Bias)
    }

    fn heads(&self, all: usize) -> usize {
        all / self.params.split.mesh.tensor
    }

    fn adds_bias(&self, m: &Module) -> bool {
        self.params.split.adds_bias(m)
    }

    fn lora(&mut self, m: &Module, weight: &Weight) -> ft_base::Result<Option<Lora>> {
        self.come_to(m)?;
        let Choice::Lora { spec, .. } = self.choice(m) else { return Ok(None) };
        let own = self.tensors.get(&(m.a_of().to_string(), Part::A)).copied();
        let (Some(a), Some(b)) = (own, self.part(m, Part::B)) else { return Ok(None) };
        if m.a_of() == m.name {
            self.init_lora(m, a, b)?;
        } else if let Some(value) = self.adapter_value(b)? {
            self.params.set(b, &value)?;
        }
        let scale = peft::scale(&spec);
        let mut lora = Lora {
            a: self.params.view(a)?,
            b: self.params.view(b)?,
            slots: self.slots(a, b),
            scale,
            dropout: spec.dropout,
            stream: self.number(m),
            columns: self.columns(m),
            dora: None,
        };
        let magnitude = self.part(m, Part::Magnitude);
        let (kind, apart) = self.kind(m, Part::Weight);
        if let Some(split) = self.split.as_mut().filter(|_| apart) {
            // The weight is not in memory yet.
            let mut dora = None;
            if let Some(i) = magnitude {
                let (place, row_squares) = split.place(kind, DType::F32, weight.dims()?.0)?;
                lora.dora = Some(self.dora(i, row_squares)?);
                dora = Some((i, place));
            }
            if dora.is_some() || self.b.adapter.is_some() {
                let (module, weight) = (m.clone(), weight.clone());
                self.norms.push(Norms { module, weight, lora: lora.clone(), dora });
            }
            return Ok(Some(lora));
        }
        let squares = self.set_norms(m, weight, &lora, magnitude)?;
        if let Some((i, squares)) = magnitude.zip(squares) {
            lora.dora = Some(self.dora(i, squares)?);
        }
        Ok(Some(lora))
    }

    fn rows(&mut self, m: &Module) -> ft_base::Result<Option<Rows>> {
        let Some(i) = self.part(m, Part::Rows) else { return Ok(None) };
        let (ids, t) = (self.b.selection.tokens.of(&m.name), &self.params.tensors[i]);
        let (rows, cols) = (t.shape[0], m.cols());
        if ids.len() != rows {
            let why = format!("{}: {rows} rows train, and of {} it is known which", m.name, ids.len());
            return Err(candle_core::Error::Msg(why).into());
        }
        match self.adapter_value(i)? {
            Some(values) => self.params.set(i, &values)?,
            None => {
                for (row, id) in ids.iter().enumerate() {
                    let at = *id as usize * cols;
                    let of = (m, self.number(m));
                    let values =
                        self.b.base.part(of, false, false, at..at + cols, DType::F32, &Device::Cpu)?;
                    self.params.set_from(i, row * cols, &values)?;
                }
            }
        }
        let index = Real::from_slice(ids.as_slice(), rows, self.b.device)?.into();
        let slot = self.slot(i);
        Ok(Some(Rows { ids, index, values: self.params.view(i)?, slot }))
    }

    fn own(&self, experts: &[MlpTree], unit: usize) -> Option<(Range<usize>, LocalExperts)> {
        let split = &self.b.allocate.split;
        let own = (split.own()?, split.mesh.expert);
        Some(super::owned(experts, unit, own, |m| self.choice(m)))
    }

    fn embedding_lora(&mut self, m: &Module) -> ft_base::Result<Option<EmbeddingLora>> {
        let Choice::Lora { spec, .. } = self.choice(m) else { return Ok(None) };
        let (Some(a), Some(b)) = (self.part(m, Part::A), self.part(m, Part::B)) else { return Ok(None) };
        self.init_lora(m, a, b)?;
        let (view_a, view_b) = (self.params.view(a)?, self.params.view(b)?);
        Ok(Some(EmbeddingLora { a: view_a, b: view_b, slots: self.slots(a, b), scale: peft::scale(&spec) }))
    }
}

/// Computes the scales of a weight's blocks in parallel on all ranks and gathers them.
fn all_scales(
    m: &Module,
    values: usize,
    make: load::Scales<'_>,
    shard: Shard,
    comm: &dyn Comm,
) -> ft_base::Result<Vec<f32>> {
    let blocks = |r: &Range<usize>| r.start / BLOCK..r.end.div_ceil(BLOCK);
    let parts = shard.parts(values);
    let mine = make(parts[shard.rank].clone())?;
    let mine = Real::from_vec(mine, blocks(&parts[shard.rank]).len(), &Device::Cpu)?;
    let all = Tensor::zeros(values.div_ceil(BLOCK), DType::F32, &Device::Cpu)?;
    const WHAT: &str = "the gathering of scales";
    let at = m.layer.map_or(CollectiveId::all(WHAT), |l| CollectiveId::unit(WHAT, l + 1));
    comm.all_gather(at, mine.into(), &parts.iter().map(blocks).collect::<Vec<_>>(), &all)?.wait()?;
    Ok(all.real()?.to_vec1()?)
}
