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
    sum: Option<Tensor>,
    (rows, cols): (usize, usize),
    product: impl Fn(&mut [T], bool),
    during: impl FnOnce(&Ledger),
) -> Result<Tensor> {
    let dtype = a.dtype();
    match sum {
        Some(sum) if a.ghost().is_some() && sum.dtype() == T::DTYPE => {
            ghost_products::<T, 0>(&[a], [], during);
            Ok(sum)
        }
        sum if a.ghost().is_some() => {
            match (ghost_products::<T, 1>(&[a], [((rows, cols).into(), dtype)], during), sum) {
                (Some([own]), Some(sum)) => sum + own,
                (Some([own]), None) => Ok(own),
                (None, _) => candle_core::bail!("{name}: no ghost"),
            }
        }
        Some(sum) if sum.dtype() == T::DTYPE => {
            in_place::<T>(name, &sum, |dst| {
                product(dst, true);
                Ok(())
            })?;
            Ok(sum)
        }
        sum => {
            let mut out = vec![T::zero(); rows * cols];
            product(&mut out, false);
            let own = tensor(out, (rows, cols), dtype)?;
            match sum {
                None => Ok(own),
                Some(sum) => sum + own,
            }
        }
    }
}
