//! Conventions of PEFT's files.

use ft_recipe::{LoraSpec, Quantize};

/// Prefix of all keys in an adapter file.
pub const PREFIX: &str = "base_model.model.";

/// Metadata key in `adapter_model.safetensors` for `model.quantize` of the run. Readers of adapters ignore
/// metadata but warn about unknown keys in `adapter_config.json`.
pub(super) const BASE_QUANTIZE: &str = "ft.base_quantize";

/// Metadata key for the names of a score head's outputs, a JSON list. PEFT has no place for them.
pub(super) const LABELS: &str = "ft.labels";

/// LoRA scale: alpha / rank, or alpha / sqrt(rank) with rsLoRA.
pub fn scale(s: &LoraSpec) -> f64 {
    if s.rslora { s.alpha / (s.rank as f64).sqrt() } else { s.alpha / s.rank as f64 }
}

/// Metadata of an adapter file: the format required by transformers, [`super::Adapter::quantize`], and the names of a
/// score head's outputs, a JSON list.
pub fn metadata(quantize: Quantize, labels: Option<&str>) -> Vec<(&'static str, &str)> {
    let base = (quantize != Quantize::None).then(|| (BASE_QUANTIZE, quantize.word()));
    let labels = labels.map(|labels| (LABELS, labels));
    std::iter::once(("format", "pt")).chain(base).chain(labels).collect()
}
