//! Sum of two tensors: a vectorized kernel on CUDA, all threads on the CPU. candle's kernel for CUDA is in a module
//! of 2.4 MB of PTX, which the driver would compile at the first start on a machine, for about ten seconds.

use crate::cpu::pairwise;
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::tensor::{Real, Tensor};
use candle_core::{DType, Result};

/// Threads per block, same as in add.cu.
const THREADS: usize = 256;

/// `a + b`, for equal shapes and dtypes.
pub fn add(a: &Real, b: &Real) -> Result<Real> {
    let same = a.dims() == b.dims() && a.dtype() == b.dtype() && a.is_contiguous() && b.is_contiguous();
    let has_kernel = matches!(a.dtype(), DType::F32 | DType::BF16 | DType::F16);
    if a.device().is_cpu() || !same || !has_kernel {
        return pairwise::add(a, b);
    }
    let [a, b] = [a, b].map(|t| Tensor::Real(t.clone()));
    let y = empty(&a, a.shape(), a.dtype())?;
    let count = a.elem_count();
    let launch = Launch::of(&a, compiled!(ADD), "add")?.with(args![&a, &b, &y, count as u64])?;
    let values = THREADS * 16 / a.dtype().size_in_bytes();
    // SAFETY: the tensors are contiguous and have `count` values of the dtype in the kernel's name.
    unsafe { launch.run(Grid::new(count.div_ceil(values), THREADS as u32)) }?;
    y.real().cloned()
}
