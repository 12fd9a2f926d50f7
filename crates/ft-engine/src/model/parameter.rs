//! A vector without a matrix or a norm of its own, such as attention's sinks.

use super::pass::sink::Slot;
use ft_kernels::Tensor;

/// A vector `[n]` that a module uses as it is.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// Values, in the compute dtype.
    pub value: Tensor,
    /// Gradient slot, if trained.
    pub slot: Option<Slot>,
}
