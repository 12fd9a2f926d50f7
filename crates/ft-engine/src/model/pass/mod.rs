//! Input, state and gradients of a pass: the micro-batch, state between layers, and the accumulator.

pub mod batch;
pub mod context_parallel;
pub mod grad_accumulator;
pub mod sequence_parallel;
pub mod shared_state;
pub mod stage_boundary;

use crate::ranks::PeerTensor;
use candle_core::DType;
use ft_kernels::ledger::{Cost, Peers};

/// Accounts for an exchange and the bytes received, in a plan.
fn count_exchange(peers: Peers, into: &[PeerTensor]) {
    let bytes = into.iter().map(|(_, t)| (t.elem_count() * t.dtype().size_in_bytes()) as f64).sum();
    if let Some(ledger) = into.iter().find_map(|(_, t)| t.ghost()).map(|g| g.ledger()) {
        ledger.work(Cost::exchange(peers, bytes));
    }
}

/// Dtype of sums over segments and ranks, of values in `dtype`.
fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}
