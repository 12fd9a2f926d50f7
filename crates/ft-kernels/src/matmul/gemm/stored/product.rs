//! Products with a half-precision right operand.

use super::half::{Bits, Half};
use super::partition::Partition;
use super::transpose;
use crate::cpu::{each_on, in_place, is_native, vectorised, view};
use crate::is_half;
use crate::ledger::Ledger;
use crate::matmul::gemm::cpu::{Mat, raw};
use crate::matmul::gemm::operands::{mat, sizes, sizes_onto};
use crate::matmul::gemm::threads::{Shared, is_serial, threads};
use crate::tensor::{Ghost, Tensor, started};
use candle_core::{DType, Device, Result};
use std::ops::Range;

/// Whether this is a CPU product of f32 with a contiguous half-precision matrix.
pub fn takes(a: &Tensor, b: &Tensor) -> bool {
    is_native(a) && a.dtype() == DType::F32 && is_half(b) && b.is_contiguous()
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
        transpose::transpose(self.values, (own, self.k), block.clone(), to);
        Mat::new(&*to, block.len(), width, width)
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
    let partition = Partition::new((m, k, n), b.transposed, threads());
    let columns = Shared::new(dst.as_mut_ptr());
    let room = || vec![0f32; partition.panel()];
    each_on(threads(), 0..partition.strips, room, |panel, i| {
        let own = partition.strip(i);
        for from in (0..k).step_by(partition.depth()) {
            let block = from..(from + partition.depth()).min(k);
            let to = &mut panel[..block.len() * own.len()];
            let right = match partition.block {
                Some(_) => b.by_inner(own.clone(), block.clone(), to),
                None => b.as_stored(own.clone(), block.clone(), to),
            };
            let (add, left) = (add || from > 0, a.columns(block));
            // SAFETY: `dst` has m rows of n values and outlives the loop; the columns are in bounds, and belong
            // to this thread alone, since each strip index is drawn once.
            unsafe { raw(columns.at(own.start), n, add, left, right, alpha, ::gemm::Parallelism::None) };
        }
    });
}

/// Records the scratch memory of a product (ghosts only).
fn work(l: &Ledger, a: &Tensor, of: (usize, usize, usize), transposed: bool) {
    let _contiguous = l.hold(if a.is_contiguous() { 0 } else { 4 * (of.0 * of.1) as u64 });
    let threads = if is_serial() { 1 } else { l.machine().threads as usize };
    if of.0 * of.1 * of.2 > 0 {
        l.touch(Partition::new(of, transposed, threads).bytes(of.0, threads));
    }
    started(l);
}

/// [`super::matmul`] for products accepted by [takes]. The caller has recorded the FLOPs.
pub fn matmul(a: &Tensor, ta: bool, b: &Tensor, tb: bool) -> Result<Tensor> {
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
pub fn onto((c, add): (&Tensor, bool), a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<()> {
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
