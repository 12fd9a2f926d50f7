//! LoRA training step on a 4-bit base against the same step on a dense f32 base, alternating in one
//! process.
//!
//!     cargo bench --bench nf4 [-- ROUNDS]
//!
//! 107 M parameters (12 layers, hidden size 768, feed-forward 2304, 12 query and 4 key-value heads of 64
//! channels, vocabulary 32,000), random weights, LoRA rank 16 on all linears, one row of 512 tokens a
//! step. Prints both medians and the ratios of the rounds; the median ratio must not exceed 1.1. Then the
//! same for single tokens, as in generation.

#![allow(clippy::disallowed_methods, reason = "a benchmark writes files of its own")]

use candle_core::{DType, Device};
use ft::data::Dataset;
use ft::hub::Want;
use ft::kernel::gemm;
use ft::kernel::{Real, Tensor};
use ft::plan::Workload;
use ft::quant::{CodeTables, Encoded};
use ft::recipe::Recipe;
use ft::train::{Job, StepInput, TrainContext, TrainedModel};
use std::time::Instant;

const TOKENS: usize = 512;

fn recipe(dir: &std::path::Path, quantize: &str) -> anyhow::Result<Recipe> {
    let d = dir.display();
    let text = format!(
        r#"
[model]
source = "{d}"
weights = "random"
dtype = "f32"
quantize = "{quantize}"
[lora]
rank = 16
alpha = 32
[[train]]
modules = ["attention", "mlp"]
[data]
train = [{{ source = "{d}/rows.jsonl", format = "tokens" }}]
max_length = {TOKENS}
pack = false
[run]
steps = 1
batch_rows = 1
device = "cpu"
[memory]
recompute = "none"
"#
    );
    Ok(Recipe::parse(&text, "bench.toml", &[])?)
}

/// Loads a model and returns a closure: it runs one training step and gives the seconds.
fn stepper(job: &Job, data: &Dataset) -> anyhow::Result<impl FnMut() -> anyhow::Result<f64>> {
    let plan = job.plan(|recipe| Workload::of_data(recipe, data, None))?;
    let model = TrainedModel::new(job, job.load(true)?);
    let mut step = 0;
    Ok(move || {
        let alone = ft::ranks::alone();
        let cx = TrainContext::new(job, &model, &alone, plan.execution, None);
        let start = Instant::now();
        cx.step(&StepInput { data, rows: &[0], step, lr: &|_| 1e-4 })?;
        step += 1;
        Ok(start.elapsed().as_secs_f64())
    })
}

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

fn report(what: [&str; 2], unit: f64, pairs: &[(f64, f64)]) {
    let ratios: Vec<f64> = pairs.iter().map(|(a, b)| b / a).collect();
    let (low, high) = ratios.iter().fold((f64::MAX, 0f64), |(l, h), r| (l.min(*r), h.max(*r)));
    println!("{:<28} {:8.2} ms", what[0], median(pairs.iter().map(|p| p.0).collect()) * unit);
    println!("{:<28} {:8.2} ms", what[1], median(pairs.iter().map(|p| p.1).collect()) * unit);
    println!("{:<28} {:8.2} median, {low:.2} to {high:.2}", "ratio", median(ratios));
}

fn main() -> anyhow::Result<()> {
    let rounds = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(7);
    let dir = tempfile::tempdir()?;
    std::fs::write(
        dir.path().join("config.json"),
        r#"{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 12, "hidden_size": 768,
            "intermediate_size": 2304, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
            "vocab_size": 32000, "tie_word_embeddings": true, "max_position_embeddings": 4096, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0}"#,
    )?;
    let ids: Vec<usize> = (0..TOKENS).map(|i| i * 104_729 % 32_000).collect();
    std::fs::write(dir.path().join("rows.jsonl"), format!("{{\"input_ids\": {ids:?}}}\n"))?;
    let jobs = ["none", "nf4"]
        .map(|q| Job::open(recipe(dir.path(), q)?, Want::Config, true).map_err(anyhow::Error::from));
    let [dense, four_bit] = jobs;
    let (dense, four_bit) = (dense?, four_bit?);
    let data = dense.train_data()?;
    let (mut a, mut b) = (stepper(&dense, &data)?, stepper(&four_bit, &data)?);
    // the first round is warm-up
    a()?;
    b()?;
    let pairs = (0..rounds).map(|_| Ok((a()?, b()?))).collect::<anyhow::Result<Vec<_>>>()?;
    println!("LoRA rank 16, 107 M parameters, 1 x {TOKENS} tokens, {} threads", rayon::current_num_threads());
    report(["dense f32 base, a step", "4-bit base, a step"], 1e3, &pairs);

    let (o, i) = (4096, 4096);
    let w = Tensor::Real(Real::randn(0f32, 0.02, (o, i), &Device::Cpu)?);
    let values = w.flatten_all()?.to_vec1()?;
    let blocks = Encoded::new("w", &values, (o, i), DType::BF16)?.into_matrix(
        true,
        DType::F32,
        &mut CodeTables::new(&Device::Cpu)?,
    )?;
    for tokens in [1, 8] {
        let x = Tensor::Real(Real::randn(0f32, 1.0, (tokens, i), &Device::Cpu)?);
        let time = |f: &dyn Fn() -> candle_core::Result<Tensor>| -> anyhow::Result<f64> {
            let start = Instant::now();
            for _ in 0..5 {
                f()?;
            }
            Ok(start.elapsed().as_secs_f64() / 5.0)
        };
        let pairs = (0..=rounds)
            .map(|_| Ok((time(&|| gemm::matmul(&x, false, &w, true))?, time(&|| blocks.forward(&x))?)))
            .collect::<anyhow::Result<Vec<_>>>()?;
        println!("{tokens} x {i} x {o}, one product");
        report(["dense f32", "4-bit"], 1e3, &pairs[1..]);
    }
    Ok(())
}
