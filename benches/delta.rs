//! Forward and backward pass of the gated delta rule on the CPU, without projections and convolution.
//!
//!     RAYON_NUM_THREADS=2 cargo bench --bench delta [-- ROUNDS]
//!
//! Prints a JSON object a shape: the shape and the median milliseconds of both passes. `benches/delta.py` measures
//! transformers' chunked reference on the same shapes.

use candle_core::{DType, Device, Result};
use ft::kernel::attention::Sequences;
use ft::kernel::delta::Heads;
use ft::kernel::delta::rule::{self, Inputs};
use ft::kernel::{Real, Tensor};
use std::time::Instant;

// the allocator of `ft run`, with freed buffers kept for reuse
#[global_allocator]
static ALLOCATOR: ft_base::memory::CountingAllocator = ft_base::memory::CountingAllocator;

/// Tokens, key heads, value heads, channels of a key and of a value: Qwen3.5-9B's layer, and a small one.
const SHAPES: [[usize; 5]; 3] = [[512, 16, 32, 128, 128], [2048, 16, 32, 128, 128], [512, 4, 8, 64, 64]];

fn random(shape: impl Into<candle_core::Shape>) -> Result<Tensor> {
    Ok(Real::randn(0f32, 1f32, shape, &Device::Cpu)?.into())
}

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

fn main() -> Result<()> {
    ft_base::memory::keep_within(1 << 32);
    let rounds = std::env::args().filter_map(|a| a.parse().ok()).next().unwrap_or(7);
    for [t, keys, values, key_dim, value_dim] in SHAPES {
        let heads = Heads { keys, values, key_dim, value_dim };
        let (qkv, a, b) = (random((t, heads.channels()))?, random((t, values))?, random((t, values))?);
        let (a_log, bias) = (random(values)?, random(values)?);
        let d_o = random((t, heads.value_width()))?;
        let x = Inputs { heads, qkv: &qkv, a: &a, b: &b, a_log: &a_log, bias: &bias };
        let seqs = Sequences::new(&[t], 0, &Device::Cpu)?;
        let (mut forward, mut backward) = (Vec::new(), Vec::new());
        for _ in 0..=rounds {
            let start = Instant::now();
            let o = rule::forward(&x, &seqs, None)?;
            forward.push(1e3 * start.elapsed().as_secs_f64());
            assert_eq!(o.dtype(), DType::F32);
            let start = Instant::now();
            rule::backward(&x, &d_o, &seqs)?;
            backward.push(1e3 * start.elapsed().as_secs_f64());
        }
        // the first round fills the allocator's pool
        let (forward, backward) = (median(forward.split_off(1)), median(backward.split_off(1)));
        println!(
            "{{\"shape\": [{t}, {keys}, {values}, {key_dim}, {value_dim}], \"forward\": {forward:.2}, \
             \"backward\": {backward:.2}}}"
        );
    }
    Ok(())
}
