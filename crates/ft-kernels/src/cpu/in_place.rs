//! In-place operations on CPU tensors.

use super::float::Value;
use crate::Tensor;
use candle_core::{CpuStorage, InplaceOp1, Layout, Result};
use std::cell::RefCell;

type Change<'a> = dyn FnMut(&mut CpuStorage, &Layout) -> Result<()> + 'a;

/// One type for all closures, so that candle's code is compiled for it once.
struct Closure<'a> {
    name: &'static str,
    f: RefCell<&'a mut Change<'a>>,
}

impl InplaceOp1 for Closure<'_> {
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
    let mut on_storage = |s: &mut CpuStorage, l: &Layout| {
        let Some((start, end)) = l.contiguous_offsets() else {
            candle_core::bail!("{name}: the destination is not contiguous");
        };
        match T::storage_mut(s) {
            Some(v) => f(&mut v[start..end]),
            None => candle_core::bail!("{name}: the destination is not {:?}", T::DTYPE),
        }
    };
    t.real()?.inplace_op1(&Closure { name, f: RefCell::new(&mut on_storage) })
}
