//! Products of f32 with a right operand kept in half precision, which is widened panel by panel in a
//! core's cache. Nothing is rounded, and sums run in the `gemm` crate's order for the matrix widened
//! whole: results are bit-identical to the latter, for any number of threads.
//!
//! ```text
//! columns          in strips, processed by threads dynamically
//! inner dimension  in the blocks of the crate's own summation, so each panel is one block
//! ```
//!
//! If the crate sums differently (a single row, or very few values), one panel spans the whole inner
//! dimension.

mod turn;

use super::cpu::{Columns, Mat, is_serial, raw, threads};
use super::{mat, sizes, sizes_onto};
use crate::cpu::{in_place, is_native, vectorised, view};
use crate::ledger::{Cost, Ledger};
use crate::packing::{inner_block, packing};
use crate::tensor::{Ghost, Tensor};
use crate::{cast, is_half};
use candle_core::{CpuStorage, DType, Device, Result, Storage, StorageRef};
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum columns per strip: with the crate's blocks, a panel takes a quarter of a megabyte.
const WIDEST: usize = 128;
/// Granularity of strips: the crate's vector length.
const LANES: usize = 16;
/// Up to this many result values, the crate uses dot products if the inner values of both operands are
/// contiguous.
const FEW: usize = 256;

/// Dtype of a frozen checkpoint matrix in a model computing in `compute`. On the CPU, half precision
/// stays as stored if `compute` is f32, and products widen it in cache. On CUDA it is widened at load
/// time, since cuBLAS has no mixed f32/half product.
pub fn kept(stored: DType, compute: DType, cuda: bool) -> DType {
    let stays = compute == DType::F32 && matches!(stored, DType::BF16 | DType::F16) && !cuda;
    if stays { stored } else { compute }
}

/// Whether this is a CPU product of f32 with a contiguous half-precision matrix.
pub(super) fn takes(a: &Tensor, b: &Tensor) -> bool {
    is_native(a) && a.dtype() == DType::F32 && is_half(b) && b.is_contiguous()
}

/// The raw bits of a contiguous half-precision matrix on the CPU.
pub(super) struct Bits<'a> {
    storage: StorageRef<'a>,
    at: Range<usize>,
}

impl<'a> Bits<'a> {
    pub(super) fn of(t: &'a Tensor) -> Result<Self> {
        let (storage, l) = t.real()?.storage_and_layout();
        match (&*storage, l.contiguous_offsets()) {
            (Storage::Cpu(CpuStorage::BF16(_) | CpuStorage::F16(_)), Some((start, end))) => {
                Ok(Self { storage, at: start..end })
            }
            _ => candle_core::bail!("half precision: a matrix that is not contiguous, or of another type"),
        }
    }

    pub(super) fn half(&self) -> Half<'_> {
        let (bits, how): (&[u16], How) = match &*self.storage {
            Storage::Cpu(CpuStorage::BF16(v)) => (v[self.at.clone()].reinterpret_cast(), How::Bf16),
            Storage::Cpu(CpuStorage::F16(v)) => (v[self.at.clone()].reinterpret_cast(), How::F16),
            _ => (&[], How::Bf16),
        };
        Half { bits, how }
    }
}

/// Interpretation of the bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Bf16,
    F16,
}

/// Half-precision values.
#[derive(Clone, Copy)]
pub(super) struct Half<'a> {
    bits: &'a [u16],
    how: How,
}

impl Half<'_> {
    /// Widens values from index `at` on, as many as fit in `to`.
    #[inline(always)]
    pub(super) fn widen(&self, at: usize, to: &mut [f32]) {
        let bits = &self.bits[at..at + to.len()];
        match self.how {
            How::Bf16 => {
                to.iter_mut().zip(bits).for_each(|(t, b)| *t = cast::wide(bf16::from_bits(*b)));
            }
            How::F16 => bits.reinterpret_cast::<f16>().convert_to_f32_slice(to),
        }
    }
}

/// The right operand [k, n] of a product, stored as such or as [n, k] if `transposed`.
#[derive(Clone, Copy)]
struct Right<'a> {
    values: Half<'a>,
    k: usize,
    n: usize,
    transposed: bool,
}

impl Right<'_> {
    /// Widens a panel (columns `own`, inner range `block`) in stored order.
    fn as_stored<'t>(&self, own: Range<usize>, block: Range<usize>, to: &'t mut [f32]) -> Mat<'t, f32> {
        let (lines, inner) = if self.transposed { (own, block) } else { (block, own) };
        let (stride, len) = (if self.transposed { self.k } else { self.n }, inner.len());
        vectorised(|| {
            for (line, to) in lines.clone().zip(to.chunks_mut(len.max(1))) {
                self.values.widen(line * stride + inner.start, to);
            }
        });
        let m = Mat::new(&*to, lines.len(), len, len);
        if self.transposed { m.t() } else { m }
    }

    /// Like [`Right::as_stored`], but with the columns of each inner value contiguous, as the crate's
    /// kernels read them.
    fn by_inner<'t>(&self, own: Range<usize>, block: Range<usize>, to: &'t mut [f32]) -> Mat<'t, f32> {
        if !self.transposed {
            return self.as_stored(own, block, to);
        }
        let width = own.len();
        turn::turn(self.values, (own, self.k), block.clone(), to);
        Mat::new(&*to, block.len(), width, width)
    }
}

/// Partition of a product among threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    k: usize,
    n: usize,
    /// Number of strips.
    strips: usize,
    /// Columns per strip, except the last; balanced if a panel spans the inner dimension.
    width: usize,
    /// Inner values per panel; `None` if one panel in stored order spans the inner dimension.
    block: Option<usize>,
}

impl Cut {
    fn new((m, k, n): (usize, usize, usize), transposed: bool, threads: usize) -> Self {
        // the crate treats a single row separately from very few values, so strips of a single row must
        // exceed `FEW` values
        let by_dots = transposed && (m == 1 || m * n <= FEW);
        if by_dots || n == 1 || k <= 2 {
            let strips = if m == 1 && transposed { (n / (2 * FEW)).max(1) } else { 1 };
            return Self { k, n, strips, width: n.div_ceil(strips), block: None };
        }
        let width = WIDEST.min(n / (3 * threads) / LANES * LANES).max(2 * LANES);
        // a small remainder joins the last strip: the crate sums single columns differently
        let strips = (n / width + usize::from(n % width >= LANES)).max(1);
        Self { k, n, strips, width, block: Some(inner_block((m, k, n))) }
    }

    fn strip(&self, i: usize) -> Range<usize> {
        let at = |i: usize| match self.block {
            Some(_) if i < self.strips => i * self.width,
            Some(_) => self.n,
            None => self.n * i / self.strips,
        };
        at(i)..at(i + 1)
    }

    fn depth(&self) -> usize {
        self.block.unwrap_or(self.k)
    }

    /// Maximum values per panel.
    fn panel(&self) -> usize {
        self.depth() * self.widest()
    }

    fn widest(&self) -> usize {
        match self.block {
            Some(_) => self.strip(self.strips - 1).len().max(self.width).min(self.n),
            None => self.width,
        }
    }

    fn workers(&self, threads: usize) -> usize {
        threads.min(self.strips).max(1)
    }

    /// Scratch bytes of a product with `m` rows.
    fn bytes(&self, m: usize, threads: usize) -> u64 {
        let of = (m, self.depth(), self.widest());
        let transposed = self.block.is_none();
        self.workers(threads) as u64 * (4 * self.panel() as u64 + packing(of, false, transposed))
    }
}

/// `dst = alpha a b`, or `dst += alpha a b` with `add`.
fn product(dst: &mut [f32], add: bool, a: Mat<'_, f32>, b: Right<'_>, alpha: f32) {
    let Right { k, n, .. } = b;
    let m = a.rows;
    assert!(a.cols == k && dst.len() >= m * n && b.values.bits.len() >= k * n, "sizes of a product");
    if m == 0 || n == 0 || k == 0 {
        if !add {
            dst[..m * n].fill(0.0);
        }
        return;
    }
    let cut = Cut::new((m, k, n), b.transposed, threads());
    let columns = Columns(dst.as_mut_ptr());
    let next = AtomicUsize::new(0);
    let work = || {
        let mut panel = vec![0f32; cut.panel()];
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= cut.strips {
                return;
            }
            let own = cut.strip(i);
            for from in (0..k).step_by(cut.depth()) {
                let block = from..(from + cut.depth()).min(k);
                let to = &mut panel[..block.len() * own.len()];
                let right = match cut.block {
                    Some(_) => b.by_inner(own.clone(), block.clone(), to),
                    None => b.as_stored(own.clone(), block.clone(), to),
                };
                let (add, left) = (add || from > 0, a.columns(block));
                // SAFETY: `dst` has m rows of n values and outlives the loop; the columns are in bounds,
                // and belong to this thread alone, since each strip index is drawn once.
                unsafe {
                    let to = columns.from(own.start);
                    raw(to, n, add, left, right, alpha, ::gemm::Parallelism::None);
                }
            }
        }
    };
    match cut.workers(threads()) {
        1 => work(),
        n => (0..n).into_par_iter().with_max_len(1).for_each(|_| work()),
    }
}

/// Records the scratch memory of a product (ghosts only).
fn work(l: &Ledger, a: &Tensor, of: (usize, usize, usize), transposed: bool) {
    let _contiguous = l.hold(if a.is_contiguous() { 0 } else { 4 * (of.0 * of.1) as u64 });
    let threads = if is_serial() { 1 } else { l.machine().threads as usize };
    let bytes =
        if of.0 * of.1 * of.2 == 0 { 0 } else { Cut::new(of, transposed, threads).bytes(of.0, threads) };
    l.touch(bytes);
    l.work(Cost { started: 1.0, ..Cost::default() });
}

/// [`super::matmul`] for products accepted by [takes]. The caller has recorded the FLOPs.
pub(super) fn matmul(a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> Result<Tensor> {
    let (m, k, n) = sizes(a, ta, b, tb)?;
    if let Some(g) = a.ghost() {
        let y = Ghost::new(g.ledger(), (m, n), DType::F32);
        work(g.ledger(), a, (m, k, n), tb);
        return Ok(y.into());
    }
    let mut out = vec![0f32; m * n];
    put(&mut out, false, (a, ta), (b, tb), (k, n), 1.0)?;
    Tensor::from_vec(out, (m, n), &Device::Cpu)
}

/// [`super::matmul_onto`] into f32, for products accepted by [takes]. The caller has recorded the FLOPs.
pub(super) fn onto(
    (c, add): (&Tensor, bool),
    a: &Tensor,
    ta: bool,
    b: &Tensor,
    tb: bool,
    alpha: f64,
) -> Result<()> {
    let (m, k, n) = sizes_onto(c, a, ta, b, tb)?;
    if let Some(g) = a.ghost() {
        work(g.ledger(), a, (m, k, n), tb);
        return Ok(());
    }
    in_place::<f32>("matmul", c, |dst| put(dst, add, (a, ta), (b, tb), (k, n), alpha as f32))
}

fn put(
    dst: &mut [f32],
    add: bool,
    (a, ta): (&Tensor, bool),
    (b, transposed): (&Tensor, bool),
    (k, n): (usize, usize),
    alpha: f32,
) -> Result<()> {
    let (av, bits) = (view::<f32>(a)?, Bits::of(b)?);
    product(dst, add, mat(&av, a, ta)?, Right { values: bits.half(), k, n, transposed }, alpha);
    Ok(())
}

#[cfg(test)]
mod tests;
