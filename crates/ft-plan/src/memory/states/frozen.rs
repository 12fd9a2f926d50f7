//! Frozen weights of a rank, in load order.

use super::optimizer::{mxfp4_values, nf4_values, nf4_values_of};
use super::setup::Setup;
use crate::memory::{Bytes, Component};
use ft_engine::adapters::{Choice, Part, initial};
use ft_engine::model::modules::{Group, Module};
use ft_engine::params::build::ghost::{in_fp8, is_quantized, room, stays_stored};
use ft_kernels::decompose;
use ft_kernels::grouped::table;
use ft_kernels::padded::Padded;
use ft_recipe::Weights;

/// Values in the frozen buffers of a unit, by dtype.
#[derive(Clone, Copy, Default)]
pub(super) struct FrozenValues {
    /// 4-bit codes and 8-bit scales.
    pub u8s: u64,
    /// In the compute dtype.
    pub compute: u64,
    pub f32s: u64,
    /// In the half precision of the checkpoint.
    pub halves: u64,
}

/// Frozen weights, and the peaks of their loading.
#[derive(Default)]
pub(super) struct Frozen {
    pub device: Bytes,
    /// Bytes and values by flat buffer, unsharded.
    pub flat_bytes: Vec<u64>,
    pub values: Vec<FrozenValues>,
    /// Bytes of base-derived LoRA factors.
    pub initial_factors: u64,
    /// Bytes of all loaded weights.
    loaded: u64,
    /// Highest sum of loaded weights and temporaries.
    high: u64,
    /// Gathered or offloaded weights: bytes of the largest piece of a tensor read at once.
    piece: u64,
    /// Units needed in full for the row norms of DoRA.
    normed: Vec<bool>,
}

/// Bytes of a frozen weight.
struct Stored {
    bytes: u64,
    /// Scales of 4-bit blocks.
    constants: u64,
    quantized: bool,
}

impl Frozen {
    /// Adds up the modules of a selection.
    pub fn new(c: &Setup<'_>) -> Self {
        let flats = c.flats();
        let mut out = Self {
            flat_bytes: vec![0; flats],
            values: vec![FrozenValues::default(); flats],
            normed: vec![false; c.units()],
            ..Self::default()
        };
        for (m, choice) in c.selection.with_weights().filter(|(m, _)| c.ranks.has(m)) {
            out.add(c, m, choice);
        }
        for m in c.selection.constants.iter().filter(|m| c.ranks.has(m)) {
            out.add(c, m, &Choice::Freeze);
        }
        out
    }

    /// Temporary bytes of loading above the loaded weights; `read` are the buffers of readers.
    pub fn load_transient(&self, read: u64) -> u64 {
        (self.high + read).saturating_sub(self.loaded)
    }

    /// As [`Frozen::load_transient`], for gathered or offloaded weights with `flight` bytes by unit.
    pub fn gathered_transient(&self, read: u64, flight: &[u64]) -> u64 {
        let normed = flight.iter().zip(&self.normed).filter(|(_, n)| **n).map(|(b, _)| *b).max();
        (self.piece + read).max(normed.unwrap_or(0))
    }

    fn add(&mut self, c: &Setup<'_>, m: &Module, choice: &Choice) {
        let (n, bias, flat) =
            (m.weight_values() as u64, m.bias().unwrap_or(0) as u64, c.flat(m, Part::Weight));
        if c.machine.cuda && m.expert.is_some() {
            // entry in the layer's expert table
            self.device.add(component(m.group), table::BYTES as u64);
        }
        let dora = matches!(choice, Choice::Lora { spec, .. } if spec.dora);
        self.normed[c.unit(m)] |= dora;
        let ranks = if c.is_split() { c.copies(flat) } else { 1 };
        self.piece = self.piece.max((4 + c.width()) * n.div_ceil(ranks));
        if matches!(choice, Choice::Full { .. }) {
            // f32 value on the way into the buffer, and its rounded copy
            let value = if c.states_on_host() { 0 } else { 4 * n };
            let rounded = if c.machine.computes_in_f32() && !c.states_on_host() { 0 } else { c.width() * n };
            self.high = self.high.max(self.loaded + value + rounded);
            return;
        }
        let rows = if dora { c.placed(flat, m.rows() as u64) } else { 0 };
        let Stored { bytes, constants, quantized } = self.weight(c, m, choice);
        self.values[flat].f32s += rows;
        let of_bias = c.flat(m, Part::Bias);
        self.values[of_bias].compute += c.placed(of_bias, bias);
        let factors = self.factors(c, m, choice);
        let made_in_f32 = !c.machine.computes_in_f32() && c.recipe.model.weights == Weights::Random;
        if (made_in_f32 || quantized || factors > 0) && !c.machine.cuda {
            let copies = if factors > 0 { 8 * n } else { 4 * n };
            self.high = self.high.max(self.loaded + copies + bytes);
        }
        let (bytes, bias) = (bytes + 4 * rows, c.width() * c.placed(of_bias, bias));
        self.flat_bytes[flat] += bytes + constants;
        self.flat_bytes[of_bias] += bias;
        let copies = |flat| if c.is_ends(flat) { c.ranks.stage } else { c.copies(flat) };
        let share = |flat, bytes| c.ranks.share(copies(flat), bytes, 3);
        self.device.add(component(m.group), share(flat, bytes) + share(of_bias, bias));
        self.device.add(Component::QuantConstants, share(flat, constants));
        self.loaded += bytes + bias + constants;
    }

    /// The weight of a frozen module.
    fn weight(&mut self, c: &Setup<'_>, m: &Module, choice: &Choice) -> Stored {
        let (n, flat) = (m.weight_values() as u64, c.flat(m, Part::Weight));
        let values = &mut self.values[flat];
        if is_quantized(m, choice, c.quantize) {
            let counts = match m.is_mxfp4() {
                true => mxfp4_values(n),
                false if c.ranks.tensor > 1 => nf4_values_of(m),
                false => nf4_values(n),
            };
            let [codes, blocks, groups] = counts.map(|values| c.placed(flat, values));
            values.u8s += codes + blocks;
            values.f32s += groups;
            return Stored { bytes: codes, constants: blocks + 4 * groups, quantized: true };
        }
        let fp8 = in_fp8(m, choice, c.machine.fp8);
        let room = room(m, choice, c.machine.cuda && c.recipe.has_rooms() && !fp8);
        let bytes = match m.weight_shape().as_slice() {
            &[o, i] if room > 0 => {
                let (rows, cols) = Padded::shape((o, i), room);
                let bytes = c.width() * (rows * cols) as u64;
                // copied into storage with room for the adapter
                self.high = self.high.max(self.loaded + bytes + c.width() * n);
                bytes
            }
            _ if !from_base(c, m, choice) && stays_stored(m, choice, c.machine) => {
                values.halves += c.placed(flat, n);
                c.machine.frozen() * c.placed(flat, n)
            }
            _ => {
                values.compute += c.placed(flat, n);
                c.width() * c.placed(flat, n)
            }
        };
        Stored { bytes, constants: 0, quantized: false }
    }

    /// Bytes of the base-derived LoRA factors (e.g. PiSSA) of a module, computed on the host from the f32
    /// weight.
    fn factors(&mut self, c: &Setup<'_>, m: &Module, choice: &Choice) -> u64 {
        let (Choice::Lora { spec, .. }, &[o, i]) = (choice, m.weight_shape().as_slice()) else { return 0 };
        if !from_base(c, m, choice) {
            return 0;
        }
        let (n, factors) = (m.weight_values() as u64, 4 * (spec.rank * (o + i)) as u64);
        self.initial_factors += factors;
        if !c.machine.cuda {
            let work = (4 * n + decompose::bytes((o, i), spec.rank)).max(8 * n);
            self.high = self.high.max(self.loaded + factors + work);
            self.loaded += factors;
        }
        factors
    }
}

fn from_base(c: &Setup<'_>, m: &Module, choice: &Choice) -> bool {
    matches!(choice, Choice::Lora { .. }) && initial::from_base(c.recipe, m)
}

fn component(g: Group) -> Component {
    match g {
        Group::Attention => Component::Attention,
        Group::Mlp => Component::Mlp,
        Group::Experts => Component::Experts,
        Group::Router => Component::Router,
        Group::Norms | Group::Recurrence | Group::Sinks | Group::RouterScales => Component::Norms,
        Group::PerLayer | Group::Embedding => Component::Embedding,
        Group::Head => Component::Head,
    }
}
