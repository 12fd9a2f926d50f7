//! A 4-bit weight read or quantized lazily, by ranges, for ranks that hold a part of it.

use super::codebook::{CodeTables, Type};
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

/// Decides on the location of a vector and returns a tensor there.
pub type Place<'p, 'a> = dyn FnMut(LazyVector<'a>) -> ft_base::Result<Tensor> + 'p;

impl<'a> LazyMatrix<'a> {
    /// Builds the matrix for products in `compute`; `place` allocates codes and scales.
    ///
    /// # Errors
    /// Errors from `place`.
    pub fn placed(
        self,
        compute: DType,
        books: &mut CodeTables,
        place: &mut Place<'_, 'a>,
    ) -> ft_base::Result<QuantizedMatrix> {
        let packed = place(self.packed)?;
        let scales = match self.scales {
            LazyScales::Plain(scales) => Scales::Plain(place(scales)?),
            LazyScales::Nested { codes, factors, map, group, offset } => Scales::Nested {
                codes: place(codes)?,
                map: books.map(&map)?,
                absmax: place(factors)?,
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
        self.placed(compute, books, &mut |u| Ok((u.read)(0..u.len)?.to_device(&device)?.into()))
    }
}

impl LazyVector<'static> {
    /// Wraps values in memory.
    pub fn of<T: candle_core::WithDType>(values: Vec<T>) -> Self {
        let (dtype, len) = (T::DTYPE, values.len());
        Self { dtype, len, read: Box::new(move |r| Ok(Real::new(&values[r], &Device::Cpu)?)) }
    }
}
