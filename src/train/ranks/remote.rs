//! Ranks in other processes, as seen by the first rank, and the messages to them.

use super::inputs::RunInputs;
use crate::train::Error;
use crate::train::job::Job;
use crate::train::step::LossScale;
use ft_data::Dataset;
use ft_engine::load::layout;
use ft_engine::ranks::{CollectiveId, Comm};
use ft_engine::walk::Execution;
use ft_recipe::Weights;
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::path::PathBuf;

/// Message after the check of the recipe: `true`.
pub const OPENED: CollectiveId = CollectiveId::all("the check of the recipe");
/// Message at the begin of the run: [`StartMessage`].
pub const BEGUN: CollectiveId = CollectiveId::all("the begin of the run");
const GIVEN: CollectiveId = CollectiveId::all("what ranks were given");

/// Ranks in other processes, as seen by the first rank.
pub struct RemoteRanks<'a> {
    /// Collectives of the ranks.
    pub comm: &'a dyn Comm,
    /// Next message.
    next: Cell<Option<CollectiveId>>,
}

impl<'a> RemoteRanks<'a> {
    /// Ranks that wait for the first message.
    pub fn new(comm: &'a dyn Comm) -> Self {
        Self { comm, next: Cell::new(Some(OPENED)) }
    }

    /// Reports that the recipe is resolved and the run folder is locked. Other ranks then look for them.
    pub fn opened(&self) -> ft_base::Result<()> {
        self.next.set(Some(BEGUN));
        self.comm.broadcast_object(OPENED, &true)
    }

    /// Reports that the run begins. Other ranks then load the model.
    ///
    /// # Errors
    /// Lost rank; a rank with other settings or data.
    pub fn begin(&self, inputs: &RunInputs) -> ft_base::Result<()> {
        self.next.set(None);
        let message = StartMessage {
            version: env!("CARGO_PKG_VERSION").into(),
            execution: inputs.execution,
            checkpoint: inputs.checkpoint.clone(),
            loss_scale: inputs.loss_scale,
        };
        self.comm.broadcast_object(BEGUN, &message)?;
        agree(self.comm, &inputs.job, &inputs.data, inputs.eval.as_deref())
    }

    /// Reports the end of an already finished run, in place of the next message.
    pub fn end(&self) -> ft_base::Result<()> {
        self.next.get().map_or(Ok(()), |message| self.comm.barrier(message))
    }
}

/// Decisions of the first rank.
#[derive(Serialize, Deserialize)]
pub struct StartMessage {
    /// Version of `ft` on the first rank.
    version: String,
    pub execution: Execution,
    pub checkpoint: Option<PathBuf>,
    pub loss_scale: Option<LossScale>,
}

impl StartMessage {
    /// Parses the message of the first rank.
    ///
    /// # Errors
    /// Another version of `ft` on the first rank, or an unreadable message.
    pub fn parse(json: serde_json::Value, rank: usize) -> Result<Self, Error> {
        let (theirs, own) = (json["version"].as_str(), env!("CARGO_PKG_VERSION"));
        if let Some(theirs) = theirs.filter(|v| *v != own) {
            return Err(Error::Usage(format!(
                "rank {rank} is ft {own}, and rank 0 is ft {theirs}\n  hint: the same ft on every machine"
            )));
        }
        serde_json::from_value(json).map_err(|e| {
            Error::Usage(format!(
                "rank {rank} cannot read how rank 0 starts the run: {e}\n  hint: the same ft on every machine"
            ))
        })
    }
}

/// Compares settings and hashes of all ranks, and refuses the first difference. All ranks fail together.
///
/// # Errors
/// A rank with other settings or data; unreadable files; lost rank.
pub fn agree(comm: &dyn Comm, job: &Job, data: &Dataset, eval: Option<&Dataset>) -> ft_base::Result<()> {
    let mine = settings(job, data, eval)?;
    // Without a timeout: a rank may still read from disk.
    comm.barrier(GIVEN)?;
    let all = comm.all_gather_object(GIVEN, &mine)?;
    let Some((first, others)) = all.split_first() else { return Ok(()) };
    for (rank, other) in (1..).zip(others) {
        let changed = first.iter().find(|item| !other.contains(item));
        if let Some((what, _)) = changed.or_else(|| other.iter().find(|item| !first.contains(item))) {
            return Err(Error::Usage(format!(
                "rank {rank} of {} has another {what} than rank 0\n  hint: the same command, files \
                    and ft on every machine",
                comm.world()
            ))
            .into());
        }
    }
    Ok(())
}

/// Settings and hashes that must agree on all ranks, by name.
fn settings(job: &Job, data: &Dataset, eval: Option<&Dataset>) -> ft_base::Result<Vec<(String, String)>> {
    let mut all = vec![
        ("version of ft".to_string(), env!("CARGO_PKG_VERSION").to_string()),
        ("config of the model".into(), serde_json::to_string(&job.config.raw).unwrap_or_default()),
        ("training data".into(), data.hash.clone()),
        ("evaluation data".into(), eval.map_or(String::new(), |e| e.hash.clone())),
    ];
    all.extend(job.recipe.math_keys().into_iter().map(|(key, value)| (format!("recipe: {key}"), value)));
    let own = |key: &str, value: &dyn std::fmt::Debug| (format!("recipe: {key}"), format!("{value:?}"));
    let r = &job.recipe;
    all.push(own("parallel", &r.parallel));
    all.push(own("memory.offload", &r.memory.offload));
    all.push(own("run.output", &r.run.output));
    if r.model.weights == Weights::Load {
        let files = layout::open(&job.config, &job.model.dir)?;
        all.push(("model, by its size,".into(), files.total_bytes().to_string()));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_or_an_unreadable_start_is_an_error() {
        for (text, said) in [
            ("[]", "rank 1 cannot read how rank 0 starts the run"),
            ("{\"execution\": 1}", "rank 1 cannot read how rank 0 starts the run"),
            ("{\"version\": \"0.0.0\"}", "and rank 0 is ft 0.0.0"),
        ] {
            let json = serde_json::from_str(text).unwrap();
            let e = StartMessage::parse(json, 1).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(e.contains(said), "{text}: {e}");
        }
    }
}
