//! Forward and backward pass of a mixture layer against a dense layer of the active size: same tokens,
//! LoRA on all linears or full training, f32 and bf16, alternating in one process.
//!
//!     cargo bench --bench moe [-- ROUNDS]
//!
//! Prints per shape: both times (fastest round), and median, minimum and maximum of the rounds' ratios.
//! The median must not exceed 1.2. `RAYON_NUM_THREADS` sets the number of threads.

use candle_core::{DType, Device, Result};
use ft::kernel::attention::Sequences;
use ft::kernel::gemm::pairs;
use ft::kernel::padded::Padded;
use ft::kernel::swiglu::Glu;
use ft::kernel::{Real, Tensor};
use ft::model::batch::Context;
use ft::model::feed_forward::mlp::Mlp;
use ft::model::feed_forward::{Inputs, Mixture};
use ft::model::grad_accumulator::{GradAccumulator, Slot};
use ft::model::linear::{Linear, Lora, Weight};
use std::time::{Duration, Instant};

// the allocator of `ft run`, with freed buffers kept for reuse
#[global_allocator]
static ALLOCATOR: ft_base::memory::CountingAllocator = ft_base::memory::CountingAllocator;

const RANK: usize = 16;

/// A mixture: tokens, hidden size, experts, top-k, expert width.
type Sizes = (usize, usize, usize, usize, usize);

/// Few large experts, and many small ones.
const SIZES: [Sizes; 3] = [(512, 768, 8, 2, 1024), (4096, 768, 8, 2, 1024), (4096, 512, 64, 4, 256)];

/// Creates linears with their gradients consecutive in one buffer.
struct Maker {
    slots: Vec<Slot>,
    len: usize,
    dtype: DType,
    full: bool,
}

impl Maker {
    fn new(dtype: DType, full: bool) -> Self {
        Self { slots: Vec::new(), len: 0, dtype, full }
    }

    fn slot(&mut self, rows: usize, cols: usize) -> Slot {
        let s = Slot { index: self.slots.len(), flat: 0, offset: self.len, rows, cols };
        self.slots.push(s);
        self.len += rows * cols;
        s
    }

    fn linear(&mut self, out: usize, inp: usize) -> Result<Linear> {
        let dtype = self.dtype;
        let randn = |o: usize, i: usize| random((o, i), 1.0 / (i as f32).sqrt(), dtype);
        let weight = Weight::Dense(randn(out, inp)?);
        let (mut weight_slot, mut lora) = (None, None);
        if self.full {
            weight_slot = Some(self.slot(out, inp));
        } else {
            let slots = Some((self.slot(RANK, inp), self.slot(out, RANK)));
            let (a, b, stream) = (randn(RANK, inp)?, randn(out, RANK)?, self.slots.len() as u64);
            lora = Some(Lora { a, b, slots, scale: 2.0, dropout: 0.0, stream, columns: None, dora: None });
        }
        Ok(Linear { weight, bias: None, weight_slot, bias_slot: None, lora, rows: None })
    }

    fn mlp(&mut self, width: usize, inner: usize) -> Result<Mlp> {
        Ok(Mlp {
            stack: None,
            gate: self.linear(inner, width)?,
            up: Some(self.linear(inner, width)?),
            down: self.linear(width, inner)?,
            glu: Glu::default(),
        })
    }

    fn grads(self) -> Result<(Vec<Option<Tensor>>, Vec<Slot>)> {
        Ok((vec![Some(Tensor::zeros(self.len, DType::F32, &Device::Cpu)?)], self.slots))
    }
}

fn random(shape: (usize, usize), std: f32, dtype: DType) -> Result<Tensor> {
    Real::randn(0f32, std, shape, &Device::Cpu)?.to_dtype(dtype).map(Tensor::Real)
}

fn time(f: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    f()?;
    Ok(start.elapsed())
}

/// Times both layers and prints a line.
fn compare(sizes: Sizes, dtype: DType, full: bool, rounds: usize) -> Result<()> {
    let (tokens, width, experts, top_k, inner) = sizes;
    let cpu = &Device::Cpu;
    let seqs = Sequences::new(&[tokens], 0, cpu)?;
    let ctx = Context::new(seqs, Vec::new(), None);
    let (x, dy) = (random((tokens, width), 1.0, dtype)?, random((tokens, width), 1.0, dtype)?);

    let mut make = Maker::new(dtype, full);
    let router = make.linear(experts, width)?;
    let all = (0..experts).map(|_| make.mlp(width, inner)).collect::<Result<_>>()?;
    let mixture = Mixture::new(router, (all, vec![1; experts]), top_k, true);
    let mixture_grads = make.grads()?;
    let mut make = Maker::new(dtype, full);
    let dense = make.mlp(width, top_k * inner)?;
    let dense_grads = make.grads()?;

    // gradients as for a step's only micro-batch
    fn accum((grads, slots): &(Vec<Option<Tensor>>, Vec<Slot>)) -> GradAccumulator<'_> {
        GradAccumulator::new(grads, slots.len()).over(slots.clone())
    }
    let (mut best, mut ratios) = ([Duration::MAX; 2], Vec::new());
    for round in 0..=rounds {
        let one = time(|| {
            let (_, saved) = dense.forward(&Padded::of(&x)?, &ctx)?;
            dense.backward(saved, &Padded::of(&dy)?, &ctx, &accum(&dense_grads)).map(drop)
        })?;
        let other = time(|| {
            let (_, saved) = mixture.forward(Inputs::both(&x), &ctx, None)?;
            mixture.backward(saved, &dy, &ctx, &accum(&mixture_grads), None).map(drop)
        })?;
        // round 0 is warm-up
        if round > 0 {
            best = [best[0].min(one), best[1].min(other)];
            ratios.push(other.as_secs_f64() / one.as_secs_f64());
        }
    }
    ratios.sort_by(f64::total_cmp);
    let [one, other] = best.map(|b| b.as_secs_f64() * 1e3);
    println!(
        "{tokens:>5} {width:>4}  {experts:>2} of {inner:>4}, {top_k} a token  {:<4}  {:<4}  {one:>8.1} {other:>8.1} ms  {:.2}  \
         {:.2} to {:.2}",
        dtype.as_str(),
        if full { "full" } else { "LoRA" },
        ratios[rounds / 2],
        ratios[0],
        ratios[rounds - 1]
    );
    Ok(())
}

fn main() -> Result<()> {
    let rounds = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(7usize).max(1);
    println!("{} threads, products of bf16: {}", rayon::current_num_threads(), pairs::path()?.text());
    println!("tokens, width, experts; dtype; what trains; dense of the active size, mixture; ratio");
    // keep all freed buffers, as in a plan with enough memory; run inside the thread pool, as `ft run`
    // does
    ft_base::memory::keep_within(1 << 32);
    rayon::scope(|_| {
        for sizes in SIZES {
            for dtype in [DType::F32, DType::BF16] {
                for full in [false, true] {
                    compare(sizes, dtype, full, rounds)?;
                }
            }
        }
        Ok(())
    })
}
