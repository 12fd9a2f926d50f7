//! DoRA without matrix products: scale factors of the outputs, scaling, and the gradient of the magnitude.
//!
//! With A `[r, i]`, B `[o, r]`, LoRA scale s and magnitude m: `g = m / |W + s B A|` by row. g and
//! `1 / |W + s B A|`, both `[1, o]`, are f32.

use crate::Tensor;
use crate::cpu::is_cpu;
use crate::cuda::launch::{Grid, Launch, args, compiled, empty};
use crate::tensor::ghosts;
use crate::{gemm, scaled, upcast};
use candle_core::{DType, Result};

/// Threads per block, same as in dora.cu.
const THREADS: u32 = 256;
/// Rows of W per block, one per warp.
const ROWS: usize = 8;
/// Columns per block of a sum, same as in dora.cu.
const COLUMNS: usize = 32;

/// Terms of the row norms of `W + s B A`, without forming the matrix: `|w|^2 + 2 s w.(BA) + s^2 |BA|^2`.
#[derive(Clone, Copy, Debug)]
pub struct Norms<'a> {
    /// A `[r, i]`.
    pub a: &'a Tensor,
    /// B `[o, r]`.
    pub b: &'a Tensor,
    /// `W A^T` `[o, r]`, in the dtype of B.
    pub times: &'a Tensor,
    /// `|W|^2` by row, `[o]`, f32.
    pub squares: &'a Tensor,
    /// LoRA scale s.
    pub scale: f64,
}

impl Norms<'_> {
    fn composed(&self) -> Result<Tensor> {
        let (a, b) = (upcast(self.a)?, upcast(self.b)?);
        let cross = (upcast(self.times)? * &b)?.sum(1)?;
        let gram = gemm::matmul(&a, false, &a, true)?;
        let own = (gemm::matmul(&b, false, &gram, false)? * &b)?.sum(1)?;
        let sum = ((self.squares + (cross * (2.0 * self.scale))?)? + (own * (self.scale * self.scale))?)?;
        // NaN on overflow: an infinite norm would silently zero the outputs of the row
        (&sum + sum.affine(0.0, 0.0)?)?.sqrt()
    }

    /// Row norms `[o]` in f32 (f64 for f64).
    pub fn values(&self) -> Result<Tensor> {
        if self.on_cuda() { self.launch(None).map(|[norms, _]| norms) } else { self.composed() }
    }

    fn on_cuda(&self) -> bool {
        !is_cpu(self.b) && self.times.dtype() == self.b.dtype() && self.squares.dtype() == DType::F32
    }

    /// g and `1 / norm` for a magnitude `[1, o]`, both `[1, o]` in f32 (f64 for f64).
    pub fn factors(&self, magnitude: &Tensor) -> Result<[Tensor; 2]> {
        if self.on_cuda() {
            return self.launch(Some(magnitude));
        }
        let inverse = self.composed()?.recip()?.unsqueeze(0)?;
        Ok([(upcast(magnitude)? * &inverse)?, inverse])
    }

    /// Launches the kernel: g and the inverse norms, or without a magnitude the norms and zeros.
    fn launch(&self, magnitude: Option<&Tensor>) -> Result<[Tensor; 2]> {
        let (o, r) = self.b.dims2()?;
        if self.times.dims() != [o, r] || self.a.dim(0)? != r || self.squares.elem_count() != o {
            candle_core::bail!("DoRA: norms of {:?} and {:?}", self.a.shape(), self.b.shape());
        }
        let shape = || if magnitude.is_some() { (1, o).into() } else { candle_core::Shape::from(o) };
        // f32 if the master weights are on the device
        let magnitude = magnitude.map(upcast).transpose()?;
        let gram = gemm::matmul_wide(self.a, false, self.a, true)?;
        if let Some(two) = ghosts(&[self.b], [(shape(), DType::F32), (shape(), DType::F32)], |_| ()) {
            return Ok(two);
        }
        let (b, times) = (self.b.contiguous()?, self.times.contiguous()?);
        let out = [empty(&b, shape(), DType::F32)?, empty(&b, shape(), DType::F32)?];
        let launch = Launch::of(&b, compiled!(DORA), "dora_norms")?;
        let launch = launch.with(args![&times, &b, &gram, self.squares, magnitude.as_ref()])?;
        let launch = launch.with(args![self.scale as f32, o as u64, r, &out[0], &out[1]])?;
        // SAFETY: `times` and `b` have o rows of r values, as checked above; `gram` is r x r; `squares`,
        // `magnitude` and both outputs have o values; the grid covers o rows with one warp each.
        unsafe { launch.run(Grid::new(o.div_ceil(ROWS), THREADS)) }?;
        Ok(out)
    }
}

/// `k (g + add) x` by column, plus `other - k base` with dropout.
#[derive(Clone, Copy, Debug)]
pub struct Scaling<'a> {
    /// g `[1, o]`, f32.
    pub g: &'a Tensor,
    /// Constant added to g.
    pub add: f64,
    /// Common factor k.
    pub k: f64,
    /// `other` and `base`, both `[t, o]`.
    pub others: Option<(&'a Tensor, &'a Tensor)>,
}

impl Scaling<'_> {
    /// Applies the scaling to `x` `[t, o]`, in the dtype of `x` with a single rounding.
    pub fn of(&self, x: &Tensor) -> Result<Tensor> {
        if is_cpu(x) || self.g.dtype() != DType::F32 {
            return self.composed(x);
        }
        let (t, o) = x.dims2()?;
        let same = |t: &Tensor| t.dims() == x.dims() && t.dtype() == x.dtype();
        if self.g.elem_count() != o || self.others.is_some_and(|(a, b)| !same(a) || !same(b)) {
            candle_core::bail!("DoRA: factors {:?} of {:?}", self.g.shape(), x.shape());
        }
        if let Some([y]) = ghosts(&[x], [((t, o).into(), x.dtype())], |_| ()) {
            return Ok(y);
        }
        let x = x.contiguous()?;
        let y = empty(&x, (t, o), x.dtype())?;
        let launch = Launch::of(&x, compiled!(DORA), "dora_scale")?;
        let launch = launch.with(args![&x, self.g, self.add as f32, self.k as f32])?;
        let launch = launch.with(args![self.others.map(|o| o.0), self.others.map(|o| o.1), t as u64])?;
        let launch = launch.with(args![o as u64, &y])?;
        // SAFETY: `x`, `y`, `other` and `base` have t rows of o values, `g` has o values, as checked above;
        // one block per row.
        unsafe { launch.run(Grid::new(t, THREADS)) }?;
        Ok(y)
    }

    fn composed(&self, x: &Tensor) -> Result<Tensor> {
        let g = if self.add == 0.0 { self.g.clone() } else { (self.g + self.add)? };
        let mut y = upcast(x)?.broadcast_mul(&scaled(&g, self.k)?)?;
        if let Some((other, base)) = self.others {
            y = ((y + upcast(other)?)? - scaled(&upcast(base)?, self.k)?)?;
        }
        y.to_dtype(x.dtype())
    }
}

/// `grad = inverse * sum over rows of dy * z`, or `+=` with `add`: `grad` and `inverse` `[1, o]` in f32; `dy`, `z`
/// `[t, o]`.
pub fn magnitude_onto((grad, add): (&Tensor, bool), inverse: &Tensor, dy: &Tensor, z: &Tensor) -> Result<()> {
    if is_cpu(dy) || grad.dtype() != DType::F32 || dy.dtype() != z.dtype() {
        return gemm::put((grad, add), &magnitude(inverse, dy, z)?);
    }
    let (t, o) = dy.dims2()?;
    if z.dims() != [t, o] || grad.elem_count() != o || inverse.elem_count() != o {
        candle_core::bail!("DoRA: the gradient {:?} of {:?}", grad.shape(), dy.shape());
    }
    if ghosts(&[dy, z], [], |_| ()).is_some() {
        return Ok(());
    }
    let (dy, z) = (dy.contiguous()?, z.contiguous()?);
    let launch = Launch::of(&dy, compiled!(DORA), "dora_sum")?;
    let launch = launch.with(args![&dy, &z, inverse, t as u64, o as u64, grad, u32::from(add)])?;
    // SAFETY: `dy` and `z` have t rows of o values, `inverse` and `grad` have o values, as checked above;
    // each block owns 32 columns.
    unsafe { launch.run(Grid::new(o.div_ceil(COLUMNS), THREADS)) }
}

/// The term of [`magnitude_onto`], composed of candle operations.
pub fn magnitude(inverse: &Tensor, dy: &Tensor, z: &Tensor) -> Result<Tensor> {
    (upcast(dy)? * upcast(z)?)?.sum_keepdim(0)? * inverse
}
