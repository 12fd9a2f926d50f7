//! AdamW's moments for this rank's part of a unit's buffer: f32, or 8 bits for large tensors.

use super::buffer::LocalShard;
use super::shard::common;
use candle_core::{DType, Device, Result};
use ft_kernels::optimizer::{BLOCK, EightBit, finite, maps};
use ft_kernels::tensor::Real;
use ft_kernels::{Tensor, optimizer};
use std::ops::Range;

/// First and second moments of gradients.
#[derive(Debug)]
pub struct Moments {
    /// 8-bit moments of large tensors; `None` if all are f32.
    eight_bit: Option<EightBitRange>,
    /// f32 moments of the remaining tensors.
    f32: [LocalShard; 2],
}

/// 8-bit moments.
#[derive(Debug)]
struct EightBitRange {
    /// Element range in the buffer; block-aligned, except for the end.
    at: Range<usize>,
    all: EightBit,
}

/// Views of the moments of a range.
#[derive(Debug)]
pub enum MomentsView {
    F32([Tensor; 2]),
    EightBit(Box<EightBit>),
}

impl Moments {
    /// Zero-filled moments for a range of a buffer; those of the first `large` elements of the buffer are
    /// in 8 bits.
    pub(crate) fn new(at: &Range<usize>, large: usize, home: &Device) -> Result<Self> {
        let (eight_bit, rest) = (common(at, &(0..large)), common(at, &(large..at.end.max(large))));
        let (n, rest) = (eight_bit.len(), || LocalShard::zeros(rest.clone(), home));
        // Zero everywhere, including the gaps between tensors, absent from checkpoints.
        let codes = |zero: u8| Real::full(zero, n, home).map(Tensor::Real);
        let scales = || Tensor::zeros(n.div_ceil(BLOCK), DType::F32, home);
        let eight_bit = match n {
            0 => None,
            _ => Some(EightBitRange {
                at: eight_bit,
                all: EightBit {
                    codes: [codes(optimizer::ZERO[0])?, codes(optimizer::ZERO[1])?],
                    scales: [scales()?, scales()?],
                    maps: maps(home)?,
                },
            }),
        };
        Ok(Self { eight_bit, f32: [rest()?, rest()?] })
    }

    /// Intersections of a range with the 8-bit part and the f32 part.
    pub fn parts(&self, range: &Range<usize>) -> [Range<usize>; 2] {
        [self.eight_bit.as_ref().map_or(0..0, |c| common(&c.at, range)), common(&self.f32[0].at, range)]
    }

    /// Views of a range returned by [`Moments::parts`].
    ///
    /// # Errors
    /// A range not fully held by this rank, or not starting at a block boundary.
    pub fn of(&self, range: Range<usize>) -> Result<MomentsView> {
        let Some(c) = self.eight_bit.as_ref().filter(|c| c.at.start <= range.start && range.end <= c.at.end)
        else {
            let [m, v] = &self.f32;
            return Ok(MomentsView::F32([m.of(range.clone())?, v.of(range)?]));
        };
        let start = range.start - c.at.start;
        if !start.is_multiple_of(BLOCK) {
            candle_core::bail!("moments of {range:?}: blocks are of {BLOCK}");
        }
        let [m, v] = &c.all.codes;
        let codes = |t: &Tensor| t.narrow(0, start, range.len());
        let scales = |t: &Tensor| t.narrow(0, start / BLOCK, range.len().div_ceil(BLOCK));
        Ok(MomentsView::EightBit(Box::new(EightBit {
            codes: [codes(m)?, codes(v)?],
            scales: [scales(&c.all.scales[0])?, scales(&c.all.scales[1])?],
            maps: c.all.maps.clone(),
        })))
    }

    /// Whether the locally held moments of a range are finite.
    ///
    /// # Errors
    /// Device errors.
    pub fn finite(&self, range: &Range<usize>) -> Result<bool> {
        for part in self.parts(range).into_iter().filter(|r| !r.is_empty()) {
            let [m, v] = match self.of(part)? {
                MomentsView::F32(all) => all,
                // Codes are fractions of a scale, so checking the scales is enough.
                MomentsView::EightBit(all) => all.scales,
            };
            if !(finite(&m)? && finite(&v)?) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Memory of the moments, in bytes.
    pub fn bytes(&self) -> u64 {
        let eight_bit = self.eight_bit.as_ref().map_or(0, |c| bytes(c.at.len()));
        eight_bit + 8 * self.f32[0].at.len() as u64
    }
}

/// Bytes of both 8-bit moments for `n` values.
pub fn bytes(n: usize) -> u64 {
    2 * (n + 4 * n.div_ceil(BLOCK)) as u64
}

/// Whether a tensor of `n` values has 8-bit moments under an 8-bit `optimizer.name`.
pub fn is_large(n: usize) -> bool {
    n >= optimizer::SMALLEST
}
