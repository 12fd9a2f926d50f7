//! bf16 products of tensors and ghosts.

use super::operands::{Make, Onto, Right};
use super::partition::packing;
use super::path::{Path, path};
use super::strips::{product_onto, rounded, wide};
use crate::Tensor;
use crate::cpu::{Halves, in_place, is_native};
use crate::ledger::{Ledger, Role};
use crate::matmul::gemm::cpu::Mat;
use crate::matmul::gemm::operands::{mat, sizes, sizes_onto};
use crate::matmul::gemm::threads::is_serial;
use crate::tensor::{Ghost, started};
use candle_core::{DType, Device, Result};
use half::bf16;

/// Whether the dot-product path applies: all operands are bf16 on a supporting CPU.
///
/// # Errors
/// The path requested in the environment is not supported by this CPU.
pub fn takes(operands: &[&Tensor]) -> Result<bool> {
    let here = operands.iter().all(|t| t.dtype() == DType::BF16 && is_native(t));
    Ok(here && path()? == Path::Dots)
}

/// Records the scratch memory of a product (ghosts only).
fn work(l: &Ledger, sizes: (usize, usize, usize), (transposed, made): (bool, bool), to_half: bool) {
    let threads = if is_serial() { 1 } else { l.machine().threads as usize };
    let bytes = packing(sizes, threads, (transposed, made), to_half);
    l.role(if made { Role::InFlight } else { Role::Workspace }, || l.touch(bytes));
    started(l);
}

/// `alpha op(a) op(b)`, as bf16 rounded once if `to_half`, else as f32 sums.
///
/// # Errors
/// Shapes don't match.
pub fn matmul(a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64, to_half: bool) -> Result<Tensor> {
    let (m, k, n) = sizes(a, ta, b, tb)?;
    let (a, b) = (a.contiguous()?, b.contiguous()?);
    if let Some(g) = a.ghost() {
        let y = Ghost::new(g.ledger(), (m, n), if to_half { DType::BF16 } else { DType::F32 });
        work(g.ledger(), (m, k, n), (ta, false), to_half);
        return Ok(y.into());
    }
    let (av, bv) = (Halves::of(&a)?, Halves::of(&b)?);
    let (am, bm, alpha) = (mat(&av, &a, ta)?, Right::Stored(mat(&bv, &b, tb)?), alpha as f32);
    if to_half {
        Tensor::from_vec(rounded(am, bm, alpha), (m, n), &Device::Cpu)
    } else {
        Tensor::from_vec(wide(am, bm, alpha), (m, n), &Device::Cpu)
    }
}

/// `c = alpha op(a) op(b)` or `c += ..`, in place. `c` is f32, or bf16 with a single rounding.
///
/// # Errors
/// Shapes don't match, or `c` is not contiguous or has another dtype.
pub fn onto((c, add): (&Tensor, bool), a: &Tensor, ta: bool, b: &Tensor, tb: bool, alpha: f64) -> Result<()> {
    let sizes = sizes_onto(c, a, ta, b, tb)?;
    let (a, b) = (a.contiguous()?, b.contiguous()?);
    if let Some(g) = c.ghost() {
        work(g.ledger(), sizes, (ta, false), c.dtype() == DType::BF16);
        return Ok(());
    }
    let (av, bv) = (Halves::of(&a)?, Halves::of(&b)?);
    let (am, bm) = (mat(&av, &a, ta)?, Right::Stored(mat(&bv, &b, tb)?));
    put((c, add), am, bm, alpha as f32)
}

fn put((c, add): (&Tensor, bool), a: Mat<'_, bf16>, b: Right<'_>, alpha: f32) -> Result<()> {
    let stride = c.dim(1)?;
    if c.dtype() == DType::BF16 {
        return in_place::<bf16>("matmul", c, |c| {
            product_onto(Onto::Half(c), stride, add, a, b, alpha);
            Ok(())
        });
    }
    in_place::<f32>("matmul", c, |c| {
        product_onto(Onto::Wide(c), stride, add, a, b, alpha);
        Ok(())
    })
}

/// `x B`, added to `sum` if given, for a generated B [k, n]; see [`Right::Generated`].
///
/// # Errors
/// The destination is not contiguous.
pub fn made(x: &Tensor, n: usize, transposed: bool, make: &Make<'_>, sum: Option<Tensor>) -> Result<Tensor> {
    let (m, k) = x.dims2()?;
    let x = x.contiguous()?;
    if let Some(g) = x.ghost() {
        let y = sum.unwrap_or_else(|| Ghost::new(g.ledger(), (m, n), DType::BF16).into());
        work(g.ledger(), (m, k, n), (false, true), true);
        return Ok(y);
    }
    let v = Halves::of(&x)?;
    let (a, b) = (mat(&v, &x, false)?, Right::Generated { make, columns: n, transposed });
    match sum {
        None => Tensor::from_vec(rounded(a, b, 1.0), (m, n), &Device::Cpu),
        Some(sum) => {
            put((&sum, true), a, b, 1.0)?;
            Ok(sum)
        }
    }
}
