//! Layout of trained tensors in their flat buffers.

use super::moments::is_large;
use super::projected::Projection;
use super::shard::ALIGN;
use crate::adapters::{Part, Trained};
use crate::model::grad_accumulator::Slot;
use candle_core::DType;
use ft_recipe::Method;
use std::collections::BTreeSet;
use std::ops::Range;

/// Ends of the five regions of a buffer, in order: large in full, large LoRA, small LoRA, small in full, projected.
/// `large_full`, `large`, `adapters` and `plain` are the ends of the first four.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FlatLayout {
    pub large_full: usize,
    /// Moments up to here can be in 8 bits.
    pub large: usize,
    pub adapters: usize,
    /// Gradients from here on are projected.
    pub plain: usize,
    /// Length in elements.
    pub len: usize,
}

impl FlatLayout {
    /// Elements with master weights. With `rounding`, these are LoRA's alone; tensors of any size trained in full have
    /// only the compute buffer. A buffer of a unit with `dora` keeps all.
    pub fn kept(&self, rounding: bool, dtype: DType, dora: bool) -> Range<usize> {
        if !rounding || dtype == DType::F32 || dora { 0..self.len } else { self.large_full..self.adapters }
    }
}

/// Assigns slots to all tensors, in the buffer that `flat` names for each of `units` units; `shape` is that of a tensor
/// on this rank. With `stacks`, the A of adapters stand before all else of their kind, so that those of one input
/// follow one another ([`crate::model::linear::Stack`]).
pub(crate) fn layout(
    (tensors, stacks): (&[Trained], bool),
    (units, flats): (usize, usize),
    how: Projection,
    (flat, shape): (impl Fn(&Trained) -> usize, impl Fn(usize) -> Vec<usize>),
) -> (Vec<Slot>, Vec<FlatLayout>) {
    let mut layouts = vec![FlatLayout::default(); flats];
    let mut slots = Vec::with_capacity(tensors.len());
    let kind = |t: &Trained| match (is_large(t.elements()), t.part.method() == Method::Lora) {
        _ if how.takes_tensor(t, units) => 4,
        (true, false) => 0,
        (true, true) => 1,
        (false, true) => 2,
        (false, false) => 3,
    };
    let ends: [fn(&mut FlatLayout) -> &mut usize; 4] =
        [|u| &mut u.large_full, |u| &mut u.large, |u| &mut u.adapters, |u| &mut u.plain];
    let mut order: Vec<(usize, &Trained)> = tensors.iter().enumerate().collect();
    order.sort_by_key(|(_, t)| !(stacks && t.part == Part::A));
    for number in 0..5 {
        for &(index, t) in order.iter().filter(|(_, t)| kind(t) == number) {
            let shape = shape(index);
            let (cols, elements) = (*shape.last().unwrap_or(&1), shape.iter().product::<usize>());
            let rows = elements / cols.max(1);
            let flat = flat(t);
            let offset = layouts[flat].len;
            layouts[flat].len = (offset + elements).next_multiple_of(ALIGN);
            slots.push(Slot { index, flat, offset, rows, cols });
        }
        if let Some(end) = ends.get(number) {
            layouts.iter_mut().for_each(|u| *end(u) = u.len);
        }
    }
    slots.sort_by_key(|s| s.index);
    (slots, layouts)
}

/// Units or buffers in which layers use the f32 master weights directly: DoRA's magnitudes are applied in f32. Every
/// rank holds them in full.
pub fn wide_units(parts: impl IntoIterator<Item = (usize, Part)>) -> BTreeSet<usize> {
    parts.into_iter().filter(|(_, part)| *part == Part::Magnitude).map(|(unit, _)| unit).collect()
}
