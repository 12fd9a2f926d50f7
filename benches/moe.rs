//! Forward and backward of a mixture layer against a dense layer of the active size: the same tokens, frozen
//! weights, LoRA on all of them, in one run.
//!
//!     cargo bench --bench moe
//!
//! Prints both times and their ratio; 1.5 is the most that it may be.

use candle_core::{DType, Device, Result};
use ft::kernel::attention::Sequences;
use ft::kernel::padded::Padded;
use ft::kernel::{Real, Tensor};
use ft::model::batch::Context;
use ft::model::linear::{Linear, Lora, Weight};
use ft::model::mlp::Mlp;
use ft::model::moe::Mixture;
use ft::model::sink::{Sink, Slot};
use std::time::{Duration, Instant};

const TOKENS: usize = 4096;
const WIDTH: usize = 512;
const INNER: usize = 256;
const EXPERTS: usize = 64;
const TOP_K: usize = 4;
const RANK: usize = 16;
const ROUNDS: usize = 5;

/// Makes linears with LoRA, their gradients end to end in one buffer.
#[derive(Default)]
struct Maker {
    next: usize,
    len: usize,
}

impl Maker {
    fn slot(&mut self, rows: usize, cols: usize) -> Slot {
        let s = Slot { index: self.next, unit: 0, offset: self.len, rows, cols };
        self.next += 1;
        self.len += rows * cols;
        s
    }

    fn linear(&mut self, out: usize, inp: usize) -> Result<Linear> {
        let randn = |o: usize, i: usize| random((o, i), 1.0 / (i as f32).sqrt());
        let slots = Some((self.slot(RANK, inp), self.slot(out, RANK)));
        let (a, b, stream) = (randn(RANK, inp)?, randn(out, RANK)?, self.next as u64);
        let lora = Lora { a, b, slots, scale: 2.0, dropout: 0.0, stream, dora: None };
        let weight = Weight::Dense(randn(out, inp)?);
        Ok(Linear { weight, bias: None, weight_slot: None, bias_slot: None, lora: Some(lora) })
    }

    fn mlp(&mut self, inner: usize) -> Result<Mlp> {
        Ok(Mlp {
            gate: self.linear(inner, WIDTH)?,
            up: self.linear(inner, WIDTH)?,
            down: self.linear(WIDTH, inner)?,
        })
    }

    fn grads(&self) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(Tensor::zeros(self.len, DType::F32, &Device::Cpu)?)])
    }
}

fn random(shape: (usize, usize), std: f32) -> Result<Tensor> {
    Real::randn(0f32, std, shape, &Device::Cpu).map(Tensor::Real)
}

fn time(f: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    f()?;
    Ok(start.elapsed())
}

fn main() -> Result<()> {
    let cpu = &Device::Cpu;
    let table = Tensor::zeros((TOKENS, 1), DType::F32, cpu)?;
    let seqs = Sequences::new(&[TOKENS], 0, cpu)?;
    let ctx = Context { seqs, cos: table.clone(), sin: table, dropout: None, rows: None };
    let (x, dy) = (random((TOKENS, WIDTH), 1.0)?, random((TOKENS, WIDTH), 1.0)?);

    let mut make = Maker::default();
    let router = make.linear(EXPERTS, WIDTH)?;
    let experts = (0..EXPERTS).map(|_| make.mlp(INNER)).collect::<Result<_>>()?;
    let mixture = Mixture::new(router, (experts, vec![1; EXPERTS]), None, TOP_K, true);
    let mixture_grads = make.grads()?;
    let mixture_count = make.next;
    let mut make = Maker::default();
    let dense = make.mlp(TOP_K * INNER)?;
    let dense_grads = make.grads()?;

    let (mut best, mut ratios) = ([Duration::MAX; 2], Vec::new());
    for round in 0..=ROUNDS {
        let one = time(|| {
            let (_, saved) = dense.forward(&Padded::of(&x)?, &ctx)?;
            dense.backward(saved, &Padded::of(&dy)?, &ctx, &Sink::new(&dense_grads, make.next)).map(drop)
        })?;
        let other = time(|| {
            let (_, saved) = mixture.forward(&x, &ctx, None)?;
            let sink = Sink::new(&mixture_grads, mixture_count);
            mixture.backward(saved, &dy, &ctx, &sink, None).map(drop)
        })?;
        // the first round warms up
        if round > 0 {
            best = [best[0].min(one), best[1].min(other)];
            ratios.push(other.as_secs_f64() / one.as_secs_f64());
        }
    }
    ratios.sort_by(f64::total_cmp);
    println!(
        "{TOKENS} tokens, width {WIDTH}, {EXPERTS} experts of {INNER}, {TOP_K} a token, LoRA rank {RANK}, {} threads",
        rayon::current_num_threads()
    );
    println!("dense of the active size  {:8.1} ms", best[0].as_secs_f64() * 1e3);
    println!("mixture                   {:8.1} ms", best[1].as_secs_f64() * 1e3);
    println!(
        "ratio                     {:8.2} median, {:.2} to {:.2}",
        ratios[ROUNDS / 2],
        ratios[0],
        ratios[ROUNDS - 1]
    );
    Ok(())
}
