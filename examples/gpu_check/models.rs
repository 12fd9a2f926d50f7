//! Reference models, and optimizer steps with states on the host.

use super::report::{Report, randn};
use anyhow::Result;
use candle_core::{DType, Device};
use ft::adapters::Adapter;
use ft::adapters::{Choice, Selection};
use ft::kernel::{Tensor, loss};
use ft::load::Base;
use ft::model::batch::HostBatch;
use ft::model::grad_accumulator::GradAccumulator;
use ft::model::{Batch, Config, Decoder};
use ft::optim::Optimizer;
use ft::params::Allocate;
use ft::params::Params;
use ft::params::build::Build;
use ft::recipe::Recipe;
use ft::walk::Walk;
use std::path::Path;

/// Logits, losses and all gradients of a reference model, trained in full and with an adapter.
pub fn check(dir: &Path, device: &Device, report: &mut Report) -> Result<()> {
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
            let (d, p) = Build { adapter, device, allocate, ..Build::new(&base, selection) }.run()?;
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
pub fn offload(dir: &Path, device: &Device, report: &mut Report) -> Result<()> {
    const RECIPE: &str = "[model]\nsource = \"m\"\n[[train]]\nmodules = [\"mlp\"]\nmethod = \"full\"\n\
                          [[data.train]]\nsource = \"d\"\nformat = \"text\"\n";
    let config = Config::load(&dir.join("model"), &serde_json::Map::new())?;
    let base = Base::open(config.clone(), &dir.join("model"))?;
    let recipe = Recipe::parse(RECIPE, "r.toml", &[])?;
    let selection = Selection::from_rules(&config, &recipe.train)?;
    for dtype in [DType::F32, DType::BF16] {
        let run = |device: &Device, offload: bool| -> Result<Tensor> {
            let allocate = Allocate { train: true, offload, ..Allocate::default() };
            let (_, p) = Build { dtype, device, allocate, ..Build::new(&base, &selection) }.run()?;
            let optimizer = Optimizer::new(&p, &recipe.optimizer);
            for t in 1..=3 {
                for (u, g) in p.grads().iter().flatten().enumerate() {
                    g.slice_set(&randn(10 * t + u as u64, g.dims(), DType::F32, device)?, 0, 0)?;
                }
                optimizer.step(&p, &ft::ranks::alone(), t, &|_| 1e-2, 0.5)?;
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
    let host =
        HostBatch { ids: &ids, positions: &positions, docs: &[23, 17], targets: &targets, weights: &[] };
    let batch = Batch::new(&d.config, host, (0, 0), None, device)?;
    let logits = Walk::new(d, None, 0).logits(&batch)?;
    let grads = p.grads();
    let accum = GradAccumulator::new(&grads, p.tensors.len());
    let losses = Walk::new(d, p.lowest_unit(), usize::MAX).train(&batch, 1.0, &accum)?;
    // by name: devices place tensors in their buffers differently
    let mut order: Vec<usize> = (0..p.tensors.len()).collect();
    order.sort_by_key(|i| &p.tensors[*i].name);
    let flat = |g: Tensor| g.flatten_all()?.real()?.to_device(&Device::Cpu).map(Tensor::Real);
    let all = order.into_iter().filter_map(|i| p.grad(i).transpose()).map(|g| flat(g?));
    let all: Vec<Tensor> = all.collect::<candle_core::Result<_>>()?;
    Ok((loss::total(&losses)?, logits, Tensor::cat(&all, 0)?))
}
