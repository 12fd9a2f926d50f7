//! Operations with forward and backward passes, one concept per file.
//!
//! Each has two implementations behind one function: a kernel of our own (on CPU slices, generic over f32 and
//! f64: see [`cpu`]; for some on CUDA) and a composition of candle operations, used on CUDA without such a
//! kernel. Tests compare CPU kernels with finite differences in f64, and compositions with CPU kernels.
//!
//! Axes in names: `t` tokens, `d` model width, `h` heads, `o`/`i` out and in features, `v` vocabulary, `e`
//! experts, `k` experts per token, `n` rows sorted by expert.
//!
//! Models use tensors only through these operations ([`tensor`]), which also run on ghosts: shape-only
//! tensors with memory and arithmetic recorded by a [`ledger`]. Compositions support ghosts without further
//! code; kernels record their cost explicitly (see [`cpu::ghosts`]).
//!
//! All `unsafe` code of the workspace is in this crate, apart from ft-base's allocator with its pool of pages
//! (`memory`) and its call of glibc for lookups of host and user names (`names.rs`).

#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, clippy::too_many_lines, reason = "tests write files, and list cases")
)]

mod adapters;
mod arithmetic;
pub mod attention;
pub mod cpu;
pub mod cuda;
pub mod delta;
mod experts;
mod layers;
mod matmul;
pub mod optimizer;
pub mod quantized;
pub mod tensor;
mod transfer;

#[doc(hidden)]
pub mod check;

pub use adapters::{dora, dropout, factors};
pub use arithmetic::{is_half, scaled, to_host, upcast};
pub use experts::{dispatch, grouped, route, spread};
pub use layers::{bias, embed, gate, loss, noise, norm, rope, swiglu};
pub use matmul::{decompose, fp8, gemm, padded};
pub use quantized::dequantized;
pub use tensor::ledger::{Ledger, Machine, Role};
pub use tensor::{Real, Tensor, bytes, ledger, resizable};
pub use transfer::{crossing, moment, sum};
