//! Neighbors of a stage of the pipeline: hidden states come from below and go above, gradients the other way.

use crate::model::Decoder;
use crate::model::stage_boundary::{Rows, StageBoundary};
use crate::params::buffers::Split;
use crate::ranks::{Axis, CollectiveId, Comm, Group, words_of};
use candle_core::{DType, Device};
use ft_kernels::Tensor;

const HIDDEN_STATES: &str = "the hidden states between stages";

/// A rank of a stage, with the neighbors passing on the same micro-batches.
pub struct Stage<'a> {
    group: Group<'a>,
    /// First units of this stage and of the next.
    units: (usize, usize),
    /// Tensors across the boundaries above and below, besides hidden states.
    boundaries: [StageBoundary; 2],
    hidden: usize,
    dtype: DType,
    device: &'a Device,
}

/// Tensors to send to a neighbor and to get from it: hidden states or their gradient `[t, d]`, then the tensors of
/// [`StageBoundary`].
#[derive(Debug, Default)]
pub struct StageExchange {
    /// To send.
    pub out: Option<Vec<Tensor>>,
    /// Numbers of tokens to receive.
    pub into: Option<Rows>,
}

impl<'a> Stage<'a> {
    /// The stage of this rank; `None` without a pipeline. `lowest` is the lowest trained unit, `comm` are all ranks.
    pub fn of(
        decoder: &'a Decoder,
        (split, lowest): (&Split, Option<usize>),
        comm: &'a dyn Comm,
    ) -> Option<Self> {
        let units = (split.mesh.pipeline > 1).then_some(decoder.units)?;
        let (table, config) = (&decoder.embedding.table, &decoder.config);
        let below = |unit: usize| {
            StageBoundary::below(config, unit.saturating_sub(1), split.mesh.tensor, lowest == Some(0))
        };
        Some(Self {
            group: Group::new(comm, &split.mesh, Axis::Pipeline),
            units: (units.first, units.end),
            boundaries: [below(units.end), below(units.first)],
            hidden: config.hidden,
            dtype: decoder.embedding.dtype,
            device: table.real().ok()?.device(),
        })
    }

    /// Ranks with the same micro-batches, by stage.
    pub fn group(&self) -> &Group<'a> {
        &self.group
    }

    /// Tensors across the boundary above, or the one below, besides hidden states.
    pub fn boundary(&self, above: bool) -> &StageBoundary {
        &self.boundaries[usize::from(!above)]
    }

    /// Exchanges tensors with the stage above, or below. Collective with that stage; nothing happens without tensors.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn exchange(&self, above: bool, tensors: StageExchange) -> ft_base::Result<Option<Vec<Tensor>>> {
        let into = tensors.into.map(|rows| self.room(above, rows)).transpose()?;
        self.pass(above, tensors.out.as_deref().unwrap_or_default(), into.as_deref().unwrap_or_default())?;
        Ok(into)
    }

    /// Receives the tensors of `rows` from the stage below.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn receive(&self, rows: Rows) -> ft_base::Result<Vec<Tensor>> {
        let into = self.room(false, rows)?;
        self.pass(false, &[], &into)?;
        Ok(into)
    }

    /// Zeros to receive tensors from the stage above, or below.
    fn room(&self, above: bool, rows: Rows) -> candle_core::Result<Vec<Tensor>> {
        let x = Tensor::zeros((rows.own, self.hidden), self.dtype, self.device)?;
        let rest = self.boundary(above).zeros(rows, above, self.dtype, self.device)?;
        Ok(std::iter::once(x).chain(rest).collect())
    }

    fn pass(&self, above: bool, out: &[Tensor], into: &[Tensor]) -> ft_base::Result<()> {
        if out.is_empty() && into.is_empty() {
            return Ok(());
        }
        let (members, peer, at) = self.with(above);
        let piece = |t: &Tensor| -> candle_core::Result<_> { Ok((peer, t.contiguous()?.flatten_all()?)) };
        let pieces = |all: &[Tensor]| all.iter().map(piece).collect::<candle_core::Result<Vec<_>>>();
        Ok(self.group.exchange_among((&members, at), &pieces(out)?, &pieces(into)?)?.wait()?)
    }

    /// Passes the logits of a token, `[v]` in f32, from the last stage (`own`) to the first. Collective of these two;
    /// other stages do nothing.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn logits(&self, own: Option<&Tensor>, vocab: usize) -> ft_base::Result<Option<Tensor>> {
        let (me, last) = (self.group.rank(), self.group.world() - 1);
        let (give, take) = match own {
            Some(own) if me == last => (vec![(0, own.contiguous()?.flatten_all()?)], Vec::new()),
            None if me == 0 => (Vec::new(), vec![(last, Tensor::zeros(vocab, DType::F32, self.device)?)]),
            _ => return Ok(None),
        };
        let at = CollectiveId::all("the logits of a token");
        self.group.exchange_among((&[0, last], at), &give, &take)?.wait()?;
        Ok(take.into_iter().next().map(|(_, logits)| logits))
    }

    /// Exchanges words with the stage above, or below; returns those of that stage.
    ///
    /// # Errors
    /// A lost rank.
    pub fn words(&self, above: bool, own: &[u64]) -> ft_base::Result<Vec<u64>> {
        let (members, _, at) = self.with(above);
        let mut all = self.group.all_gather_bytes_among((&members, at), bytemuck::cast_slice(own), true)?;
        let theirs = if above { all.pop() } else { (!all.is_empty()).then(|| all.swap_remove(0)) };
        Ok(words_of(&theirs.unwrap_or_default()).collect())
    }

    /// This rank and its neighbor above or below, the neighbor, and the name of their collectives.
    fn with(&self, above: bool) -> ([usize; 2], usize, CollectiveId) {
        let me = self.group.rank();
        match above {
            true => ([me, me + 1], me + 1, CollectiveId::unit(HIDDEN_STATES, self.units.1)),
            false => (
                [me.saturating_sub(1), me],
                me.saturating_sub(1),
                CollectiveId::unit(HIDDEN_STATES, self.units.0),
            ),
        }
    }
}
