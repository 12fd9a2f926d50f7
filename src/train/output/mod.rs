//! The result of a run on disk.

mod collect;
mod export;
mod folder;
mod logits;
mod read_back;
mod write;

pub use collect::give;
pub use export::of_checkpoint;
pub use logits::logits_apart;
pub use read_back::read_back;
pub use write::write;
