//! Execution settings chosen by the plan: how a step runs, not what it computes.

use crate::model::head::Head;
use crate::model::layer::Level;
use serde::{Deserialize, Serialize};

/// Dequantization of 4-bit weights in recomputed layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dequantize {
    /// Inside each matrix product, one tile at a time.
    #[default]
    PerMatmul,
    /// All weights of the layer, once for recomputation and backward pass.
    PerLayer,
}

impl Dequantize {
    /// Value of the recipe key `memory.dequantize`.
    pub fn word(self) -> &'static str {
        match self {
            Dequantize::PerMatmul => "per_matmul",
            Dequantize::PerLayer => "per_layer",
        }
    }
}

/// Recomputed layers, counted from the lowest layer of the backward pass, in order of descending [`Level`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Recomputed {
    /// Layers recomputed completely.
    pub all: usize,
    /// Next layers up, with a recomputed feed-forward module.
    pub feed_forward: usize,
    /// Next layers up, with recomputed norms.
    pub norms: usize,
}

impl Recomputed {
    /// The lowest `n` of `walked` layers at `level`, the layers above at `rest`.
    pub fn mixed((n, level): (usize, Level), rest: Level, walked: usize) -> Self {
        let mut of = Self::default();
        for (n, level) in [(n, level), (walked.saturating_sub(n), rest)] {
            match level {
                Level::Full => of.all += n,
                Level::FeedForward => of.feed_forward += n,
                Level::Norms => of.norms += n,
                Level::None => {}
            }
        }
        of
    }

    /// Number of layers with any recomputation.
    pub fn layers(self) -> usize {
        self.products().saturating_add(self.norms)
    }

    /// Number of layers with recomputed matrix products.
    pub fn products(self) -> usize {
        self.all.saturating_add(self.feed_forward)
    }

    /// Level of the `i`-th layer of the backward pass, counted from the lowest.
    pub fn level(self, i: usize) -> Level {
        match i {
            _ if i < self.all => Level::Full,
            _ if i < self.products() => Level::FeedForward,
            _ if i < self.layers() => Level::Norms,
            _ => Level::None,
        }
    }

    /// Describes the recomputation in words; `walked` is the number of layers in the backward pass.
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
    /// The lowest `all` layers, recomputed completely.
    fn from(all: usize) -> Self {
        Self { all, ..Self::default() }
    }
}

/// Location of the inputs of recomputed layers until the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inputs {
    /// On the host instead of the device.
    pub on_host: bool,
    /// Host memory is page-locked.
    pub pin: bool,
}

impl Inputs {
    /// Location as printed in reports.
    pub fn word(self) -> &'static str {
        if self.on_host { "host" } else { "device" }
    }
}

/// Execution of a run.
///
/// Only `micro_rows` changes results: it changes the order of sums and, with a load-balancing loss (a mean
/// over micro-batches), the loss itself. A run therefore never changes `micro_rows`. `head_rows` has no
/// effect on results with a frozen head; with a trained head it is always [`Head::chunk_rows`]. The other
/// fields never affect results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Execution {
    /// Rows of a micro-batch.
    pub micro_rows: usize,
    /// Recomputed layers.
    pub recompute: Recomputed,
    /// Location of the inputs of recomputed layers.
    pub inputs: Inputs,
    /// Dequantization of 4-bit weights in recomputed layers.
    pub dequantize: Dequantize,
    /// Targets per logit chunk.
    pub head_rows: usize,
}

impl Execution {
    /// Defaults without a plan: no recomputation, dequantization by tiles, default logit chunks.
    pub fn plain(micro_rows: usize, vocab: usize, cuda: bool) -> Self {
        Self {
            micro_rows: micro_rows.max(1),
            recompute: Recomputed::default(),
            inputs: Inputs::default(),
            dequantize: Dequantize::PerMatmul,
            head_rows: Head::chunk_rows(vocab, cuda),
        }
    }

    /// Describes recomputation and input location in words; `walked` is the number of layers in the backward
    /// pass.
    pub fn words(&self, walked: usize) -> String {
        let on_host = self.inputs.on_host && self.recompute.layers() > 0;
        self.recompute.words(walked) + if on_host { ", whose inputs wait on the host" } else { "" }
    }
}
