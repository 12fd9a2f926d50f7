//! Memory for inference: `ft chat`, and the server of `serve.devices`.

mod memory;
mod server;

pub use memory::{InferenceMemory, InferenceModel};
pub use server::Server;
