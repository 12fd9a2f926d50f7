//! Heads of the delta rule, and projections whose outputs are interleaved by key head.

use crate::Tensor;
use crate::tensor::all_of;
use candle_core::Result;

/// Heads and their channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Key heads; queries have as many.
    pub keys: usize,
    /// Value heads, a multiple of the key heads: value head h uses key head `h / (values / keys)`.
    pub values: usize,
    /// Channels of a key head.
    pub key_dim: usize,
    /// Channels of a value head.
    pub value_dim: usize,
}

impl Heads {
    /// Value heads of a key head.
    pub fn each(self) -> usize {
        self.values / self.keys.max(1)
    }

    /// Channels of all keys.
    pub fn key_width(self) -> usize {
        self.keys * self.key_dim
    }

    /// Channels of all values.
    pub fn value_width(self) -> usize {
        self.values * self.value_dim
    }

    /// Channels of queries, keys and values together.
    pub fn channels(self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Values of the state of all heads.
    pub fn state(self) -> usize {
        self.values * self.key_dim * self.value_dim
    }

    /// Widths of the parts of a key head in an interleaved projection: query, key, values and z.
    pub fn of_qkvz(self) -> [usize; 4] {
        let values = self.each() * self.value_dim;
        [self.key_dim, self.key_dim, values, values]
    }

    /// As [`Heads::of_qkvz`], for b and a.
    pub fn of_ba(self) -> [usize; 2] {
        [self.each(); 2]
    }
}

/// Splits rows `[t, g sum(widths)]`, interleaved by key head, into one matrix `[t, g width]` a part.
pub fn split<const N: usize>(y: &Tensor, keys: usize, widths: [usize; N]) -> Result<[Tensor; N]> {
    let (t, all) = y.dims2()?;
    let by_head = y.reshape((t, keys, all / keys.max(1)))?;
    let mut at = 0;
    let parts = widths.map(|width| {
        let part = by_head.narrow(2, at, width)?.contiguous()?.reshape((t, keys * width));
        at += width;
        part
    });
    all_of(parts)
}

/// Inverse of [`split`].
pub fn join<const N: usize>(parts: [&Tensor; N], keys: usize) -> Result<Tensor> {
    let by_head = parts.map(|part| {
        let (t, all) = part.dims2()?;
        part.contiguous()?.reshape((t, keys, all / keys.max(1)))
    });
    let joined = Tensor::cat(&all_of(by_head)?, 2)?;
    let (t, keys, all) = joined.dims3()?;
    joined.reshape((t, keys * all))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::close;

    #[test]
    fn projections_are_split_by_key_head() -> Result<()> {
        let heads = Heads { keys: 2, values: 4, key_dim: 1, value_dim: 1 };
        let y = Tensor::arange(0f32, 12.0, &candle_core::Device::Cpu)?.reshape((1, 12))?;
        let parts = split(&y, heads.keys, heads.of_qkvz())?;
        let want = [vec![0.0, 6.0], vec![1.0, 7.0], vec![2.0, 3.0, 8.0, 9.0], vec![4.0, 5.0, 10.0, 11.0]];
        for (part, want) in parts.iter().zip(want) {
            assert_eq!(part.flatten_all()?.to_vec1::<f32>()?, want);
        }
        close(&join(parts.each_ref(), heads.keys)?, &y, 0.0);
        assert_eq!((heads.channels(), heads.of_ba()), (8, [2, 2]));
        Ok(())
    }
}
