//! Checks of ranks against this machine.

use crate::train::Error;
use ft_kernels::cuda;
use ft_recipe::Recipe;

/// Explains a mismatch of `parallel.comm` and the device, with a hint; `None` if they match.
pub fn carries_nothing(r: &Recipe, cuda: bool) -> Option<(String, &'static str)> {
    let (word, is_for, hint) = match r.parallel.comm {
        ft_recipe::Comm::Nccl if !cuda => {
            ("nccl", "CUDA devices, and this run is on the CPU", "leave it out, or run.device=cuda")
        }
        ft_recipe::Comm::Mpi if cuda => (
            "mpi",
            "the CPU: tensors of CUDA devices go by NCCL",
            "leave it out, with mpirun too; or run.device=cpu",
        ),
        _ => return None,
    };
    Some((format!("parallel.comm = \"{word}\" is for {is_for}"), hint))
}

/// Refuses a `parallel.comm` without support for the device.
///
/// # Errors
/// NCCL on the CPU; MPI on CUDA.
pub fn check_comm(r: &Recipe, cuda: bool) -> Result<(), Error> {
    let Some((what, hint)) = carries_nothing(r, cuda) else { return Ok(()) };
    Err(Error::at(r, "parallel.comm", format!("{what}\n  hint: {hint}")))
}

/// Checks that this machine can run the ranks of the recipe. `processes`: number of processes started here.
///
/// # Errors
/// Fewer CUDA devices than ranks; NCCL missing; NCCL on the CPU; MPI on CUDA.
pub fn check(r: &Recipe, cuda: bool, processes: Option<usize>) -> Result<(), Error> {
    check_comm(r, cuda)?;
    let here = processes.map_or(r.parallel.in_process(), |n| n as u64);
    if !cuda || here.max(r.parallel.ranks()) == 1 {
        return Ok(());
    }
    let count = cuda::count();
    if here > count as u64 {
        let are = if count == 1 { "is 1 CUDA device" } else { &format!("are {count} CUDA devices") };
        let hint = match count {
            0 => "run.device=cpu".into(),
            _ => format!(
                "{}, or a launcher that starts processes on several machines",
                r.parallel.of_ranks(count)
            ),
        };
        let what =
            format!("{here} ranks of this machine have a device each, and there {are}\n  hint: {hint}");
        return Err(Error::at(r, "parallel", what));
    }
    cuda::nccl_is_here().map_err(Error::Device)
}
