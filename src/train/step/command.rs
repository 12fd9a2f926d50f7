//! Operations of all ranks, announced by the first rank.

use crate::train::Error;
use ft_engine::comm::{At, Comm};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Next operation of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// A step, numbered from 0.
    Step(u64),
    Evaluate,
    /// This rank's shard of a checkpoint: number of completed steps, and folder.
    Save(u64, PathBuf),
    /// A forward pass of the first rank alone, with shards gathered from the other ranks.
    Forward,
    /// Loading of the result in a folder, for the check after writing.
    ReadBack(PathBuf),
    /// Loading of a checkpoint.
    Load(PathBuf),
    /// End of the run.
    End,
}

const NEXT: At = At { what: "what comes next", unit: None };

impl Command {
    fn encode(&self) -> Vec<u64> {
        fn bytes(path: &Path) -> impl Iterator<Item = u64> {
            path.as_os_str().as_bytes().iter().map(|b| u64::from(*b))
        }
        match self {
            Command::End => vec![0],
            Command::Step(n) => vec![1, *n],
            Command::Evaluate => vec![2],
            Command::Save(n, path) => [3, *n].into_iter().chain(bytes(path)).collect(),
            Command::Forward => vec![4],
            Command::ReadBack(path) => std::iter::once(5).chain(bytes(path)).collect(),
            Command::Load(path) => std::iter::once(6).chain(bytes(path)).collect(),
        }
    }

    fn decode(words: &[u64]) -> Option<Self> {
        let path = |bytes: &[u64]| OsString::from_vec(bytes.iter().map(|b| *b as u8).collect()).into();
        Some(match words {
            [0] => Command::End,
            [1, n] => Command::Step(*n),
            [2] => Command::Evaluate,
            [3, n, bytes @ ..] => Command::Save(*n, path(bytes)),
            [4] => Command::Forward,
            [5, bytes @ ..] => Command::ReadBack(path(bytes)),
            [6, bytes @ ..] => Command::Load(path(bytes)),
            _ => return None,
        })
    }
}

/// Announces the next operation. Called by the first rank.
///
/// # Errors
/// Lost rank.
pub fn announce(comm: &dyn Comm, command: &Command) -> ft_base::Result<()> {
    comm.wait(NEXT, &command.encode()).map(drop)
}

/// Waits for the next operation. Called by all ranks except the first.
///
/// # Errors
/// Lost rank; a command of another version of `ft`.
pub fn receive(comm: &dyn Comm) -> ft_base::Result<Command> {
    let all = comm.wait(NEXT, &[])?;
    let words = all.first().map_or(&[][..], Vec::as_slice);
    let why = || format!("rank {}: the first rank sent an unknown command {words:?}", comm.rank());
    Ok(Command::decode(words).ok_or_else(|| Error::Internal(why()))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn what_is_told_is_heard() {
        let odd = OsStr::from_bytes(b"runs/\xff\x00x");
        for command in [
            Command::End,
            Command::Step(0),
            Command::Step(u64::MAX),
            Command::Evaluate,
            Command::Forward,
            Command::Save(7, odd.into()),
            Command::ReadBack(odd.into()),
            Command::Load(odd.into()),
        ] {
            assert_eq!(Command::decode(&command.encode()), Some(command));
        }
    }

    #[test]
    fn an_unknown_command_is_none() {
        for words in [&[][..], &[1], &[7], &[2, 0]] {
            assert_eq!(Command::decode(words), None);
        }
    }
}
