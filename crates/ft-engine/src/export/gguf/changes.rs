//! Differences between a module's tensor and llama.cpp's: order of rows and columns, and values.

use candle_core::{Device, Result, Tensor};

/// A difference.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Change {
    /// These rows (output features), in this order.
    Rows(Vec<u32>),
    /// These columns (input features), in this order.
    Columns(Vec<u32>),
    /// Added to the values: llama.cpp multiplies by a norm's weight as it is.
    Plus(f64),
    /// `-exp(x)`.
    Decay,
    /// Without dimensions of one.
    Squeezed,
}

fn index(list: &[u32]) -> Result<Tensor> {
    Tensor::new(list, &Device::Cpu)
}

impl Change {
    /// The tensor with the change.
    ///
    /// # Errors
    /// Rows or columns that it lacks.
    pub(super) fn apply(&self, t: &Tensor) -> Result<Tensor> {
        match self {
            Change::Rows(list) => t.index_select(&index(list)?, 0),
            Change::Columns(list) => t.index_select(&index(list)?, t.rank() - 1),
            Change::Plus(x) => t + *x,
            Change::Decay => t.exp()?.neg(),
            Change::Squeezed => t.reshape(self.shape(t.dims().to_vec())),
        }
    }

    /// Shape with the change.
    pub(super) fn shape(&self, mut shape: Vec<usize>) -> Vec<usize> {
        match self {
            Change::Rows(list) => {
                shape.iter_mut().take(1).for_each(|n| *n = list.len());
                shape
            }
            Change::Squeezed => shape.into_iter().filter(|n| *n > 1).collect(),
            Change::Columns(_) | Change::Plus(_) | Change::Decay => shape,
        }
    }
}

/// Rows for a rotary embedding of neighboring channels: the two halves of every head in turns.
pub(super) fn neighbors(rows: usize, heads: usize) -> Change {
    let half = rows / heads / 2;
    let of = |h: usize| (0..half).flat_map(move |i| [2 * h * half + i, (2 * h + 1) * half + i]);
    list((0..heads).flat_map(of))
}

/// Each second row, from `first` on.
pub(super) fn alternate(rows: usize, first: usize) -> Change {
    list((first..rows).step_by(2))
}

/// Value heads of `dim` rows, by key head in the model, in turns of the key heads: `per` for each of `keys`. Rows
/// before `from` stay.
pub(super) fn in_turns(from: usize, (keys, per, dim): (usize, usize, usize)) -> Vec<u32> {
    let heads = (0..per).flat_map(move |v| (0..keys).map(move |k| k * per + v));
    (0..from)
        .chain(heads.flat_map(move |h| (0..dim).map(move |c| from + h * dim + c)))
        .map(|r| r as u32)
        .collect()
}

/// Rows of parts of groups: each of `groups` has parts of these sizes in order; all groups of a part follow one
/// another, for the parts `of`.
pub(super) fn parts(groups: usize, sizes: &[usize], of: std::ops::Range<usize>) -> Change {
    let whole: usize = sizes.iter().sum();
    let part = |p: usize| {
        let first: usize = sizes[..p].iter().sum();
        let size = sizes[p];
        (0..groups).flat_map(move |g| (0..size).map(move |r| g * whole + first + r))
    };
    list(of.flat_map(part))
}

fn list(rows: impl Iterator<Item = usize>) -> Change {
    Change::Rows(rows.map(|r| r as u32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_permuted_to_llama_cpps_order() -> Result<()> {
        assert_eq!(neighbors(8, 2), Change::Rows(vec![0, 2, 1, 3, 4, 6, 5, 7]));
        assert_eq!(alternate(6, 1), Change::Rows(vec![1, 3, 5]));
        // two key heads with two value heads of one row each, behind two rows of others
        assert_eq!(in_turns(2, (2, 2, 1)), [0, 1, 2, 4, 3, 5]);
        assert_eq!(parts(2, &[1, 2, 1], 0..2), Change::Rows(vec![0, 4, 1, 2, 5, 6]));
        let t = Tensor::new(&[[[1f32, 2.0]], [[3.0, 4.0]]], &Device::Cpu)?;
        let squeezed = Change::Squeezed.apply(&t)?;
        assert_eq!((squeezed.dims(), Change::Squeezed.shape(vec![2, 1, 2])), (&[2, 2][..], vec![2, 2]));
        assert_eq!(Change::Columns(vec![1, 0]).apply(&squeezed)?.to_vec2::<f32>()?, [[2.0, 1.0], [4.0, 3.0]]);
        Ok(())
    }
}
