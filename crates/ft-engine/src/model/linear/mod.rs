//! Linear layer: frozen or trained in full, optionally with LoRA or DoRA. Transparent to model code.
//!
//! With `s = alpha / rank` (rsLoRA: `alpha / sqrt(rank)`), A `[r, i]`, B `[o, r]`:
//!
//! * LoRA (Hu et al., 2021): `y = x W^T + b + s drop(x) A^T B^T`;
//! * DoRA (Liu et al., 2024), m `[o]`: `y = b + g * (x W^T + s x A^T B^T)`, `g = m / |W + s B A|` by row.
//!   The norm is a constant in backward, as in PEFT. With dropout, PEFT scales only the values after
//!   dropout: `y = b + x W^T - drop(x) W^T + g * (drop(x) W^T + s drop(x) A^T B^T)`.
//!
//! Factors are applied to f32 sums. In half precision the dropout mask is 0 or 1, and `k = 1 / (1 - p)` is
//! applied together with `s` and `g`; in f32 the mask includes the factor, and k is 1.
//!
//! On CUDA, the products of the matrix and the adapter are fused into one if the kernels producing the
//! operands leave spare columns ([`Linear::fused_rank`], [`Linear::fused_rank_back`]); [`ft_kernels::padded`] has
//! the reasons. Not fused: DoRA, and backward with dropout, since the mask applies to the adapter's part of
//! the gradient only. The adapters of linears of one input are computed together: see [`Stack`].

mod backward;
mod forward;
mod rows;
mod stack;
mod weight;

pub use backward::DeferredGradients;
pub use forward::{Dora, Linear, Lora, Saved};
pub use rows::Rows;
pub use stack::Stack;
pub use weight::Weight;
