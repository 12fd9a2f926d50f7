//! Values in another type: on CUDA between f32 and 16 bits a kernel that reads and writes whole lines; candle's else, whose
//! own there takes a value at a time.

use super::cuda::launch::{Grid, Launch, compiled, empty};
use super::tensor::{Real, Tensor};
use candle_core::{DType, Result};

/// Threads of a block, and values that each takes, as in cast.cu.
const THREADS: usize = 256;
const EACH: usize = 4;

/// `t` in another type.
pub fn to_dtype(t: &Real, dtype: DType) -> Result<Real> {
    let half = |d| matches!(d, DType::BF16 | DType::F16);
    let between = (t.dtype() == DType::F32 && half(dtype)) || (half(t.dtype()) && dtype == DType::F32);
    if !between || !t.device().is_cuda() || !t.is_contiguous() {
        return t.to_dtype(dtype);
    }
    let x = Tensor::Real(t.clone());
    let y = empty(&x, t.shape(), dtype)?;
    let name = format!("cast_{}_{}", t.dtype().as_str(), dtype.as_str());
    let count = t.elem_count();
    let launch = Launch::named(&x, compiled!(CAST), name)?.tensor(&x)?.tensor(&y)?.number(count as u64);
    // SAFETY: both tensors have as many values as the kernel is told, and are of the types that its name says.
    unsafe { launch.run(Grid::new(count.div_ceil(EACH * THREADS), THREADS as u32)) }?;
    y.real().cloned()
}
