use super::*;
use crate::ranks::{self, Axis};
use candle_core::{DType, Device};
use ft_data::segments;
use ft_kernels::check::{randn, values};
use std::time::Duration;

const H: usize = 4;
const G: usize = 2;
const C: usize = 4;
const HOW: f64 = 0.5;

/// Output, and gradients of queries, keys and values, row by row.
type Rows = [Vec<f64>; 4];

/// Attention of all tokens on one rank, with q, k, v and the gradient of the output from fixed seeds.
fn on_one(docs: &[usize], window: Option<usize>) -> Result<Rows> {
    let (inputs, seqs) = (inputs(docs)?, Sequences::new(docs, 0, &Device::Cpu)?);
    let [q, k, v, d_o] = &inputs;
    let how = Causal { seqs: &seqs, window, scale: HOW };
    let saved = attention::forward(q, k, v, &how, 0)?;
    let (dq, dk, dv) = attention::backward(q, k, v, &saved, d_o, &how, 0)?;
    Ok([values(&saved.o.values()?), values(&dq), values(&dk), values(&dv.values()?)])
}

fn inputs(docs: &[usize]) -> Result<[Tensor; 4]> {
    let t = docs.iter().sum::<usize>();
    let of = |seed, heads| randn(seed, (t, heads, C), DType::F32);
    Ok([of(1, H)?, of(2, G)?, of(3, G)?, of(4, H)?])
}

/// The same on several ranks. `fetch` drops the keys between forward and backward pass.
fn on_many(
    docs: &[usize],
    window: Option<usize>,
    all: &[Vec<Range<usize>>],
    fetch: bool,
) -> Result<(Rows, u64)> {
    let whole = inputs(docs)?;
    let rank = |comm: ranks::Threads| -> Result<(Vec<[Vec<f64>; 4]>, u64)> {
        ft_base::memory::place::follow();
        let context_parallel = ContextParallel::new(&comm, docs, all.to_vec());
        // All have ended before one leaves.
        let end = || {
            comm.all_gather_bytes(CollectiveId::all("the end"), &[], true).map_err(candle_core::Error::wrap)
        };
        if context_parallel.own().is_empty() {
            return end().map(|_| (Vec::new(), 0));
        }
        let own = |x: &Tensor| -> Result<Tensor> {
            let parts = context_parallel
                .own()
                .iter()
                .map(|r| x.narrow(0, r.start, r.len()))
                .collect::<Result<Vec<_>>>()?;
            Tensor::cat(&parts, 0)?.contiguous()
        };
        let [q, k, v, d_o] = [own(&whole[0])?, own(&whole[1])?, own(&whole[2])?, own(&whole[3])?];
        let none = Sequences::planned(&[], 0);
        let how = Causal { seqs: &none, window, scale: HOW };
        let mut out = context_parallel.forward([&q, &k, &v], &how, 0)?;
        let o = values(&out.o.values()?);
        assert!(
            out.parts()
                .map(|(rows, part)| (rows, values(&part.o.values().expect("rows"))))
                .all(|(rows, part)| part[..] == o[rows.start * H * C..rows.end * H * C])
        );
        if fetch {
            out.drop_keys();
        }
        let (dq, dk, dv) = context_parallel.backward([&q, &k, &v, &d_o], out, &how, 0)?;
        let [dq, dk, dv] = [values(&dq), values(&dk), values(&dv.values()?)];
        let row = |x: &[f64], i: usize, heads: usize| x[i * heads * C..(i + 1) * heads * C].to_vec();
        let t = q.dim(0)?;
        let rows = (0..t).map(|i| [row(&o, i, H), row(&dq, i, H), row(&dk, i, G), row(&dv, i, G)]).collect();
        end()?;
        Ok((rows, comm.received().along(Axis::World)))
    };
    let came: Vec<_> = std::thread::scope(|s| {
        let rank = &rank;
        let group = ranks::group(all.len(), Duration::from_secs(100)).into_iter();
        let started: Vec<_> = group.map(|c| s.spawn(move || rank(c))).collect();
        started.into_iter().map(|t| t.join().expect("no panic")).collect::<Result<Vec<_>>>()
    })?;
    let t = docs.iter().sum::<usize>();
    let mut out: [Vec<Vec<f64>>; 4] = std::array::from_fn(|_| vec![Vec::new(); t]);
    let mut bytes = 0;
    for ((rows, received), ranges) in came.into_iter().zip(all) {
        bytes += received;
        for (row, token) in rows.into_iter().zip(ranges.iter().cloned().flatten()) {
            out.iter_mut().zip(row).for_each(|(all, x)| all[token] = x);
        }
    }
    Ok((out.map(|rows| rows.concat()), bytes))
}

/// Output with the same bits, gradients within 1e-6 of the norm. `exact` is whether blocks of queries are the same.
#[track_caller]
fn compare(docs: &[usize], window: Option<usize>, all: &[Vec<Range<usize>>], exact: bool) {
    let want = on_one(docs, window).expect("one rank");
    let told = || format!("{docs:?}, window {window:?}, {all:?}");
    let fetched = on_many(docs, window, all, true).expect("several ranks").0;
    let (got, _) = on_many(docs, window, all, false).expect("several ranks");
    assert!(got == fetched, "fetched again: {}", told());
    assert!(!exact || got[0] == want[0], "other bits: {}", told());
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let norm = want.iter().map(|x| x * x).sum::<f64>().sqrt();
        let off = got.iter().zip(want).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
        assert!(off <= 1e-6 * norm, "result {i}: {off:e} of {norm:e}: {}", told());
    }
}

/// Documents, windows and numbers of ranks: as cut in a run.
#[test]
fn segments_compute_what_one_rank_does() {
    for docs in [&[600][..], &[300, 1, 290], &[50; 12], &[128; 4], &[130, 5, 700, 9]] {
        for window in [None, Some(1), Some(100), Some(500)] {
            for ranks in [2, 3, 4] {
                compare(docs, window, &segments(docs, ranks), true);
            }
        }
    }
}

#[test]
fn rows_of_any_length_are_divided() {
    for n in (1..=300).step_by(if cfg!(debug_assertions) { 37 } else { 7 }) {
        for ranks in [2, 3, 4] {
            let docs: &[usize] = if n % 2 == 0 { &[n] } else { &[n - n / 3, n / 3] };
            compare(docs, if n % 3 == 0 { Some(40) } else { None }, &segments(docs, ranks), true);
        }
    }
}

/// Every cut of a short row of two documents, also between ranks that take turns.
#[test]
fn a_row_may_be_cut_anywhere() {
    let (docs, n) = ([17, 13], 30);
    for cut in 0..=n {
        for window in [None, Some(6)] {
            let joined =
                |all: [Range<usize>; 2]| all.into_iter().filter(|r| !r.is_empty()).collect::<Vec<_>>();
            compare(&docs, window, &[joined([0..cut, n..n]), joined([cut..n, n..n])], false);
            let far = (cut + 5).min(n);
            compare(&docs, window, &[joined([0..cut, far..n]), joined([cut..far, n..n])], false);
        }
    }
}

/// Keys travel only if some query sees them, and only once a pass.
#[test]
fn keys_that_no_query_sees_are_not_sent() {
    let bytes = |docs: &[usize], window| {
        let all = segments(docs, 2);
        on_many(docs, window, &all, false).expect("two ranks").1
    };
    let key = 2 * 4 * G * C;
    // Documents of each rank alone.
    assert_eq!(bytes(&[128, 128, 128, 128], None), 0);
    // Rank 0 has the first and last quarter, rank 1 the rest: keys forward, gradients back.
    let crossing = (256 + 128) as u64;
    assert_eq!(bytes(&[512], None), 2 * crossing * key as u64);
    // A window of one sees its own key alone; of three, two keys across each of two cuts.
    assert_eq!((bytes(&[512], Some(1)), bytes(&[512], Some(3))), (0, 2 * 2 * 2 * key as u64));
}
