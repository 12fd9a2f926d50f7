//! Layout of trained tensors in the buffers of their units.

use super::moments::is_large;
use super::projected::Projection;
use super::shard::ALIGN;
use crate::adapters::{Part, Trained};
use crate::model::sink::Slot;
use ft_recipe::Method;
use std::collections::BTreeSet;

/// Ends of the kinds of tensors in a unit's buffer, by unit. The order makes each property a contiguous
/// range: large tensors, adapter tensors, projected tensors.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    pub large_full: Vec<usize>,
    /// Moments up to here can be in 8 bits.
    pub large: Vec<usize>,
    pub adapters: Vec<usize>,
    /// Gradients from here on are projected.
    pub plain: Vec<usize>,
    pub all: Vec<usize>,
}

/// Assigns slots to all tensors.
pub(crate) fn layout(tensors: &[Trained], units: usize, how: Projection) -> (Vec<Slot>, Ends) {
    let mut len = vec![0usize; units];
    let mut ends = [(); 5].map(|()| Vec::new());
    let mut slots = Vec::with_capacity(tensors.len());
    let kind = |t: &Trained| match (is_large(t.elements()), t.part.method() == Method::Lora) {
        _ if how.takes_tensor(t, units) => 4,
        (true, false) => 0,
        (true, true) => 1,
        (false, true) => 2,
        (false, false) => 3,
    };
    for (number, end) in ends.iter_mut().enumerate() {
        for (index, t) in tensors.iter().enumerate() {
            if kind(t) != number {
                continue;
            }
            let cols = *t.shape.last().unwrap_or(&1);
            let rows = t.elements() / cols.max(1);
            let offset = len[t.unit];
            len[t.unit] = (offset + t.elements()).next_multiple_of(ALIGN);
            slots.push(Slot { index, unit: t.unit, offset, rows, cols });
        }
        end.clone_from(&len);
    }
    slots.sort_by_key(|s| s.index);
    let [large_full, large, adapters, plain, all] = ends;
    (slots, Ends { large_full, large, adapters, plain, all })
}

/// Units in which layers use the f32 master weights directly: DoRA's magnitudes are applied in f32. Every
/// rank holds them in full.
pub fn wide_units(parts: impl IntoIterator<Item = (usize, Part)>) -> BTreeSet<usize> {
    parts.into_iter().filter(|(_, part)| *part == Part::Magnitude).map(|(unit, _)| unit).collect()
}
