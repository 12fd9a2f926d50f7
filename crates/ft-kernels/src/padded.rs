//! A matrix in a wider buffer: room beside it, and of a weight below it, where a low-rank operand stands.
//!
//! A linear with LoRA is `y = x W^T + u B^T` with `u = s x A^T`. As two products, whichever comes second reads `y` and
//! writes it again (`beta = 1`): a pass of 4 bytes a value in half precision, over the widest activations of a layer.
//! Merging `s B A` into W for the time of the product rounds it to W's type, where small updates vanish. A product that
//! sums both is a product with a wider inner dimension, of operands that stand in one buffer each:
//!
//! ```text
//! y  = [x | u] [W | B]^T      x and W with room beside them
//! dx = [dy | du] [W ; A]      dy with room beside it, W with room below it
//! ```
//!
//! so that `y` and `dx` are written once, and rounded once. It costs what the room costs: whoever writes `x` or `dy` writes
//! rows that are a little longer apart; u is copied beside x, and B and A beside and below a dense W, each time before it
//! is multiplied: a rank of values a row. (Which adapter a weight goes with is then nothing that it remembers.) Linears that
//! share an input share its room: u stands there for one of them after the other, and is kept apart, for backward needs it
//! when the room has been used again; du is written where it is multiplied. A matrix of 4-bit codes is decoded into such a
//! buffer; a dense one lies in one for as long as the model does.
//!
//! On the CPU there is no room: its products accumulate in the cache, tile by tile.

use super::Tensor;
use super::cuda::launch::{empty, ghosts};
use super::gemm;
use candle_core::{DType, Result};

/// Values that the length of a row with room is a multiple of: 16 bytes in half precision.
const ALIGN: usize = 8;

/// A matrix [rows, cols], with or without room.
#[derive(Clone, Debug)]
pub struct Padded {
    /// [rows and more, cols and more], contiguous.
    all: Tensor,
    rows: usize,
    cols: usize,
}

/// Values from row to row of a matrix with `cols` columns and room for `rank` more; for none it has none.
pub fn stride(cols: usize, rank: usize) -> usize {
    if rank == 0 { cols } else { (cols + rank).next_multiple_of(ALIGN) }
}

impl Padded {
    /// A matrix without room.
    ///
    /// # Errors
    /// Not two dimensions.
    pub fn of(t: &Tensor) -> Result<Self> {
        let (rows, cols) = t.dims2()?;
        Ok(Self { all: t.clone(), rows, cols })
    }

    /// One whose values are not set, on the device of `on`, with room for `rank` columns more.
    ///
    /// # Errors
    /// No memory.
    pub fn empty(on: &Tensor, (rows, cols): (usize, usize), rank: usize, dtype: DType) -> Result<Self> {
        let shape = (rows, stride(cols, rank));
        let all = match on.ghost() {
            Some(g) => super::tensor::Ghost::new(g.ledger(), shape, dtype).into(),
            None => empty(on, shape, dtype)?,
        };
        Ok(Self { all, rows, cols })
    }

    /// A weight with room for `rank` columns beside it and as many rows below it, of a buffer that has this shape.
    ///
    /// # Errors
    /// Another shape.
    pub fn within(all: Tensor, (rows, cols): (usize, usize)) -> Result<Self> {
        let (r, c) = all.dims2()?;
        if r < rows || c < cols || !all.is_contiguous() {
            candle_core::bail!("a matrix [{rows}, {cols}] within {:?}", all.shape());
        }
        Ok(Self { all, rows, cols })
    }

    /// The shape of the buffer of a weight [rows, cols] with room for an adapter of `rank`.
    pub fn shape((rows, cols): (usize, usize), rank: usize) -> (usize, usize) {
        (rows + rank, stride(cols, rank))
    }

    /// A copy of a weight with room for an adapter of `rank`.
    ///
    /// # Errors
    /// No memory.
    pub fn copy_of(t: &Tensor, rank: usize) -> Result<Self> {
        let (rows, cols) = t.dims2()?;
        let all = Tensor::zeros(Self::shape((rows, cols), rank), t.dtype(), t.device())?;
        all.narrow(0, 0, rows)?.slice_set(t, 1, 0)?;
        Ok(Self { all, rows, cols })
    }

    /// [rows, cols].
    pub fn dims(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Type of its values.
    pub fn dtype(&self) -> DType {
        self.all.dtype()
    }

    /// Values from row to row.
    pub fn stride(&self) -> usize {
        self.all.dims().last().copied().unwrap_or(self.cols)
    }

    /// Columns that there is room for.
    pub fn room(&self) -> usize {
        self.stride() - self.cols
    }

    /// The buffer.
    pub fn all(&self) -> &Tensor {
        &self.all
    }

    /// The matrix [rows, cols], as a view; without room the tensor itself.
    pub fn values(&self) -> Result<Tensor> {
        self.with(0)
    }

    /// The matrix and the first columns of the room [rows, cols + rank], as a view.
    pub fn with(&self, rank: usize) -> Result<Tensor> {
        if self.all.dims() == [self.rows, self.cols + rank] {
            return Ok(self.all.clone());
        }
        self.all.narrow(0, 0, self.rows)?.narrow(1, 0, self.cols + rank)
    }

    /// The matrix and the first rows of the room below it [rows + rank, cols], as a view.
    pub fn with_below(&self, rank: usize) -> Result<Tensor> {
        self.all.narrow(0, 0, self.rows + rank)?.narrow(1, 0, self.cols)
    }

    /// The first columns of the room [rows, rank], as a view.
    pub fn beside(&self, rank: usize) -> Result<Tensor> {
        self.all.narrow(0, 0, self.rows)?.narrow(1, self.cols, rank)
    }

    /// Copies a matrix [rows, rank] beside this one.
    pub fn set_beside(&self, t: &Tensor) -> Result<()> {
        copies(t);
        self.all.narrow(0, 0, self.rows)?.slice_set(t, 1, self.cols)
    }

    /// Copies a matrix [rank, cols] below this one.
    pub fn set_below(&self, t: &Tensor) -> Result<()> {
        copies(t);
        self.all.narrow(0, self.rows, t.dim(0)?)?.slice_set(t, 1, 0)
    }
}

impl Padded {
    /// `x W^T + u B^T` of this W, rows `[x | u]` [t, cols + r] and `b` [rows, r], in one product. Its work is written down
    /// already.
    ///
    /// # Errors
    /// Shapes that do not fit the room.
    pub fn forward_with(&self, xu: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.set_beside(b)?;
        gemm::product(xu, false, &self.with(b.dim(1)?)?, true)
    }

    /// `dy W + du A` of this W, rows `[dy | du]` [t, rows + r] and `a` [r, cols], added to `dx` if given, in one product. Its
    /// work is written down already.
    ///
    /// # Errors
    /// Shapes that do not fit the room.
    pub fn backward_with(&self, dydu: &Tensor, a: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
        self.set_below(a)?;
        gemm::product_onto(dx, dydu, false, &self.with_below(a.dim(0)?)?, false)
    }
}

/// Counts a copy's launch, for ghosts.
fn copies(t: &Tensor) {
    let _ = ghosts(&[t], [], |_| ());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, randn};

    #[test]
    fn one_product_sums_both() -> Result<()> {
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
        Ok(())
    }
}
