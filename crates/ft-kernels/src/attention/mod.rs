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
mod gradients;
mod sequences;
pub mod sinks;
mod split;
mod tiles;

pub use self::cache::Cache;
#[cfg(test)]
pub use self::cuda::shared_memory;
use self::sequences::Shape;
pub use self::sequences::{Causal, Saved, Sequences};
pub use self::tiles::{BLOCK, CHUNK, ROWS, Sizes};
use crate::Tensor;
use crate::cpu::{is_cpu, on_real};
use crate::gemm::pairs;
use crate::padded::Padded;
use candle_core::Result;

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
    let (dq, dk, dv) = if pairs::takes(&[q, k, v, &o, d_o])? {
        dots::backward(q, k, v, (&o, &saved.lse), d_o, how)?
    } else {
        on_real!(q.dtype(), cpu::backward(q, k, v, (&o, &saved.lse), d_o, how))?
    };
    let (keys, g, c) = dv.dims3()?;
    Ok((dq, dk, Padded::of(&dv.reshape((keys, g * c))?)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{close, gradient, on, randn, values};
    use crate::cuda::upload::Lists;
    use candle_core::{DType, Device};

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
    fn gradients_match_finite_differences() -> Result<()> {
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
        let reach = |docs: &[usize]| Sizes::of_last(docs, 0).reach;
        assert_eq!((reach(&[128]), reach(&[100]), reach(&[])), (128, 100, 0));
        // the block of tokens 64..128 starts in the first document and ends in the second
        assert_eq!((reach(&[100, 28]), reach(&[64, 64])), (128, 64));
    }

    #[test]
    fn uploaded_documents_have_the_sizes_of_planned_ones() -> Result<()> {
        let (docs, first) = (&[100, 28], 101);
        let mut lists = Lists::default();
        let places = Sequences::list(docs, first, &mut lists);
        let sent = Sequences::sent(docs, first, places, &lists.send(&Device::Cpu)?)?;
        let most = |seqs: &Sequences| Causal { seqs, window: None, scale: 1.0 }.most_keys();
        assert_eq!((most(&sent), most(&Sequences::planned(docs, first))), (28, 28));
        Ok(())
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
        let later = |first, window| {
            let seqs = Sequences::planned(&[40, 100, 30], first);
            Causal { seqs: &seqs, window, scale: 1.0 }.pairs()
        };
        assert_eq!(later(90, None), (100.0 * 100.0 - 50.0 * 50.0 + 30.0 * 30.0) / 2.0);
        assert_eq!(later(90, Some(20)), 50.0 * 20.0 + 20.0 * 30.0 - 200.0);
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
        let run = || backward(&q, &k, &v, &saved, &dy, &how, 0);
        let (dq, dk, dv) = on(1, run)?;
        let dv = dv.values()?;
        for threads in [2, 3, 9] {
            let (q, k, v) = on(threads, run)?;
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
                for (a, b) in on(threads, || run(DType::BF16))?.iter().zip(&got) {
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
    fn queries_at_the_end_have_the_output_of_the_full_pass() -> Result<()> {
        let case = Case { docs: &[80], h: 4, g: 2, c: 4, window: Some(30) };
        let (q, k, v, _, s) = inputs(&case, DType::F32)?;
        let whole = output(&q, &k, &v, &case.how(&s, 0.5))?.narrow(0, 77, 3)?;
        let tail = Sequences::new(&[80], 77, &Device::Cpu)?;
        let q3 = q.narrow(0, 77, 3)?.contiguous()?;
        close(&output(&q3, &k, &v, &case.how(&tail, 0.5))?, &whole, 1e-6);
        Ok(())
    }
}
