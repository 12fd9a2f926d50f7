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
use ft_base::store::json::{object, short};
use serde_json::{Map, Value};
use std::path::Path;

/// Most decoder layers.
const LAYERS: usize = 1024;
/// Most experts of a layer.
const EXPERTS: usize = 16_384;
/// Most experts of all layers.
const ALL_EXPERTS: usize = 65_536;
/// Widest residual stream.
const HIDDEN: usize = 1 << 20;
/// Widest feed-forward layer or expert.
const INNER: usize = 1 << 22;
/// Most heads, and most channels of a head.
const HEADS: usize = 4096;
/// Most tokens of a vocabulary.
const VOCAB: usize = 1 << 26;
/// Most positions.
const POSITIONS: usize = 1 << 30;
/// Most parameters: bytes and operations that are counted from them fit 64 bits.
const PARAMETERS: u128 = 1 << 46;
/// Most values that all layers together compute of one token.
const VALUES: u128 = 1 << 28;

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
    /// Standard deviation of random weights.
    pub initializer_range: f64,
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
    /// Bytes of a value of a matrix in the published checkpoint.
    pub fn stored_width(&self) -> u64 {
        let named = ["dtype", "torch_dtype"].iter().find_map(|k| self.raw.get(*k)?.as_str());
        if named == Some("float32") { 4 } else { 2 }
    }

    /// Reads `config.json` of a model folder; `overrides` replaces its keys.
    ///
    /// # Errors
    /// A missing or malformed file, an unknown architecture, a key that is missing, out of range or not
    /// supported: each named.
    pub fn load(dir: &Path, overrides: &Map<String, Value>) -> Result<Self> {
        let path = dir.join("config.json");
        let file = path.display().to_string();
        let bytes = ft_base::store::read_plain(&path, ft_base::store::LARGEST)
            .map_err(|e| Error::Read { file: file.clone(), source: e })?;
        let text = std::str::from_utf8(&bytes).map_err(|e| Error::Syntax {
            file: file.clone(),
            why: format!("not UTF-8 at byte {}", e.valid_up_to()),
        })?;
        let raw = object(text).map_err(|why| Error::Syntax { file: file.clone(), why })?;
        Self::overridden(&file, raw, overrides)
    }

    /// The config of a JSON object, of which `overrides` replaces keys; `file` names it in errors.
    ///
    /// # Errors
    /// As [`Config::load`]; of a key that an override has set, the error says so.
    pub fn overridden(
        file: &str,
        mut raw: Map<String, Value>,
        overrides: &Map<String, Value>,
    ) -> Result<Self> {
        raw.extend(overrides.iter().map(|(k, v)| (k.clone(), v.clone())));
        Self::parse(file, raw).map_err(|e| match e {
            Error::Key { file, key, why }
                if overrides.contains_key(key.split('.').next().unwrap_or(&key)) =>
            {
                let why = format!("{why}\n  hint: the value is model.override's");
                Error::Key { file, key, why }
            }
            e => e,
        })
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
        let hidden = keys.size("hidden_size", HIDDEN)?;
        let layers = keys.size("num_hidden_layers", LAYERS)?;
        let heads = keys.size("num_attention_heads", HEADS)?;
        let kv_heads = keys.some("num_key_value_heads", HEADS)?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            return Err(keys
                .bad("num_key_value_heads", format!("{kv_heads}; {heads} heads must be a multiple of it")));
        }
        let head_dim = match keys.some("head_dim", HEADS)?.or(family.default_head_dim) {
            Some(d) => d,
            None if hidden % heads == 0 => hidden / heads,
            None => {
                return Err(keys
                    .bad("hidden_size", format!("{hidden}, no multiple of {heads} heads, and no head_dim")));
            }
        };
        if head_dim == 0 || head_dim % 2 != 0 || head_dim > HEADS {
            let why = format!("{head_dim}; rotary embedding needs an even number, up to {HEADS}");
            return Err(keys.bad("head_dim", why));
        }
        let max_positions = keys.some("max_position_embeddings", POSITIONS)?.unwrap_or(2048);
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
            Some(m) if m.sparse.iter().all(|s| *s) => {
                keys.some("intermediate_size", INNER)?.unwrap_or(m.width)
            }
            _ => keys.size("intermediate_size", INNER)?,
        };
        let config = Self {
            family,
            hidden,
            intermediate,
            layers,
            heads,
            kv_heads,
            head_dim,
            vocab: keys.size("vocab_size", VOCAB)?,
            eps: keys.number("rms_norm_eps", 1e-30..=1.0)?.unwrap_or(family.default_eps),
            tied: keys.flag("tie_word_embeddings")?.unwrap_or(false),
            rope: Rope::parse(&keys, family.default_theta, max_positions)?,
            max_positions,
            windows: keys.windows(family, layers)?,
            biases,
            moe,
            initializer_range: keys.number("initializer_range", 1e-30..=1e3)?.unwrap_or(0.02),
            four_bit: keys.four_bit()?,
            unknown: keys.unknown(),
            raw: Map::new(),
        };
        keys.token_ids(config.vocab)?;
        config.check_size(&keys)?;
        Ok(Self { raw, ..config })
    }

    /// Refuses what no machine can hold, whose bytes 64 bits might not count: sizes that are right one by one.
    fn check_size(&self, keys: &Keys<'_>) -> Result<()> {
        let of = |n: usize| n as u128;
        let (d, layers) = (of(self.hidden), of(self.layers));
        let inner = of(self.heads + 2 * self.kv_heads) * of(self.head_dim);
        let (sparse, width, all, used, shared) = match &self.moe {
            None => (0, 0, 0, 0, 0),
            Some(m) => {
                let sparse = m.sparse.iter().filter(|s| **s).count();
                if sparse * m.experts > ALL_EXPERTS {
                    let key = self.family.experts.map_or("num_experts", |x| x.count_key);
                    let why = format!(
                        "{} experts in each of {sparse} layers; ft takes up to {ALL_EXPERTS} in all",
                        m.experts
                    );
                    return Err(keys.bad(key, why));
                }
                (of(sparse), of(m.width), of(m.experts), of(m.top_k), of(m.shared))
            }
        };
        let dense = (layers - sparse) * of(self.intermediate);
        let parts = [
            ("vocab_size", 2 * of(self.vocab) * d, 0),
            ("num_attention_heads", 2 * layers * inner * d, layers * 2 * inner),
            ("intermediate_size", 3 * dense * d, 3 * dense),
            (
                "moe_intermediate_size",
                3 * sparse * (all * width + shared) * d,
                3 * sparse * (used * width + shared),
            ),
            ("num_hidden_layers", 4 * layers * d, 8 * layers * d),
        ];
        let parameters: u128 = parts.iter().map(|p| p.1).sum();
        let values: u128 = parts.iter().map(|p| p.2).sum();
        let (key, what, n, most) = if parameters > PARAMETERS {
            (parts.iter().max_by_key(|p| p.1), "parameters", parameters, PARAMETERS)
        } else if values > VALUES {
            (parts.iter().max_by_key(|p| p.2), "values of a token in all layers", values, VALUES)
        } else {
            return Ok(());
        };
        let key = key.map_or("hidden_size", |p| p.0);
        let key = if keys.raw.contains_key(key) { key } else { "intermediate_size" };
        let shown = keys.raw.get(key).map(short).unwrap_or_default();
        let why = format!("{shown}; with the other sizes this makes {n} {what}, and ft takes up to {most}");
        Err(keys.bad(key, why))
    }
}
