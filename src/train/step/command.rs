//! Operations of all ranks, announced by the first rank.

use crate::train::Error;
use ft_engine::ranks::{CollectiveId, Comm};
use ft_engine::walk::Reading;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;

/// Next operation of all ranks. Paths are strings of the system, because not all are UTF-8.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// A step, numbered from 0.
    Step(u64),
    Evaluate,
    /// This rank's shard of a checkpoint: number of completed steps, and folder.
    Save(u64, OsString),
    /// A forward pass of the first rank alone, with shards gathered from the other ranks.
    Forward,
    /// Tokens of a document of the first rank, to read on all stages.
    Read(Reading),
    /// A forward pass of all ranks over a micro-batch of the first; the first rank gets the logits.
    Probe(Probed),
    /// Parts of the result that only their ranks know go to the first rank.
    Collect,
    /// Loading of the result in a folder, for the check after writing.
    ReadBack(OsString),
    /// Loading of a checkpoint.
    Load(OsString),
    /// End of the run.
    End,
}

/// Tokens of a micro-batch without targets, as in [`ft_data::Micro`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probed {
    pub ids: Vec<u32>,
    pub positions: Vec<u32>,
    pub docs: Vec<usize>,
}

const NEXT: CollectiveId = CollectiveId::all("what comes next");

/// Announces the next operation. Called by the first rank.
pub fn announce(comm: &dyn Comm, command: &Command) -> ft_base::Result<()> {
    comm.broadcast_object(NEXT, command)
}

/// Waits for the next operation. Called by all ranks except the first.
///
/// # Errors
/// Lost rank; a command of another version of `ft`.
pub fn receive(comm: &dyn Comm) -> ft_base::Result<Command> {
    let none = || format!("rank {}: the first rank sent no command", comm.rank());
    Ok(comm.receive_object(NEXT)?.ok_or_else(|| Error::Internal(none()))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn commands_are_decoded_as_they_were_encoded() {
        let odd = OsStr::from_bytes(b"runs/\xff\x00x");
        for command in [
            Command::End,
            Command::Step(0),
            Command::Step(u64::MAX),
            Command::Evaluate,
            Command::Forward,
            Command::Collect,
            Command::Read(Reading { past: 3, ids: vec![5], total: 9, limit: 64, logits: true }),
            Command::Probe(Probed { ids: vec![7, 9], positions: vec![0, 1], docs: vec![2] }),
            Command::Save(7, odd.into()),
            Command::ReadBack(odd.into()),
            Command::Load(odd.into()),
        ] {
            let sent = serde_json::to_vec(&command).unwrap();
            assert_eq!(serde_json::from_slice::<Command>(&sent).unwrap(), command);
        }
    }

    #[test]
    fn an_unknown_command_is_an_error() {
        for text in ["[]", "\"Rest\"", "{\"Step\": -1}", "{\"Save\": [2]}"] {
            assert!(serde_json::from_str::<Command>(text).is_err(), "{text}");
        }
    }
}
