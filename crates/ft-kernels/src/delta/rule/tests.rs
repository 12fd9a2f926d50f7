//! The chunked recurrence against finite differences and against the recurrence token by token.

use super::*;
use crate::attention::Sizes;
use crate::check::{close, gradient, on, randn, values};
use crate::delta::conv;
use crate::ledger::{Ledger, Machine};
use crate::tensor::Ghost;
use candle_core::{DType, Device};

pub(super) struct Case {
    pub(super) docs: &'static [usize],
    pub(super) heads: Heads,
}

pub(super) const fn heads(keys: usize, values: usize, key_dim: usize, value_dim: usize) -> Heads {
    Heads { keys, values, key_dim, value_dim }
}

pub(super) const CASES: &[Case] = &[
    Case { docs: &[5], heads: heads(1, 1, 2, 3) },
    Case { docs: &[1], heads: heads(1, 2, 1, 1) },
    Case { docs: &[3, 36, 1], heads: heads(2, 4, 4, 3) },
    Case { docs: &[70], heads: heads(1, 3, 2, 2) },
];

pub(super) struct Values(pub [Tensor; 5], pub Sequences, pub Tensor);

pub(super) fn inputs(case: &Case, dtype: DType) -> Result<Values> {
    let (t, h) = (case.docs.iter().sum::<usize>(), case.heads);
    let x = [
        randn(1, (t, h.channels()), dtype)?,
        randn(2, (t, h.values), dtype)?,
        randn(3, (t, h.values), dtype)?,
        (randn(4, h.values, dtype)? * 0.5)?,
        randn(5, h.values, dtype)?,
    ];
    Ok(Values(x, Sequences::new(case.docs, 0, &Device::Cpu)?, randn(6, (t, h.value_width()), dtype)?))
}

pub(super) fn of<'a>(heads: Heads, [qkv, a, b, a_log, bias]: [&'a Tensor; 5]) -> Inputs<'a> {
    Inputs { heads, qkv, a, b, a_log, bias }
}

#[test]
fn gradients_match_finite_differences() -> Result<()> {
    for case in CASES {
        let Values(x, seqs, d_o) = inputs(case, DType::F64)?;
        let got = backward(&of(case.heads, x.each_ref()), &d_o, &seqs)?;
        let flat = |t: &Tensor| t.sum_keepdim(0)?.flatten_all();
        let got = [got.qkv, got.a, got.b, flat(&got.a_log)?, flat(&got.bias)?];
        for (i, name) in ["qkv", "a", "b", "a_log", "bias"].into_iter().enumerate() {
            gradient(name, &x[i], &got[i], &d_o, |with| {
                let mut x = x.each_ref();
                x[i] = with;
                forward(&of(case.heads, x), &seqs, None)
            });
        }
    }
    Ok(())
}

/// The recurrence as it is written, in f64.
fn token_by_token(heads: Heads, x: [&Tensor; 5], docs: &[usize]) -> Vec<f64> {
    let [qkv, a, b, a_log, bias] = x.map(values);
    let (k, v, c) = (heads.key_dim, heads.value_dim, heads.channels());
    let unit = |row: &[f64]| {
        let length = (row.iter().map(|x| x * x).sum::<f64>() + EPS).sqrt();
        row.iter().map(|x| x / length).collect::<Vec<f64>>()
    };
    let (mut out, mut start) = (vec![0.0; qkv.len() / c * heads.value_width()], 0);
    for n in docs {
        for h in 0..heads.values {
            let mut s = vec![0.0; k * v];
            for t in start..start + n {
                let row = |part: usize, head: usize, width: usize| {
                    &qkv[t * c + part * heads.key_width() + head * width..][..width]
                };
                let group = h / heads.each();
                let (q, key) = (unit(row(0, group, k)), unit(row(1, group, k)));
                let rate = 1.0 / (1.0 + (-b[t * heads.values + h]).exp());
                let soft = (1.0 + (a[t * heads.values + h] + bias[h]).exp()).ln();
                let decay = (-a_log[h].exp() * soft).exp();
                s.iter_mut().for_each(|s| *s *= decay);
                for j in 0..v {
                    let known: f64 = (0..k).map(|i| s[i * v + j] * key[i]).sum();
                    let new = rate * (row(2, h, v)[j] - known);
                    (0..k).for_each(|i| s[i * v + j] += key[i] * new);
                    let o: f64 = (0..k).map(|i| s[i * v + j] * q[i]).sum();
                    out[t * heads.value_width() + h * v + j] = o / (k as f64).sqrt();
                }
            }
        }
        start += n;
    }
    out
}

#[test]
fn chunks_give_the_recurrence_of_tokens() -> Result<()> {
    let wide = Case { docs: &[130, 64, 3], heads: heads(1, 2, 64, 64) };
    for case in CASES.iter().chain([&wide]) {
        let Values(x, seqs, _) = inputs(case, DType::F64)?;
        let got = values(&forward(&of(case.heads, x.each_ref()), &seqs, None)?);
        let want = token_by_token(case.heads, x.each_ref(), case.docs);
        let apart = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(apart < 1e-11, "{apart:e} apart");
    }
    Ok(())
}

/// A document gives the same bits in a row as alone, forward and backward, for any number of threads.
#[test]
fn no_state_leaks_into_the_next_document() -> Result<()> {
    let case = Case { docs: &[37, 70, 5], heads: heads(2, 4, 8, 12) };
    let Values(x, seqs, d_o) = inputs(&case, DType::F32)?;
    let input = of(case.heads, x.each_ref());
    let both = || -> Result<_> { Ok((forward(&input, &seqs, None)?, backward(&input, &d_o, &seqs)?)) };
    let (y, back) = on(1, both)?;
    let (y3, back3) = on(3, both)?;
    close(&y3, &y, 0.0);
    close(&back3.qkv, &back.qkv, 0.0);
    let mut start = 0;
    for n in case.docs {
        let rows = |t: &Tensor| t.narrow(0, start, *n)?.contiguous();
        let own = [rows(&x[0])?, rows(&x[1])?, rows(&x[2])?, x[3].clone(), x[4].clone()];
        let (own, alone) = (of(case.heads, own.each_ref()), Sequences::new(&[*n], 0, &Device::Cpu)?);
        close(&forward(&own, &alone, None)?, &rows(&y)?, 0.0);
        let got = backward(&own, &rows(&d_o)?, &alone)?;
        close(&got.qkv, &rows(&back.qkv)?, 0.0);
        close(&got.a, &rows(&back.a)?, 0.0);
        close(&got.b, &rows(&back.b)?, 0.0);
        start += n;
    }
    Ok(())
}

#[test]
fn a_state_continues_its_document() -> Result<()> {
    let case = Case { docs: &[75], heads: heads(1, 2, 8, 4) };
    let Values(x, seqs, _) = inputs(&case, DType::F32)?;
    let whole = forward(&of(case.heads, x.each_ref()), &seqs, None)?;
    let (mut state, mut start) = (State::default(), 0);
    for n in [40, 1, 1, 33] {
        let rows = |t: &Tensor| t.narrow(0, start, n)?.contiguous();
        let own = [rows(&x[0])?, rows(&x[1])?, rows(&x[2])?, x[3].clone(), x[4].clone()];
        let y = forward(&of(case.heads, own.each_ref()), &seqs, Some(&mut state))?;
        close(&y, &rows(&whole)?, 1e-5);
        start += n;
    }
    Ok(())
}

#[test]
fn documents_of_other_tokens_are_refused() -> Result<()> {
    let case = &CASES[0];
    let Values(x, _, d_o) = inputs(case, DType::F32)?;
    let (x, other) = (of(case.heads, x.each_ref()), Sequences::new(&[4], 0, &Device::Cpu)?);
    assert!(forward(&x, &other, None).is_err() && backward(&x, &d_o, &other).is_err());
    let w = randn(7, (case.heads.channels(), 2), DType::F32)?;
    assert!(conv::forward(x.qkv, &w, &other, None).is_err());
    assert!(conv::backward(x.qkv, &w, x.qkv, &other, false).is_err());
    Ok(())
}

/// Peaks in bytes of the plan of a forward pass, and of a backward pass if there is no state.
fn peaks(h: Heads, threads: u64, seqs: &Sequences, state: Option<&mut State>) -> Result<[u64; 2]> {
    let (t, ledger) = (96, Ledger::new(Machine { threads, ..Machine::default() }));
    let ghost = |shape: &[usize]| Tensor::from(Ghost::weight(&ledger, shape, DType::F32));
    let (qkv, d_o) = (ghost(&[t, h.channels()]), ghost(&[t, h.value_width()]));
    let (of_tokens, of_heads) = (ghost(&[t, h.values]), ghost(&[h.values]));
    let x = of(h, [&qkv, &of_tokens, &of_tokens, &of_heads, &of_heads]);
    let peak = || ledger.take().at_peak.iter().sum::<u64>();
    let continued = state.is_some();
    forward(&x, seqs, state)?;
    let of_forward = peak();
    if !continued {
        backward(&x, &d_o, seqs)?;
    }
    Ok([of_forward, peak()])
}

/// A thread has a document and a key head, so a plan with more of these has more buffers.
#[test]
fn a_plan_has_buffers_for_every_busy_thread() -> Result<()> {
    let (h, t) = (heads(1, 2, 16, 8), 96);
    let peaks = |threads: u64, seqs: &Sequences| peaks(h, threads, seqs, None);
    let (one, three) = (Sequences::planned(&[t], 0), Sequences::planned(&[t / 3; 3], 0));
    assert_eq!(peaks(8, &one)?, peaks(1, &one)?);
    let [few, many] = [peaks(1, &three)?, peaks(8, &three)?];
    assert!(few[0] < many[0] && few[1] < many[1], "{few:?} and {many:?}");
    assert_eq!(peaks(3, &three)?, many);
    let sizes = Sizes { keys: t, longest: t / 3, reach: t };
    assert_eq!(peaks(8, &Sequences::ghost(sizes))?, many);
    Ok(())
}

/// A state that continues has all heads at once; otherwise a thread has the states of a key head.
#[test]
fn a_plan_with_a_state_has_the_states_of_all_heads() -> Result<()> {
    let (h, one) = (heads(4, 8, 16, 8), Sequences::planned(&[96], 0));
    let of_key_head = 4 * (h.state() / h.keys) as u64;
    for threads in [1, 3, 8] {
        let [continued, _] = peaks(h, threads, &one, Some(&mut State::default()))?;
        let [alone, _] = peaks(h, threads, &one, None)?;
        assert_eq!(continued - alone, of_key_head * 4_u64.saturating_sub(threads), "{threads} threads");
    }
    Ok(())
}
