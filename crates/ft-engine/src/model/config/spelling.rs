//! Spelling of a checkpoint's tensors: the text model within a vision checkpoint, and parts that `ft` does not compute.

use super::types::Config;
use crate::files::TensorFiles;
use ft_base::store::{SINGLE, index};
use std::path::Path;

/// Prefixes of a text model: alone; within a vision checkpoint of transformers 5; as released before it.
const BODIES: [&str; 3] = ["model", "model.language_model", "language_model.model"];

/// Components of the names of parts that `ft` does not compute: vision and audio towers, their projectors, and the
/// head for several tokens at once.
const APART: [&str; 8] = [
    "visual",
    "vision_model",
    "vision_tower",
    "multi_modal_projector",
    "audio_tower",
    "embed_vision",
    "embed_audio",
    "mtp",
];

/// Whether a tensor belongs to a part that `ft` does not compute. Such tensors pass through unchanged.
pub fn is_apart(tensor: &str) -> bool {
    tensor.split('.').any(|part| APART.contains(&part))
}

/// Prefix of a text model by its config alone.
pub(super) fn default_body(nested: bool) -> &'static str {
    if nested { BODIES[1] } else { BODIES[0] }
}

impl Config {
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
