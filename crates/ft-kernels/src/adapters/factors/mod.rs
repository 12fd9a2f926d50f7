//! Gradients of LoRA's factors on CUDA, from one read of the output's gradient.
//!
//! With `u = s x A^T` and `y = x W^T + u B^T`, the output's gradient dy `[t, o]` enters two thin products:
//! `du = s dy B` `[t, r]`, from which those of x and A follow, and `dB = dy^T u` `[o, r]`. Each is bound by the read of
//! dy; factors.cu reads it once for both.

use crate::cpu::is_native;
use crate::cuda::launch::{Argument, Grid, Launch, args, compiled, empty};
use crate::ledger::Cost;
use crate::quantized::tiles::FEW;
use crate::tensor::row_stride;
use crate::{Tensor, gemm, is_half};
use candle_core::{DType, Result};

/// Same as in factors.cu: threads of a block, rows of a tile, columns of a block, row length of B and u, and bytes of
/// shared memory.
const THREADS: u32 = 256;
const TOKENS: usize = 128;
const SLAB: usize = 512;
const LOW: usize = 32;
const SHARED: usize = 3 * TOKENS * 64 * 2 + SLAB * LOW * 2 + 2 * TOKENS * LOW * 2;
/// Blocks of a launch, about: one for each multiprocessor of a large card. More would write more partial sums.
const BLOCKS: usize = 132;

/// Shared memory at launch of the kernel `kernel`.
#[cfg(test)]
pub fn shared_memory(kernel: &str) -> usize {
    let is_sum = kernel.starts_with("factors_sum");
    if kernel.starts_with("factors_") && !is_sum { SHARED } else { 0 }
}

/// Whether [`gradients`] takes an output's gradient `[t, o]` and B `[o, r]`: on CUDA in half precision, up to rank 32.
///
/// # Errors
/// Not a matrix.
pub fn takes(dy: &Tensor, b: &Tensor) -> Result<bool> {
    let ((t, o), (_, r)) = (dy.dims2()?, b.dims2()?);
    let sizes = t > FEW && o.is_multiple_of(8) && (1..=LOW).contains(&r);
    Ok(!is_native(dy) && is_half(dy) && b.dtype() == dy.dtype() && sizes)
}

/// `du = scale dy B`, and `grad = rest dy^T u` or `+=` with `add`, in f32: dy `[t, o]`, B `[o, r]`, u and du `[t, r]`,
/// `grad` `[o, r]`. See [`takes`].
///
/// # Errors
/// Other shapes or dtypes; out of memory.
pub fn gradients(
    dy: &Tensor,
    (b, scale): (&Tensor, f64),
    du: &Tensor,
    (u, rest): (&Tensor, f64),
    (grad, add): (&Tensor, bool),
) -> Result<()> {
    let ((t, o), (_, r)) = (dy.dims2()?, b.dims2()?);
    let shapes = [b.dims(), u.dims(), du.dims(), grad.dims()] == [[o, r], [t, r], [t, r], [o, r]];
    let half = [b, u, du].iter().all(|x| x.dtype() == dy.dtype());
    if !takes(dy, b)? || !shapes || !half || grad.dtype() != DType::F32 {
        candle_core::bail!("gradients of LoRA: {:?}, B {:?}, u {:?}", dy.shape(), b.shape(), u.shape());
    }
    gemm::work(dy, false, b, None)?;
    gemm::work(dy, true, u, Some(grad))?;
    let (slabs, all) = (o.div_ceil(SLAB), t.div_ceil(TOKENS));
    let tiles = all.div_ceil((BLOCKS / slabs).max(1));
    let (blocks, low) = (all.div_ceil(tiles), if r <= LOW / 2 { LOW / 2 } else { LOW });
    if let Some(g) = dy.ghost() {
        let _parts = [slabs * t, blocks * o].map(|rows| g.ledger().hold((4 * rows * low) as u64));
        g.ledger().work(Cost { started: 2.0, ..Cost::default() });
        return Ok(());
    }
    // whole vectors of each row
    let whole = |x: &Tensor| {
        row_stride(x.layout())
            .is_some_and(|n| n.is_multiple_of(8) && x.layout().start_offset().is_multiple_of(8))
    };
    let dy = &if whole(dy) { dy.clone() } else { dy.force_contiguous()? };
    let apart = |x: &Tensor| row_stride(x.layout()).unwrap_or(r);
    let parts_u = empty(dy, (slabs * t, low), DType::F32)?;
    let parts_b = empty(dy, (blocks * o, low), DType::F32)?;
    let products = Launch::of(dy, compiled!(FACTORS), &format!("factors_{low}"))?
        .with(args![Argument::Rows(dy), apart(dy), t, o, b, Argument::Rows(u), apart(u), r, tiles])?
        .with(args![&parts_u, &parts_b])?;
    let sum = Launch::of(dy, compiled!(FACTORS), "factors_sum")?
        .with(args![&parts_u, slabs, &parts_b, blocks, t, o, r, low, scale as f32])?
        .with(args![Argument::Rows(du), apart(du), rest as f32, u32::from(add), grad])?;
    // SAFETY: shapes and dtypes are those checked above, rows have these strides, and those of dy whole vectors. The
    // blocks write all partial sums; the other kernel has a thread for each result.
    unsafe {
        products.run(Grid::new(slabs, THREADS).by(blocks).shared(SHARED))?;
        sum.run(Grid::new(((t + o) * r).div_ceil(THREADS as usize), THREADS))
    }
}
