//! Bytes of quantized weights and of optimizer states.

use ft_engine::adapters::{Selection, TrainedPart};
use ft_engine::model::modules::Module;
use ft_engine::params::buffers::aligned_of;
use ft_engine::params::buffers::layout::wide_units;
use ft_engine::params::buffers::moments::{self, is_large};
use ft_engine::params::buffers::projected::Projection;
use ft_engine::quant::{BLOCK, GROUP, MXFP4_BLOCK};
use ft_kernels::Machine;
use ft_recipe::{Method, Optimizer, Recipe};

/// Bytes of NF4 codes for `n` values of one tensor, count of 8-bit scales, count of their f32 scales.
pub(super) fn nf4_values(n: u64) -> [u64; 3] {
    let blocks = n.div_ceil(BLOCK as u64);
    [n.div_ceil(2), blocks, blocks.div_ceil(GROUP as u64)]
}

/// Like [`nf4_values`] for the weight of a module cut to the dimensions of a rank: blocks and groups may be smaller.
pub(super) fn nf4_values_of(m: &Module) -> [u64; 3] {
    let n = m.weight_values() as u64;
    let group = aligned_of(m, BLOCK * GROUP);
    [n.div_ceil(2), n.div_ceil(group.min(BLOCK) as u64), n.div_ceil(group as u64)]
}

/// Like [`nf4_values`] for a weight in MXFP4 in the checkpoint.
pub(super) fn mxfp4_values(n: u64) -> [u64; 3] {
    [n.div_ceil(2), n.div_ceil(MXFP4_BLOCK as u64), 1]
}

/// Bytes of NF4 codes and all scales for `n` values of one tensor.
pub fn nf4(n: u64) -> u64 {
    let [codes, blocks, groups] = nf4_values(n);
    codes + blocks + 4 * groups
}

/// Gradient projection of a recipe's optimizer.
pub(super) fn projection(o: &Optimizer) -> Projection {
    Projection { rank: if o.name.projects() { o.galore_rank } else { 0 }, eight_bit: o.name.eight_bit() }
}

/// Bytes of a tensor's optimizer states, alignment gaps excluded.
pub fn optimizer_bytes(o: &Optimizer, t: &TrainedPart<'_>, layers: usize) -> u64 {
    optimizer_bytes_of(o, t, layers, (t.elements() as u64, t.elements()))
}

/// Like [`optimizer_bytes`], for a piece of a tensor of `whole` elements, padded to `values`.
pub(super) fn optimizer_bytes_of(
    o: &Optimizer,
    t: &TrainedPart<'_>,
    layers: usize,
    (values, whole): (u64, usize),
) -> u64 {
    let how = projection(o);
    match t.shape() {
        &[a, b] if how.takes(t.part, t.shape(), t.module.unit(layers), layers + 2) => how.bytes((a, b)),
        _ if o.name.eight_bit() && is_large(whole) => moments::bytes(values as usize),
        _ => 8 * values,
    }
}

/// By trained tensor: whether rounded stochastically, without f32 master weights.
pub fn rounded(r: &Recipe, s: &Selection, machine: Machine, trained: &[TrainedPart<'_>]) -> Vec<bool> {
    let unit = |t: &TrainedPart<'_>| t.module.unit(s.layers);
    let wide = wide_units(trained.iter().map(|t| (unit(t), t.part)));
    let keeps = r.optimizer.keeps_master(machine.computes_in_f32());
    let full = |t: &TrainedPart<'_>| t.part.method() == Method::Full;
    trained.iter().map(|t| !keeps && full(t) && !wide.contains(&unit(t))).collect()
}
