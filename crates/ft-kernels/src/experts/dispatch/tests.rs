//! Checks gradients of grouping against finite differences, and composed operations against the CPU.

use super::*;
use crate::check::{close, gradient, randn};
use crate::ledger::{Ledger, Machine};

const T: usize = 70;
const E: usize = 5;
const K: usize = 2;

/// No token is routed to expert 3.
fn groups() -> Result<Groups> {
    let chosen: Vec<u32> = (0..T as u32).flat_map(|t| [[0, 2], [4, 1], [1, 0]][t as usize % 3]).collect();
    Groups::new(chosen, K, E, &Device::Cpu)
}

/// The same with the lists of composed operations.
fn with_index() -> Result<Groups> {
    let mut g = groups()?;
    let list = |v: &Vec<u32>| Tensor::from_slice(v, v.len(), &Device::Cpu);
    g.index = Some([list(&g.token)?, list(&g.pair)?, list(&g.place)?]);
    Ok(g)
}

fn split(g: &Groups, rows: &Tensor) -> Result<Vec<Tensor>> {
    g.runs().iter().map(|r| rows.narrow(0, r.start, r.rows)).collect()
}

#[test]
fn rows_are_sorted_by_expert_then_token() -> Result<()> {
    let g = groups()?;
    assert_eq!(g.counts().sum::<usize>(), T * K);
    assert_eq!(g.runs().iter().map(|r| r.expert).collect::<Vec<_>>(), [0, 1, 2, 4]);
    for r in g.runs() {
        let tokens = g.tokens_of(&r);
        assert!(tokens.windows(2).all(|w| w[0] < w[1]), "{tokens:?}");
        for (i, t) in tokens.iter().enumerate() {
            let pair = g.pair[r.start + i] as usize;
            assert_eq!((pair / K, g.expert[pair]), (*t as usize, r.expert as u32));
            assert_eq!(g.place[pair] as usize, r.start + i);
        }
    }
    assert!(Groups::new(vec![0, 5], 1, 5, &Device::Cpu).is_err());
    Ok(())
}

#[test]
fn gradients_of_gather_and_combine() -> Result<()> {
    let g = groups()?;
    let (d, f64s) = (3, DType::F64);
    let (x, gates) = (randn(1, (T, d), f64s)?, randn(2, (T, K), f64s)?);
    let dy = randn(3, (T * K, d), f64s)?;
    let dx = g.combine(&split(&g, &dy)?, None, f64s)?;
    gradient("gather", &x, &dx, &dy, |x| g.gather(x));
    let (rows, dy) = (randn(4, (T * K, d), f64s)?, randn(5, (T, d), f64s)?);
    let combine = |rows: &Tensor, gates: &Tensor| g.combine(&split(&g, rows)?, Some(gates), f64s);
    let parts: Vec<Tensor> =
        g.runs().iter().map(|r| g.gather_scaled(&dy, &gates, r)).collect::<Result<_>>()?;
    gradient("rows", &rows, &Tensor::cat(&parts, 0)?, &dy, |rows| combine(rows, &gates));
    gradient("gates", &gates, &g.dots(&split(&g, &rows)?, &dy)?, &dy, |gates| combine(&rows, gates));
    Ok(())
}

#[test]
fn composed_gather_and_combine_agree_with_the_kernels() -> Result<()> {
    let (g, d) = (with_index()?, 6);
    let (x, gates) = (randn(1, (T, d), DType::F32)?, randn(2, (T, K), DType::F32)?);
    let parts = split(&g, &randn(3, (T * K, d), DType::F32)?)?;
    close(&x.index_select(&g.index()?[0], 0)?, &g.gather(&x)?, 0.0);
    for gates in [None, Some(&gates)] {
        let want = g.combine(&parts, gates, DType::F32)?;
        close(&g.combine_composed(&parts, gates, DType::F32)?, &want, 1e-6);
    }
    close(&g.dots_composed(&parts, &x)?, &g.dots(&parts, &x)?, 1e-6);
    for r in g.runs() {
        let want = g.gather_scaled(&x, &gates, &r)?;
        close(&g.gather_composed(&x, &gates, &r)?, &want, 1e-6);
    }
    Ok(())
}

/// bf16 rows, and their products with gates, are rounded once.
#[test]
fn rows_in_half_precision_are_rounded_once() -> Result<()> {
    let g = groups()?;
    let (x, gates) = (randn(1, (T, 6), DType::BF16)?, randn(2, (T, K), DType::F32)?);
    let wide = upcast(&x)?;
    close(&g.gather(&x)?, &g.gather(&wide)?, 0.0);
    for r in g.runs() {
        let want = g.gather_scaled(&wide, &gates, &r)?.to_dtype(DType::BF16)?;
        close(&g.gather_scaled(&x, &gates, &r)?, &want, 0.0);
    }
    Ok(())
}

/// In a plan, row ranges of experts stay in bounds, also if shares are rounded up.
#[test]
fn planned_row_ranges_of_experts_stay_in_bounds() -> Result<()> {
    for (tokens, top_k, alike) in [
        (46, 2, vec![1; 5]),
        (23, 4, vec![1; 5]),
        (1, 2, vec![1; 9]),
        (7, 3, vec![2, 1, 3]),
        (64, 8, vec![128]),
    ] {
        for skewed in [false, true] {
            let ledger = Ledger::new(Default::default());
            ledger.route(skewed);
            let experts: usize = alike.iter().sum();
            let probs = Tensor::from(Ghost::new(&ledger, (tokens, experts), DType::F32));
            let g = Groups::choose(&probs, top_k, &alike, |_| 0)?;
            let runs = g.runs();
            assert!(!runs.is_empty());
            for r in runs {
                assert!(r.start + r.rows <= tokens * top_k, "{tokens} {top_k} {alike:?} {skewed}");
            }
        }
    }
    Ok(())
}

/// The kernels read gates and their gradients in f32.
#[test]
fn gates_of_another_dtype_are_refused_on_cuda() -> Result<()> {
    let ledger = Ledger::new(Machine { cuda: true, ..Machine::default() });
    let ghost = |shape: (usize, usize), dtype| Tensor::from(Ghost::new(&ledger, shape, dtype));
    let s = Sorted::new(&ghost((T, K), DType::U32), E, DType::BF16)?;
    let (rows, dy) = (ghost((T * K, 6), DType::BF16), ghost((T, 6), DType::BF16));
    let routed = route::cuda::forward(&ghost((T, E), DType::F32), K, None, true)?;
    for (dtype, fits) in [(DType::F32, true), (DType::BF16, false)] {
        let (gates, extra) = (ghost((T, K), dtype), Tensor::zeros(E, dtype, On::Ghost(&ledger))?);
        assert_eq!(s.scale(&rows, &gates, &dy).is_ok(), fits);
        assert_eq!(s.combine(&rows, Some(&gates), None).is_ok(), fits);
        assert_eq!(route::cuda::backward(&routed, &gates, None, 0.0, true).is_ok(), fits);
        let dgates = &routed.gates;
        assert_eq!(route::cuda::backward(&routed, dgates, Some(&extra), 0.0, true).is_ok(), fits);
    }
    Ok(())
}
