use super::*;
use crate::model::linear::{Lora, Weight};
use crate::model::pass::batch::DropoutKey;
use crate::model::pass::grad_accumulator::Slot;
use candle_core::DType;
use candle_core::Device;
use ft_kernels::attention::Sequences;
use ft_kernels::check::{close, gradient, on, randn, values};
use ft_kernels::swiglu::Glu;

const T: usize = 9;
const D: usize = 4;
const F: usize = 3;
const S: usize = 2;
const E: usize = 5;
const R: usize = 2;

fn context(first_row: usize) -> Result<Context<'static>> {
    let d = &Device::Cpu;
    let dropout = Some(DropoutKey { seed: 3, step: 1, first_row });
    let seqs = Sequences::new(&[T], 0, d)?;
    Ok(Context::new(seqs, Vec::new(), dropout))
}

/// Shapes of all trained tensors: the router and even experts train in full, odd experts by LoRA.
fn shapes() -> Vec<(usize, usize)> {
    let mut out = vec![(E, D)];
    for e in 0..E {
        for (o, i) in [(F, D), (F, D), (D, F)] {
            out.extend(if e % 2 == 0 { vec![(o, i)] } else { vec![(R, i), (o, R)] });
        }
    }
    // shared expert and gate
    out.extend([(S, D), (S, D), (D, S), (1, D)]);
    out
}

fn slots() -> (Vec<Slot>, usize) {
    Slot::end_to_end(shapes())
}

fn params() -> Result<Vec<Tensor>> {
    shapes().into_iter().enumerate().map(|(i, s)| randn(i as u64 + 1, s, DType::F64)).collect()
}

fn mixture(params: &[Tensor], dropout: f64, top_k: usize, normalise: bool) -> Result<Mixture> {
    let mut next = params.iter().cloned().zip(slots().0);
    let mut take = || next.next().expect("a tensor");
    let frozen = |w| {
        let weight = Weight::Dense(w);
        Linear { weight, bias: None, weight_slot: None, bias_slot: None, lora: None, rows: None }
    };
    let full = |(w, slot)| Linear { weight_slot: Some(slot), ..frozen(w) };
    let router = full(take());
    let mut experts = Vec::new();
    for e in 0..E as u64 {
        let mut linears = Vec::new();
        for (j, (o, i)) in [(F, D), (F, D), (D, F)].into_iter().enumerate() {
            if e % 2 == 0 {
                linears.push(full(take()));
                continue;
            }
            let ((a, sa), (b, sb)) = (take(), take());
            let stream = 10 * e + j as u64;
            let lora =
                Lora { a, b, slots: Some((sa, sb)), scale: 0.5, dropout, stream, columns: None, dora: None };
            let weight = randn(stream + 100, (o, i), DType::F64)?;
            linears.push(Linear { lora: Some(lora), ..frozen(weight) });
        }
        let (Some(down), Some(up), Some(gate)) = (linears.pop(), linears.pop(), linears.pop()) else {
            candle_core::bail!("three linears")
        };
        experts.push(Mlp { gate, up: Some(up), down, stack: None, glu: Glu::default() });
    }
    let mlp = Mlp {
        gate: full(take()),
        up: Some(full(take())),
        down: full(take()),
        stack: None,
        glu: Glu::default(),
    };
    let mut mixture = Mixture::new(router, (experts, vec![1; E]), top_k, normalise);
    mixture.shared = Some(Shared { mlp, gate: full(take()) });
    Ok(mixture)
}

/// A routing no router here would choose; expert 3 is idle.
fn forced() -> Result<Arc<Groups>> {
    let chosen = (0..T as u32).flat_map(|t| [[0, 2], [4, 1], [1, 0]][t as usize % 3]).collect();
    Ok(Arc::new(Groups::new(chosen, 2, E, &Device::Cpu)?))
}

/// Compares all gradients on every execution path of the experts.
fn everything(dropout: f64, normalise: bool) -> Result<()> {
    let (ctx, groups, params) = (context(7)?, forced()?, params()?);
    let (x, dy) = (randn(50, (T, D), DType::F64)?, randn(51, (T, D), DType::F64)?);
    let m = mixture(&params, dropout, 2, normalise)?;
    let (slots, len) = slots();
    // leftovers of an earlier step are overwritten or zeroed
    let grads = vec![Some(Tensor::full(7.0f64, len, &Device::Cpu)?)];
    let accum = GradAccumulator::new(&grads, slots.len()).over(slots.clone());
    let (_, saved) = m.forward(Inputs::both(&x), &ctx, Some(Arc::clone(&groups)))?;
    assert_eq!(saved.groups.expert, groups.expert, "a routing that is given is taken over");
    let dx = m.backward(saved, &dy, &ctx, &accum, None)?;
    accum.settle(None)?;
    let what = format!("dropout {dropout}, normalise {normalise}, {} threads", rayon::current_num_threads());
    let run = |m: &Mixture, x: &Tensor| Ok(m.forward(Inputs::both(x), &ctx, Some(Arc::clone(&groups)))?.0);
    gradient(&format!("{what}: x"), &x, &dx, &dy, |x| run(&m, x));
    assert!(accum.reached().iter().all(|r| *r), "an idle expert counts as reached");
    for (i, slot) in slots.iter().enumerate() {
        let grad = slot.view(grads[0].as_ref().expect("a buffer"))?;
        gradient(&format!("{what}: tensor {i}"), &params[i], &grad, &dy, |t| {
            let mut params = params.clone();
            params[i] = t.clone();
            run(&mixture(&params, dropout, 2, normalise)?, &x)
        });
    }
    let idle: Vec<Slot> = m.experts[3].linears().flat_map(Linear::slots).collect();
    assert_eq!(idle.len(), 6);
    for slot in idle {
        assert!(values(&slot.view(grads[0].as_ref().expect("a buffer"))?).iter().all(|g| *g == 0.0));
    }
    Ok(())
}

#[test]
fn gradients_of_a_mixture_match_finite_differences() -> Result<()> {
    // four experts have tokens: parallel with two threads, sequential with one
    for threads in [1, 2] {
        on(threads, || {
            assert_eq!(dispatch::side_by_side(4, &Device::Cpu), threads == 2);
            everything(0.0, true)?;
            everything(0.4, false)
        })?;
    }
    Ok(())
}

/// A mixture of equal experts with gates summing to one equals one expert; a fully open shared expert is
/// added.
#[test]
fn equal_experts_are_one_dense_block() -> Result<()> {
    let mut m = mixture(&params()?, 0.0, 3, true)?;
    m.experts = vec![m.experts[0].clone(); E];
    let x = randn(50, (T, D), DType::F64)?.abs()?;
    let shared = m.shared.as_mut().expect("a shared expert");
    shared.gate.weight = Weight::Dense(Tensor::full(1e3, (1, D), &Device::Cpu)?);
    let more = shared.mlp.forward(&Padded::of(&x)?, &context(0)?)?.0;
    let (y, _) = m.forward(Inputs::both(&x), &context(0)?, None)?;
    let one = m.experts[0].forward(&Padded::of(&x)?, &context(0)?)?.0;
    close(&y, &(&one + more)?, 1e-12);
    m.shared = None;
    close(&m.forward(Inputs::both(&x), &context(0)?, None)?.0, &one, 1e-12);
    Ok(())
}

/// Equal router rows make every choice a tie: lower experts win, and a replay under another router keeps
/// the decision.
#[test]
fn ties_between_experts_go_to_the_lower_and_are_kept() -> Result<()> {
    let mut p = params()?;
    p[0] = Tensor::ones((E, D), DType::F64, &Device::Cpu)?;
    let m = mixture(&p, 0.0, 2, false)?;
    let x = randn(50, (T, D), DType::F64)?;
    let ctx = context(0)?;
    let (y, saved) = m.forward(Inputs::both(&x), &ctx, None)?;
    assert_eq!(saved.groups.expert, [0, 1].repeat(T));
    // a router one rounding step away prefers the last experts
    p[0] =
        (&p[0] + Tensor::new(&[[0.0], [0.0], [0.0], [0.0], [1e-13]], &Device::Cpu)?.broadcast_as((E, D))?)?;
    let other = mixture(&p, 0.0, 2, false)?;
    assert_ne!(other.forward(Inputs::both(&x), &ctx, None)?.1.groups.expert, saved.groups.expert);
    let (again, replayed) = other.forward(Inputs::both(&x), &ctx, Some(Arc::clone(&saved.groups)))?;
    assert_eq!(replayed.groups.expert, saved.groups.expert);
    close(&again, &y, 1e-10);
    Ok(())
}

/// A token's dropout within an expert does not depend on the micro-batch.
#[test]
fn dropout_goes_by_token() -> Result<()> {
    let m = mixture(&params()?, 0.5, 2, true)?;
    let x = randn(50, (T, D), DType::F64)?;
    let (whole, _) = m.forward(Inputs::both(&x), &context(0)?, None)?;
    let (tail, _) = m.forward(Inputs::both(&x.narrow(0, 4, T - 4)?), &context(4)?, None)?;
    close(&tail, &whole.narrow(0, 4, T - 4)?, 1e-12);
    let (other, _) = m.forward(Inputs::both(&x.narrow(0, 4, T - 4)?), &context(5)?, None)?;
    assert_ne!(values(&other), values(&tail));
    Ok(())
}
