//! AdamW's moments of a unit's buffer, as far as a rank holds them: in f32, or in 8 bits for large tensors.

use super::buffer::{Held, common};
use ft_kernels::optimizer::{BLOCK, EightBit, finite, maps};
use ft_kernels::tensor::Real;
use ft_kernels::{Tensor, optimizer};
use candle_core::{DType, Device, Result};
use std::ops::Range;

/// Running means of gradients and of their squares.
#[derive(Debug)]
pub struct Moments {
    /// In 8 bits, those of large tensors; none where all are in f32.
    coded: Option<Coded>,
    /// In f32, the others.
    wide: [Held; 2],
}

/// Moments in 8 bits.
#[derive(Debug)]
struct Coded {
    /// Which elements of the buffer: blocks but for the last.
    at: Range<usize>,
    all: EightBit,
}

/// Views of the moments of a range.
#[derive(Debug)]
pub enum Of {
    /// In f32.
    Wide([Tensor; 2]),
    /// In 8 bits.
    Coded(Box<EightBit>),
}

impl Moments {
    /// Zeros for a range of a buffer, of which the first `large` elements have theirs in 8 bits.
    pub(super) fn new(at: &Range<usize>, large: usize, home: &Device) -> Result<Self> {
        let (coded, wide) = (common(at, &(0..large)), common(at, &(large..at.end.max(large))));
        let (n, wide) = (coded.len(), || Held::zeros(wide.clone(), home));
        // all zero, in the gaps between tensors too, which no checkpoint holds
        let codes = |zero: u8| Real::full(zero, n, home).map(Tensor::Real);
        let scales = || Tensor::zeros(n.div_ceil(BLOCK), DType::F32, home);
        let coded = match n {
            0 => None,
            _ => Some(Coded {
                at: coded,
                all: EightBit {
                    codes: [codes(optimizer::ZERO[0])?, codes(optimizer::ZERO[1])?],
                    scales: [scales()?, scales()?],
                    maps: maps(home)?,
                },
            }),
        };
        Ok(Self { coded, wide: [wide()?, wide()?] })
    }

    /// What of a range of the buffer is here, in 8 bits and in f32.
    pub fn parts(&self, range: &Range<usize>) -> [Range<usize>; 2] {
        [self.coded.as_ref().map_or(0..0, |c| common(&c.at, range)), common(&self.wide[0].at, range)]
    }

    /// Views of a range that is one of [`Moments::parts`].
    ///
    /// # Errors
    /// A range that is not all here, or does not begin with a block.
    pub fn of(&self, range: Range<usize>) -> Result<Of> {
        let Some(c) = self.coded.as_ref().filter(|c| c.at.start <= range.start && range.end <= c.at.end)
        else {
            let [m, v] = &self.wide;
            return Ok(Of::Wide([m.of(range.clone())?, v.of(range)?]));
        };
        let start = range.start - c.at.start;
        if !start.is_multiple_of(BLOCK) {
            candle_core::bail!("moments of {range:?}: blocks are of {BLOCK}");
        }
        let [m, v] = &c.all.codes;
        let codes = |t: &Tensor| t.narrow(0, start, range.len());
        let scales = |t: &Tensor| t.narrow(0, start / BLOCK, range.len().div_ceil(BLOCK));
        Ok(Of::Coded(Box::new(EightBit {
            codes: [codes(m)?, codes(v)?],
            scales: [scales(&c.all.scales[0])?, scales(&c.all.scales[1])?],
            maps: c.all.maps.clone(),
        })))
    }

    /// Whether those of a range are finite, as far as they are here.
    ///
    /// # Errors
    /// Of the device.
    pub fn finite(&self, range: &Range<usize>) -> Result<bool> {
        for part in self.parts(range).into_iter().filter(|r| !r.is_empty()) {
            let [m, v] = match self.of(part)? {
                Of::Wide(all) => all,
                // a code is a share of its scale
                Of::Coded(all) => all.scales,
            };
            if !(finite(&m)? && finite(&v)?) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether some are in 8 bits.
    pub fn is_coded(&self) -> bool {
        self.coded.is_some()
    }

    /// Bytes that they take.
    pub fn bytes(&self) -> u64 {
        let coded = self.coded.as_ref().map_or(0, |c| bytes(c.at.len()));
        coded + 8 * self.wide[0].at.len() as u64
    }
}

/// Bytes of both moments of so many values in 8 bits.
pub fn bytes(n: usize) -> u64 {
    2 * (n + 4 * n.div_ceil(BLOCK)) as u64
}

/// Whether a tensor of so many values has its moments in 8 bits, where `optimizer.name` says so.
pub fn is_large(n: usize) -> bool {
    n >= optimizer::SMALLEST
}
