//! The binary from outside.

mod plan;
