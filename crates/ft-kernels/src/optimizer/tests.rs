use super::settings::CHUNK;
use super::*;
use crate::Tensor;
use crate::check::{close, randn};
use candle_core::{DType, Device, Result};

/// Three steps of torch.optim.AdamW (2.11) on p = [1, -2, 3], g = [0.1 k, -0.2, 0.3 / k], lr 0.1,
/// betas 0.9 0.99, eps 1e-8, weight decay 0.05.
#[test]
fn adamw_steps_are_those_of_pytorch() -> Result<()> {
    let d = &Device::Cpu;
    let (p, m, v) = (
        Tensor::new(&[1f32, -2., 3.], d)?,
        Tensor::zeros(3, DType::F32, d)?,
        Tensor::zeros(3, DType::F32, d)?,
    );
    for t in 1..=3u64 {
        let k = t as f32;
        let g = Tensor::new(&[0.1 * k, -0.2, 0.3 / k], d)?;
        let step = AdamW { lr: 0.1, betas: [0.9, 0.99], eps: 1e-8, weight_decay: 0.05, t, grad_scale: 1.0 };
        adamw(&p, &m, &v, &g, None, &step)?;
    }
    let want = Tensor::new(TORCH, d)?;
    close(&p, &want, 1e-6);
    Ok(())
}
const TORCH: &[f32] = &[0.694_613_4, -1.671_647_2, 2.675_769];

/// The copy holds the new weights, rounded once, and does not affect the update.
#[test]
fn the_copy_is_the_rounded_weights() -> Result<()> {
    let make = || -> Result<[Tensor; 4]> {
        let [p, m, v, g] = [1, 2, 3, 4].map(|seed| randn(seed, 50, DType::F32));
        Ok([p?, m?, v?.sqr()?, g?])
    };
    let ([p, m, v, g], [cp, cm, cv, _]) = (make()?, make()?);
    let k = AdamW { lr: 1e-2, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.1, t: 5, grad_scale: 0.3 };
    let copy = Tensor::zeros(50, DType::BF16, &Device::Cpu)?;
    adamw(&p, &m, &v, &g, None, &k)?;
    adamw(&cp, &cm, &cv, &g, Some(&copy), &k)?;
    for (a, b) in [(&cp, &p), (&cm, &m), (&cv, &v)] {
        assert_eq!(a.to_vec1::<f32>()?, b.to_vec1::<f32>()?);
    }
    close(&copy, &p.to_dtype(DType::BF16)?, 0.0);
    Ok(())
}

/// Updates of 16-bit weights equal those of f32 weights with the same initial values, rounded with
/// the same random words; also with 8-bit moments.
#[test]
fn weights_of_16_bits_are_updated_in_f32() -> Result<()> {
    let (n, d) = (CHUNK + 700, &Device::Cpu);
    for dtype in [DType::BF16, DType::F16] {
        let [m, v, g] = [2, 3, 4].map(|seed| randn(seed, n, DType::F32));
        let (m, v, g) = (m?, v?.sqr()?, g?);
        let p = randn(1, n, DType::F32)?.to_dtype(dtype)?;
        let wide = p.to_dtype(DType::F32)?;
        let (own, draws) = ([m.force_contiguous()?, v.force_contiguous()?], Draws::new(5, 2, 1, 512));
        let k = AdamW { lr: 1e-3, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.1, t: 2, grad_scale: 0.3 };
        adamw(&wide, &m, &v, &g, None, &k)?;
        adamw_rounded(&p, [&own[0], &own[1], &g], draws, &k)?;
        let want = Tensor::zeros(n, dtype, d)?;
        round(&wide, &want, draws)?;
        close(&p, &want, 0.0);
        close(&own[0], &m, 0.0);
        close(&own[1], &v, 0.0);

        let eight_bit = || -> Result<EightBit> {
            let codes = |zero: u8| candle_core::Tensor::full(zero, n, d).map(Tensor::Real);
            let scales = || Tensor::zeros(n.div_ceil(BLOCK), DType::F32, d);
            let (codes, scales) = ([codes(ZERO[0])?, codes(ZERO[1])?], [scales()?, scales()?]);
            Ok(EightBit { codes, scales, maps: maps(d)? })
        };
        let (a, b) = (eight_bit()?, eight_bit()?);
        let p = randn(1, n, DType::F32)?.to_dtype(dtype)?;
        let wide = p.to_dtype(DType::F32)?;
        adamw8bit(&wide, &a, &g, None, &k)?;
        adamw8bit_rounded(&p, &b, &g, draws, &k)?;
        round(&wide, &want, draws)?;
        close(&p, &want, 0.0);
        close(&a.scales[1], &b.scales[1], 0.0);
    }
    Ok(())
}

#[test]
fn squares_are_summed_and_non_finite_values_are_found() -> Result<()> {
    let (g, p) = (randn(4, 50, DType::F32)?, randn(1, 50, DType::F32)?);
    let n = sum_squares(&[g.clone(), p.clone()])?;
    let want = g.sqr()?.sum_all()?.to_scalar::<f32>()? + p.sqr()?.sum_all()?.to_scalar::<f32>()?;
    assert!((n - f64::from(want)).abs() < 1e-4);
    assert!(finite(&g)?);
    let infinite = Tensor::new(&[1f32, f32::INFINITY], &Device::Cpu)?;
    assert!(!finite(&infinite)? && !finite(&infinite.to_dtype(DType::BF16)?)?);
    assert!(finite(&g.to_dtype(DType::BF16)?)?);
    Ok(())
}
