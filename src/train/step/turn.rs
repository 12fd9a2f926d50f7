//! A turn of the ranks: input of the model, and signals.

use ft_data::Micro;
use ft_engine::model::batch::HostBatch;
use ft_engine::ranks::{At, Comm};

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
