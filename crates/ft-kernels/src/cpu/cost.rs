//! Memory and work of CPU kernels on ghosts.

use super::float::Float;
use crate::Tensor;
use crate::ledger::Ledger;
use crate::tensor::{Ghost, moves, started};
use candle_core::{DType, Shape};

/// Records the memory and work of a CPU kernel for ghosts; returns `None` for tensors with values.
///
/// Memory: a converted copy of each of `reads` that is not row-major or not in the arithmetic dtype;
/// allocations made by `during`; the outputs `out` in the arithmetic dtype, plus one rounded output at a time
/// if the dtypes differ.
pub fn ghosts<T: Float, const N: usize>(
    reads: &[&Tensor],
    out: [(Shape, DType); N],
    during: impl FnOnce(&Ledger),
) -> Option<[Tensor; N]> {
    ghosts_in::<T, N>(|_| false, reads, out, during)
}

/// Like [`ghosts`], for matrix products: see [`crate::tensor::ghost_products`].
pub fn ghost_products<T: Float, const N: usize>(
    reads: &[&Tensor],
    out: [(Shape, DType); N],
    during: impl FnOnce(&Ledger),
) -> Option<[Tensor; N]> {
    ghost_products_in::<T, N>(|_| false, reads, out, during)
}

/// Like [`ghosts`], with dtypes that the kernel reads and writes without conversion.
pub(crate) fn ghosts_in<T: Float, const N: usize>(
    as_it_is: impl Fn(DType) -> bool,
    reads: &[&Tensor],
    out: [(Shape, DType); N],
    during: impl FnOnce(&Ledger),
) -> Option<[Tensor; N]> {
    let out = ghost_products_in::<T, N>(as_it_is, reads, out, during)?;
    moves(reads.iter().copied().chain(&out));
    Some(out)
}

/// Like [`ghost_products`], with dtypes that the kernel reads and writes without conversion.
pub(crate) fn ghost_products_in<T: Float, const N: usize>(
    as_it_is: impl Fn(DType) -> bool,
    reads: &[&Tensor],
    out: [(Shape, DType); N],
    during: impl FnOnce(&Ledger),
) -> Option<[Tensor; N]> {
    let ledger = reads.first()?.ghost()?.ledger();
    let size = T::DTYPE.size_in_bytes();
    let own = |d: DType| d == T::DTYPE || as_it_is(d);
    let copied = reads.iter().filter(|t| !own(t.dtype()) || !t.is_contiguous());
    let _copies = ledger.hold(copied.map(|t| (size * t.elem_count()) as u64).sum());
    let made = out
        .map(|(shape, dtype)| (Ghost::new(ledger, shape, if own(dtype) { dtype } else { T::DTYPE }), dtype));
    during(ledger);
    started(ledger);
    Some(made.map(|(made, dtype)| {
        if own(dtype) { made.into() } else { Ghost::new(ledger, made.shape().clone(), dtype).into() }
    }))
}
