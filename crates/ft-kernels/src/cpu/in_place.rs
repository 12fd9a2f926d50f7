//! In-place operations on CPU tensors.

use super::float::Value;
use crate::Tensor;
use candle_core::{CpuStorage, InplaceOp1, Layout, Result};
use std::cell::RefCell;

struct Closure<F> {
    name: &'static str,
    f: RefCell<F>,
}

impl<F: FnMut(&mut CpuStorage, &Layout) -> Result<()>> InplaceOp1 for Closure<F> {
    fn name(&self) -> &'static str {
        self.name
    }
    fn cpu_fwd(&self, s: &mut CpuStorage, l: &Layout) -> Result<()> {
        (self.f.borrow_mut())(s, l)
    }
}

/// Modifies the values of a contiguous CPU tensor or view in place.
///
/// # Errors
/// A tensor that is not contiguous or of another dtype; errors of `f`.
pub fn in_place<T: Value>(
    name: &'static str,
    t: &Tensor,
    mut f: impl FnMut(&mut [T]) -> Result<()>,
) -> Result<()> {
    let f = RefCell::new(|s: &mut CpuStorage, l: &Layout| {
        let Some((start, end)) = l.contiguous_offsets() else {
            candle_core::bail!("{name}: the destination is not contiguous");
        };
        match T::storage_mut(s) {
            Some(v) => f(&mut v[start..end]),
            None => candle_core::bail!("{name}: the destination is not {:?}", T::DTYPE),
        }
    });
    t.real()?.inplace_op1(&Closure { name, f })
}
