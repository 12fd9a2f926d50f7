//! Causal attention over documents laid end to end, with grouped queries and sliding windows.
//!
//! Rows of a micro-batch are not padded: all documents stand one after the other in one sequence, and token
//! `i` sees the keys from the start of its own document to itself. So packed and padded batches are one
//! case, and nothing is computed for padding.
//!
//! The forward pass keeps, beside the output, the logarithm of each row's softmax sum; the backward pass
//! computes the probabilities again from it, block by block, so that memory grows with tokens and not with
//! their square (Dao et al., "FlashAttention", 2022).
//!
//! Axes: `t` tokens, `h` query heads, `g` key/value heads, `c` channels of a head.

mod composed;
mod cpu;

use super::cpu::{is_cpu, on_real};
use candle_core::{Device, Result, Tensor};

/// Who sees whom.
#[derive(Clone, Debug)]
pub struct Sequences {
    /// Lengths of the documents, in order; their sum is the number of keys.
    pub docs: Vec<usize>,
    /// Index of the first query among the keys: 0 in training, the length of the cache when decoding.
    pub first_query: usize,
    /// First token of the document of each key.
    lo: Vec<u32>,
    /// 0, 1, 2, .. on the device (f32), as long as the longest document: masks are compared from it.
    iota: Tensor,
}

impl Sequences {
    /// Documents of these lengths; queries from `first_query` on.
    pub fn new(docs: &[usize], first_query: usize, device: &Device) -> Result<Self> {
        let mut lo = Vec::with_capacity(docs.iter().sum());
        for &n in docs {
            let start = lo.len() as u32;
            lo.extend(std::iter::repeat_n(start, n));
        }
        let longest = docs.iter().copied().max().unwrap_or(0).max(1);
        let iota = Tensor::arange(0f32, longest as f32, device)?;
        Ok(Self { docs: docs.to_vec(), first_query, lo, iota })
    }

    /// Number of keys.
    pub fn keys(&self) -> usize {
        self.lo.len()
    }
}

/// Which keys a query sees, and what its scores are multiplied with.
#[derive(Clone, Copy, Debug)]
pub struct Causal<'a> {
    /// Documents.
    pub seqs: &'a Sequences,
    /// Keys that a query sees at the most, itself among them.
    pub window: Option<usize>,
    /// Factor on the scores.
    pub scale: f64,
}

impl Causal<'_> {
    /// First key that the query with key index `i` sees.
    fn first_key(&self, i: usize) -> usize {
        let lo = self.seqs.lo[i] as usize;
        self.window.map_or(lo, |w| lo.max((i + 1).saturating_sub(w)))
    }
}

/// What the backward pass needs beside q, k and v.
#[derive(Clone, Debug)]
pub struct Saved {
    /// Output [t, h, c].
    pub o: Tensor,
    /// Logarithm of the softmax's sum, [t, h], f32 (f64 for f64).
    pub lse: Tensor,
}

/// Forward.
///
/// # Shapes
/// `q` [t, h, c]; `k`, `v` [keys, g, c] with h a multiple of g; the output is [t, h, c].
pub fn forward(q: &Tensor, k: &Tensor, v: &Tensor, how: &Causal<'_>) -> Result<Saved> {
    Shape::of(q, k, v, how.seqs)?;
    if is_cpu(q) { on_real!(q.dtype(), cpu::forward(q, k, v, how)) } else { composed::forward(q, k, v, how) }
}

/// The gradients of q, k and v, given that of the output.
pub fn backward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    saved: &Saved,
    d_o: &Tensor,
    how: &Causal<'_>,
) -> Result<(Tensor, Tensor, Tensor)> {
    Shape::of(q, k, v, how.seqs)?;
    if is_cpu(q) {
        on_real!(q.dtype(), cpu::backward(q, k, v, saved, d_o, how))
    } else {
        composed::backward(q, k, v, saved, d_o, how)
    }
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
    use crate::kernel::check::{close, gradient, randn};
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

    #[test]
    fn gradients() -> Result<()> {
        for case in CASES {
            let (q, k, v, dy, s) = inputs(case, DType::F64)?;
            let how = case.how(&s, 0.7);
            let saved = forward(&q, &k, &v, &how)?;
            let (dq, dk, dv) = backward(&q, &k, &v, &saved, &dy, &how)?;
            gradient("q", &q, &dq, &dy, |q| Ok(forward(q, &k, &v, &how)?.o));
            gradient("k", &k, &dk, &dy, |k| Ok(forward(&q, k, &v, &how)?.o));
            gradient("v", &v, &dv, &dy, |v| Ok(forward(&q, &k, v, &how)?.o));
        }
        Ok(())
    }

    #[test]
    fn composition_agrees() -> Result<()> {
        let long = Case { docs: &[70, 3, 90, 1], h: 4, g: 2, c: 8, window: Some(40) };
        for case in CASES.iter().chain([&long]) {
            let (q, k, v, dy, s) = inputs(case, DType::F32)?;
            let how = case.how(&s, 0.5);
            let (a, b) = (forward(&q, &k, &v, &how)?, composed::forward(&q, &k, &v, &how)?);
            close(&b.o, &a.o, 2e-6);
            close(&b.lse, &a.lse, 2e-6);
            let x = backward(&q, &k, &v, &a, &dy, &how)?;
            let y = composed::backward(&q, &k, &v, &a, &dy, &how)?;
            close(&y.0, &x.0, 3e-6);
            close(&y.1, &x.1, 3e-6);
            close(&y.2, &x.2, 3e-6);
        }
        Ok(())
    }

    /// Another document's tokens must not move a bit of this one's output.
    #[test]
    fn documents_do_not_see_one_another() -> Result<()> {
        let case = Case { docs: &[9, 70, 5], h: 2, g: 1, c: 4, window: None };
        let (q, k, v, _, s) = inputs(&case, DType::F32)?;
        let a =
            forward(&q, &k, &v, &case.how(&s, 0.5))?.o.narrow(0, 9, 70)?.flatten_all()?.to_vec1::<f32>()?;
        let noise = randn(77, (9, 1, 4), DType::F32)?;
        let swap = |x: &Tensor| Tensor::cat(&[noise.clone(), x.narrow(0, 9, 75)?], 0);
        let b = forward(&q, &swap(&k)?, &swap(&v)?, &case.how(&s, 0.5))?;
        assert_eq!(a, b.o.narrow(0, 9, 70)?.flatten_all()?.to_vec1::<f32>()?);
        Ok(())
    }

    /// Decoding with cached keys gives what the whole sequence gives.
    #[test]
    fn later_queries_alone() -> Result<()> {
        let case = Case { docs: &[80], h: 4, g: 2, c: 4, window: Some(30) };
        let (q, k, v, _, s) = inputs(&case, DType::F32)?;
        let whole = forward(&q, &k, &v, &case.how(&s, 0.5))?.o.narrow(0, 77, 3)?;
        let tail = Sequences::new(&[80], 77, &Device::Cpu)?;
        let q3 = q.narrow(0, 77, 3)?.contiguous()?;
        close(&forward(&q3, &k, &v, &case.how(&tail, 0.5))?.o, &whole, 1e-6);
        close(&composed::forward(&q3, &k, &v, &case.how(&tail, 0.5))?.o, &whole, 2e-6);
        Ok(())
    }
}
