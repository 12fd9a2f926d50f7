//! Free memory and disk space of a machine.

use ft_base::memory;
use ft_base::store;
use ft_kernels::Machine;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A filesystem as reported by the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Device number, equal for folders of one filesystem.
    pub id: u64,
    /// Bytes available to this user.
    pub free: u64,
}

/// Free memory and disk space of a machine. Tests supply their own.
pub struct Capacity<'a> {
    /// Bytes of host memory this process may hold in total, if known.
    pub host: Option<u64>,
    /// Bytes free in `/dev/shm`, if known.
    pub shared: Option<u64>,
    /// Filesystem of a folder, existing or not.
    pub volume: &'a dyn Fn(&Path) -> Option<Volume>,
    /// Bytes of a run folder replaced by the run.
    pub replaced: &'a dyn Fn(&Path) -> u64,
}

impl Capacity<'_> {
    /// A machine of unknown capacity.
    pub const UNKNOWN: Capacity<'static> =
        Capacity { host: None, shared: None, volume: &|_| None, replaced: &|_| 0 };

    /// Capacity on this machine. For CUDA on a machine without it everything is unknown: the plan is for
    /// another machine.
    pub fn of(machine: Machine) -> Capacity<'static> {
        if machine.cuda && ft_kernels::cuda::cuda_memory().is_none() {
            return Self::UNKNOWN;
        }
        Capacity {
            host: memory::reach_bytes(),
            shared: store::free_bytes(Path::new("/dev/shm")).map(memory::part),
            volume: &volume,
            replaced: &replaced,
        }
    }
}

fn volume(dir: &Path) -> Option<Volume> {
    let free = store::free_bytes(dir)?;
    let there = dir.ancestors().find_map(|d| {
        let d = if d.as_os_str().is_empty() { Path::new(".") } else { d };
        std::fs::metadata(d).ok()
    })?;
    Some(Volume { id: there.dev(), free })
}

/// Bytes of old checkpoints: a run deletes them before the first save. The old result stays until the new
/// one is complete.
fn replaced(dir: &Path) -> u64 {
    store::folder_bytes(&dir.join("checkpoints")).unwrap_or(0)
}
