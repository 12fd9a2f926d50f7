//! AdamW with moments in 8 bits: blocks of 256 values, each with its largest magnitude as scale, and codes into a dynamic
//! map (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022), as bitsandbytes computes it.
//!
//! The update itself is [`super::adamw`]'s, in f32 with the moments before they are rounded. Rounding is to the nearest
//! code, as in bitsandbytes' CUDA kernels and its plain PyTorch ones; its CPU library looks codes up in a coarser table.

use super::rounding::{Draws, Stored, Words, on_stored};
use super::{AdamW, cuda, put_copy};
use crate::Tensor;
use crate::cpu::{in_place, is_cpu, view};
use candle_core::{Device, Result};
use rayon::prelude::*;
use std::sync::LazyLock;

/// Values of a quantization block.
pub const BLOCK: usize = 256;
/// Values of the smallest tensor whose moments are in 8 bits.
pub const SMALLEST: usize = 4096;
/// The codes of zero, of the mean and of the mean square.
pub const ZERO: [u8; 2] = [127, 0];
/// Codes of a map.
const CODES: usize = 256;
/// Blocks that one task takes at the least.
const EACH: usize = 64;

/// What codes stand for, in ascending order: of the mean with signs, of the mean square without.
static MAPS: LazyLock<[[f32; CODES]; 2]> = LazyLock::new(|| [map(true), map(false)]);

/// The dynamic map: for each of seven decades up to 1, fractions between 0.1 and 1, twice as many as in the decade below;
/// 0, and 1.
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

/// Both maps [2, 256], as the kernels take them.
///
/// # Errors
/// Of the device.
pub fn maps(device: &Device) -> Result<Tensor> {
    Tensor::from_vec(MAPS.concat(), (2, CODES), device)
}

/// Moments of a range of values: codes `[n]` and scales `[n / 256]` of the mean, and of the mean square.
#[derive(Clone, Debug)]
pub struct EightBit {
    /// Codes.
    pub codes: [Tensor; 2],
    /// Scales of blocks.
    pub scales: [Tensor; 2],
    /// What codes stand for: [`maps`].
    pub maps: Tensor,
}

/// As [`super::adamw`], with moments in 8 bits; the values begin with a block.
///
/// # Errors
/// Buffers of other lengths.
pub fn adamw8bit(p: &Tensor, m: &EightBit, g: &Tensor, copy: Option<&Tensor>, k: &AdamW) -> Result<()> {
    m.check(p, g)?;
    if !is_cpu(p) {
        return cuda::adamw8bit(p, m, g, copy, k);
    }
    adamw8bit_cpu::<f32>(p, m, g, Draws::NONE, k)?;
    put_copy(p, copy)
}

/// As [`super::adamw_rounded`], with moments in 8 bits; the values begin with a block.
///
/// # Errors
/// Buffers of other lengths.
pub fn adamw8bit_rounded(p: &Tensor, m: &EightBit, g: &Tensor, draws: Draws, k: &AdamW) -> Result<()> {
    m.check(p, g)?;
    if !is_cpu(p) {
        return cuda::adamw8bit_rounded(p, m, g, draws, k);
    }
    on_stored!(p, adamw8bit_cpu(p, m, g, draws, k))
}

impl EightBit {
    /// Whether they are those of weights `p` with gradients `g`.
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

/// What is done with the values, the codes and the scales.
type All<'a, T> = dyn Fn(&mut [T], [&mut [u8]; 2], [&mut [f32]; 2]) + 'a;

/// Calls `f` with all of them.
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

/// One block of the update.
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

/// Rounds values to codes; gives their scale. A value that is not finite makes a scale that is not.
fn encode(values: &[f32], map: &[f32; CODES], codes: &mut [u8]) -> f32 {
    let larger = |a: f32, x: &f32| if x.abs() <= a { a } else { x.abs() };
    let scale = values.iter().fold(0f32, larger);
    let inverse = 1.0 / scale.max(1e-38);
    for (code, x) in codes.iter_mut().zip(values) {
        let x = (x * inverse).clamp(-1.0, 1.0);
        // the first whose upper bound is no lower than x
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

    /// bitsandbytes 0.50.2's `create_dynamic_map`: codes 0, 1, 127, 128, 200, 254, 255.
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

    /// Each value becomes the nearest code of its block, the largest magnitude the scale.
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

    /// While moments are exactly codes, the update is that of f32 moments: the first one, whose gradients are so.
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
            // what was rounded is within half a step of the coarsest fraction
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
