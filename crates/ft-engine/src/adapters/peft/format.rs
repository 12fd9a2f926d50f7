//! Conventions of PEFT's files.

use ft_recipe::{LoraSpec, Quantize};
use serde_json::json;

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
/// score head's outputs.
pub fn metadata(quantize: Quantize, labels: Option<&[String]>) -> Vec<(&'static str, String)> {
    let base = (quantize != Quantize::None).then(|| (BASE_QUANTIZE, quantize.word().to_string()));
    let labels = labels.map(|labels| (LABELS, json!(labels).to_string()));
    std::iter::once(("format", "pt".to_string())).chain(base).chain(labels).collect()
}
