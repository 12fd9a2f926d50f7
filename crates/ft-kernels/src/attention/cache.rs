//! The KV cache, allocated block by block: memory grows with the tokens, and stored blocks never move.

use crate::Tensor;
use crate::cpu::is_cpu;
use crate::cuda::launch::address_of;
use candle_core::{DType, Result};

/// Tokens per block; must match `BLOCK` in attention.cuh.
pub const BLOCK: usize = 512;

/// Keys and values of earlier tokens, for generation. Each token is written once. Attention reads the
/// blocks in place, on CUDA through a table of block addresses. A clone shares the memory, for reading.
#[derive(Clone, Debug)]
pub struct Cache {
    room: usize,
    len: usize,
    /// Keys and values, [tokens, g, c] per block of [`BLOCK`] tokens; the last block is shorter if `room`
    /// ends inside it.
    blocks: Vec<[Tensor; 2]>,
    /// Device addresses of the blocks, i64 [blocks, 2] (keys, values). `None` on the CPU.
    table: Option<Tensor>,
}

impl Cache {
    /// An empty cache for at most `room` tokens. Allocates nothing yet.
    pub fn new(room: usize) -> Self {
        Self { room, len: 0, blocks: Vec::new(), table: None }
    }

    /// Bytes per token and layer, if the keys of a token have `values` values.
    pub fn bytes_of_a_token(values: usize, dtype: DType) -> usize {
        2 * values * dtype.size_in_bytes()
    }

    /// Tokens allocated once `tokens` are stored: whole blocks, limited to `room`.
    pub fn held(tokens: u64, room: u64) -> u64 {
        tokens.next_multiple_of(BLOCK as u64).min(room)
    }

    /// Number of cached tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the cache holds no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Drops all but the first `n` tokens. Keeps the memory.
    pub fn truncate(&mut self, n: usize) {
        self.len = self.len.min(n);
    }

    /// Appends the keys and values [t, g, c] of `t` tokens.
    ///
    /// # Errors
    /// The tokens exceed the capacity, their shape or dtype differs from the cached ones, or the device
    /// fails.
    pub fn add(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        let (t, g, c) = k.dims3()?;
        let all = self.len + t;
        if all > self.room {
            candle_core::bail!("a cache for {} tokens: {} and {t} more", self.room, self.len);
        }
        let [k, v] = [k.contiguous()?, v.contiguous()?];
        let had = self.blocks.len();
        while self.blocks.len() * BLOCK < all {
            let tokens = BLOCK.min(self.room - self.blocks.len() * BLOCK);
            let make = || Tensor::zeros((tokens, g, c), k.dtype(), k.device());
            self.blocks.push([make()?, make()?]);
        }
        if self.blocks.len() > had && !is_cpu(&k) {
            let addresses = self.blocks.iter().flatten().map(|t| Ok(address_of(t)?.cast_signed()));
            let addresses = addresses.collect::<Result<Vec<i64>>>()?;
            self.table = Some(Tensor::from_vec(addresses, (self.blocks.len(), 2), k.device())?);
        }
        while self.len < all {
            let (at, done) = (self.len % BLOCK, t - (all - self.len));
            let n = (BLOCK - at).min(all - self.len);
            for (to, from) in self.blocks[self.len / BLOCK].iter().zip([&k, &v]) {
                to.slice_set(&from.narrow(0, done, n)?, 0, at)?;
            }
            self.len += n;
        }
        Ok(())
    }

    /// Blocks of [`BLOCK`] tokens, (keys, values). Slots past [`len`](Self::len) hold zeros or dropped
    /// tokens.
    pub(super) fn blocks(&self) -> &[[Tensor; 2]] {
        &self.blocks
    }

    /// Keys of the first block, for dtype and shape.
    pub(super) fn first(&self) -> Result<&Tensor> {
        match self.blocks.first() {
            Some([k, _]) => Ok(k),
            None => candle_core::bail!("attention: a cache without tokens"),
        }
    }

    /// Block addresses on the device.
    pub(super) fn table(&self) -> Result<&Tensor> {
        match &self.table {
            Some(t) => Ok(t),
            None => candle_core::bail!("attention: a cache that is not on this device"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{Causal, Sequences, forward, forward_cached};
    use crate::check::{close, randn};
    use candle_core::Device;

    /// Appending tokens in pieces of any size matches attention over the whole sequence; truncated tokens
    /// are overwritten, and tokens beyond the capacity are an error.
    #[test]
    fn attention_of_a_cache_is_that_of_the_whole() -> Result<()> {
        let n = 2 * BLOCK + 77;
        for (window, dtype, heads, far) in
            [(None, DType::F32, 4, 1e-5), (Some(300), DType::F32, 6, 1e-5), (Some(700), DType::BF16, 4, 1e-2)]
        {
            let [k, v] = [1, 2].map(|seed| randn(seed, (n, 2, 4), dtype));
            let (k, v, q) = (k?, v?, randn(3, (n, heads, 4), dtype)?);
            let of = |first: usize, keys: usize| Sequences::new(&[keys], first, &Device::Cpu);
            let seqs = of(0, n)?;
            let whole = forward(&q, &k, &v, &Causal { seqs: &seqs, window, scale: 0.5 }, 0)?.o.values()?;
            let mut cache = Cache::new(n);
            cache.add(&q.narrow(1, 0, 2)?, &v)?;
            cache.truncate(3);
            cache.truncate(0);
            let mut at = 0;
            for part in [5, 1, BLOCK, 1, 2, BLOCK, 68] {
                let now = |x: &Tensor| x.narrow(0, at, part);
                cache.add(&now(&k)?, &now(&v)?)?;
                let seqs = of(at, at + part)?;
                let how = Causal { seqs: &seqs, window, scale: 0.5 };
                let o = forward_cached(&now(&q)?.contiguous()?, &cache, &how, 0)?.o.values()?;
                close(&o, &whole.narrow(0, at, part)?, far);
                at += part;
            }
            assert_eq!((at, cache.len()), (n, n));
            assert!(cache.add(&k, &v).is_err());
        }
        Ok(())
    }

    /// Blocks are allocated on demand and never move.
    #[test]
    fn memory_is_taken_a_block_at_a_time() -> Result<()> {
        let tokens = |t| randn(1, (t, 1, 4), DType::F32);
        let mut cache = Cache::new(BLOCK + 3);
        assert!(cache.blocks().is_empty());
        cache.add(&tokens(BLOCK)?, &tokens(BLOCK)?)?;
        let first = cache.first()?.clone();
        assert_eq!(cache.blocks().len(), 1);
        cache.add(&tokens(1)?, &tokens(1)?)?;
        let sizes: Vec<usize> = cache.blocks().iter().map(|[k, _]| k.dims()[0]).collect();
        assert_eq!(sizes, [BLOCK, 3]);
        // still the same memory
        first.slice_set(&tokens(1)?, 0, 7)?;
        close(&cache.first()?.narrow(0, 7, 1)?, &tokens(1)?, 0.0);
        Ok(())
    }
}
