//! AdamW and sums of squares on CUDA.

use super::draws::Draws;
use super::eight_bit::{BLOCK, EightBit};
use super::settings::AdamW;
use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::tensor::ghosts;
use candle_core::{DType, Result};

/// Threads per block; must match optimizer.cu.
const THREADS: usize = 256;
/// Quantization blocks per thread block: 8 for each of 8 warps; must match optimizer.cu.
const QUANTIZED: usize = 64;
/// Values per thread of an update.
const VECTOR: usize = 4;
/// Maximum blocks per partial sum, and minimum values per thread.
const BLOCKS: usize = 1024;
const EACH: usize = 16;

/// Launches an update of `n` values: pushes the hyperparameters, for 8-bit moments with the decay rate of the first.
fn update(launch: Launch<'_>, n: usize, k: &AdamW, eight_bit: bool) -> Result<()> {
    let [b1, b2] = k.betas;
    let mut launch = launch.with(args![k.grad_scale as f32])?;
    if eight_bit {
        launch = launch.with(args![b1 as f32])?;
    }
    let launch = launch.with(args![(1.0 - b1) as f32, b2 as f32, (1.0 - b2) as f32])?;
    let (decay, step) = (1.0 - k.lr * k.weight_decay, k.lr_over_bias());
    let launch = launch.with(args![decay as f32, step as f32, k.sqrt_bias2() as f32, k.eps as f32])?;
    let per_block = if eight_bit { BLOCK * QUANTIZED } else { VECTOR * THREADS };
    // SAFETY: the callers checked that all buffers have n values; they are f32, except for 16-bit weights or the copy,
    // whose dtype selects the kernel, and for codes in u8, with one scale per quantization block; the two maps have 256
    // entries each; the grid covers all values.
    unsafe { launch.run(Grid::new(n.div_ceil(per_block), THREADS as u32)) }
}

/// Pushes codes and scales of both moments.
fn coded<'a>(launch: Launch<'a>, m: &'a EightBit) -> Result<Launch<'a>> {
    launch.with(args![&m.codes[0], &m.scales[0], &m.codes[1], &m.scales[1]])
}

/// Pushes the random stream for stochastic rounding.
fn drawn(launch: Launch<'_>, draws: Draws) -> Result<Launch<'_>> {
    let [key0, key1, high0, high1] = draws.stream.words();
    launch.with(args![draws.first, key0, key1, high0, high1])
}

/// Updates weights, moments and the optional compute copy.
pub fn adamw([p, m, v, g]: [&Tensor; 4], copy: Option<&Tensor>, k: &AdamW) -> Result<()> {
    let n = p.elem_count();
    let flat = |t: &Tensor| t.dims() == [n] && t.dtype() == DType::F32;
    if ![p, m, v, g].into_iter().all(flat) || copy.is_some_and(|c| c.dims() != [n]) {
        candle_core::bail!("adamw: buffers that are not f32, or not all of {n} values");
    }
    if ghosts(&[p], [], |_| ()).is_some() {
        return Ok(());
    }
    let launch = Launch::of(copy.unwrap_or(p), compiled!(OPTIMIZER), "optimizer_adamw")?;
    update(launch.with(args![p, m, v, g, copy, n as u64])?, n, k, false)
}

/// Like [`adamw`] with 8-bit moments: one warp per quantization block.
pub fn adamw8bit(p: &Tensor, m: &EightBit, g: &Tensor, copy: Option<&Tensor>, k: &AdamW) -> Result<()> {
    let n = p.elem_count();
    if p.dtype() != DType::F32 || g.dtype() != DType::F32 || copy.is_some_and(|c| c.dims() != [n]) {
        candle_core::bail!("adamw8bit: buffers that are not f32, or not all of {n} values");
    }
    if ghosts(&[p], [], |_| ()).is_some() {
        return Ok(());
    }
    let launch =
        Launch::of(copy.unwrap_or(p), compiled!(OPTIMIZER), "optimizer_adamw8bit")?.with(args![p])?;
    update(coded(launch, m)?.with(args![g, copy, &m.maps, n as u64])?, n, k, true)
}

/// Like [`adamw`] for 16-bit weights without an f32 master copy.
pub fn adamw_rounded([p, m, v, g]: [&Tensor; 4], draws: Draws, k: &AdamW) -> Result<()> {
    let n = p.elem_count();
    if [m, v, g].into_iter().any(|t| t.dims() != [n] || t.dtype() != DType::F32) {
        candle_core::bail!("adamw: moments and gradients that are not f32, or not all of {n} values");
    }
    if ghosts(&[p], [], |_| ()).is_some() {
        return Ok(());
    }
    let launch =
        Launch::of(p, compiled!(OPTIMIZER), "optimizer_adamw_rounded")?.with(args![p, m, v, g, n as u64])?;
    update(drawn(launch, draws)?, n, k, false)
}

/// Like [`adamw8bit`] for 16-bit weights without an f32 master copy.
pub fn adamw8bit_rounded(p: &Tensor, m: &EightBit, g: &Tensor, draws: Draws, k: &AdamW) -> Result<()> {
    let n = p.elem_count();
    if g.dtype() != DType::F32 {
        candle_core::bail!("adamw8bit: gradients that are not f32");
    }
    if ghosts(&[p], [], |_| ()).is_some() {
        return Ok(());
    }
    let launch = Launch::of(p, compiled!(OPTIMIZER), "optimizer_adamw8bit_rounded")?.with(args![p])?;
    let launch = coded(launch, m)?.with(args![g, &m.maps, n as u64])?;
    update(drawn(launch, draws)?, n, k, true)
}

/// Rounds f32 values stochastically to 16 bits.
pub fn round(values: &Tensor, to: &Tensor, draws: Draws) -> Result<()> {
    let n = to.elem_count();
    if ghosts(&[to], [], |_| ()).is_some() {
        return Ok(());
    }
    let launch = Launch::of(to, compiled!(OPTIMIZER), "optimizer_round")?;
    let launch = drawn(launch.with(args![values, to, n as u64])?, draws)?;
    // SAFETY: both buffers have n values; the source is f32, the target's dtype selects the kernel.
    unsafe { launch.run(Grid::new(n.div_ceil(VECTOR * THREADS), THREADS as u32)) }
}

/// Sum of squares over flat f32 buffers on one device. Returns an f64 tensor `[1]` on the same device.
pub fn squares(buffers: &[&Tensor]) -> Result<Tensor> {
    let blocks = |b: &Tensor| b.elem_count().div_ceil(EACH * THREADS).min(BLOCKS);
    let count: usize = buffers.iter().map(|b| blocks(b)).sum();
    let Some(first) = buffers.first() else { candle_core::bail!("a sum of squares of nothing") };
    let (partial, total) = (empty(first, count, DType::F64)?, empty(first, 1, DType::F64)?);
    let mut at = 0;
    for b in buffers {
        if b.dtype() != DType::F32 {
            candle_core::bail!("a sum of squares of {:?}", b.dtype());
        }
        let own = partial.narrow(0, at, blocks(b))?;
        at += blocks(b);
        let launch = Launch::of(b, compiled!(OPTIMIZER), "optimizer_squares")?;
        let launch = launch.with(args![*b, b.elem_count() as u64, &own])?;
        // SAFETY: the kernel reads the buffer's `count` values, and each block writes one sum.
        unsafe { launch.run(Grid::new(blocks(b), THREADS as u32)) }?;
    }
    let launch = Launch::named(&partial, compiled!(OPTIMIZER), "optimizer_total")?;
    let launch = launch.with(args![&partial, count, &total])?;
    // SAFETY: the kernel reads `count` partial sums and writes one value.
    unsafe { launch.run(Grid::new(1, THREADS as u32)) }?;
    Ok(total)
}
