//! Trained tensors of a rank: buffers by unit, gradients, master weights and moments.

use super::optimizer::{optimizer_bytes_of, projection};
use super::setup::Setup;
use ft_engine::adapters::TrainedPart;
use ft_engine::params::buffers::layout::wide_units;
use ft_engine::params::buffers::{ALIGN, is_cut};
use ft_kernels::decompose;
use ft_recipe::Method;
use std::collections::BTreeSet;

/// Trained tensors, with the gaps of their alignment.
#[derive(Default)]
pub(super) struct TrainedBytes {
    /// Values by flat buffer.
    pub lens: Vec<u64>,
    /// Values with master weights, by flat buffer.
    pub kept: Vec<u64>,
    /// Flat buffers with layers reading the f32 master weights.
    pub wide: BTreeSet<usize>,
    /// Weights trained in full, and adapters, in the compute dtype.
    pub full: u64,
    pub adapters: u64,
    pub gradients: u64,
    pub master: u64,
    pub moments: u64,
    /// Temporary bytes of a GaLore update of one matrix.
    pub projecting: u64,
}

impl TrainedBytes {
    pub fn new(c: &Setup<'_>) -> Self {
        let mut out = Self {
            lens: vec![0; c.flats()],
            kept: vec![0; c.flats()],
            wide: wide_units(c.trained.iter().map(|(t, _)| (c.flat(t.module, t.part), t.part))),
            ..Self::default()
        };
        for (t, rounded) in &c.trained {
            out.add(c, t, *rounded);
        }
        if c.recipe.optimizer.in_backward {
            out.gradients = 0;
        }
        out
    }

    fn add(&mut self, c: &Setup<'_>, t: &TrainedPart<'_>, rounded: bool) {
        let flat = c.flat(t.module, t.part);
        let n = t.elements().next_multiple_of(ALIGN) as u64;
        self.lens[flat] += n;
        let weights = c.share(flat, c.width() * n, 3);
        match t.part.method() {
            Method::Lora => self.adapters += weights,
            _ => self.full += weights,
        }
        self.gradients += c.share(flat, 4 * n, 2);
        if !rounded {
            self.kept[flat] += n;
            let from = if self.wide.contains(&flat) { 3 } else { 1 };
            self.master += if c.one_copy() { 0 } else { c.share(flat, 4 * n, from) };
        }
        // alignment gaps have moments too
        let cut = c.ranks.tensor > 1 && is_cut(t.module, t.part);
        let whole = t.elements() * if cut { c.ranks.tensor as usize } else { 1 };
        let moments = optimizer_bytes_of(&c.recipe.optimizer, t, c.selection.layers, (n, whole));
        self.moments += c.share(flat, moments, 1);
        self.projecting = self.projecting.max(projecting(c, t, rounded));
    }

    /// Values of a flat buffer's f32 copy read by layers; 0 if the compute weights are f32.
    pub fn wide_values(&self, c: &Setup<'_>, flat: usize) -> u64 {
        if c.machine.computes_in_f32() || !self.wide.contains(&flat) { 0 } else { self.lens[flat] }
    }
}

/// Temporary bytes of the GaLore update of a matrix (`optim/projected.rs`): first the gradient and its
/// decomposition on the host; then the projected gradient and update, and a copy of the matrix for weight
/// decay or rounding.
fn projecting(c: &Setup<'_>, t: &TrainedPart<'_>, rounded: bool) -> u64 {
    let how = projection(&c.recipe.optimizer);
    let &[o, i] = t.shape() else { return 0 };
    if !how.takes(t.part, t.shape(), c.unit(t.module), c.units()) {
        return 0;
    }
    let (n, low) = ((o * i) as u64, 8 * (how.rank * o.max(i)) as u64);
    let look = if c.machine.cuda { 0 } else { 4 * n + decompose::bytes((o, i), how.rank) };
    let copy = if c.recipe.optimizer.weight_decay != 0.0 { 4 * n } else { 0 };
    let after = match (c.machine.computes_in_f32(), rounded) {
        (true, _) => copy,
        (false, false) => copy.max(c.width() * n),
        // f32 copy of the weights, and a copy of weights on the host
        (false, true) => 4 * n + copy + if c.weights_on_host() { c.width() * n } else { 0 },
    };
    look.max(low + after)
}
