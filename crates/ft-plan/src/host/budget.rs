//! Memory available to a rank, on device and host.

use crate::memory::overhead;
use crate::workload::Workload;
use ft_base::memory;
use ft_kernels::{Machine, cuda};
use ft_recipe::Recipe;

/// CUDA devices of a typical server.
const DEVICES: u64 = 8;

/// Usable device bytes of a rank: `memory.budget`, or 95% of free memory. On the CPU this is the
/// process's limit of `host` memory minus host-only bytes (process, checkpoint writer, tokenized data,
/// server), split over local ranks.
pub fn budget(
    recipe: &Recipe,
    machine: Machine,
    workload: &Workload,
    (host, server): (Option<u64>, u64),
) -> Option<u64> {
    recipe.memory.budget.or_else(|| {
        let (free, beside) = match machine.cuda {
            true => (ft_kernels::cuda::cuda_memory()?.0, 0),
            false => {
                let all = recipe.memory.host_budget.map(memory::part).or(host)?;
                (all, overhead::PROCESS + overhead::WRITER + workload.resident().unwrap_or(0) + server)
            }
        };
        // 5% stay free for other processes; on CUDA each rank has a device, on the CPU ranks share the
        // host
        let sharing = if machine.cuda { 1 } else { recipe.parallel.sharing() };
        Some((free / 20 * 19).saturating_sub(beside) / sharing)
    })
}

/// Ranks of a recipe on one machine.
pub(super) fn local(r: &Recipe, machine: Machine) -> u64 {
    // more devices than one server has means several machines
    let devices = |n: u64| if n > DEVICES { n.min(DEVICES.max(cuda::count() as u64)) } else { n };
    if machine.cuda { devices(r.parallel.sharing()) } else { r.parallel.sharing() }
}

/// Host bytes a rank may use besides the CUDA device and the server; `None` on the CPU, or if host memory is unknown.
pub fn beside_device(r: &Recipe, machine: Machine, (host, server): (Option<u64>, u64)) -> Option<u64> {
    let all = r.memory.host_budget.map(memory::part).or(host).filter(|_| machine.cuda)?;
    Some(all.saturating_sub(server) / local(r, machine))
}
