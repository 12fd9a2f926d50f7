//! Flat buffers: layout, shards, moments.

pub(super) mod allocate;
mod buffer;
pub mod layout;
pub mod moments;
mod piece;
pub mod projected;
mod shard;
mod split;

pub use buffer::{Buffer, LocalShard};
pub use piece::{Piece, aligned_of, cut_module, is_cut};
pub use shard::{ALIGN, Shard, common};
pub use split::{FlatKind, Split};
