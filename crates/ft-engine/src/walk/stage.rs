//! Neighbours of a stage of the pipeline: hidden states come from below and go above, gradients the other way.

use crate::model::Decoder;
use crate::params::buffers::Split;
use crate::ranks::{At, Axis, Comm, Group};
use candle_core::{DType, Device};
use ft_kernels::Tensor;

const PASSED: &str = "the hidden states between stages";

/// A rank of a stage, with its neighbours that pass on the same micro-batches.
pub struct Stage<'a> {
    group: Group<'a>,
    /// First units of this stage and of the next.
    units: (usize, usize),
    hidden: usize,
    dtype: DType,
    device: &'a Device,
}

/// Tensors to send to a neighbour and to get from it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Crossing<'t> {
    /// Hidden states or their gradient, `[t, d]`, to send.
    pub out: Option<&'t Tensor>,
    /// Number of tokens to receive.
    pub into: Option<usize>,
}

impl<'a> Stage<'a> {
    /// The stage of this rank; `None` without a pipeline. `comm` are all ranks.
    pub fn of(decoder: &'a Decoder, split: &Split, comm: &'a dyn Comm) -> Option<Self> {
        let units = (split.mesh.pipeline > 1).then_some(decoder.units)?;
        let table = &decoder.embedding.table;
        Some(Self {
            group: Group::new(comm, &split.mesh, Axis::Pipeline),
            units: (units.first, units.end),
            hidden: decoder.config.hidden,
            dtype: decoder.embedding.dtype,
            device: table.real().ok()?.device(),
        })
    }

    /// Ranks that pass on the same micro-batches, by stage.
    pub fn group(&self) -> &Group<'a> {
        &self.group
    }

    /// Exchanges tensors with the stage above, or below. Collective with that stage; nothing happens without tensors.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn exchange(&self, above: bool, c: Crossing<'_>) -> ft_base::Result<Option<Tensor>> {
        let into = c.into.map(|t| Tensor::zeros((t, self.hidden), self.dtype, self.device)).transpose()?;
        self.pass(above, c.out, into.as_ref())?;
        Ok(into)
    }

    /// Receives hidden states of so many tokens from the stage below, `[t, d]`.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn receive(&self, tokens: usize) -> ft_base::Result<Tensor> {
        let into = Tensor::zeros((tokens, self.hidden), self.dtype, self.device)?;
        self.pass(false, None, Some(&into))?;
        Ok(into)
    }

    fn pass(&self, above: bool, out: Option<&Tensor>, into: Option<&Tensor>) -> ft_base::Result<()> {
        if out.is_none() && into.is_none() {
            return Ok(());
        }
        let (members, peer, at) = self.with(above);
        let piece = |t: &Tensor| -> candle_core::Result<_> { Ok((peer, t.contiguous()?.flatten_all()?)) };
        let give: Option<_> = out.map(piece).transpose()?;
        let take: Option<_> = into.map(piece).transpose()?;
        let (give, take): (Vec<_>, Vec<_>) = (give.into_iter().collect(), take.into_iter().collect());
        Ok(self.group.exchange_among(&members, at, &give, &take)?.wait()?)
    }

    /// Exchanges words with the stage above, or below; returns those of that stage.
    ///
    /// # Errors
    /// A lost rank.
    pub fn words(&self, above: bool, own: &[u64]) -> ft_base::Result<Vec<u64>> {
        let (members, _, at) = self.with(above);
        let bytes: Vec<u8> = own.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let mut all = self.group.all_gather_bytes_among(&members, at, &bytes, true)?;
        let theirs = if above { all.pop() } else { (!all.is_empty()).then(|| all.swap_remove(0)) };
        let theirs = theirs.unwrap_or_default();
        Ok(theirs.as_chunks().0.iter().map(|b| u64::from_ne_bytes(*b)).collect())
    }

    /// This rank and its neighbour above or below, the neighbour, and the name of their collectives.
    fn with(&self, above: bool) -> ([usize; 2], usize, At) {
        let me = self.group.rank();
        match above {
            true => ([me, me + 1], me + 1, At::unit(PASSED, self.units.1)),
            false => ([me.saturating_sub(1), me], me.saturating_sub(1), At::unit(PASSED, self.units.0)),
        }
    }
}
