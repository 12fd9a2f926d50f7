//! AdamW and GaLore over flat buffers.

use super::offload::{self, PIECE, STAGED};
use super::projected::GaLore;
use super::update::Update;
use crate::params::FlatParam;
use crate::params::Params;
use crate::params::buffers::LocalShard;
use crate::ranks::{self, Comm};
use candle_core::Result;
use ft_kernels::optimizer::AdamW;
use ft_recipe::{Decay, OptimizerName};

/// Learning rate of an update as a function of the peak rate of a parameter group (see `Schedule::at`).
pub type Rate<'a> = &'a dyn Fn(f64) -> f64;

/// Range of a flat buffer with one learning rate and one weight decay.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ParamGroup {
    flat: usize,
    start: usize,
    len: usize,
    /// Peak learning rate before `lr_scale`.
    peak: f64,
    lr_scale: f64,
    decays: bool,
}

/// AdamW or GaLore over the trained tensors of a model.
#[derive(Debug)]
pub struct Optimizer {
    pub(super) groups: Vec<ParamGroup>,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
    /// Maximum number of values per transfer with host offload.
    pub(super) piece: usize,
    staged: offload::Staged,
    /// `None` without gradient projection.
    galore: Option<GaLore>,
    /// Adds eps to the square root of the second moment before bias correction, as GaLore's reference code
    /// does.
    eps_first: bool,
}

impl Optimizer {
    /// Creates the optimizer of a recipe for the given parameters.
    pub fn new(params: &Params, o: &ft_recipe::Optimizer) -> Self {
        let mut groups: Vec<ParamGroup> = Vec::new();
        let mut placed: Vec<_> = params.tensors.iter().zip(&params.slots).collect();
        placed.sort_by_key(|(_, s)| (s.flat, s.offset));
        for (t, s) in placed {
            let decays = o.weight_decay != 0.0 && (o.decay == Decay::All || t.matrix);
            let peak = o.peak_lr(t.part.method());
            let factor = o.factor(t.lr_scale, t.plus);
            let end = s.range().end;
            match groups.last_mut() {
                Some(l) if (l.flat, l.peak, l.lr_scale, l.decays) == (s.flat, peak, factor, decays) => {
                    l.len = end - l.start;
                }
                _ => groups.push(ParamGroup {
                    flat: s.flat,
                    start: s.offset,
                    len: s.range().len(),
                    peak,
                    lr_scale: factor,
                    decays,
                }),
            }
        }
        let on_cpu = params.flats.iter().flatten().all(|u| u.compute.whole.device().is_cpu());
        let piece = if on_cpu { PIECE } else { STAGED };
        let staged = offload::Staged::default();
        let galore = o.name.projects().then_some(GaLore { gap: o.galore_gap as u64, scale: o.galore_scale });
        let eps_first = o.name == OptimizerName::Galore;
        let (betas, eps, weight_decay) = (o.betas, o.eps, o.weight_decay);
        Self { groups, betas, eps, weight_decay, piece, staged, galore, eps_first }
    }

    /// Applies update number `t` (from 1) with learning rates `lr` and gradients multiplied by `grad_scale`.
    /// Afterwards the compute buffers of every rank are up to date (sharded ones after the next gather).
    ///
    /// # Errors
    /// A lost rank; a failed tensor operation.
    pub fn step(
        &self,
        params: &Params,
        comm: &dyn Comm,
        t: u64,
        lr: Rate<'_>,
        grad_scale: f64,
    ) -> ft_base::Result<()> {
        let (args, mut mine) = (UpdateArgs { t, lr, grad_scale }, Vec::new());
        for (number, flat) in params.flats.iter().enumerate() {
            let Some(flat) = flat else { continue };
            let Some(grads) = &flat.grads else {
                return Err(candle_core::Error::Msg(format!("unit {} has no gradients", flat.unit)).into());
            };
            self.project((number, flat), params, grads, &args)?;
            mine.extend(self.updates((number, flat), grads, &args)?);
        }
        self.run(params, &mine)?;
        for number in 0..params.flats.len() {
            gather(params, number, comm)?;
        }
        Ok(())
    }

    /// Updates one buffer like [`Optimizer::step`], with gradients from `grads` for at least this rank's range.
    pub fn step_flat(
        &self,
        params: &Params,
        comm: &dyn Comm,
        number: usize,
        grads: &LocalShard,
        args: &UpdateArgs<'_>,
    ) -> ft_base::Result<()> {
        if let Some(Some(flat)) = params.flats.get(number) {
            self.project((number, flat), params, grads, args)?;
            self.run(params, &self.updates((number, flat), grads, args)?)?;
        }
        gather(params, number, comm)
    }

    /// The updates of this rank's shard of a buffer.
    fn updates<'a>(
        &self,
        (number, flat): (usize, &'a FlatParam),
        grads: &'a LocalShard,
        args: &UpdateArgs<'_>,
    ) -> Result<Vec<Update<'a>>> {
        let Some(moments) = &flat.moments else { candle_core::bail!("unit {} has no moments", flat.unit) };
        let mut mine = Vec::new();
        for s in self.groups.iter().filter(|s| s.flat == number) {
            let parts = moments.parts(&(s.start..s.start + s.len));
            let parts = parts.iter().flat_map(|part| flat.by_kept(part));
            mine.extend(parts.map(|range| Update { flat, grads, range, k: self.numbers(s, args) }));
        }
        mine.retain(|u| !u.range.is_empty());
        Ok(mine)
    }

    fn numbers(&self, s: &ParamGroup, args: &UpdateArgs<'_>) -> AdamW {
        // m / (sqrt(v) + eps) * sqrt(c) = m / (sqrt(v / c) + eps / sqrt(c)), with the bias correction c
        let root = (1.0 - self.betas[1].powf(args.t as f64)).sqrt();
        AdamW {
            lr: (args.lr)(s.peak) * s.lr_scale,
            betas: self.betas,
            eps: if self.eps_first { self.eps / root } else { self.eps },
            weight_decay: if s.decays { self.weight_decay } else { 0.0 },
            t: args.t,
            grad_scale: args.grad_scale,
        }
    }

    /// Updates the matrices of a buffer with projected gradients.
    fn project(
        &self,
        (number, flat): (usize, &FlatParam),
        params: &Params,
        grads: &LocalShard,
        args: &UpdateArgs<'_>,
    ) -> Result<()> {
        let Some(galore) = &self.galore else { return Ok(()) };
        for p in &flat.projected {
            let start = params.slots[p.index].offset;
            let of = |g: &&ParamGroup| g.flat == number && (g.start..g.start + g.len).contains(&start);
            let Some(group) = self.groups.iter().find(of) else {
                candle_core::bail!("{} has no learning rate", params.tensors[p.index].name);
            };
            galore.step(params, (flat, p), grads, &self.numbers(group, args))?;
        }
        Ok(())
    }

    fn run(&self, params: &Params, updates: &[Update<'_>]) -> Result<()> {
        if !(params.offloaded || params.weights_offloaded) {
            return updates.iter().try_for_each(Update::on_device);
        }
        let longest = self.groups.iter().map(|g| g.len).max().unwrap_or(0);
        offload::step(updates, self.piece, (longest, params.pin), &self.staged)
    }
}

/// Number and factors of an update.
pub struct UpdateArgs<'a> {
    /// Update number, from 1.
    pub t: u64,
    /// Learning rates.
    pub lr: Rate<'a>,
    /// Factor on gradients.
    pub grad_scale: f64,
}

/// All-gathers the updated weights of a buffer, if ranks update shards.
fn gather(params: &Params, number: usize, comm: &dyn Comm) -> ft_base::Result<()> {
    let Some(Some(flat)) = params.flats.get(number) else { return Ok(()) };
    let shard = flat.shard;
    if shard.stage == 0 || shard.ranks == 1 || shard.is_split() {
        return Ok(());
    }
    let (at, parts) =
        (ranks::CollectiveId::unit("the gathering of updated weights", flat.unit), shard.parts(flat.len));
    let group = params.split.group(comm, flat.kind);
    for all in flat.shared() {
        // a copy, because a peer may not read a buffer being written
        let mine = all.narrow(0, flat.part.start, flat.part.len())?;
        group.all_gather(at, mine.real()?.force_contiguous()?.into(), &parts, all)?.wait()?;
    }
    Ok(())
}
