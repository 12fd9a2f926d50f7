//! `config.json` of transformers 4 and 5, read into one shape.
//!
//! A key that changes the numbers and is not supported is refused by name. A key that `ft` has never heard
//! of is reported, so that nothing is ignored in silence.

mod keys;
mod rules;
#[cfg(test)]
mod tests;

pub use keys::Keys;

use super::family::{Bias, Family, find};
use super::rope::Rope;
use super::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;

/// What the engine needs to know of a model.
#[derive(Clone, Debug)]
pub struct Config {
    /// Row of the family table.
    pub family: &'static Family,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Inner width of dense feed-forward layers.
    pub intermediate: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// RMSNorm's epsilon.
    pub eps: f64,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Rotary embedding.
    pub rope: Rope,
    /// Longest sequence the config names.
    pub max_positions: usize,
    /// Sliding window of each layer.
    pub windows: Vec<Option<usize>>,
    /// Biases of q, k, v; of o; of the feed-forward linears.
    pub biases: Biases,
    /// Experts, in a mixture model.
    pub moe: Option<Moe>,
    /// Whether the checkpoint holds 4-bit weights, as bitsandbytes stores them.
    pub four_bit: bool,
    /// Keys that `ft` does not know and leaves alone.
    pub unknown: Vec<String>,
    /// The file as it was read, with overrides applied.
    pub raw: Map<String, Value>,
}

/// Which linears have a bias.
#[derive(Clone, Copy, Debug, Default)]
pub struct Biases {
    /// Queries, keys and values.
    pub qkv: bool,
    /// The attention's output.
    pub o: bool,
    /// Feed-forward linears.
    pub mlp: bool,
}

/// What a mixture model says about its experts.
#[derive(Clone, Debug)]
pub struct Moe {
    /// Experts a layer.
    pub experts: usize,
    /// Experts a token.
    pub top_k: usize,
    /// Inner width of an expert.
    pub width: usize,
    /// Whether the chosen gates are scaled to sum to one.
    pub normalise: bool,
    /// Whether each layer has experts (else it is dense).
    pub sparse: Vec<bool>,
    /// Inner width of the expert that every token goes through; 0 where there is none.
    pub shared: usize,
}

impl Config {
    /// Reads `config.json` of a model folder; `overrides` replaces its keys.
    ///
    /// # Errors
    /// A missing or malformed file, an unknown architecture, a key that is missing, out of range or not
    /// supported: each named.
    pub fn load(dir: &Path, overrides: &Map<String, Value>) -> Result<Self> {
        let path = dir.join("config.json");
        let file = path.display().to_string();
        let bytes = crate::store::read_plain(&path, crate::store::LARGEST)
            .map_err(|e| Error::Read { file: file.clone(), source: e })?;
        let text = std::str::from_utf8(&bytes).map_err(|e| Error::Syntax {
            file: file.clone(),
            why: format!("not UTF-8 at byte {}", e.valid_up_to()),
        })?;
        let value: Value = serde_json::from_str(text)
            .map_err(|e| Error::Syntax { file: file.clone(), why: e.to_string() })?;
        let Value::Object(mut raw) = value else {
            return Err(Error::Syntax { file, why: "not a JSON object".into() });
        };
        raw.extend(overrides.iter().map(|(k, v)| (k.clone(), v.clone())));
        Self::parse(&file, raw)
    }

    /// The config of a JSON object; `file` names it in errors.
    pub fn parse(file: &str, raw: Map<String, Value>) -> Result<Self> {
        let keys = Keys::new(file, &raw);
        let model_type = keys.string("model_type")?.unwrap_or_default();
        let Some(family) = find(model_type) else {
            return Err(Error::Architecture {
                file: file.into(),
                found: if model_type.is_empty() { "no model_type".into() } else { model_type.into() },
                known: super::family::FAMILIES.iter().map(|f| f.model_type).collect::<Vec<_>>().join(", "),
            });
        };
        if let Some(a) = raw.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str)
            && a != family.architecture
        {
            return Err(
                keys.bad("architectures", format!("{a}; {model_type} is built as {}", family.architecture))
            );
        }
        keys.refuse_unsupported(family)?;
        let hidden = keys.size("hidden_size")?;
        let layers = keys.size("num_hidden_layers")?;
        let heads = keys.size("num_attention_heads")?;
        let kv_heads = keys.count("num_key_value_heads")?.unwrap_or(heads);
        if kv_heads == 0 || heads % kv_heads != 0 {
            return Err(keys
                .bad("num_key_value_heads", format!("{kv_heads}; {heads} heads must be a multiple of it")));
        }
        let head_dim = match keys.count("head_dim")?.or(family.default_head_dim) {
            Some(d) => d,
            None if hidden % heads == 0 => hidden / heads,
            None => {
                return Err(keys
                    .bad("hidden_size", format!("{hidden}, no multiple of {heads} heads, and no head_dim")));
            }
        };
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(keys.bad("head_dim", format!("{head_dim}; rotary embedding needs an even number")));
        }
        let max_positions = keys.count("max_position_embeddings")?.unwrap_or(2048);
        let bias = |b: Bias| -> Result<bool> {
            match b {
                Bias::Never => Ok(false),
                Bias::Always => Ok(true),
                Bias::Key(k) => Ok(keys.flag(k)?.unwrap_or(false)),
                Bias::Unless(k) => Ok(keys.flag(k)?.unwrap_or(true)),
            }
        };
        let biases =
            Biases { qkv: bias(family.qkv_bias)?, o: bias(family.o_bias)?, mlp: bias(family.mlp_bias)? };
        let moe = keys.moe(family, layers)?;
        let intermediate = match &moe {
            Some(m) if m.sparse.iter().all(|s| *s) => keys.count("intermediate_size")?.unwrap_or(m.width),
            _ => keys.size("intermediate_size")?,
        };
        Ok(Self {
            family,
            hidden,
            intermediate,
            layers,
            heads,
            kv_heads,
            head_dim,
            vocab: keys.size("vocab_size")?,
            eps: keys.number("rms_norm_eps")?.unwrap_or(family.default_eps),
            tied: keys.flag("tie_word_embeddings")?.unwrap_or(false),
            rope: Rope::parse(&keys, family.default_theta, max_positions)?,
            max_positions,
            windows: keys.windows(family, layers)?,
            biases,
            moe,
            four_bit: keys.four_bit()?,
            unknown: raw
                .keys()
                .filter(|k| {
                    let k = k.as_str();
                    !rules::knows(k)
                })
                .cloned()
                .collect(),
            raw,
        })
    }
}
