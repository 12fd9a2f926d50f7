//! Bias: added to every row; the gradient is the sum of rows.

use crate::Tensor;
use crate::cpu::{Halves, ROWS, each, in_place, is_cpu, view};
use crate::cpu::{narrow, wide};
use crate::cuda::launch::{Grid, Launch, args, compiled};
use crate::gemm;
use crate::tensor::ghosts;
use crate::upcast;
use candle_core::{DType, Result};
use half::bf16;

/// Threads per block, same as in bias.cu.
const THREADS: u32 = 256;
/// Columns per block of the sum, same as in bias.cu.
const COLUMNS: usize = 32;

/// `y + b` for each row: `y` `[t, o]`, `b` `[o]` -> `[t, o]` in the dtype of `y`. Works in place, so no other
/// handle of `y` may be in use.
pub fn add(y: Tensor, b: &Tensor) -> Result<Tensor> {
    let (t, o) = y.dims2()?;
    if b.dims() != [o] || b.dtype() != y.dtype() {
        candle_core::bail!("bias: {:?} on {:?}", b.shape(), y.shape());
    }
    if is_cpu(&y) {
        match y.dtype() {
            _ if y.ghost().is_some() => {}
            DType::F32 => in_place::<f32>("bias", &y, each_row(&view::<f32>(b)?, |y, b| *y += b))?,
            DType::BF16 => {
                let sum = |y: &mut bf16, b: bf16| *y = narrow(wide(*y) + wide(b));
                in_place("bias", &y, each_row(&Halves::of(&b.contiguous()?)?, sum))?;
            }
            _ => return y.broadcast_add(b),
        }
        return Ok(y);
    }
    if ghosts(&[&y], [], |_| ()).is_some() {
        return Ok(y);
    }
    let launch = Launch::of(&y, compiled!(BIAS), "bias_add")?.with(args![b, t as u64, o as u64, &y])?;
    // SAFETY: `y` has t rows of o values and `b` has o values of the same dtype, as
    // checked above; one block per row.
    unsafe { launch.run(Grid::new(t, THREADS)) }?;
    Ok(y)
}

/// Returns a function that combines each row with `b`, in parallel over groups of rows.
fn each_row<T: Copy + Send + Sync>(b: &[T], f: impl Fn(&mut T, T) + Sync) -> impl Fn(&mut [T]) -> Result<()> {
    move |y| {
        let o = b.len().max(1);
        each(y.chunks_mut(ROWS * o), |rows| {
            rows.chunks_mut(o).for_each(|y| y.iter_mut().zip(b).for_each(|(y, b)| f(y, *b)));
        });
        Ok(())
    }
}

/// `grad[c] = sum of dy[.., c]` in f32, or `+=` with `add`: `grad` `[1, o]` or `[o]`, `dy` `[t, o]`.
pub fn sum_onto((grad, add): (&Tensor, bool), dy: &Tensor) -> Result<()> {
    if is_cpu(dy) || grad.dtype() != DType::F32 {
        return gemm::put((grad, add), &upcast(dy)?.sum_keepdim(0)?);
    }
    let (t, o) = dy.dims2()?;
    if grad.elem_count() != o {
        candle_core::bail!("bias: the gradient {:?} of {:?}", grad.shape(), dy.shape());
    }
    if ghosts(&[dy], [], |_| ()).is_some() {
        return Ok(());
    }
    let dy = dy.contiguous()?;
    let launch = Launch::of(&dy, compiled!(BIAS), "bias_sum")?;
    let launch = launch.with(args![&dy, t as u64, o as u64, grad, u32::from(add)])?;
    // SAFETY: `dy` has t rows of o values and `grad` has o values; each block owns 32 columns of the
    // gradient.
    unsafe { launch.run(Grid::new(o.div_ceil(COLUMNS), THREADS)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, randn};
    use candle_core::Device;

    #[test]
    fn a_bias_is_added_and_its_gradient_summed() -> Result<()> {
        let (y, b) = (randn(1, (5, 3), DType::F32)?, randn(2, 3, DType::F32)?);
        let sum = add(y.copy()?, &b)?;
        close(&sum, &y.broadcast_add(&b)?, 0.0);
        for dtype in [DType::BF16, DType::F16] {
            let (y, b) = (randn(1, (70, 33), dtype)?, randn(2, 33, dtype)?);
            close(&add(y.copy()?, &b)?, &y.broadcast_add(&b)?, 0.0);
        }
        let grad = Tensor::ones((1, 3), DType::F32, &Device::Cpu)?;
        sum_onto((&grad, true), &y)?;
        close(&grad, &(y.sum_keepdim(0)? + 1.0)?, 1e-6);
        sum_onto((&grad, false), &y)?;
        close(&grad, &y.sum_keepdim(0)?, 1e-6);
        Ok(())
    }
}
