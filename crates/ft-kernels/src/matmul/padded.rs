//! A matrix in a wider buffer; the padding (the "room") holds the low-rank operand of an adapter.
//!
//! A linear module with LoRA computes `y = x W^T + u B^T` with `u = s x A^T`. With two products, the second
//! reads and rewrites `y` (`beta = 1`): 4 bytes of traffic per value in half precision, over the widest
//! activations of a layer. Merging `s B A` into W for the product would round it to the dtype of W and lose
//! small updates. Instead, one product with a longer inner dimension computes both terms:
//!
//! ```text
//! y  = [x | u] [W | B]^T      x and W with room on the right
//! dx = [dy | du] [W ; A]      dy with room on the right, W with room below
//! ```
//!
//! `y` and `dx` are written once. The price: rows of `x` and `dy` have a larger stride; before each product u is
//! copied next to x, and B and A next to and below a dense W (LoRA-rank values per row). A weight keeps no
//! reference to an adapter. Linear modules with the same input use the same room in turn, so u is also stored
//! separately for the backward pass; du is computed in place. A 4-bit matrix is dequantized into such a buffer;
//! a dense matrix permanently resides in one.
//!
//! On the CPU there is no room: products accumulate in cache, tile by tile.

use super::columns;
use crate::Tensor;
use crate::cuda::launch::empty;
use crate::gemm;
use candle_core::{DType, Result};

/// Row strides are a multiple of this many values: 16 bytes in half precision.
const ALIGN: usize = 8;

/// A matrix `[rows, cols]` with or without room.
#[derive(Clone, Debug)]
pub struct Padded {
    /// `[rows + room, cols + room]`, contiguous.
    all: Tensor,
    rows: usize,
    cols: usize,
}

/// Row stride in values of a matrix with `cols` columns and room for LoRA rank `rank`; `cols` if `rank` is 0.
pub fn stride(cols: usize, rank: usize) -> usize {
    if rank == 0 { cols } else { (cols + rank).next_multiple_of(ALIGN) }
}

impl Padded {
    /// A matrix without room.
    ///
    /// # Errors
    /// A tensor without exactly two dimensions.
    pub fn of(t: &Tensor) -> Result<Self> {
        let (rows, cols) = t.dims2()?;
        Ok(Self { all: t.clone(), rows, cols })
    }

    /// An uninitialized matrix on the device of `on`, with room for `rank` columns.
    ///
    /// # Errors
    /// Out of memory.
    pub fn empty(on: &Tensor, (rows, cols): (usize, usize), rank: usize, dtype: DType) -> Result<Self> {
        let shape = (rows, stride(cols, rank));
        let all = match on.ghost() {
            Some(g) => crate::tensor::Ghost::new(g.ledger(), shape, dtype).into(),
            None => empty(on, shape, dtype)?,
        };
        Ok(Self { all, rows, cols })
    }

    /// A weight inside the buffer `all`, with room on the right and below.
    ///
    /// # Errors
    /// A buffer that is too small or not contiguous.
    pub fn within(all: Tensor, (rows, cols): (usize, usize)) -> Result<Self> {
        let (r, c) = all.dims2()?;
        if r < rows || c < cols || !all.is_contiguous() {
            candle_core::bail!("a matrix [{rows}, {cols}] within {:?}", all.shape());
        }
        Ok(Self { all, rows, cols })
    }

    /// Shape of the buffer for a weight `[rows, cols]` and an adapter of LoRA rank `rank`.
    pub fn shape((rows, cols): (usize, usize), rank: usize) -> (usize, usize) {
        (rows + rank, stride(cols, rank))
    }

    /// A copy of rows `[t, cols]` with room for `rank` columns; the rows themselves without room.
    ///
    /// # Errors
    /// Out of memory.
    pub fn beside_room(t: &Tensor, rank: usize) -> Result<Self> {
        if rank == 0 {
            return Self::of(t);
        }
        let to = Self::empty(t, t.dims2()?, rank, t.dtype())?;
        to.all.slice_set(t, 1, 0)?;
        Ok(to)
    }

    /// Joins the rows of matrices of equal width and room.
    ///
    /// # Errors
    /// Out of memory; no matrix.
    pub fn cat(parts: &[Self]) -> Result<Self> {
        let all: Vec<&Tensor> = parts.iter().map(|p| &p.all).collect();
        let cols = parts.first().map_or(0, |p| p.cols);
        Self::within(Tensor::cat(&all, 0)?, (parts.iter().map(|p| p.rows).sum(), cols))
    }

    /// View of `n` rows from row `first` on.
    ///
    /// # Errors
    /// Rows beyond the matrix.
    pub fn narrow(&self, first: usize, n: usize) -> Result<Self> {
        Self::within(self.all.narrow(0, first, n)?, (n, self.cols))
    }

    /// Copies a weight into a buffer with room for an adapter of LoRA rank `rank`.
    ///
    /// # Errors
    /// Out of memory.
    pub fn copy_of(t: &Tensor, rank: usize) -> Result<Self> {
        let (rows, cols) = t.dims2()?;
        let all = Tensor::zeros(Self::shape((rows, cols), rank), t.dtype(), t.device())?;
        all.narrow(0, 0, rows)?.slice_set(t, 1, 0)?;
        Ok(Self { all, rows, cols })
    }

    /// `[rows, cols]` without room.
    pub fn dims(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Dtype of the values.
    pub fn dtype(&self) -> DType {
        self.all.dtype()
    }

    /// Row stride in values.
    pub fn stride(&self) -> usize {
        self.all.dims().last().copied().unwrap_or(self.cols)
    }

    /// Columns of room.
    pub fn room(&self) -> usize {
        self.stride() - self.cols
    }

    /// Rows of room. Rows are not aligned: there may be fewer than columns.
    pub fn room_below(&self) -> usize {
        self.all.dims().first().map_or(0, |rows| rows - self.rows)
    }

    /// The whole buffer.
    pub fn all(&self) -> &Tensor {
        &self.all
    }

    /// View of the matrix `[rows, cols]`.
    pub fn values(&self) -> Result<Tensor> {
        self.with(0)
    }

    /// View of the matrix and the first `rank` columns of room, `[rows, cols + rank]`.
    pub fn with(&self, rank: usize) -> Result<Tensor> {
        if self.all.dims() == [self.rows, self.cols + rank] {
            return Ok(self.all.clone());
        }
        self.all.narrow(0, 0, self.rows)?.narrow(1, 0, self.cols + rank)
    }

    /// View of the matrix and the first `rank` rows of room below, `[rows + rank, cols]`.
    pub fn with_below(&self, rank: usize) -> Result<Tensor> {
        self.all.narrow(0, 0, self.rows + rank)?.narrow(1, 0, self.cols)
    }

    /// View of the first `rank` columns of room, `[rows, rank]`.
    pub fn beside(&self, rank: usize) -> Result<Tensor> {
        self.all.narrow(0, 0, self.rows)?.narrow(1, self.cols, rank)
    }

    /// Copies a matrix `[rows, rank]`, or columns of one, into the room on the right.
    pub fn set_beside(&self, t: &Tensor) -> Result<()> {
        columns::copy(t, &self.all, (0, self.cols))
    }

    /// Copies a matrix `[rank, cols]` into the room below.
    pub fn set_below(&self, t: &Tensor) -> Result<()> {
        columns::copy(t, &self.all, (self.rows, 0))
    }
}

impl Padded {
    /// `x W^T + u B^T` in one product, with this W, rows `[x | u]` `[t, cols + r]` and `b` `[rows, r]`. The
    /// caller has recorded the work.
    ///
    /// # Errors
    /// Shapes that exceed the room.
    pub fn forward_with(&self, xu: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.set_beside(b)?;
        gemm::product(xu, false, &self.with(b.dim(1)?)?, true)
    }

    /// `dy W + du A` in one product, added to `dx` if given, with this W, rows `[dy | du]` `[t, rows + r]`
    /// and `a` `[r, cols]`. The caller has recorded the work.
    ///
    /// # Errors
    /// Shapes that exceed the room.
    pub fn backward_with(&self, dydu: &Tensor, a: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
        self.set_below(a)?;
        gemm::product_onto(dx, dydu, false, &self.with_below(a.dim(0)?)?, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, randn};

    #[test]
    fn a_padded_product_adds_the_low_rank_product() -> Result<()> {
        let (t, i, o, r) = (5, 6, 4, 3);
        let f = |seed, shape: (usize, usize)| randn(seed, shape, DType::F64);
        let (x, w, u, b) = (f(1, (t, i))?, f(2, (o, i))?, f(3, (t, r))?, f(4, (o, r))?);
        let (wp, xp) = (Padded::copy_of(&w, r)?, Padded::copy_of(&x, r)?);
        assert_eq!((wp.stride(), wp.all().dims(), wp.room()), (16, [o + r, 16].as_slice(), 10));
        let xp = Padded::within(xp.all().narrow(0, 0, t)?, (t, i))?;
        xp.set_beside(&u)?;
        wp.set_beside(&b)?;
        let want = (x.matmul(&w.t()?)? + u.matmul(&b.t()?)?)?;
        close(&gemm::matmul(&xp.with(r)?, false, &wp.with(r)?, true)?, &want, 1e-12);
        let (dy, a) = (f(5, (t, o + r))?, f(6, (r, i))?);
        wp.set_below(&a)?;
        let want = (dy.narrow(1, 0, o)?.matmul(&w)? + dy.narrow(1, o, r)?.matmul(&a)?)?;
        close(&gemm::matmul(&dy, false, &wp.with_below(r)?, false)?, &want, 1e-12);
        close(&wp.values()?, &w, 0.0);
        close(&xp.beside(r)?, &u, 0.0);
        assert!(Padded::within(w, (o + 1, i)).is_err());
        assert_eq!((stride(6, 0), Padded::of(&x)?.room()), (6, 0));
        assert_eq!(wp.room_below(), r);
        Ok(())
    }
}
