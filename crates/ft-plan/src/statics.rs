//! Bytes of one rank that stay for the whole run: weights and optimizer states, on device and host.

use super::Machine;
use super::ledger::{Bytes, Component};
use ft_engine::adapt::buffer::{ALIGN, Shard};
use ft_engine::adapt::ghost::{is_quantized, room, stays_stored};
use ft_engine::adapt::initial;
use ft_engine::adapt::layout::wide_units;
use ft_engine::adapt::moments::{self, is_large};
use ft_engine::adapt::projected::Projection;
use ft_engine::adapt::selection::TrainedPart;
use ft_engine::adapt::{Choice, Selection};
use ft_engine::model::modules::{Group, Module};
use ft_engine::optim::{PIECE, STAGED};
use ft_engine::ranks::ROUND;
use ft_kernels::decompose;
use ft_kernels::gemm;
use ft_kernels::grouped::table;
use ft_kernels::padded::Padded;
use ft_recipe::{Decomposition, Method, Offload, Optimizer, Recipe, Weights};

/// Values per NF4 quantization block, and blocks per group of double quantization.
const NF4_BLOCK: u64 = 64;
const NF4_NESTED: u64 = 256;
/// Bytes read at a time by a thread of `store::convert`.
const READ_PIECE: u64 = 4 << 20;
/// CUDA context, cuBLAS and the cuBLAS workspace.
const CUDA_CONTEXT: u64 = 600 << 20;
/// Device buffers of NCCL for its channels and peers. An estimate: 1.6 GB are reported for one
/// communicator (NVIDIA/nccl issue 864); fewer channels take less.
const NCCL: u64 = 1600 << 20;
/// Bytes of an `ft` process besides tensors: code, tokenizer, threads.
pub(super) const PROCESS: u64 = 128 << 20;
/// Host memory of the CUDA driver, context and libraries. Not measured with ft: a PyTorch process grew by
/// 1,123 MiB with the context and by 594 MiB with its first convolution (pytorch/pytorch issue 12873);
/// newer drivers load kernels lazily and stay below.
pub(super) const CUDA_HOST: u64 = 1792 << 20;
/// Freed blocks kept for reuse on the CPU, as a fraction 1/40 of engine bytes (`log/pool.rs`).
const KEPT_PART: u64 = 40;
/// Small blocks, their gaps, and lazily loaded code on the CPU: a constant, plus a fraction 1/64 of
/// engine bytes (`benches/memory.py`).
const SMALL_BLOCKS: (u64, u64) = (5 << 20, 64);
/// Buffers of the checkpoint writer on the CPU.
pub(super) const WRITER: u64 = 1 << 20;
/// Logit rows compared by the check of the result, and bytes per logit.
pub const PROBE: (u64, u64) = (ft_data::PROBE_TOKENS as u64, 40);

/// Bytes of a rank that do not depend on the micro-batch.
#[derive(Clone, Debug, Default)]
pub struct Statics {
    pub device: Bytes,
    /// On the host, by name.
    pub host: Vec<(&'static str, u64)>,
    /// Temporary bytes during loading, above the sum of all loaded weights.
    pub load_transient: u64,
    /// Temporary bytes while the result is written and checked.
    pub save_transient: u64,
    /// Most values the optimizer updates at once on the device; 0 with offloaded states or weights.
    pub largest_group: u64,
    /// Temporary bytes of a GaLore update of one matrix.
    pub projecting: u64,
    /// Device buffers for gradients or new weights on their way to or from the host.
    pub staging: u64,
    /// Gradient bytes of one micro-batch by unit, with data parallelism or updates in the backward pass.
    /// They live from the unit's backward visit to the reduction, or to the update.
    pub live: Vec<u64>,
    /// CUDA with data parallelism: bytes received by the reduction of each unit's gradients.
    pub summed: Vec<u64>,
    /// CUDA with data parallelism below ZeRO stage 2: bytes of this rank's shard of each reduced
    /// gradient, sent to all ranks.
    pub parts: Vec<u64>,
    /// Component of `live`.
    pub live_as: Component,
    /// Whether units are updated in the backward pass.
    pub updates: bool,
    /// Whether head and embedding share one gradient buffer.
    pub tied: bool,
    /// Weights gathered per visit (ZeRO-3) or offloaded: bytes by unit, fetched one visit ahead.
    pub flight: Vec<u64>,
    /// Bytes of `flight` received from other ranks.
    pub comes: Vec<u64>,
    /// Largest send buffers: for this rank's shard of a reduced gradient, and for updated weights.
    pub given: [u64; 2],
    /// Tensor bytes received per micro-batch and per update.
    pub wire: [u64; 2],
    /// Parameters of the model, and trainable ones.
    pub parameters: (u64, u64),
}

/// Allocator overhead on top of `engine` bytes. On CUDA an assumed 2% (unconfirmed on GPUs); on the CPU
/// [`reuse`] plus small blocks.
pub fn overhead(machine: Machine, engine: u64) -> u64 {
    if machine.cuda { engine / 50 } else { reuse(engine) + SMALL_BLOCKS.0 + engine / SMALL_BLOCKS.1 }
}

/// Freed bytes the CPU allocator may keep for reuse at a peak of `engine` bytes.
pub fn reuse(engine: u64) -> u64 {
    engine / KEPT_PART
}

/// World sizes by kind of parallelism.
struct Ranks {
    data: u64,
    zero: u8,
    tensor: u64,
    expert: u64,
    pipeline: u64,
    layers: u64,
}

impl Ranks {
    fn of(r: &Recipe, layers: usize) -> Self {
        let p = &r.parallel;
        Self {
            data: p.data as u64,
            zero: p.zero,
            tensor: p.tensor as u64,
            expert: p.expert as u64,
            pipeline: p.pipeline as u64,
            layers: layers as u64,
        }
    }

    /// This rank's share of a module's `bytes`, sharded over data ranks from ZeRO stage `stage` on. With
    /// a pipeline this is the largest stage: its share of the layers, plus both ends of the model.
    fn share(&self, m: &Module, bytes: u64, stage: u8) -> u64 {
        let mut by = if self.zero >= stage { self.data } else { 1 };
        if m.group != Group::Norms {
            by *= self.tensor;
        }
        if m.expert.is_some() {
            by *= self.expert;
        }
        let mine = bytes.div_ceil(by);
        if self.pipeline > 1 && m.layer.is_some() {
            return mine * self.layers.div_ceil(self.pipeline) / self.layers.max(1);
        }
        mine
    }
}

fn component(g: Group) -> Component {
    match g {
        Group::Attention => Component::Attention,
        Group::Mlp => Component::Mlp,
        Group::Experts => Component::Experts,
        Group::Router => Component::Router,
        Group::Norms => Component::Norms,
        Group::Embedding => Component::Embedding,
        Group::Head => Component::Head,
    }
}

/// Bytes of NF4 codes for `n` values of one tensor, count of 8-bit scales, count of f32 scales of those.
fn nf4_values(n: u64) -> [u64; 3] {
    let blocks = n.div_ceil(NF4_BLOCK);
    [n.div_ceil(2), blocks, blocks.div_ceil(NF4_NESTED)]
}

/// Bytes of NF4 codes and of all scales for `n` values of one tensor.
pub fn nf4(n: u64) -> (u64, u64) {
    let [codes, blocks, groups] = nf4_values(n);
    (codes, blocks + 4 * groups)
}

/// Gradient projection of a recipe's optimizer.
pub(super) fn projection(o: &Optimizer) -> Projection {
    Projection { rank: if o.name.projects() { o.galore_rank } else { 0 }, eight_bit: o.name.eight_bit() }
}

/// Bytes of a tensor's optimizer states, alignment gaps excluded.
pub(super) fn states(o: &Optimizer, t: &TrainedPart<'_>, layers: usize) -> u64 {
    states_of(o, t, layers, t.elements() as u64)
}

/// Like [`states`], with the tensor padded to `values`.
fn states_of(o: &Optimizer, t: &TrainedPart<'_>, layers: usize, values: u64) -> u64 {
    let how = projection(o);
    match t.shape() {
        &[a, b] if how.takes(t.part, t.shape(), t.module.unit(layers), layers + 2) => how.bytes((a, b)),
        _ if o.name.eight_bit() && is_large(t.elements()) => moments::bytes(values as usize),
        _ => 8 * values,
    }
}

/// For each trained tensor, whether it has no f32 master weights and is rounded stochastically instead.
pub(super) fn rounded(r: &Recipe, s: &Selection, machine: Machine, trained: &[TrainedPart<'_>]) -> Vec<bool> {
    let unit = |t: &TrainedPart<'_>| t.module.unit(s.layers);
    let wide = wide_units(trained.iter().map(|t| (unit(t), t.part)));
    let keeps = r.optimizer.keeps_master(machine.computes_in_f32());
    let full = |t: &TrainedPart<'_>| t.part.method() == Method::Full;
    trained.iter().map(|t| !keeps && full(t) && !wide.contains(&unit(t))).collect()
}

impl Statics {
    /// Computes the static bytes of a rank; `parameters` is the model's total.
    pub fn new(r: &Recipe, s: &Selection, machine: Machine, parameters: u64) -> Self {
        let width = machine.width;
        let ranks = Ranks::of(r, s.layers);
        let offload = r.memory.offloads(Offload::Optimizer);
        let weights_offload = r.memory.offloads(Offload::Params);
        // on the CPU the device is the host
        let states_elsewhere = offload && machine.cuda;
        let weights_elsewhere = weights_offload && machine.cuda;
        // the weights double as master weights
        let one_copy = machine.computes_in_f32() && offload == weights_offload;
        let trained = s.parts();
        let units = s.layers + 2;
        let mut out = Self::default();

        // frozen weights, in load order
        let mut unit_bytes = vec![0u64; units];
        // values in each unit's buffers: u8, compute dtype, f32, stored half precision
        let mut frozen = vec![[0u64; 4]; units];
        let (mut loaded, mut high, mut initial_factors) = (0u64, 0u64, 0u64);
        let split = ranks.zero >= 3 && ranks.data > 1;
        let apart = r.weights_come_and_go();
        // gathered or offloaded weights start at aligned offsets in their buffers
        let placed = |values: u64| if apart { values.next_multiple_of(ALIGN as u64) } else { values };
        // for gathered or offloaded weights: largest piece of a tensor read at once; units needed in full for
        // DoRA norms
        let (mut piece, mut normed) = (0u64, vec![false; units]);
        for (m, choice) in &s.modules {
            let n = m.weight_values() as u64;
            let bias = m.bias().unwrap_or(0) as u64;
            if s.tied && m.group == Group::Head {
                continue;
            }
            if machine.cuda && m.expert.is_some() {
                // entry in the layer's expert table
                out.device.add(component(m.group), table::BYTES as u64);
            }
            normed[m.unit(s.layers)] |= matches!(choice, Choice::Lora { spec, .. } if spec.dora);
            piece = piece.max((4 + width) * n.div_ceil(if split { ranks.data } else { 1 }));
            if matches!(choice, Choice::Full { .. }) {
                // f32 value on the way into the buffer, and its rounded copy
                let value = if states_elsewhere { 0 } else { 4 * n };
                let rounded = if machine.computes_in_f32() && !states_elsewhere { 0 } else { width * n };
                high = high.max(loaded + value + rounded);
                continue;
            }
            let quantized = is_quantized(m, choice, r.model.quantize);
            let dora = matches!(choice, Choice::Lora { spec, .. } if spec.dora);
            let rows = if dora { 4 * placed(m.rows() as u64) } else { 0 };
            let buffers = &mut frozen[m.unit(s.layers)];
            buffers[2] += rows / 4;
            let room = room(m, choice, machine.cuda && r.has_rooms());
            let begins = matches!(choice, Choice::Lora { .. }) && initial::begins(r, m);
            let stays = !begins && stays_stored(m, choice, machine);
            let (bytes, constants) = match (quantized, m.weight_shape().as_slice()) {
                (true, _) => {
                    let [codes, blocks, groups] = nf4_values(n).map(placed);
                    buffers[0] += codes + blocks;
                    buffers[2] += groups;
                    (codes, blocks + 4 * groups)
                }
                (false, &[o, i]) if room > 0 => {
                    let (rows, cols) = Padded::shape((o, i), room);
                    let bytes = width * (rows * cols) as u64;
                    // copied into storage with room for the adapter
                    high = high.max(loaded + bytes + width * n);
                    (bytes, 0)
                }
                _ if stays => {
                    buffers[3] += placed(n);
                    (machine.frozen() * placed(n), 0)
                }
                _ => {
                    buffers[1] += placed(n);
                    (width * placed(n), 0)
                }
            };
            buffers[1] += placed(bias);
            // initial LoRA factors (e.g. PiSSA) are computed on the host from the f32 weight
            let made = match (choice, m.weight_shape().as_slice()) {
                (Choice::Lora { spec, .. }, &[o, i]) if begins => {
                    let factors = 4 * (spec.rank * (o + i)) as u64;
                    initial_factors += factors;
                    let work = (4 * n + decompose::bytes((o, i), spec.rank)).max(8 * n);
                    if !machine.cuda {
                        high = high.max(loaded + factors + work);
                        loaded += factors;
                    }
                    factors
                }
                _ => 0,
            };
            let made_in_f32 = !machine.computes_in_f32() && r.model.weights == Weights::Random;
            if (made_in_f32 || quantized || made > 0) && !machine.cuda {
                let copies = if made > 0 { 8 * n } else { 4 * n };
                high = high.max(loaded + copies + bytes);
            }
            let bytes = bytes + width * placed(bias) + rows;
            unit_bytes[m.unit(s.layers)] += bytes + constants;
            out.device.add(component(m.group), ranks.share(m, bytes, 3));
            out.device.add(Component::QuantConstants, ranks.share(m, constants, 3));
            loaded += bytes + constants;
        }
        match (initial_factors, machine.cuda) {
            (0, _) => {}
            (bytes, true) => out.host.push(("initial_factors", bytes)),
            (bytes, false) => out.device.add(Component::Adapters, bytes),
        }
        // on the CPU all threads read and convert files in pieces
        let pieces = |largest: u64| if machine.cuda { 0 } else { machine.threads * READ_PIECE.min(largest) };
        let read = match r.model.weights {
            Weights::Load => pieces(READ_PIECE),
            Weights::Random => 0,
        };
        out.load_transient = (high + read).saturating_sub(loaded);

        // trained tensors: buffers by unit, alignment gaps included
        let mut lens = vec![0u64; units];
        let mut sums = [0u64; 5];
        let unit_of = |m: &Module| m.unit(s.layers);
        let wide = wide_units(trained.iter().map(|t| (unit_of(t.module), t.part)));
        // values with master weights, by unit
        let mut kept = vec![0u64; units];
        for (t, rounded) in trained.iter().zip(rounded(r, s, machine, &trained)) {
            let (m, unit) = (t.module, t.module.unit(s.layers));
            let n = t.elements().next_multiple_of(ALIGN) as u64;
            lens[unit] += n;
            kept[unit] += if rounded { 0 } else { n };
            let adapter = t.part.method() == Method::Lora;
            sums[usize::from(adapter)] += ranks.share(m, width * n, 3);
            sums[2] += ranks.share(m, 4 * n, 2);
            let from = if wide.contains(&unit) { 3 } else { 1 };
            sums[3] += if one_copy || rounded { 0 } else { ranks.share(m, 4 * n, from) };
            // alignment gaps have moments too
            let states = states_of(&r.optimizer, t, s.layers, n);
            if let (&[o, i], how) = (t.shape(), projection(&r.optimizer))
                && how.takes(t.part, t.shape(), unit, units)
            {
                // see `optim/projected.rs`: first the gradient and its decomposition on the host; then
                // the projected gradient and update, and a copy of the matrix for weight decay or
                // rounding
                let (n, low) = ((o * i) as u64, 8 * (how.rank * o.max(i)) as u64);
                let look = if machine.cuda { 0 } else { 4 * n + decompose::bytes((o, i), how.rank) };
                let copy = if r.optimizer.weight_decay != 0.0 { 4 * n } else { 0 };
                let after = match (machine.computes_in_f32(), rounded) {
                    (true, _) => copy,
                    (false, false) => copy.max(width * n),
                    // f32 copy of the weights
                    (false, true) => 4 * n + copy,
                };
                out.projecting = out.projecting.max(look).max(low + after);
            }
            sums[4] += ranks.share(m, states, 1);
            unit_bytes[unit] += width * n;
        }
        let [full, adapters, mut gradients, master, states] = sums;
        let longest = lens.iter().copied().max().unwrap_or(0);
        let longest_kept = kept.iter().copied().max().unwrap_or(0);
        if r.optimizer.in_backward {
            gradients = 0;
        }
        out.device.add(Component::Trained, full);
        out.device.add(Component::Adapters, adapters);
        out.device.add(Component::Gradients, gradients);
        // the optimizer works in pieces
        let crosses = offload || weights_offload;
        out.largest_group = if crosses { 0 } else { longest_kept.min(PIECE as u64) };

        let mut staging_on_host = 0;
        if crosses {
            // see `optim/offload.rs`: staging for new values; with CUDA two host pieces in each direction
            let own = |longest: u64| longest.div_ceil(if ranks.zero >= 1 { ranks.data } else { 1 });
            let piece = |longest: u64, most: usize| width * own(longest).min(most as u64);
            let bare = lens.iter().zip(&kept).map(|(all, kept)| all - kept).max().unwrap_or(0);
            // on the CPU weights without master weights are updated in place
            let new = match (one_copy, machine.cuda) {
                (true, _) => 0,
                (_, true) => piece(longest, PIECE),
                _ => piece(longest_kept, PIECE),
            };
            [out.staging, staging_on_host] = match (machine.cuda, offload) {
                (true, true) => {
                    let there = piece(bare, STAGED);
                    [there, 2 * (4 + width) * own(longest).min(STAGED as u64) + there]
                }
                _ => [new; 2],
            };
        }
        if states_elsewhere {
            out.host.push(("offloaded_optimizer", master + states));
            out.host.push(("offload_staging", staging_on_host));
        } else {
            out.device.add(Component::Master, master);
            out.device.add(Component::Moments, states);
        }
        // for a buffer of `values`: rank 0's shard, and bytes received from the other ranks
        let own = |values: u64| {
            let shard = Shard { rank: 0, ranks: ranks.data as usize, stage: ranks.zero };
            shard.part(values as usize).len() as u64
        };
        let comes = |values: u64, size: u64| size * (values - own(values));
        if split {
            let whole = |u: usize| {
                let [bytes, compute, f32s, halves] = frozen[u];
                let apart = match machine.computes_in_f32() {
                    true => comes(compute + f32s, 4),
                    false => comes(compute, width) + comes(f32s, 4),
                };
                let wide =
                    if machine.computes_in_f32() || !wide.contains(&u) { 0 } else { comes(lens[u], 4) };
                comes(bytes, 1) + comes(halves, 2) + apart + comes(lens[u], width) + wide
            };
            out.comes = (0..units).map(whole).collect();
        }
        if apart {
            let wide =
                |u: &usize| if machine.computes_in_f32() || !wide.contains(u) { 0 } else { 4 * lens[*u] };
            let flight = |u: usize| (unit_bytes[u] + wide(&u)).div_ceil(ranks.tensor);
            let normed = (0..units).filter(|u| normed[*u]).map(flight).max().unwrap_or(0);
            out.load_transient = (piece + read).max(normed);
            out.flight = (0..units).map(flight).collect();
        }
        if weights_elsewhere {
            let weights = out.weights();
            let mut rest = Bytes::default();
            out.device.iter().filter(|(c, _)| !is_weight(*c)).for_each(|(c, b)| rest.add(c, b));
            out.device = rest;
            out.host.push(("offloaded_weights", weights));
        }
        if ranks.data > 1 || r.optimizer.in_backward {
            out.live = lens.iter().map(|n| 4 * n).collect();
            out.tied = s.tied_in_full() || s.tied_in_rows();
        }
        out.updates = r.optimizer.in_backward;
        out.live_as = if ranks.data > 1 { Component::Communication } else { Component::Gradients };
        if ranks.data > 1 {
            let part = longest.div_ceil(ranks.data);
            let [sums, weights] = [ranks.zero < 2, (1..3).contains(&ranks.zero)].map(u64::from);
            // without gradient buffers the reduced shard is an extra copy
            let sums_here = if r.optimizer.in_backward { 1 } else { sums };
            out.given = [4 * part * sums_here, width * part * weights];
            // see `train/reduce.rs` and `optim`: reduce-scatter, then all-gather
            let summed: u64 = lens.iter().map(|n| 4 * own(*n) * (ranks.data - 1)).sum();
            let taken = |size: u64| lens.iter().map(|n| comes(*n, size)).sum::<u64>();
            let wide: u64 = wide.iter().filter(|_| !one_copy).map(|u| comes(lens[*u], 4)).sum();
            out.wire = [summed + taken(4) * sums, (taken(width) + wide) * weights];
        }
        if machine.cuda && ranks.data > 1 {
            // see `ranks/nccl.rs`: shards received from the other ranks
            out.summed = lens.iter().map(|n| 4 * own(*n) * (ranks.data - 1)).collect();
            out.parts = lens.iter().map(|n| if ranks.zero < 2 { 4 * own(*n) } else { 0 }).collect();
        }
        let nccl = if r.parallel.ranks() > 1 { NCCL } else { 0 };
        let context = if machine.cuda { CUDA_CONTEXT + nccl } else { gemm::slabs(machine.threads) };
        out.device.add(Component::Context, context);

        let count: u64 = trained.iter().map(|t| t.elements() as u64).sum();
        let largest = trained.iter().map(|t| t.elements() as u64).max().unwrap_or(0);
        let lacks = r.lora.init.decomposition().is_some_and(Decomposition::changes_base);
        out.parameters = (parameters, count);
        // one tensor at a time: read back, then rounded on the host
        let value = if states_elsewhere && !lacks { 0 } else { 4 * largest * if lacks { 2 } else { 1 } };
        let rounded = if (machine.computes_in_f32() || machine.cuda) && !states_elsewhere {
            0
        } else {
            width * largest
        };
        // a model is stored in the compute dtype, an adapter in f32; rounding starts after the whole
        // tensor is read
        let stored = if s.everything_full() { width } else { 4 };
        let read = pieces(stored * largest.min(READ_PIECE / 4));
        // sharded master weights are read back from the checkpoint; an adapter's all at once
        let parts = ranks.zero >= 3 || (ranks.zero >= 1 && !one_copy);
        let together = ranks.data > 1 && parts && !s.everything_full();
        let values = if together { 4 * count + read } else { 0 };
        // read into host memory
        let [here, there] = if machine.cuda { [0, values] } else { [values, 0] };
        // an adapter of doubled LoRA rank is built completely before writing
        let here = if lacks && !s.everything_full() { here.max(8 * count + read) } else { here };
        out.save_transient = ((value + rounded.max(read)).max(here) + 4 * PROBE.0 * vocab(s))
            .max(PROBE.0 * PROBE.1 * vocab(s));
        out.host.push(("process", PROCESS));
        if r.parallel.local() == 1 && r.parallel.ranks() > 1 && !machine.cuda {
            // between processes: send and receive buffers of one round
            out.host.push(("communication_buffers", 2 * 4 * ROUND as u64));
        }
        if machine.cuda {
            out.host.push(("cuda_libraries", CUDA_HOST));
        }
        let written = if machine.cuda && !offload { 4 * largest } else { WRITER };
        out.host.push(("checkpoint_writer", written));
        let read_back = if states_elsewhere { there.max(4 * largest) } else { there };
        if read_back > 0 {
            out.host.push(("reading_weights", read_back));
        }
        out
    }
}

impl Statics {
    /// Device bytes of weights and adapters.
    pub fn weights(&self) -> u64 {
        self.device.iter().filter(|(c, _)| is_weight(*c)).map(|(_, b)| b).sum()
    }

    /// Live gradient bytes of one micro-batch during a unit's backward visit, with the embedding's if
    /// tied.
    pub fn live_at(&self, unit: usize) -> u64 {
        self.own_live(unit) + if self.tied && unit > 0 { self.own_live(0) } else { 0 }
    }

    /// Gradient bytes of the unit alone, live from the first gradient on.
    pub fn own_live(&self, unit: usize) -> u64 {
        self.live.get(unit).copied().unwrap_or(0)
    }

    /// Bytes received while a unit's gradients are reduced.
    fn summed_at(&self, unit: usize) -> u64 {
        self.summed.get(unit).copied().unwrap_or(0)
    }

    /// Asynchronous reductions during a unit's backward visit: gradients and received shards of the
    /// previously visited unit, and this rank's shards of the previous two units.
    pub fn on_its_way(&self, unit: usize) -> u64 {
        if self.updates || self.summed.is_empty() {
            return 0;
        }
        let before: Vec<usize> = (unit + 1..self.live.len()).filter(|u| self.live[*u] > 0).take(2).collect();
        let parts: u64 = before.iter().map(|u| self.parts[*u]).sum();
        before.first().map_or(0, |u| self.live[*u] + self.summed_at(*u)) + parts
    }

    /// Send and receive buffers of the reduction of a unit's gradients.
    pub fn summing(&self, unit: usize) -> u64 {
        let own = if self.updates { None } else { self.parts.get(unit).copied() };
        own.unwrap_or(self.given[0]) + self.summed_at(unit)
    }

    /// Bytes of `units` while gathered.
    pub fn gathered(&self, units: impl IntoIterator<Item = usize>) -> u64 {
        units.into_iter().filter_map(|u| self.flight.get(u)).sum()
    }
}

fn vocab(s: &Selection) -> u64 {
    let head = s.modules.iter().find(|(m, _)| m.group == Group::Head);
    head.map_or(0, |(m, _)| m.weight_shape()[0] as u64)
}

fn is_weight(c: Component) -> bool {
    use Component::*;
    matches!(
        c,
        Embedding | Attention | Mlp | Experts | Router | Norms | Head | QuantConstants | Trained | Adapters
    )
}
