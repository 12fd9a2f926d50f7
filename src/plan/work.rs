//! How much arithmetic a step is, and how long that takes at a measured rate.

use super::layer::Tokens;
use super::shape::{Ffn, Layer, Linear, Shape};

/// Floating-point operations of one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Forward.
    pub forward: f64,
    /// Forward again, of recomputed layers.
    pub recompute: f64,
    /// Backward.
    pub backward: f64,
}

impl Work {
    /// All of it.
    pub fn total(&self) -> f64 {
        self.forward + self.recompute + self.backward
    }
}

fn product(l: &Linear, rows: f64) -> f64 {
    2.0 * rows * (l.weight() + l.rank * (l.i + l.o)) as f64
}

/// Of a backward pass: the input's gradient, and the gradients of what trains.
fn product_backward(l: &Linear, rows: f64) -> f64 {
    let full = if l.full { 2.0 * rows * l.weight() as f64 } else { 0.0 };
    2.0 * rows * (l.weight() + 2 * l.rank * (l.i + l.o)) as f64 + full
}

fn linears(layer: &Layer, t: f64, f: fn(&Linear, f64) -> f64) -> f64 {
    let attention: f64 = layer.attention.iter().map(|l| f(l, t)).sum();
    let ffn: f64 = match &layer.ffn {
        Ffn::Dense(three) => three.iter().map(|l| f(l, t)).sum(),
        Ffn::Experts { router, experts, shared, top_k } => {
            let each = t * *top_k as f64 / (router.o.max(1) as f64);
            let all: f64 =
                experts.iter().flat_map(|(e, n)| e.iter().map(move |l| f(l, each) * *n as f64)).sum();
            let shared: f64 =
                shared.iter().flat_map(|(e, gate)| e.iter().chain([gate])).map(|l| f(l, t)).sum();
            f(router, t) + all + shared
        }
    };
    attention + ffn
}

/// Keys that a query sees, the mean over a document of `n` tokens: the diagonal counts half, as in n^2 / 2.
fn keys(n: u64, window: Option<u64>) -> f64 {
    let w = window.map_or(n, |w| w.min(n)) as f64;
    if n == 0 { 0.0 } else { w * (1.0 - w / 2.0 / n as f64) }
}

impl Work {
    /// Of a micro-batch with `recompute` layers computed again.
    pub fn new(s: &Shape, t: Tokens, recompute: usize) -> Self {
        let tokens = t.tokens as f64;
        let first = s.lowest.map_or(usize::MAX, |u| u.max(1) - 1);
        let mut w = Self::default();
        for (l, layer) in s.layers.iter().enumerate() {
            // scores and their product with v, over the keys that are seen
            let attention = 4.0 * tokens * keys(t.longest, layer.window) * (s.heads * s.head_dim) as f64;
            let forward = linears(layer, tokens, product) + attention;
            w.forward += forward;
            if l >= first {
                w.backward += linears(layer, tokens, product_backward) + 2.5 * attention;
                if l - first < recompute {
                    w.recompute += forward;
                }
            }
        }
        w.forward += product(&s.head, t.targets as f64);
        w.backward += product_backward(&s.head, t.targets as f64);
        w
    }
}

#[cfg(test)]
#[path = "work_tests.rs"]
mod tests;
