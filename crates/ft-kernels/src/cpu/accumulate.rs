//! Matrix products added to an existing tensor.

use super::cost::ghost_products;
use super::float::Float;
use super::in_place::in_place;
use super::view::tensor;
use crate::Tensor;
use crate::ledger::Ledger;
use candle_core::Result;

/// A matrix product `[rows, cols]` in `dtype`, plus `sum` if given; in place if `sum` has the arithmetic
/// dtype. `product(dst, add)` overwrites `dst`, or adds to it. If operand `a` is a ghost, `during` records
/// the allocations instead.
pub fn onto<T: Float>(
    name: &'static str,
    a: &Tensor,
    mut sum: Option<Tensor>,
    (rows, cols): (usize, usize),
    product: impl Fn(&mut [T], bool),
    during: impl FnOnce(&Ledger),
) -> Result<Tensor> {
    if let Some(sum) = sum.take_if(|sum| sum.dtype() == T::DTYPE) {
        if ghost_products::<T, 0>(&[a], [], during).is_none() {
            in_place::<T>(name, &sum, |dst| {
                product(dst, true);
                Ok(())
            })?;
        }
        return Ok(sum);
    }
    let own = match ghost_products::<T, 1>(&[a], [((rows, cols).into(), a.dtype())], during) {
        Some([own]) => own,
        None => {
            let mut out = vec![T::zero(); rows * cols];
            product(&mut out, false);
            tensor(out, (rows, cols), a.dtype())?
        }
    };
    match sum {
        None => Ok(own),
        Some(sum) => sum + own,
    }
}
