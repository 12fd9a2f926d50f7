//! Models and adapters on disk: families, 4-bit bases, checkpoints of other programs, GGUF.

mod adapters;
#[cfg(feature = "serve")]
mod families;
mod four_bit;
mod four_bit_verbs;
mod gguf;
mod nested;
