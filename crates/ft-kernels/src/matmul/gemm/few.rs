//! Products `a b^T` for a few rows of `a`, as in decoding, on CPUs without bf16 dot-product instructions.
//! Reads `b` once in its stored dtype, without packing. Half-precision `b` gives the same bits as its
//! values in f32.

use super::operands::sizes;
use super::stored::{Bits, Half};
use super::threads::threads;
use crate::cpu::{self, dot, ghost_products, is_native, sum, tensor, vectorised, view};
use crate::is_half;
use crate::tensor::Tensor;
use candle_core::{DType, Result};

/// Maximum number of rows. Beyond this, dot products re-read the widened values more often than a panel
/// kernel would.
const ROWS: usize = 4;
/// Values of a row of `b` widened at a time.
const BLOCK: usize = 512;
/// Columns of the result per task.
const COLUMNS: usize = 32;

/// Whether the product is `a b^T` on the CPU with at most [`ROWS`] rows and an f32 or half-precision `b`.
pub(super) fn takes(a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> bool {
    !ta && tb
        && is_native(a)
        && a.dims().first().is_some_and(|rows| *rows <= ROWS)
        && (is_half(b) || b.dtype() == DType::F32)
        && b.is_contiguous()
        && (a.dtype() == DType::F32 || a.dtype() == b.dtype())
}

/// Values of a row-major matrix.
#[derive(Clone, Copy)]
enum Lines<'a> {
    Half(Half<'a>),
    Wide(&'a [f32]),
}

impl Lines<'_> {
    /// Values from index `at` on, enough to fill `room`. Half-precision values are widened into `room`.
    #[inline(always)]
    fn read<'b>(&'b self, at: usize, room: &'b mut [f32]) -> &'b [f32] {
        match self {
            Self::Half(v) => {
                v.widen(at, room);
                room
            }
            Self::Wide(v) => &v[at..at + room.len()],
        }
    }
}

/// `alpha a b^T` in `dtype`, for products accepted by [takes]. The caller has recorded the FLOPs.
pub(super) fn matmul(a: &Tensor, b: &Tensor, alpha: f64, dtype: DType) -> Result<Tensor> {
    let (m, k, n) = sizes(a, false, b, true)?;
    if let Some([y]) =
        ghost_products::<f32, 1>(&[a], [((m, n).into(), dtype)], |l| l.touch(4 * (m * n) as u64))
    {
        return Ok(y);
    }
    let (half, wide);
    let x = view::<f32>(a)?;
    let lines = if is_half(b) {
        half = Bits::of(b)?;
        Lines::Half(half.half())
    } else {
        wide = view::<f32>(b)?;
        Lines::Wide(&wide)
    };
    // transposed [n, m], so the sums of a task are contiguous
    let mut sums = vec![0f32; n * m];
    let task = |(i, sums): (usize, &mut [f32])| {
        vectorised(|| columns(&x, lines, k, i * COLUMNS, sums.chunks_mut(m.max(1))));
    };
    let width = (COLUMNS * m).max(1);
    if threads() == 1 {
        sums.chunks_mut(width).enumerate().for_each(task);
    } else {
        cpu::each(sums.chunks_mut(width).enumerate(), task);
    }
    let alpha = alpha as f32;
    let by_row = (0..m).flat_map(|row| sums.iter().skip(row).step_by(m.max(1)));
    tensor(by_row.map(|x| x * alpha).collect(), (m, n), dtype)
}

/// Computes all rows of `x` times the columns from `first` on.
#[inline(always)]
fn columns<'s>(
    x: &[f32],
    lines: Lines<'_>,
    k: usize,
    first: usize,
    sums: impl Iterator<Item = &'s mut [f32]>,
) {
    let mut wide = [0f32; BLOCK];
    for (column, sums) in (first..).zip(sums) {
        for at in (0..k).step_by(BLOCK) {
            let wide = lines.read(column * k + at, &mut wide[..BLOCK.min(k - at)]);
            for (row, to) in sums.iter_mut().enumerate() {
                *to += long_dot(&x[row * k + at..][..wide.len()], wide);
            }
        }
    }
}

/// Like [`dot`], with enough lanes to hide the latency of dependent additions.
#[inline(always)]
fn long_dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 64;
    let mut lanes = [0f32; LANES];
    let (ac, bc) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail = dot(ac.remainder(), bc.remainder());
    for (x, y) in ac.zip(bc) {
        for i in 0..LANES {
            lanes[i] += x[i] * y[i];
        }
    }
    sum(&lanes) + tail
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, randn};
    use crate::gemm::{matmul, matmul_scaled, matmul_wide, serial};

    #[test]
    fn few_rows_are_those_of_the_widened_matrix() -> Result<()> {
        let wide = |t: &Tensor| t.to_dtype(DType::F64);
        for (m, k, n) in
            [(1, 1, 1), (1, BLOCK, COLUMNS), (2, BLOCK + 1, 70), (ROWS, 3 * BLOCK - 7, 33), (0, 5, 3)]
        {
            for (of_x, of_w) in
                [(DType::BF16, DType::BF16), (DType::F32, DType::BF16), (DType::F32, DType::F16)]
            {
                let x = randn(1, (m, k), DType::F32)?.to_dtype(of_x)?;
                let w = randn(2, (n, k), DType::F32)?.to_dtype(of_w)?;
                assert!(takes(&x, false, &w, true));
                let want = matmul(&wide(&x)?, false, &wide(&w)?, true)?;
                let far = 1e-5 * (k as f64).sqrt();
                close(&wide(&matmul_wide(&x, false, &w, true)?)?, &want, far);
                close(
                    &wide(&matmul_scaled(&x, false, &w, true, 0.5)?)?,
                    &(&want * 0.5)?,
                    if of_x == DType::F32 { far } else { 0.3 },
                );
                let y = matmul(&x, false, &w, true)?;
                assert_eq!(y.dtype(), of_x);
                let alone = serial(|| matmul(&x, false, &w, true))?;
                close(&wide(&alone)?, &wide(&y)?, 0.0);
            }
        }
        Ok(())
    }
}
