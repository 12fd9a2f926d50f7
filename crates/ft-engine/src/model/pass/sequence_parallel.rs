//! Tensor parallelism with sequence parallelism: matrices over the ranks of a group, and the tokens of a micro-batch
//! around them.
//!
//! The residual stream is split by tokens. An all-gather of tokens precedes a block with cut matrices and split heads
//! or columns; a reduce-scatter follows, summing in rank order, in f32 (Korthikanti et al., 2022). The backward pass
//! does the same with gradients.

use super::batch::Context;
use super::shared_state::SharedState;
use super::{count_exchange, wide};
use crate::ranks::{CollectiveId, Comm, PeerTensor};
use candle_core::Result;
use ft_base::memory::place;
use ft_kernels::ledger::Peers;
use ft_kernels::{Tensor, gemm};
use std::ops::Range;
use std::sync::Arc;

/// Tokens of a micro-batch over a tensor group.
#[derive(Debug)]
pub struct SequenceParallel<'a> {
    /// Ranks of the group.
    group: Columns<'a>,
    /// Tokens of each rank, end to end. A rank without tokens has one row unseen by other ranks.
    parts: Vec<Range<usize>>,
    /// Context of all tokens.
    whole: Context<'a>,
}

/// Ranks with other columns of the same rows.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// The ranks; `None` in a plan.
    comm: Option<&'a dyn Comm>,
    /// This rank in the group.
    me: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// A fault that tests must notice.
    #[cfg(test)]
    fault: Option<Fault>,
}

impl Columns<'_> {
    /// Sums over the ranks, in rank order: `[t, n]` -> `[t, n]`. Collective.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn sum(&self, own: &Tensor) -> Result<Tensor> {
        let own = own.contiguous()?;
        let others = || (0..self.ranks).filter(|r| *r != self.me);
        let out: Vec<_> = others().map(|r| (r, own.clone())).collect();
        let into = others().map(|r| Ok((r, own.zeros_like()?))).collect::<Result<Vec<_>>>()?;
        self.exchange("the sums of rows", &out, &into)?;
        #[cfg(test)]
        if self.fault == Some(Fault::Rows) {
            return Ok(own);
        }
        let sum = own.zeros_like()?;
        for rank in 0..self.ranks {
            let came = into.iter().find(|(r, _)| *r == rank).map_or(&own, |(_, t)| t);
            gemm::acc(&sum, came)?;
        }
        Ok(sum)
    }

    /// Exchanges rows with the ranks; in a plan, accounts for it.
    fn exchange(&self, what: &'static str, out: &[PeerTensor], into: &[PeerTensor]) -> Result<()> {
        #[cfg(test)]
        if self.fault == Some(Fault::Lost) && place::now().1 == 2 {
            candle_core::bail!("a fault of a test");
        }
        let Some(comm) = self.comm else {
            count_exchange(Peers::Tensor, into);
            return Ok(());
        };
        let at = CollectiveId::unit(what, place::now().1);
        let sent = comm.exchange(at, out, into).and_then(|arrival| Ok(arrival.wait()?));
        sent.map_err(candle_core::Error::wrap)
    }
}

/// Faults of tensor parallelism, for tests of the tests.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Partial sums of other ranks are not added.
    Sum,
    /// Partial sums are averaged.
    Mean,
    /// Sums of rows of other ranks are not added.
    Rows,
    /// The rank is lost in the second layer.
    Lost,
}

/// Even ranges of `tokens` tokens over `ranks` ranks, in order.
pub fn parts(tokens: usize, ranks: usize) -> Vec<Range<usize>> {
    (0..ranks).map(|r| tokens * r / ranks..tokens * (r + 1) / ranks).collect()
}

impl<'a> SequenceParallel<'a> {
    /// Tokens by rank of the tensor group `comm`, with the context of all.
    pub fn new(comm: &'a dyn Comm, parts: Vec<Range<usize>>, whole: Context<'a>) -> Self {
        Self::with(Some(comm), comm.rank(), parts, whole)
    }

    /// As [`SequenceParallel::new`], of the rank with the most tokens in a plan.
    pub fn planned(tokens: usize, ranks: usize, whole: Context<'a>) -> Self {
        Self::with(None, ranks - 1, parts(tokens, ranks), whole)
    }

    fn with(comm: Option<&'a dyn Comm>, me: usize, parts: Vec<Range<usize>>, whole: Context<'a>) -> Self {
        let group = Columns {
            comm,
            me,
            ranks: parts.len(),
            #[cfg(test)]
            fault: None,
        };
        Self { group, parts, whole: Context { columns: Some(group), ..whole } }
    }

    /// The same with a fault.
    #[cfg(test)]
    pub fn with_fault(mut self, fault: Option<Fault>) -> Self {
        self.group.fault = fault;
        self.whole.columns = Some(self.group);
        self
    }

    /// The same for a pass with this state between layers.
    pub fn for_pass(&self, shared_state: &Arc<SharedState>) -> Self {
        let whole = Context { shared_state: Arc::clone(shared_state), ..self.whole.clone() };
        Self { parts: self.parts.clone(), whole, ..*self }
    }

    /// Context of all tokens.
    pub fn whole(&self) -> &Context<'a> {
        &self.whole
    }

    /// Whether this rank has no tokens, but the one row unseen by other ranks.
    pub fn has_placeholder_row(&self) -> bool {
        self.own().is_empty()
    }

    /// Tokens of this rank.
    fn own(&self) -> Range<usize> {
        self.parts[self.group.me].clone()
    }

    /// Tokens of all ranks.
    pub fn tokens(&self) -> usize {
        self.parts.last().map_or(0, |r| r.end)
    }

    /// Ranks with tokens, without this one.
    fn peers(&self) -> impl Iterator<Item = (usize, &Range<usize>)> {
        self.parts.iter().enumerate().filter(|(r, part)| *r != self.group.me && !part.is_empty())
    }

    /// Rows of all ranks' tokens, from those of this rank's: `[own, d]` -> `[t, d]`. Collective.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn gather(&self, own: &Tensor) -> Result<Tensor> {
        let (mine, (rows, d)) = (self.own(), own.dims2()?);
        let own = own.contiguous()?;
        let all = Tensor::zeros((self.tokens(), d), own.dtype(), own.device())?;
        if mine.len() == rows {
            all.narrow(0, mine.start, rows)?.slice_set(&own, 0, 0)?;
        }
        let to = (0..self.parts.len()).filter(|r| *r != self.group.me && !mine.is_empty());
        let out: Vec<_> = to.map(|r| (r, own.clone())).collect();
        let view = |(r, part): (usize, &Range<usize>)| Ok((r, all.narrow(0, part.start, part.len())?));
        let into = self.peers().map(view).collect::<Result<Vec<_>>>()?;
        self.group.exchange("the gathering of tokens", &out, &into)?;
        Ok(all)
    }

    /// Sums over the ranks of the rows of this rank's tokens: `[t, d]` -> `[own, d]`. Collective.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn scatter(&self, partial: Tensor) -> Result<Tensor> {
        let (mine, (_, d)) = (self.own(), partial.dims2()?);
        let (dtype, partial) = (partial.dtype(), partial.contiguous()?);
        let view = |(r, part): (usize, &Range<usize>)| Ok((r, partial.narrow(0, part.start, part.len())?));
        let out = self.peers().map(view).collect::<Result<Vec<_>>>()?;
        let froms = (0..self.parts.len()).filter(|r| *r != self.group.me && !mine.is_empty());
        let room = |r| Ok((r, Tensor::zeros((mine.len(), d), dtype, partial.device())?));
        let into = froms.map(room).collect::<Result<Vec<_>>>()?;
        self.group.exchange("the sum of partial products", &out, &into)?;
        drop(out);
        let sum = Tensor::zeros((mine.len().max(1), d), wide(dtype), partial.device())?;
        if mine.is_empty() {
            return sum.to_dtype(dtype);
        }
        let own = partial.narrow(0, mine.start, mine.len())?;
        for rank in 0..self.parts.len() {
            let came = into.iter().find(|(r, _)| *r == rank).map(|(_, t)| t);
            #[cfg(test)]
            let came = came.filter(|_| self.group.fault != Some(Fault::Sum));
            match came {
                Some(part) => gemm::acc(&sum, part)?,
                None if rank == self.group.me => gemm::acc(&sum, &own)?,
                None => {}
            }
        }
        #[cfg(test)]
        if self.group.fault == Some(Fault::Mean) {
            return sum.affine(1.0 / self.parts.len() as f64, 0.0)?.to_dtype(dtype);
        }
        drop((own, partial, into));
        sum.to_dtype(dtype)
    }
}
