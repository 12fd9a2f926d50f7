//! Matrix products by cuBLAS that accumulate, or that write a part of a wider matrix: what candle's do not.
//!
//! Sums are in f32 whatever the types: a gradient in f32 takes products of bf16 without their rounding to bf16.

use super::slices::{Number, Operand, in_place};
use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::cuda_backend::cudarc::driver::{CudaView, CudaViewMut, DevicePtr, DevicePtrMut};
use candle_core::cuda_backend::{CudaDevice, gemm_reduced_precision_f32};
use candle_core::{DType, Result, Tensor};
use half::{bf16, f16};

/// A row-major matrix, read as it is or transposed.
pub struct Mat<'a, T> {
    /// Its values, end to end.
    pub data: &'a CudaView<'a, T>,
    /// Rows of the operand (columns of the stored matrix if `transposed`).
    pub rows: usize,
    /// Columns of the operand.
    pub cols: usize,
    /// Whether the stored matrix is [cols, rows].
    pub transposed: bool,
}

impl<T> Mat<'_, T> {
    /// Values from row to row of what is stored.
    fn stride(&self) -> usize {
        if self.transposed { self.rows } else { self.cols }
    }

    fn operation(&self) -> sys::cublasOperation_t {
        match self.transposed {
            true => sys::cublasOperation_t::CUBLAS_OP_T,
            false => sys::cublasOperation_t::CUBLAS_OP_N,
        }
    }
}

/// `c[:, columns] = alpha a b`, or `+=` with `add`: `c` is row-major with `stride` values a row, and begins at the
/// first of the columns that are written.
///
/// # Errors
/// Shapes that do not fit, sizes beyond 31 bits, what cuBLAS says.
pub fn gemm<A: Number, C: Number>(
    device: &CudaDevice,
    c: &mut CudaViewMut<'_, C>,
    stride: usize,
    add: bool,
    a: &Mat<'_, A>,
    b: &Mat<'_, A>,
    alpha: f32,
) -> Result<()> {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    if m == 0 || n == 0 {
        return Ok(());
    }
    let fits = k == b.rows
        && a.data.len() >= m * k
        && b.data.len() >= k * n
        && stride >= n
        && c.len() >= (m - 1) * stride + n;
    if !fits {
        candle_core::bail!("matmul: [{m}, {k}] x [{}, {n}] into rows of {stride}", b.rows);
    }
    let int =
        |n: usize| i32::try_from(n).map_err(|_| candle_core::Error::msg(format!("matmul: a size of {n}")));
    let compute = match A::DTYPE {
        DType::F32 if gemm_reduced_precision_f32() => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
    };
    let (alpha, beta) = (alpha, if add { 1f32 } else { 0f32 });
    let (m, n, k, ldc) = (int(m)?, int(n)?, int(k)?, int(stride)?);
    // what is stored by rows is, to cuBLAS, the transpose stored by columns: c^T = b^T a^T
    let (lda, ldb) = (int(a.stride().max(1))?, int(b.stride().max(1))?);
    let (blas, stream) = (device.cublas_handle(), device.cuda_stream());
    let (ap, _read_a) = a.data.device_ptr(&stream);
    let (bp, _read_b) = b.data.device_ptr(&stream);
    let (cp, _write_c) = c.device_ptr_mut(&stream);
    // SAFETY: the check above keeps what cuBLAS reads and writes inside of the three slices, whose types are those
    // that are named; `c` is borrowed mutably, so that it overlaps neither operand. Work is ordered by the stream.
    unsafe {
        result::gemm_ex(
            *blas.handle(),
            b.operation(),
            a.operation(),
            n,
            m,
            k,
            (&raw const alpha).cast(),
            bp as *const _,
            A::KIND,
            ldb,
            ap as *const _,
            A::KIND,
            lda,
            (&raw const beta).cast(),
            cp as *mut _,
            C::KIND,
            ldc,
            compute,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )
    }
    .map_err(|e| candle_core::Error::msg(format!("matmul: {e}")))
}

/// `c += alpha op(a) op(b)` in place, for `c` in f32 or in the operands' dtype; `false` if these are of other
/// dtypes, or not contiguous, and nothing was done.
///
/// # Errors
/// Shapes that do not fit, what cuBLAS says.
pub fn accumulate(c: &Tensor, a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<bool> {
    if !c.device().is_cuda() || a.dtype() != b.dtype() || ![a, b, c].into_iter().all(Tensor::is_contiguous) {
        return Ok(false);
    }
    match (a.dtype(), c.dtype()) {
        (DType::F32, DType::F32) => typed::<f32, f32>(c, a, ta, b, tb, alpha),
        (DType::BF16, DType::F32) => typed::<bf16, f32>(c, a, ta, b, tb, alpha),
        (DType::BF16, DType::BF16) => typed::<bf16, bf16>(c, a, ta, b, tb, alpha),
        (DType::F16, DType::F32) => typed::<f16, f32>(c, a, ta, b, tb, alpha),
        (DType::F16, DType::F16) => typed::<f16, f16>(c, a, ta, b, tb, alpha),
        _ => return Ok(false),
    }
    .map(|()| true)
}

fn typed<A: Number, C: Number>(
    c: &Tensor,
    a: &Tensor,
    ta: bool,
    b: &Tensor,
    tb: bool,
    alpha: f64,
) -> Result<()> {
    let (held_a, held_b) = (Operand::of(a)?, Operand::of(b)?);
    let (view_a, view_b) = (held_a.view::<A>()?, held_b.view::<A>()?);
    let mat = |data, t: &Tensor, transposed: bool| -> Result<_> {
        let (rows, cols) = t.dims2()?;
        let (rows, cols) = if transposed { (cols, rows) } else { (rows, cols) };
        Ok(Mat { data, rows, cols, transposed })
    };
    let (ma, mb) = (mat(&view_a, a, ta)?, mat(&view_b, b, tb)?);
    let (m, n) = c.dims2()?;
    if (m, n) != (ma.rows, mb.cols) {
        candle_core::bail!("matmul: {:?} += {:?} ({ta}) x {:?} ({tb})", c.shape(), a.shape(), b.shape());
    }
    let device = c.device().as_cuda_device()?;
    in_place::<C>("matmul", c, |dst| gemm(device, dst, n, true, &ma, &mb, alpha as f32))
}
