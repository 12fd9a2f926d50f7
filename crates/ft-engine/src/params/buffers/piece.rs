//! The part of a tensor on a rank that cuts matrices with others.

use crate::adapters::{Part, Trained};
use crate::model::modules::{Kind, Module, SHARED_EXPERT};
use candle_core::Result;
use ft_kernels::tensor::Real;
use std::ops::Range;

/// Dimension along which the ranks of a tensor group cut a part of a linear, by the name of its module: rows of the
/// products into a block, columns of those out of it. A of the former and B of the latter stay whole, and so does a
/// mixture, which every rank computes on its own tokens.
fn cut_of((name, expert): (&str, Option<usize>), part: Part) -> Option<usize> {
    use Part::{A, B, Bias, Weight};
    let (block, last) = name.rsplit_once('.').unwrap_or(("", name));
    if expert.is_some() || block.ends_with(SHARED_EXPERT) {
        return None;
    }
    match (last, part) {
        ("q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj" | "sinks", Weight | Bias | B) => Some(0),
        ("o_proj" | "down_proj", Weight | A) => Some(1),
        _ => None,
    }
}

/// Whether the ranks of a tensor group cut a part of a module.
pub fn is_cut(m: &Module, part: Part) -> bool {
    cut_of((&m.name, m.expert), part).is_some()
}

/// A module with the dimensions that it has on one of `ranks` ranks of a tensor group.
pub fn cut_module(m: &Module, ranks: usize) -> Module {
    let cut = cut_of((&m.name, m.expert), Part::Weight);
    let kind = match (m.kind, cut) {
        (Kind::Linear { out, inp, bias }, Some(0)) => Kind::Linear { out: out / ranks, inp, bias },
        (Kind::Linear { out, inp, bias }, Some(_)) => Kind::Linear { out, inp: inp / ranks, bias },
        (Kind::Vector { dim }, Some(_)) => Kind::Vector { dim: dim / ranks },
        (kind, _) => kind,
    };
    Module { kind, ..m.clone() }
}

/// [`Piece::group`] of the weight of a module as [`cut_module`] makes it.
pub fn group_of(m: &Module, block: usize, group: usize) -> usize {
    match cut_of((&m.name, m.expert), Part::Weight) {
        Some(0) => group_within(m.weight_values() / block.max(1), group),
        Some(_) => group_within(m.cols() / block.max(1), group),
        None => group,
    }
}

/// The largest power of two up to `group` that divides `blocks`.
fn group_within(blocks: usize, group: usize) -> usize {
    if blocks > 0 { group.min(1 << blocks.trailing_zeros()) } else { group }
}

/// Rows or columns of a tensor, or all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    whole: Vec<usize>,
    /// Dimension that is cut, with the index of the piece and the number of pieces.
    cut: Option<(usize, usize, usize)>,
}

impl Piece {
    /// Piece `at` of `of`, cut along a dimension of a tensor of this shape.
    pub(crate) fn new(whole: Vec<usize>, dim: Option<usize>, (at, of): (usize, usize)) -> Self {
        let dim = dim.filter(|d| of > 1 && *d < whole.len());
        Self { whole, cut: dim.map(|d| (d, at, of)) }
    }

    /// Piece of a part of a module.
    pub(super) fn of_module(m: &Module, part: Part, place: (usize, usize)) -> Self {
        let whole = if part == Part::Bias { vec![m.bias().unwrap_or(0)] } else { m.weight_shape() };
        Self::new(whole, cut_of((&m.name, m.expert), part), place)
    }

    /// Piece of a trained tensor.
    pub(super) fn of_trained(t: &Trained, place: (usize, usize)) -> Self {
        Self::new(t.shape.clone(), cut_of((&t.module, t.expert), t.part), place)
    }

    /// The same piece of a tensor with one element for `unit` consecutive ones; `None` if a cut is within one.
    pub fn by(&self, unit: usize) -> Option<Self> {
        let elements: usize = self.whole.iter().product();
        match self.cut {
            None => Some(Self { whole: vec![elements.div_ceil(unit)], cut: None }),
            Some((0, at, of)) => {
                let own = elements / of;
                let whole = vec![of, own / unit];
                own.is_multiple_of(unit).then_some(Self { whole, cut: Some((0, at, of)) })
            }
            Some((dim, at, of)) => {
                let cols: usize = self.whole[dim..].iter().product();
                let whole = vec![elements / cols.max(1), cols / unit];
                (cols / of).is_multiple_of(unit).then_some(Self { whole, cut: Some((1, at, of)) })
            }
        }
    }

    /// Scales of a group that lies within one of `group` scales of the whole tensor, with a scale for every `block`
    /// values: the largest power of two that divides the consecutive blocks of the piece.
    pub fn group(&self, block: usize, group: usize) -> usize {
        if self.cut.is_some() { group_within(self.run() / block.max(1), group) } else { group }
    }

    /// Dimension that is cut, if any.
    pub fn dim(&self) -> Option<usize> {
        self.cut.map(|(dim, ..)| dim)
    }

    /// Shape of the piece.
    pub fn shape(&self) -> Vec<usize> {
        let mut shape = self.whole.clone();
        if let Some((dim, _, of)) = self.cut {
            shape[dim] /= of;
        }
        shape
    }

    /// Number of values of the piece.
    pub fn elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// Length of consecutive elements of the whole tensor.
    fn run(&self) -> usize {
        self.shape()[self.dim().unwrap_or(0)..].iter().product()
    }

    /// Ranges of the whole tensor with the elements `own` of the piece, in order.
    pub fn ranges(&self, own: Range<usize>) -> Vec<Range<usize>> {
        let Some((_, at, of)) = self.cut else { return vec![own] };
        let (run, mut out, mut from) = (self.run().max(1), Vec::new(), own.start);
        while from < own.end {
            let (row, inside) = (from / run, from % run);
            let n = (run - inside).min(own.end - from);
            let start = (row * of + at) * run + inside;
            out.push(start..start + n);
            from += n;
        }
        out
    }

    /// Reads the elements `own` of the piece as a vector; `read` reads a range of the whole tensor.
    ///
    /// # Errors
    /// Errors of `read`.
    pub fn read(
        &self,
        own: Range<usize>,
        mut read: impl FnMut(Range<usize>) -> ft_base::Result<Real>,
    ) -> ft_base::Result<Real> {
        let mut ranges = self.ranges(own.clone());
        if ranges.len() == 1
            && let Some(range) = ranges.pop()
        {
            return read(range);
        }
        if ranges.is_empty() {
            return read(0..0);
        }
        let parts = ranges.into_iter().map(read).collect::<ft_base::Result<Vec<Real>>>()?;
        Ok(Real::cat(&parts, 0)?)
    }

    /// The piece of a whole tensor.
    ///
    /// # Errors
    /// A tensor of another shape.
    pub fn of(&self, whole: &Real) -> Result<Real> {
        let Some((dim, at, of)) = self.cut else { return Ok(whole.clone()) };
        let whole = whole.reshape(self.whole.as_slice())?;
        let n = self.whole[dim] / of;
        whole.narrow(dim, at * n, n)?.force_contiguous()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// Pieces hold every element once, in rows, columns and units of several elements.
    #[test]
    fn pieces_cover_a_tensor() -> ft_base::Result<()> {
        let whole = Real::arange(0u32, 48, &Device::Cpu)?.reshape((4, 12))?;
        let flat = whole.flatten_all()?;
        for (dim, of) in [(None, 2), (Some(0), 2), (Some(0), 4), (Some(1), 3), (Some(1), 2)] {
            let mut seen = vec![0; 48];
            for at in 0..of {
                let piece = Piece::new(vec![4, 12], dim, (at, of));
                let (n, own) = (piece.elements(), piece.of(&whole)?);
                assert_eq!(own.dims(), piece.shape());
                let own = own.flatten_all()?.to_vec1::<u32>()?;
                for range in [0..n, 3..n - 2, n..n] {
                    let read = piece
                        .read(range.clone(), |r| Ok(flat.narrow(0, r.start, r.len())?))?
                        .to_vec1::<u32>()?;
                    assert_eq!(read, own[range]);
                }
                own.iter().for_each(|i| seen[*i as usize] += 1);
                let Some(by) = piece.by(2) else { continue };
                let pairs = by.ranges(0..by.elements()).into_iter().flatten().map(|p| 2 * p as u32);
                assert!(pairs.eq(own.iter().copied().step_by(2)), "{dim:?} {of}");
            }
            assert!(seen.iter().all(|n| *n == if dim.is_some() { 1 } else { of }), "{dim:?} {of}");
        }
        assert_eq!(Piece::new(vec![4, 12], Some(1), (0, 4)).by(2), None);
        assert_eq!(Piece::new(vec![3, 10], Some(0), (0, 3)).by(4), None);
        Ok(())
    }
}
