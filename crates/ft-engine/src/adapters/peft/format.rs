//! Conventions of PEFT's files.

use crate::model::current_name;
use ft_recipe::{LoraSpec, Quantize};
use std::borrow::Cow;

/// Prefix of all keys in an adapter file.
pub const PREFIX: &str = "base_model.model.";

/// Metadata key in `adapter_model.safetensors` for `model.quantize` of the run. Readers of adapters ignore
/// metadata but warn about unknown keys in `adapter_config.json`.
pub(super) const BASE_QUANTIZE: &str = "ft.base_quantize";

/// Metadata key for the names of a score head's outputs, a JSON list. PEFT has no place for them.
pub(super) const LABELS: &str = "ft.labels";

/// A name with the module paths of transformers 5, as [`current_name`], with or without [`PREFIX`].
pub(super) fn current(name: &str) -> Cow<'_, str> {
    let (prefix, own) = split(name);
    current_name(own).map_or(Cow::Borrowed(name), |new| Cow::Owned(format!("{prefix}{new}")))
}

/// A name as in the text model alone, outside of a vision checkpoint, with or without [`PREFIX`].
pub(super) fn alone(name: &str) -> Cow<'_, str> {
    let current = current(name);
    let (prefix, own) = split(&current);
    match own.strip_prefix("model.language_model.") {
        Some(rest) => Cow::Owned(format!("{prefix}model.{rest}")),
        None => current,
    }
}

/// [`PREFIX`], or nothing without it, and the rest of a name.
fn split(name: &str) -> (&str, &str) {
    name.strip_prefix(PREFIX).map_or(("", name), |own| (PREFIX, own))
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_release_are_those_of_transformers_5() {
        for (name, want, text) in [
            ("language_model.model.layers.0.mlp", "model.language_model.layers.0.mlp", "model.layers.0.mlp"),
            (
                "base_model.model.language_model.model.norm",
                "base_model.model.model.language_model.norm",
                "base_model.model.model.norm",
            ),
            (
                "base_model.model.language_model.lm_head.weight",
                "base_model.model.lm_head.weight",
                "base_model.model.lm_head.weight",
            ),
            ("model.language_model.layers.0.mlp", "model.language_model.layers.0.mlp", "model.layers.0.mlp"),
            ("model.layers.0.mlp", "model.layers.0.mlp", "model.layers.0.mlp"),
        ] {
            assert_eq!((&*current(name), &*alone(name)), (want, text));
        }
    }
}
