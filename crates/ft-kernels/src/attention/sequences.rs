//! Packed documents: boundaries, mask and shapes of attention.

use super::tiles::{self, BLOCK, Sizes, Tiles};
use crate::Tensor;
use crate::cuda::upload::{Lists, Place, Sent};
use crate::ledger::Cost;
use crate::padded::Padded;
use candle_core::{Device, Result};

/// Document boundaries: the attention mask in compact form.
#[derive(Clone, Debug, Default)]
pub struct Sequences {
    /// Document lengths, in order. They sum to the number of keys.
    pub docs: Vec<usize>,
    /// Key index of the first query: 0 in training, the number of cached tokens in decoding.
    pub first_query: usize,
    /// First token of the document of each key (CPU only).
    lo: Vec<u32>,
    /// Work lists of the CUDA kernels.
    pub(super) tiles: Option<Tiles>,
    sizes: Sizes,
}

impl Sequences {
    /// Documents of the given lengths, with queries from `first_query` on.
    pub fn new(docs: &[usize], first_query: usize, device: &Device) -> Result<Self> {
        let (mut lo, mut tiles) = (Vec::new(), None);
        if device.is_cpu() {
            lo.reserve_exact(docs.iter().sum());
            for &n in docs {
                let start = lo.len() as u32;
                lo.extend(std::iter::repeat_n(start, n));
            }
        } else {
            let mut lists = Lists::default();
            let places = Self::list(docs, first_query, &mut lists);
            tiles = Some(Tiles::sent(places, &lists.send(device)?)?);
        }
        Ok(Self { docs: docs.to_vec(), first_query, lo, tiles, sizes: Sizes::of_last(docs, first_query) })
    }

    /// Appends the work lists of the CUDA kernels to a pending upload.
    pub fn list(docs: &[usize], first_query: usize, to: &mut Lists) -> [Place; 3] {
        Tiles::list(docs, first_query, to)
    }

    /// Documents with work lists already uploaded by [`list`](Self::list).
    pub fn sent(docs: &[usize], first_query: usize, places: [Place; 3], sent: &Sent) -> Result<Self> {
        let tiles = Some(Tiles::sent(places, sent)?);
        Ok(Self { tiles, ..Self::planned(docs, first_query) })
    }

    /// A plan's sequences: sizes only.
    pub fn ghost(sizes: Sizes) -> Self {
        Self { sizes, ..Self::default() }
    }

    /// As [`Sequences::new`], for a plan.
    pub fn planned(docs: &[usize], first_query: usize) -> Self {
        Self { docs: docs.to_vec(), first_query, ..Self::ghost(Sizes::of_last(docs, first_query)) }
    }

    /// Device bytes, if all documents are as long as the longest.
    pub fn bytes(sizes: Sizes, cuda: bool) -> usize {
        if cuda { tiles::bytes(sizes) } else { 4 * sizes.keys }
    }

    /// Tiles of tokens on the device: first token, number of tokens, begin and end of the document.
    ///
    /// # Errors
    /// Sequences of the CPU.
    pub(crate) fn query_tiles(&self) -> Result<&Tensor> {
        self.tiles.as_ref().map(|t| &t.queries).ok_or_else(no_tiles)
    }

    /// Documents on the device, and their number.
    ///
    /// # Errors
    /// Sequences of the CPU.
    pub(crate) fn documents(&self) -> Result<(Option<&Tensor>, usize)> {
        let documents = self.tiles.as_ref().map(|t| &t.documents).ok_or_else(no_tiles)?;
        Ok((Some(documents), documents.dims()[0]))
    }

    /// Number of tiles, and of chunks of linear attention; in a plan, if all documents are as long as the longest.
    pub(crate) fn tiles(&self) -> usize {
        self.parts(tiles::ROWS)
    }

    pub(crate) fn chunks(&self) -> usize {
        self.parts(tiles::CHUNK)
    }

    fn parts(&self, tokens: usize) -> usize {
        if !self.docs.is_empty() {
            return self.docs.iter().map(|n| n.div_ceil(tokens)).sum();
        }
        self.count() * self.sizes.longest.div_ceil(tokens)
    }

    /// Number of documents; in a plan, if all are as long as the longest.
    pub(crate) fn count(&self) -> usize {
        if self.docs.is_empty() { self.keys().div_ceil(self.longest().max(1)) } else { self.docs.len() }
    }

    /// Checks that the documents have `tokens` tokens.
    ///
    /// # Errors
    /// Another number of tokens.
    pub(crate) fn cover(&self, tokens: usize) -> Result<()> {
        match self.keys() {
            n if n == tokens => Ok(()),
            n => candle_core::bail!("documents of {n} tokens for {tokens} rows"),
        }
    }

    /// Tokens of the longest document.
    pub fn longest(&self) -> usize {
        self.sizes.longest
    }

    /// Number of keys.
    pub fn keys(&self) -> usize {
        self.sizes.keys
    }
}

fn no_tiles() -> candle_core::Error {
    candle_core::Error::msg("documents without their lists on the device")
}

/// Attention mask and score scale.
#[derive(Clone, Copy, Debug)]
pub struct Causal<'a> {
    /// Packed documents.
    pub seqs: &'a Sequences,
    /// Sliding window in keys, including the query's own.
    pub window: Option<usize>,
    /// Factor on the scores.
    pub scale: f64,
}

impl Causal<'_> {
    /// Upper bound on the keys visible to a block of queries.
    pub(super) fn most_keys(&self) -> usize {
        self.window.map_or(self.seqs.sizes.reach, |w| self.seqs.sizes.reach.min(w + BLOCK))
    }

    /// Visible (query, key) pairs, counting the diagonal half: `n^2 / 2` for a document of `n` tokens.
    /// Assumes that all documents are as long as the longest, unless queries begin inside of one.
    pub(super) fn pairs(&self) -> f64 {
        if self.seqs.first_query > 0 {
            return self.later_pairs();
        }
        let n = self.seqs.sizes.longest as f64;
        let w = self.window.map_or(n, |w| n.min(w as f64));
        if n == 0.0 { 0.0 } else { self.seqs.sizes.keys as f64 * w * (1.0 - w / 2.0 / n) }
    }

    /// As [`Causal::pairs`], of the queries from `first_query` on.
    fn later_pairs(&self) -> f64 {
        let of_first = |n: usize| match self.window {
            Some(w) if n > w => (w * n) as f64 - (w * w) as f64 / 2.0,
            _ => (n * n) as f64 / 2.0,
        };
        let (mut start, mut pairs) = (0, 0.0);
        for n in &self.seqs.docs {
            pairs += of_first(*n) - of_first(self.seqs.first_query.saturating_sub(start).min(*n));
            start += n;
        }
        pairs
    }

    /// Records the FLOPs of `products` score-sized products in the ledger (ghosts only).
    pub(super) fn work(&self, q: &Tensor, products: f64) {
        if let Some(g) = q.ghost() {
            let flops = 2.0 * products * self.pairs() * (g.shape().elem_count() / g.dims()[0].max(1)) as f64;
            g.ledger().work(Cost { flops, attention: flops, ..Cost::default() });
        }
    }

    /// First key visible to the query at key index `i`.
    pub(super) fn first_key(&self, i: usize) -> usize {
        let lo = self.seqs.lo[i] as usize;
        self.window.map_or(lo, |w| lo.max((i + 1).saturating_sub(w)))
    }
}

/// Forward results saved for the backward pass.
#[derive(Clone, Debug)]
pub struct Saved {
    /// Output [t, h c].
    pub o: Padded,
    /// Log-sum-exp in f32 (f64 for f64): [t, h] on the CPU, [h, t] on CUDA.
    pub lse: Tensor,
}

/// Sizes of q, k and v: `t` queries, `h` query heads, `g` key/value heads, `c` channels.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub t: usize,
    pub h: usize,
    pub g: usize,
    pub c: usize,
}

impl Shape {
    pub(super) fn of(q: &Tensor, k: &Tensor, v: &Tensor, seqs: &Sequences) -> Result<Self> {
        let (t, h, c) = q.dims3()?;
        let (keys, g, kc) = k.dims3()?;
        if kc != c
            || k.dims() != v.dims()
            || g == 0
            || h % g != 0
            || keys != seqs.keys()
            || t + seqs.first_query != keys
        {
            candle_core::bail!(
                "attention: q {:?}, k {:?}, v {:?}, {} keys, first query {}",
                q.shape(),
                k.shape(),
                v.shape(),
                seqs.keys(),
                seqs.first_query
            );
        }
        Ok(Self { t, h, g, c })
    }
}
