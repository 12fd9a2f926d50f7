//! Dropout masks, indexed in the counter-based generator: independent of the split into micro-batches.

mod cuda;

pub use self::cuda::{Drawn, threshold};
use crate::Tensor;
use crate::cpu::{each, is_cpu};
use crate::tensor::Ghost;
use candle_core::{DType, Result};
use ft_base::rng::Stream;

/// Rows of a mask, numbered within the step.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Number of the first row.
    pub first: usize,
    /// Numbers of the rows minus `first`, for example of an expert's tokens; `None` for consecutive rows.
    pub list: Option<&'a [u32]>,
}

impl Rows<'_> {
    /// Number of row `i`.
    pub fn number(&self, i: usize) -> usize {
        self.first + self.list.map_or(i, |list| list[i] as usize)
    }
}

/// A dropout mask `[rows, width]`: a tensor on the CPU, drawn by each kernel on CUDA.
#[derive(Debug)]
pub enum Mask {
    /// Stored mask with the values 0 and one other value.
    Stored(Tensor),
    /// Mask drawn on the fly.
    Drawn(Drawn),
}

impl Mask {
    /// `x * mask`.
    pub fn of(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Mask::Stored(m) => x * m,
            Mask::Drawn(d) => d.apply(x, None),
        }
    }

    /// `sum + x * mask`.
    pub fn add(&self, x: Tensor, sum: Tensor) -> Result<Tensor> {
        match self {
            Mask::Stored(m) => sum + (x * m)?,
            Mask::Drawn(d) => d.apply(&x, Some(&sum)),
        }
    }
}

/// Creates a mask for `x` `[rows, width]` in the dtype of `x`, with values 0 and one other value, and a
/// factor: the product is 0 or `1 / (1 - p)`. `columns` are the first column and the number of all columns, of which
/// `x` has `width`. Element (r, c) depends only on the stream and on `(number of row r) * all + first + c`.
///
/// The factor is 1, except in half precision: there the mask is 0 or 1, because `1 / (1 - p)` would be
/// rounded.
pub fn mask(
    stream: Stream,
    (rows, columns): (Rows<'_>, (usize, usize)),
    p: f64,
    x: &Tensor,
) -> Result<(Mask, f64)> {
    let (count, width) = x.dims2()?;
    let keep = 1.0 / (1.0 - p);
    let (keep, factor) = match x.dtype() {
        DType::BF16 | DType::F16 => (1.0, keep),
        _ => (keep as f32, 1.0),
    };
    if !is_cpu(x) {
        let list = rows.list.map(|list| Tensor::from_slice(list, list.len(), x.device())).transpose()?;
        let mask = Drawn { stream, first: rows.first, list, columns, threshold: threshold(p), keep };
        return Ok((Mask::Drawn(mask), factor));
    }
    if let Some(g) = x.ghost() {
        let wide = Tensor::from(Ghost::new(g.ledger(), (count, width), DType::F32));
        return Ok((Mask::Stored(wide.to_dtype(x.dtype())?), factor));
    }
    let mut m = vec![0f32; count * width];
    each(m.chunks_mut(width.max(1)).enumerate(), |(r, row)| {
        let base = rows.number(r) as u64 * columns.1 as u64 + columns.0 as u64;
        stream.uniforms(base, width, |c, u| row[c] = if f64::from(u) < p { 0.0 } else { keep });
    });
    Ok((Mask::Stored(Tensor::from_vec(m, (count, width), x.device())?.to_dtype(x.dtype())?), factor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use ft_base::rng::Purpose;

    #[test]
    fn dropout_has_its_rate_and_scale_in_any_split() -> Result<()> {
        let s = Stream::new(5, Purpose::Dropout, 3, 1);
        let x = |rows, dtype| Tensor::ones((rows, 50), dtype, &Device::Cpu);
        let mask = |s, rows, p, x: &Tensor| -> Result<(Tensor, f64)> {
            let (m, factor) = super::mask(s, (rows, (0, 50)), p, x)?;
            Ok((m.of(x)?, factor))
        };
        let all = Rows { first: 0, list: None };
        let (whole, factor) = mask(s, all, 0.3, &x(200, DType::F32)?)?;
        assert_eq!(factor, 1.0);
        let v = whole.flatten_all()?.to_vec1::<f32>()?;
        let zeros = v.iter().filter(|x| **x == 0.0).count() as f64 / v.len() as f64;
        assert!((zeros - 0.3).abs() < 0.02, "{zeros}");
        assert!(v.iter().all(|x| *x == 0.0 || (*x - 1.0 / 0.7).abs() < 1e-6));
        let (half, factor) = mask(s, all, 0.3, &x(200, DType::BF16)?)?;
        let ones: Vec<f32> = v.iter().map(|x| f32::from(*x > 0.0)).collect();
        assert_eq!((half.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?, factor), (ones, 1.0 / 0.7));
        let (tail, _) = mask(s, Rows { first: 150, ..all }, 0.3, &x(50, DType::F32)?)?;
        assert_eq!(v[150 * 50..], tail.flatten_all()?.to_vec1::<f32>()?[..]);
        let these = Rows { first: 100, list: Some(&[7, 3]) };
        let picked = mask(s, these, 0.3, &x(2, DType::F32)?)?.0.to_vec2::<f32>()?;
        assert_eq!((&v[107 * 50..][..50], &v[103 * 50..][..50]), (&picked[0][..], &picked[1][..]));
        // some columns of 50
        let part = Tensor::ones((200, 13), DType::F32, &Device::Cpu)?;
        let part = super::mask(s, (all, (31, 50)), 0.3, &part)?.0.of(&part)?;
        let same = part.to_vec2::<f32>()?.into_iter().zip(whole.to_vec2::<f32>()?);
        assert!(same.into_iter().all(|(part, whole)| part == whole[31..44]));
        Ok(())
    }
}
