//! Results of every operation, on a device and on the CPU.

use super::report::{Report, randn};
use anyhow::{Context, Result};
use candle_core::{DType, Device};
use ft::kernel::attention::{Causal, Sequences};
use ft::kernel::delta::{Heads, rule};
use ft::kernel::optimizer::{AdamW, adamw, sum_squares};
use ft::kernel::padded::Padded;
use ft::kernel::swiglu::{Activation, Glu, Joint};
use ft::kernel::{
    Tensor, attention, dispatch, dropout, embed, factors, gemm, loss, norm, rope, route, swiglu,
};
use ft::rng::{Purpose, Stream};

type Results = Vec<(String, Tensor)>;

/// Compares all operations.
pub fn check(device: &Device, dtype: DType, bar: f64, report: &mut Report) -> Result<()> {
    let all = [
        matmuls, adapters, norms, ropes, swiglus, attentions, deltas, embeddings, losses, dropouts, experts,
        updates,
    ];
    for results in all {
        let (mut mine, mut cpu) = (Vec::new(), Vec::new());
        results(device, dtype, &mut mine)?;
        results(&Device::Cpu, dtype, &mut cpu)?;
        for ((name, a), (_, b)) in mine.iter().zip(&cpu) {
            report.tensors(&format!("{name} {}", format!("{dtype:?}").to_lowercase()), a, b, bar)?;
        }
    }
    Ok(())
}

/// Token ids below 50.
fn ids(device: &Device) -> Result<Tensor> {
    let ids: Vec<u32> = (0..130).map(|i| (i * i) % 50).collect();
    Ok(Tensor::new(ids, device)?)
}

fn matmuls(device: &Device, dtype: DType, out: &mut Results) -> Result<()> {
    let r = |seed, shape: &[usize]| randn(seed, shape, dtype, device);
    let (x, w, dy) = (r(1, &[130, 96])?, r(2, &[64, 96])?, r(3, &[130, 64])?);
    out.push(("matmul, x w^T".into(), gemm::matmul(&x, false, &w, true)?));
    out.push(("matmul, dy w".into(), gemm::matmul(&dy, false, &w, false)?));
    let flat = Tensor::ones(64 * 96 + 32, DType::F32, device)?;
    let grad = flat.narrow(0, 32, 64 * 96)?.reshape((64, 96))?;
    gemm::matmul_acc(&grad, &dy, true, &x, false, 0.5)?;
    out.push(("matmul, += dy^T x in f32".into(), flat));
    for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
        let pair = |t: bool, rows, cols| if t { [cols, rows] } else { [rows, cols] };
        let (a, b) = (r(23, &pair(ta, 70, 96))?, r(24, &pair(tb, 96, 50))?);
        let c = r(25, &[70, 50])?;
        gemm::matmul_acc(&c, &a, ta, &b, tb, 0.5)?;
        out.push((format!("matmul, += a b, transposed {ta} {tb}"), c));
    }
    Ok(())
}

/// Gradients of LoRA's factors: one kernel in half precision on CUDA, two products elsewhere.
fn adapters(device: &Device, dtype: DType, out: &mut Results) -> Result<()> {
    let r = |seed, shape: &[usize]| randn(seed, shape, dtype, device);
    for (i, (t, o, rank)) in [(9, 8, 4), (300, 584, 16), (130, 1024, 31)].into_iter().enumerate() {
        let seed = 200 + 10 * i as u64;
        let (dy, b, u) = (r(seed, &[t, o])?, r(seed + 1, &[o, rank])?, r(seed + 2, &[t, rank])?);
        let grad = Tensor::ones((o, rank), DType::F32, device)?;
        let du = if factors::takes(&dy, &b)? {
            let du = r(seed + 3, &[t, rank])?;
            factors::gradients(&dy, (&b, 0.5), &du, (&u, 2.0), (&grad, true))?;
            du
        } else {
            gemm::matmul_acc(&grad, &dy, true, &u, false, 2.0)?;
            gemm::matmul_scaled(&dy, false, &b, false, 0.5)?
        };
        out.push((format!("du of rank {rank}"), du));
        out.push((format!("dB of rank {rank}, added"), grad));
    }
    Ok(())
}

fn norms(device: &Device, dtype: DType, out: &mut Results) -> Result<()> {
    let r = |seed, shape: &[usize]| randn(seed, shape, dtype, device);
    // rows aligned to 16 bytes, unaligned rows, many rows per block, and a row too
    // long for the registers of a block
    for (i, (rows, d)) in [(130, 96), (1100, 33), (3, 2048), (2, 20_000)].into_iter().enumerate() {
        let seed = 100 + 10 * i as u64;
        let (x, w, a, dy) =
            (r(seed, &[rows, d])?, r(seed + 1, &[d])?, r(seed + 2, &[rows, d])?, r(seed + 3, &[rows, d])?);
        let of = norm::Scale { plus: (i % 2) as f64, ..norm::Scale::new(&w, 1e-6) };
        let mut give = |what: &str, t: Tensor| out.push((format!("rms norm {rows} x {d}, {what}"), t));
        give("y", norm::forward(&x, of)?);
        let (sum, y) = norm::forward_add(&x, a.clone(), of, 8)?;
        give("sum", sum);
        give("y of the sum", y.values()?);
        let (dx, dw) = norm::backward(&x, of, &dy, true)?;
        give("dx", dx);
        give("dw", dw.context("dw")?.sum_keepdim(0)?);
        let (dx, _) = norm::backward_add(&x, of, &dy, &Padded::of(&a)?, false, 8)?;
        give("dx and more", dx.values()?);
    }
    Ok(())
}

fn ropes(device: &Device, dtype: DType, out: &mut Results) -> Result<()> {
    let r = |seed, shape: &[usize]| randn(seed, shape, dtype, device);
    let wide = |seed, shape: &[usize]| randn(seed, shape, DType::F32, device);
    for (i, (tokens, heads, kv_heads, c)) in
        [(130, 4, 2, 16), (7, 3, 3, 10), (300, 5, 1, 128), (9, 2, 2, 256), (6, 8, 2, 96)]
            .into_iter()
            .enumerate()
    {
        let seed = 200 + 20 * i as u64;
        // every second case rotates a part of the channels
        let angle = wide(seed, &[tokens, if i % 2 == 0 { c / 2 } else { (c / 4).max(1) }])?;
        let (cos, sin) = (angle.cos()?, angle.sin()?);
        let (q, k) = (r(seed + 1, &[tokens, heads, c])?, r(seed + 2, &[tokens, kv_heads, c])?);
        let (dq, dk) = (r(seed + 3, &[tokens, heads, c])?, r(seed + 4, &[tokens, kv_heads, c])?);
        let (wq, wk) = (r(seed + 5, &[c])?, r(seed + 6, &[c])?);
        let norms = rope::Norms { q: norm::Scale::new(&wq, 1e-6), k: norm::Scale::new(&wk, 1e-5) };
        let mut give = |what: &str, t: Tensor| {
            out.push((format!("rope {tokens} x {heads}, {kv_heads} x {c}, {what}"), t))
        };
        for norms in [None, Some(norms)] {
            let what = if norms.is_some() { "normed" } else { "plain" };
            let [yq, yk] = rope::forward(q.clone(), k.clone(), norms, &cos, &sin)?;
            give(&format!("{what}, q"), yq);
            give(&format!("{what}, k"), yk);
            for want in [false, true] {
                let before = norms.map(|n| (&q, &k, n));
                let ([dq, dk], dw) =
                    rope::backward(before, &cos, &sin, dq.clone(), dk.clone(), [want; 2], [8, 0])?;
                give(&format!("{what}, dq"), dq.values()?);
                give(&format!("{what}, dk"), dk.values()?);
                for dw in dw.into_iter().flatten() {
                    give("dw", dw.sum_keepdim(0)?);
                }
            }
        }
    }
    Ok(())
}

fn swiglus(device: &Device, dtype: DType, out: &mut Results) -> Result<()> {
    let r = |seed, shape: &[usize]| randn(seed, shape, dtype, device);
    let x = r(1, &[130, 96])?;
    let (up, dh) = (r(8, &[130, 96])?, r(9, &[130, 96])?);
    let half = r(13, &[130, 48])?;
    let clamped = Activation::Clamped { alpha: 1.702, limit: 0.8 };
    let activations = [
        ("swiglu", Activation::Silu),
        ("geglu", Activation::GeluTanh),
        ("clamped", clamped),
        ("sigmoid", Activation::Sigmoid),
    ];
    for (name, activation) in activations {
        let glu = Glu { activation, joint: Joint::Halves };
        let mut put = |what: &str, t: Tensor| out.push((format!("{name}{what}"), t));
        put("", swiglu::forward(glu, &x, Some(&up))?);
        let (dgate, dup) = swiglu::backward_pair(glu, &x, &up, &dh)?;
        put(", dgate", dgate);
        put(", dup", dup);
        let (dgate, dup, again) = swiglu::backward_again(glu, &x, Some(&up), dh.copy()?, [0, 8])?;
        put(", dgate again", dgate.values()?);
        if let Some(dup) = dup {
            put(", dup with room", dup.values()?);
        }
        put(", again", again);
        put(" with room", swiglu::forward_padded(glu, &x, Some(&up), 8)?.values()?);
        for joint in [Joint::Halves, Joint::Interleaved] {
            let glu = Glu { activation, joint };
            put(&format!(", {joint:?}"), swiglu::forward(glu, &x, None)?);
            let (d, _, again) = swiglu::backward_again(glu, &x, None, half.copy()?, [8, 0])?;
            put(&format!(", {joint:?}, gradient"), d.values()?);
            put(&format!(", {joint:?}, again"), again);
        }
    }
    Ok(())
}

fn attentions(device: &Device, dtype: DType, out: &mut Results) -> Result<()> {
    let r = |seed, shape: &[usize]| randn(seed, shape, dtype, device);
    let seqs = Sequences::new(&[70, 1, 59], 0, device)?;
    // the last has warps that share rows, and does not fill the channels of their kernels
    for (c, window) in [(16, None), (16, Some(20)), (264, None)] {
        let q = r(7, &[130, 4, c])?;
        let (k, v, d_o) = (r(10, &[130, 2, c])?, r(11, &[130, 2, c])?, r(12, &[130, 4, c])?);
        let name = format!("attention, heads of {c}{}", if window.is_some() { ", window" } else { "" });
        let how = Causal { seqs: &seqs, window, scale: 1.0 / (c as f64).sqrt() };
        let saved = attention::forward(&q, &k, &v, &how, 8)?;
        let with_sinks = attention::forward(&q, &k, &v, &how, 8)?;
        let sinks = r(14, &[4])?;
        attention::sinks::forward(&with_sinks, &sinks)?;
        out.push((format!("{name}, o with sinks"), with_sinks.o.values()?));
        out.push((format!("{name}, sinks"), attention::sinks::backward(&with_sinks, &sinks, &d_o)?));
        let (dq, dk, dv) = attention::backward(&q, &k, &v, &saved, &d_o, &how, 8)?;
        // `[h, t]` on CUDA
        let lse = if device.is_cuda() { saved.lse.t()?.force_contiguous()? } else { saved.lse.clone() };
        for (part, t) in
            [("o", saved.o.values()?), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv.values()?)]
        {
            out.push((format!("{name}, {part}"), t));
        }
    }
    Ok(())
}

fn deltas(device: &Device, dtype: DType, out: &mut Results) -> Result<()> {
    let r = |seed, shape: &[usize]| randn(seed, shape, dtype, device);
    let seqs = Sequences::new(&[70, 1, 59], 0, device)?;
    for heads in [
        Heads { keys: 1, values: 2, key_dim: 128, value_dim: 128 },
        Heads { keys: 2, values: 2, key_dim: 50, value_dim: 20 },
    ] {
        let (qkv, a, b) = (r(1, &[130, heads.channels()])?, r(2, &[130, 2])?, r(3, &[130, 2])?);
        let (a_log, bias, d_o) = (r(4, &[2])?, r(5, &[2])?, r(6, &[130, heads.value_width()])?);
        let x = rule::Inputs { heads, qkv: &qkv, a: &a, b: &b, a_log: &a_log, bias: &bias };
        let mut give = |part: &str, t| out.push((format!("delta rule of {heads:?}, {part}"), t));
        give("o", rule::forward(&x, &seqs, None)?);
        let d = rule::backward(&x, &d_o, &seqs)?;
        give("d_qkv", d.qkv);
        give("da", d.a);
        give("db", d.b);
        // gradients of a_log and the bias are sums that cancel: tests/gpu compares them with PyTorch's
    }
    Ok(())
}

fn embeddings(device: &Device, dtype: DType, out: &mut Results) -> Result<()> {
    let r = |seed, shape: &[usize]| randn(seed, shape, dtype, device);
    let ids = ids(device)?;
    let table = r(13, &[50, 96])?;
    out.push(("embedding".into(), embed::forward(&table, &ids)?));
    let dtable = Tensor::zeros((50, 96), DType::F32, device)?;
    let by_id = embed::ById::new(&ids.to_vec1::<u32>()?);
    embed::backward(&dtable, (&ids, Some(&by_id), None), &r(5, &[130, 96])?, 1.0)?;
    out.push(("embedding, dtable".into(), dtable));
    Ok(())
}

fn losses(device: &Device, dtype: DType, out: &mut Results) -> Result<()> {
    let wide = |seed, shape: &[usize]| randn(seed, shape, DType::F32, device);
    let ids = ids(device)?;
    let own = wide(15, &[130])?;
    let cases = [
        ("cross entropy", None, None),
        ("cross entropy, weighted", Some(&own), None),
        ("cross entropy, limited", None, Some(2.0)),
    ];
    for (what, weights, cap) in cases {
        let gradient = loss::Gradient { scale: 0.1, weights, dtype };
        let (losses, dlogits) = loss::cross_entropy(wide(14, &[130, 50])?, cap, &ids, Some(gradient))?;
        out.push((what.into(), losses));
        out.push((format!("{what}, dlogits"), dlogits.context("dlogits")?));
    }
    let kept: Vec<u32> = (0..130 * 8).map(|i| (i / 8 + i % 8 * 6) % 50).collect();
    let kept = Tensor::from_vec(kept, (130, 8), device)?;
    let probs = Tensor::full(0.125f32, (130, 8), device)?;
    let teacher = loss::Teacher { ids: &kept, probs: &probs, temperature: 2.0, alpha: 0.7 };
    let gradient = loss::Gradient { scale: 0.1, weights: Some(&own), dtype };
    let logits = wide(14, &[130, 50])?;
    let ([ce, kd], dlogits) = loss::distillation(logits, Some(2.0), &ids, teacher, Some(gradient))?;
    out.push(("distillation, cross entropy".into(), ce));
    out.push(("distillation, divergence".into(), kd));
    out.push(("distillation, dlogits".into(), dlogits.context("dlogits")?));
    Ok(())
}

fn dropouts(device: &Device, dtype: DType, out: &mut Results) -> Result<()> {
    let r = |seed, shape: &[usize]| randn(seed, shape, dtype, device);
    let stream = Stream::new(1, Purpose::Dropout, 2, 3);
    let ones = r(5, &[130, 96])?.affine(0.0, 1.0)?;
    for (what, x) in [("dropout", &ones), ("dropout, odd width", &ones.narrow(1, 0, 55)?.force_contiguous()?)]
    {
        let rows = dropout::Rows { first: 5, list: None };
        let (mask, _) = dropout::mask(stream, (rows, (0, x.dim(1)?)), 0.25, x)?;
        out.push((what.into(), mask.of(x)?));
        out.push((format!("{what}, added"), mask.add(x.clone(), x.clone())?));
    }
    let list: Vec<u32> = (0..130).rev().collect();
    let rows = dropout::Rows { first: 2, list: Some(&list) };
    let (mask, _) = dropout::mask(stream, (rows, (0, 96)), 0.25, &ones)?;
    out.push(("dropout, rows of a list".into(), mask.of(&ones)?));
    Ok(())
}

fn experts(device: &Device, dtype: DType, out: &mut Results) -> Result<()> {
    let wide = |seed, shape: &[usize]| randn(seed, shape, DType::F32, device);
    let (probs, lse) = route::softmax(&wide(19, &[130, 10])?)?;
    let chosen = route::choose(&probs, 3)?;
    let gates = route::gates(&probs, &chosen, 3, true)?;
    let routed =
        route::RouterOutput { probs: &probs, lse: &lse, gates: &gates, chosen: &chosen, normalise: true };
    let balance = route::Balance { dp: (0..10).map(f64::from).collect(), z: 0.1, on_device: None };
    let dlogits = route::backward(&routed, &wide(20, &[130, 3])?, Some(&balance))?;
    let groups = dispatch::Groups::new(chosen.clone(), 3, 10, device)?;
    let (x, dy) = (randn(21, &[130, 96], dtype, device)?, randn(22, &[130, 96], dtype, device)?);
    let rows = groups.gather(&x)?;
    let runs = groups.runs();
    let parts = runs.iter().map(|r| rows.narrow(0, r.start, r.rows)).collect::<Result<Vec<_>, _>>()?;
    let scaled = runs.iter().map(|r| groups.gather_scaled(&dy, &gates, r)).collect::<Result<Vec<_>, _>>()?;
    out.push(("router, gates".into(), gates.clone()));
    out.push(("router, dlogits".into(), dlogits));
    out.push(("router, choice".into(), Tensor::new(chosen, device)?.to_dtype(dtype)?));
    out.push(("experts, combined".into(), groups.combine(&parts, Some(&gates), dtype)?));
    out.push(("experts, dgates".into(), groups.dots(&parts, &dy)?));
    out.push(("experts, drows".into(), Tensor::cat(&scaled, 0)?));
    Ok(())
}

fn updates(device: &Device, dtype: DType, out: &mut Results) -> Result<()> {
    let wide = |seed, shape: &[usize]| randn(seed, shape, DType::F32, device);
    let (p, m, v) = (wide(15, &[1000])?, wide(16, &[1000])?, wide(17, &[1000])?.sqr()?);
    let gr = wide(18, &[1000])?;
    // before the update, which zeroes the gradients on a device
    let norm = sum_squares(std::slice::from_ref(&gr))?;
    let step = AdamW { lr: 1e-2, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.1, t: 3, grad_scale: 0.5 };
    let copy = Tensor::zeros(1000, dtype, device)?;
    adamw(&p, &m, &v, &gr, Some(&copy), &step)?;
    out.push(("adamw, copy".into(), copy));
    out.push(("adamw, weights".into(), p));
    out.push(("adamw, moments".into(), Tensor::cat(&[m, v], 0)?));
    out.push(("sum of squares".into(), Tensor::new(&[norm as f32], device)?));
    Ok(())
}
