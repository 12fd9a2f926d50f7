//! Stubs of `strips` and `panels` for other architectures. `takes` rejects every product there.

use super::operands::{Onto, Right};
use crate::matmul::gemm::cpu::Mat;
use half::bf16;

const NOT_HERE: &str = "dot products that this processor does not have";

/// See [`super::rounded`].
pub fn rounded(_: Mat<'_, bf16>, _: Right<'_>, _: f32) -> Vec<bf16> {
    unreachable!("{NOT_HERE}")
}

/// See [`super::wide`].
pub fn wide(_: Mat<'_, bf16>, _: Right<'_>, _: f32) -> Vec<f32> {
    unreachable!("{NOT_HERE}")
}

/// See [`super::product_onto`].
pub fn product_onto(_: Onto<'_>, _: usize, _: bool, _: Mat<'_, bf16>, _: Right<'_>, _: f32) {
    unreachable!("{NOT_HERE}")
}
