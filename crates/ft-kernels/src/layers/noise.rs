//! Uniform noise on embeddings from the counter-based generator: NEFTune (Jain et al., 2024).
//!
//! Noise on a document of L tokens with width d is uniform in ±`alpha / sqrt(L d)`. L is the length of the
//! document, not of the row or micro-batch.

use crate::cpu::each;
use crate::tensor::{Ghost, Tensor};
use candle_core::{DType, Result};
use ft_base::rng::Stream;

/// Adds noise to `x` `[t, d]`, rounded to the dtype of `x`. Element (r, c) depends only on the stream, on
/// `n d + c` for the number n of row r, and on the length of the document of the row. `docs` are the lengths of all
/// documents; `tokens` lists the rows among their tokens, if they are not all.
pub fn add(
    x: &Tensor,
    stream: Stream,
    (first, tokens): (usize, Option<&[u32]>),
    docs: &[usize],
    alpha: f64,
) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let noise = match x.ghost() {
        Some(g) => Tensor::from(Ghost::new(g.ledger(), (rows, width), DType::F32)),
        None => {
            let all: usize = docs.iter().sum();
            let fits = tokens
                .map_or(all == rows, |list| list.len() == rows && list.iter().all(|t| (*t as usize) < all));
            if !fits {
                candle_core::bail!("documents of {docs:?} tokens in {rows} rows");
            }
            let bounds: Vec<f32> = docs
                .iter()
                .flat_map(|n| {
                    let bound = (alpha / ((n * width) as f64).sqrt()) as f32;
                    std::iter::repeat_n(bound, *n)
                })
                .collect();
            let token = |r: usize| tokens.map_or(r, |list| list[r] as usize);
            let mut noise = vec![0f32; rows * width];
            each(noise.chunks_mut(width.max(1)).enumerate(), |(r, row)| {
                let (start, bound) = (((first + token(r)) * width) as u64, bounds[token(r)]);
                stream.uniforms(start, row.len(), |i, x| row[i] = (2.0 * x - 1.0) * bound);
            });
            Tensor::from_vec(noise, (rows, width), x.device())?
        }
    };
    x + noise.to_dtype(x.dtype())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::values;
    use candle_core::Device;
    use ft_base::rng::Purpose;

    #[test]
    fn noise_is_uniform_within_the_bound_of_each_document() -> Result<()> {
        let (s, d) = (Stream::new(5, Purpose::Noise, 3, 0), 30);
        let docs = [400, 25];
        let x = Tensor::zeros((425, d), DType::F32, &Device::Cpu)?;
        let got = values(&add(&x, s, (0, None), &docs, 5.0)?);
        let (mut at, mut most) = (0, 0f64);
        for n in docs {
            let bound = 5.0 / ((n * d) as f64).sqrt();
            let part = &got[at * d..][..n * d];
            let count = part.len() as f64;
            let mean = part.iter().sum::<f64>() / count;
            let square = part.iter().map(|v| v * v).sum::<f64>() / count;
            assert!(part.iter().all(|v| v.abs() <= bound * (1.0 + 1e-6)), "{n}");
            assert!(mean.abs() < 4.0 * bound / (3.0 * count).sqrt(), "{n}: mean {mean}");
            assert!((square / (bound * bound / 3.0) - 1.0).abs() < 0.1, "{n}: {square}");
            // reference: one number at a time
            for (i, v) in part.iter().enumerate() {
                let u = f64::from(s.uniform((at * d + i) as u64));
                assert!((v - (2.0 * u - 1.0) * bound).abs() < 1e-6 * bound);
            }
            most = most.max(part.iter().fold(0f64, |m, v| m.max(v.abs())) / bound);
            at += n;
        }
        assert!(most > 0.999, "{most}");
        Ok(())
    }

    #[test]
    fn any_split_into_micro_batches_draws_the_same() -> Result<()> {
        let s = Stream::new(5, Purpose::Noise, 3, 0);
        let x = |n| Tensor::ones((n, 7), DType::BF16, &Device::Cpu);
        let whole = values(&add(&x(12)?, s, (0, None), &[5, 7], 2.0)?);
        let tail = values(&add(&x(7)?, s, (5, None), &[7], 2.0)?);
        assert_eq!(whole[35..], tail[..]);
        let listed = values(&add(&x(3)?, s, (0, Some(&[11, 0, 6])), &[5, 7], 2.0)?);
        assert_eq!(listed, [&whole[77..84], &whole[0..7], &whole[42..49]].concat());
        assert!(add(&x(7)?, s, (0, None), &[6], 2.0).is_err());
        Ok(())
    }
}
