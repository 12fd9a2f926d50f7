//! Collective operations on shards: loading, saving.

use super::inputs::RunInputs;
use crate::train::checkpoint::state;
use crate::train::job::Job;
use crate::train::preference::ReferenceScores;
use crate::train::step::{TrainContext, TrainedModel};
use ft_engine::load::Base;
use ft_engine::model::{Decoder, units};
use ft_engine::params::Params;
use ft_engine::params::buffers::Split;
use ft_engine::ranks::{CollectiveId, Comm, Mesh};
use ft_kernels::gemm;
use std::collections::BTreeMap;
use std::path::Path;

const LOADED: CollectiveId = CollectiveId::all("the loading of the model");
const SAVED: CollectiveId = CollectiveId::all("the end of a checkpoint");

/// Writes this rank's shard of a checkpoint begun by the first rank. Returns after all ranks have written.
pub fn save(cx: &TrainContext<'_>, dir: &Path) -> ft_base::Result<()> {
    state::write(dir, &cx.model.params)?;
    cx.comm.barrier(SAVED)
}

/// Loads this rank's shard of the model. Returns after all ranks have loaded.
pub fn load(job: &Job, base: &Base, comm: &dyn Comm) -> ft_base::Result<(Decoder, Params)> {
    if comm.world() > 1 {
        // Allocates the packing buffers of this rank now; later, their number would depend on thread
        // scheduling.
        gemm::make_slabs();
    }
    let p = &job.recipe.parallel;
    let experts = job.config.moe.as_ref().map_or(0, |m| m.experts);
    let mesh = Mesh::of(p);
    let stages = units::partition(&job.config, p.pipeline, &p.stages).unwrap_or_default();
    let units = stages.get(mesh.coordinates(comm.rank()).pipeline).copied().filter(|_| p.pipeline > 1);
    let tied = job.config.tied;
    let split = Split { mesh, rank: comm.rank(), zero: p.zero, experts, units, tied };
    let loaded = job.load_shard(base, true, split, comm)?;
    comm.barrier(LOADED)?;
    Ok(loaded)
}

/// Makes a loaded model ready for the first step of this process: computes the reference unless it is known, and loads
/// this rank's shard of the checkpoint to resume. Begins after all ranks have called it, and returns after all are
/// ready. `identity` is the run's, on the first rank.
///
/// # Errors
/// The checkpoint does not fit; errors of the reference; lost rank.
pub fn ready(
    inputs: &RunInputs,
    loaded: (Decoder, Params),
    (known, identity): (Option<ReferenceScores>, Option<&BTreeMap<String, String>>),
    comm: &dyn Comm,
) -> ft_base::Result<TrainedModel> {
    // The first rank has measured the memory of the loaded model.
    comm.barrier(LOADED)?;
    let mut model = TrainedModel::new(&inputs.job, loaded);
    if let Some(preferences) = &mut model.preferences {
        let reference = inputs.reference(identity, comm);
        preferences.reference = reference.scores(known, &model.decoder, &model.params)?;
    }
    if let Some(dir) = &inputs.checkpoint {
        state::load(dir, &model.params)?;
    }
    comm.barrier(LOADED)?;
    Ok(model)
}

/// Loads this rank's shard of a checkpoint. Returns after all ranks have loaded.
///
/// # Errors
/// The checkpoint does not fit; lost rank.
pub fn load_checkpoint(params: &Params, dir: &Path, comm: &dyn Comm) -> ft_base::Result<()> {
    state::load(dir, params)?;
    comm.barrier(LOADED)
}
