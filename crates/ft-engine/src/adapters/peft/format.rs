//! Conventions of PEFT's files.

use ft_recipe::{LoraSpec, Quantize};

/// Prefix of all keys in an adapter file.
pub const PREFIX: &str = "base_model.model.";

/// Metadata key in `adapter_model.safetensors` for `model.quantize` of the run. Readers of adapters ignore
/// metadata but warn about unknown keys in `adapter_config.json`.
pub(super) const BASE_QUANTIZE: &str = "ft.base_quantize";

/// LoRA scale: alpha / rank, or alpha / sqrt(rank) with rsLoRA.
pub fn scale(s: &LoraSpec) -> f64 {
    if s.rslora { s.alpha / (s.rank as f64).sqrt() } else { s.alpha / s.rank as f64 }
}

/// Metadata of an adapter file: the format required by transformers, and [`super::Adapter::quantize`].
pub fn metadata(quantize: Quantize) -> Vec<(&'static str, &'static str)> {
    let base = (quantize != Quantize::None).then(|| (BASE_QUANTIZE, quantize.word()));
    std::iter::once(("format", "pt")).chain(base).collect()
}
