//! Cost model of a step: FLOPs, and all other time expressed in equivalent FLOPs.
//!
//! The FLOPs of matrix products follow from the token count. The search can save the rest: 4-bit weights are
//! dequantized once per product or once per visit; a product reads (and on the CPU packs) the weights regardless of row
//! count; elementwise operations move bytes; attention runs at its own rate; each operation has a launch cost;
//! offloaded inputs cross the bus. [`CostModel`] converts all to FLOPs of a large product. The sum assumes no overlap,
//! except for transfers.

use super::probe::CardRates;
use super::rates;
use crate::host::{Datasheet, datasheet_of};
use ft_engine::walk::Inputs;
use ft_kernels::Machine;
use ft_kernels::ledger::Cost;

/// Time of a product of 8-bit floats with casts, as a share of the time in bf16: of layers of an 8B model in 4 bits,
/// 4,096 tokens, on an H200.
const FP8: f64 = 0.78;

/// FLOPs a second of the delta rule, a serial walk over the chunks: of a layer of Qwen3.5-9B, 4,096 tokens, recomputed,
/// on an H200. Other cards are assumed to reach it.
const DELTA: f64 = 60e12;
/// Time of a FLOP of the delta rule on a CPU, as a multiple of a large product's: `benches/delta.rs`, two cores.
const CPU_DELTA: f64 = 11.0;

/// Work of one micro-batch, in FLOPs of a large product.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// FLOPs of the forward pass.
    pub forward: f64,
    /// FLOPs of recomputed layers.
    pub recompute: f64,
    /// FLOPs of the backward pass.
    pub backward: f64,
    /// FLOPs of the head, included in `forward` and `backward`.
    pub head: [f64; 2],
    /// Extra time of the FLOPs of attention, of the delta rule and of grouped products.
    pub attention: f64,
    /// Time saved by products of 8-bit floats, negative.
    pub fp8: f64,
    /// Time of 4-bit dequantization.
    pub dequantize: f64,
    /// Memory traffic of operations other than products.
    pub moved: f64,
    /// Weight reads and operation launches.
    pub fixed: f64,
    /// Stalls on inputs in transfer to or from the host.
    pub waiting: f64,
}

impl Work {
    /// From the costs of forward, recompute and backward.
    pub fn of(costs: [Cost; 3], b: CostModel) -> Self {
        let mut all = Cost::default();
        costs.iter().for_each(|c| all.add(*c, 1.0));
        let [forward, recompute, backward] = costs;
        Self {
            forward: forward.flops,
            recompute: recompute.flops,
            backward: backward.flops,
            head: [0.0; 2],
            attention: (forward.attention + recompute.attention) * (b.attention[0] - 1.0)
                + backward.attention * (b.attention[1] - 1.0)
                + all.delta * (b.delta - 1.0)
                + all.grouped * (b.grouped - 1.0),
            fp8: all.fp8 * (b.fp8 - 1.0),
            dequantize: all.dequantized * b.dequantize + all.held * b.held,
            moved: all.moved * b.moved,
            fixed: all.read * b.byte + all.started * b.start,
            waiting: 0.0,
        }
    }

    /// Total FLOPs.
    pub fn flops(&self) -> f64 {
        self.forward + self.recompute + self.backward
    }

    /// Total work, proportional to time.
    pub fn total(&self) -> f64 {
        self.flops() + self.attention + self.fp8 + self.dequantize + self.moved + self.fixed + self.waiting
    }
}

/// Equivalent FLOPs of other operations on a kind of machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Per attention FLOP, forward and backward.
    pub attention: [f64; 2],
    /// Per FLOP of the delta rule.
    pub delta: f64,
    /// Per FLOP of grouped products.
    pub grouped: f64,
    /// Per FLOP of products of 8-bit floats.
    pub fp8: f64,
    /// Per 4-bit value dequantized.
    pub dequantize: f64,
    /// Per byte of a fully dequantized matrix, written once and read back.
    pub held: f64,
    /// Per byte moved by operations other than products.
    pub moved: f64,
    /// Per weight byte read by a product.
    pub byte: f64,
    /// Per operation launched.
    pub start: f64,
    /// Per byte transferred to or from the host: page-locked, and pageable.
    pub crossing: [f64; 2],
}

impl CostModel {
    /// CPU values are measured (`docs/lab/cpu-speed.md`). CUDA values come from the probe of the card
    /// ([`Self::of_probe`]). Without one they are estimates, by the data sheet of the card if known
    /// ([`Self::of_datasheet`]), else of an H200 (790 TFLOP/s in bf16, 4.8 TB/s) with design rates of 350 and 265
    /// TFLOP/s for the attention kernels. On devices with slower products, transfers cost less than stated there.
    pub fn of(m: Machine) -> Self {
        if let Some(probe) = rates::probe_of(m) {
            return Self::of_probe(probe.rates);
        }
        match (m.cuda, m.card.and_then(datasheet_of)) {
            (true, Some(sheet)) => Self::of_datasheet(sheet),
            // a tile is dequantized in L2 from half a byte a value; a full matrix is written to memory
            // once and read twice
            (true, None) => Self {
                attention: [2.3, 3.0],
                delta: 790e12 / DELTA,
                grouped: 1.0,
                fp8: FP8,
                dequantize: 200.0,
                held: 495.0,
                moved: 165.0,
                byte: 165.0,
                start: 4e9,
                crossing: [32e3, 64e3],
            },
            (false, _) => Self {
                attention: [2.0, 2.0],
                delta: CPU_DELTA,
                grouped: 1.0,
                fp8: 1.0,
                dequantize: 60.0,
                held: 40.0,
                moved: 24.0,
                byte: 8.0,
                start: 1e6,
                crossing: [0.0; 2],
            },
        }
    }

    /// From measured rates. A matrix dequantized as a whole is written once and read twice at the rate of a copy.
    fn of_probe(r: CardRates) -> Self {
        let byte = r.products / r.copy;
        Self {
            attention: r.attention.map(|rate| r.products / rate),
            delta: r.products / DELTA,
            grouped: r.products / r.grouped,
            fp8: r.fp8.unwrap_or(1.0),
            dequantize: r.products / r.dequantize,
            held: 3.0 * byte,
            moved: byte,
            byte,
            start: r.products * r.launch,
            crossing: r.crossing.map(|rate| r.products / rate),
        }
    }

    /// Estimates from a data sheet: products and memory at their usual share of it, a dequantized value at half a byte
    /// read and a bf16 value written, or 1.1 picoseconds, 3 microseconds a launch, PCIe 4 at 25 GB/s (half for pageable
    /// memory, copied through a driver buffer). Attention and grouped products use `mma.sync`: they keep up with other
    /// products by it, and stay behind `wgmma`, as measured on an H200 (2026-11-26).
    fn of_datasheet(sheet: Datasheet) -> Self {
        let products = rates::of_products(sheet);
        let byte = products / (sheet.memory * 1e12 * rates::MEMORY_SHARE);
        Self {
            attention: if sheet.warp_groups { [2.6, 3.8] } else { [1.0, 1.5] },
            delta: products / DELTA,
            fp8: FP8,
            grouped: if sheet.warp_groups { 4.2 } else { 1.5 },
            dequantize: (2.5 * byte).max(products * 1.1e-12),
            held: 3.0 * byte,
            moved: byte,
            byte,
            start: products * 3e-6,
            crossing: [products / 25e9, products / 12.5e9],
        }
    }

    /// Work of an update of `values` values: a gradient, a value and two moments are read, the latter three written,
    /// and the gradient is set to 0 for the next step and squared for the norm.
    pub fn update(&self, values: u64) -> f64 {
        values as f64 * 9.0 * 4.0 * self.moved
    }

    /// Stall of a visit during a transfer of `bytes`. Page-locked transfers overlap with the visit;
    /// pageable ones block.
    pub fn waiting(&self, bytes: u64, inputs: Inputs, visit: Work) -> f64 {
        match inputs.pin {
            true => (bytes as f64 * self.crossing[0] - visit.total()).max(0.0),
            false => bytes as f64 * self.crossing[1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::probe;

    #[test]
    fn the_cost_model_uses_measured_rates() {
        let card = probe::named("a card of the cost model");
        let m = Machine { cuda: true, width: 2, stored: 2, threads: 1, card: Some(card), fp8: false };
        assert_eq!(CostModel::of(m), CostModel::of(Machine { card: None, ..m }));
        probe::take(card, probe::example());
        let want = CostModel {
            attention: [2.0, 4.0],
            delta: 100e12 / DELTA,
            grouped: 5.0,
            fp8: 1.0,
            dequantize: 100.0,
            held: 300.0,
            moved: 100.0,
            byte: 100.0,
            start: 5e8,
            crossing: [5e3, 1e4],
        };
        let got = CostModel::of(m);
        assert!((got.start / want.start - 1.0).abs() < 1e-12);
        assert_eq!(CostModel { start: want.start, ..got }, want);
    }
}
