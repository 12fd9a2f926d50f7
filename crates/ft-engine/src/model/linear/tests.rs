use super::*;
use crate::model::pass::batch::DropoutKey;
use crate::model::pass::grad_accumulator::GradAccumulator;
use crate::quant::{CodeTables, Encoded};
use candle_core::DType;
use candle_core::Device;
use ft_kernels::attention::Sequences;
use ft_kernels::check::{close, gradient, randn};
use ft_kernels::padded::Padded;
use std::sync::Arc;

const T: usize = 5;
const I: usize = 6;
const O: usize = 4;
const R: usize = 3;

fn context(dropout: bool) -> Result<Context<'static>> {
    let d = &Device::Cpu;
    let dropout = dropout.then_some(DropoutKey { seed: 3, step: 1, first_row: 7 });
    let seqs = Sequences::new(&[T], 0, d)?;
    Ok(Context::new(seqs, Vec::new(), dropout))
}

/// Slots of weight, bias, A, B and magnitude, end to end in one buffer.
fn slots() -> (Vec<Slot>, usize) {
    Slot::end_to_end([(O, I), (1, O), (R, I), (O, R), (1, O)])
}

/// A matrix in NF4, dequantized to f64.
fn nf4(w: &Tensor) -> Result<Weight> {
    let values = w.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let encoded = Encoded::new("w", &values, w.dims2()?, DType::F32).map_err(candle_core::Error::wrap)?;
    Ok(Weight::Nf4(Arc::new(encoded.into_matrix(true, DType::F64, &mut CodeTables::new(&Device::Cpu)?)?)))
}

fn linear(kind: &str) -> Result<Linear> {
    let f64s = |seed, shape: (usize, usize)| randn(seed, shape, DType::F64);
    let (s, _) = slots();
    let weight = match kind.contains("nf4") {
        true => nf4(&f64s(1, (O, I))?)?,
        false => Weight::Dense(f64s(1, (O, I))?),
    };
    let row_squares = weight.row_squares()?;
    let dora = Dora { magnitude: f64s(5, (1, O))?, slot: Some(s[4]), row_squares };
    let full = kind == "full";
    Ok(Linear {
        weight,
        bias: Some(f64s(2, (1, O))?.squeeze(0)?),
        weight_slot: full.then_some(s[0]),
        bias_slot: full.then_some(s[1]),
        lora: (!full).then_some(Lora {
            a: f64s(3, (R, I))?,
            b: f64s(4, (O, R))?,
            slots: Some((s[2], s[3])),
            scale: 0.7,
            dropout: if kind.contains("dropout") { 0.4 } else { 0.0 },
            stream: 1,
            columns: None,
            dora: kind.contains("dora").then_some(dora),
        }),
        rows: None,
    })
}

/// Replaces a tensor of a linear, by slot; DoRA's row squares stay unchanged.
fn with(l: &Linear, index: usize, t: &Tensor) -> Result<Linear> {
    let mut l = l.clone();
    match (index, &mut l.lora) {
        (0, _) => l.weight = Weight::Dense(t.clone()),
        (1, _) => l.bias = Some(t.squeeze(0)?),
        (2, Some(lora)) => lora.a = t.clone(),
        (3, Some(lora)) => lora.b = t.clone(),
        (4, Some(Lora { dora: Some(d), .. })) => d.magnitude = t.clone(),
        _ => candle_core::bail!("no tensor {index}"),
    }
    Ok(l)
}

#[test]
fn gradients_of_linears_match_finite_differences() -> Result<()> {
    for kind in [
        "full",
        "lora",
        "lora dropout",
        "dora",
        "dora dropout",
        "nf4 lora",
        "nf4 lora dropout",
        "nf4 dora",
        "nf4 dora dropout",
    ] {
        let l = linear(kind)?;
        let ctx = context(kind.contains("dropout"))?;
        let (x, dy) = (randn(10, (T, I), DType::F64)?, randn(11, (T, O), DType::F64)?);
        let (slots, len) = slots();
        let grads = vec![Some(Tensor::zeros(len, DType::F64, &Device::Cpu)?)];
        let accum = GradAccumulator::new(&grads, 5);
        let (_, saved) = l.forward(&x, &ctx)?;
        let dx = l.backward(&saved, &dy, &ctx, &accum, None)?;
        gradient(&format!("{kind}: x"), &x, &dx, &dy, |x| Ok(l.forward(x, &ctx)?.0));
        // added to existing values
        let more = l.backward(&saved, &dy, &ctx, &GradAccumulator::new(&grads, 5), Some(dx.copy()?))?;
        close(&more, &(&dx * 2.0)?, 1e-12);
        let reached = accum.reached();
        for (i, slot) in slots.iter().enumerate().filter(|(i, _)| reached[*i]) {
            let flat = grads[0].as_ref().expect("a buffer");
            let grad = (slot.view(flat)? / 2.0)?;
            let own = |l: &Linear| -> Result<Tensor> {
                Ok(match (i, &l.weight, &l.lora) {
                    (0, Weight::Dense(w), _) => w.clone(),
                    (1, _, _) => l.bias.clone().expect("a bias").unsqueeze(0)?,
                    (2, _, Some(lora)) => lora.a.clone(),
                    (3, _, Some(lora)) => lora.b.clone(),
                    (_, _, Some(lora)) => lora.dora.clone().expect("dora").magnitude,
                    _ => candle_core::bail!("no tensor {i}"),
                })
            };
            // PEFT treats DoRA's norm as a constant: hold it while A and B vary
            let frozen = frozen_norm(&l)?;
            gradient(&format!("{kind}: tensor {i}"), &own(&l)?, &grad, &dy, |t| {
                let moved = with(&l, i, t)?;
                Ok(match &frozen {
                    Some(n) => with_norm(&moved, n)?.forward(&x, &ctx)?.0,
                    None => moved.forward(&x, &ctx)?.0,
                })
            });
        }
        let want = if kind.contains("dora") { 3 } else { 2 };
        assert_eq!(reached.iter().filter(|r| **r).count(), want, "{kind}");
    }
    Ok(())
}

fn frozen_norm(l: &Linear) -> Result<Option<Tensor>> {
    let Some(lora @ Lora { dora: Some(d), .. }) = &l.lora else { return Ok(None) };
    lora.norms(&l.weight, &d.row_squares).map(Some)
}

/// Chooses `|W|^2` such that the norm of the perturbed linear is `n`.
fn with_norm(l: &Linear, n: &Tensor) -> Result<Linear> {
    let mut l = l.clone();
    if let Some(lora @ Lora { dora: Some(_), .. }) = &l.lora {
        // norms(0)^2 = cross and own terms only; possibly negative, so compute from a shifted square
        let shift = 1e3;
        let terms = (lora.norms(&l.weight, &(n.zeros_like()? + shift)?)?.sqr()? - shift)?;
        let squares = (n.sqr()? - terms)?;
        if let Some(Lora { dora: Some(d), .. }) = &mut l.lora {
            d.row_squares = squares;
        }
    }
    Ok(l)
}

/// Relative error common to all values of a column, or to all values (`whole`). Rounding errors of single
/// values average out; a rounded factor does not.
fn bias(got: &Tensor, want: &Tensor, whole: bool) -> Result<f64> {
    let lay = |t: &Tensor| match whole {
        true => t.to_dtype(DType::F64)?.reshape((t.elem_count(), 1)),
        false => t.to_dtype(DType::F64),
    };
    let (got, want) = (lay(got)?, lay(want)?);
    let share = ((&got * &want)?.sum(0)? / want.sqr()?.sum(0)?)?;
    Ok(share.to_vec1::<f64>()?.iter().map(|s| (s - 1.0).abs()).fold(0.0, f64::max))
}

/// In bf16, alpha / rank, 1 / (1 - p) and DoRA's gain are not rounded to bf16: forward, dx, dA, dB and dm
/// match the factors of f64.
#[test]
fn factors_are_not_rounded_to_half_precision() -> Result<()> {
    let (t, i, o, r) = (512, 24, 8, 6);
    for kind in ["lora", "lora dropout", "dora", "dora dropout"] {
        // the same values for both
        let value = |seed, shape: (usize, usize)| randn(seed, shape, DType::BF16)?.to_dtype(DType::F64);
        let w = if kind.contains("dora") {
            value(1, (o, i))?
        } else {
            Tensor::zeros((o, i), DType::F64, &Device::Cpu)?
        };
        let (a, b, m) = (value(3, (r, i))?, value(4, (o, r))?, (value(5, (1, o))?.abs()? + 1.0 / 3.0)?);
        let m = m.to_dtype(DType::F32)?.to_dtype(DType::F64)?;
        let (x, dy) = (value(10, (t, i))?, value(11, (t, o))?);
        let (slots, len) = Slot::end_to_end([(r, i), (o, r), (1, o)]);
        let run = |dtype: DType| -> Result<Vec<Tensor>> {
            let weight = Weight::Dense(w.to_dtype(dtype)?);
            let sums = if dtype == DType::F64 { dtype } else { DType::F32 };
            let row_squares = weight.row_squares()?;
            let dora = Dora { magnitude: m.to_dtype(sums)?, slot: Some(slots[2]), row_squares };
            let l = Linear {
                weight,
                bias: None,
                weight_slot: None,
                rows: None,
                bias_slot: None,
                lora: Some(Lora {
                    a: a.to_dtype(dtype)?,
                    b: b.to_dtype(dtype)?,
                    slots: Some((slots[0], slots[1])),
                    scale: 4.0 / 3.0,
                    dropout: if kind.contains("dropout") { 0.1 } else { 0.0 },
                    stream: 1,
                    columns: None,
                    dora: kind.contains("dora").then_some(dora),
                }),
            };
            let (x, dy) = (x.to_dtype(dtype)?, dy.to_dtype(dtype)?);
            let ctx = context(true)?;
            let grads = vec![Some(Tensor::zeros(len, sums, &Device::Cpu)?)];
            let (y, saved) = l.forward(&x, &ctx)?;
            let dx = l.backward(&saved, &dy, &ctx, &GradAccumulator::new(&grads, 3), None)?;
            let trained = if kind.contains("dora") { &slots[..] } else { &slots[..2] };
            let flat = grads[0].as_ref().expect("a buffer");
            let grads = trained.iter().map(|s| s.view(flat)).collect::<Result<Vec<_>>>()?;
            Ok([vec![y, dx], grads].concat())
        };
        let (got, want) = (run(DType::BF16)?, run(DType::F64)?);
        for (what, (got, want)) in ["y", "dx", "dA", "dB", "dm"].iter().zip(got.iter().zip(&want)) {
            // gradients are sums over all tokens, with few independent values
            let off = bias(got, want, what.starts_with('d') && *what != "dx")?;
            let bar = if *what == "dm" { 3e-3 } else { 8e-4 };
            assert!(off < bar, "{kind}: {what}: {off:.1e}");
        }
    }
    Ok(())
}

#[test]
fn dora_norms_are_those_of_the_matrix() -> Result<()> {
    for kind in ["dora", "nf4 dora"] {
        let l = linear(kind)?;
        let lora = l.lora.as_ref().expect("lora");
        let w = l.weight.rows(0..O)?;
        let merged = (w + (lora.b.matmul(&lora.a)? * lora.scale)?)?;
        let want = merged.sqr()?.sum(1)?.sqrt()?;
        close(&lora.norms(&l.weight, &lora.dora.as_ref().expect("dora").row_squares)?, &want, 1e-12);
    }
    Ok(())
}

/// Columns of room are rounded up, rows are not: two factors of rank 4 fit beside a dense matrix, and not below it.
#[test]
fn a_dense_matrix_has_room_for_its_own_adapter() -> Result<()> {
    let w = Padded::copy_of(&randn(1, (20, 64), DType::F32)?, 4)?;
    assert_eq!((w.room(), w.room_below()), (8, 4));
    let (weight, dy) = (Weight::Padded(w), randn(2, (3, 20), DType::F32)?);
    assert!(weight.merges(&dy, 4) && !weight.merges(&dy, 8));
    Ok(())
}
