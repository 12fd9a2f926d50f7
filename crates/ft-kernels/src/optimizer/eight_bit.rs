//! AdamW with 8-bit moments: blocks of 256 values with one scale (absmax), and codes of a dynamic map
//! (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022), as in bitsandbytes.
//!
//! The update equals [`super::adamw`] in f32, applied to the moments before re-quantization. Codes are
//! rounded to nearest, as in the CUDA and PyTorch kernels of bitsandbytes; the CPU library of
//! bitsandbytes uses a coarser lookup table.

use super::rounding::{Draws, Stored, Words, on_stored};
use super::{AdamW, cuda, put_copy};
use crate::Tensor;
use crate::cpu::{in_place, is_cpu, view};
use candle_core::{Device, Result};
use rayon::prelude::*;
use std::sync::LazyLock;

/// Values per quantization block.
pub const BLOCK: usize = 256;
/// Smallest tensor, in values, with 8-bit moments.
pub const SMALLEST: usize = 4096;
/// Codes of zero for the first and second moment.
pub const ZERO: [u8; 2] = [127, 0];
/// Codes per map.
const CODES: usize = 256;
/// Minimum blocks per task.
const EACH: usize = 64;

/// Ascending code values of the first moment (signed) and the second moment (unsigned).
static MAPS: LazyLock<[[f32; CODES]; 2]> = LazyLock::new(|| [map(true), map(false)]);

/// The dynamic map: seven decades up to 1, each with twice as many fractions between 0.1 and 1 as the
/// decade below, plus 0 and 1.
fn map(signed: bool) -> [f32; CODES] {
    let mut values = vec![0.0, 1.0];
    for decade in 0..7 {
        let fractions = 1 << if signed { decade } else { decade + 1 };
        for i in 0..fractions {
            let x = (0.1 + 0.9 * (f64::from(i) + 0.5) / f64::from(fractions)) * 10f64.powi(decade - 6);
            values.push(x as f32);
            if signed {
                values.push(-x as f32);
            }
        }
    }
    values.sort_by(f32::total_cmp);
    let mut map = [0.0; CODES];
    map.iter_mut().zip(values).for_each(|(m, v)| *m = v);
    map
}

/// Both maps [2, 256], for the kernels.
///
/// # Errors
/// Device failure.
pub fn maps(device: &Device) -> Result<Tensor> {
    Tensor::from_vec(MAPS.concat(), (2, CODES), device)
}

/// Quantized moments of n values: codes `[n]` and scales `[n / 256]` of the first and the second moment.
#[derive(Clone, Debug)]
pub struct EightBit {
    /// Codes, u8.
    pub codes: [Tensor; 2],
    /// Scales per block, f32.
    pub scales: [Tensor; 2],
    /// Code values: [`maps`].
    pub maps: Tensor,
}

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

impl EightBit {
    /// Checks the moments' sizes against weights `p` and gradients `g`.
    fn check(&self, p: &Tensor, g: &Tensor) -> Result<()> {
        let n = p.elem_count();
        let fits = |t: &[Tensor; 2], len: usize| t.iter().all(|t| t.dims() == [len]);
        if g.elem_count() != n || !fits(&self.codes, n) || !fits(&self.scales, n.div_ceil(BLOCK)) {
            candle_core::bail!("adamw8bit: {n} values with {self:?}");
        }
        Ok(())
    }
}

fn adamw8bit_cpu<T: Stored>(p: &Tensor, m: &EightBit, g: &Tensor, draws: Draws, k: &AdamW) -> Result<()> {
    if p.ghost().is_some() {
        return Ok(());
    }
    let g = view::<f32>(g)?;
    all_in_place::<T>(p, m, &|p, [mc, vc], [ms, vs]| {
        let codes = mc.par_chunks_mut(BLOCK).zip(vc.par_chunks_mut(BLOCK));
        let scales = ms.par_iter_mut().zip(vs.par_iter_mut());
        let values = p.par_chunks_mut(BLOCK).zip(g.par_chunks(BLOCK));
        let blocks = values.zip(codes.zip(scales)).enumerate().with_min_len(EACH);
        blocks.for_each(|(b, ((p, g), (codes, scales)))| {
            block(p, g, codes.into(), scales.into(), draws.from(b * BLOCK), k);
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
    for ((codes, scale), (values, map)) in codes.into_iter().zip(scales).zip(moments.iter().zip(MAPS.iter()))
    {
        *scale = encode(&values[..codes.len()], map, codes);
    }
}

/// Quantizes values and returns the scale. An infinite value makes the scale infinite; a NaN reaches the
/// scale only from the end of the block.
fn encode(values: &[f32], map: &[f32; CODES], codes: &mut [u8]) -> f32 {
    let larger = |a: f32, x: &f32| if x.abs() <= a { a } else { x.abs() };
    let scale = values.iter().fold(0f32, larger);
    let inverse = 1.0 / scale.max(1e-38);
    for (code, x) in codes.iter_mut().zip(values) {
        let x = (x * inverse).clamp(-1.0, 1.0);
        // first code with upper bound >= x
        let (mut low, mut high) = (0, CODES - 1);
        while low < high {
            let at = (low + high) / 2;
            match (map[at] + map[at + 1]) / 2.0 < x {
                true => low = at + 1,
                false => high = at,
            }
        }
        *code = low as u8;
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{randn, values};
    use candle_core::DType;

    fn zeros(n: usize, device: &Device) -> Result<EightBit> {
        let codes = || Tensor::zeros(n, DType::U8, device);
        let scales = || Tensor::zeros(n.div_ceil(BLOCK), DType::F32, device);
        let (codes, scales) = ([codes()?, codes()?], [scales()?, scales()?]);
        Ok(EightBit { codes, scales, maps: maps(device)? })
    }

    /// Matches `create_dynamic_map` of bitsandbytes 0.50.2 at codes 0, 1, 127, 128, 200, 254, 255.
    #[test]
    fn maps_are_those_of_bitsandbytes() {
        for (map, want) in MAPS.iter().zip(BITSANDBYTES) {
            for (at, want) in [0, 1, 127, 128, 200, 254, 255].into_iter().zip(want) {
                assert!((map[at] - want).abs() <= 2e-7 * want.abs(), "{at}: {} {want}", map[at]);
            }
            assert!(map.windows(2).all(|w| w[0] < w[1]));
        }
    }
    const BITSANDBYTES: [[f32; 7]; 2] = [
        [-0.992_968_74, -0.978_906_3, 0.0, 5.500_000_4e-7, 0.233_593_75, 0.992_968_74, 1.0],
        [0.0, 3.250_000_3e-7, 0.103_515_625, 0.110_546_87, 0.616_796_85, 0.996_484_4, 1.0],
    ];

    /// Each value maps to the nearest code of its block, and the scale is the largest magnitude.
    #[test]
    fn codes_are_the_nearest() -> Result<()> {
        let x = values(&randn(1, 200, DType::F32)?);
        let x: Vec<f32> = x.iter().map(|x| (x * x * x) as f32).collect();
        for map in MAPS.iter() {
            let mut codes = vec![0; x.len()];
            let scale = encode(&x, map, &mut codes);
            assert_eq!(scale, x.iter().fold(0f32, |a, x| a.max(x.abs())));
            for (x, code) in x.iter().zip(codes) {
                let x = (x / scale).clamp(map[0], 1.0);
                let nearest = map.iter().map(|m| (m - x).abs()).fold(f32::MAX, f32::min);
                assert!((map[usize::from(code)] - x).abs() <= nearest + 1e-7, "{x}");
            }
        }
        assert!(encode(&[1.0, f32::NAN], &MAPS[0], &mut [0; 2]).is_nan());
        let mut zero = [9; 3];
        for (map, code) in MAPS.iter().zip(ZERO) {
            assert_eq!((encode(&[0.0; 3], map, &mut zero), zero), (0.0, [code; 3]));
        }
        Ok(())
    }

    /// While moments are exactly representable, updates equal those with f32 moments. The first update
    /// has such gradients.
    #[test]
    fn the_first_update_is_adamw_s() -> Result<()> {
        let d = &Device::Cpu;
        for n in [1, 256, 700] {
            let (p, g) = (randn(1, n, DType::F32)?, randn(2, n, DType::F32)?);
            let (q, m, v) =
                (p.force_contiguous()?, Tensor::zeros(n, DType::F32, d)?, Tensor::zeros(n, DType::F32, d)?);
            let copy = Tensor::zeros(n, DType::BF16, d)?;
            let k =
                AdamW { lr: 1e-2, betas: [0.9, 0.99], eps: 1e-8, weight_decay: 0.1, t: 1, grad_scale: 0.5 };
            let states = zeros(n, d)?;
            adamw8bit(&p, &states, &g, Some(&copy), &k)?;
            super::super::adamw(&q, &m, &v, &g, None, &k)?;
            for (a, b) in values(&p).iter().zip(values(&q)) {
                assert!((a - b).abs() <= 1e-6, "{a} {b}");
            }
            assert_eq!(values(&copy), values(&p.to_dtype(DType::BF16)?));
            // quantization error: at most half the spacing of the coarsest fractions
            let codes: Vec<u8> = states.codes[0].real()?.to_vec1()?;
            let scales = values(&states.scales[0]);
            for (i, m) in values(&m).iter().enumerate() {
                let held = f64::from(MAPS[0][usize::from(codes[i])]) * scales[i / BLOCK];
                assert!((held - m).abs() <= 0.01 * scales[i / BLOCK], "{held} {m}");
            }
        }
        assert!(
            adamw8bit(
                &randn(1, 300, DType::F32)?,
                &zeros(256, d)?,
                &randn(1, 300, DType::F32)?,
                None,
                &AdamW { lr: 0.0, betas: [0.0; 2], eps: 0.0, weight_decay: 0.0, t: 1, grad_scale: 1.0 }
            )
            .is_err()
        );
        Ok(())
    }
}
