//! How much work a step is: its arithmetic, and what else takes time, in the operations that would take as long.
//!
//! Products are what a step is for, and their number is that of its tokens. The rest is what a choice can spare:
//! 4-bit weights are decoded once a product or once a visit, each product reads (and on the CPU packs) its weights
//! however few rows it has, and each operation has to be started. [`Balance`] says how many operations of a product
//! take as long as one of these.

use super::layer::Tokens;
use super::ops::Machine;
use super::shape::{Ffn, Layer, Linear, Shape};
use super::step::Levels;
use crate::walk::Decoded;

/// Work of one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Floating-point operations of forward.
    pub forward: f64,
    /// Forward again, of recomputed layers.
    pub recompute: f64,
    /// Backward.
    pub backward: f64,
    /// Decoding 4-bit weights, in operations that take as long.
    pub decode: f64,
    /// Reading weights, and starting operations, in operations that take as long.
    pub fixed: f64,
}

impl Work {
    /// Floating-point operations.
    pub fn flops(&self) -> f64 {
        self.forward + self.recompute + self.backward
    }

    /// All of it: what is proportional to time.
    pub fn total(&self) -> f64 {
        self.flops() + self.decode + self.fixed
    }
}

/// How many operations of a large product take as long as something else on a kind of machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balance {
    /// As decoding a 4-bit value, in a panel or whole.
    pub decode: f64,
    /// As writing and reading back a byte of a matrix that is decoded whole.
    pub held: f64,
    /// As a product's reading a byte of its weights.
    pub byte: f64,
    /// As starting one operation.
    pub start: f64,
}

impl Balance {
    /// Of a kind of machine. Those of the CPU were measured (`benches/RESULTS.md`); those of CUDA follow from an
    /// H200's data sheet: 790 TFLOP/s in bf16, 4.8 TB/s, some microseconds a launch.
    pub fn of(m: Machine) -> Self {
        match m.cuda {
            // a panel is decoded in the second-level cache from half a byte a value; what is held whole is written to
            // memory once and read twice
            true => Self { decode: 200.0, held: 495.0, byte: 165.0, start: 4e9 },
            false => Self { decode: 60.0, held: 40.0, byte: 8.0, start: 1e6 },
        }
    }
}

/// Work of one kind of layer.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    /// Operations.
    forward: f64,
    backward: f64,
    /// 4-bit values decoded by panels.
    decode: f64,
    decode_backward: f64,
    /// 4-bit values of the layer.
    packed: f64,
    /// Bytes of weights that products read.
    read: f64,
    read_backward: f64,
    /// Products and what goes with them.
    started: f64,
}

fn product(l: &Linear, rows: f64) -> f64 {
    2.0 * rows * (l.weight() + l.rank * (l.i + l.o)) as f64
}

/// Of a backward pass: the input's gradient, and the gradients of what trains.
fn product_backward(l: &Linear, rows: f64) -> f64 {
    let full = if l.full { 2.0 * rows * l.weight() as f64 } else { 0.0 };
    2.0 * rows * (l.weight() + 2 * l.rank * (l.i + l.o)) as f64 + full
}

/// Keys that a query sees, the mean over a document of `n` tokens: the diagonal counts half, as in n^2 / 2.
fn keys(n: u64, window: Option<u64>) -> f64 {
    let w = window.map_or(n, |w| w.min(n)) as f64;
    if n == 0 { 0.0 } else { w * (1.0 - w / 2.0 / n as f64) }
}

impl Cost {
    /// `rows` rows through `count` linears like `l`.
    fn add(&mut self, l: &Linear, count: f64, rows: f64, width: f64) {
        let weight = l.weight() as f64;
        // DoRA takes the norm of the matrix too, and with dropout the product once more
        let (forward, backward) = match (l.dora, l.dropout) {
            (false, _) => (1.0, 1.0),
            (true, false) => (2.0, 1.0),
            (true, true) => (3.0, 2.0),
        };
        self.forward += count * product(l, rows);
        self.backward += count * product_backward(l, rows);
        if l.nf4 {
            self.decode += count * forward * weight;
            self.decode_backward += count * backward * weight;
            self.packed += count * weight;
        }
        // the gradient of a matrix is read and written in f32
        let gradient = if l.full { 8.0 * weight } else { 0.0 };
        self.read += count * forward * weight * width;
        self.read_backward += count * (backward * weight * width + gradient);
        self.started += count * if l.rank > 0 { 3.0 } else { 1.0 };
    }

    fn of(layer: &Layer, s: &Shape, t: Tokens, width: f64) -> Self {
        let tokens = t.tokens as f64;
        let mut c = Self { started: 8.0, ..Self::default() };
        layer.attention.iter().for_each(|l| c.add(l, 1.0, tokens, width));
        match &layer.ffn {
            Ffn::Dense(three) => three.iter().for_each(|l| c.add(l, 1.0, tokens, width)),
            Ffn::Experts { router, experts, shared, top_k } => {
                let all = router.o.max(1) as f64;
                let each = tokens * *top_k as f64 / all;
                // an expert without tokens costs nothing
                let busy = 1.0 - (1.0 - *top_k as f64 / all).max(0.0).powf(tokens);
                c.add(router, 1.0, tokens, 4.0);
                for l in shared.iter().flat_map(|(e, gate)| e.iter().chain([gate])) {
                    c.add(l, 1.0, tokens, width);
                }
                for (three, n) in experts {
                    three.iter().for_each(|l| c.add(l, *n as f64 * busy, each / busy, width));
                }
            }
        }
        // scores and their product with v, over the keys that are seen
        let attention = 4.0 * tokens * keys(t.longest, layer.window) * (s.heads * s.head_dim) as f64;
        c.forward += attention;
        c.backward += 2.5 * attention;
        c
    }
}

/// The work of a micro-batch whose levels are still open.
#[derive(Clone, Debug)]
pub struct Costs {
    layers: Vec<Cost>,
    first: usize,
    balance: Balance,
    width: f64,
    /// Operations of the head, forward and backward, and what each of its chunks reads.
    head: (f64, f64),
    chunk_reads: f64,
    targets: u64,
}

impl Costs {
    /// Of a model on a machine.
    pub fn new(s: &Shape, t: Tokens, m: Machine) -> Self {
        let width = m.width as f64;
        let mut kinds: Vec<(&Layer, Cost)> = Vec::new();
        let mut layers = Vec::with_capacity(s.layers.len());
        for layer in &s.layers {
            let cost = match kinds.iter().find(|(l, _)| *l == layer) {
                Some((_, cost)) => *cost,
                None => {
                    kinds.push((layer, Cost::of(layer, s, t, width)));
                    kinds[kinds.len() - 1].1
                }
            };
            layers.push(cost);
        }
        let mut head = Cost::default();
        head.add(&s.head, 1.0, t.targets as f64, width);
        Self {
            layers,
            first: s.lowest.map_or(usize::MAX, |u| u.max(1) - 1),
            balance: Balance::of(m),
            width,
            head: (head.forward, head.backward),
            chunk_reads: head.read + head.read_backward,
            targets: t.targets,
        }
    }

    /// With these levels, and chunks of `head_rows` targets.
    pub fn work(&self, levels: Levels, head_rows: u64) -> Work {
        let b = self.balance;
        let chunks = self.targets.div_ceil(head_rows.max(1)) as f64;
        let mut w = Work {
            forward: self.head.0,
            backward: self.head.1,
            fixed: chunks * (self.chunk_reads * b.byte + 8.0 * b.start),
            ..Work::default()
        };
        let (mut decoded, mut held, mut read, mut started) = (0.0, 0.0, 0.0, 0.0);
        for (l, c) in self.layers.iter().enumerate() {
            w.forward += c.forward;
            (decoded, read, started) = (decoded + c.decode, read + c.read, started + c.started);
            if l < self.first {
                continue;
            }
            w.backward += c.backward;
            read += c.read_backward;
            started += 2.0 * c.started;
            if l - self.first >= levels.recompute {
                decoded += c.decode_backward;
                continue;
            }
            w.recompute += c.forward;
            read += c.read;
            started += c.started;
            if levels.decoded == Decoded::Visit {
                decoded += c.packed;
                held += c.packed * self.width;
            } else {
                decoded += c.decode + c.decode_backward;
            }
        }
        w.decode = decoded * b.decode + held * b.held;
        w.fixed += read * b.byte + started * b.start;
        w
    }
}

#[cfg(test)]
#[path = "work_tests.rs"]
mod tests;
