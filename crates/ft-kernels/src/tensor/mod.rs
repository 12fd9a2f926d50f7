//! The tensor type of models: a tensor with values or a ghost.
//!
//! A ghost has a shape, a dtype and an entry in a `Ledger`, but no values. Compositions of the operations
//! here run on ghosts unchanged, and the ledger records every allocation; kernels of our own record their
//! cost explicitly (see [`ghosts`]). A plan runs the same `forward` and `backward` code as training and
//! therefore cannot diverge from it.

pub mod bytes;
mod cost;
pub mod ghost;
mod layout;
pub mod ledger;
mod make;
pub mod resizable;
mod types;

pub use cost::{ghost_products, ghosts, ghosts_and, hold_copies, moves, started};
pub use ghost::Ghost;
pub use layout::row_stride;
pub use types::{On, Real, Tensor, all_of};
