//! Every kernel, and the reference models end to end, on a CUDA device against the CPU; how fast the 4-bit kernels are.
//!
//! ```text
//! cargo run --release --features cuda --example gpu_check -- tests/fixtures/reference
//! gpu_check FIXTURES --device cpu      runs the same program on the CPU twice: a check of the program itself
//! ```
//!
//! Prints one line a check (relative L2 distance, bar) and exits with 1 if any is over its bar.

mod four_bit;

use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use ft::adapt::adapter::Adapter;
use ft::adapt::build::{Base, Build};
use ft::adapt::params::Allocate;
use ft::adapt::{Choice, Params, Selection, layout};
use ft::kernel::attention::{Causal, Sequences};
use ft::kernel::optimizer::{AdamW, adamw, sum_squares};
use ft::kernel::{Real, Tensor, attention, dropout, embed, gemm, group, loss, norm, rope, route, swiglu};
use ft::model::batch::HostBatch;
use ft::model::sink::Sink;
use ft::model::{Batch, Config, Decoder};
use ft::optim::Optimizer;
use ft::recipe::Recipe;
use ft::rng::{Purpose, Stream};
use ft::walk::Walk;
use std::path::{Path, PathBuf};

/// Bar in f32 (TF32 is off) and in bf16, whose products are rounded to 8 bits of mantissa.
const BARS: [(DType, f64); 2] = [(DType::F32, 1e-5), (DType::BF16, 3e-2)];

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let fixtures = args.first().context("usage: gpu_check FIXTURES [--device cpu]")?;
    let device = if args.iter().any(|a| a == "cpu") { Device::Cpu } else { Device::new_cuda_with_stream(0)? };
    let mut report = Report { over: 0, checks: 0 };
    for (dtype, bar) in BARS {
        ops(&device, dtype, bar, &mut report)?;
        four_bit::check(&device, dtype, bar, &mut report)?;
    }
    four_bit::check(&device, DType::F16, 4e-3, &mut report)?;
    let mut dirs: Vec<PathBuf> =
        std::fs::read_dir(fixtures)?.map(|e| Ok(e?.path())).collect::<Result<_>>()?;
    dirs.sort();
    for dir in &dirs {
        model(dir, &device, &mut report)?;
    }
    offload(dirs.first().context("no fixtures")?, &device, &mut report)?;
    if device.is_cuda() {
        four_bit::speed(&device, &mut report)?;
    }
    println!("{} checks passed, {} failed", report.checks - report.over, report.over);
    if report.over > 0 { bail!("{} checks over their bar", report.over) } else { Ok(()) }
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

/// Standard normal numbers on a device.
fn randn(seed: u64, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let s = Stream::new(seed, Purpose::Test, 0, 0);
    let n: usize = shape.iter().product();
    let v: Vec<f32> = (0..n as u64).map(|i| s.normal(i)).collect();
    Ok(Tensor::Real(Real::from_vec(v, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?))
}

/// What every op gives on a device, with names.
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

    let (g, dn) = (r(4, &[96])?, r(5, &[130, 96])?);
    out.push(("rms norm".into(), norm::forward(&x, &g, 1e-6)?));
    let (dx, dg) = norm::backward(&x, &g, 1e-6, &dn, true)?;
    out.push(("rms norm, dx".into(), dx));
    out.push(("rms norm, dw".into(), dg.context("dw")?));

    let angle = wide(6, &[130, 8])?;
    let q3 = r(7, &[130, 4, 16])?;
    out.push(("rope".into(), rope::apply(&q3, &angle.cos()?, &angle.sin()?, false)?));
    out.push(("rope, back".into(), rope::apply(&q3, &angle.cos()?, &angle.sin()?, true)?));

    let (up, dh) = (r(8, &[130, 96])?, r(9, &[130, 96])?);
    out.push(("swiglu".into(), swiglu::forward(&x, &up)?));
    let (dgate, dup) = swiglu::backward(&x, &up, &dh)?;
    out.push(("swiglu, dgate".into(), dgate));
    out.push(("swiglu, dup".into(), dup));

    let seqs = Sequences::new(&[70, 1, 59], 0, device)?;
    let (k, v, d_o) = (r(10, &[130, 2, 16])?, r(11, &[130, 2, 16])?, r(12, &[130, 4, 16])?);
    for window in [None, Some(20)] {
        let name = if window.is_some() { "attention, window" } else { "attention" };
        let how = Causal { seqs: &seqs, window, scale: 0.25 };
        let saved = attention::forward(&q3, &k, &v, &how)?;
        let (dq, dk, dv) = attention::backward(&q3, &k, &v, &saved, &d_o, &how)?;
        for (part, t) in [("o", saved.o), ("lse", saved.lse), ("dq", dq), ("dk", dk), ("dv", dv)] {
            out.push((format!("{name}, {part}"), t));
        }
    }

    let ids: Vec<u32> = (0..130).map(|i| (i * i) % 50).collect();
    let ids = Tensor::new(ids, device)?;
    let table = r(13, &[50, 96])?;
    out.push(("embedding".into(), embed::forward(&table, &ids)?));
    let dtable = Tensor::zeros((50, 96), DType::F32, device)?;
    embed::backward(&dtable, &ids, &dn, 1.0)?;
    out.push(("embedding, dtable".into(), dtable));

    let (losses, dlogits) = loss::cross_entropy(wide(14, &[130, 50])?, &ids, Some(0.1))?;
    out.push(("cross entropy".into(), losses));
    out.push(("cross entropy, dlogits".into(), dlogits.context("dlogits")?));

    let stream = Stream::new(1, Purpose::Dropout, 2, 3);
    out.push(("dropout mask".into(), dropout::mask(stream, dropout::Rows::From { first: 5 }, 0.25, &dn)?.0));

    let (probs, lse) = route::softmax(&wide(19, &[130, 10])?)?;
    let chosen = route::choose(&probs, 3)?;
    let gates = route::gates(&probs, &chosen, 3, true)?;
    let routed =
        route::RouterOutput { probs: &probs, lse: &lse, gates: &gates, chosen: &chosen, normalise: true };
    let balance = route::Balance { dp: (0..10).map(f64::from).collect(), z: 0.1 };
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
    let step = AdamW { lr: 1e-2, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.1, t: 3, grad_scale: 0.5 };
    adamw(&p, &m, &v, &gr, &step)?;
    out.push(("adamw, weights".into(), p));
    out.push(("adamw, moments".into(), Tensor::cat(&[m, v], 0)?));
    let norm = sum_squares(std::slice::from_ref(&gr))?;
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

/// A reference model in full and with its adapter: logits, losses and all gradients.
fn model(dir: &Path, device: &Device, report: &mut Report) -> Result<()> {
    let name = dir.file_name().map_or(String::new(), |n| n.to_string_lossy().into_owned());
    let config = Config::load(&dir.join("model"), &serde_json::Map::new())?;
    let files = layout::open(&config, &dir.join("model"))?;
    // some mixtures have none
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
            let (d, p) = Build {
                config: &config,
                selection,
                base: Base::Files(&files),
                adapter,
                quantize,
                dtype: DType::F32,
                device,
                seed: 0,
                allocate: Allocate { train: true, ..Allocate::default() },
                progress: &|_| {},
            }
            .run()?;
            forward_backward(&d, &p, device)
        };
        let (mine, cpu) = (run(device)?, run(&Device::Cpu)?);
        report.line(&format!("{name}, {kind}: loss"), (mine.0 - cpu.0).abs() / cpu.0, 1e-5);
        report.tensors(&format!("{name}, {kind}: logits"), &mine.1, &cpu.1, 1e-5)?;
        report.tensors(&format!("{name}, {kind}: gradients"), &mine.2, &cpu.2, 3e-5)?;
    }
    Ok(())
}

/// Steps of the optimizer with its states on the host: what the layers then compute with is the CPU's, to the bit.
fn offload(dir: &Path, device: &Device, report: &mut Report) -> Result<()> {
    const RECIPE: &str = "[model]\nsource = \"m\"\n[[train]]\nmodules = [\"mlp\"]\nmethod = \"full\"\n\
                          [[data.train]]\nsource = \"d\"\nformat = \"text\"\n";
    let config = Config::load(&dir.join("model"), &serde_json::Map::new())?;
    let files = layout::open(&config, &dir.join("model"))?;
    let recipe = Recipe::parse(RECIPE, "r.toml", &[])?;
    let selection = Selection::from_rules(&config, &recipe.train)?;
    for dtype in [DType::F32, DType::BF16] {
        let run = |device: &Device, offload: bool| -> Result<Tensor> {
            let allocate = Allocate { train: true, offload };
            let (selection, base) = (&selection, Base::Files(&files));
            let build = Build {
                config: &config,
                selection,
                base,
                adapter: None,
                quantize: false,
                dtype,
                device,
                seed: 0,
                allocate,
                progress: &|_| {},
            };
            let (_, p) = build.run()?;
            let optimizer = Optimizer::new(&p, &recipe.optimizer);
            for t in 1..=3 {
                for (u, g) in p.grads().iter().flatten().enumerate() {
                    g.slice_set(&randn(10 * t + u as u64, g.dims(), DType::F32, device)?, 0, 0)?;
                }
                optimizer.step(&p, t, &|_| 1e-2, 0.5)?;
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

/// Loss, logits and all gradients of two documents.
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
