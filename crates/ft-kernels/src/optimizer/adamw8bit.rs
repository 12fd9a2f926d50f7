//! AdamW with 8-bit moments.

use super::adamw::put_copy;
use super::cuda;
use super::draws::{Draws, Stored, Words, on_stored};
use super::eight_bit::{BLOCK, BOUNDS, EightBit, MAPS, encode};
use super::settings::AdamW;
use crate::Tensor;
use crate::cpu::{each, in_place, is_cpu, vectorised, view};
use candle_core::Result;

/// Blocks per task.
const EACH: usize = 64;

/// [`super::adamw`] with 8-bit moments. The values must start at a block boundary.
///
/// # Errors
/// Buffer lengths differ.
pub fn adamw8bit(p: &Tensor, m: &EightBit, g: &Tensor, copy: Option<&Tensor>, k: &AdamW) -> Result<()> {
    m.check(p, g)?;
    if !is_cpu(p) {
        return cuda::adamw8bit(p, m, g, copy, k);
    }
    adamw8bit_cpu::<f32>(p, m, g, Draws::NONE, k)?;
    put_copy(p, copy)
}

/// [`super::adamw_rounded`] with 8-bit moments. The values must start at a block boundary.
///
/// # Errors
/// Buffer lengths differ.
pub fn adamw8bit_rounded(p: &Tensor, m: &EightBit, g: &Tensor, draws: Draws, k: &AdamW) -> Result<()> {
    m.check(p, g)?;
    if !is_cpu(p) {
        return cuda::adamw8bit_rounded(p, m, g, draws, k);
    }
    on_stored!(p, adamw8bit_cpu(p, m, g, draws, k))
}

fn adamw8bit_cpu<T: Stored>(p: &Tensor, m: &EightBit, g: &Tensor, draws: Draws, k: &AdamW) -> Result<()> {
    if p.ghost().is_some() {
        return Ok(());
    }
    let g = view::<f32>(g)?;
    all_in_place::<T>(p, m, &|p, [mc, vc], [ms, vs]| {
        let codes = mc.chunks_mut(EACH * BLOCK).zip(vc.chunks_mut(EACH * BLOCK));
        let scales = ms.chunks_mut(EACH).zip(vs.chunks_mut(EACH));
        let values = p.chunks_mut(EACH * BLOCK).zip(g.chunks(EACH * BLOCK));
        each(values.zip(codes.zip(scales)).enumerate(), |(task, ((p, g), ((mc, vc), (ms, vs))))| {
            let codes = mc.chunks_mut(BLOCK).zip(vc.chunks_mut(BLOCK));
            let values = p.chunks_mut(BLOCK).zip(g.chunks(BLOCK));
            for (b, ((p, g), (codes, scales))) in values.zip(codes.zip(ms.iter_mut().zip(vs))).enumerate() {
                let words = draws.from((task * EACH + b) * BLOCK);
                block(p, g, codes.into(), scales.into(), words, k);
            }
        });
    })
}

/// A function of the weights, and of codes and scales of both moments.
type All<'a, T> = dyn Fn(&mut [T], [&mut [u8]; 2], [&mut [f32]; 2]) + 'a;

/// Borrows all buffers mutably and calls `f`.
fn all_in_place<T: Stored>(p: &Tensor, m: &EightBit, f: &All<'_, T>) -> Result<()> {
    const NAME: &str = "adamw8bit";
    in_place::<T>(NAME, p, |p| {
        in_place::<u8>(NAME, &m.codes[0], |mc| {
            in_place::<u8>(NAME, &m.codes[1], |vc| {
                in_place::<f32>(NAME, &m.scales[0], |ms| {
                    in_place::<f32>(NAME, &m.scales[1], |vs| {
                        f(p, [mc, vc], [ms, vs]);
                        Ok(())
                    })
                })
            })
        })
    })
}

/// Updates one quantization block.
fn block<T: Stored>(
    p: &mut [T],
    g: &[f32],
    codes: [&mut [u8]; 2],
    scales: [&mut f32; 2],
    mut words: Words,
    k: &AdamW,
) {
    let (b1, b2) = (k.betas[0] as f32, k.betas[1] as f32);
    let (c1, c2, gs) = ((1.0 - k.betas[0]) as f32, (1.0 - k.betas[1]) as f32, k.grad_scale as f32);
    let decay = (1.0 - k.lr * k.weight_decay) as f32;
    let (step, root, eps) = (k.lr_over_bias() as f32, k.sqrt_bias2() as f32, k.eps as f32);
    let mut moments = [[0f32; BLOCK]; 2];
    let [ms, vs] = &mut moments;
    let [mc, vc] = &codes;
    for (i, (p, g)) in p.iter_mut().zip(g).enumerate() {
        let g = g * gs;
        let m = MAPS[0][usize::from(mc[i])] * *scales[0] * b1 + g * c1;
        let v = MAPS[1][usize::from(vc[i])] * *scales[1] * b2 + g * g * c2;
        *p = T::of(p.widen() * decay - step * (m / (v.sqrt() / root + eps)), &mut words);
        (ms[i], vs[i]) = (m, v);
    }
    let quantized = codes.into_iter().zip(scales);
    for ((codes, scale), (values, bounds)) in quantized.zip(moments.iter().zip(BOUNDS.iter())) {
        *scale = vectorised(|| encode(&values[..codes.len()], bounds, codes));
    }
}
