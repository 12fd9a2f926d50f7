//! The most probable tokens of rows of logits.

use crate::Tensor;
use crate::cpu::{self, view};
use candle_core::{DType, Device, Result};

/// The `k` most probable of the first `limit` tokens of each row, with the logarithms of their probabilities over
/// all tokens; by falling probability, smaller ids first. Sums are in f64.
///
/// # Shapes
/// `logits` `[n, v]` in f32 -> n lists of `k`, or of `limit` or `v` if these are fewer.
pub fn top(logits: &Tensor, k: usize, limit: usize) -> Result<Vec<Vec<(u32, f32)>>> {
    let (_, v) = logits.dims2()?;
    let on_host = Tensor::Real(logits.real()?.to_device(&Device::Cpu)?.to_dtype(DType::F32)?);
    let all = view::<f32>(&on_host)?;
    let limit = limit.min(v);
    let k = k.min(limit);
    let of = |row: &[f32]| {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
        let log_sum = f64::from(max) + sum.ln();
        let falling = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
        let mut ids: Vec<u32> = (0..limit as u32).collect();
        if k < limit {
            ids.select_nth_unstable_by(k, falling);
            ids.truncate(k);
        }
        ids.sort_unstable_by(falling);
        ids.into_iter().map(|id| (id, (f64::from(row[id as usize]) - log_sum) as f32)).collect()
    };
    Ok(cpu::map(all.chunks(v.max(1)), of))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_probable_come_first_and_ties_by_id() -> Result<()> {
        let x = Tensor::new(&[[0f32, 2.0, 1.0, 2.0, 9.0], [5.0, 4.0, 3.0, 2.0, 1.0]], &Device::Cpu)?;
        let ids = |rows: Vec<Vec<(u32, f32)>>| -> Vec<Vec<u32>> {
            rows.iter().map(|row| row.iter().map(|(id, _)| *id).collect()).collect()
        };
        assert_eq!(ids(top(&x, 3, 4)?), [[1, 3, 2], [0, 1, 2]]);
        assert_eq!(ids(top(&x, 9, 9)?), [[4, 1, 3, 2, 0], [0, 1, 2, 3, 4]]);
        let sum: f32 = top(&x, 5, 5)?[0].iter().map(|(_, p)| p.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6);
        Ok(())
    }
}
