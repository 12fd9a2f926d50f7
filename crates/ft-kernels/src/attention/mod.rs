//! Causal attention over packed documents, with grouped-query heads and sliding windows.
//!
//! Micro-batches have no padding: documents are concatenated, and token `i` attends from the first token
//! of its document up to itself.
//!
//! The forward pass saves the log-sum-exp of each query. The backward pass recomputes the probabilities
//! from it block by block, so memory is linear in tokens (Dao et al., "FlashAttention", 2022).
//!
//! Axes: `t` tokens (queries), `h` query heads, `g` key/value heads, `c` channels per head.

mod cache;
mod cpu;
mod cuda;
mod dots;
mod split;
mod tiles;

pub use self::cache::Cache;
pub use self::cpu::BLOCK;
#[cfg(test)]
pub use self::cuda::shared_memory;
use self::tiles::Tiles;
use super::cpu::{is_cpu, on_real};
use super::gemm::pairs;
use super::ledger::Cost;
use crate::Tensor;
use crate::cuda::upload::{Lists, Place, Sent};
use crate::padded::Padded;
use candle_core::{Device, Result};

/// Document boundaries: the attention mask in compact form.
#[derive(Clone, Debug)]
pub struct Sequences {
    /// Document lengths, in order. They sum to the number of keys.
    pub docs: Vec<usize>,
    /// Key index of the first query: 0 in training, the number of cached tokens in decoding.
    pub first_query: usize,
    /// First token of the document of each key (CPU only).
    lo: Vec<u32>,
    /// Work lists of the CUDA kernels.
    tiles: Option<Tiles>,
    sizes: Sizes,
}

/// Size of the attention problem, all a plan needs to know about documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Total tokens.
    pub keys: usize,
    /// Tokens of the longest document.
    pub longest: usize,
    /// Largest number of keys from the first key visible to a block of [`BLOCK`] queries up to the last.
    pub reach: usize,
}

impl Sizes {
    /// Sizes for concatenated documents of the given lengths.
    pub fn of(docs: &[usize]) -> Self {
        let (keys, longest) = (docs.iter().sum(), docs.iter().copied().max().unwrap_or(0));
        let (mut reach, mut start, mut rest) = (0, 0, docs.iter().peekable());
        for from in (0..keys).step_by(BLOCK) {
            while rest.peek().is_some_and(|n| start + **n <= from) {
                start += rest.next().copied().unwrap_or(0);
            }
            reach = reach.max((from + BLOCK).min(keys) - start);
        }
        Self { keys, longest, reach }
    }
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
        Ok(Self { docs: docs.to_vec(), first_query, lo, tiles, sizes: Sizes::of(docs) })
    }

    /// Appends the work lists of the CUDA kernels to a pending upload.
    pub fn list(docs: &[usize], first_query: usize, to: &mut Lists) -> [Place; 2] {
        Tiles::list(docs, first_query, to)
    }

    /// Documents with work lists already uploaded by [`list`](Self::list).
    pub fn sent(docs: &[usize], first_query: usize, places: [Place; 2], sent: &Sent) -> Result<Self> {
        let tiles = Some(Tiles::sent(places, sent)?);
        Ok(Self { docs: docs.to_vec(), first_query, lo: Vec::new(), tiles, sizes: Sizes::of(docs) })
    }

    /// A plan's sequences: sizes only.
    pub fn ghost(sizes: Sizes) -> Self {
        Self { docs: Vec::new(), first_query: 0, lo: Vec::new(), tiles: None, sizes }
    }

    /// Device bytes, if all documents are as long as the longest.
    pub fn bytes(sizes: Sizes, cuda: bool) -> usize {
        if cuda { tiles::bytes(sizes) } else { 4 * sizes.keys }
    }

    /// Number of keys.
    pub fn keys(&self) -> usize {
        self.sizes.keys
    }
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
    fn most_keys(&self) -> usize {
        self.window.map_or(self.seqs.sizes.reach, |w| self.seqs.sizes.reach.min(w + BLOCK))
    }

    /// Visible (query, key) pairs, counting the diagonal half: `n^2 / 2` for a document of `n` tokens.
    /// Assumes that all documents are as long as the longest.
    fn pairs(&self) -> f64 {
        let n = self.seqs.sizes.longest as f64;
        let w = self.window.map_or(n, |w| n.min(w as f64));
        if n == 0.0 { 0.0 } else { self.seqs.sizes.keys as f64 * w * (1.0 - w / 2.0 / n) }
    }

    /// Records the FLOPs of `products` score-sized products in the ledger (ghosts only).
    fn work(&self, q: &Tensor, products: f64) {
        if let Some(g) = q.ghost() {
            let flops =
                2.0 * products * self.pairs() * (g.shape().elem_count() / self.seqs.keys().max(1)) as f64;
            g.ledger().work(Cost { flops, attention: flops, ..Cost::default() });
        }
    }

    /// First key visible to the query at key index `i`.
    fn first_key(&self, i: usize) -> usize {
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

/// Computes attention.
///
/// # Shapes
/// `q` [t, h, c]; `k`, `v` [keys, g, c] with h a multiple of g. The output is [t, h c]; on CUDA, rows are
/// padded for `rank` (LoRA) extra columns.
pub fn forward(q: &Tensor, k: &Tensor, v: &Tensor, how: &Causal<'_>, rank: usize) -> Result<Saved> {
    Shape::of(q, k, v, how.seqs)?;
    how.work(q, 2.0);
    if is_cpu(q) && pairs::takes(&[q, k, v])? {
        dots::forward(q, k, v, how)
    } else if is_cpu(q) {
        on_real!(q.dtype(), cpu::forward(q, k, v, how))
    } else {
        cuda::forward(q, k, v, how, rank)
    }
}

/// Computes attention of the last `t` tokens over a cache already holding their keys and values.
///
/// # Shapes
/// `q` [t, h, c]; cached keys [keys, g, c]; output as in [`forward`].
pub fn forward_cached(q: &Tensor, cache: &Cache, how: &Causal<'_>, rank: usize) -> Result<Saved> {
    let (first, (t, h, c)) = (cache.first()?, q.dims3()?);
    let (_, g, kc) = first.dims3()?;
    let keys = cache.len();
    if kc != c || g == 0 || h % g != 0 || keys != how.seqs.keys() || t + how.seqs.first_query != keys {
        candle_core::bail!("attention: q {:?}, {keys} keys of {:?} in a cache", q.shape(), first.shape());
    }
    let shape = Shape { t, h, g, c };
    if is_cpu(q) {
        on_real!(q.dtype(), cpu::forward_cached(q, cache, shape, how))
    } else {
        cuda::forward_cached(q, cache, shape, how, rank)
    }
}

/// Gradients of q, k and v, given the output gradient `d_o` [t, h, c]. The gradient of v is [keys, g c];
/// on CUDA, rows are padded for `rank` (LoRA) extra columns.
pub fn backward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    saved: &Saved,
    d_o: &Tensor,
    how: &Causal<'_>,
    rank: usize,
) -> Result<(Tensor, Tensor, Padded)> {
    Shape::of(q, k, v, how.seqs)?;
    how.work(q, 5.0);
    if !is_cpu(q) {
        return cuda::backward(q, k, v, saved, d_o, how, rank);
    }
    let o = saved.o.values()?.reshape(q.shape())?;
    let (dq, dk, dv) = match pairs::takes(&[q, k, v, &o, d_o])? {
        true => dots::backward(q, k, v, (&o, &saved.lse), d_o, how)?,
        false => on_real!(q.dtype(), cpu::backward(q, k, v, (&o, &saved.lse), d_o, how))?,
    };
    let (keys, g, c) = dv.dims3()?;
    Ok((dq, dk, Padded::of(&dv.reshape((keys, g * c))?)?))
}

#[derive(Clone, Copy)]
struct Shape {
    t: usize,
    h: usize,
    g: usize,
    c: usize,
}

impl Shape {
    fn of(q: &Tensor, k: &Tensor, v: &Tensor, seqs: &Sequences) -> Result<Self> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, gradient, randn, values};
    use candle_core::DType;

    struct Case {
        docs: &'static [usize],
        h: usize,
        g: usize,
        c: usize,
        window: Option<usize>,
    }

    impl Case {
        fn how<'a>(&self, seqs: &'a Sequences, scale: f64) -> Causal<'a> {
            Causal { seqs, window: self.window, scale }
        }
    }

    const CASES: &[Case] = &[
        Case { docs: &[5], h: 2, g: 1, c: 4, window: None },
        Case { docs: &[1], h: 1, g: 1, c: 1, window: None },
        Case { docs: &[3, 4, 1], h: 4, g: 2, c: 2, window: None },
        Case { docs: &[7, 2], h: 2, g: 2, c: 3, window: Some(3) },
        Case { docs: &[6], h: 3, g: 1, c: 2, window: Some(1) },
    ];

    fn inputs(case: &Case, dtype: DType) -> Result<(Tensor, Tensor, Tensor, Tensor, Sequences)> {
        let t = case.docs.iter().sum::<usize>();
        Ok((
            randn(1, (t, case.h, case.c), dtype)?,
            randn(2, (t, case.g, case.c), dtype)?,
            randn(3, (t, case.g, case.c), dtype)?,
            randn(4, (t, case.h, case.c), dtype)?,
            Sequences::new(case.docs, 0, &Device::Cpu)?,
        ))
    }

    fn output(q: &Tensor, k: &Tensor, v: &Tensor, how: &Causal<'_>) -> Result<Tensor> {
        forward(q, k, v, how, 0)?.o.values()?.reshape(q.shape())
    }

    #[test]
    fn gradients() -> Result<()> {
        for case in CASES {
            let (q, k, v, dy, s) = inputs(case, DType::F64)?;
            let how = case.how(&s, 0.7);
            let saved = forward(&q, &k, &v, &how, 0)?;
            let (dq, dk, dv) = backward(&q, &k, &v, &saved, &dy, &how, 0)?;
            let dv = dv.values()?.reshape(v.shape())?;
            gradient("q", &q, &dq, &dy, |q| output(q, &k, &v, &how));
            gradient("k", &k, &dk, &dy, |k| output(&q, k, &v, &how));
            gradient("v", &v, &dv, &dy, |v| output(&q, &k, v, &how));
        }
        Ok(())
    }

    #[test]
    fn a_block_reaches_back_to_the_start_of_its_first_document() {
        let reach = |docs: &[usize]| Sizes::of(docs).reach;
        assert_eq!((reach(&[128]), reach(&[100]), reach(&[])), (128, 100, 0));
        // the block of tokens 64..128 starts in the first document and ends in the second
        assert_eq!((reach(&[100, 28]), reach(&[64, 64])), (128, 64));
    }

    /// A window of w keys leaves w (n - w / 2) of n^2 / 2 pairs.
    #[test]
    fn a_window_hides_keys() -> Result<()> {
        let pairs = |n: usize, window| -> Result<f64> {
            let seqs = Sequences::ghost(Sizes { keys: 2 * n, longest: n, reach: n });
            Ok(Causal { seqs: &seqs, window, scale: 1.0 }.pairs() / (2 * n).max(1) as f64)
        };
        assert_eq!((pairs(100, None)?, pairs(100, Some(100))?, pairs(100, Some(400))?), (50.0, 50.0, 50.0));
        assert_eq!((pairs(100, Some(20))?, pairs(0, Some(20))?), (18.0, 0.0));
        Ok(())
    }

    /// Over several blocks of queries and keys, gradients match softmax written out for full matrices,
    /// and are bit-identical for any number of threads (and thus of blocks in flight).
    #[test]
    fn gradients_over_many_blocks() -> Result<()> {
        let case = Case { docs: &[200, 30, 61], h: 4, g: 2, c: 3, window: Some(150) };
        let (q, k, v, dy, s) = inputs(&case, DType::F64)?;
        let how = case.how(&s, 0.6);
        let saved = forward(&q, &k, &v, &how, 0)?;
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
            pool.install(|| backward(&q, &k, &v, &saved, &dy, &how, 0))
        };
        let (dq, dk, dv) = on(1)?;
        let dv = dv.values()?;
        for threads in [2, 3, 9] {
            let (q, k, v) = on(threads)?;
            close(&q, &dq, 0.0);
            close(&k, &dk, 0.0);
            close(&v.values()?, &dv, 0.0);
        }
        let t = 291;
        let seen: Vec<f64> = (0..t * t)
            .map(|at| {
                let (i, j): (usize, usize) = (at / t, at % t);
                let first = [0, 200, 230]
                    .into_iter()
                    .rfind(|d| *d <= i)
                    .unwrap_or(0)
                    .max((i + 1).saturating_sub(150));
                f64::from(u8::from(j >= first && j <= i))
            })
            .collect();
        let seen = Tensor::from_vec(seen, (t, t), &Device::Cpu)?;
        let head = |x: &Tensor, n: usize| x.narrow(1, n, 1)?.squeeze(1)?.contiguous();
        for kvh in 0..2 {
            let (k, v) = (head(&k, kvh)?, head(&v, kvh)?);
            let (mut want_k, mut want_v) = (k.zeros_like()?, v.zeros_like()?);
            for h in [2 * kvh, 2 * kvh + 1] {
                let (q, dy) = (head(&q, h)?, head(&dy, h)?);
                let e = ((q.matmul(&k.t()?)? * 0.6)?.exp()? * &seen)?;
                let p = e.broadcast_div(&e.sum_keepdim(1)?)?;
                let dp = dy.matmul(&v.t()?)?;
                let delta = (&p * &dp)?.sum_keepdim(1)?;
                let ds = ((p.clone() * dp.broadcast_sub(&delta)?)? * 0.6)?;
                close(&head(&dq, h)?, &ds.matmul(&k)?, 1e-10);
                want_k = (want_k + ds.t()?.matmul(&q)?)?;
                want_v = (want_v + p.t()?.matmul(&dy)?)?;
            }
            close(&head(&dk, kvh)?, &want_k, 1e-10);
            close(&head(&dv.reshape((t, 2, 3))?, kvh)?, &want_v, 1e-10);
        }
        Ok(())
    }

    /// bf16 results are close to f64 results for the same inputs, for odd and even head sizes, and
    /// bit-identical for any number of threads.
    #[test]
    fn bf16_is_near_the_widened() -> Result<()> {
        for (case, bar) in [
            (Case { docs: &[200, 30, 461], h: 4, g: 2, c: 32, window: None }, 0.01),
            (Case { docs: &[130, 31], h: 3, g: 1, c: 5, window: Some(70) }, 0.01),
            (Case { docs: &[1, 1], h: 1, g: 1, c: 2, window: None }, 0.01),
        ] {
            let (q, k, v, dy, s) = inputs(&case, DType::BF16)?;
            let how = case.how(&s, 0.3);
            let run = |dtype: DType| -> Result<Vec<Tensor>> {
                let [q, k, v, dy] = [&q, &k, &v, &dy].map(|x| x.to_dtype(dtype));
                let (q, k, v, dy) = (q?, k?, v?, dy?);
                let saved = forward(&q, &k, &v, &how, 0)?;
                let (dq, dk, dv) = backward(&q, &k, &v, &saved, &dy, &how, 0)?;
                Ok(vec![saved.o.values()?, saved.lse, dq, dk, dv.values()?])
            };
            let (got, want) = (run(DType::BF16)?, run(DType::F64)?);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let [got, want] = [values(got), values(want)];
                let size = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
                let off = got.iter().zip(&want).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
                let off = (off / want.len() as f64).sqrt();
                assert!(off <= bar * size + 1e-6, "result {i}: {off:e} off, of {size:e}");
            }
            for threads in [1, 3] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
                for (a, b) in pool.install(|| run(DType::BF16))?.iter().zip(&got) {
                    assert_eq!(values(a), values(b), "on {threads} threads");
                }
            }
        }
        Ok(())
    }

    /// Changing other documents does not change a single bit of the output.
    #[test]
    fn documents_do_not_see_one_another() -> Result<()> {
        let case = Case { docs: &[9, 70, 5], h: 2, g: 1, c: 4, window: None };
        let (q, k, v, _, s) = inputs(&case, DType::F32)?;
        let a = output(&q, &k, &v, &case.how(&s, 0.5))?.narrow(0, 9, 70)?.flatten_all()?.to_vec1::<f32>()?;
        let noise = randn(77, (9, 1, 4), DType::F32)?;
        let swap = |x: &Tensor| Tensor::cat(&[noise.clone(), x.narrow(0, 9, 75)?], 0);
        let b = output(&q, &swap(&k)?, &swap(&v)?, &case.how(&s, 0.5))?;
        assert_eq!(a, b.narrow(0, 9, 70)?.flatten_all()?.to_vec1::<f32>()?);
        Ok(())
    }

    /// Queries at the end of a sequence give the same output alone as in the full pass.
    #[test]
    fn later_queries_alone() -> Result<()> {
        let case = Case { docs: &[80], h: 4, g: 2, c: 4, window: Some(30) };
        let (q, k, v, _, s) = inputs(&case, DType::F32)?;
        let whole = output(&q, &k, &v, &case.how(&s, 0.5))?.narrow(0, 77, 3)?;
        let tail = Sequences::new(&[80], 77, &Device::Cpu)?;
        let q3 = q.narrow(0, 77, 3)?.contiguous()?;
        close(&output(&q3, &k, &v, &case.how(&tail, 0.5))?, &whole, 1e-6);
        Ok(())
    }
}
