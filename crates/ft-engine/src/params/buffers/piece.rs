//! A tensor's part on a tensor-parallel rank.

use crate::adapters::Part;
use crate::model::modules::{CutAlong, Kind, Module};
use candle_core::Result;
use ft_kernels::tensor::Real;
use std::ops::Range;

/// Dimension of a module's part cut by the ranks of a tensor group, by the cut of the weight. A of a product into a
/// block and B of one out of a block stay whole.
fn dim_of(cut: CutAlong, part: Part) -> Option<usize> {
    use Part::{A, B, Bias, Weight};
    match (cut, part) {
        (CutAlong::Rows(_), Weight | Bias | B) => Some(0),
        (CutAlong::Columns, Weight | A) => Some(1),
        _ => None,
    }
}

/// Whether the ranks of a tensor group cut a part of a module.
pub fn is_cut(m: &Module, part: Part) -> bool {
    dim_of(m.cut, part).is_some()
}

/// A module with the dimensions on one of `ranks` ranks of a tensor group.
pub fn cut_module(m: &Module, ranks: usize) -> Module {
    let kind = match (m.kind, m.cut) {
        (kind, CutAlong::Nothing) => kind,
        (Kind::Linear { out, inp, bias }, CutAlong::Columns) => Kind::Linear { out, inp: inp / ranks, bias },
        (Kind::Linear { out, inp, bias }, _) => Kind::Linear { out: out / ranks, inp, bias },
        (Kind::Vector { dim }, _) => Kind::Vector { dim: dim / ranks },
        (Kind::Norm { dim }, _) => Kind::Norm { dim: dim / ranks },
        (Kind::Conv { channels, taps }, _) => Kind::Conv { channels: channels / ranks, taps },
        (kind, _) => kind,
    };
    let cut = match m.cut {
        CutAlong::Rows(parts) => CutAlong::Rows(parts.map(|n| n / ranks)),
        other => other,
    };
    Module { kind, cut, ..m.clone() }
}

/// [`Piece::aligned`] of the weight of a module as [`cut_module`] makes it.
pub fn aligned_of(m: &Module, most: usize) -> usize {
    match m.cut {
        CutAlong::Rows(parts) => parts.iter().fold(most, |n, rows| within(rows * m.cols(), n)),
        CutAlong::Columns => within(m.cols(), most),
        CutAlong::Nothing => most,
    }
}

/// The largest power of two up to `most` that divides `values`.
fn within(values: usize, most: usize) -> usize {
    if values > 0 { most.min(1 << values.trailing_zeros()) } else { most }
}

/// Rows or columns of a tensor, or the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    whole: Vec<usize>,
    /// Cut dimension, with the ranges inside the piece.
    cut: Option<(usize, Vec<Range<usize>>)>,
}

impl Piece {
    /// Piece `at` of `of` for each of the consecutive `parts` of a dimension, in a tensor of this shape.
    pub(crate) fn new(
        whole: Vec<usize>,
        dim: Option<usize>,
        parts: &[usize],
        (at, of): (usize, usize),
    ) -> Self {
        let mut start = 0;
        let own = parts.iter().filter(|n| **n > 0).map(|n| {
            let own = start + n * at / of..start + n * (at + 1) / of;
            start += n;
            own
        });
        let own: Vec<Range<usize>> = own.collect();
        let dim = dim.filter(|d| of > 1 && *d < whole.len());
        Self { whole, cut: dim.map(|d| (d, own)) }
    }

    /// Piece of a part of a module, given the shape of the whole and the cut of the weight.
    pub(super) fn of_part(whole: Vec<usize>, cut: CutAlong, part: Part, place: (usize, usize)) -> Self {
        let last = whole.last().copied().unwrap_or(0);
        match cut {
            CutAlong::Rows(parts) => Self::new(whole, dim_of(cut, part), &parts, place),
            _ => Self::new(whole, dim_of(cut, part), &[last], place),
        }
    }

    /// The piece of a tensor with one element per `unit` elements of this one (a block's scale, a byte of two codes).
    /// `None` if a cut falls inside such a unit.
    pub fn by(&self, unit: usize) -> Option<Self> {
        let elements: usize = self.whole.iter().product();
        let Some((dim, own)) = &self.cut else {
            return Some(Self { whole: vec![elements.div_ceil(unit)], cut: None });
        };
        let cols: usize = self.whole[*dim..].iter().product();
        let (rows, width) = (elements / cols.max(1), self.width());
        let whole_units = |n: usize| n.is_multiple_of(unit);
        let ends = own.iter().flat_map(|r| [r.start, r.end]).all(|end| whole_units(end * width));
        let scaled = own.iter().map(|r| r.start * width / unit..r.end * width / unit).collect();
        let whole = vec![rows, cols.div_ceil(unit)];
        (ends && (rows == 1 || whole_units(cols))).then_some(Self { whole, cut: Some((1, scaled)) })
    }

    /// The largest power of two, at most `most`, dividing every run of consecutive values on every rank. Blocks of this
    /// size never straddle a cut or a block of `most`.
    pub fn aligned(&self, most: usize) -> usize {
        let Some((_, own)) = &self.cut else { return most };
        own.iter().fold(most, |n, r| within(r.len() * self.width(), n))
    }

    /// Elements of the whole tensor for one index of the cut dimension.
    fn width(&self) -> usize {
        self.whole[self.dim().map_or(0, |d| d + 1)..].iter().product()
    }

    /// Dimension that is cut, if any.
    pub fn dim(&self) -> Option<usize> {
        self.cut.as_ref().map(|(dim, _)| *dim)
    }

    /// Shape of the piece.
    pub fn shape(&self) -> Vec<usize> {
        let mut shape = self.whole.clone();
        if let Some((dim, own)) = &self.cut {
            shape[*dim] = own.iter().map(|r| r.len()).sum();
        }
        shape
    }

    /// Number of values of the piece.
    pub fn elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// Ranges of the whole tensor with the elements `own` of the piece, in order.
    pub fn ranges(&self, own: Range<usize>) -> Vec<Range<usize>> {
        let Some((dim, parts)) = &self.cut else { return vec![own] };
        let (width, n) = (self.width(), parts.iter().map(|r| r.len()).sum::<usize>());
        let (mut out, mut from) = (Vec::new(), own.start);
        while from < own.end {
            let (row, mut inside) = (from / (n * width), from % (n * width));
            for part in parts {
                let here = part.len() * width;
                let run = here.saturating_sub(inside).min(own.end - from);
                if run > 0 {
                    let start = (row * self.whole[*dim] + part.start) * width + inside;
                    out.push(start..start + run);
                    from += run;
                }
                inside = inside.saturating_sub(here);
            }
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
        let mut ranges = self.ranges(own);
        if ranges.len() <= 1 {
            return read(ranges.pop().unwrap_or(0..0));
        }
        let parts = ranges.into_iter().map(read).collect::<ft_base::Result<Vec<Real>>>()?;
        Ok(Real::cat(&parts, 0)?)
    }

    /// The piece of a whole tensor.
    ///
    /// # Errors
    /// A tensor of another shape.
    pub fn of(&self, whole: &Real) -> Result<Real> {
        let Some((dim, own)) = &self.cut else { return Ok(whole.clone()) };
        let whole = whole.reshape(self.whole.as_slice())?;
        let parts = own.iter().map(|r| whole.narrow(*dim, r.start, r.len())).collect::<Result<Vec<_>>>()?;
        Real::cat(&parts, *dim)?.force_contiguous()
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
        let whole_of = |dim: Option<usize>| vec![if dim == Some(1) { 12 } else { 4 }];
        let plain = [(None, 2), (Some(0), 2), (Some(0), 4), (Some(1), 3), (Some(1), 2)];
        let joint = [(Some(0), 2, vec![2, 2]), (Some(1), 2, vec![4, 2, 6]), (Some(1), 2, vec![4, 8])];
        let plain = plain.into_iter().map(|(dim, of)| (dim, of, whole_of(dim)));
        for (dim, of, parts) in plain.chain(joint) {
            let mut seen = vec![0; 48];
            for at in 0..of {
                let piece = Piece::new(vec![4, 12], dim, &parts, (at, of));
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
        assert_eq!(Piece::new(vec![4, 12], Some(1), &[12], (0, 4)).by(2), None);
        assert_eq!(Piece::new(vec![3, 10], Some(0), &[3], (0, 3)).by(4), None);
        Ok(())
    }
}
