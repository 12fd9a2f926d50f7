//! A turn of the ranks: input of the model, and signals.

use crate::train::distill;
use candle_core::Device;
use ft_data::{Micro, Segments, segments};
use ft_engine::model::across::Across;
use ft_engine::model::batch::{Distillation, HostBatch};
use ft_engine::model::cut::{self, Cut};
use ft_engine::model::{Batch, Config};
use ft_engine::ranks::{self, At, Axis, Comm, Group, Mesh};
use ft_recipe::Parallel;
use std::ops::Range;

/// Converts a micro-batch of a dataset to the input of the model.
pub fn host(m: &Micro) -> HostBatch<'_> {
    HostBatch {
        ids: &m.ids,
        positions: &m.positions,
        docs: &m.docs,
        targets: &m.targets,
        weights: &m.weights,
    }
}

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
    pub fn at_once(&self) -> usize {
        self.mesh.data
    }

    /// Number of pipeline stages.
    pub fn stages(&self) -> usize {
        self.mesh.pipeline
    }

    /// Number of ranks of a stage.
    pub fn in_stage(&self) -> usize {
        self.mesh.ranks() / self.mesh.pipeline.max(1)
    }

    /// Pipeline stage of this rank.
    pub fn stage(&self) -> usize {
        self.mesh.coordinates(self.comm.rank()).pipeline
    }

    /// Index of this rank's micro-batch in a turn.
    pub fn own(&self) -> usize {
        self.mesh.coordinates(self.comm.rank()).data
    }

    /// Ranks with tokens of the same rows, if there are several: a context group or a tensor group.
    pub fn of_tokens(&self) -> Option<Group<'a>> {
        let axis = if self.mesh.tensor > 1 { Axis::Tensor } else { Axis::Context };
        (self.mesh.context * self.mesh.tensor > 1).then(|| Group::new(self.comm, &self.mesh, axis))
    }

    /// An error of a pass, or the loss of a rank that it follows from.
    pub fn cause(&self, e: ft_base::Error) -> ft_base::Error {
        match (e.of::<ranks::Error>(), self.comm.lost()) {
            (None, Some(lost)) => lost.into(),
            _ => e,
        }
    }

    /// Whether this rank says what all ranks with the same micro-batch know.
    pub fn speaks(&self) -> bool {
        let place = self.mesh.coordinates(self.comm.rank());
        (place.pipeline, place.context, place.tensor) == (0, 0, 0)
    }
}

/// A micro-batch on one rank: the whole, or the tokens of the rank in its context group or tensor group.
pub struct OwnMicro<'a> {
    pub whole: Micro,
    part: Option<(Segments, Of<'a>)>,
    /// Targets of each rank with tokens, in order.
    targets: Vec<Vec<u32>>,
}

/// Ranks with tokens of the same micro-batch.
enum Of<'a> {
    Context(Box<Across<'a>>),
    Tensor(&'a dyn Comm),
}

impl<'a> OwnMicro<'a> {
    /// Divides a micro-batch over the ranks of a group, if there is one.
    pub fn new(whole: Micro, group: Option<&'a Group<'_>>) -> Self {
        let Some(group) = group else { return Self { whole, part: None, targets: Vec::new() } };
        if group.axis() == Axis::Tensor {
            return Self::cut(whole, group);
        }
        let segments = segments(&whole.docs, group.world());
        let active = segments.iter().filter(|ranges| !ranges.is_empty());
        let targets = active.map(|ranges| whole.part(ranges).targets).collect();
        let across = Across::new(group, &whole.docs, segments);
        Self { part: Some((whole.part(across.own()), Of::Context(Box::new(across)))), whole, targets }
    }

    /// Divides a micro-batch over a tensor group. A rank without tokens has one row that counts nowhere.
    fn cut(whole: Micro, group: &'a Group<'_>) -> Self {
        let of = |range: &Range<usize>| whole.part(std::slice::from_ref(range));
        let mut parts: Vec<Segments> = cut::parts(whole.ids.len(), group.world()).iter().map(of).collect();
        let targets = parts.iter().map(|part| part.targets.clone()).collect();
        let mut own = parts.swap_remove(group.rank());
        if own.tokens.is_empty() && !whole.ids.is_empty() {
            own = Segments { targets: Vec::new(), ..whole.part(&[0..1]) };
            own.micro.targets.clear();
            own.micro.weights.clear();
            own.micro.teacher.ids.clear();
            own.micro.teacher.logits.clear();
        }
        Self { part: Some((own, Of::Tensor(group))), whole, targets }
    }

    /// Tokens and targets of this rank.
    pub fn micro(&self) -> &Micro {
        self.part.as_ref().map_or(&self.whole, |(part, _)| &part.micro)
    }

    /// Whether this rank has no tokens.
    pub fn is_empty(&self) -> bool {
        self.micro().ids.is_empty()
    }

    /// The input of the model. `first` counts the tokens and targets of earlier micro-batches of the step; `random` is
    /// the seed and step in training.
    ///
    /// # Errors
    /// Device errors.
    pub fn batch(
        &self,
        config: &Config,
        (first, random): ((usize, usize), Option<(u64, u64)>),
        by: Option<Distillation>,
        device: &Device,
    ) -> ft_base::Result<Batch<'_>> {
        let m = self.micro();
        let own = [m.ids.len()];
        let input = if self.part.is_some() { HostBatch { docs: &own, ..host(m) } } else { host(m) };
        let batch = Batch::new(config, input, first, random, device)?;
        let batch = distill::taught(batch, m, by, device)?;
        Ok(match &self.part {
            Some((part, Of::Context(across))) => {
                batch.among(across, part.tokens.clone(), part.targets.clone())
            }
            Some((part, Of::Tensor(comm))) => {
                let all = HostBatch { targets: &[], weights: &[], ..host(&self.whole) };
                let all = Batch::new(config, all, first, random, device)?.context;
                let cut = Cut::new(*comm, cut::parts(self.whole.ids.len(), comm.world()), all);
                batch.cut(cut, part.tokens.clone(), part.targets.clone())
            }
            None => batch,
        })
    }

    /// Losses of all targets of the micro-batch, or outputs of a score head, from those of this rank. Collective
    /// among the ranks with tokens.
    ///
    /// # Errors
    /// A lost rank.
    pub fn whole_losses(&self, own: Vec<f64>) -> ft_base::Result<Vec<f64>> {
        let Some((_, of)) = &self.part else { return Ok(own) };
        let bytes: Vec<u8> = own.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let at = At::all("the losses of a micro-batch");
        let all = match of {
            Of::Context(across) => across.all_gather_bytes(at, &bytes)?,
            Of::Tensor(comm) => comm.all_gather_bytes(at, &bytes, true)?,
        };
        let (count, values) =
            (self.whole.targets.len(), all.iter().map(Vec::len).sum::<usize>() / size_of::<f64>());
        let width = values / count.max(1);
        let mut out = vec![f64::NAN; values];
        for (targets, bytes) in self.targets.iter().zip(&all) {
            let mut came = bytes.as_chunks().0.iter().map(|b| f64::from_ne_bytes(*b));
            for target in targets {
                let place = &mut out[*target as usize * width..][..width];
                place.iter_mut().zip(&mut came).for_each(|(to, x)| *to = x);
            }
        }
        Ok(out)
    }

    /// Values of this rank's targets, from those of all targets of the micro-batch.
    pub fn own_of(&self, all: Vec<f32>) -> Vec<f32> {
        let Some((part, _)) = &self.part else { return all };
        let width = all.len() / self.whole.targets.len().max(1);
        part.targets.iter().flat_map(|t| all[*t as usize * width..][..width].iter().copied()).collect()
    }
}

/// Returns the number of a received signal, or 0 to continue.
pub type Stop<'a> = &'a dyn Fn() -> u64;

/// Shares the result of `stop` between ranks.
///
/// # Errors
/// [`crate::train::Error::Abandoned`] if any rank received a signal; lost rank.
pub fn check_stop(comm: &dyn Comm, stop: Stop<'_>) -> ft_base::Result<()> {
    let all = comm.all_gather_object(At::all("whether to go on"), &[stop()])?;
    match all.into_iter().flatten().find(|asked| *asked != 0) {
        Some(asked) => Err(crate::train::Error::Abandoned(asked).into()),
        None => Ok(()),
    }
}
