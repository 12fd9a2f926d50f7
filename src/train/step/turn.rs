//! A turn of the ranks: input of the model, and signals.

use crate::train::distill;
use candle_core::Device;
use ft_data::{Micro, Segments, segments};
use ft_engine::model::batch::{Distillation, HostBatch, MicroBatchGroup};
use ft_engine::model::context_parallel::ContextParallel;
use ft_engine::model::sequence_parallel::{self, SequenceParallel};
use ft_engine::model::stage_boundary::Rows;
use ft_engine::model::{Batch, Config};
use ft_engine::ranks::{Axis, CollectiveId, Comm, Group, Mesh};
use ft_recipe::Parallel;
use std::sync::Arc;

/// All ranks of a run, on their mesh.
#[derive(Clone, Copy)]
pub struct Ranks<'a> {
    pub comm: &'a dyn Comm,
    mesh: Mesh,
}

impl<'a> Ranks<'a> {
    /// Lays the ranks out as a recipe says; a single rank is alone.
    pub fn of(comm: &'a dyn Comm, p: &Parallel) -> Self {
        Self { comm, mesh: if comm.world() == 1 { Mesh::ONE } else { Mesh::of(p) } }
    }

    /// Number of micro-batches of a turn.
    pub fn data_parallel_size(&self) -> usize {
        self.mesh.data
    }

    /// Number of pipeline stages.
    pub fn stages(&self) -> usize {
        self.mesh.pipeline
    }

    /// Number of ranks of a stage.
    pub fn ranks_per_stage(&self) -> usize {
        self.mesh.ranks() / self.mesh.pipeline.max(1)
    }

    /// Pipeline stage of this rank.
    pub fn stage(&self) -> usize {
        self.mesh.coordinates(self.comm.rank()).pipeline
    }

    /// Turns of forward passes between two agreements on signals: in between, stages of a pipeline work on several
    /// micro-batches at a time.
    pub fn turns_between_checks(&self) -> usize {
        if self.stages() > 1 { 4 * self.stages() } else { 1 }
    }

    /// Index of this rank's micro-batch in a turn.
    pub fn data_parallel_rank(&self) -> usize {
        self.mesh.coordinates(self.comm.rank()).data
    }

    /// Ranks with tokens of the same rows, if several.
    pub fn row_groups(&self) -> Option<RowGroups<'a>> {
        let group = |axis| Group::new(self.comm, &self.mesh, axis);
        let (context, tensor) = (self.mesh.context > 1, self.mesh.tensor > 1);
        let all = match (context, tensor) {
            (false, false) => return None,
            (true, false) => group(Axis::Context),
            (false, true) => group(Axis::Tensor),
            (true, true) => group(Axis::Rows),
        };
        let (context, tensor) = (context.then(|| group(Axis::Context)), tensor.then(|| group(Axis::Tensor)));
        Some(RowGroups { all, context, tensor })
    }

    /// Whether this rank has the layers of its stage for documents of the first rank.
    pub fn reads(&self) -> bool {
        let place = self.mesh.coordinates(self.comm.rank());
        (place.data, place.context, place.tensor) == (0, 0, 0)
    }

    /// Whether this rank reports the losses of its micro-batch. Of the ranks with the same one, only the first of the
    /// last stage (with the head) does.
    pub fn reports_loss(&self) -> bool {
        let place = self.mesh.coordinates(self.comm.rank());
        (place.pipeline + 1, place.context, place.tensor) == (self.mesh.pipeline, 0, 0)
    }
}

/// Ranks with tokens of the same rows.
pub struct RowGroups<'a> {
    /// All of them, in order: by segment, then by part.
    all: Group<'a>,
    /// Ranks with other segments, if ranks split the rows.
    context: Option<Group<'a>>,
    /// Ranks with other parts of the same segments, if ranks cut matrices.
    tensor: Option<Group<'a>>,
}

/// A micro-batch on one rank: the whole, or the tokens of the rank. Ranks of a context group have different segments,
/// ranks of a tensor group parts of the same segments.
pub struct LocalMicroBatch<'a> {
    pub whole: Micro,
    part: Option<Part<'a>>,
}

/// Tokens of one of several ranks.
struct Part<'a> {
    /// Tokens and targets of this rank. Without tokens in a tensor group with tokens, this rank computes one row
    /// without targets, to take part in the collectives.
    own: Segments,
    is_idle: bool,
    /// Segments over the context group, if ranks split the rows.
    context_parallel: Option<Arc<ContextParallel<'a>>>,
    /// Ranks with other parts of the same segments, if ranks cut matrices.
    tensor: Option<&'a dyn Comm>,
    /// Ranks with tokens of the micro-batch.
    micro_batch_group: MicroBatchGroup<'a>,
    /// Their targets, in order.
    targets: Vec<Vec<u32>>,
}

impl<'a> Part<'a> {
    fn new(whole: &Micro, ranks: &'a RowGroups<'_>) -> Self {
        let (me, size) = (ranks.all.rank(), ranks.tensor.as_ref().map_or(1, Comm::world));
        let segments = match &ranks.context {
            Some(group) => segments(&whole.docs, group.world()),
            None => vec![std::iter::once(0..whole.ids.len()).filter(|r| !r.is_empty()).collect()],
        };
        let (mut own, mut active, mut targets) = (Segments::default(), Vec::new(), Vec::new());
        let mut is_idle = false;
        for (at, ranges) in segments.iter().enumerate().filter(|(_, ranges)| !ranges.is_empty()) {
            let group = whole.part(ranges);
            for (i, range) in sequence_parallel::parts(group.tokens.len(), size).into_iter().enumerate() {
                let (rank, part) = (at * size + i, group.part(range));
                active.push(rank);
                targets.push(part.targets.clone());
                if rank == me {
                    is_idle = part.tokens.is_empty();
                    own = if is_idle { group.part(0..1).without_targets() } else { part };
                }
            }
        }
        let context_parallel =
            ranks.context.as_ref().map(|group| Arc::new(ContextParallel::new(group, &whole.docs, segments)));
        let tensor = ranks.tensor.as_ref().map(|group| group as &dyn Comm);
        Self {
            own,
            is_idle,
            context_parallel,
            tensor,
            micro_batch_group: MicroBatchGroup { comm: &ranks.all, active },
            targets,
        }
    }

    /// Number of tokens of the tensor group.
    fn attended(&self, whole: &Micro) -> usize {
        let own = |context_parallel: &Arc<ContextParallel<'_>>| {
            context_parallel.own().iter().map(|range| range.len()).sum()
        };
        self.context_parallel.as_ref().map_or(whole.ids.len(), own)
    }

    /// Context of the tokens of a tensor group, if ranks cut matrices: `input` makes a batch.
    fn sequence_parallel(
        &self,
        whole: &Micro,
        input: impl Fn(HostBatch<'_>) -> ft_base::Result<Batch<'a>>,
    ) -> ft_base::Result<Option<SequenceParallel<'a>>> {
        let Some(comm) = self.tensor else { return Ok(None) };
        let part = self
            .context_parallel
            .as_ref()
            .map(|context_parallel| (context_parallel, whole.part(context_parallel.own())));
        let m = part.as_ref().map_or(whole, |(_, part)| &part.micro);
        let (n, untargeted) = (m.ids.len(), HostBatch { targets: &[], weights: &[], ..m.into() });
        let all = match &part {
            None => input(untargeted)?,
            Some((context_parallel, part)) => {
                let batch = input(HostBatch { docs: &[n], ..untargeted })?;
                batch.with_context_parallel(Arc::clone(context_parallel), part.tokens.clone(), Vec::new())
            }
        };
        Ok(Some(SequenceParallel::new(comm, sequence_parallel::parts(n, comm.world()), all.context)))
    }
}

impl<'a> LocalMicroBatch<'a> {
    /// Divides a micro-batch over the ranks with tokens of the same rows, if several.
    pub fn new(whole: Micro, ranks: Option<&'a RowGroups<'_>>) -> Self {
        let part = ranks.map(|ranks| Part::new(&whole, ranks));
        Self { whole, part }
    }

    /// Tokens and targets of this rank.
    pub fn micro(&self) -> &Micro {
        self.part.as_ref().map_or(&self.whole, |part| &part.own.micro)
    }

    /// Numbers of tokens of this rank, and of all ranks with the same segments.
    pub fn rows(&self) -> Rows {
        let own = self.micro().ids.len();
        let attended = self.part.as_ref().and_then(|part| part.tensor.map(|_| part.attended(&self.whole)));
        Rows { own, attended: attended.unwrap_or(own) }
    }

    /// Whether this rank has no tokens, not even an idle row.
    pub fn is_empty(&self) -> bool {
        self.micro().ids.is_empty()
    }

    /// Indices of this rank's tokens in the micro-batch.
    pub fn tokens(&self) -> Vec<u32> {
        match &self.part {
            Some(part) if part.is_idle => Vec::new(),
            Some(part) => part.own.tokens.clone(),
            None => (0..self.whole.ids.len() as u32).collect(),
        }
    }

    /// The input of the model. `first` counts the tokens and targets of earlier micro-batches of the step; `random` is
    /// the seed and step in training.
    pub fn batch(
        &self,
        config: &Config,
        (first, random): ((usize, usize), Option<(u64, u64)>),
        by: Option<Distillation>,
        device: &Device,
    ) -> ft_base::Result<Batch<'a>> {
        let input = |of: HostBatch<'_>| -> ft_base::Result<Batch<'a>> {
            Ok(Batch::new(config, of, first, random, device)?)
        };
        let (m, own) = (self.micro(), [self.micro().ids.len()]);
        let docs = if self.part.is_some() { &own[..] } else { &m.docs };
        let batch = distill::with_teacher(input(HostBatch { docs, ..m.into() })?, m, by, device)?;
        let Some(part) = &self.part else { return Ok(batch) };
        let (tokens, targets) = (part.own.tokens.clone(), part.own.targets.clone());
        let batch = match (part.sequence_parallel(&self.whole, input)?, &part.context_parallel) {
            (Some(sequence_parallel), _) => batch.with_sequence_parallel(sequence_parallel, tokens, targets),
            (None, Some(context_parallel)) => {
                batch.with_context_parallel(Arc::clone(context_parallel), tokens, targets)
            }
            (None, None) => batch,
        };
        Ok(batch.with_group(part.micro_batch_group.clone()))
    }

    /// Losses of all targets of the micro-batch, or outputs of a score head, from those of this rank. Collective
    /// among the ranks with tokens.
    pub fn whole_losses(&self, own: Vec<f64>) -> ft_base::Result<Vec<f64>> {
        let Some(Part { micro_batch_group, targets, .. }) = &self.part else { return Ok(own) };
        let words: Vec<u64> = own.into_iter().map(f64::to_bits).collect();
        let all = micro_batch_group.all_gather(CollectiveId::all("the losses of a micro-batch"), &words)?;
        let (count, values) = (self.whole.targets.len(), all.iter().map(Vec::len).sum::<usize>());
        let width = values / count.max(1);
        let mut out = vec![f64::NAN; values];
        for (targets, words) in targets.iter().zip(all) {
            let mut came = words.into_iter().map(f64::from_bits);
            for target in targets {
                let place = &mut out[*target as usize * width..][..width];
                place.iter_mut().zip(&mut came).for_each(|(to, x)| *to = x);
            }
        }
        Ok(out)
    }

    /// Values of this rank's targets, from those of all targets of the micro-batch.
    pub fn own_of(&self, all: Vec<f32>) -> Vec<f32> {
        let Some(Part { own, .. }) = &self.part else { return all };
        let width = all.len() / self.whole.targets.len().max(1);
        own.targets.iter().flat_map(|t| all[*t as usize * width..][..width].iter().copied()).collect()
    }
}

/// Returns the number of a received signal, or 0 to continue.
pub type Stop<'a> = &'a dyn Fn() -> u64;

/// Shares the result of `stop` between ranks.
///
/// # Errors
/// [`crate::train::Error::Abandoned`] if any rank received a signal; lost rank.
pub fn check_stop(comm: &dyn Comm, stop: Stop<'_>) -> ft_base::Result<()> {
    let all = comm.all_gather_object(CollectiveId::all("whether to go on"), &stop())?;
    match all.into_iter().find(|asked| *asked != 0) {
        Some(asked) => Err(crate::train::Error::Abandoned(asked).into()),
        None => Ok(()),
    }
}
