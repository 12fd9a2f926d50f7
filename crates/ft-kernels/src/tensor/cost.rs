//! Memory and work of CUDA kernels on ghosts.

use super::ghost::Ghost;
use super::ledger::{Allocation, Cost, Ledger};
use super::types::Tensor;
use candle_core::{DType, Shape};

/// Ghost results of a CUDA kernel; `None` if `reads` are real tensors.
///
/// Records copies of non-contiguous inputs (`reads`), results (`out`), and one launch with the traffic of
/// both. `during` records anything else.
pub fn ghosts<const N: usize>(
    reads: &[&Tensor],
    out: [(Shape, DType); N],
    during: impl FnOnce(&Ledger),
) -> Option<[Tensor; N]> {
    let out = ghost_products(reads, out, during)?;
    moves(reads.iter().copied().chain(&out));
    Some(out)
}

/// Like [`ghosts`], with a last result if `more` is given.
pub fn ghosts_and<const N: usize>(
    reads: &[&Tensor],
    out: [(Shape, DType); N],
    more: Option<(Shape, DType)>,
) -> Option<([Tensor; N], Option<Tensor>)> {
    let mut last: Option<Tensor> = None;
    let out = ghost_products(reads, out, |l| last = more.map(|(s, d)| Ghost::new(l, s, d).into()))?;
    moves(reads.iter().copied().chain(&out).chain(&last));
    Some((out, last))
}

/// Records memory traffic for all ghosts in `all`.
pub fn moves<'a>(all: impl IntoIterator<Item = &'a Tensor>) {
    all.into_iter().filter_map(Tensor::ghost).for_each(Ghost::is_moved);
}

/// Like [`ghosts`] for compute-bound kernels: records no separate memory traffic.
pub fn ghost_products<const N: usize>(
    reads: &[&Tensor],
    out: [(Shape, DType); N],
    during: impl FnOnce(&Ledger),
) -> Option<[Tensor; N]> {
    let ledger = reads.first()?.ghost()?.ledger();
    let _copies = hold_copies(ledger, reads);
    let out = out.map(|(shape, dtype)| Ghost::new(ledger, shape, dtype).into());
    during(ledger);
    started(ledger);
    Some(out)
}

/// Holds the memory of contiguous copies of non-contiguous inputs.
pub fn hold_copies(ledger: &Ledger, reads: &[&Tensor]) -> Allocation {
    let bytes = |t: &&Tensor| (t.dtype().size_in_bytes() * t.elem_count()) as u64;
    ledger.hold(reads.iter().filter(|t| !t.is_contiguous()).map(bytes).sum())
}

/// Records a launch beyond the one counted by [`ghosts`].
pub fn started(ledger: &Ledger) {
    ledger.work(Cost { started: 1.0, ..Cost::default() });
}
