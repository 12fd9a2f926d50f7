//! What the plan decides and the engine obeys: how a step is walked, not what it computes.

use crate::model::head::Head;
use crate::model::layer::Level;
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

/// Layers that are computed again, from the lowest that is walked backward: first those of the highest [`Level`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Recomputed {
    /// Layers that are computed again whole.
    pub all: usize,
    /// Layers above them of which the feed-forward block is.
    pub feed_forward: usize,
    /// Layers above those of which norms are.
    pub norms: usize,
}

impl Recomputed {
    /// So many layers at this level, and those above them at a lower one, of `walked`.
    pub fn mixed((n, level): (usize, Level), rest: Level, walked: usize) -> Self {
        let mut of = Self::default();
        for (n, level) in [(n, level), (walked.saturating_sub(n), rest)] {
            match level {
                Level::All => of.all += n,
                Level::FeedForward => of.feed_forward += n,
                Level::Norms => of.norms += n,
                Level::Nothing => {}
            }
        }
        of
    }

    /// Layers of which something is computed again.
    pub fn layers(self) -> usize {
        self.products().saturating_add(self.norms)
    }

    /// Layers of which products are computed again.
    pub fn products(self) -> usize {
        self.all.saturating_add(self.feed_forward)
    }

    /// What is computed again of the `i`th layer that is walked backward, from the lowest.
    pub fn level(self, i: usize) -> Level {
        match i {
            _ if i < self.all => Level::All,
            _ if i < self.products() => Level::FeedForward,
            _ if i < self.layers() => Level::Norms,
            _ => Level::Nothing,
        }
    }

    /// In words, of `walked` layers.
    pub fn words(self, walked: usize) -> String {
        let parts =
            [(self.all, ""), (self.feed_forward, "the feed-forward of "), (self.norms, "the norms of ")];
        let mut s = String::new();
        for (n, what) in parts.into_iter().filter(|(n, _)| *n > 0) {
            s += &if s.is_empty() {
                format!("{what}{n} of {walked} layers")
            } else {
                format!(", {what}{n} more")
            };
        }
        if s.is_empty() { format!("0 of {walked} layers") } else { s }
    }
}

impl From<usize> for Recomputed {
    /// So many layers, whole.
    fn from(all: usize) -> Self {
        Self { all, ..Self::default() }
    }
}

/// Where inputs of layers wait that are computed again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inputs {
    /// On the host.
    pub on_host: bool,
    /// In page-locked memory there.
    pub pin: bool,
}

impl Inputs {
    /// The word of it.
    pub fn word(self) -> &'static str {
        if self.on_host { "host" } else { "device" }
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
    /// Layers that are computed again.
    pub recompute: Recomputed,
    /// Where their inputs wait.
    pub inputs: Inputs,
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
            recompute: Recomputed::default(),
            inputs: Inputs::default(),
            dequantize: Dequantize::PerMatmul,
            head_rows: Head::chunk_rows(vocab, cuda),
        }
    }

    /// What is computed again of `walked` layers, and where their inputs wait meanwhile, in words.
    pub fn words(&self, walked: usize) -> String {
        let on_host = self.inputs.on_host && self.recompute.layers() > 0;
        self.recompute.words(walked) + if on_host { ", whose inputs wait on the host" } else { "" }
    }
}
