//! Bytes held by one rank for the whole run: weights and optimizer states, on device and host.

use super::frozen::Frozen;
use super::setup::Setup;
use super::shares::cut;
use super::trained::TrainedBytes;
use crate::memory::overhead::{CUDA_CONTEXT, CUDA_HOST, NCCL, PROCESS, WRITER};
use crate::memory::{Bytes, Component};
use ft_engine::adapters::{Part, Selection, TrainedPart};
use ft_engine::model::Units;
use ft_engine::model::modules::Group;
use ft_engine::optim::{PIECE, STAGED};
use ft_engine::ranks::{Axis, ROUND};
use ft_kernels::{Machine, gemm};
use ft_recipe::{Decomposition, Offload, Quantize, Recipe, Weights};

/// Bytes read at a time by a thread converting a file (`files/convert.rs`).
const READ_PIECE: u64 = 4 << 20;
/// Logit rows compared by the check of the result, and bytes per logit.
const CHECKED_ROWS: u64 = ft_data::PROBE_TOKENS as u64;
const CHECKED_LOGIT: u64 = 40;

/// Bytes of a rank independent of the micro-batch.
#[derive(Clone, Debug, Default)]
pub struct ModelStates {
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
    /// Gradient bytes of one micro-batch by unit and flat buffer, with data parallelism or updates in the backward
    /// pass. They live from the unit's backward visit to the reduction, or to the update.
    live: Vec<Vec<u64>>,
    /// CUDA with data parallelism: bytes received by reductions of gradients, by unit.
    pub summed: Vec<u64>,
    /// CUDA with data parallelism below ZeRO stage 2: bytes of this rank's shards of reduced gradients, by unit, sent
    /// to all ranks.
    pub shards: Vec<u64>,
    /// Gradient bytes of a table shared by the first and the last stage: they live from the first gradient to the end
    /// of a step, in `live_as`.
    pub ends: u64,
    /// Component of `live`.
    pub live_as: Component,
    /// Whether units are updated in the backward pass.
    pub updates: bool,
    /// Whether head and embedding share one gradient buffer.
    pub tied: bool,
    /// Weights gathered per visit (ZeRO-3) or offloaded: bytes by unit, fetched one visit ahead.
    pub flight: Vec<u64>,
    /// Largest send buffers: for this rank's shard of a reduced gradient, and for updated weights.
    pub sent: [u64; 2],
    /// Transfers by flat buffer.
    pub flows: Vec<Flow>,
    /// Parameters of the model, and trainable ones.
    pub parameters: (u64, u64),
}

/// Transfers of a flat buffer among the ranks with copies: bytes received by a rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flow {
    pub unit: usize,
    /// The ranks.
    pub axis: Axis,
    /// Weights gathered for a visit.
    pub gathered: u64,
    /// Gradients of a micro-batch: parts to add, and the other ranks' sums.
    pub summed: [u64; 2],
    /// Gradients and weights of an update.
    pub updated: u64,
    /// Values that this rank updates.
    pub values: u64,
}

impl ModelStates {
    /// Computes the static bytes of a rank of the stage with these units; `parameters` is the model's total.
    pub fn new(
        recipe: &Recipe,
        selection: &Selection,
        (machine, quantize): (Machine, Quantize),
        (parameters, units): (u64, Units),
    ) -> Self {
        let whole = Setup::new(recipe, selection, (machine, quantize), units);
        let own = (whole.ranks.tensor > 1).then(|| cut(selection, recipe.parallel.tensor));
        let c = Setup::new(recipe, own.as_ref().unwrap_or(selection), (machine, quantize), units);
        let frozen = Frozen::new(&c);
        let trained = TrainedBytes::new(&c);
        let stages = recipe.parallel.pipeline > 1;
        let count = match stages {
            true => selection.parts().iter().map(|t| t.elements() as u64).sum(),
            false => whole.trained.iter().map(|(t, _)| t.elements() as u64).sum(),
        };
        let mut out =
            Self { parameters: (parameters, count), projecting: trained.projecting, ..Self::default() };
        let flow = |flat| Flow { unit: flat % c.units(), axis: c.axis(flat), ..Flow::default() };
        out.flows = (0..c.flats()).map(flow).collect();
        out.weights_and_gradients(&c, &frozen, &trained);
        out.optimizer(&c, &trained);
        out.gathered_weights(&c, &frozen, &trained);
        out.reductions(&c, &trained);
        let nccl = if recipe.parallel.ranks() > 1 { NCCL } else { 0 };
        let context = if machine.cuda { CUDA_CONTEXT + nccl } else { gemm::slabs(machine.threads) };
        out.device.add(Component::Context, context);
        out.process(&c);
        out.saving(&whole, count);
        out
    }

    fn weights_and_gradients(&mut self, c: &Setup<'_>, frozen: &Frozen, trained: &TrainedBytes) {
        self.device = frozen.device.clone();
        match (frozen.initial_factors, c.machine.cuda) {
            (0, _) => {}
            (bytes, true) => self.host.push(("initial_factors", bytes)),
            (bytes, false) => self.device.add(Component::Adapters, bytes),
        }
        self.load_transient = frozen.load_transient(read_buffers(c));
        self.device.add(Component::Trained, trained.full);
        self.device.add(Component::Adapters, trained.adapters);
        self.device.add(Component::Gradients, trained.gradients);
    }

    /// Master weights and moments, and staging buffers of `optim/offload.rs`.
    fn optimizer(&mut self, c: &Setup<'_>, trained: &TrainedBytes) {
        let longest = |lens: &[u64]| lens.iter().copied().max().unwrap_or(0);
        let crosses = c.offloads(Offload::Optimizer) || c.offloads(Offload::Params);
        // the optimizer works in pieces
        self.largest_group = if crosses { 0 } else { longest(&trained.kept).min(PIECE as u64) };
        let mut staging_on_host = 0;
        if crosses {
            // staging for new values; with CUDA two host pieces in each direction
            let own = |lens: &[u64]| {
                let parts = |flat| if c.ranks.zero >= 1 { c.copies(flat) } else { 1 };
                lens.iter().enumerate().map(|(flat, n)| n.div_ceil(parts(flat))).max().unwrap_or(0)
            };
            let piece = |lens: &[u64], most: usize| c.width() * own(lens).min(most as u64);
            let all = &trained.lens;
            [self.staging, staging_on_host] = if c.states_on_host() {
                let bare: Vec<u64> = all.iter().zip(&trained.kept).map(|(all, kept)| all - kept).collect();
                let there = piece(&bare, STAGED);
                [there, 2 * (4 + c.width()) * own(all).min(STAGED as u64) + there]
            } else {
                // on the CPU weights without master weights are updated in place
                let updated = if c.machine.cuda { all } else { &trained.kept };
                [if c.one_copy() { 0 } else { piece(updated, PIECE) }; 2]
            };
        }
        if c.states_on_host() {
            self.host.push(("offloaded_optimizer", trained.master + trained.moments));
            self.host.push(("offload_staging", staging_on_host));
        } else {
            self.device.add(Component::Master, trained.master);
            self.device.add(Component::Moments, trained.moments);
        }
    }

    /// Weights gathered for a visit, from other ranks or the host.
    fn gathered_weights(&mut self, c: &Setup<'_>, frozen: &Frozen, trained: &TrainedBytes) {
        if c.is_split() {
            let received = |flat: usize| {
                let v = frozen.values[flat];
                let apart = if c.machine.computes_in_f32() {
                    c.received(flat, v.compute + v.f32s, 4)
                } else {
                    c.received(flat, v.compute, c.width()) + c.received(flat, v.f32s, 4)
                };
                let wide = c.received(flat, trained.wide_values(c, flat), 4);
                let bytes = c.received(flat, v.u8s, 1) + c.received(flat, v.halves, 2) + apart;
                let own = if c.is_ends(flat) { 0 } else { c.received(flat, trained.lens[flat], c.width()) };
                bytes + own + wide
            };
            self.flows.iter_mut().enumerate().for_each(|(flat, flow)| flow.gathered = received(flat));
        }
        if c.is_gathered() {
            let flight = |flat: usize| {
                let own = if c.is_ends(flat) && !c.weights_on_host() { 0 } else { trained.lens[flat] };
                let bytes = frozen.flat_bytes[flat] + c.width() * own;
                let all = bytes + 4 * trained.wide_values(c, flat);
                if c.comes(flat) { all } else { 0 }
            };
            self.flight = c.by_unit(flight);
            self.load_transient = frozen.gathered_transient(read_buffers(c), &self.flight);
        }
        if c.weights_on_host() {
            let weights = self.weights();
            let mut rest = Bytes::default();
            self.device.iter().filter(|(c, _)| !is_weight(*c)).for_each(|(c, b)| rest.add(c, b));
            self.device = rest;
            self.host.push(("offloaded_weights", weights));
        }
    }

    /// Gradients of a micro-batch, and their reduction: see `train/step/reduce.rs` and `optim`, reduce-scatter,
    /// then all-gather.
    fn reductions(&mut self, c: &Setup<'_>, trained: &TrainedBytes) {
        let (lens, zero) = (&trained.lens, c.ranks.zero);
        self.updates = c.recipe.optimizer.in_backward;
        for (flat, flow) in self.flows.iter_mut().enumerate() {
            flow.values = c.share(flat, lens[flat], 1);
        }
        if c.ranks.stage > 1 || self.updates {
            let live = |flat: usize| if c.is_ends(flat) { 0 } else { 4 * lens[flat] };
            self.live = (0..c.units()).map(|unit| c.flats_of(unit).map(live).collect()).collect();
            if c.ranks.ends.is_some() {
                self.ends = 4 * lens[0];
            }
            self.tied = c.selection.tied_in_full() || c.selection.tied_in_rows();
        }
        if c.ranks.ends.is_some() {
            let gathered = if zero >= 1 { c.received(0, lens[0], c.width()) } else { 0 };
            let summed = 4 * c.own(0, lens[0]) * (c.copies(0) - 1);
            self.flows[0].updated = summed + c.received(0, lens[0], 4) + gathered;
        }
        if c.ranks.stage == 1 {
            self.live_as = Component::Gradients;
            return;
        }
        self.live_as = Component::Communication;
        let whole = |flat: &usize| !c.is_ends(*flat);
        let part = lens
            .iter()
            .enumerate()
            .filter(|(flat, _)| whole(flat))
            .map(|(flat, n)| n.div_ceil(c.copies(flat)))
            .max()
            .unwrap_or(0);
        let [sums, weights] = [zero < 2, (1..3).contains(&zero)].map(u64::from);
        // without gradient buffers the reduced shard is an extra copy
        let sums_here = if self.updates { 1 } else { sums };
        self.sent = [4 * part * sums_here, c.width() * part * weights];
        // shards received from the other ranks (`ranks/nccl.rs`)
        let summed = |flat: usize| {
            if whole(&flat) { 4 * c.own(flat, lens[flat]) * (c.copies(flat) - 1) } else { 0 }
        };
        for (flat, flow) in self.flows.iter_mut().enumerate().filter(|(flat, _)| whole(flat)) {
            let wide = if trained.wide.contains(&flat) && !c.one_copy() { 4 } else { 0 };
            flow.summed = [summed(flat), sums * c.received(flat, lens[flat], 4)];
            flow.updated = weights * c.received(flat, lens[flat], c.width() + wide);
        }
        if c.machine.cuda {
            self.summed = c.by_unit(summed);
            self.shards =
                c.by_unit(|flat| if zero < 2 && whole(&flat) { 4 * c.own(flat, lens[flat]) } else { 0 });
        }
    }

    /// Host memory of the process besides tensors.
    fn process(&mut self, c: &Setup<'_>) {
        let parallel = &c.recipe.parallel;
        self.host.push(("process", PROCESS));
        if parallel.in_process() == 1 && parallel.ranks() > 1 && !c.machine.cuda {
            // between processes: send and receive buffers of one round
            self.host.push(("communication_buffers", 2 * 4 * ROUND as u64));
        }
        if c.machine.cuda {
            self.host.push(("cuda_libraries", CUDA_HOST));
        }
    }

    /// Buffers for checkpoints, and for the result and its check; `count` values train.
    fn saving(&mut self, c: &Setup<'_>, count: u64) {
        let mut parts = c.selection.parts();
        parts.retain(|t| c.ranks.has(t.module) || c.recipe.parallel.pipeline > 1);
        let largest = parts.iter().map(|t| t.elements() as u64).max().unwrap_or(0);
        let joined = 4 * parts.iter().filter_map(of_all_experts).max().unwrap_or(0);
        let whole_model = c.selection.everything_full();
        let lacks = c.recipe.lora.init.decomposition().is_some_and(Decomposition::changes_base);
        // one tensor at a time: read back, then rounded on the host
        let value = match (c.states_on_host(), lacks) {
            (true, false) => 0,
            (_, true) => 8 * largest,
            (false, false) => 4 * largest,
        };
        // on the host, beside values other than views of the weights
        let [joined, joined_on_host] = if c.machine.cuda { [0, joined] } else { [joined, 0] };
        let in_place = (c.machine.computes_in_f32() || c.machine.cuda) && !c.states_on_host();
        let rounded = if in_place { 0 } else { c.width() * largest };
        // a model is stored in the compute dtype, an adapter in f32; rounding starts after the whole
        // tensor is read
        let stored = if whole_model { c.width() } else { 4 };
        let read = pieces(c, stored * largest.min(READ_PIECE / 4));
        // sharded master weights are read back from the checkpoint; an adapter's all at once
        let sharded = c.ranks.tensor > 1 || c.ranks.zero >= 3 || (c.ranks.zero >= 1 && !c.one_copy());
        let shards = c.ranks.stage > 1 && sharded || c.recipe.parallel.pipeline > 1;
        let together = shards && !whole_model;
        let values = if together { 4 * count + read } else { 0 };
        // read into host memory
        let [here, there] = if c.machine.cuda { [0, values] } else { [values, 0] };
        // an adapter of doubled LoRA rank is built completely before writing
        let here = if lacks && !whole_model { here.max(8 * count + read) } else { here } + joined;
        let logits = CHECKED_ROWS * vocab(c.selection);
        self.save_transient =
            ((value + rounded.max(read)).max(here) + 4 * logits).max(CHECKED_LOGIT * logits);
        let offload = c.offloads(Offload::Optimizer);
        let written = if c.machine.cuda && !offload { 4 * largest } else { WRITER };
        self.host.push(("checkpoint_writer", written));
        let read_back = if c.states_on_host() { there.max(4 * largest) } else { there } + joined_on_host;
        if read_back > 0 {
            self.host.push(("reading_weights", read_back));
        }
    }

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
        self.live.get(unit).map_or(0, |flats| flats.iter().sum())
    }

    /// As [`ModelStates::own_live`], by flat buffer of the unit.
    pub fn own_live_by_flat(&self, unit: usize) -> Vec<u64> {
        self.live.get(unit).cloned().unwrap_or_default()
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
        let before: Vec<usize> =
            (unit + 1..self.live.len()).filter(|u| self.own_live(*u) > 0).take(2).collect();
        let parts: u64 = before.iter().map(|u| self.shards[*u]).sum();
        before.first().map_or(0, |u| self.own_live(*u) + self.summed_at(*u)) + parts
    }

    /// Send and receive buffers of the reduction of a unit's gradients.
    pub fn summing(&self, unit: usize) -> u64 {
        let own = if self.updates { None } else { self.shards.get(unit).copied() };
        own.unwrap_or(self.sent[0]) + self.summed_at(unit)
    }

    /// Bytes of `units` while gathered.
    pub fn gathered(&self, units: impl IntoIterator<Item = usize>) -> u64 {
        units.into_iter().filter_map(|u| self.flight.get(u)).sum()
    }
}

/// Values of the all-experts tensor in an adapter's file, joined from A or B of an expert's linear, if any.
fn of_all_experts(t: &TrainedPart<'_>) -> Option<u64> {
    let slice = t.module.slice()?;
    let values = match (t.part, t.shape()) {
        (Part::A, _) => slice.experts * t.elements(),
        (Part::B, &[_, rank]) => slice.experts * slice.rows * rank,
        _ => return None,
    };
    Some(values as u64)
}

/// Buffers of threads reading and converting files in pieces, on the CPU.
fn pieces(c: &Setup<'_>, largest: u64) -> u64 {
    if c.machine.cuda { 0 } else { c.machine.threads * READ_PIECE.min(largest) }
}

/// Buffers of the readers of the base.
fn read_buffers(c: &Setup<'_>) -> u64 {
    match c.recipe.model.weights {
        Weights::Load => pieces(c, READ_PIECE),
        Weights::Random => 0,
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
