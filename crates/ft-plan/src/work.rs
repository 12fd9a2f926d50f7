//! How much work a step is: its arithmetic, and what else takes time, in the operations that would take as long.
//!
//! Products are what a step is for, and their number is that of its tokens. The rest is what a choice can spare: 4-bit
//! weights are dequantized once a product or once a visit, each product reads (and on the CPU packs) its weights however
//! few rows it has, what is no product reads and writes its values, attention runs at a rate of its own, each operation
//! has to be started, and inputs that wait on the host have to cross. [`Balance`] says how many operations of a product
//! take as long as one of these. All of it is added up: what a device does beside something else, but for the crossing, is
//! not taken into account.

use ft_kernels::Machine;
use ft_kernels::ledger::Cost;
use ft_engine::walk::Inputs;

/// Work of one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Floating-point operations of forward.
    pub forward: f64,
    /// Forward again, of recomputed layers.
    pub recompute: f64,
    /// Backward.
    pub backward: f64,
    /// Of both, what is the head's: forward, backward.
    pub head: [f64; 2],
    /// What attention's operations take longer than those of a large product, in such operations.
    pub attention: f64,
    /// Dequantizing 4-bit weights, in operations that take as long.
    pub dequantize: f64,
    /// Reading and writing values by what is no product, in operations that take as long.
    pub moved: f64,
    /// Reading weights, and starting operations, in operations that take as long.
    pub fixed: f64,
    /// Waiting for inputs that cross to the host or back, in operations that take as long.
    pub waiting: f64,
}

impl Work {
    /// Of what was written down forward, forward again and backward.
    pub fn of(costs: [Cost; 3], b: Balance) -> Self {
        let mut all = Cost::default();
        costs.iter().for_each(|c| all.add(*c, 1.0));
        let [forward, recompute, backward] = costs;
        Self {
            forward: forward.flops,
            recompute: recompute.flops,
            backward: backward.flops,
            head: [0.0; 2],
            attention: (forward.attention + recompute.attention) * (b.attention[0] - 1.0)
                + backward.attention * (b.attention[1] - 1.0),
            dequantize: all.dequantized * b.dequantize + all.held * b.held,
            moved: all.moved * b.moved,
            fixed: all.read * b.byte + all.started * b.start,
            waiting: 0.0,
        }
    }

    /// Floating-point operations.
    pub fn flops(&self) -> f64 {
        self.forward + self.recompute + self.backward
    }

    /// All of it: what is proportional to time.
    pub fn total(&self) -> f64 {
        self.flops() + self.attention + self.dequantize + self.moved + self.fixed + self.waiting
    }
}

/// How many operations of a large product take as long as something else on a kind of machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balance {
    /// As one of attention's, forward and backward.
    pub attention: [f64; 2],
    /// As dequantizing a 4-bit value, in a tile or whole.
    pub dequantize: f64,
    /// As writing and reading back a byte of a matrix that is dequantized whole.
    pub held: f64,
    /// As reading or writing a byte by what is no product.
    pub moved: f64,
    /// As a product's reading a byte of its weights.
    pub byte: f64,
    /// As starting one operation.
    pub start: f64,
    /// As a byte's crossing to the host or back: from page-locked memory, and from other.
    pub crossing: [f64; 2],
}

impl Balance {
    /// Of a kind of machine. Those of the CPU were measured (`benches/RESULTS.md`; attention's and what is moved while others
    /// computed there too). Those of CUDA were not: they follow
    /// from an H200's data sheet (790 TFLOP/s in bf16, 4.8 TB/s), from some microseconds a launch, for attention from 350 and 265
    /// TFLOP/s, for which its kernels were designed, and from a PCIe 4 link of 25 GB/s, or half of that through a buffer
    /// of the driver's. On a device whose products are slower, crossing costs less than this says.
    pub fn of(m: Machine) -> Self {
        match m.cuda {
            // a tile is dequantized in the second-level cache from half a byte a value; what is held whole is written to
            // memory once and read twice
            true => Self {
                attention: [2.3, 3.0],
                dequantize: 200.0,
                held: 495.0,
                moved: 165.0,
                byte: 165.0,
                start: 4e9,
                crossing: [32e3, 64e3],
            },
            false => Self {
                attention: [2.0, 2.0],
                dequantize: 60.0,
                held: 40.0,
                moved: 24.0,
                byte: 8.0,
                start: 1e6,
                crossing: [0.0; 2],
            },
        }
    }

    /// How long the crossing of `bytes` keeps a visit waiting that takes this much itself: what is page-locked crosses
    /// beside it, and for other memory the host waits.
    pub fn waiting(&self, bytes: u64, inputs: Inputs, visit: Work) -> f64 {
        match inputs.pin {
            true => (bytes as f64 * self.crossing[0] - visit.total()).max(0.0),
            false => bytes as f64 * self.crossing[1],
        }
    }
}

#[cfg(test)]
#[path = "work_tests.rs"]
mod tests;
