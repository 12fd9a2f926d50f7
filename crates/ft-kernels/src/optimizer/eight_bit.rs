//! AdamW with 8-bit moments: blocks of 256 values with one scale (absmax), and codes of [`dynamic_map`], as in
//! bitsandbytes.
//!
//! The update equals [`super::adamw`] in f32, applied to the moments before re-quantization. Codes are rounded to
//! nearest, as in the PyTorch kernels of bitsandbytes. Its CUDA kernel gives negative values that round to zero the
//! code below, and decays weights after the update; its CPU library uses a coarser lookup table.

use crate::Tensor;
use crate::quantized::dynamic_map;
use candle_core::{Device, Result};
use std::sync::LazyLock;

/// Values per quantization block.
pub const BLOCK: usize = 256;
/// Smallest tensor, in values, with 8-bit moments.
pub const SMALLEST: usize = 4096;
/// Codes of zero for the first and second moment.
pub const ZERO: [u8; 2] = [127, 0];
/// Codes per map.
const CODES: usize = 256;

/// Ascending code values of the first moment (signed) and the second moment (unsigned).
pub(super) static MAPS: LazyLock<[[f32; CODES]; 2]> =
    LazyLock::new(|| [dynamic_map(true), dynamic_map(false)]);

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

impl EightBit {
    /// Checks the moments' sizes against weights `p` and gradients `g`.
    pub(super) fn check(&self, p: &Tensor, g: &Tensor) -> Result<()> {
        let n = p.elem_count();
        let fits = |t: &[Tensor; 2], len: usize| t.iter().all(|t| t.dims() == [len]);
        if g.elem_count() != n || !fits(&self.codes, n) || !fits(&self.scales, n.div_ceil(BLOCK)) {
            candle_core::bail!("adamw8bit: {n} values with {self:?}");
        }
        Ok(())
    }
}

/// Upper bounds of the values that round to each code of [`MAPS`].
pub(super) static BOUNDS: LazyLock<[[f32; CODES]; 2]> = LazyLock::new(|| {
    let bounds = |map: &[f32; CODES]| {
        std::array::from_fn(|i| map.get(i + 1).map_or(f32::INFINITY, |above| (map[i] + above) / 2.0))
    };
    [bounds(&MAPS[0]), bounds(&MAPS[1])]
});

/// Quantizes values and returns the scale. An infinite value makes the scale infinite, a NaN makes it NaN.
#[inline(always)]
pub(super) fn encode(values: &[f32], bounds: &[f32; CODES], codes: &mut [u8]) -> f32 {
    let larger = |a: f32, x: &f32| if x.abs() <= a || a.is_nan() { a } else { x.abs() };
    let scale = values.iter().fold(0f32, larger);
    let inverse = 1.0 / scale.max(1e-38);
    codes.fill(0);
    // Binary search for the first code with a bound of at least x, one half after the other for all values: without
    // branches.
    for half in [128, 64, 32, 16, 8, 4, 2, 1] {
        for (code, x) in codes.iter_mut().zip(values) {
            let x = (x * inverse).clamp(-1.0, 1.0);
            *code += half * u8::from(bounds[usize::from(*code + (half - 1))] < x);
        }
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{randn, values};
    use crate::optimizer::{AdamW, adamw, adamw8bit};
    use candle_core::DType;

    fn zeros(n: usize, device: &Device) -> Result<EightBit> {
        let codes = || Tensor::zeros(n, DType::U8, device);
        let scales = || Tensor::zeros(n.div_ceil(BLOCK), DType::F32, device);
        let (codes, scales) = ([codes()?, codes()?], [scales()?, scales()?]);
        Ok(EightBit { codes, scales, maps: maps(device)? })
    }

    /// Each value maps to the nearest code of its block, and the scale is the largest magnitude.
    #[test]
    fn codes_are_the_nearest() -> Result<()> {
        let x = values(&randn(1, 200, DType::F32)?);
        let x: Vec<f32> = x.iter().map(|x| (x * x * x) as f32).collect();
        for (map, bounds) in MAPS.iter().zip(BOUNDS.iter()) {
            let mut codes = vec![0; x.len()];
            let scale = encode(&x, bounds, &mut codes);
            assert_eq!(scale, x.iter().fold(0f32, |a, x| a.max(x.abs())));
            for (x, code) in x.iter().zip(codes) {
                let x = (x / scale).clamp(map[0], 1.0);
                let nearest = map.iter().map(|m| (m - x).abs()).fold(f32::MAX, f32::min);
                assert!((map[usize::from(code)] - x).abs() <= nearest + 1e-7, "{x}");
            }
        }
        for at in [0, 1, 127, 254, 255] {
            let mut values = [1.0; BLOCK];
            values[at] = f32::NAN;
            assert!(encode(&values, &BOUNDS[0], &mut [0; BLOCK]).is_nan(), "NaN at {at}");
        }
        let mut zero = [9; 3];
        for (bounds, code) in BOUNDS.iter().zip(ZERO) {
            assert_eq!((encode(&[0.0; 3], bounds, &mut zero), zero), (0.0, [code; 3]));
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
            adamw(&q, &m, &v, &g, None, &k)?;
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
