//! A 4-bit weight read or quantized lazily, by ranges, for ranks with a part.

use super::codebook::{CodeTables, Type};
use super::error::Error;
use crate::params::buffers::Piece;
use candle_core::{DType, Device};
use ft_kernels::Tensor;
use ft_kernels::quantized::{QuantizedMatrix, Scales};
use ft_kernels::tensor::Real;
use std::ops::Range;

/// Reads a range of a vector, on the CPU.
pub type ReadRange<'a> = Box<dyn Fn(Range<usize>) -> ft_base::Result<Real> + 'a>;

/// A vector not yet read.
pub struct LazyVector<'a> {
    pub dtype: DType,
    /// Number of values.
    pub len: usize,
    /// Reader of ranges.
    pub read: ReadRange<'a>,
}

/// Scales of the quantization blocks.
pub enum LazyScales<'a> {
    /// f32.
    Plain(LazyVector<'a>),
    /// Double quantization: 8-bit codes.
    Nested {
        /// One code per block.
        codes: LazyVector<'a>,
        /// One factor per group.
        factors: LazyVector<'a>,
        /// Lookup table of the 256 codes.
        map: Vec<f32>,
        /// Scales per group.
        group: usize,
        /// Mean of the scales.
        offset: f32,
    },
}

/// A 4-bit weight not yet read.
pub struct LazyMatrix<'a> {
    /// Rows and columns.
    pub dims: (usize, usize),
    /// Values per quantization block.
    pub block: usize,
    /// 4-bit type of the codes.
    pub kind: Type,
    /// Dtype before quantization.
    pub source: DType,
    /// Packed codes, two per byte.
    pub packed: LazyVector<'a>,
    /// Scale of every block.
    pub scales: LazyScales<'a>,
}

impl<'a> LazyMatrix<'a> {
    /// Builds the matrix for products in `compute`; `load` allocates codes and scales, and reads them now or later.
    ///
    /// # Errors
    /// Errors from `load`.
    pub fn materialize(
        self,
        compute: DType,
        books: &mut CodeTables,
        load: &mut dyn FnMut(LazyVector<'a>) -> ft_base::Result<Tensor>,
    ) -> ft_base::Result<QuantizedMatrix> {
        let packed = load(self.packed)?;
        let scales = match self.scales {
            LazyScales::Plain(scales) => Scales::Plain(load(scales)?),
            LazyScales::Nested { codes, factors, map, group, offset } => Scales::Nested {
                codes: load(codes)?,
                map: books.map(&map)?,
                absmax: load(factors)?,
                group,
                offset,
            },
        };
        let book = books.book(self.kind);
        Ok(QuantizedMatrix::new(self.dims, self.block, packed, scales, book, self.source, compute)?)
    }

    /// Reads all codes and scales to the device of `books`.
    ///
    /// # Errors
    /// Read errors.
    pub fn whole(self, compute: DType, books: &mut CodeTables) -> ft_base::Result<QuantizedMatrix> {
        let device = books.device().clone();
        self.materialize(compute, books, &mut |u| Ok((u.read)(0..u.len)?.to_device(&device)?.into()))
    }
}

impl<'a> LazyVector<'a> {
    /// The piece of a vector with one element per `each` elements of the piece's tensor.
    fn cut(self, piece: &Piece, each: usize) -> Self {
        let (own, len) = (piece.clone(), piece.elements());
        let repeated = move |r: Range<usize>| {
            let held = (self.read)(r.start / each..r.end.div_ceil(each))?;
            if each == 1 {
                return Ok(held);
            }
            let of: Vec<u32> = r.clone().map(|i| (i / each - r.start / each) as u32).collect();
            Ok(held.index_select(&Real::new(of, &Device::Cpu)?, 0)?)
        };
        Self { dtype: self.dtype, len, read: Box::new(move |r| own.read(r, &repeated)) }
    }
}

impl<'a> LazyMatrix<'a> {
    /// The rows or columns of a piece, with the same values. Blocks of the whole may straddle the cuts, so the piece
    /// has smaller blocks (a divisor of the old size); consecutive ones repeat the scale of the original block. The
    /// same holds for groups of scales and their factors.
    ///
    /// # Errors
    /// A piece with an odd number of consecutive values.
    pub fn cut(self, name: &str, piece: &Piece) -> ft_base::Result<Self> {
        let (true, &[rows, cols]) = (piece.dim().is_some(), piece.shape().as_slice()) else {
            return Ok(self);
        };
        let block = piece.aligned(self.block);
        let (Some(blocks), Some(pairs)) = (piece.by(block), piece.by(2)) else {
            return Err(Error::Cut { name: name.into(), rows, cols }.into());
        };
        let each = self.block / block;
        let scales = match self.scales {
            LazyScales::Plain(scales) => LazyScales::Plain(scales.cut(&blocks, each)),
            LazyScales::Nested { codes, factors, map, group, offset } => {
                let own = piece.aligned(self.block * group) / block;
                let all = (factors.read)(0..factors.len)?.to_vec1::<f32>()?;
                let of = |g: usize| {
                    blocks.ranges(g * own..g * own + 1).first().map_or(0, |r| r.start / each / group)
                };
                let groups = 0..blocks.elements().div_ceil(own);
                let factors = LazyVector::of(groups.filter_map(|g| all.get(of(g)).copied()).collect());
                LazyScales::Nested { codes: codes.cut(&blocks, each), factors, map, group: own, offset }
            }
        };
        Ok(Self { dims: (rows, cols), block, packed: self.packed.cut(&pairs, 1), scales, ..self })
    }
}

impl LazyVector<'static> {
    /// Wraps values in memory.
    pub fn of<T: candle_core::WithDType>(values: Vec<T>) -> Self {
        let (dtype, len) = (T::DTYPE, values.len());
        Self { dtype, len, read: Box::new(move |r| Ok(Real::new(&values[r], &Device::Cpu)?)) }
    }
}
