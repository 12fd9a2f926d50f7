//! Compares all CUDA kernels and the reference models with the CPU, and measures the 4-bit kernels.
//!
//! ```text
//! cargo run --release --features cuda --example gpu_check -- tests/fixtures/reference
//! gpu_check FIXTURES kernels models   selected parts: kernels, four_bit, models, offload, speed
//! gpu_check BIN instructions          asm instructions against the host twin; BIN from `.ci/gpu bundle`
//! gpu_check FIXTURES cpu              CPU against CPU: a check of this program
//! ```
//!
//! Prints one line per check (relative L2 distance, tolerance) and exits with 1 if a
//! distance exceeds the tolerance.

mod four_bit;
#[cfg(feature = "cuda")]
mod instructions;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use ft::adapters::Adapter;
use ft::adapters::{Choice, Selection};
use ft::base::Base;
use ft::kernel::attention::{Causal, Sequences};
use ft::kernel::optimizer::{AdamW, adamw, sum_squares};
use ft::kernel::padded::Padded;
use ft::kernel::{Real, Tensor, attention, dropout, embed, gemm, group, loss, norm, rope, route, swiglu};
use ft::model::batch::HostBatch;
use ft::model::sink::Sink;
use ft::model::{Batch, Config, Decoder};
use ft::optim::Optimizer;
use ft::params::Allocate;
use ft::params::Params;
use ft::params::build::Build;
use ft::recipe::Recipe;
use ft::rng::{Purpose, Stream};
use ft::walk::Walk;
use std::path::{Path, PathBuf};

/// Tolerances in f32 (without TF32) and in bf16, with products rounded to an 8-bit mantissa.
const BARS: [(DType, f64); 2] = [(DType::F32, 1e-5), (DType::BF16, 3e-2)];

/// Parts that can be selected; `instructions` runs only on request.
const PARTS: [&str; 6] = ["instructions", "kernels", "four_bit", "models", "offload", "speed"];

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [dir, asked @ ..] = args.as_slice() else { bail!("usage: gpu_check FIXTURES [PART ..] [cpu]") };
    let dir = Path::new(dir);
    if let Some(other) = asked.iter().find(|a| *a != "cpu" && !PARTS.contains(&a.as_str())) {
        bail!("no part {other:?}; there are {PARTS:?}");
    }
    let device = match asked.iter().any(|a| a == "cpu") {
        true => Device::Cpu,
        false => ft::kernel::cuda::open(0).map_err(anyhow::Error::msg)?,
    };
    let named = |part: &str| asked.iter().any(|a| a == part);
    let all = !PARTS.iter().any(|p| named(p));
    let mut report = Report { over: 0, checks: 0 };
    if named("instructions") {
        check_instructions(&device, dir, &mut report)?;
    }
    for (dtype, bar) in BARS {
        if all || named("kernels") {
            ops(&device, dtype, bar, &mut report)?;
        }
        if all || named("four_bit") {
            four_bit::check(&device, dtype, bar, &mut report)?;
        }
    }
    if all || named("four_bit") {
        four_bit::check(&device, DType::F16, 4e-3, &mut report)?;
    }
    if all || named("models") {
        for model_dir in fixtures(dir)? {
            model(&model_dir, &device, &mut report)?;
        }
    }
    if all || named("offload") {
        offload(fixtures(dir)?.first().context("no fixtures")?, &device, &mut report)?;
    }
    if (all && device.is_cuda()) || named("speed") {
        four_bit::speed(&device, &mut report)?;
    }
    println!("{} checks passed, {} failed", report.checks - report.over, report.over);
    if report.over > 0 { bail!("{} checks over their bar", report.over) } else { Ok(()) }
}

#[cfg(feature = "cuda")]
fn check_instructions(device: &Device, dir: &Path, report: &mut Report) -> Result<()> {
    instructions::check(device, dir, report)
}

#[cfg(not(feature = "cuda"))]
fn check_instructions(_: &Device, _: &Path, _: &mut Report) -> Result<()> {
    bail!("instructions are a CUDA device's, and this is built without the `cuda` feature")
}

fn fixtures(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(dir)?.map(|e| Ok(e?.path())).collect::<Result<_>>()?;
    dirs.sort();
    Ok(dirs)
}

struct Report {
    over: usize,
    checks: usize,
}

impl Report {
    fn line(&mut self, what: &str, apart: f64, bar: f64) {
        self.checks += 1;
        let ok = apart <= bar;
        self.over += usize::from(!ok);
        println!("{}  {what:<44} {apart:.1e}  (bar {bar:.0e})", if ok { "ok  " } else { "OVER" });
    }

    fn tensors(&mut self, what: &str, a: &Tensor, b: &Tensor, bar: f64) -> Result<()> {
        self.line(what, ft::train::logits_apart(a.real()?, b.real()?)?, bar);
        Ok(())
    }
}

/// Standard normal values on a device.
fn randn(seed: u64, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let s = Stream::new(seed, Purpose::Test, 0, 0);
    let n: usize = shape.iter().product();
    let v: Vec<f32> = (0..n as u64).map(|i| s.normal(i)).collect();
    Ok(Tensor::Real(Real::from_vec(v, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?))
}

/// Named results of every operation on a device.
fn results(device: &Device, dtype: DType) -> Result<Vec<(String, Tensor)>> {
    let mut out: Vec<(String, Tensor)> = Vec::new();
    let r = |seed, shape: &[usize]| randn(seed, shape, dtype, device);
    let wide = |seed, shape: &[usize]| randn(seed, shape, DType::F32, device);

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

    let dn = r(5, &[130, 96])?;
    // rows aligned to 16 bytes, unaligned rows, many rows per block, and a row too
    // long for the registers of a block
    for (i, (rows, d)) in [(130, 96), (1100, 33), (3, 2048), (2, 20_000)].into_iter().enumerate() {
        let seed = 100 + 10 * i as u64;
        let (x, w, a, dy) =
            (r(seed, &[rows, d])?, r(seed + 1, &[d])?, r(seed + 2, &[rows, d])?, r(seed + 3, &[rows, d])?);
        let mut give = |what: &str, t: Tensor| out.push((format!("rms norm {rows} x {d}, {what}"), t));
        give("y", norm::forward(&x, &w, 1e-6)?);
        let (sum, y) = norm::forward_add(&x, a.clone(), &w, 1e-6, 8)?;
        give("sum", sum);
        give("y of the sum", y.values()?);
        let (dx, dw) = norm::backward(&x, &w, 1e-6, &dy, true)?;
        give("dx", dx);
        give("dw", dw.context("dw")?.sum_keepdim(0)?);
        let (dx, _) = norm::backward_add(&x, &w, 1e-6, &dy, &Padded::of(&a)?, false, 8)?;
        give("dx and more", dx.values()?);
    }

    let q3 = r(7, &[130, 4, 16])?;
    for (i, (tokens, heads, kv_heads, c)) in
        [(130, 4, 2, 16), (7, 3, 3, 10), (300, 5, 1, 128), (9, 2, 2, 256), (6, 8, 2, 96)]
            .into_iter()
            .enumerate()
    {
        let seed = 200 + 20 * i as u64;
        let angle = wide(seed, &[tokens, c / 2])?;
        let (cos, sin) = (angle.cos()?, angle.sin()?);
        let (q, k) = (r(seed + 1, &[tokens, heads, c])?, r(seed + 2, &[tokens, kv_heads, c])?);
        let (dq, dk) = (r(seed + 3, &[tokens, heads, c])?, r(seed + 4, &[tokens, kv_heads, c])?);
        let (wq, wk) = (r(seed + 5, &[c])?, r(seed + 6, &[c])?);
        let norms = rope::Norms { q: (&wq, 1e-6), k: (&wk, 1e-5) };
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

    let (up, dh) = (r(8, &[130, 96])?, r(9, &[130, 96])?);
    out.push(("swiglu".into(), swiglu::forward(&x, &up)?));
    let (dgate, dup) = swiglu::backward(&x, &up, &dh)?;
    out.push(("swiglu, dgate".into(), dgate));
    out.push(("swiglu, dup".into(), dup));
    let (dgate, dup, again) = swiglu::backward_again(&x, &up, dh.copy()?, [0, 8])?;
    out.push(("swiglu, dgate again".into(), dgate.values()?));
    out.push(("swiglu, dup with room".into(), dup.values()?));
    out.push(("swiglu, again".into(), again));
    out.push(("swiglu with room".into(), swiglu::forward_padded(&x, &up, 8)?.values()?));

    let seqs = Sequences::new(&[70, 1, 59], 0, device)?;
    let (k, v, d_o) = (r(10, &[130, 2, 16])?, r(11, &[130, 2, 16])?, r(12, &[130, 4, 16])?);
    for window in [None, Some(20)] {
        let name = if window.is_some() { "attention, window" } else { "attention" };
        let how = Causal { seqs: &seqs, window, scale: 0.25 };
        let saved = attention::forward(&q3, &k, &v, &how, 8)?;
        let (dq, dk, dv) = attention::backward(&q3, &k, &v, &saved, &d_o, &how, 8)?;
        // `[h, t]` on CUDA
        let lse = if device.is_cuda() { saved.lse.t()?.force_contiguous()? } else { saved.lse.clone() };
        for (part, t) in
            [("o", saved.o.values()?), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv.values()?)]
        {
            out.push((format!("{name}, {part}"), t));
        }
    }

    let ids: Vec<u32> = (0..130).map(|i| (i * i) % 50).collect();
    let ids = Tensor::new(ids, device)?;
    let table = r(13, &[50, 96])?;
    out.push(("embedding".into(), embed::forward(&table, &ids)?));
    let dtable = Tensor::zeros((50, 96), DType::F32, device)?;
    let by_id = embed::ById::new(&ids.to_vec1::<u32>()?);
    embed::backward(&dtable, (&ids, Some(&by_id), None), &dn, 1.0)?;
    out.push(("embedding, dtable".into(), dtable));

    let (losses, dlogits) = loss::cross_entropy(wide(14, &[130, 50])?, &ids, Some((0.1, dtype)))?;
    out.push(("cross entropy".into(), losses));
    out.push(("cross entropy, dlogits".into(), dlogits.context("dlogits")?));

    let stream = Stream::new(1, Purpose::Dropout, 2, 3);
    let ones = dn.affine(0.0, 1.0)?;
    for (what, x) in [("dropout", &ones), ("dropout, odd width", &ones.narrow(1, 0, 55)?.force_contiguous()?)]
    {
        let (mask, _) = dropout::mask(stream, dropout::Rows::From { first: 5 }, 0.25, x)?;
        out.push((what.into(), mask.of(x)?));
        out.push((format!("{what}, added"), mask.add(x.clone(), x.clone())?));
    }
    let list: Vec<u32> = (0..130).rev().collect();
    let (mask, _) = dropout::mask(stream, dropout::Rows::These { first: 2, list: &list }, 0.25, &ones)?;
    out.push(("dropout, rows of a list".into(), mask.of(&ones)?));

    let (probs, lse) = route::softmax(&wide(19, &[130, 10])?)?;
    let chosen = route::choose(&probs, 3)?;
    let gates = route::gates(&probs, &chosen, 3, true)?;
    let routed =
        route::RouterOutput { probs: &probs, lse: &lse, gates: &gates, chosen: &chosen, normalise: true };
    let balance = route::Balance { dp: (0..10).map(f64::from).collect(), z: 0.1, on_device: None };
    let dlogits = route::backward(&routed, &wide(20, &[130, 3])?, Some(&balance))?;
    let groups = group::Groups::new(chosen.clone(), 3, 10, device)?;
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
    Ok(out)
}

fn ops(device: &Device, dtype: DType, bar: f64, report: &mut Report) -> Result<()> {
    let (mine, cpu) = (results(device, dtype)?, results(&Device::Cpu, dtype)?);
    for ((name, a), (_, b)) in mine.iter().zip(&cpu) {
        report.tensors(&format!("{name} {}", format!("{dtype:?}").to_lowercase()), a, b, bar)?;
    }
    Ok(())
}

/// Logits, losses and all gradients of a reference model, trained in full and with an adapter.
fn model(dir: &Path, device: &Device, report: &mut Report) -> Result<()> {
    let name = dir.file_name().map_or(String::new(), |n| n.to_string_lossy().into_owned());
    let config = Config::load(&dir.join("model"), &serde_json::Map::new())?;
    let base = Base::open(config.clone(), &dir.join("model"))?;
    // some mixtures of experts have no adapter
    let adapter = match dir.join("adapter_init") {
        d if d.is_dir() => Some(Adapter::open(&d)?),
        _ => None,
    };
    let mut full = Selection::frozen(&config);
    full.modules.iter_mut().for_each(|(_, c)| *c = Choice::Full { lr_scale: 1.0 });
    let lora = adapter.as_ref().map(|a| Selection::from_peft(&config, &a.config)).transpose()?;
    let with = lora.as_ref().zip(adapter.as_ref());
    let with =
        with.into_iter().flat_map(|(s, a)| [("lora", s, Some(a), false), ("lora on nf4", s, Some(a), true)]);
    for (kind, selection, adapter, quantize) in [("full", &full, None, false)].into_iter().chain(with) {
        let run = |device: &Device| -> Result<(f64, Tensor, Tensor)> {
            let base = base.clone().in_nf4(quantize);
            let allocate = Allocate { train: true, ..Allocate::default() };
            let build = Build::new(&base, selection).adapter(adapter).on(DType::F32, device);
            let (d, p) = build.allocate(allocate).run()?;
            forward_backward(&d, &p, device)
        };
        let (mine, cpu) = (run(device)?, run(&Device::Cpu)?);
        report.line(&format!("{name}, {kind}: loss"), (mine.0 - cpu.0).abs() / cpu.0, 1e-5);
        report.tensors(&format!("{name}, {kind}: logits"), &mine.1, &cpu.1, 1e-5)?;
        report.tensors(&format!("{name}, {kind}: gradients"), &mine.2, &cpu.2, 3e-5)?;
    }
    Ok(())
}

/// Optimizer steps with states on the host: compute buffers match the CPU bit for bit.
fn offload(dir: &Path, device: &Device, report: &mut Report) -> Result<()> {
    const RECIPE: &str = "[model]\nsource = \"m\"\n[[train]]\nmodules = [\"mlp\"]\nmethod = \"full\"\n\
                          [[data.train]]\nsource = \"d\"\nformat = \"text\"\n";
    let config = Config::load(&dir.join("model"), &serde_json::Map::new())?;
    let base = Base::open(config.clone(), &dir.join("model"))?;
    let recipe = Recipe::parse(RECIPE, "r.toml", &[])?;
    let selection = Selection::from_rules(&config, &recipe.train)?;
    for dtype in [DType::F32, DType::BF16] {
        let run = |device: &Device, offload: bool| -> Result<Tensor> {
            let allocate = Allocate { train: true, offload, ..Allocate::default() };
            let (_, p) = Build::new(&base, &selection).on(dtype, device).allocate(allocate).run()?;
            let optimizer = Optimizer::new(&p, &recipe.optimizer);
            for t in 1..=3 {
                for (u, g) in p.grads().iter().flatten().enumerate() {
                    g.slice_set(&randn(10 * t + u as u64, g.dims(), DType::F32, device)?, 0, 0)?;
                }
                optimizer.step(&p, &ft::comm::alone(), t, &|_| 1e-2, 0.5)?;
            }
            let one = |i| -> candle_core::Result<Tensor> {
                let flat = p.view(i)?.flatten_all()?.to_dtype(DType::F32)?;
                flat.real()?.to_device(&Device::Cpu).map(Tensor::Real)
            };
            let all: Vec<Tensor> = (0..p.tensors.len()).map(one).collect::<candle_core::Result<_>>()?;
            Ok(Tensor::cat(&all, 0)?)
        };
        let what = format!("optimizer on the host, {dtype:?}");
        report.tensors(&what, &run(device, true)?, &run(&Device::Cpu, false)?, 0.0)?;
    }
    Ok(())
}

/// Loss, logits and all gradients for two documents.
fn forward_backward(d: &Decoder, p: &Params, device: &Device) -> Result<(f64, Tensor, Tensor)> {
    let ids: Vec<u32> = (0..40).map(|i| (11 * i + 5) % d.config.vocab as u32).collect();
    let positions: Vec<u32> = (0..23).chain(0..17).collect();
    let targets: Vec<(u32, u32)> = (0..39).filter(|i| *i != 22).map(|i| (i, ids[i as usize + 1])).collect();
    let host = HostBatch { ids: &ids, positions: &positions, docs: &[23, 17], targets: &targets };
    let batch = Batch::new(&d.config, host, (0, 0), None, device)?;
    let logits = Walk::new(d, None, 0).logits(&batch)?;
    let grads = p.grads();
    let sink = Sink::new(&grads, p.tensors.len());
    let losses = Walk::new(d, p.lowest_unit(), usize::MAX).train(&batch, 1.0, &sink)?;
    let flat: Vec<Tensor> = grads
        .iter()
        .flatten()
        .map(|g| g.real()?.to_device(&Device::Cpu).map(Tensor::Real))
        .collect::<candle_core::Result<_>>()?;
    Ok((loss::total(&losses)?, logits, Tensor::cat(&flat, 0)?))
}
