//! What the plan decides and the engine obeys: how a step is walked, not what it computes.

use crate::model::head::Head;
use serde::{Deserialize, Serialize};

/// How 4-bit weights are dequantized for a layer that is computed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dequantize {
    /// In each product, a tile at a time.
    #[default]
    PerMatmul,
    /// Once for the layer's forward and backward pass, whole.
    PerLayer,
}

impl Dequantize {
    /// The word of `memory.dequantize`.
    pub fn word(self) -> &'static str {
        match self {
            Dequantize::PerMatmul => "per_matmul",
            Dequantize::PerLayer => "per_layer",
        }
    }
}

/// The execution of a run.
///
/// Only `micro_rows` changes bits (sums over micro-batches have another order), and with a load-balancing loss,
/// which is a mean over micro-batches, what is computed: a run keeps it for its whole life. `head_rows` changes
/// none while the head is frozen, and is [`Head::chunk_rows`] where it trains; the others never do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Execution {
    /// Rows of a micro-batch.
    pub micro_rows: usize,
    /// Layers that are computed again, from the lowest that is walked backward.
    pub recompute: usize,
    /// How their 4-bit weights are dequantized.
    pub dequantize: Dequantize,
    /// Targets whose logits exist at once.
    pub head_rows: usize,
}

impl Execution {
    /// What needs no plan: keeps everything, dequantizes by tiles, chunks of the usual size.
    pub fn plain(micro_rows: usize, vocab: usize, cuda: bool) -> Self {
        Self {
            micro_rows: micro_rows.max(1),
            recompute: 0,
            dequantize: Dequantize::PerMatmul,
            head_rows: Head::chunk_rows(vocab, cuda),
        }
    }
}
