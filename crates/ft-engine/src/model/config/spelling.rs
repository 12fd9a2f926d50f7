//! Spelling of a checkpoint's tensors: the text model within a vision checkpoint, and parts that `ft` does not compute.

use super::types::Config;
use crate::files::TensorFiles;
use ft_base::store::{SINGLE, index};
use std::path::Path;

/// Prefixes of a text model: alone; within a vision checkpoint of transformers 5; as released before it.
const BODIES: [&str; 3] = ["model", "model.language_model", "language_model.model"];

/// Components of the names of vision and audio towers, and of their projectors, which `ft` does not compute.
pub const TOWERS: [&str; 7] = [
    "visual",
    "vision_model",
    "vision_tower",
    "multi_modal_projector",
    "audio_tower",
    "embed_vision",
    "embed_audio",
];

/// The head for several tokens at once, which `ft` does not compute, and a constant.
const APART: [&str; 2] = ["mtp", LAYER_SCALAR];

/// Name of the factor on a layer's output, a buffer in transformers: computed, and never trained.
pub(super) const LAYER_SCALAR: &str = "layer_scalar";

/// Whether a tensor belongs to a part that `ft` does not train. Such tensors pass through unchanged.
fn is_apart(tensor: &str) -> bool {
    tensor.split('.').any(|part| TOWERS.contains(&part) || APART.contains(&part))
}

/// Prefix of a text model by its config alone.
pub(super) fn default_body(nested: bool) -> &'static str {
    if nested { BODIES[1] } else { BODIES[0] }
}

impl Config {
    /// Whether a tensor passes through unchanged: as `is_apart`, or projections of keys and values of a layer that
    /// uses those of an earlier one.
    pub fn passes(&self, tensor: &str) -> bool {
        is_apart(tensor) || self.is_unused(tensor).unwrap_or(false)
    }

    fn is_unused(&self, tensor: &str) -> Option<bool> {
        const UNUSED: [&str; 4] = ["k_proj", "v_proj", "k_norm", "v_norm"];
        let (layer, rest) = tensor.strip_prefix(self.body)?.strip_prefix(".layers.")?.split_once('.')?;
        let (name, _) = rest.strip_prefix("self_attn.")?.split_once('.')?;
        let attention = self.attention.get(layer.parse::<usize>().ok()?)?;
        Some(attention.producer().is_some() && UNUSED.contains(&name))
    }

    /// Name of the embedding.
    pub fn embedding_name(&self) -> String {
        format!("{}.embed_tokens", self.body)
    }

    /// Name of the vocabulary's head.
    pub fn vocabulary_name(&self) -> &'static str {
        if self.body == BODIES[2] { "language_model.lm_head" } else { "lm_head" }
    }

    /// The same config with the prefix of the weights in `dir`, if there are any.
    pub(super) fn spelled_as_in(mut self, dir: &Path) -> Self {
        let exists = |file: &str| dir.join(file).is_file();
        let names: Vec<String> = if exists(SINGLE) {
            let files = TensorFiles::open_file(&dir.join(SINGLE));
            files.map(|f| f.names().map(String::from).collect()).unwrap_or_default()
        } else if exists(index::INDEX) {
            index::read(dir, index::INDEX).map(|map| map.into_keys().collect()).unwrap_or_default()
        } else {
            Vec::new()
        };
        let holds = |body: &&str| names.iter().any(|n| *n == format!("{body}.embed_tokens.weight"));
        self.body = BODIES.into_iter().find(|b| holds(b)).unwrap_or(self.body);
        self
    }
}
