//! A 4-bit matrix together with a temporary full dequantized copy.
//!
//! On the CPU, products use the same tiles as products of [`QuantizedMatrix`] and give the same bits; a tile
//! is read instead of dequantized.

use super::cpu::{few_tokens, tile_width};
use super::matrix::QuantizedMatrix;
use super::tiles::FEW;
use crate::Tensor;
use crate::cpu::{Float, ghost_products, is_native, on_real, onto, tensor, view};
use crate::gemm::{self, Mat, pairs};
use crate::ledger::{Cost, Ledger, Role};
use crate::padded::Padded;
use candle_core::Result;
use std::sync::Arc;

/// A 4-bit matrix and its dequantized values.
#[derive(Debug)]
pub struct Dequantized {
    blocks: Arc<QuantizedMatrix>,
    /// Values in the compute dtype, with room for an adapter.
    values: Padded,
}

impl Dequantized {
    /// Dequantizes a matrix; on CUDA, leaves room for an adapter of LoRA rank `rank`.
    pub fn new(blocks: Arc<QuantizedMatrix>, rank: usize) -> Result<Self> {
        let values = blocks.parts().0.role(Role::InFlight, || blocks.dequantize_padded(rank))?;
        if let Some(g) = values.all().ghost() {
            let (rows, cols) = values.dims();
            let dequantized = (rows * cols) as f64;
            let held = dequantized * values.dtype().size_in_bytes() as f64;
            g.ledger().work(Cost { dequantized, held, ..Cost::default() });
        }
        Ok(Self { blocks, values })
    }

    /// The 4-bit source.
    pub fn blocks(&self) -> &QuantizedMatrix {
        &self.blocks
    }

    /// Values `[rows, cols]` in the compute dtype.
    pub fn values(&self) -> Result<Tensor> {
        self.values.values()
    }

    /// Values with the room for an adapter.
    pub fn room(&self) -> &Padded {
        &self.values
    }

    /// Like [`Dequantized::room`], for a fused product with rows `x` and the adapter matrix `low`; records
    /// the work for ghosts.
    ///
    /// # Errors
    /// Mismatched shapes.
    pub fn padded(&self, x: &Tensor, low: &Tensor) -> Result<&Padded> {
        self.blocks.work(x, false);
        gemm::work(x, false, low, None)?;
        Ok(&self.values)
    }

    /// `x W^T`: `[t, cols]` -> `[t, rows]`, in the dtype of `x`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.blocks.work(x, false);
        if is_native(x) {
            return on_real!(x.dtype(), self.forward_cpu(x));
        }
        gemm::product(x, false, &self.values()?, true)
    }

    /// `dy W`, added to `dx` if given: `[t, rows]` -> `[t, cols]`, in the dtype of `dy`.
    pub fn backward(&self, dy: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
        self.blocks.work(dy, false);
        if is_native(dy) {
            return on_real!(dy.dtype(), self.backward_cpu(dy, dx));
        }
        gemm::product_onto(dx, dy, false, &self.values()?, false)
    }

    /// `W A^T`: `[r, cols]` -> `[rows, r]`, in the dtype of `a`.
    pub fn times(&self, a: &Tensor) -> Result<Tensor> {
        self.forward(a)?.t()?.contiguous()
    }

    fn forward_cpu<T: Float>(&self, x: &Tensor) -> Result<Tensor> {
        let (rows, cols) = self.blocks.dims();
        let (t, k) = x.dims2()?;
        if k != cols {
            candle_core::bail!("dequantized blocks: {:?} x [{rows}, {cols}]^T", x.shape());
        }
        if t > FEW && pairs::takes(&[x, self.values.all()])? {
            return pairs::matmul(x, false, &self.values.values()?, true, 1.0, true);
        }
        let tiles = gemm::ghost_tiles((t, k, rows), tile_width(k), false, true);
        if let Some([y]) =
            ghost_products::<T, 1>(&[x, self.values.all()], [((t, rows).into(), x.dtype())], tiles)
        {
            return Ok(y);
        }
        let (xv, wv) = (view::<T>(x)?, view::<T>(self.values.all())?);
        if t <= FEW {
            let row = |r: usize, row: &mut [T]| row.copy_from_slice(&wv[r * cols..(r + 1) * cols]);
            let out = few_tokens(&xv, t, (rows, cols), row);
            return tensor(out, (t, rows), x.dtype());
        }
        let mut out = vec![T::zero(); t * rows];
        let w = Mat::new(&wv, rows, cols, cols).t();
        gemm::by_columns(&mut out, false, Mat::new(&xv, t, k, k), tile_width(k), w);
        tensor(out, (t, rows), x.dtype())
    }

    fn backward_cpu<T: Float>(&self, dy: &Tensor, dx: Option<Tensor>) -> Result<Tensor> {
        let (rows, cols) = self.blocks.dims();
        let (t, k) = dy.dims2()?;
        if k != rows || dx.as_ref().is_some_and(|dx| dx.dims() != [t, cols]) {
            candle_core::bail!("dequantized blocks: {:?} x [{rows}, {cols}]", dy.shape());
        }
        if pairs::takes(&[dy, self.values.all()])? {
            let w = self.values.values()?;
            let Some(dx) = dx else { return pairs::matmul(dy, false, &w, false, 1.0, true) };
            pairs::onto((&dx, true), dy, false, &w, false, 1.0)?;
            return Ok(dx);
        }
        let widened = if self.values.dtype() == T::DTYPE { 0 } else { 4 * rows * cols };
        if dy.ghost().is_some() {
            let tiles = |l: &Ledger| {
                let _widened = l.hold(widened as u64);
                gemm::ghost_tiles((t, k, cols), tile_width(k), false, false)(l);
            };
            return onto::<T>("dequantized backward", dy, dx, (t, cols), |_, _| (), tiles);
        }
        let (dyv, wv) = (view::<T>(dy)?, view::<T>(self.values.all())?);
        let (a, w) = (Mat::new(&dyv, t, k, k), Mat::new(&wv, rows, cols, cols));
        let product = |dst: &mut [T], add| gemm::by_columns(dst, add, a, tile_width(k), w);
        onto("dequantized backward", dy, dx, (t, cols), product, |_| ())
    }
}
