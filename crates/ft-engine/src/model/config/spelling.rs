//! Spelling of a checkpoint's tensors: the text model within a vision checkpoint, and parts not computed by `ft`.

use super::error::Result;
use super::keys::Keys;
use super::parse::TIED;
use super::types::Config;
use crate::files::TensorFiles;
use ft_base::store::{self, SINGLE, index};
use serde_json::{Map, Value};
use std::path::Path;

/// Prefixes of a text model: alone; within a vision checkpoint of transformers 5; as released before it.
const BODIES: [&str; 3] = ["model", "model.language_model", "language_model.model"];

/// Prefix of names of a base model within a model with a head.
const BASE: &str = "model.";

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

/// The head for several tokens at once, not computed by `ft`, and a constant.
const APART: [&str; 2] = ["mtp", LAYER_SCALAR];

/// Name of the factor on a layer's output, a buffer in transformers: computed, and never trained.
pub(super) const LAYER_SCALAR: &str = "layer_scalar";

/// Name in transformers 5 of a tensor or module in a released vision checkpoint: there the text model is below
/// `model.language_model`, and the head at the top. `None` for an equal name.
pub fn current_name(name: &str) -> Option<String> {
    const RELEASED: [(&str, &str); 2] =
        [("language_model.model.", "model.language_model."), ("language_model.lm_head", "lm_head")];
    RELEASED.iter().find_map(|(old, new)| Some(format!("{new}{}", name.strip_prefix(old)?)))
}

/// Whether a tensor belongs to a part never trained by `ft`. Such tensors pass through unchanged.
fn is_apart(tensor: &str) -> bool {
    tensor.split('.').any(|part| TOWERS.contains(&part) || APART.contains(&part))
}

/// Prefix of a text model by its config alone.
pub(super) fn default_body(nested: bool) -> &'static str {
    if nested { BODIES[1] } else { BODIES[0] }
}

impl Config {
    /// Whether a tensor passes through unchanged: as `is_apart`, or key and value projections of a layer using an
    /// earlier layer's.
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

    /// Opens the weights in `dir` under the names of a model with a head, as transformers loads them: files of a base
    /// model lack its prefix, and a tied table may have the name of the head.
    ///
    /// # Errors
    /// As [`TensorFiles::open_model`].
    pub fn open_weights(&self, dir: &Path) -> Result<TensorFiles, store::Error> {
        let mut files = TensorFiles::open_model(dir)?;
        let head = self.vocabulary_name();
        let [embedding, of_head] = [self.embedding_name().as_str(), head].map(|m| format!("{m}.weight"));
        if files.info(&embedding).is_some() {
            return Ok(files);
        }
        if embedding.strip_prefix(BASE).is_some_and(|bare| files.info(bare).is_some()) {
            let is_outside =
                |name: &str| name.split('.').next().is_some_and(|n| [head, APART[0]].contains(&n));
            files.rename(|name| (!is_outside(name)).then(|| format!("{BASE}{name}")));
        } else if self.tied && files.info(&of_head).is_some_and(|i| i.shape == [self.vocab, self.hidden]) {
            files.rename(|name| (name == of_head).then(|| embedding.clone()));
        }
        Ok(files)
    }

    /// The same config with the prefix of the weights in `dir`, if any.
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

    /// The same config, untied if the weights in `dir` have a head unlike the embedding, as in transformers 5; `file`
    /// is the name in errors.
    ///
    /// # Errors
    /// A head tied by `overrides`.
    pub(super) fn untied_as_in(self, dir: &Path, file: &str, overrides: &Map<String, Value>) -> Result<Self> {
        let head = format!("{}.weight", self.vocabulary_name());
        let embedding = format!("{}.weight", self.embedding_name());
        let has_own = |files: TensorFiles| differ(&files, &head, &embedding);
        // Unreadable files are refused when opened for use.
        if !self.tied || !self.open_weights(dir).is_ok_and(has_own) {
            return Ok(self);
        }
        let why = format!("true has no effect, as in transformers: {head} in the file is not {embedding}");
        let is_new = overrides.contains_key(TIED);
        let hint = if is_new { "the value is model.override's" } else { "set it to false in config.json" };
        let note = Keys::new(file, &self.raw).note(TIED, format!("{why}\n  hint: {hint}"), is_new)?;
        let (mut raw, notes) = (self.raw, self.notes.into_iter().chain([note]).collect());
        Self::untie(&mut raw);
        Ok(Self { tied: false, raw, notes, ..self })
    }

    /// Sets the key of a tied head to false, in the text model of a vision checkpoint too.
    pub fn untie(raw: &mut Map<String, Value>) {
        raw.insert(TIED.into(), false.into());
        if let Some(Value::Object(text)) = raw.get_mut(Self::TEXT) {
            text.insert(TIED.into(), false.into());
        }
    }
}

/// Bytes of a tensor compared at a time.
const PIECE: usize = 16 << 20;

/// Whether both tensors exist and differ in dtype, shape or a bit.
fn differ(files: &TensorFiles, a: &str, b: &str) -> bool {
    let (Some(of_a), Some(of_b)) = (files.info(a), files.info(b)) else { return false };
    if of_a.dtype != of_b.dtype || of_a.shape != of_b.shape {
        return true;
    }
    let bytes = of_a.bytes() as usize;
    (0..bytes).step_by(PIECE).any(|first| {
        let part = |name: &str| files.read_part(name, first..bytes.min(first + PIECE));
        matches!((part(a), part(b)), (Ok(a), Ok(b)) if a != b)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::write_file;
    use candle_core::{Device, Tensor};
    use serde_json::json;

    /// transformers loads a base model into one with a head, and ties a table under either of its names.
    #[test]
    fn weights_have_the_names_of_a_model_with_a_head() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let text = |tied: bool| {
            json!({"model_type": "qwen2", "hidden_size": 2, "num_attention_heads": 1,
            "head_dim": 2, "num_key_value_heads": 1, "vocab_size": 3, "tie_word_embeddings": tied})
        };
        let vision = json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}});
        let [head, table] = ["lm_head.weight", "model.embed_tokens.weight"];
        for (raw, held, want) in [
            (text(false), ["embed_tokens.weight", "layers.0.x"], [table, "model.layers.0.x"]),
            (text(true), ["embed_tokens.weight", head], [head, table]),
            (text(true), [head, "model.norm.weight"], [table, "model.norm.weight"]),
            (text(false), [head, "model.norm.weight"], [head, "model.norm.weight"]),
            (text(true), [head, table], [head, table]),
            (
                vision,
                ["language_model.embed_tokens.weight", "vision_tower.x"],
                ["model.language_model.embed_tokens.weight", "model.vision_tower.x"],
            ),
        ] {
            let one = Tensor::zeros((3, 2), candle_core::DType::F32, &Device::Cpu)?;
            let tensors = held.map(|name| (name.to_string(), one.clone()));
            write_file(&dir.path().join(SINGLE), &tensors, &[])?;
            let config = Config::parse("config.json", serde_json::from_value(raw)?)?;
            let files = config.open_weights(dir.path())?;
            assert_eq!(files.names().collect::<Vec<_>>(), want, "{held:?}");
        }
        Ok(())
    }

    /// transformers 5 ties head and embedding only if a file does not have both, or has them alike.
    #[test]
    fn a_head_unlike_the_embedding_unties() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let [whole, of_base, head] = ["model.embed_tokens.weight", "embed_tokens.weight", "lm_head.weight"];
        // more than one piece, and a last value that differs
        let (vocab, hidden) = (PIECE / 8 + 3, 2);
        let raw = json!({"model_type": "qwen2", "hidden_size": hidden, "num_attention_heads": 1, "head_dim": 2,
            "num_key_value_heads": 1, "vocab_size": vocab, "tie_word_embeddings": true});
        std::fs::write(dir.path().join("config.json"), raw.to_string())?;
        let load = |set: Value| -> anyhow::Result<Config> {
            Ok(Config::load(dir.path(), &serde_json::from_value(set)?)?)
        };
        let table = vec![1f32; vocab * hidden];
        let mut other = table.clone();
        other[vocab * hidden - 1] = 1.0 + f32::EPSILON;
        for (embedding, held, is_tied) in [
            (whole, None, true),
            (whole, Some(&table), true),
            (whole, Some(&other), false),
            (of_base, Some(&other), false),
        ] {
            let of = |values: &Vec<f32>| Tensor::from_slice(values, (vocab, hidden), &Device::Cpu);
            let mut tensors = vec![(embedding.to_string(), of(&table)?)];
            if let Some(held) = held {
                tensors.push((head.to_string(), of(held)?));
            }
            write_file(&dir.path().join(SINGLE), &tensors, &[])?;
            let c = load(json!({}))?;
            assert_eq!((c.tied, c.notes.is_empty()), (is_tied, is_tied), "{:?}", c.notes);
            assert_eq!(c.raw["tie_word_embeddings"], json!(is_tied));
            assert!(load(json!({"tie_word_embeddings": false})).is_ok_and(|c| !c.tied && c.notes.is_empty()));
            let e = load(json!({"tie_word_embeddings": true})).err().map(|e| e.to_string());
            assert_eq!(e.is_some_and(|e| e.contains("model.override's")), !is_tied);
        }
        Ok(())
    }
}
