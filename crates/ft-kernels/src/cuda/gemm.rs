//! cuBLAS products missing in candle: accumulating, or on slices of wider matrices.
//!
//! Products are added in f32 for all dtypes, so an f32 gradient accumulates bf16 products without rounding them to
//! bf16. If cuBLAS splits the inner dimension, it may add the parts in the dtype of the result, as in PyTorch by
//! default.

use super::launch::at;
use crate::tensor::row_stride;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::{DType, Result, Tensor};

/// A row-major matrix on the device, optionally transposed.
struct Mat {
    at: u64,
    kind: sys::cudaDataType_t,
    /// Dimensions of the operand, after transposition.
    rows: usize,
    cols: usize,
    /// Row stride of the stored matrix.
    stride: usize,
    transposed: bool,
}

impl Mat {
    fn of(t: &Tensor, transposed: bool) -> Result<Self> {
        let ((rows, cols), Some(stride)) = (t.dims2()?, row_stride(t.layout())) else {
            candle_core::bail!("matmul: a matrix whose rows are not contiguous: {:?}", t.layout());
        };
        let kind = match t.dtype() {
            DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
            DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
            DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
            other => candle_core::bail!("matmul: no product of {other:?} on CUDA"),
        };
        let (rows, cols) = if transposed { (cols, rows) } else { (rows, cols) };
        Ok(Self { at: at(t)?, kind, rows, cols, stride, transposed })
    }

    fn operation(&self) -> sys::cublasOperation_t {
        if self.transposed {
            sys::cublasOperation_t::CUBLAS_OP_T
        } else {
            sys::cublasOperation_t::CUBLAS_OP_N
        }
    }
}

/// Precision of f32 operands in a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// As they are.
    F32,
    /// Rounded to TF32, on tensor cores: to the 11 bits of f16, and more than those of bf16, with the range of f32.
    Tf32,
}

/// `c = alpha op(a) op(b)`, or `+=` with `add`, for matrices with contiguous rows. `c` is f32 or has the
/// dtype of both operands. If `c` overlaps an operand, the result is unspecified.
///
/// # Errors
/// Shapes don't match, sizes exceed 31 bits, devices differ, or cuBLAS fails.
pub fn gemm(
    (c, add): (&Tensor, bool),
    (a, ta): (&Tensor, bool),
    (b, tb): (&Tensor, bool),
    alpha: f64,
    precision: Precision,
) -> Result<()> {
    let (m, n) = c.dims2()?;
    let device = c.device().as_cuda_device()?;
    let of_device = [a, b].iter().all(|t| t.device().same_device(c.device()));
    if !of_device || a.dtype() != b.dtype() || (c.dtype() != a.dtype() && c.dtype() != DType::F32) {
        candle_core::bail!("matmul: {:?} and {:?} into {:?}", a.dtype(), b.dtype(), c.dtype());
    }
    if m == 0 || n == 0 {
        return Ok(());
    }
    let (of_a, of_b, of_c) = (Mat::of(a, ta)?, Mat::of(b, tb)?, Mat::of(c, false)?);
    let k = of_a.cols;
    if (of_a.rows, of_b.rows, of_b.cols) != (m, k, n) {
        candle_core::bail!("matmul: {:?} = {:?} ({ta}) x {:?} ({tb})", c.shape(), a.shape(), b.shape());
    }
    let int =
        |n: usize| i32::try_from(n).map_err(|_| candle_core::Error::msg(format!("matmul: a size of {n}")));
    let compute = match a.dtype() {
        DType::F32 if precision == Precision::Tf32 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
    };
    let (alpha, beta) = (alpha as f32, if add { 1f32 } else { 0f32 });
    let (m, n, k) = (int(m)?, int(n)?, int(k)?);
    // cuBLAS is column-major: a row-major matrix is the transpose, so compute c^T = b^T a^T
    let (lda, ldb, ldc) = (int(of_a.stride)?, int(of_b.stride)?, int(of_c.stride)?);
    // a handle of cuBLAS works in the current context
    device.cuda_stream().context().bind_to_thread().w()?;
    let blas = device.cublas_handle();
    // SAFETY: sizes, strides and types come from the layouts of live tensors and stay inside their
    // memory; memory is freed in order of the stream used by cuBLAS.
    unsafe {
        result::gemm_ex(
            *blas.handle(),
            of_b.operation(),
            of_a.operation(),
            n,
            m,
            k,
            (&raw const alpha).cast(),
            of_b.at as *const _,
            of_b.kind,
            ldb,
            of_a.at as *const _,
            of_a.kind,
            lda,
            (&raw const beta).cast(),
            of_c.at as *mut _,
            of_c.kind,
            ldc,
            compute,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )
    }
    .map_err(|e| candle_core::Error::msg(format!("matmul: {e}")))
}
