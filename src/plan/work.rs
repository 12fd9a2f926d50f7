//! How much work a step is: its arithmetic, and what else takes time, in the operations that would take as long.
//!
//! Products are what a step is for, and their number is that of its tokens. The rest is what a choice can spare:
//! 4-bit weights are dequantized once a product or once a visit, each product reads (and on the CPU packs) its weights
//! however few rows it has, and each operation has to be started. [`Balance`] says how many operations of a product
//! take as long as one of these.

use crate::kernel::Machine;
use crate::kernel::ledger::Cost;

/// Work of one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Floating-point operations of forward.
    pub forward: f64,
    /// Forward again, of recomputed layers.
    pub recompute: f64,
    /// Backward.
    pub backward: f64,
    /// Dequantizing 4-bit weights, in operations that take as long.
    pub dequantize: f64,
    /// Reading weights, and starting operations, in operations that take as long.
    pub fixed: f64,
}

impl Work {
    /// Of what was written down forward, forward again and backward.
    pub fn of(costs: [Cost; 3], b: Balance) -> Self {
        let mut all = Cost::default();
        costs.iter().for_each(|c| all.add(*c, 1.0));
        let [forward, recompute, backward] = costs.map(|c| c.flops);
        Self {
            forward,
            recompute,
            backward,
            dequantize: all.dequantized * b.dequantize + all.held * b.held,
            fixed: all.read * b.byte + all.started * b.start,
        }
    }

    /// Floating-point operations.
    pub fn flops(&self) -> f64 {
        self.forward + self.recompute + self.backward
    }

    /// All of it: what is proportional to time.
    pub fn total(&self) -> f64 {
        self.flops() + self.dequantize + self.fixed
    }
}

/// How many operations of a large product take as long as something else on a kind of machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balance {
    /// As dequantizing a 4-bit value, in a tile or whole.
    pub dequantize: f64,
    /// As writing and reading back a byte of a matrix that is dequantized whole.
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
            // a tile is dequantized in the second-level cache from half a byte a value; what is held whole is written to
            // memory once and read twice
            true => Self { dequantize: 200.0, held: 495.0, byte: 165.0, start: 4e9 },
            false => Self { dequantize: 60.0, held: 40.0, byte: 8.0, start: 1e6 },
        }
    }
}

#[cfg(test)]
#[path = "work_tests.rs"]
mod tests;
