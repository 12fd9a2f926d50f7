//! What the plan decides and the engine obeys: how a step is walked, not what it computes.

use crate::model::head::Head;

/// How 4-bit weights are decoded for a layer that is computed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Decoded {
    /// In each product, a panel at a time.
    #[default]
    Panels,
    /// Once for the layer's forward and backward pass, whole.
    Visit,
}

impl Decoded {
    /// The word of `memory.dequantize`.
    pub fn word(self) -> &'static str {
        match self {
            Decoded::Panels => "per_matmul",
            Decoded::Visit => "per_layer",
        }
    }
}

/// The choices of a run.
///
/// Only `micro_rows` changes bits (sums over micro-batches have another order), and with a load-balancing loss,
/// which is a mean over micro-batches, what is computed: a run keeps it for its whole life. `head_rows` changes
/// none while the head is frozen, and is [`Head::chunk_rows`] where it trains; the others never do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choices {
    /// Rows of a micro-batch.
    pub micro_rows: usize,
    /// Layers that are computed again, from the lowest that is walked backward.
    pub recompute: usize,
    /// How their 4-bit weights are decoded.
    pub decoded: Decoded,
    /// Targets whose logits exist at once.
    pub head_rows: usize,
}

impl Choices {
    /// What needs no plan: keeps everything, decodes by panels, chunks of the usual size.
    pub fn plain(micro_rows: usize, vocab: usize, cuda: bool) -> Self {
        Self {
            micro_rows: micro_rows.max(1),
            recompute: 0,
            decoded: Decoded::Panels,
            head_rows: Head::chunk_rows(vocab, cuda),
        }
    }
}
