//! Textbook estimate: bytes of model and optimizer states, without activations and buffers.
//!
//! Adam in mixed precision takes 16 bytes per trained parameter: bf16 weight 2, gradient 2, f32 master 4,
//! two f32 moments 8 (Rajbhandari et al., "ZeRO", 2020). The ZeRO stages shard the optimizer states, then
//! gradients, then weights. A frozen parameter takes 2 bytes, or 4.127 bits in NF4 with double
//! quantization (Dettmers et al., "QLoRA", 2023: 4 + 8 / 64 + 32 / (64 * 256) bits).

use super::states::optimizer_bytes;
use ft_engine::adapters::{Choice, Selection, TrainedPart};
use ft_engine::model::modules::{Group, Kind};
use ft_engine::params::build::ghost::is_quantized;
use ft_recipe::{Method, Optimizer, Parallel, Quantize};
use serde::Serialize;

/// Bits per NF4 parameter: 64 values a block, double quantization over 256 blocks.
pub const NF4_BITS: f64 = 4.0 + 8.0 / 64.0 + 32.0 / (64.0 * 256.0);

/// Bits per MXFP4 parameter: 32 values share an 8-bit power of two.
pub const MXFP4_BITS: f64 = 4.0 + 8.0 / 32.0;

/// Bytes on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Theory {
    /// bf16 weights that train.
    pub weights: u64,
    /// bf16 gradients.
    pub gradients: u64,
    /// f32 master weights; 0 if the recipe has none.
    pub master: u64,
    pub moments: u64,
    /// Sum of the four.
    pub total: u64,
    /// bf16, NF4 or MXFP4 weights of frozen parameters.
    pub frozen: u64,
}

impl Theory {
    /// Estimates a module selection, sharded as `p` says.
    pub fn new(s: &Selection, quantize: Quantize, o: &Optimizer, p: &Parallel) -> Self {
        let trained: u64 = s.parts().iter().map(|t| t.elements() as u64).sum();
        let head = s.modules.iter().find(|(m, _)| m.group == Group::Head).map(|(_, c)| *c);
        let full = |c: &Choice| matches!(c, Choice::Full { .. });
        let (mut plain, mut bits) = (0u64, 0f64);
        for (m, c) in s.with_weights() {
            if full(c) || (s.tied && m.group == Group::Embedding && head.as_ref().is_some_and(full)) {
                continue;
            }
            let bias = match m.kind {
                Kind::Linear { .. } => m.bias().unwrap_or(0) as u64,
                _ => 0,
            };
            let n = m.weight_values() as u64;
            if is_quantized(m, c, quantize) {
                bits += n as f64 * if m.is_mxfp4() { MXFP4_BITS } else { NF4_BITS };
                plain += bias;
            } else {
                plain += n + bias;
            }
        }
        let ranks = |stage: u8| if p.zero >= stage { (p.data * p.context) as u64 } else { 1 };
        let model = (p.tensor * p.pipeline) as u64;
        let each = |bytes: u64, stage: u8| bytes.div_ceil(ranks(stage) * model);
        let kept = |t: &&TrainedPart<'_>| o.keeps_master(false) || t.part.method() == Method::Lora;
        let kept: u64 = s.parts().iter().filter(kept).map(|t| t.elements() as u64).sum();
        let moments: u64 = match o.name {
            name if name.projects() => s.parts().iter().map(|t| optimizer_bytes(o, t, s.layers)).sum(),
            name => trained * if name.eight_bit() { 2 } else { 8 },
        };
        let frozen = 2 * plain + (bits / 8.0).round() as u64;
        let mut t = Self {
            weights: each(2 * trained, 3),
            gradients: each(2 * trained, 2),
            master: each(4 * kept, 1),
            moments: each(moments, 1),
            total: 0,
            frozen: each(frozen, 3),
        };
        t.total = t.weights + t.gradients + t.master + t.moments;
        t
    }
}
