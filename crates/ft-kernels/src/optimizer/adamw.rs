//! AdamW with f32 moments.

use super::cuda;
use super::draws::{Draws, Stored, on_stored};
use super::settings::{AdamW, CHUNK, PIECE};
use crate::Tensor;
use crate::cpu::{each, in_place, is_cpu, narrow, vectorised, view};
use candle_core::{DType, Result};
use half::bf16;

/// Updates master weights `p` and moments `m`, `v` from the gradient `g`, all f32 `[n]`, in place. If
/// given, `copy` `[n]` receives the new weights in its own dtype. On CUDA this is a single pass without
/// extra memory.
pub fn adamw(p: &Tensor, m: &Tensor, v: &Tensor, g: &Tensor, copy: Option<&Tensor>, k: &AdamW) -> Result<()> {
    if !is_cpu(p) {
        return cuda::adamw([p, m, v, g], copy, k);
    }
    let [halves, other] = [true, false].map(|is| copy.filter(|c| (c.dtype() == DType::BF16) == is));
    adamw_cpu::<f32>(p, [m, v, g], halves, Draws::NONE, k)?;
    put_copy(p, other)
}

/// [`adamw`] for 16-bit weights `p` without an f32 master copy: computes the update in f32 and rounds it
/// stochastically.
pub fn adamw_rounded(p: &Tensor, [m, v, g]: [&Tensor; 3], draws: Draws, k: &AdamW) -> Result<()> {
    if !is_cpu(p) {
        return cuda::adamw_rounded([p, m, v, g], draws, k);
    }
    on_stored!(p, adamw_cpu(p, [m, v, g], None, draws, k))
}

/// Copies the new weights to `copy`, if given.
pub(super) fn put_copy(p: &Tensor, copy: Option<&Tensor>) -> Result<()> {
    let Some(copy) = copy else { return Ok(()) };
    let n = p.elem_count();
    (0..n).step_by(PIECE).try_for_each(|start| {
        copy.slice_set(&p.narrow(0, start, PIECE.min(n - start))?.to_dtype(copy.dtype())?, 0, start)
    })
}

/// A single fused pass, since updates are memory-bound.
fn adamw_cpu<T: Stored>(
    p: &Tensor,
    [m, v, g]: [&Tensor; 3],
    copy: Option<&Tensor>,
    draws: Draws,
    k: &AdamW,
) -> Result<()> {
    const NAME: &str = "adamw";
    if p.ghost().is_some() {
        return Ok(());
    }
    let g = view::<f32>(g)?;
    in_place::<f32>(NAME, m, |m| {
        in_place::<f32>(NAME, v, |v| {
            in_place::<T>(NAME, p, |p| match copy {
                None => {
                    pass(p, [m, v], &g, &mut [], draws, k);
                    Ok(())
                }
                Some(copy) => in_place::<bf16>(NAME, copy, |copy| {
                    pass(p, [m, v], &g, copy, draws, k);
                    Ok(())
                }),
            })
        })
    })
}

/// Updates a chunk of values and, if not empty, of the rounded copy.
fn pass<T: Stored>(
    p: &mut [T],
    [m, v]: [&mut [f32]; 2],
    g: &[f32],
    copy: &mut [bf16],
    draws: Draws,
    k: &AdamW,
) {
    let gs = k.grad_scale as f32;
    let (b1, b2) = ((1.0 - k.betas[0]) as f32, k.betas[1] as f32);
    let c2 = (1.0 - k.betas[1]) as f32;
    let decay = (1.0 - k.lr * k.weight_decay) as f32;
    let (step, root, eps) = (k.lr_over_bias() as f32, k.sqrt_bias2() as f32, k.eps as f32);
    let mut copies = copy.chunks_mut(CHUNK);
    let copies = g.chunks(CHUNK).map(|_| copies.next().unwrap_or_default());
    let moments = m.chunks_mut(CHUNK).zip(v.chunks_mut(CHUNK));
    let values = p.chunks_mut(CHUNK).zip(g.chunks(CHUNK)).zip(copies);
    each(values.zip(moments).enumerate(), |(c, (((p, g), copy), (m, v)))| {
        let mut words = draws.from(c * CHUNK);
        vectorised(|| {
            for ((p, g), (m, v)) in p.iter_mut().zip(g).zip(m.iter_mut().zip(v)) {
                let g = *g * gs;
                *m += (g - *m) * b1;
                *v = *v * b2 + c2 * g * g;
                *p = T::of(p.widen() * decay - step * (*m / (v.sqrt() / root + eps)), &mut words);
            }
            copy.iter_mut().zip(p).for_each(|(c, p)| *c = narrow(p.widen()));
        });
    });
}
