//! Checks of ranks against this machine.

use crate::train::Error;
use crate::train::job::Job;
use ft_engine::model::modules::Module;
use ft_kernels::cuda;
use ft_recipe::{LoraSpec, Recipe};

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

/// Checks that this machine can run the ranks of the recipe.
///
/// # Errors
/// Fewer CUDA devices than ranks; NCCL missing; NCCL on the CPU; MPI on CUDA; dropout in experts on CUDA with
/// tokens of a row over ranks.
pub fn check(job: &Job) -> Result<(), Error> {
    let (p, cuda) = (&job.recipe.parallel, job.device.is_cuda());
    let fail = |key: &str, what: String, hint: &str| {
        Err(Error::at(&job.recipe, key, format!("{what}\n  hint: {hint}")))
    };
    check_comm(&job.recipe, cuda)?;
    let drops = |(m, spec): (&Module, &LoraSpec)| m.expert.is_some() && spec.dropout > 0.0;
    let over = [("parallel.context", p.context), ("parallel.tensor", p.tensor)];
    let over = over.iter().find(|(_, ranks)| *ranks > 1).filter(|_| cuda);
    if let Some((key, _)) = over.filter(|_| job.selection.loras().any(drops)) {
        let what = "not built yet: dropout in adapters of experts on a GPU, with ranks that split the tokens of a row";
        return fail(key, what.into(), &format!("{key}=1, or lora.dropout=0"));
    }
    let (ranks, here) = (p.ranks(), p.in_process());
    if !cuda || ranks == 1 {
        return Ok(());
    }
    let count = cuda::count() as u64;
    if here > count {
        let are = if count == 1 { "is 1 CUDA device" } else { &format!("are {count} CUDA devices") };
        let hint = format!("parallel.data={count}, or a launcher that starts processes on several machines");
        return fail("parallel.data", format!("{ranks} ranks have a device each, and there {are}"), &hint);
    }
    cuda::nccl_is_here().map_err(Error::Device)
}
