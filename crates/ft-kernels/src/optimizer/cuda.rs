//! AdamW and sums of squares on CUDA.

use super::eight_bit::{BLOCK, EightBit};
use super::{AdamW, Draws};
use crate::Tensor;
use crate::cuda::launch::{Grid, Launch, compiled, empty, ghosts};
use candle_core::{DType, Result};

/// Threads of a block, as in optimizer.cu.
const THREADS: usize = 256;
/// Values that a thread of the update takes.
const VECTOR: usize = 4;
/// Blocks that one sum is shared out to at the most, and values that a thread takes at the least.
const BLOCKS: usize = 1024;
const EACH: usize = 16;

/// Adds the numbers of an update.
fn numbers<'a>(launch: Launch<'a>, k: &AdamW) -> Launch<'a> {
    rest(launch.number(k.grad_scale as f32), k)
}

/// As [`numbers`], for moments in 8 bits.
fn numbers8<'a>(launch: Launch<'a>, k: &AdamW) -> Launch<'a> {
    rest(launch.number(k.grad_scale as f32).number(k.betas[0] as f32), k)
}

fn rest<'a>(launch: Launch<'a>, k: &AdamW) -> Launch<'a> {
    launch
        .number((1.0 - k.betas[0]) as f32)
        .number(k.betas[1] as f32)
        .number((1.0 - k.betas[1]) as f32)
        .number((1.0 - k.lr * k.weight_decay) as f32)
        .number(k.lr_over_bias() as f32)
        .number(k.sqrt_bias2() as f32)
        .number(k.eps as f32)
}

/// Adds codes and scales of both moments.
fn coded<'a>(launch: Launch<'a>, m: &'a EightBit) -> Result<Launch<'a>> {
    launch.tensor(&m.codes[0])?.tensor(&m.scales[0])?.tensor(&m.codes[1])?.tensor(&m.scales[1])
}

/// Adds the random numbers that round.
fn drawn(launch: Launch<'_>, draws: Draws) -> Launch<'_> {
    draws.stream.words().into_iter().fold(launch.number(draws.first), Launch::number)
}

/// One update of weights, moments and the weights' copy; the gradient is zero then.
pub fn adamw([p, m, v, g]: [&Tensor; 4], copy: Option<&Tensor>, k: &AdamW) -> Result<()> {
    let n = p.elem_count();
    let flat = |t: &Tensor| t.dims() == [n] && t.dtype() == DType::F32;
    if ![p, m, v, g].into_iter().all(flat) || copy.is_some_and(|c| c.dims() != [n]) {
        candle_core::bail!("adamw: buffers that are not f32, or not all of {n} values");
    }
    if ghosts(&[p], [], |_| ()).is_some() {
        return Ok(());
    }
    let launch = Launch::of(copy.unwrap_or(p), compiled!(OPTIMIZER), "optimizer_adamw")?
        .tensor(p)?
        .tensor(m)?
        .tensor(v)?
        .tensor(g)?
        .maybe(copy)?
        .number(n as u64);
    let launch = numbers(launch, k);
    // SAFETY: all buffers have n values, of f32 but for the copy, whose type names the kernel.
    unsafe { launch.run(Grid::new(n.div_ceil(VECTOR * THREADS), THREADS as u32)) }
}

/// As [`adamw`], with moments in 8 bits: a thread block takes a block of them.
pub fn adamw8bit(p: &Tensor, m: &EightBit, g: &Tensor, copy: Option<&Tensor>, k: &AdamW) -> Result<()> {
    let n = p.elem_count();
    if p.dtype() != DType::F32 || g.dtype() != DType::F32 || copy.is_some_and(|c| c.dims() != [n]) {
        candle_core::bail!("adamw8bit: buffers that are not f32, or not all of {n} values");
    }
    if ghosts(&[p], [], |_| ()).is_some() {
        return Ok(());
    }
    let launch = Launch::of(copy.unwrap_or(p), compiled!(OPTIMIZER), "optimizer_adamw8bit")?.tensor(p)?;
    let launch = coded(launch, m)?.tensor(g)?.maybe(copy)?.tensor(&m.maps)?.number(n as u64);
    let launch = numbers8(launch, k);
    // SAFETY: all buffers have n values, codes of a byte, scales one a block, the maps 256 each; a launch has a block of
    // threads for each of the values' blocks.
    unsafe { launch.run(Grid::new(n.div_ceil(BLOCK), THREADS as u32)) }
}

/// As [`adamw`], of weights of 16 bits without an f32 copy.
pub fn adamw_rounded([p, m, v, g]: [&Tensor; 4], draws: Draws, k: &AdamW) -> Result<()> {
    let n = p.elem_count();
    if [m, v, g].into_iter().any(|t| t.dims() != [n] || t.dtype() != DType::F32) {
        candle_core::bail!("adamw: moments and gradients that are not f32, or not all of {n} values");
    }
    if ghosts(&[p], [], |_| ()).is_some() {
        return Ok(());
    }
    let launch = Launch::of(p, compiled!(OPTIMIZER), "optimizer_adamw_rounded")?
        .tensor(p)?
        .tensor(m)?
        .tensor(v)?
        .tensor(g)?
        .number(n as u64);
    let launch = numbers(drawn(launch, draws), k);
    // SAFETY: all buffers have n values, the weights' type names the kernel, the others are of f32.
    unsafe { launch.run(Grid::new(n.div_ceil(VECTOR * THREADS), THREADS as u32)) }
}

/// As [`adamw8bit`], of weights of 16 bits without an f32 copy.
pub fn adamw8bit_rounded(p: &Tensor, m: &EightBit, g: &Tensor, draws: Draws, k: &AdamW) -> Result<()> {
    let n = p.elem_count();
    if g.dtype() != DType::F32 {
        candle_core::bail!("adamw8bit: gradients that are not f32");
    }
    if ghosts(&[p], [], |_| ()).is_some() {
        return Ok(());
    }
    let launch = Launch::of(p, compiled!(OPTIMIZER), "optimizer_adamw8bit_rounded")?.tensor(p)?;
    let launch = coded(launch, m)?.tensor(g)?.tensor(&m.maps)?.number(n as u64);
    let launch = numbers8(drawn(launch, draws), k);
    // SAFETY: all buffers have n values, of the weights' type that names the kernel and f32 gradients, codes of a byte, scales
    // one a block, the maps 256 each; a launch has a block of threads for each of the values' blocks.
    unsafe { launch.run(Grid::new(n.div_ceil(BLOCK), THREADS as u32)) }
}

/// Rounds f32 values to 16 bits by random numbers.
pub fn round(values: &Tensor, to: &Tensor, draws: Draws) -> Result<()> {
    let n = to.elem_count();
    if ghosts(&[to], [], |_| ()).is_some() {
        return Ok(());
    }
    let launch = Launch::of(to, compiled!(OPTIMIZER), "optimizer_round")?;
    let launch = drawn(launch.tensor(values)?.tensor(to)?.number(n as u64), draws);
    // SAFETY: both have n values, f32 and of the type that names the kernel.
    unsafe { launch.run(Grid::new(n.div_ceil(VECTOR * THREADS), THREADS as u32)) }
}

/// The sum of squares of all values of flat f32 buffers on one device, [1] in f64 there.
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
        let launch = Launch::of(b, compiled!(OPTIMIZER), "optimizer_squares")?
            .tensor(b)?
            .number(b.elem_count() as u64)
            .tensor(&own)?;
        // SAFETY: the kernel reads the buffer's values, and each block writes one sum.
        unsafe { launch.run(Grid::new(blocks(b), THREADS as u32)) }?;
    }
    let launch = Launch::named(&partial, compiled!(OPTIMIZER), "optimizer_total")?
        .tensor(&partial)?
        .count(count)?
        .tensor(&total)?;
    // SAFETY: the kernel reads `count` sums, and writes one.
    unsafe { launch.run(Grid::new(1, THREADS as u32)) }?;
    Ok(total)
}
