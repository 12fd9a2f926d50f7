//! A 4-bit weight whose codes and scales are read, or made, a range at a time: by whoever holds a part of it.

use super::code::{CodeBooks, Type};
use ft_kernels::Tensor;
use ft_kernels::quantized::{QuantizedMatrix, Scales};
use ft_kernels::tensor::Real;
use candle_core::{DType, Device};
use std::ops::Range;

/// Gives some values of a vector, on the CPU.
pub type Read<'a> = Box<dyn Fn(Range<usize>) -> ft_base::Result<Real> + 'a>;

/// A vector that is not read yet.
pub struct Unread<'a> {
    /// Type of its values.
    pub dtype: DType,
    /// How many.
    pub len: usize,
    /// Gives some of them.
    pub read: Read<'a>,
}

/// The scales of blocks.
pub enum UnreadScales<'a> {
    /// f32.
    Plain(Unread<'a>),
    /// 8-bit codes, with what they stand for.
    Nested {
        /// A code a block.
        codes: Unread<'a>,
        /// A factor a group.
        factors: Unread<'a>,
        /// The 256 values of codes.
        map: Vec<f32>,
        /// Scales a group.
        group: usize,
        /// Mean of the scales.
        offset: f32,
    },
}

/// A 4-bit weight that is not read yet.
pub struct UnreadMatrix<'a> {
    /// Rows and columns.
    pub dims: (usize, usize),
    /// Values a block.
    pub block: usize,
    /// What the codes stand for.
    pub kind: Type,
    /// Dtype of the tensor that was quantized.
    pub source: DType,
    /// Two codes a byte.
    pub packed: Unread<'a>,
    /// The scale of each block.
    pub scales: UnreadScales<'a>,
}

/// Where the values of a matrix come to be.
pub type Place<'p, 'a> = dyn FnMut(Unread<'a>) -> ft_base::Result<Tensor> + 'p;

impl<'a> UnreadMatrix<'a> {
    /// The matrix for products in `compute`, whose codes and scales are where `place` puts them.
    ///
    /// # Errors
    /// Of `place`.
    pub fn placed(
        self,
        compute: DType,
        books: &mut CodeBooks,
        place: &mut Place<'_, 'a>,
    ) -> ft_base::Result<QuantizedMatrix> {
        let packed = place(self.packed)?;
        let scales = match self.scales {
            UnreadScales::Plain(scales) => Scales::Plain(place(scales)?),
            UnreadScales::Nested { codes, factors, map, group, offset } => Scales::Nested {
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

    /// The matrix with all of its codes and scales on the device of `books`.
    ///
    /// # Errors
    /// Those of reading.
    pub fn whole(self, compute: DType, books: &mut CodeBooks) -> ft_base::Result<QuantizedMatrix> {
        let device = books.device().clone();
        self.placed(compute, books, &mut |u| Ok((u.read)(0..u.len)?.to_device(&device)?.into()))
    }
}

impl Unread<'static> {
    /// Values that are there.
    pub fn of<T: candle_core::WithDType>(values: Vec<T>) -> Self {
        let (dtype, len) = (T::DTYPE, values.len());
        Self { dtype, len, read: Box::new(move |r| Ok(Real::new(&values[r], &Device::Cpu)?)) }
    }
}
